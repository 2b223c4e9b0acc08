"""How much memory each stage of a run is expected to take, and how that is known.

Measured is better than computed, and this run better than another: what a stage took here, else what the newest run
with the same memory-relevant parameters took, else one step of training tried out, else a kernel with its imports. What
was measured on a machine of other size counts with as many worker processes as this one would have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from fvc_lib.execution.plan.plan import PlannedTask, most_at_once
from fvc_lib.execution.plan.stages import Task, needed_tasks, stages_of
from fvc_lib.execution.run.exit_codes import rows_from_the_end
from fvc_lib.execution.run.status import RunStatus, read_status
from fvc_lib.services.config import DECLARED, RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory import budget as memory_budget
from fvc_lib.services.memory.budget import MemoryBudget, MemoryShare
from fvc_lib.services.memory.measured_steps import MeasuredStep, read_steps
from fvc_lib.services.memory.policy import resolve_memory_policy
from fvc_lib.services.memory.workers import EVENT as POOL_EVENT, FEATURE_BYTES, most_workers
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import FINAL_TRAINING, FOLD_TRAINING, STAGES, Stage

# In a stage's ``kernel_bytes``, and what these take there at least: videos of the sample corpora are small.
_COUNTED_WORKERS, _COUNTED_BYTES = 2, 60_000_000
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
    workers: str = ""  # how many processes decode or measure at once and which limit says so; empty: it has none


@dataclass(frozen=True)
class WorkersRoom:
    """Where workers will run: ``origin`` says whose ``cores`` and is a clause like ``of this machine``."""

    cores: int
    origin: str
    memory: MemoryBudget | None  # None: a job that gets what is predicted

    @classmethod
    def here(cls, config: RunConfig) -> Self:
        """This machine, or what this process may use of it."""
        return cls(available_cores(), "that this process may use", memory_budget.memory_budget(config.mem_gb))

    @classmethod
    def of_job(cls, config: RunConfig, cpus: int, site: str, memory_mib: int | None = None) -> Self:
        """A job of so many processors and MiB (None: what is predicted), which the file ``site`` says."""
        limits = [] if memory_mib is None else [MemoryBudget(memory_mib << 20, f"of the job, by {site}")]
        if config.mem_gb is not None:
            limits.append(MemoryBudget(int(config.mem_gb * 1e9), "mem_gb / FVC_MEM_GB"))
        smallest = min(limits, key=lambda limit: limit.total_bytes, default=None)
        return cls(cpus, f"of the job, by {site}", smallest)

    def workers(self, asked: int, worker_bytes: int, beside_bytes: int) -> tuple[int, str]:
        """How many workers of that size there are beside the kernel, and why; ``asked``: 0 for one per core."""
        wanted = asked or self.cores
        if self.memory is None:
            fitting = wanted
        else:
            fitting = most_workers(asked, self.cores, worker_bytes, self.memory.total_bytes, beside_bytes)
        number = "1 worker process" if fitting == 1 else f"up to {fitting} worker processes"
        size = f"{number} of about {worker_bytes / 1e6:.0f} MB"
        said = f"-p workers {asked}" if asked else f"one for each of {self.cores} cores {self.origin}"
        if fitting < wanted and self.memory is not None:
            return fitting, (
                f"{size} and not {wanted} ({said}): {self.memory.total_bytes / 1e9:.2f} GB ({self.memory.origin}) hold "
                f"no more beside {beside_bytes / 1e9:.2f} GB of the notebook"
            )
        return fitting, f"{size}: {said}"


Rooms = Callable[[Stage], WorkersRoom]


def predicted_peaks(
    config: RunConfig, run: RunPaths | None, *, measure: Measure | None = None, rooms: Rooms | None = None
) -> dict[str, PredictedPeak]:
    """What one task of each stage is expected to take, by the stage's name. Reads only; never fails for want of data.

    ``run`` is the run that goes on, None for a new one. ``measure`` tries one training step out and returns the
    training's peak in bytes, or None where it cannot; it is asked only when no run tells. ``rooms``: where a stage's
    workers will run; None: on this machine.
    """
    stages, here = stages_of(config, STAGES), WorkersRoom.here(config)
    in_room = {stage.name: (stage, here if rooms is None else rooms(stage)) for stage in stages}
    missing = {stage.name for stage in stages}
    found = {} if run is None else _of_run(run, config, _some(in_room, missing), "measured in this run")
    missing -= found.keys()
    for other in _others(Path(config.runs_dir), run):
        if not missing:
            break
        more = _of_run(other, config, _some(in_room, missing), f"measured in {other.run_id}")
        found |= more
        missing -= more.keys()
    if FOLD_TRAINING in missing and (peak := _of_training(config, run, measure)) is not None:
        found[FOLD_TRAINING] = peak
        missing.discard(FOLD_TRAINING)
    if FINAL_TRAINING in missing and FOLD_TRAINING in found:  # the same network, on one fold more
        found[FINAL_TRAINING] = found[FOLD_TRAINING]
        missing.discard(FINAL_TRAINING)
    guessed = {name: _guessed(config, *in_room[name]) for name in missing}
    return {stage.name: {**found, **guessed}[stage.name] for stage in stages}


_InRoom = Mapping[str, tuple[Stage, WorkersRoom]]  # by the stage's name


def _some(in_room: _InRoom, names: set[str]) -> _InRoom:
    return {name: in_room[name] for name in in_room if name in names}


def _guessed(config: RunConfig, stage: Stage, room: WorkersRoom) -> PredictedPeak:
    """Where nothing is known: a rank takes no more than a kernel that trains, and the kernel waits beside its ranks."""
    if stage.trains and config.num_ranks > 1:
        ranks_bytes = config.num_ranks * stage.kernel_bytes
        return PredictedPeak(memory_budget.KERNEL_BYTES + ranks_bytes, KERNEL_ORIGIN)
    each = stage.worker_bytes(config)
    counted = _COUNTED_WORKERS if each <= FEATURE_BYTES else 0  # such as load a network are not in that number
    pool = _Pool(counted, each, stage.kernel_bytes - _COUNTED_BYTES)
    return _with_workers(PredictedPeak(stage.kernel_bytes, KERNEL_ORIGIN), pool, config, room)


class _Pool(NamedTuple):
    """Workers that a peak was measured with, what one takes, and what the kernel held beside them."""

    workers: int
    worker_bytes: int
    beside_bytes: int


def _with_workers(peak: PredictedPeak, pool: _Pool, config: RunConfig, room: WorkersRoom) -> PredictedPeak:
    """``peak``, which the workers of ``pool`` had part in, with as many more as ``room`` would have."""
    if not pool.worker_bytes:
        return peak
    now, why = room.workers(config.workers, pool.worker_bytes, pool.beside_bytes)
    return PredictedPeak(peak.peak_bytes + max(0, now - pool.workers) * pool.worker_bytes, peak.origin, why)


def _measured(run: RunPaths, config: RunConfig, stage: Stage, room: WorkersRoom, peak: PredictedPeak) -> PredictedPeak:
    """A stage's measured peak, with the workers that ``room`` would have."""
    for row in rows_from_the_end(run.memory_events(stage.name)):
        details = row.get("details")
        if row.get("kind") == POOL_EVENT and isinstance(details, dict):
            counted, each = details.get("workers"), details.get("worker_mb")
            if isinstance(counted, int) and isinstance(each, int | float):
                beside = details.get("beside_mb")  # runs of earlier versions lack it: no less than all
                beside_bytes = round(beside * 1e6) if isinstance(beside, int | float) else peak.peak_bytes
                return _with_workers(peak, _Pool(counted, round(each * 1e6), beside_bytes), config, room)
    return peak


def _of_run(run: RunPaths, config: RunConfig, in_room: _InRoom, origin: str) -> dict[str, PredictedPeak]:
    """What finished tasks of ``run`` took, of those stages in ``in_room`` that had what they now would have."""
    try:
        status = read_status(run)
        then = read_params_file(run.params_yaml)
    except (FvcError, OSError):
        return {}
    now = config.model_dump(mode="json")
    peaks = {name: _largest_peak(status, name) for name in in_room}
    return {
        name: _measured(run, config, *in_room[name], PredictedPeak(peak, origin))
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
    pinned = max((_pinned_bytes(each, num_workers) for each in stored.measurements.values()), default=0)
    found = [each.found for each in stored.measurements.values()]
    tried = [(each, step) for each in found for size, step in each.step_bytes.items() if size <= chosen]
    beside = memory_budget.MEASURING_BYTES
    return max(
        (step + pinned + max(beside, each.first_use_bytes + num_workers * each.worker_bytes) for each, step in tried),
        default=None,
    )


def _pinned_bytes(measured: MeasuredStep, num_workers: int) -> int:
    """Page-locked batches in main memory, where the step was measured on a GPU whose batches are pinned."""
    on_cuda = str(measured.circumstances.get("device", "")).startswith("cuda")
    policy = resolve_memory_policy("cuda" if on_cuda else "cpu")
    return policy.pinned_bytes(measured.found.batch_bytes, num_workers)


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
