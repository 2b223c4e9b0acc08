"""Running one notebook in one kernel so that its record tells the truth.

papermill puts the parameters in and gives the record its form, nbclient and jupyter_client speak with the kernel. Ours
is what goes on between: cells that never ran are not called completed, outputs are bounded and redacted, the record is
replaced atomically, and a kernel's death is noticed when it happens. Nothing here is shared between executions, so any
number may run in threads of one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from nbformat import NotebookNode

from fvc_lib.execution.bounded_log import BoundedLog
from fvc_lib.execution.bounded_outputs import CellOutputs, RecordBudget
from fvc_lib.execution.kernel_process import KernelNeverStartedError, KernelProcess, private_folder
from fvc_lib.execution.output_files import OutputFiles
from fvc_lib.execution.output_messages import OutputMessages
from fvc_lib.execution.record import Record
from fvc_lib.services.redaction import Redactor

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
