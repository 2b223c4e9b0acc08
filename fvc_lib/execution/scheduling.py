"""Which task may begin next, and how many at once: the run's DAG, without threads, kernels or files."""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.stages import Task, needed_tasks


def most_at_once(needed: Mapping[str, Collection[str]], key: str, among: Collection[str]) -> int:
    """How many of the tasks ``among`` could ever run at the same time as ``key``, itself counted.

    Those that neither need it nor are needed by it, in however many steps.
    """
    apart = {key, *_all_needed(needed, key)}
    apart |= {other for other in among if key in _all_needed(needed, other)}
    return 1 + len(set(among) - apart)


def _all_needed(needed: Mapping[str, Collection[str]], key: str) -> set[str]:
    found: set[str] = set()
    todo = list(needed[key])
    while todo:
        if (each := todo.pop()) not in found:
            found.add(each)
            todo += needed[each]
    return found


class Schedule:
    """What is left of a plan: tasks become ready as those they need are done, and begin in the plan's order.

    Tasks that do not run count as done. A task that is never ``done`` holds back all that need it.

    Args:
        plan: every task of the run.
        straight: one after the other in the plan's order.
    """

    def __init__(self, plan: Sequence[PlannedTask], *, straight: bool = False) -> None:
        self._place = {planned.task.key: place for place, planned in enumerate(plan)}
        self._tasks = {planned.task.key: planned.task for planned in plan if planned.run}
        self._sorter = graphlib.TopologicalSorter(needed_tasks([planned.task for planned in plan], straight=straight))
        self._sorter.prepare()
        self._ready: list[Task] = []
        self._look()

    @property
    def is_finished(self) -> bool:
        """Whether every task that is to run is done."""
        return not self._sorter.is_active()

    def ready(self) -> Sequence[Task]:
        """The tasks that may begin, first the plan's first."""
        return tuple(self._ready)

    def begin(self, task: Task) -> None:
        """``task`` is no longer waiting."""
        self._ready.remove(task)

    def done(self, task: Task) -> None:
        """``task`` has succeeded: what waited for it alone is ready now."""
        self._sorter.done(task.key)
        self._look()

    def _look(self) -> None:
        while new := self._sorter.get_ready():
            self._sorter.done(*(key for key in new if key not in self._tasks))
            self._ready += [self._tasks[key] for key in new if key in self._tasks]
        self._ready.sort(key=lambda task: self._place[task.key])


def first_that_fits(ready: Iterable[Task], running: Collection[Task], at_once: Mapping[str, int]) -> Task | None:
    """The first of ``ready`` that may begin beside ``running``; ``at_once`` has each stage's limit by name."""
    for task in ready:
        limit = min(at_once[each.stage.name] for each in (task, *running))
        if len(running) < limit:
            return task
    return None
