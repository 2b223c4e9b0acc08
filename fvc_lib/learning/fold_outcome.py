"""What training one fold found, as a value and as the file whose presence means that the fold is finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fvc_lib.learning.selection import RecordedSelection, Selection
from fvc_lib.learning.training_record import TrainingRecord
from fvc_lib.learning.training_state import NAN_AS_TEXT
from fvc_lib.services.atomic_files import write_text


@dataclass(frozen=True, kw_only=True)
class TrainingSummary(TrainingRecord):
    """One finished training of a fold, of the model or of its shuffled-label control.

    Attributes:
        temperature: that the logits were divided by; it, the epoch and the threshold are the selection's.
        threshold: of the score.
        recorded: all that was chosen on the inner validation part, at which values, and when the outer fold was opened.
    """

    __pydantic_config__ = NAN_AS_TEXT

    temperature: float
    threshold: float
    recorded: RecordedSelection

    @property
    def selection(self) -> Selection:
        """What was chosen on the inner validation part."""
        return self.recorded.selection


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
