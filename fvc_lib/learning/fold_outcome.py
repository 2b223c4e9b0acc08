"""What training one fold found, as a value and as the file whose presence means that the fold is finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fvc_lib.learning.micro_batch import MicroBatchChange
from fvc_lib.learning.selection import RecordedSelection, Selection
from fvc_lib.learning.training_state import NAN_AS_TEXT, EpochRecord
from fvc_lib.services.atomic_files import write_text


@dataclass(frozen=True)
class TrainingSummary:
    """One finished training, of the model or of its shuffled-label control.

    Attributes:
        history: one record per epoch.
        best_epoch: the epoch (1-based) whose weights scored the outer fold; it and the next two are the selection's.
        temperature: that the logits were divided by.
        threshold: of the score.
        recorded: all that was chosen on the inner validation part, at which values, and when the outer fold was opened.
        steps: effective batches consumed, those skipped included.
        nonfinite_steps: effective batches skipped because a loss or gradient was not finite.
        micro_batch: clips in memory at once at the end; lower than planned after an out-of-memory.
        micro_batch_schedule: all of its changes, the plan first; ``replay_run`` repeats them.
        inexact_because: why the bits need not be those of an undisturbed training; empty while that is claimed.
        seconds: of the call that finished it, by the monotonic clock; earlier attempts do not count.
    """

    __pydantic_config__ = NAN_AS_TEXT

    history: tuple[EpochRecord, ...]
    best_epoch: int
    temperature: float
    threshold: float
    recorded: RecordedSelection
    steps: int
    nonfinite_steps: int
    micro_batch: int
    micro_batch_schedule: tuple[MicroBatchChange, ...]
    inexact_because: tuple[str, ...]
    seconds: float

    @property
    def selection(self) -> Selection:
        """What was chosen on the inner validation part."""
        return self.recorded.selection

    def schedule(self) -> str:
        """How many clips were in memory at once, like ``8; 4 from step 12``."""
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


@dataclass(frozen=True)
class FoldOutcome:
    """One finished outer fold. Nothing in it was chosen on the fold's own videos.

    Attributes:
        missing_videos: ids without a clip (they could not be decoded); they took no part.
        control: the same recipe on labels shuffled by group; None when it was turned off.
        predicted_peak_bytes: of the training, before it; None without a preflight.
        peak_rss_bytes: of this process; of several ranks, the largest one's.
        peak_device_bytes: of an accelerator; None on the CPU.
        fingerprint: of the parameters and clips it was made with.
        num_ranks: processes that shared the training, of the attempt that finished it.
    """

    __pydantic_config__ = NAN_AS_TEXT

    fold: int
    model: str
    num_parameters: int
    device: str
    num_train_videos: int
    num_train_clips: int
    num_validation_videos: int
    num_test_videos: int
    missing_videos: tuple[str, ...]
    training: TrainingSummary
    control: TrainingSummary | None
    predicted_peak_bytes: int | None
    peak_rss_bytes: int
    peak_device_bytes: int | None
    fingerprint: str
    num_ranks: int = 1


def outcome_to_json(outcome: FoldOutcome) -> str:
    """As it stands in its file."""
    return TypeAdapter(FoldOutcome).dump_json(outcome, indent=2, ensure_ascii=True).decode() + "\n"


def outcome_from_json(text: str) -> FoldOutcome:
    """What ``outcome_to_json`` gave."""
    return TypeAdapter(FoldOutcome).validate_json(text)


def write_outcome(path: Path, outcome: FoldOutcome) -> None:
    """Replace ``path`` atomically."""
    write_text(path, outcome_to_json(outcome))


def read_outcome(path: Path) -> FoldOutcome | None:
    """The outcome in ``path``; None when there is none, or none that this version understands."""
    try:
        return TypeAdapter(FoldOutcome).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
