"""One outer fold from tables to predictions: train, choose on inner validation, score the fold once; then a control."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.corpus.folds import shuffle_labels_by_group
from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.data import ClipDataset, ClipRow, ClipSource, class_weights
from fvc_lib.learning.device import ComputeDevice, peak_device_bytes, peak_rss_bytes, resolve_device
from fvc_lib.learning.engine import Engine
from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.fold_data import FoldClips, fold_clips, open_clips
from fvc_lib.learning.fold_outcome import FoldOutcome, TrainingSummary, read_outcome, write_outcome
from fvc_lib.learning.models import default_micro_batch, num_parameters
from fvc_lib.learning.random_state import stable_seed
from fvc_lib.learning.training_state import TrainingState
from fvc_lib.learning.video_task import VideoTask
from fvc_lib.learning.watching import MetricSink
from fvc_lib.metrics.thresholds import best_threshold
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoints import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.memory_observer import MemoryObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, FOLDS, LABELS, PREDICTIONS, read_table, write_table

_logger = logging.getLogger(__name__)

# What a checkpoint is bound to. batch_size and device are left out: a fold that ran out of memory or lost its GPU may
# go on with others, because the effective batch, and so the result up to rounding, stays the same.
TRAINING_PARAMETERS = (
    "seed", "num_folds", "inner_validation_share", "num_frames", "fixed_size", "augmentations_per_video",
    "augmentations", "augmentation_strength", "model", "epochs", "effective_batch_size", "learning_rate",
    "weight_decay", "warmup_share", "max_gradient_norm", "class_balance", "early_stopping_epochs", "amp",
    "shuffle_labels", "shuffled_label_control",
)  # fmt: skip

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Surroundings:
    """What both trainings of a fold share."""

    config: RunConfig
    fold: int
    source: ClipSource
    compute: ComputeDevice
    memory: MemoryObserver | None
    stop: Callable[[], bool] | None


@dataclass(frozen=True)
class _Fitted:
    """A finished training whose outer fold was not looked at yet."""

    engine: Engine
    state: TrainingState
    source: ClipSource
    clips: FoldClips
    metrics: MetricSink
    seconds: float


@dataclass(frozen=True)
class _Scored:
    """A finished training, the outer fold's scores (float in [0, 1]) by video id, and the labels it is judged by."""

    summary: TrainingSummary
    scores: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class _ControlLog:
    """Passes metrics on under the phase ``control``, named ``<phase>_<metric>``."""

    metrics: MetricSink

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        renamed = {f"{phase}_{name}": value for name, value in metrics.items()}
        self.metrics.log(step=step, epoch=epoch, phase="control", metrics=renamed)


def train_fold(
    paths: RunPaths,
    config: RunConfig,
    fold: int,
    *,
    metric_log: MetricSink,
    attempt: int = 1,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> FoldOutcome:
    """Train and score outer fold ``fold``, going on from what an earlier attempt saved.

    Reads ``tables/folds.parquet`` and the clips; writes ``checkpoints/fold_K`` and
    ``tables/predictions_fold_K.parquet``. A finished fold returns its outcome without training.

    Args:
        paths: the run.
        config: its resolved parameters.
        fold: 0-based.
        metric_log: gets the phases train, validation and test, and control for the shuffled-label control.
        attempt: which try this is; only said in the log.
        memory: told at every step where the training is.
        stop: asked at every step boundary.
        progress: called with (steps done, steps planned) over model and control together.

    Raises:
        StoppedError: ``stop`` said so; everything is saved (exit code 75).
        DataError: no such fold, clips that are missing, or a training part of one class.
        CheckpointMismatchError: what was saved belongs to other parameters or data.
        UsageError: the requested device is not there.
    """
    folds = read_table(paths.folds, FOLDS)
    if config.shuffle_labels:
        folds = _shuffled(folds, config, "shuffle_labels")
    made = read_table(paths.augmented_metadata, AUGMENTED)
    source = open_clips(config, made)
    clips = fold_clips(folds, source, config, fold)
    _refuse_thinned_store(made, clips)
    fingerprint = sha256_of_json([training_parameters(config, fold), clips.fingerprint])
    outcome = read_outcome(paths.fold_outcome(fold))
    if outcome is not None and outcome.fingerprint == fingerprint and paths.predictions(fold).exists():
        return outcome

    around = _Surroundings(config, fold, source, resolve_device(config.device, config.amp), memory, stop)
    _logger.info("fold %d, attempt %d, on %s", fold, attempt, around.compute.describe())
    shuffled = _control_clips(folds, source, config, fold) if config.shuffled_label_control else None
    first, second = _halves(progress) if shuffled else (progress, None)
    fitted = _fit(around, clips, paths.fold_checkpoints(fold), metric_log, first)
    fitted_control = None
    if shuffled is not None:
        folder = paths.control_checkpoints(fold)
        fitted_control = _fit(around, shuffled, folder, _ControlLog(metric_log), second)
    # Only now, when nothing is left to be chosen or interrupted, is the outer fold looked at.
    scored = _score(fitted)
    control = _score(fitted_control) if fitted_control else None
    write_table(_predictions(clips, scored, control), PREDICTIONS, paths.predictions(fold))
    outcome = _outcome(around, clips, scored, control, fingerprint)
    write_outcome(paths.fold_outcome(fold), outcome)
    return outcome


def _refuse_thinned_store(made: pl.DataFrame, clips: FoldClips) -> None:
    """A clip that was made and is gone since would make folds train on different videos."""
    known = set(made["video_id"])
    gone = [video_id for video_id in clips.missing if video_id in known]
    if gone:
        raise DataError(
            f"clips of {len(gone)} videos were made and are gone from the clip store, the first: "
            f"{', '.join(gone[:5])}. Make them again: run_notebooks.py --from 03."
        )


def _control_clips(folds: pl.DataFrame, source: ClipSource, config: RunConfig, fold: int) -> FoldClips | None:
    """The fold under shuffled labels; None where a few mixed groups cannot carry them: no fault of the data."""
    try:
        return fold_clips(_shuffled(folds, config, "control"), source, config, fold)
    except DataError as error:
        _logger.warning("fold %d has no shuffled-label control: %s", fold, error)
        return None


def training_parameters(config: RunConfig, fold: int) -> dict[str, Any]:
    """The fold and the parameters that its weights depend on, as JSON values."""
    values = config.model_dump(mode="json")
    return {"fold": fold, **{name: values[name] for name in TRAINING_PARAMETERS}}


def engine_settings(config: RunConfig, fold: int) -> EngineSettings:
    """The engine's share of ``config`` for one fold."""
    return EngineSettings(
        epochs=config.epochs,
        effective_batch_size=config.effective_batch_size,
        micro_batch=config.batch_size or default_micro_batch(config.model),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_share=config.warmup_share,
        max_gradient_norm=config.max_gradient_norm,
        early_stopping_epochs=config.early_stopping_epochs,
        seed=stable_seed("fold", config.seed, fold),
        balance_classes=config.class_balance == "sampler",
        num_workers=config.num_workers,
        max_nonfinite_steps=config.max_nonfinite_steps,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        checkpoint_epochs=config.checkpoint_epochs,
        micro_batch_recovery_steps=config.micro_batch_recovery_steps,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _fit(
    around: _Surroundings, clips: FoldClips, folder: Path, metrics: MetricSink, progress: Progress | None
) -> _Fitted:
    """Train to the end, choosing the epoch on the inner validation part."""
    started = time.monotonic()
    task = VideoTask(
        ClipDataset(around.source, clips.train),
        ClipDataset(around.source, clips.validation),
        model=around.config.model,
        weights=class_weights(clips.train) if around.config.class_balance == "loss" else (1.0, 1.0),
    )
    binding = CheckpointBinding(training_parameters(around.config, around.fold), clips.fingerprint)
    engine = Engine(
        task,
        engine_settings(around.config, around.fold),
        around.compute,
        CheckpointFolder(folder, binding, keep_last=around.config.keep_checkpoints),
        metrics,
        memory=around.memory,
        stop=around.stop,
        progress=progress,
    )
    state = engine.fit()
    return _Fitted(engine, state, around.source, clips, metrics, time.monotonic() - started)


def _score(fitted: _Fitted) -> _Scored:
    """Choose the threshold on the inner validation part, then score the outer fold's originals once."""
    state, clips = fitted.state, fitted.clips
    validation = _scores(fitted, clips.validation)
    test = _scores(fitted, clips.test)
    fitted.metrics.log(step=state.step, epoch=state.best_epoch, phase="test", metrics=test.compute())
    summary = TrainingSummary(
        history=tuple(state.history),
        best_epoch=state.best_epoch,
        threshold=best_threshold(validation.labels, validation.scores),
        steps=state.step,
        nonfinite_steps=state.nonfinite_steps,
        micro_batch=state.micro_batch,
        seconds=fitted.seconds,
    )
    scores = {row.video_id: score for row, score in zip(clips.test, test.scores.tolist(), strict=True)}
    return _Scored(summary, scores, {row.video_id: LABELS[row.label] for row in clips.test})


def _scores(fitted: _Fitted, rows: Sequence[ClipRow]) -> BinaryScores:
    scores = BinaryScores()
    fitted.engine.predict(ClipDataset(fitted.source, rows), fitted.state.best_model, scores)
    return scores


def _predictions(clips: FoldClips, scored: _Scored, control: _Scored | None) -> pl.DataFrame:
    """PREDICTIONS rows of the outer fold, in the order of the video ids."""
    rows = [
        (
            video_id,
            clips.group_of[video_id],
            scored.labels[video_id],
            clips.fold,
            score,
            scored.summary.threshold,
            control.scores[video_id] if control else None,
            control.labels[video_id] if control else None,
        )
        for video_id, score in scored.scores.items()
    ]
    types = {name: column.dtype.type for name, column in PREDICTIONS.columns.items()}
    return pl.DataFrame(rows, schema=types, orient="row")


def _outcome(
    around: _Surroundings, clips: FoldClips, scored: _Scored, control: _Scored | None, fingerprint: str
) -> FoldOutcome:
    return FoldOutcome(
        fold=around.fold,
        model=around.config.model,
        num_parameters=num_parameters(around.config.model),
        device=around.compute.describe(),
        num_train_videos=len({row.video_id for row in clips.train}),
        num_train_clips=len(clips.train),
        num_validation_videos=len(clips.validation),
        num_test_videos=len(clips.test),
        missing_videos=clips.missing,
        training=scored.summary,
        control=control.summary if control else None,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=peak_device_bytes(around.compute.device),
        fingerprint=fingerprint,
    )


def _shuffled(folds: pl.DataFrame, config: RunConfig, purpose: str) -> pl.DataFrame:
    """Labels shuffled by group over the whole corpus, the same for every fold of a run."""
    return shuffle_labels_by_group(folds, stable_seed(purpose, config.seed))


def _halves(progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    """Progress of the model as the first half of the whole, of the control as the second."""
    if progress is None:
        return None, None
    return lambda done, planned: progress(done, 2 * planned), lambda done, planned: progress(
        planned + done, 2 * planned
    )
