"""A run of three tiny notebooks in real kernels: what the runner promises is tested on these, not on mocks."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fvc_lib.execution.papermill_engine import KernelOutcome, KernelRequest, execute
from fvc_lib.execution.plan import PlannedTask, make_plan
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.runner import Runner, Terminal
from fvc_lib.execution.run.status import RunStatus, read_status
from fvc_lib.execution.stages import Notebook, read_notebook
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import Stage

PATIENCE_SECONDS = 300.0  # with what comes in a moment, and on a busy machine in many
ONE = "output('one', f'seed {seed}')"
TWO = "output('two', (folder / 'one.txt').read_text() + '!')"
HOLD = """
    import sys, time
    from pathlib import Path
    from fvc_lib.execution.run.status import run_lock
    from fvc_lib.services.run_paths import RunPaths
    with run_lock(Path(sys.argv[1]), sys.argv[2:] or None):
        print("held", flush=True)
        time.sleep(600)
"""
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


@contextmanager
def holder(run: RunPaths, *keys: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``run``, or tasks of it."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(run.root), *keys], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


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


def execute_notebook(source: Path, folder: Path, parameters: dict[str, Any]) -> KernelOutcome:
    """Run one notebook as the runner does, without a run: ``record.ipynb`` and ``log`` in ``folder``."""
    request = KernelRequest(folder / "record.ipynb", folder, dict(os.environ), folder / "log")
    return execute(source, parameters, request)


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


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {PATIENCE_SECONDS} s for {what}")
        time.sleep(0.02)


RUNNER = """
import json, sys
from pathlib import Path
from fvc_lib.execution.stages import read_notebook
from fvc_lib.execution.plan import make_plan
from fvc_lib.execution.run.runner import Runner
from fvc_lib.services.parameters import run_config
from fvc_lib.services.tasks import Stage
from fvc_lib.services.run_paths import RunPaths, list_runs
run, folder = RunPaths(Path(sys.argv[1])), Path(sys.argv[2])
stages, jobs, tasks = map(json.loads, sys.argv[3:])
tasks = frozenset(tasks) if tasks else None
def declared(name, needs, per_fold):
    def outputs(run, fold):
        return (run.tables / (f"{name}.txt" if fold is None else f"{name}_{fold}.txt"),)
    return Stage(name, needs, lambda run, fold: [run.tables / f"{need}.txt" for need in needs], outputs, per_fold)
stages = [declared(name, tuple(needs), per_fold) for name, needs, per_fold in stages]
notebooks = {stage.name: read_notebook(folder / f"{stage.name}.ipynb") for stage in stages}
config = run_config(run.params_yaml)
runner = Runner(run, config, notebooks, jobs=jobs, only_tasks=tasks)
sys.exit(runner.execute(lambda: make_plan(notebooks, config, run, tasks=tasks, stages=stages)))
"""


def start_runner(
    run: RunPaths, project: Project, jobs: int | None = None, tasks: Iterable[str] = ()
) -> subprocess.Popen[str]:
    """A runner in a process of its own, on all of the project's tasks or some."""
    stages = [(stage.name, stage.needs, stage.per_fold) for stage in project.stages]
    given = [str(run.root), str(project.folder), *(json.dumps(value) for value in (stages, jobs, list(tasks)))]
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER, *given],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of two stages that has been run once; only copied."""
    project = build_project(tmp_path_factory.mktemp("two") / "project", one=[ONE], two=[TWO])
    code, _, shown = project.execute(project.begin())
    assert code == 0, shown
    return project


@pytest.fixture
def finished(run_of_two: Project, tmp_path: Path) -> tuple[Project, RunPaths]:
    """A project of two stages and its finished run, of this test's own."""
    folder = tmp_path / "project"
    shutil.copytree(run_of_two.folder.parent, folder)
    config = run_of_two.config.model_copy(update={"runs_dir": str(folder / "runs")})
    (run,) = list_runs(folder / "runs")
    return replace(run_of_two, folder=folder / "notebooks", config=config), run


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[..., Project]:
    """``build_project`` in this test's own folder."""
    return functools.partial(build_project, tmp_path)
