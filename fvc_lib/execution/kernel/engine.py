"""The papermill engine ``fvc``: one notebook in one kernel, and a record that says what happened.

papermill puts the parameters in and hands the notebook over; ``client`` runs the cells. Called by the runner, the
engine does what its ``KernelRequest`` says. Called by ``papermill --engine fvc``, it finds the run that the notebook's
parameters name and has the runner execute that one task, so that a run folder looks alike either way.

Unlike papermill's own engine: cells that never ran are not called completed, outputs are bounded and redacted, the
record is replaced atomically while cells run, and parameters are checked again before anything runs. The record's
metadata are papermill's, so that what reads papermill's records reads ours.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillException

from fvc_lib.execution.kernel.client import BoundedClient, KernelNeverStartedError, KernelProcess, private_folder
from fvc_lib.execution.kernel.outputs import BoundedLog, CellOutputs, OutputFiles, RecordBudget
from fvc_lib.execution.plan.notebook_files import Notebook, check_parameters, notebook_of
from fvc_lib.execution.plan.plan import PlannedTask, make_plan
from fvc_lib.execution.plan.stages import stage_named
from fvc_lib.execution.run.interactive import run_to_work_on
from fvc_lib.execution.run.record import record_resumption
from fvc_lib.execution.run.runner import Runner
from fvc_lib.execution.run.stage_end import CellError, KernelOutcome, KernelRequest
from fvc_lib.services.atomic_files import temporary_of, write_bytes
from fvc_lib.services.errors import UsageError
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import stage_key

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
        """Execute ``nb``, in which papermill has put the parameters.

        Args:
            nb: as papermill prepared it.
            kernel_name: passed over; the kernel is this interpreter's.
            output_path: passed over; papermill writes there what is returned.
            input_path: the notebook's file.
            request: the runner's; None when papermill was called without it.

        Returns:
            Without ``request`` the record. With it ``nb`` as it came: the record is in ``request.record``, how it ended
            in ``request.outcome``.

        Raises:
            UsageError: parameters that the notebook does not have, or whose values are not of their type.
            PapermillException: the notebook did not run to its end, and its record shows no error of a cell.
        """
        notebook = notebook_of(nb, Path(input_path))
        parameters = check_parameters(notebook, nb.metadata.papermill.get("parameters", {}))
        if request is None:
            return _run_interactively(notebook, parameters)
        record = Record(nb, request)
        try:
            request.outcome = asyncio.run(_run_cells(record, request))
        finally:
            record.close()
        return nb


papermill_engines.register("fvc", FvcEngine)


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

    if fold is not None and fold >= config.num_folds:
        raise UsageError(f"fold: got {fold}, and {run.run_id} has folds 0 to {config.num_folds - 1}.")

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
    index, error = None, None
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
            return KernelOutcome(None, True, kernel.return_code, running=index)
        except KernelNeverStartedError as reason:
            return KernelOutcome(None, True, kernel.return_code, never_started=str(reason))
        finally:
            kernel.close()


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

    Attributes:
        source: what runs.
        notebook: what the file shows: sources, parameters and metadata without secrets, and the outputs.
    """

    def __init__(self, source: NotebookNode, request: KernelRequest) -> None:
        self.source, self.path = source, request.record
        self.redactor = request.redactor or Redactor(request.environment)
        self._started = time.monotonic()
        self.notebook: NotebookNode = nbformat.from_dict(self.redactor.tree(source))
        self.notebook.metadata.papermill.update(
            output_path=str(self.path), start_time=_now(), end_time=None, duration=None, exception=None
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
