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
    """One task and the decision about it.

    Attributes:
        finished_before: it has been finished at some time, with whatever parameters and code.
        redo: what it wrote before counts no more and makes room; otherwise it goes on from what is there.
    """

    task: Task
    run: bool
    reason: str
    finished_before: bool = False
    redo: bool = False


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
    if run is None:
        return [PlannedTask(task, True, "new run") for task in tasks]
    plan: list[PlannedTask] = []
    for task in tasks:
        finished = read_record(run.stage_checkpoint(task.stage.name, task.fold)) is not None
        asked, reason = _asked_for(task, tasks, config, only, start)
        if asked is None:
            reason = _why_again(task, plan, notebooks, config, run)
            asked = reason is not None
        forced = asked and (task.stage in (only, start) or not config.use_mlops_pipeline)
        plan.append(
            PlannedTask(task, asked, reason or "finished, nothing changed", finished, asked and (finished or forced))
        )
    return plan


def _asked_for(
    task: Task, tasks: Sequence[Task], config: RunConfig, only: Stage | None, start: Stage | None
) -> tuple[bool | None, str | None]:
    """Whether the command itself decides about ``task``; None when its state has to."""
    stage = task.stage
    if only is not None:
        return stage is only, "asked for by --only" if stage is only else "not asked for"
    if stage is start:
        return True, "asked for by --from"
    if not config.use_mlops_pipeline:
        names = [other.stage.name for other in tasks]
        if start is not None and names.index(stage.name) < names.index(start.name):
            return False, "before --from"
        return True, "USE_MLOPS_PIPELINE is false: nothing is skipped"
    return None, None


def _why_again(
    task: Task, before: Sequence[PlannedTask], notebooks: Mapping[str, Notebook], config: RunConfig, run: RunPaths
) -> str | None:
    again = {planned.task.stage.name for planned in before if planned.run}
    upstream = sorted(again.intersection(task.stage.needs))
    if upstream:
        return f"after {', '.join(upstream)}"
    return reason_to_run(task, fingerprint_of(task, notebooks[task.stage.name], run, config), run)
