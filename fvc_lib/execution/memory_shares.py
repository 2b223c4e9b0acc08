"""One memory budget for several kernels at once: who gets how much, and how many fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.predicted_memory import PredictedPeak
from fvc_lib.execution.scheduling import most_at_once
from fvc_lib.execution.stages import Task, needed_tasks
from fvc_lib.services.memory_budget import SHARE_VARIABLE, MemoryBudget, MemoryShare


@dataclass(frozen=True)
class MemoryShares:
    """How the tasks of a plan share a budget.

    Attributes:
        budget: of the whole run.
        for_kernels_bytes: of it what is left beside the runner itself.
        at_once: how many tasks may run while one of this stage does, itself counted; by stage name.
        sharers: how many tasks a task's share is reckoned for, by its key; 1: it never has company.
        lines: what the terminal is to say of it.
    """

    budget: MemoryBudget
    for_kernels_bytes: int
    at_once: Mapping[str, int]
    sharers: Mapping[str, int]
    lines: tuple[str, ...]

    def environment(self, task: Task) -> dict[str, str]:
        """What ``task``'s kernel gets beside its other variables; nothing when it never has company."""
        sharers = self.sharers[task.key]
        if sharers == 1:
            return {}
        share = MemoryShare(self.for_kernels_bytes // sharers, sharers, self.budget)
        return {SHARE_VARIABLE: share.as_text()}


def share_memory(
    plan: Sequence[PlannedTask],
    jobs: int,
    budget: MemoryBudget,
    runner_bytes: int,
    predicted: Mapping[str, PredictedPeak] | None = None,
) -> MemoryShares:
    """Divide ``budget`` between the tasks of ``plan`` that can come to run at once.

    No set of tasks that runs at once is promised more than there is: each gets one part in as many as could ever run
    beside it, and of a stage whose predicted peak does not fit ``jobs`` times fewer run.

    Args:
        plan: what runs.
        jobs: at most so many tasks at once.
        budget: of the whole run.
        runner_bytes: what the runner takes of it.
        predicted: the expected peak of one task by stage name, where it is known.
    """
    rest = max(0, budget.total_bytes - runner_bytes)
    needed = needed_tasks([planned.task for planned in plan])
    running = [planned.task for planned in plan if planned.run]
    keys = [task.key for task in running]
    at_once: dict[str, int] = {}
    sharers: dict[str, int] = {}
    lines: list[str] = []
    for task in running:
        company = min(jobs, most_at_once(needed, task.key, keys))
        name = task.stage.name
        if name not in at_once:
            at_once[name] = jobs
            peak = (predicted or {}).get(name)
            if company > 1 and peak is not None and peak.peak_bytes * company > rest:
                at_once[name] = max(1, rest // max(1, peak.peak_bytes))
                lines.append(_fewer(name, at_once[name], company, peak, rest, budget))
        sharers[task.key] = min(company, at_once[name])
    most = max(sharers.values(), default=1)
    if most > 1:
        each = f"{rest / most / 1e9:.2f} GB"
        lines.append(f"up to {most} tasks at once share {rest / 1e9:.2f} GB of {_whole(budget)}: {each} each")
    return MemoryShares(budget, rest, at_once, sharers, tuple(lines))


def _fewer(name: str, fitting: int, asked: int, peak: PredictedPeak, rest: int, budget: MemoryBudget) -> str:
    return (
        f"{name}: {fitting} at once and not {asked}: each is expected to take {peak.peak_bytes / 1e9:.2f} GB "
        f"({peak.origin}), and {_whole(budget)} leaves {rest / 1e9:.2f} GB beside the runner"
    )


def _whole(budget: MemoryBudget) -> str:
    return f"{budget.total_bytes / 1e9:.2f} GB ({budget.origin})"
