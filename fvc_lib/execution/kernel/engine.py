"""The papermill engine ``fvc``: one notebook in one kernel, and a record that says what happened.

papermill puts the parameters in and hands the notebook over; nbclient runs the cells. Called by the runner, the
engine does what its ``KernelRequest`` says. Called by ``papermill --engine fvc``, it finds the run that the notebook's
parameters name and has the runner execute that one task, so that a run folder looks alike either way.

Unlike papermill's own engine: cells that never ran are not called completed, outputs are bounded and redacted, the
record is replaced atomically while cells run, and parameters are checked again before anything runs. The record's
metadata are papermill's, so that what reads papermill's records reads ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any

import nbformat
import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import write_connection_file
from nbclient.client import NotebookClient
from nbclient.exceptions import CellExecutionComplete, CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from nbformat.reader import NotJSONError
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillException, PapermillExecutionError
from papermill.iorw import LocalHandler, papermill_io

from fvc_lib import CHECKOUT
from fvc_lib.execution.kernel.outputs import BoundedLog, CellOutputs, LogPipe, OutputFiles, RecordBudget, weight
from fvc_lib.execution.plan.plan import PlannedTask, make_plan
from fvc_lib.execution.plan.stages import Notebook, check_parameters, notebook_of, stage_named
from fvc_lib.execution.run.exit_codes import CellError, KernelOutcome
from fvc_lib.execution.run.record import record_resumption
from fvc_lib.execution.run.runner import Runner
from fvc_lib.execution.run.task import KernelRequest
from fvc_lib.execution.run.which_run import run_to_work_on
from fvc_lib.services.atomic_files import temporary_of, write_bytes
from fvc_lib.services.errors import FvcError, StoppedError, UsageError, did_you_mean
from fvc_lib.services.records.redaction import Redactor
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import stage_key

START_TIMEOUT_SECONDS = 300.0  # a cold, shared file system can take minutes to import a scientific stack
LEAVE_SECONDS = 10.0  # for threads that do not end and exit handlers that hang
LAST_OUTPUTS_SECONDS = 30  # after a cell's reply; a kernel that never says "idle" must not hold the run up
MESSAGES_WAITING = 32
LONGEST_MESSAGE = 4_000
WIDGET_BYTES = 400_000  # of all widgets' state together, in the record's metadata
MAX_WIDGETS = 500  # more are a loop's
MAX_COPIES = 20  # of one display that is shown several times and can be updated
_OF_ONE_CELL = frozenset({"status", "execute_input"})  # of another cell these messages say nothing
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SOCKET_PATH_LIMIT = 100  # the system's is 107 bytes, and zmq cuts nothing off: it refuses
_LAUNCHER = Path(__file__).with_name("ipykernel_launcher.py")
# Without a handler of its own Python prints a library's warnings to stderr in the middle of our progress.
_LOG = logging.getLogger("fvc.kernel")
_LOG.addHandler(logging.NullHandler())
_LOG.propagate = False


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
        self.client = AsyncKernelClient(connection_file=connection)
        self.client.allow_stdin = False
        # So few messages wait here before the kernel has to: what a flood of them takes is a few pieces of text.
        self.client.context.setsockopt(zmq.RCVHWM, MESSAGES_WAITING)
        self.client.load_connection_file()

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return self._process.pid

    @property
    def return_code(self) -> int | None:
        """None while it lives; negative for a signal."""
        return self._process.poll()

    async def ended(self) -> None:
        """Wait until the process has ended; looked at less and less often, at least four times a second."""
        seconds = 0.005
        while self.return_code is None:
            await asyncio.sleep(seconds)
            seconds = min(0.25, 1.5 * seconds)

    async def connect(self) -> None:
        """Wait until the kernel answers on both channels.

        Raises:
            KernelNeverStartedError: it ended or did not answer in time.
        """
        end = time.monotonic() + START_TIMEOUT_SECONDS
        while not all(path.exists() for path in self._sockets):  # zmq itself would try again ever more slowly
            self._still_starting(end)
            await asyncio.sleep(0.005)
        self.client.start_channels(stdin=False, hb=False)
        requested = heard = False
        while not heard:
            self._still_starting(end)
            if not requested:
                self.client.kernel_info()
                requested = True
            with contextlib.suppress(Empty):
                await self.client.shell_channel.get_msg(timeout=0.2)
                requested = False  # answered; if nothing is published now we are not yet subscribed: request it again
                await self.client.iopub_channel.get_msg(timeout=0.2)
                heard = True

    async def leave(self) -> None:
        """Request its end, so that its exit handlers run, and wait a while for it."""
        if self.return_code is None and self.client.channels_running:
            with contextlib.suppress(zmq.ZMQError):
                self.client.control_channel.send(self.client.session.msg("shutdown_request", {"restart": False}))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended(), LEAVE_SECONDS)

    def close(self) -> None:
        """Kill whatever is left, workers included, and close everything."""
        with contextlib.suppress(OSError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.client.stop_channels()
        if not self.client.context.closed:
            self.client.context.destroy(linger=0)
        self._pipe.close()

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


class BoundedClient(NotebookClient):
    """nbclient's client, whose cells' outputs go into ``outputs`` instead of into the notebook."""

    def __init__(self, notebook: NotebookNode, redactor: Redactor) -> None:
        super().__init__(
            notebook, log=_LOG, iopub_timeout=LAST_OUTPUTS_SECONDS, raise_on_iopub_timeout=False, record_timing=False
        )
        self.outputs: CellOutputs | None = None
        self.execution_count: int | None = None
        self._kernel: KernelProcess | None = None
        self._redactor = redactor
        self._displays: dict[str, list[tuple[CellOutputs, NotebookNode]]] = {}
        self._hooked_bytes = 0

    async def run_cell(self, kernel: KernelProcess, index: int, outputs: CellOutputs) -> CellError | None:
        """Run the cell at ``index``; what it shows goes into ``outputs``. Returns the exception that it raised.

        Raises:
            DeadKernelError: the kernel's process ended meanwhile; what it had said before is in ``outputs``.
        """
        self._kernel, self.kc, self.outputs, self.execution_count = kernel, kernel.client, outputs, None
        try:
            await self.async_execute_cell(self.nb.cells[index], index)
        except CellExecutionError as error:
            message = self._redactor.text(str(error.evalue))
            if len(message) > LONGEST_MESSAGE:  # status.json is read every second by whoever watches
                message = message[:LONGEST_MESSAGE] + " [...]"
            return CellError(str(error.ename), message, self.execution_count or 0)
        return None

    async def _async_poll_output_msg(self, parent_msg_id: str, cell: NotebookNode, cell_index: int) -> None:
        """Take messages until the cell is done.

        Unlike nbclient's, what a thread of an earlier cell says now is shown here: it would be lost there.
        """
        assert self._kernel is not None
        while True:
            message = await self._kernel.client.iopub_channel.get_msg(timeout=None)
            if message["parent_header"].get("msg_id") == parent_msg_id or message["msg_type"] not in _OF_ONE_CELL:
                try:
                    self.process_message(message, cell, cell_index)
                except CellExecutionComplete:
                    return

    async def _async_poll_kernel_alive(self) -> None:
        """Wait for the kernel's end instead of asking once a second; its last words are taken first."""
        assert self._kernel is not None
        assert self.task_poll_for_reply is not None
        await self._kernel.ended()
        while await self._kernel.client.iopub_channel.socket.poll(20):
            await asyncio.sleep(0.001)
        self.task_poll_for_reply.cancel()

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> None:
        """Put what the kernel's message says into the outputs, a widget, or wherever else it belongs.

        Raises:
            CellExecutionComplete: it says that the cell is done.
        """
        kind, content = msg["msg_type"], msg["content"]
        if kind == "status":
            if content["execution_state"] == "idle":
                raise CellExecutionComplete
        elif kind == "execute_input":
            self.execution_count = content.get("execution_count")
        elif kind.startswith("comm_"):
            opens = kind == "comm_open" and len(self.widget_state) >= MAX_WIDGETS
            if not opens and weight(content) <= WIDGET_BYTES:
                self.handle_comm_msg([], msg, 0)
        elif hooks := self.output_hook_stack.get(msg["parent_header"].get("msg_id")):
            self._put_into_widget(hooks[-1], msg)
        elif self.outputs is not None:
            self._put(kind, content, self.outputs)

    def keep_widgets(self, notebook: NotebookNode) -> None:
        """Put the widgets' state into the metadata of ``notebook``, where it is not too much."""
        if self.widget_state and weight(self.widget_state) <= WIDGET_BYTES:
            self.widget_state = self._redactor.tree(self.widget_state)
            self.set_widgets_metadata()
            notebook.metadata.widgets = self.nb.metadata.widgets

    def _put(self, kind: str, content: dict[str, Any], outputs: CellOutputs) -> None:
        display = (content.get("transient") or {}).get("display_id")
        if kind == "stream":
            outputs.print(content["name"], content["text"])
        elif kind in {"display_data", "execute_result", "error"}:
            shown = outputs.show(kind, content)
            if display:
                self._update(display, content)
                copies = self._displays.setdefault(display, [])
                copies.append((outputs, shown))
                del copies[:-MAX_COPIES]
        elif kind == "update_display_data":
            self._update(display, content)
        elif kind == "clear_output":
            outputs.clear(bool(content.get("wait")))

    def _update(self, display: str | None, content: dict[str, Any]) -> None:
        for owner, output in self._displays.get(display or "", []):
            owner.replace(output, content)

    def _put_into_widget(self, hook: Any, message: dict[str, Any]) -> None:
        if message["msg_type"] == "clear_output":
            hook.clear_output([], message, 0)
            return
        self._hooked_bytes += weight(message["content"])
        if self._hooked_bytes <= WIDGET_BYTES and message["msg_type"] != "update_display_data":
            hook.output([], {**message, "content": self._redactor.tree(message["content"])}, None, 0)


# How far the file may be behind: a kill of this process leaves a record that shows what was running this long ago.
BEHIND_SECONDS = 0.2
# While a cell runs on its outputs are saved this often, and never for more than a tenth of the time.
REFRESH_SECONDS = 5.0


class FvcEngine(Engine):  # type: ignore[misc]  # papermill ships no types
    """The engine of the entry point ``papermill.engine``, and of whoever imports this module without installing it."""

    @classmethod
    def execute_notebook(
        cls,
        nb: NotebookNode,
        kernel_name: str,
        output_path: str | None = None,
        *,
        input_path: str,
        request: KernelRequest | None = None,
        **_options: Any,
    ) -> NotebookNode:
        """Execute ``nb``, in which papermill has put the parameters, in a kernel of this interpreter.

        ``input_path`` is the notebook's file; ``request`` the runner's, None when papermill was called without it.

        Returns:
            Without ``request`` the record. With it ``nb`` as it came: the record is in ``request.record``, how it ended
            in ``request.outcome``.

        Raises:
            UsageError: parameters that the notebook does not have, or whose values are not of their type; papermill's
                output file cannot be written.
            PapermillException: the notebook did not run to its end, and its record shows no error of a cell.
        """
        notebook = notebook_of(nb, Path(input_path))
        given = nb.metadata.papermill.get("parameters", {})
        if isinstance(given.get("model"), str):  # a class in a cell, which has not run yet
            DETECTORS.find_cell(given["model"], [cell.source for cell in nb.cells if cell.cell_type == "code"])
        parameters = check_parameters(notebook, given)
        if request is None:
            _refuse_unwritable(nb.metadata.papermill.get("output_path"))
            return _run_interactively(notebook, parameters)
        record = Record(nb, request)
        try:
            request.outcome = asyncio.run(_run_cells(record, request))
        finally:
            record.close()
        if request.outcome.error is not None:
            _log_tracebacks(record, request.log)
        return nb


papermill_engines.register("fvc", FvcEngine)


def end_of_command(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ``papermill --engine fvc`` ends with in place of its own frames, where what failed is not this program."""
    if isinstance(error, PapermillExecutionError):  # the runner has said what happened, where, and what to do
        print("The traceback stands in the executed notebook and in the log.", file=sys.stderr)
    elif notebook := _unreadable_notebook(error):
        stem, stems = Path(notebook).stem, [path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb")]
        what = error.strerror if isinstance(error, OSError) else "it is no notebook"
        wanted = f"Wanted: a stage's, as in {str(CHECKOUT / 'notebooks')!r}.{did_you_mean(stem, stems)}"
        print(f"error: notebook {notebook!r}: {what}.", "Nothing has run.", wanted, sep="\n  ", file=sys.stderr)
    elif isinstance(error, FvcError | StoppedError | PapermillException | OSError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _unreadable_notebook(error: BaseException) -> str:
    """The notebook that papermill was given and could not read, as it was typed; empty where ``error`` is another."""
    typed = next((text for text in sys.argv[1:] if text.endswith(".ipynb")), "")
    is_its = str(error.filename) == typed if isinstance(error, OSError) else isinstance(error, NotJSONError)
    return typed if is_its else ""


def _refuse_unwritable(output: str | None) -> None:
    """Check, before anything runs, that papermill can write the file ``output`` of this machine afterwards."""
    handler = papermill_io.get_handler(output or "-")
    if not isinstance(handler, LocalHandler):
        return
    path = Path(handler._cwd or ".", output or "")  # papermill was called there, wherever --cwd had it go since
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):  # it is written in place: its folder's rights do not help
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(
            f"output {str(path)!r}: cannot be written: {error.strerror}. Nothing has run. Wanted: a file in a folder "
            "that is there and can be written."
        ) from error


def _run_interactively(notebook: Notebook, parameters: Mapping[str, Any]) -> NotebookNode:
    """Run one task of a run as the runner would; returns its record."""
    stage = stage_named(notebook.name)
    if stage.name != notebook.name:
        raise UsageError(f"{notebook.path}: engine fvc runs notebooks of stages; for others leave --engine fvc out.")
    command = shlex.join(["papermill", *sys.argv[1:]])
    run, config, is_new = run_to_work_on(notebook, parameters, command)
    fold = int(parameters.get("fold", notebook.parameters["fold"])) if stage.per_fold else None
    key = stage_key(stage.name, fold)
    notebooks = {stage.name: notebook}

    if fold is not None and fold >= config.num_trainings:
        raise UsageError(f"fold: got {fold}, and {run.run_id} has folds 0 to {config.num_trainings - 1}.")

    def plan() -> list[PlannedTask]:
        if not is_new:
            for difference in record_resumption(run, config, command=command):
                print(f"warning: this attempt differs from the one before: {difference}", file=sys.stderr)
        return make_plan(notebooks, config, run, only=stage, tasks=frozenset({key}))

    print(f"run {run.root}")
    exit_code = Runner(run, config, notebooks).execute(plan)
    done = run.executed_notebook(stage.name, fold)
    record = done if exit_code == 0 else run.partial_notebook(stage.name, fold)
    document: NotebookNode = nbformat.from_dict(json.loads(record.read_text(encoding="utf-8")))
    if exit_code and not any(out.output_type == "error" for cell in document.cells for out in cell.get("outputs", [])):
        raise PapermillException(f"{key} did not run to its end; its record says why: {record}")
    return document


async def _run_cells(record: Record, request: KernelRequest) -> KernelOutcome:
    """Start a kernel, run the cells in order until one raises, and end the kernel."""
    redactor = record.redactor
    files = OutputFiles(request.overflow or request.log.with_suffix(".outputs"), request.record, request.root, redactor)
    outputs_of = partial(CellOutputs, budget=RecordBudget(), files=files, redactor=redactor)
    client = BoundedClient(record.source, redactor)
    error = None
    with private_folder() as private:
        kernel = KernelProcess(private, request.environment, request.folder, BoundedLog(request.log, redactor))
        try:
            request.on_start(kernel.pid)
            await kernel.connect()
            for index in range(len(record.notebook.cells)):
                error = await _run_cell(record, client, kernel, index, outputs_of)
                if error is not None:
                    break
            client.keep_widgets(record.notebook)
            await kernel.leave()
            return KernelOutcome(error, False, None)
        except DeadKernelError:
            return KernelOutcome(None, True, kernel.return_code)
        except KernelNeverStartedError as reason:
            return KernelOutcome(None, True, kernel.return_code, never_started=str(reason))
        finally:
            kernel.close()


def _log_tracebacks(record: Record, path: Path) -> None:
    """Append to the task's log what its record shows of errors, without colours; a full disk has room for neither."""
    shown = [output for cell in record.notebook.cells for output in cell.get("outputs", ())]
    lines = [line for output in shown if output.output_type == "error" for line in (*output.traceback, "")]
    with contextlib.suppress(OSError):
        log = BoundedLog(path, record.redactor)
        log.write(_COLOUR.sub("", "\n".join(lines)))
        log.close()


async def _run_cell(
    record: Record, client: BoundedClient, kernel: KernelProcess, index: int, outputs_of: Callable[..., CellOutputs]
) -> CellError | None:
    cell, failed = record.notebook.cells[index], True
    if cell.cell_type != "code" or not cell.source.strip():
        record.begin(cell)
        record.end(cell, failed=False)
        return None
    record.begin(cell)
    outputs = outputs_of(cell, f"cell_{index:02d}")
    saving = asyncio.create_task(_keep_current(record, outputs))
    try:
        error = await client.run_cell(kernel, index, outputs)
        failed = error is not None
        return error
    finally:
        saving.cancel()
        outputs.close()
        cell.execution_count = client.execution_count
        record.end(cell, failed=failed)


async def _keep_current(record: Record, outputs: CellOutputs) -> None:
    """Save the record while a cell runs; what a full disk has no room for, the last save says or is an error."""
    while True:
        await asyncio.sleep(record.seconds_to_save())
        outputs.settle()
        try:
            record.save()
        except OSError:
            await asyncio.sleep(REFRESH_SECONDS)


class Record:
    """A notebook that is executed, and the file that shows its state.

    The file is replaced atomically; only the last save is forced to the disk, since a power cut ends the kernel too.
    ``source`` is what runs, ``notebook`` what the file shows: all of it without secrets, and the outputs.
    """

    def __init__(self, source: NotebookNode, request: KernelRequest) -> None:
        self.source, self.path = source, request.record
        self.redactor = request.redactor or Redactor(request.environment)
        self._started = time.monotonic()
        self.notebook: NotebookNode = nbformat.from_dict(self.redactor.tree(source))
        self.notebook.metadata.papermill.update(
            output_path=str(self.path).replace(".partial.ipynb", ".ipynb"),  # as it is called when it is whole
            start_time=_now(),
            end_time=None,
            duration=None,
            exception=None,
        )
        for cell in self.notebook.cells:
            state = {"exception": None, "start_time": None, "end_time": None, "duration": None, "status": "pending"}
            cell.metadata.papermill = nbformat.from_dict(state)
            if cell.cell_type == "code":
                cell.execution_count, cell.outputs = None, []
        self._cell_started = self._saved = 0.0
        self._saving_took = 0.0
        self._changed = True
        self.save()

    def begin(self, cell: NotebookNode) -> None:
        """``cell`` runs from now on."""
        self._cell_started = time.monotonic()
        cell.metadata.papermill.update(status="running", exception=False, start_time=_now())
        self._changed = True

    def end(self, cell: NotebookNode, *, failed: bool) -> None:
        """``cell`` has ended."""
        state = cell.metadata.papermill
        state.update(status="failed" if failed else "completed", end_time=_now())
        state.duration = round(time.monotonic() - self._cell_started, 6)
        if failed:
            state.exception = self.notebook.metadata.papermill.exception = True
        self._changed = True

    def seconds_to_save(self) -> float:
        """After how long the file is due for ``save``; 0 when it is."""
        wanted = BEHIND_SECONDS if self._changed else max(REFRESH_SECONDS, 10 * self._saving_took)
        return max(0.0, self._saved + wanted - time.monotonic())

    def close(self) -> None:
        """The last save; cells that never ran stay ``pending``."""
        state = self.notebook.metadata.papermill
        state.end_time, state.duration = _now(), round(time.monotonic() - self._started, 6)
        self.save(last=True)

    def save(self, *, last: bool = False) -> None:
        """Replace the file."""
        began = time.monotonic()
        # Without indentation: with it JSON is written by Python's slow encoder, a number of a figure on each line.
        content = (json.dumps(self.notebook, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        if last:
            write_bytes(self.path, content)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_of(self.path)  # swept when we are gone
            temporary.write_bytes(content)
            temporary.replace(self.path)
        self._saved, self._changed = time.monotonic(), False
        self._saving_took = self._saved - began


def _now() -> str:
    return datetime.now(UTC).isoformat()
