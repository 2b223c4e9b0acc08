"""Rows 12 and 13 in a real training: a log's disk that fills up, and a run folder that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import run_notebooks
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, result_of
from tests.faults.disks import read_only, small_tmpfs


@pytest.mark.fault(12)
def test_training_goes_on_while_the_log_s_disk_is_full_and_says_what_it_lost(tiny, undisturbed, tmp_path, caplog):
    with small_tmpfs(tmp_path / "logs", "256k") as disk:
        with MetricLog(disk.folder / "m.jsonl", run_id="r", fold=0) as log:
            inner, calls = log.log, iter(range(10_000))

            def log_on_a_moody_disk(**line: object) -> None:
                call = next(calls)
                if call == 5:
                    disk.fill()
                if call == 25:
                    disk.make_room()
                inner(**line)

            log.log = log_on_a_moody_disk  # type: ignore[method-assign]
            train_fold(tiny.paths, tiny.config, 0, metric_log=log)
        assert f"{log.lines_lost:,} lines are lost" in caplog.text
    assert log.lines_lost > 0
    log_file = tiny.paths.metrics(STAGE, 0)
    log_file.parent.mkdir()
    log_file.touch()
    assert replace(result_of(tiny.paths), metrics=undisturbed.metrics) == undisturbed


@pytest.fixture
def forwards() -> Iterator[list[torch.nn.Module]]:
    """Every module that computed something."""
    seen: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    yield seen
    handle.remove()


@pytest.mark.fault(13)
def test_a_run_folder_that_cannot_be_written_ends_the_fold_before_its_first_step(tiny, list_log, forwards):
    log = list_log()
    with read_only(tiny.paths.root), pytest.raises((OSError, FvcError), match=r"(?i)read-only|permission denied"):
        train_fold(tiny.paths, tiny.config, 0, metric_log=log)
    assert log.lines == []
    assert forwards == []
    train_fold(tiny.paths, tiny.config, 0, metric_log=log)  # and once it can be written, it runs
    assert forwards


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_command_on_what_cannot_be_written_says_so_and_runs_nothing(tmp_path, monkeypatch):
    runs_dir = tmp_path / "runs"
    run = begin_run(RunConfig(runs_dir=str(runs_dir)), command="test")
    monkeypatch.setenv("FVC_RUNS_DIR", str(runs_dir))
    with read_only(runs_dir):
        for arguments in (["--resume", "latest"], []):
            done = CliRunner().invoke(run_notebooks.main, [*arguments, "--jobs", "1"])  # so no step is tried out
            assert done.exit_code == 1
            assert f"error: {runs_dir}" in done.stderr
            assert "May it be written?" in done.stderr
    assert list_runs(runs_dir) == [run]
    assert not run.notebooks.exists()
