"""Running one notebook in one kernel so that its record tells the truth.

papermill puts the parameters in and gives the record its form, nbclient and jupyter_client speak with the kernel. Ours
is what goes on between: cells that never ran are not called completed, outputs are bounded and redacted, the record is
replaced atomically, and a kernel's death is noticed when it happens. Nothing here is shared between executions, so any
number may run in threads of one process.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from nbformat import NotebookNode

from fvc_lib.execution.kernel.outputs import BoundedLog, CellOutputs, LogPipe, OutputFiles, OutputMessages, RecordBudget
from fvc_lib.execution.kernel.record import Record
from fvc_lib.services.redaction import Redactor

# ----------------------------------------------------------------------------------------------------
# The kernel's process: started on sockets in a private folder, watched for its end, and gone with its children.
#
# Default TCP ports are open to every user of a node, and default IPC names collide.
#


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


# After a cell's reply its last outputs are on their way; a kernel that never says "idle" must not hold the run up.
LAST_OUTPUTS_SECONDS = 4.0
# Where the system cannot tell the kernel's end by itself.
LOOK_SECONDS = 0.5
MESSAGES_AT_ONCE = 200
LONGEST_MESSAGE = 4_000


@dataclass(frozen=True)
class CellError:
    """The exception that ended a notebook: its type's name, message and the number in the cell's ``In [n]``."""

    name: str
    message: str
    cell: int


@dataclass(frozen=True)
class KernelOutcome:
    """How an execution ended: ``error`` when a cell raised, ``died`` when the kernel went away by itself.

    Attributes:
        return_code: of the kernel's process when it died; negative for a signal.
        never_started: why there was no kernel to run a cell; None where there was one.
        running: the position in the record of the cell that ran when the kernel died.
    """

    error: CellError | None
    died: bool
    return_code: int | None
    never_started: str | None = None
    running: int | None = None

    @property
    def ok(self) -> bool:
        """Every cell ran and none raised."""
        return self.error is None and not self.died


class _KernelDiedError(Exception):
    """The kernel's process ended while a cell ran or was about to."""


class _Execution:
    """One kernel at work on one record."""

    def __init__(self, record: Record, kernel: KernelProcess, files: OutputFiles, redactor: Redactor) -> None:
        self._record, self._kernel, self._files, self._redactor = record, kernel, files, redactor
        self._budget = RecordBudget()
        self._messages = OutputMessages(record.notebook, kernel.client, redactor)
        self._shell, self._iopub = kernel.client.shell_channel.socket, kernel.client.iopub_channel.socket
        self._poller = kernel.poller()
        self.running: int | None = None

    def run(self) -> CellError | None:
        """Run the cells in order; the first that raises ends it.

        Raises:
            _KernelDiedError: while a cell ran.
        """
        for index, cell in enumerate(self._record.notebook.cells):
            if cell.cell_type != "code" or not cell.source.strip():
                self._record.begin(cell)
                self._record.end(cell, failed=False)
                continue
            self.running, failed = index, True
            outputs = CellOutputs(cell, f"cell_{index:02d}", self._budget, self._files, self._redactor)
            self._record.begin(cell)
            try:
                reply = self._execute(cell, self._record.sources[index], outputs)
                failed = reply.get("status") != "ok" and "raises-exception" not in cell.metadata.get("tags", [])
            finally:
                outputs.close()
                self._record.end(cell, failed=failed)
            if failed:
                return self._error(cell, reply)
        self._messages.keep_widgets()
        return None

    def _error(self, cell: NotebookNode, reply: dict[str, Any]) -> CellError:
        message = self._redactor.text(str(reply.get("evalue", "")))
        if len(message) > LONGEST_MESSAGE:  # status.json is read every second by whoever watches
            message = message[:LONGEST_MESSAGE] + " [...]"
        return CellError(str(reply.get("ename", "unknown error")), message, cell.execution_count or 0)

    def _execute(self, cell: NotebookNode, source: str, outputs: CellOutputs) -> dict[str, Any]:
        """The content of the kernel's reply, after the last of its outputs."""
        asked = self._kernel.client.execute(source, allow_stdin=False)
        reply: dict[str, Any] | None = None
        idle, replied_at = False, 0.0
        while reply is None or not idle:
            ready = self._wait(outputs, LAST_OUTPUTS_SECONDS if reply is not None else None)
            heard = self._iopub in ready and self._take_outputs(asked, cell, outputs)
            idle = idle or heard == "idle"
            if self._shell in ready:
                message = self._receive(self._shell)
                if message and message["parent_header"].get("msg_id") == asked:
                    reply, replied_at = message["content"], time.monotonic()
            if heard:
                replied_at = time.monotonic()
            elif reply is not None and time.monotonic() - replied_at > LAST_OUTPUTS_SECONDS:
                break
            if (not ready and self._kernel.return_code is not None) or self._death_in(ready):
                self._take_outputs(asked, cell, outputs, everything=True)
                raise _KernelDiedError
        cell.execution_count = reply.get("execution_count")
        return reply

    def _death_in(self, ready: Mapping[Any, int]) -> bool:
        """Whether all that is ready is the kernel's end; what it said before comes first."""
        return bool(ready) and self._shell not in ready and self._iopub not in ready

    def _wait(self, outputs: CellOutputs, longest: float | None) -> dict[Any, int]:
        due = self._record.seconds_to_save()
        if due == 0:
            outputs.settle()
            self._record.save()
            due = self._record.seconds_to_save()
        return dict(self._poller.poll(round(1000 * min(due, LOOK_SECONDS, longest or LOOK_SECONDS)) + 1))

    def _take_outputs(
        self, asked: str, cell: NotebookNode, outputs: CellOutputs, *, everything: bool = False
    ) -> str | None:
        """Take what is there, not too much at once; ``idle`` when the cell's last came, None when there was nothing."""
        heard = None
        taken = 0
        while everything or taken < MESSAGES_AT_ONCE:
            message = self._receive(self._iopub)
            if message is None:
                break
            taken, heard = taken + 1, "more"
            kind, content = message["msg_type"], message["content"]
            ours = message["parent_header"].get("msg_id") == asked
            if kind == "status":
                if ours and content["execution_state"] == "idle":
                    return "idle"
            elif kind == "execute_input":
                cell.execution_count = content.get("execution_count") if ours else cell.execution_count
            else:
                # What a thread of an earlier cell says now is shown here: it would be lost there.
                self._messages.put(message, outputs)
        return heard

    def _receive(self, socket: zmq.Socket[bytes]) -> dict[str, Any] | None:
        try:
            _, message = self._kernel.client.session.recv(socket, mode=zmq.NOBLOCK)
        except zmq.ZMQError:
            return None
        return message  # type: ignore[no-any-return]


def execute(
    source: Path,
    record: Path,
    parameters: Mapping[str, Any],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    on_start: Callable[[int], None],
    overflow: Path | None = None,
    root: Path | None = None,
    redactor: Redactor | None = None,
) -> KernelOutcome:
    """Run ``source`` with ``parameters`` in a new kernel and keep ``record`` current while it runs.

    Args:
        source: the notebook; it is read, never written.
        record: the executed copy, never more than a fraction of a second behind.
        parameters: checked names and values of the parameters cell.
        folder: the kernel's working directory.
        environment: the kernel's whole environment.
        log: gets what the kernel process and native libraries write past the notebook; appended to, bounded.
        on_start: called with the kernel's process id.
        overflow: folder for outputs that the record cannot hold; none: beside the log.
        root: the folder from which files are named in texts; none: the record's.
        redactor: hides secrets in all that is written; none: those of ``environment``.
    """
    redactor = redactor or Redactor(environment)
    files = OutputFiles(overflow or log.with_suffix(".outputs"), record, root or record.parent, redactor)
    book = Record(source, record, dict(parameters), redactor)
    with private_folder() as private:
        kernel = KernelProcess(private, environment, folder, BoundedLog(log, redactor))
        work: _Execution | None = None
        try:
            on_start(kernel.pid)
            kernel.connect()
            work = _Execution(book, kernel, files, redactor)
            error = work.run()
            kernel.leave()
            return KernelOutcome(error, False, None)
        except _KernelDiedError:
            return KernelOutcome(None, True, kernel.return_code, running=work.running if work else None)
        except KernelNeverStartedError as reason:
            return KernelOutcome(None, True, kernel.return_code, never_started=str(reason))
        finally:
            kernel.close()
            book.close()


# ----------------------------------------------------------------------------------------------------
# The end of a kernel's log, which is all that is left of a kernel that never started.


TAIL_BYTES = 4_000
_TAIL_LINES = 20


def tail_of(path: Path) -> str:
    """The last lines of ``path``; empty where there are none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def never_started_hint(log_tail: str) -> str:
    """What the kernel said last, and what to do about it."""
    said = [line.strip() for line in log_tail.splitlines() if line.strip()]
    last = f"; it said last: {said[-1]}" if said else "; it said nothing"
    return f"{last}. Try '{sys.executable} -m ipykernel --version'; where that fails too, set the environment up again."
