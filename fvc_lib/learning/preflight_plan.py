"""From a few measured steps to the peak of a training and to the micro-batch that fits: arithmetic, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# Of a kernel with all that notebook 04 imports, before its first step: 448.8 to 449.6 MB in five folds (Linux, x86-64,
# torch 2.13 for CPU, one thread).
KERNEL_BYTES = 450_000_000
PREFETCHED_WINDOWS = 2  # torch's loader keeps so many effective batches ready per process


@dataclass(frozen=True)
class StepMeasurement:
    """What a child process found, all in bytes; on CUDA of the device's memory, elsewhere resident in main memory.

    Attributes:
        first_use_bytes: what the first training of any process loads and keeps (libraries; on CUDA the context).
        step_bytes: by micro-batch, the peak of training steps above that.
        window_bytes: one effective batch as the loader hands it over.
        worker_bytes: of one loader process, what it does not share with its parent.
        failures: by micro-batch, why it could not run: memory ended.
        attempting: the micro-batch in hand; left standing when the child dies of it.
    """

    first_use_bytes: int = 0
    window_bytes: int = 0
    worker_bytes: int = 0
    step_bytes: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    attempting: int | None = None

    def with_step(self, micro_batch: int, step_bytes: int) -> StepMeasurement:
        """The same with one more micro-batch that ran."""
        return replace(self, step_bytes={**self.step_bytes, micro_batch: step_bytes}, attempting=None)

    def with_failure(self, micro_batch: int, reason: str) -> StepMeasurement:
        """The same with one more micro-batch that did not fit."""
        return replace(self, failures={**self.failures, micro_batch: reason}, attempting=None)

    def to_document(self) -> dict[str, Any]:
        """JSON values."""
        tables = {
            name: {str(micro_batch): value for micro_batch, value in getattr(self, name).items()}
            for name in ("step_bytes", "failures")
        }
        return {**asdict(self), **tables}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StepMeasurement:
        """What ``to_document`` described.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is no such document.
        """
        values = dict(document)
        values["step_bytes"] = {int(key): int(value) for key, value in values["step_bytes"].items()}
        values["failures"] = {int(key): str(value) for key, value in values["failures"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Footprint:
    """The training process before it trains.

    Attributes:
        resident_bytes: its memory now (on CUDA: what it holds on the device).
        trained_before: whether the libraries of a first training are loaded already, and so counted in it.
        num_workers: loader processes.
        after_training_bytes: what the process will add when training is over: room that the training must leave.
    """

    resident_bytes: int
    trained_before: bool
    num_workers: int
    after_training_bytes: int = 0


def predicted_peak(found: StepMeasurement, footprint: Footprint, micro_batch: int) -> int | None:
    """Bytes at the peak of a training with its loader processes, as the sampler counts them: each with what it does not
    share. None where no step could be measured.
    """
    step = estimate(found.step_bytes, micro_batch)
    if step is None:
        return None
    first_use = 0 if footprint.trained_before else found.first_use_bytes
    return footprint.resident_bytes + first_use + step + footprint.num_workers * found.worker_bytes


def reserved_bytes(found: StepMeasurement, footprint: Footprint) -> int:
    """Room that the budget must have beside the predicted peak.

    While it trains for the effective batches that wait in shared memory: they are in no process's resident memory until
    they are used, but a control group counts them. When the loader processes are gone, for what comes after training.
    """
    waiting = footprint.num_workers * PREFETCHED_WINDOWS * found.window_bytes
    return max(waiting, footprint.after_training_bytes)


def estimate(measured: Mapping[int, int], micro_batch: int) -> int | None:
    """``measured`` at ``micro_batch``: as measured, else on the line through its neighbours on both sides, else through
    the two nearest on one.

    From one measurement alone it is taken as proportional, which is more than will be needed. Never less than a
    smaller micro-batch was measured to take.
    """
    if micro_batch in measured:
        return measured[micro_batch]
    if not measured:
        return None
    below, above = sorted(n for n in measured if n < micro_batch), sorted(n for n in measured if n > micro_batch)
    points = [below[-1], above[0]] if below and above else below[-2:] or above[:2]
    if len(points) == 1:
        return measured[points[0]] * max(1, -(-micro_batch // points[0]))
    low, high = points
    slope = (measured[high] - measured[low]) / (high - low)
    line = round(measured[low] + slope * (micro_batch - low))
    return max([0, line, *(measured[n] for n in below)])


def halvings(micro_batch: int) -> list[int]:
    """``micro_batch``, its half, ... down to 1: what the engine would come to after shortages."""
    steps = [micro_batch]
    while steps[-1] > 1:
        steps.append(steps[-1] // 2)
    return steps


def fitting_micro_batch(found: StepMeasurement, footprint: Footprint, planned: int, budget_bytes: int) -> int | None:
    """The largest of ``halvings(planned)`` whose predicted peak is within the budget, with room for ``reserved_bytes``,
    and that did not fail; or None.
    """
    smallest_failure = min(found.failures, default=planned + 1)
    budget_bytes -= reserved_bytes(found, footprint)
    for micro_batch in halvings(planned):
        peak = predicted_peak(found, footprint, micro_batch)
        if micro_batch < smallest_failure and peak is not None and peak <= budget_bytes:
            return micro_batch
    return None


def next_to_measure(found: StepMeasurement, footprint: Footprint, planned: int, budget_bytes: int) -> int | None:
    """1, 2, 4 and so on, as long as what was measured says that it will fit, up to the micro-batch that is then chosen.

    Never more than twice the largest that ran: from 1 and 2 alone the peak at 8 was once put 40 % too low. None: that
    is all.
    """
    tried = {*found.step_bytes, *found.failures}
    if planned in found.step_bytes and fitting_micro_batch(found, footprint, planned, budget_bytes) == planned:
        return None
    if 1 not in tried:
        return 1
    if fitting_micro_batch(found, footprint, 1, budget_bytes) is None:
        return None
    if planned > 1 and 2 not in tried:
        return 2
    chosen = fitting_micro_batch(found, footprint, planned, budget_bytes)
    if chosen is None or chosen in tried:
        return None
    return min([chosen, *(n for n in (2 * max(found.step_bytes),) if n not in tried)])
