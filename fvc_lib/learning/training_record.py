"""What any finished training leaves to be said of it."""

from __future__ import annotations

from dataclasses import dataclass

from fvc_lib.learning.micro_batch import MicroBatchChange
from fvc_lib.learning.training_state import NAN_AS_TEXT, EpochRecord


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """One finished training.

    Attributes:
        history: one record per epoch.
        best_epoch: the epoch (1-based) with the least validation loss, whose weights are the result.
        steps: effective batches consumed, those skipped included.
        nonfinite_steps: effective batches skipped because a loss or gradient was not finite.
        micro_batch: samples in memory at once at the end; lower than planned after an out-of-memory.
        micro_batch_schedule: all of its changes, the plan first; ``replay_run`` repeats them.
        inexact_because: why the bits need not be those of an undisturbed training; empty while that is claimed.
        seconds: of the call that finished it, by the monotonic clock; earlier attempts do not count.
    """

    __pydantic_config__ = NAN_AS_TEXT

    history: tuple[EpochRecord, ...]
    best_epoch: int
    steps: int
    nonfinite_steps: int
    micro_batch: int
    micro_batch_schedule: tuple[MicroBatchChange, ...]
    inexact_because: tuple[str, ...]
    seconds: float

    def schedule(self) -> str:
        """How many samples were in memory at once, like ``8; 4 from step 12``."""
        first, *later = self.micro_batch_schedule
        parts = [str(first.micro_batch)]
        for change in later:
            where = "" if change.validation_sample is None else f" of validation, sample {change.validation_sample} on"
            parts.append(f"{change.micro_batch} from step {change.step}{where}")
        return "; ".join(parts)

    def claim(self, run_id: str) -> str:
        """Whether the same command on the same kind of machine must give the same bits, in one sentence."""
        if self.inexact_because:
            return f"equality to the bit is not claimed: {'; '.join(self.inexact_because)}"
        if len(self.micro_batch_schedule) > 1:
            return f"the same to the bit when the micro-batches are repeated: -p replay_run {run_id}"
        return "the same command gives the same bits again, with this torch and as many threads"
