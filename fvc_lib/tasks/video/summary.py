"""The summary of one finished training of an outer fold, and the tables of its predictions."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import safetensors.torch
from torch import Tensor

from fvc_lib.engine.training_state import NAN_AS_TEXT, TrainingRecord
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import LABELS, PREDICTIONS, VALIDATION_PREDICTIONS, frame_of
from fvc_lib.services.tasks import REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.video.data import FoldClips, OuterFold
from fvc_lib.tasks.video.selection import RecordedSelection, Selection, settings_text


@dataclass(frozen=True)
class Candidate:
    """Settings of a model on features that were tried, and their loss on inner folds of the training groups."""

    __pydantic_config__ = NAN_AS_TEXT

    settings: dict[str, float]
    inner_loss: float  # nats per video, weighted as in training; NaN if the groups are too few for inner folds


@dataclass(frozen=True, kw_only=True)
class TrainingSummary(TrainingRecord):
    """One finished training of a fold, of the model or of one of its controls.

    Attributes:
        temperature: divisor of the logits.
        threshold: of the score.
        recorded: the selection on the inner validation part, and the openings of the outer fold.
        candidates: the settings that a model on features could choose from; empty for a network.
        seen: the features that such a model saw.
    """

    __pydantic_config__ = NAN_AS_TEXT

    temperature: float
    threshold: float
    recorded: RecordedSelection
    candidates: tuple[Candidate, ...] = ()
    seen: tuple[str, ...] = ()

    @property
    def selection(self) -> Selection:
        """The selection on the inner validation part."""
        return self.recorded.selection

    def schedule(self) -> str:
        """Return the micro-batch schedule; ``all`` for a model on features."""
        return "all" if self.candidates else super().schedule()

    def claim(self) -> str:
        """Return how far a repetition gives the same result."""
        if self.candidates:
            return "the same command gives the same bits again, with this scikit-learn and numpy on such a processor"
        return super().claim()

    def best_sentence(self) -> str:
        """Return one line: the chosen epoch and its losses, or the chosen settings and every candidate's loss."""
        if not self.history:
            losses = "; ".join(f"{settings_text(each.settings)}: {each.inner_loss:.3f}" for each in self.candidates)
            chosen = settings_text(self.selection.settings)
            return f"chosen: {chosen}; loss on inner folds of groups, by candidate: {losses}"
        best = self.history[self.selection.best_epoch - 1]
        return (
            f"best epoch {best.epoch} of {len(self.history)}: inner validation loss {best.validation['loss']:.3f}, "
            f"training loss {best.train_loss:.3f}"
        )


@dataclass(frozen=True)
class Scored:
    """A finished training and its outer fold, with logits and calibrated probabilities (N,) in the fold's row order."""

    summary: TrainingSummary
    outer: OuterFold
    logits: FloatArray
    scores: FloatArray


def training_parameters(config: RunConfig, fold: int | None) -> dict[str, Any]:
    """Return the fold and the parameters that its weights depend on, as JSON values."""
    return {"fold": fold, **config.training_values()}


def digest_of_state(state: Mapping[str, Tensor]) -> str:
    """Return the hex SHA-256 of weights as safetensors writes them."""
    return hashlib.sha256(
        safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
    ).hexdigest()


def predictions_table(fold: int, scored: Mapping[str, Scored]) -> pl.DataFrame:
    """Return PREDICTIONS of the outer fold, sorted by video id; ``scored`` has the model ("") and controls by name."""
    model, control = scored[""], scored.get(SHUFFLED_LABELS)
    chosen, outer = model.summary.selection, model.outer
    of_source: dict[str, tuple[float, int]] = {}
    if REAL_SOURCES in scored:
        control_of_sources = scored[REAL_SOURCES]
        of_source = {
            row.video_id: (float(score), row.label)
            for row, score in zip(control_of_sources.outer.rows, control_of_sources.scores, strict=True)
        }
    sources = [of_source.get(row.video_id, (None, None)) for row in outer.rows]
    columns = {
        "video_id": [row.video_id for row in outer.rows],
        "group_id": [outer.group_of[row.video_id] for row in outer.rows],
        "label": [LABELS[row.label] for row in outer.rows],
        "fold": fold,
        "score": model.scores,
        "threshold": chosen.threshold,
        "logit": model.logits,
        "temperature": chosen.temperature,
        "control_score": control.scores if control else None,
        "control_label": [LABELS[row.label] for row in control.outer.rows] if control else None,
        "source_score": [score for score, _ in sources],
        "source_label": [label for _, label in sources],
    }
    return frame_of(columns, PREDICTIONS)


def validation_table(fold: int, clips: FoldClips, logits: FloatArray, recorded: RecordedSelection) -> pl.DataFrame:
    """Return VALIDATION_PREDICTIONS: the inner validation part with the logits (N,) that ``recorded`` was chosen by."""
    rows = clips.validation
    columns = {
        "video_id": [row.video_id for row in rows],
        "group_id": [clips.validation_groups[row.video_id] for row in rows],
        "label": [LABELS[row.label] for row in rows],
        "fold": fold,
        "logit": logits,
        "temperature": recorded.selection.temperature,
    }
    return frame_of(columns, VALIDATION_PREDICTIONS)
