"""What a training without folds found, as a value and as the file whose presence means that it is finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fvc_lib.learning.training_record import TrainingRecord
from fvc_lib.learning.training_state import NAN_AS_TEXT
from fvc_lib.services.atomic_files import write_text


@dataclass(frozen=True)
class StageOutcome:
    """One finished training of a stage. Nothing in it was chosen on the test part.

    Attributes:
        stage: the notebook's name.
        num_parameters: trained at any time.
        num_train, num_validation, num_test: samples of each part that took part.
        predicted_peak_bytes: of the training, before it; None without a preflight.
        peak_rss_bytes: of this process; of several ranks, the largest one's.
        peak_device_bytes: of an accelerator; None on the CPU.
        fingerprint: of the parameters and data it was made with.
        num_ranks: processes that shared the training, of the attempt that finished it.
    """

    __pydantic_config__ = NAN_AS_TEXT

    stage: str
    model: str
    num_parameters: int
    device: str
    num_train: int
    num_validation: int
    num_test: int
    training: TrainingRecord
    predicted_peak_bytes: int | None
    peak_rss_bytes: int
    peak_device_bytes: int | None
    fingerprint: str
    num_ranks: int = 1


def stage_outcome_to_json(outcome: StageOutcome) -> str:
    """As it stands in its file."""
    return TypeAdapter(StageOutcome).dump_json(outcome, indent=2, ensure_ascii=True).decode() + "\n"


def stage_outcome_from_json(text: str) -> StageOutcome:
    """What ``stage_outcome_to_json`` gave."""
    return TypeAdapter(StageOutcome).validate_json(text)


def write_stage_outcome(path: Path, outcome: StageOutcome) -> None:
    """Replace ``path`` atomically."""
    write_text(path, stage_outcome_to_json(outcome))


def read_stage_outcome(path: Path) -> StageOutcome | None:
    """The outcome in ``path``; None when there is none, or none that this version understands."""
    try:
        return TypeAdapter(StageOutcome).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
