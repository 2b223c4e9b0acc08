"""The stages of a run in order: which it has, what each needs, and what a name on the command line means."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from dataclasses import dataclass

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.run_paths import stage_key
from fvc_lib.services.tasks import STAGES, Stage


@dataclass(frozen=True)
class Task:
    """One execution of one notebook: a stage, or one fold of it."""

    stage: Stage
    fold: int | None

    @property
    def key(self) -> str:
        """The name of everything this task writes, for example ``04_fold_training_fold_2``."""
        return stage_key(self.stage.name, self.fold)


def stages_of(config: RunConfig, stages: Sequence[Stage] = STAGES) -> list[Stage]:
    """Those that a run of ``config.task`` has."""
    return [stage for stage in stages if config.task in stage.tasks]


def refuse_stage_of_another_task(config: RunConfig, *named: Stage | None) -> None:
    """Check that a run of ``config.task`` has the stages that were named.

    Raises:
        UsageError: it has not.
    """
    for stage in named:
        if stage is not None and config.task not in stage.tasks:
            raise UsageError(
                f"{stage.name} is a stage of task {' and '.join(stage.tasks)}, and this run's task is {config.task}. "
                f"Begin one of that task with -p task {stage.tasks[0]}, or name such a run with --resume."
            )


def tasks_in_order(config: RunConfig, stages: Sequence[Stage] = STAGES) -> list[Task]:
    """Every task of a run of ``config.task``, each after what it needs, stages of equal rank by name.

    Of a run with ``annotations_only`` these are the stages that need no other: there are no videos to go on with.
    """
    stages = stages_of(config, stages)
    if config.annotations_only:
        stages = [stage for stage in stages if not stage.needs]
    by_name = {stage.name: stage for stage in stages}
    sorter = graphlib.TopologicalSorter({stage.name: by_name.keys() & stage.needs for stage in stages})
    sorter.prepare()
    names: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        names.extend(ready)
        sorter.done(*ready)
    return [
        Task(by_name[name], fold)
        for name in names
        for fold in (range(config.num_folds) if by_name[name].per_fold else (None,))
    ]


def needed_tasks(tasks: Sequence[Task], *, straight: bool = False) -> dict[str, set[str]]:
    """The keys that each task needs finished, by its key; a stage of folds is finished when all of them are.

    Args:
        tasks: in the order of the plan.
        straight: each needs the one before it and nothing else: one after the other, in the order given.
    """
    if straight:
        return {task.key: {tasks[place - 1].key} if place else set() for place, task in enumerate(tasks)}
    return {task.key: {other.key for other in tasks if other.stage.name in task.stage.needs} for task in tasks}


def stage_named(text: str, stages: Sequence[Stage] = STAGES) -> Stage:
    """The one stage whose name is or contains ``text`` (``05``, ``results``, ``05_kfold_results``).

    Raises:
        UsageError: none or several fit; the message lists the names.
    """
    names = [stage.name for stage in stages]
    exact = [stage for stage in stages if stage.name == text]
    fitting = exact or [stage for stage in stages if text and text in stage.name]
    if len(fitting) == 1:
        return fitting[0]
    raise UsageError(f"no single stage called {text!r}.{did_you_mean(text, names)} Stages: {', '.join(names)}.")


def task_keys(texts: Sequence[str], config: RunConfig, stages: Sequence[Stage] = STAGES) -> frozenset[str]:
    """The tasks that ``texts`` name: each a task's key, or a stage (also a part of its name) for all its tasks.

    Raises:
        UsageError: a text names no task, a stage of another task, or a part of a name fits several stages.
    """
    every = {task.key: task for task in tasks_in_order(config, stages)}
    found: set[str] = set()
    for text in texts:
        if text in every:
            found.add(text)
            continue
        stage = stage_named(text, stages)
        refuse_stage_of_another_task(config, stage)
        found.update(key for key, task in every.items() if task.stage is stage)
    return frozenset(found)
