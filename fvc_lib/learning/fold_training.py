"""One outer fold from tables to predictions: train, choose on inner validation, score the fold once; then a control."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from torch import Tensor

from fvc_lib.corpus.folds import shuffle_labels_by_group
from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.data import ClipDataset, class_weights
from fvc_lib.learning.device import ComputeDevice, peak_device_bytes, peak_rss_bytes, resolve_device
from fvc_lib.learning.engine import Engine, EngineSettings, MemoryObserver, MetricSink
from fvc_lib.learning.fold_data import FoldClips, clip_store, fold_clips
from fvc_lib.learning.fold_outcome import FoldOutcome, TrainingSummary, read_outcome, write_outcome
from fvc_lib.learning.models import default_micro_batch
from fvc_lib.learning.random_state import stable_seed
from fvc_lib.learning.training_state import TrainingState
from fvc_lib.learning.video_task import VideoTask
from fvc_lib.metrics.thresholds import best_threshold
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoints import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, LABELS, PREDICTIONS, read_table, write_table

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
    compute: ComputeDevice
    memory: MemoryObserver | None
    stop: Callable[[], bool] | None


@dataclass(frozen=True)
class _Trained:
    """A finished training and the outer fold's scores (float in [0, 1]) by video id."""

    summary: TrainingSummary
    scores: Mapping[str, float]
    num_parameters: int


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

    Reads ``tables/folds.parquet`` and the clip store; writes ``checkpoints/fold_K`` and
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
    clips = fold_clips(folds, config, fold)
    fingerprint = sha256_of_json([training_parameters(config, fold), clips.fingerprint])
    outcome = read_outcome(paths.fold_outcome(fold))
    if outcome is not None and outcome.fingerprint == fingerprint and paths.predictions(fold).exists():
        return outcome

    around = _Surroundings(config, fold, resolve_device(config.device, config.amp), memory, stop)
    _logger.info("fold %d, attempt %d, on %s", fold, attempt, around.compute.describe())
    first, second = _halves(progress) if config.shuffled_label_control else (progress, None)
    trained = _train(around, clips, paths.fold_checkpoints(fold), metric_log, first)
    control, control_clips = None, None
    if config.shuffled_label_control:
        control_clips = fold_clips(_shuffled(folds, config, "control"), config, fold)
        folder = paths.control_checkpoints(fold)
        control = _train(around, control_clips, folder, _ControlLog(metric_log), second)
    table = _predictions(clips, trained, control_clips, control)
    write_table(table, PREDICTIONS, paths.predictions(fold))
    outcome = _outcome(around, clips, trained, control, fingerprint)
    write_outcome(paths.fold_outcome(fold), outcome)
    return outcome


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
    )


def _train(
    around: _Surroundings, clips: FoldClips, folder: Path, metrics: MetricSink, progress: Progress | None
) -> _Trained:
    """Train, choose epoch and threshold on the inner validation part, then score the outer fold once."""
    started = time.monotonic()
    store = clip_store(around.config)
    task = VideoTask(
        ClipDataset(store, clips.train),
        ClipDataset(store, clips.validation),
        model=around.config.model,
        weights=class_weights(clips.train) if around.config.class_balance == "loss" else (1.0, 1.0),
    )
    binding = CheckpointBinding(training_parameters(around.config, around.fold), clips.fingerprint)
    engine = Engine(
        task,
        engine_settings(around.config, around.fold),
        around.compute,
        CheckpointFolder(folder, binding),
        metrics,
        memory=around.memory,
        stop=around.stop,
        progress=progress,
    )
    state = engine.fit()
    validation = _scores(engine, task.validation_data, state.best_model)
    threshold = best_threshold(validation.labels, validation.scores)
    test = _scores(engine, ClipDataset(store, clips.test), state.best_model)
    metrics.log(step=state.step, epoch=state.best_epoch, phase="test", metrics=test.compute())
    summary = _summary(state, threshold, time.monotonic() - started)
    video_ids = [row.video_id for row in clips.test]
    return _Trained(
        summary,
        dict(zip(video_ids, test.scores.tolist(), strict=True)),
        sum(t.numel() for t in state.best_model.values()),
    )


def _scores(engine: Engine, data: ClipDataset, weights: Mapping[str, Tensor]) -> BinaryScores:
    scores = BinaryScores()
    engine.predict(data, weights, scores)
    return scores


def _summary(state: TrainingState, threshold: float, seconds: float) -> TrainingSummary:
    return TrainingSummary(
        history=tuple(state.history),
        best_epoch=state.best_epoch,
        threshold=threshold,
        steps=state.step,
        nonfinite_steps=state.nonfinite_steps,
        micro_batch=state.micro_batch,
        seconds=seconds,
    )


def _predictions(
    clips: FoldClips, trained: _Trained, control_clips: FoldClips | None, control: _Trained | None
) -> pl.DataFrame:
    """PREDICTIONS rows of the outer fold, in the order of the video ids."""
    control_scores = control.scores if control else {}
    control_labels = {row.video_id: LABELS[row.label] for row in control_clips.test} if control_clips else {}
    rows = [
        (
            row.video_id,
            clips.group_of[row.video_id],
            LABELS[row.label],
            clips.fold,
            trained.scores[row.video_id],
            trained.summary.threshold,
            control_scores.get(row.video_id),
            control_labels.get(row.video_id),
        )
        for row in clips.test
    ]
    types = {name: column.dtype.type for name, column in PREDICTIONS.columns.items()}
    return pl.DataFrame(rows, schema=types, orient="row")


def _outcome(
    around: _Surroundings, clips: FoldClips, trained: _Trained, control: _Trained | None, fingerprint: str
) -> FoldOutcome:
    return FoldOutcome(
        fold=around.fold,
        model=around.config.model,
        num_parameters=trained.num_parameters,
        device=around.compute.describe(),
        num_train_videos=len({row.video_id for row in clips.train}),
        num_train_clips=len(clips.train),
        num_validation_videos=len(clips.validation),
        num_test_videos=len(clips.test),
        missing_videos=clips.missing,
        training=trained.summary,
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
