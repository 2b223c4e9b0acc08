"""The engine of ``papermill --engine fvc``, which executes one task of a run as ``run_notebooks.py`` does.

A task is one notebook of a run, or one fold of it. The notebook's parameters ``run_dir`` and ``fold`` name the run and
the fold. ``papermill`` and ``run_notebooks.py`` write the same files into the run folder.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillException

from fvc_lib.execution.papermill_engine import checked_parameters
from fvc_lib.execution.plan import make_plan
from fvc_lib.execution.run.record import record_resumption
from fvc_lib.execution.run.runner import Runner
from fvc_lib.execution.run.which_run import open_run
from fvc_lib.execution.stages import STAGE_PARAMETERS, stage_named
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import stage_key


class FvcEngine(Engine):  # type: ignore[misc]  # papermill ships no types
    """The papermill engine ``fvc``, which executes a notebook as a task of a run.

    papermill finds the engine by the entry point ``papermill.engine``.
    """

    @classmethod
    def execute_notebook(cls, nb: NotebookNode, kernel_name: str, *, input_path: str, **_: Any) -> NotebookNode:
        """Execute one task of the run that the parameters name, and return the executed notebook.

        Args:
            nb: the notebook, into which papermill has injected the parameters.
            kernel_name: ignored; the kernel uses this Python interpreter.
            input_path: path of the notebook; its file name decides the stage.

        Raises:
            UsageError: the notebook does not have a parameter, a value has the wrong type, or there is no such run.
            PapermillException: the task failed without an error in a cell, for example because the kernel died.
        """
        notebook, parameters = checked_parameters(nb, Path(input_path))
        stage = stage_named(notebook.name)
        if stage.name != notebook.name:
            raise UsageError(f"{notebook.path}: engine fvc runs notebooks of stages; for others leave it out.")
        command = shlex.join(["papermill", *sys.argv[1:]])
        run_dir = parameters.get("run_dir") or notebook.parameters["run_dir"]
        run, config, is_new = open_run(
            stage.name,
            str(run_dir),
            {name: value for name, value in parameters.items() if name not in STAGE_PARAMETERS},
            command=command,
        )
        fold = int(parameters.get("fold", notebook.parameters["fold"])) if stage.per_fold else None
        if fold is not None and fold >= config.num_trainings:
            raise UsageError(f"fold: got {fold}, and {run.run_id} has folds 0 to {config.num_trainings - 1}.")
        if not is_new:
            for difference in record_resumption(run, config, command=command):
                print(f"warning: this attempt differs from the one before: {difference}", file=sys.stderr)
        print(f"run {run.root}")
        notebooks, key = {stage.name: notebook}, stage_key(stage.name, fold)
        exit_code = Runner(run, config, notebooks).execute(
            lambda: make_plan(notebooks, config, run, only=stage, tasks=frozenset({key}))
        )
        path = run.partial_notebook(stage.name, fold) if exit_code else run.executed_notebook(stage.name, fold)
        record: NotebookNode = nbformat.from_dict(json.loads(path.read_text(encoding="utf-8")))
        kinds = {output.output_type for cell in record.cells for output in cell.get("outputs", [])}
        if exit_code and "error" not in kinds:  # else papermill raises it
            raise PapermillException(f"{key} did not run to its end; its record says why: {path}")
        return record


papermill_engines.register("fvc", FvcEngine)
