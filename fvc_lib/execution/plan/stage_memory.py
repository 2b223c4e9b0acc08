"""How much memory each stage of a run is expected to take, and how that is known.

Measured is better than computed, and this run better than another: what a stage took here, else what the newest run
with the same memory-relevant parameters took, else one step of training tried out, else a kernel with its imports. What
was measured on a machine of other size counts with as many worker processes as this one would have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.execution.plan.plan import PlannedTask, most_at_once
from fvc_lib.execution.plan.stages import Task, needed_tasks, stages_of
from fvc_lib.execution.run.exit_codes import rows_from_the_end
from fvc_lib.execution.run.status import RunStatus, read_status
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory import budget as memory_budget
from fvc_lib.services.memory.budget import MemoryBudget, MemoryShare
from fvc_lib.services.memory.measured_steps import read_steps
from fvc_lib.services.memory.workers import EVENT as POOL_EVENT, most_workers
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import FINAL_TRAINING, FOLD_TRAINING, STAGES, Stage

_COUNTED_WORKERS = 2  # in a stage's ``kernel_bytes``
_NEWEST_RUNS = 20  # as many are looked into; reading one takes about ten milliseconds
KERNEL_ORIGIN = "a kernel with its imports on a small corpus; nothing was measured with these parameters yet"

Measure = Callable[[RunConfig], int | None]


@dataclass(frozen=True)
class PredictedPeak:
    """The expected peak resident memory of one task of a stage (kernel and children), and where the number is from.

    ``origin`` is a clause such as ``measured in run_20260101_120000_abcdef12``.
    """

    peak_bytes: int
    origin: str


def predicted_peaks(
    config: RunConfig, run: RunPaths | None, *, measure: Measure | None = None, job_cpus: int = 0
) -> dict[str, PredictedPeak]:
    """What one task of each stage is expected to take, by the stage's name. Reads only; never fails for want of data.

    ``run`` is the run that goes on, None for a new one. ``measure`` tries one training step out and returns the
    training's peak in bytes, or None where it cannot; it is asked only when no run tells. ``job_cpus``: the stages will
    run in jobs of so many processors, whose memory is what is predicted here; 0: on this machine.
    """
    stages = stages_of(config, STAGES)
    missing = {stage.name for stage in stages}
    found = {} if run is None else _of_run(run, config, missing, "measured in this run", job_cpus)
    missing -= found.keys()
    for other in _others(Path(config.runs_dir), run):
        if not missing:
            break
        more = _of_run(other, config, missing, f"measured in {other.run_id}", job_cpus)
        found |= more
        missing -= more.keys()
    if FOLD_TRAINING in missing and (peak := _of_training(config, run, measure)) is not None:
        found[FOLD_TRAINING] = peak
        missing.discard(FOLD_TRAINING)
    if FINAL_TRAINING in missing and FOLD_TRAINING in found:  # the same network, on one fold more
        found[FINAL_TRAINING] = found[FOLD_TRAINING]
        missing.discard(FINAL_TRAINING)
    guessed = {
        stage.name: PredictedPeak(_guessed_bytes(stage, config, job_cpus), KERNEL_ORIGIN)
        for stage in stages
        if stage.name in missing
    }
    return {stage.name: {**found, **guessed}[stage.name] for stage in stages}


def _guessed_bytes(stage: Stage, config: RunConfig, job_cpus: int) -> int:
    """Where nothing is known: a rank takes no more than a kernel that trains, and the kernel waits beside its ranks."""
    if stage.trains and config.num_ranks > 1:
        return memory_budget.KERNEL_BYTES + config.num_ranks * stage.kernel_bytes
    return _with_workers(stage.kernel_bytes, _COUNTED_WORKERS, stage.worker_bytes(config), config, job_cpus)


def _with_workers(peak_bytes: int, workers_then: int, worker_bytes: int, config: RunConfig, job_cpus: int) -> int:
    """``peak_bytes``, which so many workers had part in, with as many more as this machine or the job would have."""
    if not worker_bytes:
        return peak_bytes
    if job_cpus:
        now = min(config.workers or job_cpus, job_cpus)
    else:
        budget_bytes = memory_budget.memory_budget(config.mem_gb).total_bytes
        now = most_workers(config.workers, available_cores(), worker_bytes, budget_bytes, peak_bytes)
    return peak_bytes + max(0, now - workers_then) * worker_bytes


def _measured_bytes(run: RunPaths, name: str, peak_bytes: int, config: RunConfig, job_cpus: int) -> int:
    """A stage's measured peak, with the workers that this machine or the job would have."""
    for row in rows_from_the_end(run.memory_events(name)):
        details = row.get("details")
        if row.get("kind") == POOL_EVENT and isinstance(details, dict):
            counted, each = details.get("workers"), details.get("worker_mb")
            if isinstance(counted, int) and isinstance(each, int | float):
                return _with_workers(peak_bytes, counted, round(each * 1e6), config, job_cpus)
    return peak_bytes


def _of_run(run: RunPaths, config: RunConfig, names: set[str], origin: str, job_cpus: int) -> dict[str, PredictedPeak]:
    """What finished tasks of ``run`` took, of those stages among ``names`` that had what they now would have."""
    try:
        status = read_status(run)
        then = read_params_file(run.params_yaml)
    except (FvcError, OSError):
        return {}
    now = config.model_dump(mode="json")
    peaks = {name: _largest_peak(status, name) for name in names}
    return {
        name: PredictedPeak(_measured_bytes(run, name, peak, config, job_cpus), origin)
        for name, peak in peaks.items()
        if peak and all(then.get(each, now[each]) == now[each] for each in now if name in DECLARED[each].memory)
    }


def _largest_peak(status: RunStatus, name: str) -> int:
    """Over the folds of a stage that are done: each may be the one that waits for a memory limit."""
    done = (each for key, each in status.stages.items() if key == name or key.startswith(f"{name}_fold_"))
    return max((each.peak_rss_bytes or 0 for each in done if each.state == "done"), default=0)


def _others(runs_dir: Path, run: RunPaths | None) -> Iterator[RunPaths]:
    """The newest runs, the newest first."""
    for other in list_runs(runs_dir)[::-1][:_NEWEST_RUNS]:
        if run is None or other.root != run.root.absolute():
            yield other


def _of_training(config: RunConfig, run: RunPaths | None, measure: Measure | None) -> PredictedPeak | None:
    step = (
        None
        if run is None or config.num_ranks > 1
        else _measured_step(run.preflight, min(config.num_workers, available_cores()))
    )
    if step is not None:
        return PredictedPeak(memory_budget.KERNEL_BYTES + step, "one step measured in this run, and a kernel's imports")
    if measure is None:
        return None
    try:
        peak = measure(config)
    except (FvcError, OSError):
        return None
    return None if peak is None else PredictedPeak(peak, "one step on made-up clips, tried out just now")


def _measured_step(preflight: Path, num_workers: int) -> int | None:
    """What a training adds to its kernel by ``memory/preflight.json``; None where that says nothing."""
    stored = read_steps(preflight)
    chosen = max((micro_batch for micro_batch, _ in stored.decisions.values()), default=0)
    found = [each.found for each in stored.measurements.values()]
    tried = [(each, step) for each in found for size, step in each.step_bytes.items() if size <= chosen]
    beside = memory_budget.MEASURING_BYTES
    return max(
        (step + max(beside, each.first_use_bytes + num_workers * each.worker_bytes) for each, step in tried),
        default=None,
    )


# One memory budget for several kernels at once: who gets how much, and how many fit.


@dataclass(frozen=True)
class MemoryShares:
    """How the tasks of a plan share a budget."""

    budget: MemoryBudget  # of the whole run
    for_kernels_bytes: int  # of it what is left beside the runner itself
    at_once: Mapping[str, int]  # how many tasks may run while one of this stage does, itself counted; by stage name
    sharers: Mapping[str, int]  # how many tasks a task's share is reckoned for, by its key; 1: it never has company
    lines: tuple[str, ...]  # what the terminal is to say of it

    def environment(self, task: Task) -> dict[str, str]:
        """What ``task``'s kernel gets beside its other variables; nothing when it never has company."""
        sharers = self.sharers[task.key]
        if sharers == 1:
            return {}
        share = MemoryShare(self.for_kernels_bytes // sharers, sharers, self.budget)
        return {memory_budget.SHARE_VARIABLE: share.as_text()}


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

    ``jobs`` is how many tasks may run at once, ``runner_bytes`` what the runner takes of the budget, and ``predicted``
    the expected peak of one task by stage name, where it is known.
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
