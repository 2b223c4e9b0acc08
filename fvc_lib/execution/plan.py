"""What a command would do and why, worked out before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.execution.fingerprint import fingerprint_of, read_record, reason_to_run
from fvc_lib.execution.notebook_files import STAGE_PARAMETERS, Notebook, read_notebook
from fvc_lib.execution.stages import STAGES, Stage, Task, tasks_in_order
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class PlannedTask:
    """One task and the decision about it. ``finished_before`` tells a stale result from one that never was."""

    task: Task
    run: bool
    reason: str
    finished_before: bool = False


def read_notebooks(folder: Path, stages: Sequence[Stage] = STAGES) -> dict[str, Notebook]:
    """The stages' notebooks by stage name, each checked.

    Raises:
        UsageError: a notebook is missing or broken, or has a parameter that no configuration knows.
    """
    notebooks = {stage.name: read_notebook(folder / f"{stage.name}.ipynb") for stage in stages}
    known = {*RunConfig.model_fields, *STAGE_PARAMETERS}
    for notebook in notebooks.values():
        for name in notebook.parameters:
            if name not in known:
                raise UsageError(
                    f"notebook {str(notebook.path)!r}: parameter {name!r} is no field of RunConfig."
                    f"{did_you_mean(name, known)}"
                )
    return notebooks


def make_plan(
    notebooks: Mapping[str, Notebook],
    config: RunConfig,
    run: RunPaths | None,
    *,
    only: Stage | None = None,
    start: Stage | None = None,
    stages: Sequence[Stage] = STAGES,
) -> list[PlannedTask]:
    """Decide for every task whether it runs.

    Args:
        notebooks: by stage name.
        config: the run's configuration.
        run: the run to continue; None for a new one, in which everything runs.
        only: run this stage and no other.
        start: run this stage and all that follow from it, finished or not.
        stages: the run's stages.
    """
    tasks = tasks_in_order(config, stages)
    if only is not None:
        return [
            PlannedTask(task, task.stage is only, "asked for by --only" if task.stage is only else "not asked for")
            for task in tasks
        ]
    if run is None or not config.use_mlops_pipeline:
        why = "new run" if run is None else "USE_MLOPS_PIPELINE is false: nothing is skipped"
        return [PlannedTask(task, True, why) for task in tasks]
    return _continue_run(tasks, notebooks, config, run, start)


def _continue_run(
    tasks: Sequence[Task],
    notebooks: Mapping[str, Notebook],
    config: RunConfig,
    run: RunPaths,
    start: Stage | None,
) -> list[PlannedTask]:
    again: set[str] = set()
    plan = []
    for task in tasks:
        stage = task.stage
        upstream = sorted(again.intersection(stage.needs))
        changed = reason_to_run(task, fingerprint_of(task, notebooks[stage.name], run, config), run)
        if stage is start:
            reason: str | None = "asked for by --from"
        elif upstream:
            reason = f"after {', '.join(upstream)}"
        else:
            reason = changed
        if reason is not None:
            again.add(stage.name)
        finished = read_record(run.stage_checkpoint(stage.name, task.fold)) is not None
        plan.append(PlannedTask(task, reason is not None, reason or "finished, nothing changed", finished))
    return plan
