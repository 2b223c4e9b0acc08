"""Kernels that are forked from a process which has imported the libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fvc_lib.execution.kernel_server import KernelServer
from fvc_lib.execution.papermill_engine import KernelRequest, execute
from fvc_lib.execution.run.task import kernel_environment
from tests.execution.conftest import wait_for, write_notebook

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks kernels")
PARAMETERS = "seed: int = 0\n"
OWN = ["fvc_lib", "fvc_lib.execution", "fvc_lib.execution.kernel_server"]


@pytest.fixture(scope="module")
def server():
    server = KernelServer(kernel_environment(os.environ))
    yield server
    server.close()


def run(folder: Path, server: KernelServer, *cells: str, **environment: str):
    """Run a notebook in a forked kernel; returns how it ended, and the text that it printed."""
    notebook = write_notebook(folder / "notebook.ipynb", cells, PARAMETERS)
    given = {**kernel_environment(os.environ), **environment}
    record, pids = folder / "record.partial.ipynb", []
    request = KernelRequest(record, folder, given, folder / "log", server=server, on_start=pids.append)
    outcome = execute(notebook, {"seed": 3}, request)
    outputs = [output for cell in json.loads(record.read_text())["cells"] for output in cell.get("outputs", [])]
    assert not psutil.pid_exists(pids[0])
    return outcome, "".join(output.get("text", "") for output in outputs)


def test_a_forked_kernel_has_the_libraries_and_nothing_of_this_library(server, tmp_path):
    code = (
        "import neighbour, os, sys\n"
        "print('torch' in sys.modules, [name for name in sys.modules if name.startswith('fvc_lib')])\n"
        "import torch\n"
        "print(seed, torch.get_num_threads(), os.getcwd(), os.environ['FVC_MARK'])\n"
    )
    (tmp_path / "neighbour.py").write_text("")
    outcome, text = run(tmp_path, server, code, OMP_NUM_THREADS="1,2", FVC_MARK="given")
    assert outcome.error is None
    assert not outcome.died
    assert text.splitlines() == [f"True {OWN}", f"3 1 {tmp_path} given"]


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("os._exit(5)", 5)])
def test_the_exit_status_of_a_kernel_that_dies_is_known(server, tmp_path, end, code):
    outcome, _ = run(tmp_path, server, f"import os; {end}")
    assert (outcome.died, outcome.return_code, outcome.never_started) == (True, code, None)


def test_two_forked_kernels_draw_different_numbers(server, tmp_path):
    code = "import numpy, torch; print(numpy.random.random(), torch.rand(1).item())"
    (_, first), (_, second) = (run(tmp_path, server, code) for _ in range(2))
    assert not {*first.split()} & {*second.split()}


def test_a_signal_to_every_process_reaches_the_kernel_alone(server, tmp_path):
    code = (
        "import os, psutil, signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('asked to stop'))\n"
        "watcher = psutil.Process().parent()\n"
        "for process in (watcher.parent(), watcher, psutil.Process()):\n"
        "    process.send_signal(signal.SIGUSR1)\n"
    )
    outcome, text = run(tmp_path, server, code, "print('saved')")
    assert (outcome.error, outcome.died, text) == (None, False, "asked to stop\nsaved\n")
    assert run(tmp_path, server, "print('next')")[1] == "next\n"


def test_without_its_server_a_kernel_is_started_by_itself(tmp_path):
    server = KernelServer(kernel_environment(os.environ))
    server._server.kill()
    server._server.wait()
    outcome, text = run(tmp_path, server, "import sys; print(seed, 'torch' in sys.modules)")
    assert (outcome.error, text) == (None, "3 False\n")
    server.close()


def test_a_killed_runner_takes_its_kernels_and_the_server_with_it(tmp_path):
    write_notebook(tmp_path / "notebook.ipynb", ["import time; time.sleep(600)"], PARAMETERS)
    script = (
        "import os, sys; from pathlib import Path\n"
        "from fvc_lib.execution.kernel_server import KernelServer\n"
        "from fvc_lib.execution.papermill_engine import KernelRequest, execute\n"
        "from fvc_lib.execution.run.task import kernel_environment\n"
        "folder, environment = Path(sys.argv[1]), kernel_environment(os.environ)\n"
        "server = KernelServer(environment)\n"
        "note = lambda pid: (folder / 'pids').write_text(f'{pid} {server._server.pid}')\n"
        "request = KernelRequest(folder / 'r.ipynb', folder, environment, folder / 'log', server, note)\n"
        "execute(folder / 'notebook.ipynb', {}, request)\n"
    )
    runner, pids = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]), tmp_path / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the kernel to start")
    runner.kill()
    runner.wait()
    wait_for(lambda: not any(map(psutil.pid_exists, map(int, pids.read_text().split()))), "kernel and server to end")
