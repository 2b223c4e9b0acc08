"""Run one notebook in one kernel, with papermill.

papermill injects the parameters, and nbclient runs the cells. The engine of this module differs from papermill's
standard engine in five ways. It checks the parameters before any cell runs. It replaces the record (the executed
notebook) atomically. A cell that did not run is never marked as completed. The size of a cell's outputs is limited. The
engine also returns how the kernel ended. The record can be read as a report: its code is folded, and a cell below its
title repeats the text that the cells tagged ``answer`` have output.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any, BinaryIO

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from fvc_lib.execution.kernel_server import KernelProcess, KernelServer
from fvc_lib.execution.run.status import KernelOutcome, StageError
from fvc_lib.execution.stages import Notebook, check_parameters, notebook_of
from fvc_lib.services.atomic_files import temporary_of, write_bytes

START_TIMEOUT_SECONDS = 300  # importing from a cold shared file system takes minutes
LAST_OUTPUTS_SECONDS = 30  # how long to wait, after a cell has ended, for outputs that are still on their way
SAVE_SECONDS = 5
SHOWN_BYTES = 4_000_000  # the most output of one cell that the record stores
LONGEST_MESSAGE = 4_000
_ENGINE = "fvc_kernel"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG = logging.getLogger("fvc.kernel")
_LOG.addHandler(logging.NullHandler())  # else Python prints nbclient's warnings between the lines of progress
_LOG.propagate = False


@dataclass
class KernelRequest:
    """The files, working directory and environment of one execution of a notebook.

    The engine stores how the execution ended in ``outcome``, because papermill offers no other way to return it.
    """

    record: Path  # path of the executed notebook
    folder: Path  # the kernel's working directory
    environment: Mapping[str, str]  # all variables that the kernel gets
    log: Path  # text that the kernel's process prints outside the notebook is appended to this file
    server: KernelServer | None = None  # forks the kernel; None: the kernel is started by itself
    on_start: Callable[[int], None] = lambda pid: None  # called with the kernel's process id
    on_cell: Callable[[int, int], None] = lambda number, total: None  # called before each cell, counted from 1
    outcome: KernelOutcome | None = None  # set by the engine at the end


def execute(notebook: Path, parameters: Mapping[str, object], request: KernelRequest) -> KernelOutcome:
    """Execute a notebook in a kernel, and return how the execution ended.

    Args:
        notebook: path of the notebook, which is not changed.
        parameters: ``{parameter: value}``.
        request: where the record (the executed notebook) and the log go, and the kernel's environment. At the end the
            returned value is also stored in ``request.outcome``.

    Raises:
        UsageError: the notebook does not have a parameter, or a value has the wrong type.
        OSError: the record or the log cannot be written.
    """
    # papermill calls a parameter unknown if it cannot read its annotation (``float | None``); ours are checked.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    with contextlib.suppress(PapermillExecutionError):  # the outcome has the error
        papermill.execute_notebook(
            str(notebook).replace("{", "{{").replace("}", "}}"),  # papermill formats paths with the parameters
            None,
            parameters=dict(parameters),
            engine_name=_ENGINE,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            report_mode=True,  # JupyterLab folds the code of the record
            request=request,
        )
    assert request.outcome is not None
    return request.outcome


class KernelEngine(NBClientEngine):  # type: ignore[misc]  # papermill ships no types
    """The papermill engine that runs a notebook for the function ``execute`` of this module.

    It checks the parameters, runs the cells in a new kernel, and writes the record (the executed notebook).
    """

    @classmethod
    def execute_notebook(
        cls, nb: NotebookNode, kernel_name: str, *, input_path: str, request: KernelRequest, **_: Any
    ) -> NotebookNode:
        """Check the parameters that papermill has injected into ``nb``, execute ``nb`` and return it.

        Args:
            nb: the notebook, to which the outputs of its cells are added.
            kernel_name: ignored; the kernel uses this Python interpreter.
            input_path: the notebook's path, for error messages.
            request: where the record and the log go. How the execution ended is stored in ``request.outcome``, because
                this method has to return the notebook.
        """
        checked_parameters(nb, Path(input_path))
        record = Record(nb, request.record)
        record.notebook_start()
        try:
            request.outcome = _execute_cells(record, request)
            answering = [cell for cell in nb.cells if "answer" in cell.metadata.get("tags", [])]
            outputs = [output for cell in answering for output in cell.outputs]
            displays = [output.data for output in outputs if "data" in output]
            shown = [data["text/plain"] for data in displays if 'class="lead"' in data.get("text/html", "")]
            printed = [output.text for output in outputs if output.get("name") == "stdout"]
            if shown or printed:
                lines = "".join(shown or printed).rstrip().splitlines()
                text = "  \n".join(re.sub(r"([\\`*_\[\]<>#|~$])", r"\\\1", line) for line in lines)
                metadata = {"tags": ["lead"] if shown else []}  # a run's report has its lead at its head
                nb.cells.insert(1, nbformat.v4.new_markdown_cell(f"**Answer.** {text}", metadata=metadata))
        finally:
            record.notebook_complete()
        return nb


papermill_engines.register(_ENGINE, KernelEngine)


def checked_parameters(notebook: NotebookNode, path: Path) -> tuple[Notebook, dict[str, Any]]:
    """Check a notebook and the parameter values that papermill has injected into it.

    Args:
        notebook: the notebook as an nbformat node, with papermill's metadata.
        path: the notebook's path, for error messages.

    Returns:
        The checked notebook, and ``{parameter: value}``, each value converted to the type of its parameter.

    Raises:
        UsageError: the notebook does not have a parameter, or a value has the wrong type.
    """
    checked = notebook_of(notebook, path)
    return checked, check_parameters(checked, notebook.metadata.papermill.get("parameters", {}))


class Record(NotebookExecutionManager):  # type: ignore[misc]
    """The executed notebook, which is written into a file while its cells run.

    The file is replaced atomically when a cell begins or ends, and every 5 seconds while a cell prints.

    Args:
        notebook: the notebook as an nbformat node.
        path: the file.
    """

    def __init__(self, notebook: NotebookNode, path: Path) -> None:
        super().__init__(notebook, str(path), progress_bar=False, autosave_cell_every=SAVE_SECONDS)
        notebook.metadata.papermill["output_path"] = str(path).replace(".partial.ipynb", ".ipynb")

    def save(self, **_: Any) -> None:
        """Write the notebook with the outputs so far into the file. Errors such as a full disk are ignored.

        At the end ``notebook_complete`` writes the file once more, and raises such an error.
        """
        with contextlib.suppress(OSError):
            temporary = temporary_of(Path(self.output_path))
            temporary.write_bytes(self._content())  # not fsynced: a power cut ends the kernel as well
            temporary.replace(self.output_path)
        self.last_save_time = self.now()

    def notebook_complete(self, **_: Any) -> None:
        """Add the time of the end to the notebook, and write it into the file for the last time.

        Cells that never ran keep the status ``pending``.
        """
        self.end_time = self.now()
        duration = (self.end_time - self.start_time).total_seconds()
        self.nb.metadata.papermill.update(end_time=self.end_time.isoformat(), duration=duration)
        write_bytes(self.output_path, self._content())

    def _content(self) -> bytes:
        return (json.dumps(self.nb, ensure_ascii=False) + "\n").encode("utf-8", "replace")


class KernelManager(AsyncKernelManager):
    """A manager that starts one Jupyter kernel and connects to it. The kernel uses this Python interpreter.

    Args:
        folder: a private folder with a short path, for the sockets to the kernel.
        server: the process that forks the kernel; None: the kernel is started as a new process.
        on_start: called with the kernel's process id as soon as the process exists.
    """

    process: "Popen[bytes] | KernelProcess"

    def __init__(self, folder: str, server: KernelServer | None, on_start: Callable[[int], None]) -> None:
        super().__init__(connection_file=f"{folder}/k.json", transport="ipc", ip=f"{folder}/s")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._kernel_spec = KernelSpec(argv=command, language="python")
        self._folder, self._server, self._on_start = Path(folder), server, on_start

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        forked = None
        if self._server is not None:
            request = self._folder / "request.json"
            values = {"arguments": kernel_cmd[3:], "folder": options["cwd"], "environment": options["env"]}
            request.write_text(json.dumps(values))
            forked = self._server.start(request, options["stdout"], START_TIMEOUT_SECONDS)
        provisioner: Any = self.provisioner
        if forked is None:
            await super()._async_launch_kernel(kernel_cmd, **options)
        else:
            provisioner.process, provisioner.pid, provisioner.pgid = forked, forked.pid, forked.pid
        self.process = provisioner.process
        self._on_start(self.process.pid)


class Client(PapermillNotebookClient):  # type: ignore[misc]
    """A client that runs the cells of a notebook in a kernel, one after the other.

    The outputs of a cell are limited to 4 MB. Text that a cell prints beyond this limit goes to ``log``.

    Args:
        record: the notebook, and the file that it is written into.
        manager: starts the kernel.
        log: open file for tracebacks and for printed text beyond the limit.
        on_cell: called before each cell with its number, from 1, and the number of cells.

    Attributes:
        error: the exception that a cell has raised; None if none did.
    """

    def __init__(
        self, record: Record, manager: KernelManager, log: BinaryIO, on_cell: Callable[[int, int], None]
    ) -> None:
        options = {"startup_timeout": START_TIMEOUT_SECONDS, "iopub_timeout": LAST_OUTPUTS_SECONDS, "log": _LOG}
        super().__init__(record, km=manager, raise_on_iopub_timeout=False, coalesce_streams=True, **options)
        self.error: StageError | None = None
        self._log, self._used, self._on_cell = log, 0, on_cell

    def execute_cell(self, cell: NotebookNode, cell_index: int) -> None:
        """Run ``cell``, which is cell ``cell_index`` of the notebook, counted from 0.

        Raises:
            CellExecutionError: the cell raised an exception, which is then in ``self.error``.
            DeadKernelError: the kernel's process ended.
        """
        self._used = 0
        self._on_cell(cell_index + 1, len(self.nb.cells))
        try:
            super().execute_cell(cell, cell_index)
        except CellExecutionError as error:
            # The reply names no error that was raised while a result was displayed; the output has it.
            *_, shown = error, *(output for output in cell.outputs if output.output_type == "error")
            self.error = StageError(
                name=shown.ename,
                message=shown.evalue[:LONGEST_MESSAGE],
                cell=cell.execution_count or 0,
                exit_code=self._exit_code(),
            )
            self._log.write(_COLOUR.sub("", error.traceback + "\n").encode("utf-8", "replace"))
            raise
        except DeadKernelError:
            self.nb_man.cell_exception(cell, cell_index)
            raise

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        """Append the output in the kernel's message ``msg`` to ``outs``, the outputs of a cell.

        Beyond 4 MB per cell, printed text goes to the log, and other outputs are dropped, except errors. A note in the
        record says so.

        Args:
            outs: the outputs of the cell so far; changed.
            msg: the message, with ``msg_type`` and ``content``.
            display_id: Jupyter's id of an output that may be updated later; None: no id.
            cell_index: number of the cell, from 0.

        Returns:
            The new output; None if it was left out.
        """
        content = msg["content"]
        is_printed = msg["msg_type"] == "stream"
        before = self._used
        self._used += len(content["text"]) if is_printed else len(json.dumps(content, default=str))
        if self._used <= SHOWN_BYTES or msg["msg_type"] == "error":
            shown: NotebookNode | None = super().output(outs, msg, display_id, cell_index)
            return shown
        if is_printed:
            self._log.write(content["text"].encode("utf-8", "replace"))
        if before <= SHOWN_BYTES:  # this output is the first one that is left out
            note = f"\n[too much for this record; {Path(self._log.name).name} has what is printed from here on]\n"
            outs.append(nbformat.v4.new_output("stream", name="stderr", text=note))
        return None

    def _exit_code(self) -> int | None:
        """Return the attribute ``exit_code`` of the exception that a cell has just raised; None if it has none."""
        expressions = {"exit_code": "getattr(__import__('sys').last_value, 'exit_code', None)"}
        reply = self.wait_for_reply(self.kc.execute("", silent=True, user_expressions=expressions))
        answer = reply["content"].get("user_expressions", {}).get("exit_code", {}).get("data", {}).get("text/plain", "")
        return int(answer) if answer.isdecimal() else None


def _execute_cells(record: Record, request: KernelRequest) -> KernelOutcome:
    """Start a kernel, run the cells until one raises an exception, then end the kernel and its child processes.

    Returns:
        How the execution ended.
    """
    request.log.parent.mkdir(parents=True, exist_ok=True)
    # The system limits the length of a socket's path; the private folder keeps other users out.
    short = "/tmp" if len(tempfile.gettempdir()) > 80 else None
    with tempfile.TemporaryDirectory(prefix="fvc-", dir=short) as folder, request.log.open("ab") as log:
        manager = KernelManager(folder, request.server, request.on_start)
        client = Client(record, manager, log, request.on_cell)
        # A private profile: the user's startup files do not run, and no two kernels create the same profile.
        environment = {**request.environment, "IPYTHONDIR": folder}
        options = {"cwd": str(request.folder), "env": environment, "stdout": log, "stderr": log}
        try:
            client.execute(cleanup_kc=True, **options)
            return KernelOutcome(client.error)
        except RuntimeError as error:
            never_started = all(
                cell.metadata.papermill["status"] == NotebookExecutionManager.PENDING for cell in record.nb.cells
            )
            if not never_started and not isinstance(error, DeadKernelError):
                raise
            return KernelOutcome(None, True, manager.process.wait(), str(error) if never_started else None)
        finally:
            with contextlib.suppress(OSError, AttributeError):  # ends worker processes that outlived the kernel
                os.killpg(manager.process.pid, signal.SIGKILL)
            loop = ensure_event_loop()  # nbclient has used it, and leaves it open
            if not loop.is_running():
                loop.run_until_complete(asyncio.sleep(0))  # lets cancelled coroutines end
                loop.close()
