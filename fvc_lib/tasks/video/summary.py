"""The summary of one finished training of an outer fold, and the tables of its predictions.

A model on features is a classical classifier that sees measured features of a video instead of its frames.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.engine.training_state import NAN_AS_TEXT, TrainingRecord
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, balanced_accuracy, decide, roc_auc
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import FINAL_VALIDATION, LABELS, PREDICTIONS, VALIDATION_PREDICTIONS, frame_of
from fvc_lib.services.tasks import REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.video.calibration import RecordedSelection, Selection, record_selection, select, settings_text
from fvc_lib.tasks.video.data import ClipRow, FoldClips, labels_of, prior_logit


@dataclass(frozen=True)
class Candidate:
    """One of the settings from which a model on features chooses, with its loss.

    Attributes:
        settings: the values by name, such as a number of rounds.
        inner_loss: loss on inner folds of the training groups, in nats per video, weighted as in training; NaN if the
            groups are too few for inner folds.
    """

    __pydantic_config__ = NAN_AS_TEXT

    settings: dict[str, float]
    inner_loss: float  # nats per video, weighted as in training; NaN if the groups are too few for inner folds


@dataclass(frozen=True, kw_only=True)
class TrainingSummary(TrainingRecord):
    """The summary of one finished training of a fold: that of the model, or of one of its controls.

    Attributes:
        temperature: divisor of the logits.
        threshold: the lowest score that is called fake.
        recorded: the selection on training groups, and how often the outer fold was opened.
        candidates: the settings that a model on features could choose from; empty for a network.
        seen: names of the features that a model on features was given; empty for a network.
    """

    __pydantic_config__ = NAN_AS_TEXT

    temperature: float
    threshold: float
    recorded: RecordedSelection
    candidates: tuple[Candidate, ...] = ()
    seen: tuple[str, ...] = ()

    @property
    def selection(self) -> Selection:
        """The epoch, temperature and threshold that were chosen on training groups, and their quality there."""
        return self.recorded.selection

    def schedule(self) -> str:
        """Return the micro-batch sizes of the training as text; ``all`` for a model on features."""
        return "all" if self.candidates else super().schedule()

    def claim(self) -> str:
        """Return a statement on whether a repeated training gives the same result to the bit."""
        if self.candidates:
            return "the same command gives the same bits again, with this scikit-learn and numpy on such a processor"
        return super().claim()

    def best_sentence(self) -> str:
        """Return one line of text: the best epoch with its losses, or the chosen settings of a model on features.

        If no epoch was chosen, the line has the number of epochs and the training loss of the last one.
        """
        if not self.history:
            return f"chosen of {len(self.candidates)} settings: {settings_text(self.selection.settings)}"
        if not self.selection.best_epoch:
            loss = self.history[-1].train_loss
            return (
                f"trained for {len(self.history)} epochs on all training groups; no epoch was chosen: training loss "
                f"{loss:.3f}"
            )
        best = self.history[self.selection.best_epoch - 1]
        return (
            f"best epoch {best.epoch} of {len(self.history)}: inner validation loss {best.validation['loss']:.3f}, "
            f"training loss {best.train_loss:.3f}"
        )


@dataclass(frozen=True)
class Scored:
    """A finished training with the scores of its test videos.

    Attributes:
        summary: the training.
        rows: the N test videos, sorted by video id.
        logits: float64 (N,), with the prior logit added.
        scores: float64 (N,), calibrated probabilities of fake.
    """

    summary: TrainingSummary
    rows: tuple[ClipRow, ...]
    logits: FloatArray
    scores: FloatArray


def choose(
    clips: FoldClips, config: RunConfig, outputs: FloatArray, folder: Path, weights: str, **of_training: Any
) -> RecordedSelection:
    """Choose temperature and threshold on the videos ``clips.validation``, and record the choice in ``folder``.

    The sealed test part ``clips.test`` can only be opened with this record.

    Args:
        clips: the fold.
        config: operating point and class balance.
        outputs: float64 (N,), the logits of the N videos, by models that were not fitted to their groups.
        folder: folder of the training's checkpoints.
        weights: digest of the weights that the choice is for.
        of_training: the other arguments of ``select``.
    """
    prior = prior_logit(clips.train, config.class_balance)
    chosen = select(
        labels_of(clips.validation),
        outputs + prior,
        clips.num_validation_groups,
        fewest_groups=clips.fewest_groups,
        prior_logit=prior,
        point=config.operating_point,
        **of_training,
    )
    return record_selection(folder, RecordedSelection(chosen, clips.fingerprint, weights))


def score_outer_fold(
    summary: TrainingSummary,
    clips: FoldClips,
    logits_of: Callable[[Sequence[ClipRow]], FloatArray],
    log: Callable[..., None],
) -> Scored:
    """Read the test videos of the outer fold, which are sealed until the selection is recorded, and score them once.

    Args:
        summary: the finished training, with its recorded selection.
        clips: the fold.
        logits_of: returns the model's logits (N,) of N rows.
        log: called with ``phase``, which is ``test``, and ``metrics``, a mapping by name.

    Raises:
        DataError: a logit of a test video is not finite.
    """
    chosen = summary.selection
    rows = clips.test.open(summary.recorded)
    labels = labels_of(rows)
    logits = logits_of(rows) + chosen.prior_logit
    are_finite = np.isfinite(logits)
    lost = [row.video_id for row, is_finite in zip(rows, are_finite, strict=True) if not is_finite]
    if lost:
        raise DataError(
            f"the logits of {len(lost)} test videos are not finite, the first: {', '.join(lost[:5])}. Look at their "
            "clips, turn amp off, or train with a lower learning_rate."
        )
    scores = probabilities(logits, chosen.temperature)
    decisions = decide(scores, chosen.threshold)
    accuracy = balanced_accuracy(labels, decisions)
    log(phase="test", metrics={"roc_auc": roc_auc(labels, scores), "balanced_accuracy": accuracy})
    return Scored(summary, rows, logits, scores)


def predictions_table(fold: int, scored: Mapping[str, Scored]) -> pl.DataFrame:
    """Return the table PREDICTIONS of an outer fold: one row per test video, sorted by video id.

    It has the model's score and logit, the threshold and temperature, and the scores of the controls.

    Args:
        fold: number of the outer fold.
        scored: the model under the empty name, and its controls (trainings on other labels) by their names.
    """
    model = scored[""]
    shuffled = scored.get(SHUFFLED_LABELS)
    sources = scored.get(REAL_SOURCES)
    chosen, rows = model.summary.selection, model.rows
    source_score = dict[str, float]()
    source_label = dict[str, int]()
    if sources is not None:
        ids = [row.video_id for row in sources.rows]
        source_score = dict(zip(ids, sources.scores.tolist(), strict=True))
        source_label = {row.video_id: row.label for row in sources.rows}
    control_label = [LABELS[row.label] for row in shuffled.rows] if shuffled else None
    columns = {
        "video_id": [row.video_id for row in rows],
        "group_id": [row.group_id for row in rows],
        "label": [LABELS[row.label] for row in rows],
        "fold": fold,
        "score": model.scores,
        "threshold": chosen.threshold,
        "logit": model.logits,
        "temperature": chosen.temperature,
        "control_score": shuffled.scores if shuffled else None,
        "control_label": control_label,
        "source_score": [source_score.get(row.video_id) for row in rows],
        "source_label": [source_label.get(row.video_id) for row in rows],
    }
    return frame_of(columns, PREDICTIONS)


def validation_table(
    fold: int | None, clips: FoldClips, outputs: FloatArray, recorded: RecordedSelection
) -> pl.DataFrame:
    """Return a table of the N videos on which temperature and threshold were chosen, with their logits.

    Args:
        fold: number of the outer fold, for a table VALIDATION_PREDICTIONS. None: the network trained on all groups, for
            a table FINAL_VALIDATION.
        clips: the fold.
        outputs: float64 (N,), without the prior logit.
        recorded: the record of the choices. Its prior logit is added to the logits, and its temperature is a column.
    """
    rows = clips.validation
    columns: dict[str, object] = {
        "video_id": [row.video_id for row in rows],
        "group_id": [row.group_id for row in rows],
        "label": [LABELS[row.label] for row in rows],
        "logit": outputs + recorded.selection.prior_logit,
        "temperature": recorded.selection.temperature,
    }
    if fold is None:
        return frame_of(columns, FINAL_VALIDATION)
    return frame_of({**columns, "fold": fold}, VALIDATION_PREDICTIONS)
