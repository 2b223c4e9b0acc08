"""Exports to a real ``mlflow server``, which keeps the files as well."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fvc_lib.analysis.mlflow import export_run
from tests.analysis.test_mlflow import stored

PATIENCE_SECONDS = 180.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Its address; backed by SQLite, files through the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}",
        "--artifacts-destination", str(tmp_path / "server_artifacts"),
    ]  # fmt: skip
    # Without its job runners: seven processes more, for what is not asked here.
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = tmp_path / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            _wait_for(address, process, log)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too; it is the leader of a group of its own
            process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < end, log.read_text(errors="replace")
            time.sleep(0.2)


@pytest.mark.mlflow
@pytest.mark.slow
def test_a_server_receives_what_a_database_does_and_nothing_twice(server, make_run, tmp_path):
    run = make_run(experiment="it's <b>100%<")
    for _ in range(2):
        export_run(run, tracking_uri=server)
    (on_server,) = stored(server)
    assert any((tmp_path / "server_artifacts").rglob("results.csv"))
    database = f"sqlite:///{tmp_path / 'local' / 'mlflow.db'}"
    (tmp_path / "local").mkdir()
    export_run(run, tracking_uri=database)
    assert stored(database) == [on_server]
