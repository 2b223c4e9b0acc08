"""The kernel's process: started on sockets in a private folder, watched for its end, and gone with its children.

Default TCP ports are open to every user of a node, and default IPC names collide.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from fvc_lib.execution.bounded_log import BoundedLog, LogPipe

START_TIMEOUT_SECONDS = 300.0  # a cold, shared file system can take minutes to import a scientific stack
MESSAGES_WAITING = 32
LEAVE_SECONDS = 10.0  # for threads that do not end and exit handlers that hang
_SOCKET_PATH_LIMIT = 100  # the system's is 107 bytes, and zmq cuts nothing off: it refuses
_LAUNCHER = Path(__file__).with_name("ipykernel_launcher.py")


class KernelNeverStartedError(RuntimeError):
    """The kernel's process ended, or did not answer in time, before the first cell."""


class KernelProcess:
    """One kernel of this interpreter, whatever the notebook's metadata says, in a session of its own.

    Args:
        private: a folder that only this kernel uses.
        environment: its whole environment.
        folder: its working directory.
        log: gets what it and its native libraries write past the notebook; closed with the kernel.
    """

    def __init__(self, private: Path, environment: Mapping[str, str], folder: Path, log: BoundedLog) -> None:
        connection = str(private / "k.json")
        write_connection_file(connection, transport="ipc", ip=str(private / "s"))
        (private / "ipython").mkdir()  # nobody's startup files and settings, and no profile that two kernels create
        self._pipe = LogPipe(log)
        # -E and the like are not given: the kernel sees what a command typed by the user would see.
        command = [sys.executable, str(_LAUNCHER), "-f", connection, f"--ipython-dir={private / 'ipython'}"]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, "JPY_PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=self._pipe.write_end,
                stderr=self._pipe.write_end,
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
            )
        except OSError:
            self._pipe.close()
            raise
        self._pipe.kernel_has_it()
        self._sockets = [private / f"s-{number}" for number in range(1, 6)]
        self.client = BlockingKernelClient(connection_file=connection)
        # So few messages wait here before the kernel has to: what a flood of them takes is a few pieces of text.
        self.client.context.setsockopt(zmq.RCVHWM, MESSAGES_WAITING)
        self.client.load_connection_file()
        self._death = _death_descriptor(self._process.pid)

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return self._process.pid

    @property
    def return_code(self) -> int | None:
        """None while it lives; negative for a signal."""
        return self._process.poll()

    def poller(self) -> zmq.Poller:
        """Polls both channels and, where the system can tell it, the process's end."""
        poller = zmq.Poller()
        poller.register(self.client.shell_channel.socket, zmq.POLLIN)
        poller.register(self.client.iopub_channel.socket, zmq.POLLIN)
        if self._death is not None:
            poller.register(self._death, zmq.POLLIN)
        return poller

    def connect(self) -> None:
        """Wait until the kernel answers on both channels.

        Raises:
            KernelNeverStartedError: it ended or did not answer in time.
        """
        end = time.monotonic() + START_TIMEOUT_SECONDS
        while not all(path.exists() for path in self._sockets):  # zmq itself would try again ever more slowly
            self._still_starting(end)
            time.sleep(0.005)
        self.client.start_channels(stdin=False, hb=False)
        iopub = self.client.iopub_channel.socket
        poller, asked, answered = self.poller(), "", False
        while not answered:
            self._still_starting(end)
            asked = asked or self.client.kernel_info()
            ready = dict(poller.poll(200))
            if self.client.shell_channel.socket in ready:
                self.client.session.recv(self.client.shell_channel.socket, mode=zmq.NOBLOCK)
                asked = ""  # answered; if nothing was published meanwhile we were not yet subscribed: ask again
            while iopub in ready and not answered:
                message = _received(self.client, iopub)
                if message is None:
                    break
                answered = message["msg_type"] == "status"
        self._drain(asked)

    def leave(self) -> None:
        """Ask it to end, so that its exit handlers run; what is left of its session after a while is killed."""
        if self.return_code is None and self.client.channels_running:
            with contextlib.suppress(zmq.ZMQError):
                self.client.shutdown()
            self._wait(LEAVE_SECONDS)

    def close(self) -> None:
        """Kill whatever is left, workers included, and close everything."""
        with contextlib.suppress(OSError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.client.stop_channels()
        if not self.client.context.closed:
            self.client.context.destroy(linger=0)
        if self._death is not None:
            os.close(self._death)
        self._pipe.close()

    def _drain(self, asked: str) -> None:
        """Take the answers to what was asked while starting, which belong to no cell."""
        if asked:
            self.client.shell_channel.socket.poll(1000)
        while _received(self.client, self.client.shell_channel.socket) is not None:
            pass

    def _wait(self, seconds: float) -> None:
        if self._death is not None:
            poll = select.poll()
            poll.register(self._death, select.POLLIN)
            poll.poll(seconds * 1000)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def _still_starting(self, end: float) -> None:
        if self.return_code is not None:
            raise KernelNeverStartedError(f"the kernel's process ended with status {self.return_code} while it started")
        if time.monotonic() > end:
            raise KernelNeverStartedError(f"the kernel did not answer within {START_TIMEOUT_SECONDS:.0f} s")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder for one kernel, short enough for the names of its sockets."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/fvc-xxxxxxxx/s-1") <= _SOCKET_PATH_LIMIT
    with tempfile.TemporaryDirectory(prefix="fvc-", dir=None if short else "/tmp") as folder:
        yield Path(folder)


def _death_descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _received(client: BlockingKernelClient, socket: Any) -> dict[str, Any] | None:
    try:
        _, message = client.session.recv(socket, mode=zmq.NOBLOCK)
    except zmq.ZMQError:
        return None
    return message  # type: ignore[no-any-return]
