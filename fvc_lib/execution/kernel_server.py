"""Start kernels by forking a process that has already imported the large libraries.

Importing torch, scikit-learn and their like takes two to five seconds, and a run of the default model starts thirteen
kernels. The server imports them once. It imports nothing of this library, so that every kernel runs the code as it is
when the kernel starts.

Each kernel has a watcher, its parent process. The watcher sends the kernel's process id and later its exit status to
the runner. If the runner dies, the watcher ends, and the kernel, which polls its parent, ends as well.
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


class KernelServer:
    """A process that forks kernels. It ends when this object is closed or this process ends.

    Args:
        environment: the environment of the server, with the variables that are read when a process starts.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "fvc_lib.execution.kernel_server", str(theirs.fileno())]
        with theirs:
            self._server = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C does not reach it
            )

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended, for example because somebody killed it."""
        return self._server.poll() is not None

    def start(self, request: Path, log: BinaryIO) -> "KernelProcess":
        """Start a kernel, and return its process.

        Args:
            request: JSON file with the kernel's ``arguments``, its working directory ``folder`` and ``environment``.
            log: open file to which the kernel's output is written.

        Raises:
            OSError: the server has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [str(request).encode()], [theirs.fileno(), log.fileno()])
        return KernelProcess(ours)

    def close(self) -> None:
        """End the server. Kernels that still run are not affected."""
        self._control.close()
        self._server.wait()


class KernelProcess:
    """A forked kernel, with the attributes and methods of ``subprocess.Popen`` that jupyter_client uses.

    Attributes:
        pid: process id of the kernel.
        returncode: the exit status, which is negative after a signal; None until ``poll`` or ``wait`` has seen the end.
    """

    stdin = stdout = stderr = None

    def __init__(self, watcher: socket.socket) -> None:
        self._watcher = watcher
        self.returncode: int | None = None
        answer = watcher.recv(32)
        if not answer:
            raise ConnectionResetError("the process that starts kernels has ended")
        self.pid = int(answer)

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
            os.kill(self.pid, number)


def main(arguments: Sequence[str]) -> None:
    """Import the libraries, then fork a kernel for each request on the socket, until the runner closes it.

    Args:
        arguments: the number of the socket's file descriptor.
    """
    # As ipykernel does, but before matplotlib is imported.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in LIBRARIES:
        with suppress(ImportError):  # the installation lacks it, and so do its kernels
            importlib.import_module(name)
    gc.freeze()  # kernels do not write into the memory that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the watchers
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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer, log = files
    if pid := os.fork():
        os.close(log)
        _watch(pid, socket.socket(fileno=answer))
    os.close(answer)
    _be_kernel(json.loads(Path(os.fsdecode(request)).read_bytes()), log)


def _watch(pid: int, runner: socket.socket) -> None:
    """Send the process id and the exit status of a kernel to ``runner``, then end this process."""
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


def _be_kernel(request: dict[str, Any], log: int) -> None:
    """Turn this process into a kernel. ``log`` is the file descriptor of its output."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS", ""):  # the libraries have read it when they were imported
        import threadpoolctl
        import torch

        threadpoolctl.threadpool_limits(int(threads))
        torch.set_num_threads(int(threads))
    from ipykernel.kernelapp import IPKernelApp

    kernel: Any = IPKernelApp.instance()
    kernel.initialize([*request["arguments"], f"--IPKernelApp.parent_handle={os.getppid()}"])
    kernel.start()
    # First the thread that answers requests, which waits for the thread that publishes outputs. ipykernel stops the
    # latter first, and then waits up to ten seconds.
    kernel.control_thread.stop()
    kernel.control_thread.join()
    atexit._run_exitfuncs()
    os._exit(0)  # to free all objects of the libraries would take a second


if __name__ == "__main__":
    main(sys.argv[1:])
