"""Decide which tasks a command runs and why, before anything is written."""

import graphlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fvc_lib.execution.plan.fingerprint import fingerprint_of, is_finished, reason_to_run
from fvc_lib.execution.plan.stages import Notebook, Task, needed_tasks, read_notebook, tasks_in_order
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import STAGES, Stage


@dataclass(frozen=True)
class PlannedTask:
    """One task, and whether and why this command runs it."""

    task: Task
    run: bool  # whether this command runs it
    reason: str
    finished_before: bool = False  # whether it has ever finished, even with other parameters or code
    redo: bool = False  # whether its earlier files are moved away before anything runs
    only_if_changed: bool = False  # whether it is skipped if the stages before it write the same files again


def read_notebooks(folder: Path, stages: Sequence[Stage] = STAGES) -> dict[str, Notebook]:
    """Read and check the stages' notebooks; return them by stage name.

    Raises:
        UsageError: a notebook is missing or broken.
    """
    return {stage.name: read_notebook(folder / f"{stage.name}.ipynb") for stage in stages}


def make_plan(
    notebooks: Mapping[str, Notebook],
    config: RunConfig,
    run: RunPaths | None,
    *,
    only: Stage | None = None,
    start: Stage | None = None,
    force: Sequence[Stage] = (),
    tasks: frozenset[str] | None = None,
    stages: Sequence[Stage] = STAGES,
) -> list[PlannedTask]:
    """Return every task of the run in order, with the decision whether it runs.

    Args:
        notebooks: the notebooks by stage name.
        config: the parameters.
        run: the run; None: a new run, in which everything runs.
        only: the only stage to run.
        start: a stage to run even if it is finished, with all stages that depend on it.
        force: stages that count as unfinished.
        tasks: keys of the tasks of this command, while other jobs do the others; None: all.
        stages: all stages.

    Raises:
        UsageError: a task of ``tasks`` needs another task that is neither finished nor in ``tasks``.
    """
    ordered = tasks_in_order(config, stages)
    if run is None:
        plan = [PlannedTask(task, True, "new run") for task in ordered]
        return plan if tasks is None else _only_tasks(plan, tasks)
    plan, names = [], [task.stage.name for task in ordered]
    for task in ordered:
        stage, finished, reason, waits = task.stage, is_finished(task, run), "", False
        if only is not None:
            runs, reason = stage is only, "asked for by --only" if stage is only else "not asked for"
        elif stage is start or stage in force:
            runs, reason = True, "asked for by --from" if stage is start else "asked for by --force"
        elif not config.use_mlops_pipeline:
            runs = start is None or names.index(stage.name) > names.index(start.name)
            reason = "USE_MLOPS_PIPELINE is false: nothing is skipped" if runs else "before --from"
        else:
            again = sorted({planned.task.stage.name for planned in plan if planned.run} & stage.reads(config))
            now = fingerprint_of(task, notebooks[stage.name], run, config)
            reason = reason_to_run(task, now, run, inputs_are_final=not again) or ""
            if again and not reason:
                reason, waits = f"after {', '.join(again)}", start is None
            runs, reason = bool(reason), reason or "finished, nothing changed"
        forced = stage in (only, start, *force) or not config.use_mlops_pipeline
        redo = runs and (finished or forced) and not waits
        plan.append(PlannedTask(task, runs, reason, finished, redo, waits))
    return plan if tasks is None else _only_tasks(plan, tasks)


def _only_tasks(plan: Sequence[PlannedTask], keys: frozenset[str]) -> list[PlannedTask]:
    """Return ``plan``, in which the tasks outside ``keys`` do not run, because other jobs run them."""
    needed = needed_tasks([planned.task for planned in plan])
    unfinished = {planned.task.key: planned.reason for planned in plan if planned.run}
    for key in sorted(keys & unfinished.keys()):
        if missing := sorted((needed[key] & unfinished.keys()) - keys):
            why = ", ".join(f"{name} ({unfinished[name]})" for name in missing)
            raise UsageError(
                f"{key} cannot run yet, and nothing was begun: it needs {why}. Run that first, or name it in --tasks, "
                "too. If it was left by jobs under SLURM, submit the rest once `status` shows none at work: --resume "
                "RUN --executor slurm."
            )
    again = {planned.task.key for planned in plan if planned.redo and planned.task.key in keys}
    narrowed = []
    for planned in plan:
        key = planned.task.key
        if planned.run and key not in keys:
            # Results that depend on a repeated task are moved away; a training stays until its job has checked it.
            redo = planned.finished_before and not planned.task.stage.trains and bool(needed[key] & again)
            again |= {key} if redo else set()
            reason = f"left to another job: {planned.reason}"
            planned = replace(planned, run=False, redo=redo, only_if_changed=False, reason=reason)
        narrowed.append(planned)
    return narrowed


def all_needed(needed: Mapping[str, Collection[str]], key: str) -> set[str]:
    """Return the keys that ``key`` needs, directly or indirectly; ``needed`` has the direct needs of each key."""
    return set(needed[key]).union(*(all_needed(needed, each) for each in needed[key]))


class Schedule:
    """The unfinished tasks of a plan, in an order in which every task follows the tasks that it needs.

    Tasks that the plan does not run count as done.

    Args:
        plan: every task of the run.
        straight: run the tasks one after the other in the plan's order.
    """

    def __init__(self, plan: Sequence[PlannedTask], *, straight: bool = False) -> None:
        self._left = {planned.task.key: planned.task for planned in plan if planned.run}
        self._graph = graphlib.TopologicalSorter(needed_tasks([planned.task for planned in plan], straight=straight))
        self._graph.prepare()
        self._ready: list[str] = []

    @property
    def is_finished(self) -> bool:
        """Whether every task that is to run is done."""
        return not self._left

    def next(self) -> Task | None:
        """Return a task whose needed tasks are all done; None if none may begin now. A task is returned once."""
        self._ready += self._graph.get_ready()
        while self._ready:
            key = self._ready.pop(0)
            if key in self._left:
                return self._left[key]
            self._graph.done(key)
            self._ready += self._graph.get_ready()
        return None

    def done(self, task: Task) -> None:
        """Note that ``task`` has succeeded."""
        del self._left[task.key]
        self._graph.done(task.key)
