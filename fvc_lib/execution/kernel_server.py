"""Start kernels by forking a process that has already imported the large libraries.

Importing torch, scikit-learn and their like takes two to five seconds, and a run of the default model starts thirteen
kernels. The server imports them once. It imports nothing of this library, so that every kernel runs the code as it is
when the kernel starts.

Each kernel has a watcher, its parent process. The watcher sends the kernel's process id and later its exit status to
the runner (the process that executes the run). If the runner dies, the watcher ends. The kernel notices the end of its
parent, and ends as well.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LIBRARIES = (
    "ipykernel.kernelapp", "numpy", "polars", "pyarrow", "duckdb", "pydantic", "av", "PIL.Image", "jinja2",
    "plotly.graph_objects", "matplotlib.backends.backend_agg", "scipy.stats", "scipy.ndimage", "scipy.optimize",
    "sklearn.linear_model", "sklearn.ensemble", "sklearn.calibration", "torch", "safetensors.torch",
)  # fmt: skip
_WATCH_SECONDS = 0.05
# Without the first entry of sys.path, the working directory, whose files may have names of libraries.
_COMMAND = "import sys; del sys.path[0]; from fvc_lib.execution.kernel_server import main; main(sys.argv[1:])"


class KernelServer:
    """A process that has imported large libraries, and starts Jupyter kernels by forking itself.

    The server process ends when this object is closed or this process ends.

    Args:
        environment: the environment variables of the server process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            self._server = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(descriptor)],
                env=environment,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C does not reach it
            )

    def start(self, request: Path, log: BinaryIO, timeout: float) -> "KernelProcess | None":
        """Start a kernel, and return its process; None if the server has ended or does not answer.

        Args:
            request: JSON file with the kernel's ``arguments``, its working directory ``folder`` and ``environment``;
                removed when the kernel has read it.
            log: open file to which the kernel's output is written.
            timeout: how many seconds to wait for the kernel. The first start takes longer, as the server imports
                libraries first.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(timeout)
        with theirs, suppress(OSError):
            socket.send_fds(self._control, [str(request).encode()], [theirs.fileno(), log.fileno()])
            theirs.close()
            if pid := ours.recv(32):
                ours.settimeout(None)
                return KernelProcess(int(pid), ours)
        ours.close()
        return None

    def close(self) -> None:
        """End the server. Kernels that still run are not affected."""
        self._server.kill()
        self._server.wait()
        self._control.close()


class KernelProcess:
    """A forked kernel, with the attributes and methods of ``subprocess.Popen`` that jupyter_client uses.

    Args:
        pid: process id of the kernel.
        watcher: socket on which the kernel's watcher sends the exit status.

    Attributes:
        returncode: the exit status, which is negative after a signal; None until ``poll`` or ``wait`` has seen the end.
    """

    stdin = stdout = stderr = None

    def __init__(self, pid: int, watcher: socket.socket) -> None:
        self.pid, self._watcher = pid, watcher
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, which is negative after a signal; None while the kernel runs."""
        if self.returncode is None and select.select([self._watcher], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the kernel's end and return its exit status."""
        if self.returncode is None:
            self.returncode = int(self._watcher.recv(32) or -signal.SIGKILL)
            self._watcher.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the signal ``number`` to the kernel, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def main(arguments: Sequence[str]) -> None:
    """Run the server: import large libraries, then fork a kernel for each request that comes over a socket.

    The server ends when the runner (the process that executes the run) closes the socket.

    Args:
        arguments: the number of the socket's file descriptor.
    """
    # A signal to all processes of a job is for the kernels and the runner.
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    # As ipykernel does, but before matplotlib is imported.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in LIBRARIES:
        with suppress(ImportError):  # the installation lacks it, and so do its kernels
            importlib.import_module(name)
    gc.freeze()  # kernels do not write into the memory that they share
    with socket.socket(fileno=int(arguments[0])) as control:
        while True:
            request, files, *_ = socket.recv_fds(control, 4096, 2)
            if not request:
                os._exit(0)
            with warnings.catch_warnings():
                # Python 3.12 warns because polars and pyarrow have threads, which wait and hold nothing.
                warnings.simplefilter("ignore", DeprecationWarning)
                is_watcher = not os.fork()
            if is_watcher:
                break
            for file in files:
                os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel's exit status would be lost
    answer, log = files
    watcher = os.getpid()
    if pid := os.fork():
        os.close(log)
        _watch(pid, socket.socket(fileno=answer))
    os.close(answer)
    for number, handler in before.items():
        signal.signal(number, handler)
    _be_kernel(Path(os.fsdecode(request)), log, watcher)


def _watch(pid: int, runner: socket.socket) -> None:
    """Send a kernel's process id over the socket ``runner``, wait for the kernel's end, and send its exit status.

    Then this process ends. It ends earlier if the process at the other end of the socket has ended.
    """
    with suppress(OSError):
        runner.send(b"%d" % pid)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if select.select([runner], [], [], _WATCH_SECONDS)[0]:
            os._exit(1)  # the runner has ended, and so must the kernel
    with suppress(OSError):
        runner.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _be_kernel(path: Path, log: int, watcher: int) -> None:
    """Turn this process into a Jupyter kernel. The function does not return: the process ends with the kernel.

    Args:
        path: JSON file with the kernel's ``arguments``, its working directory ``folder`` and its ``environment``; this
            function deletes it.
        log: file descriptor of the kernel's output.
        watcher: process id of the kernel's parent process.
    """
    request = json.loads(path.read_bytes())
    path.unlink()
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    import numpy as np
    import torch
    from ipykernel.kernelapp import IPKernelApp

    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal():  # the libraries have read it when they were imported
        import threadpoolctl

        threadpoolctl.threadpool_limits(int(threads))
        torch.set_num_threads(int(threads))
    np.random.seed()  # forked kernels would draw the same numbers
    torch.seed()
    kernel: Any = IPKernelApp.instance()
    kernel.initialize([*request["arguments"], f"--IPKernelApp.parent_handle={watcher}"])
    if os.getppid() != watcher:
        os._exit(1)  # the runner has ended before the kernel watched for that
    kernel.start()
    # First the thread that answers requests, which waits for the thread that publishes outputs. ipykernel stops the
    # latter first, and then waits up to ten seconds.
    kernel.control_thread.stop()
    kernel.control_thread.join()
    atexit._run_exitfuncs()
    os._exit(0)  # to free all objects of the libraries would take a second
