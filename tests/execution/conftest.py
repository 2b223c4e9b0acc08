"""A run of three tiny notebooks in real kernels: what the runner promises is tested on these, not on mocks."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fvc_lib.execution.plan.plan import PlannedTask, make_plan
from fvc_lib.execution.plan.stages import Notebook, read_notebook
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.runner import Runner, Terminal
from fvc_lib.execution.run.stage_end import KernelOutcome
from fvc_lib.execution.run.status import RunStatus, read_status
from fvc_lib.execution.run.task import KernelRequest, execute_with_papermill
from fvc_lib.services.config import RunConfig, resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import Stage

PARAMETERS = 'run_dir: str = ""\nseed: int = 0\n'
WRITE = """
from pathlib import Path
folder = Path(run_dir) / "tables"
folder.mkdir(exist_ok=True)
def output(name, text):
    (folder / f"{name}.txt").write_text(text)
    with (folder / f"{name}.count").open("a") as stream:
        stream.write("x")
"""


def write_notebook(path: Path, sources: Sequence[str], parameters: str | None = PARAMETERS) -> Path:
    """A notebook whose first cell is tagged ``parameters``, followed by one code cell per source."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if parameters is not None:
        cells.insert(0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    return path


def table_stage(name: str, needs: tuple[str, ...] = (), per_fold: bool = False) -> Stage:
    """A stage whose output is ``tables/<name>.txt`` (``_K`` for a fold) and whose inputs are its needs' outputs."""

    def outputs(run: RunPaths, fold: int | None) -> Sequence[Path]:
        return (run.tables / (f"{name}.txt" if fold is None else f"{name}_{fold}.txt"),)

    def inputs(run: RunPaths, fold: int | None) -> Sequence[Path]:
        return tuple(run.tables / f"{need}.txt" for need in needs)

    return Stage(name, needs, inputs, outputs, per_fold, trains=per_fold)


def execute_notebook(source: Path, folder: Path, parameters: dict[str, Any], **options: Any) -> KernelOutcome:
    """Run one notebook as the runner does, without a run: ``record.ipynb`` and ``log`` in ``folder``."""
    options = {"environment": dict(os.environ), "log": folder / "log", "on_start": lambda pid: None, **options}
    request = KernelRequest(folder / "record.ipynb", folder, folder, **options)
    execute_with_papermill(source, parameters, request)
    assert request.outcome is not None
    return request.outcome


@dataclass
class Project:
    """A folder of notebooks, their stages and a runs folder."""

    folder: Path
    stages: tuple[Stage, ...]
    config: RunConfig

    def notebooks(self) -> dict[str, Notebook]:
        return {stage.name: read_notebook(self.folder / f"{stage.name}.ipynb") for stage in self.stages}

    def begin(self) -> RunPaths:
        return begin_run(self.config, command="test")

    def plan(self, run: RunPaths | None, **options: Any) -> list[PlannedTask]:
        return make_plan(self.notebooks(), self.config, run, stages=self.stages, **options)

    def execute(
        self, run: RunPaths, plan: list[PlannedTask] | Callable[[], list[PlannedTask]] | None = None, **options: Any
    ) -> tuple[int, RunStatus, str]:
        """Run; returns exit code, status and what the terminal showed. ``options`` are the runner's."""

        def as_it_is_then() -> list[PlannedTask]:
            if plan is None:
                return self.plan(run, tasks=options.get("only_tasks"))
            return plan() if callable(plan) else plan

        shown = io.StringIO()
        runner = Runner(run, self.config, self.notebooks(), Terminal(shown), **options)
        code = runner.execute(as_it_is_then)
        return code, read_status(run), shown.getvalue()

    def times_run(self, run: RunPaths, name: str) -> int:
        """How often a stage's notebook wrote its output."""
        path = run.tables / f"{name}.count"
        return len(path.read_text()) if path.exists() else 0

    def with_config(self, **values: object) -> Project:
        return replace(self, config=self.config.model_copy(update=values))


def build_project(folder: Path, per_fold: tuple[str, ...] = (), **cells: Sequence[str]) -> Project:
    """A project of stages in a chain below ``folder``, from stage name -> code cells."""
    stages: list[Stage] = []
    for name, sources in cells.items():
        fold = "fold: int = 0\n" if name in per_fold else ""
        write_notebook(folder / "notebooks" / f"{name}.ipynb", [WRITE, *sources], PARAMETERS + fold)
        needs = tuple(stage.name for stage in stages[-1:] if not stage.per_fold)
        stages.append(table_stage(name, needs, name in per_fold))
    config = resolve_config({"runs_dir": str(folder / "runs"), "num_folds": 2}, environ={})
    return Project(folder / "notebooks", tuple(stages), config)


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[..., Project]:
    """``build_project`` in this test's own folder."""
    return functools.partial(build_project, tmp_path)
