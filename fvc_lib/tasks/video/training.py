"""One outer fold from tables to predictions: train, choose on inner validation, score the fold once; then a control."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import safetensors.torch
from pydantic import TypeAdapter, ValidationError

from fvc_lib.engine.checkpoint import NAN_AS_TEXT, TrainingRecord, TrainingState
from fvc_lib.engine.device import ComputeDevice, peak_device_bytes, resolve_device
from fvc_lib.engine.distributed.ranks import RankLostError, Ranks
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.memory.training_memory import TrainingMemory, planned_micro_batch, training_memory
from fvc_lib.engine.watching import MetricSink
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, balanced_accuracy, decide, roc_auc
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.checkpoints import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.services.memory_budget import peak_rss_bytes
from fvc_lib.services.memory_policy import MemoryObserver
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import LABELS, PREDICTIONS, write_table
from fvc_lib.services.tasks import FOLD_TRAINING as STAGE
from fvc_lib.tasks.training import train_on_ranks
from fvc_lib.tasks.video.data import (
    ClipDataset,
    ClipRow,
    ClipSource,
    FoldClips,
    OuterFold,
    class_weights,
    prior_logit,
    read_control_fold,
    read_fold,
)
from fvc_lib.tasks.video.selection import RecordedSelection, Selection, record_selection, select
from fvc_lib.tasks.video.task import BinaryScores, VideoTask, engine_settings, training_parameters

# ----------------------------------------------------------------------------------------------------
# What training one fold found, as a value and as the file whose presence means that the fold is finished.


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


# ----------------------------------------------------------------------------------------------------
# One training of a fold, of the model or of its control, from clips to scores of the outer fold.


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Surroundings:
    """What both trainings of a fold share."""

    config: RunConfig
    fold: int
    source: ClipSource
    compute: ComputeDevice
    memory: TrainingMemory
    stop: Callable[[], bool] | None
    paths: RunPaths
    ranks: Ranks


@dataclass(frozen=True)
class Fitted:
    """A finished training whose outer fold was not looked at yet; ``folder`` is that of its checkpoints.

    ``prior_logit`` brings its logits to the share of fakes it was trained on.
    """

    engine: Engine
    state: TrainingState
    source: ClipSource
    clips: FoldClips
    metrics: MetricSink
    ranks: Ranks
    folder: Path
    seconds: float
    prior_logit: float


@dataclass(frozen=True)
class Scored:
    """A finished training and the outer fold; logits and calibrated probabilities, (N,), are in its rows' order."""

    summary: TrainingSummary
    outer: OuterFold
    logits: FloatArray
    scores: FloatArray


@dataclass(frozen=True)
class ControlLog:
    """Passes metrics on under the phase ``control``, named ``<phase>_<metric>``."""

    metrics: MetricSink

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Rename and pass on."""
        renamed = {f"{phase}_{name}": value for name, value in metrics.items()}
        self.metrics.log(step=step, epoch=epoch, phase="control", metrics=renamed)


def fold_task(around: Surroundings, clips: FoldClips) -> VideoTask:
    """Telling the training part's classes apart, judged on the inner validation part."""
    return VideoTask(
        ClipDataset(around.source, clips.train),
        ClipDataset(around.source, clips.validation),
        model=around.config.model,
        weights=class_weights(clips.train) if around.config.class_balance == "loss" else (1.0, 1.0),
    )


def fit(
    around: Surroundings,
    clips: FoldClips,
    settings: EngineSettings,
    folder: Path,
    metrics: MetricSink,
    memory: MemoryObserver,
    progress: Progress | None,
) -> Fitted:
    """Train to the end, choosing the epoch on the inner validation part."""
    started = time.monotonic()
    binding = CheckpointBinding(training_parameters(around.config, around.fold), clips.fingerprint)
    engine = Engine(
        fold_task(around, clips),
        settings,
        around.compute,
        CheckpointFolder(folder, binding, keep_last=around.config.keep_checkpoints),
        metrics,
        policy=around.memory.policy,
        memory=memory,
        oom_folder=around.memory.oom_folder,
        stop=around.stop,
        progress=progress,
        ranks=around.ranks,
    )
    state = engine.fit()
    seconds, prior = time.monotonic() - started, prior_logit(clips.train, around.config.class_balance)
    return Fitted(engine, state, around.source, clips, metrics, around.ranks, folder, seconds, prior)


def choose(fitted: Fitted) -> RecordedSelection:
    """Choose temperature and threshold on the inner validation part, and put all that was chosen on record."""
    state, clips = fitted.state, fitted.clips
    validation = _scores(fitted, clips.validation)

    def recorded() -> dict[str, Any]:
        logits = validation.logits + fitted.prior_logit
        chosen = select(
            state.history, state.best_epoch, validation.labels, logits, clips.num_validation_groups,
            prior_logit=fitted.prior_logit,
        )  # fmt: skip
        weights = hashlib.sha256(safetensors.torch.save(state.best_model)).hexdigest()
        return asdict(record_selection(fitted.folder, RecordedSelection(chosen, clips.fingerprint, weights)))

    document = fitted.ranks.from_leader("selection", recorded)
    kept = RecordedSelection(**{**document, "selection": Selection(**document["selection"])})
    chosen = asdict(kept.selection)
    metrics = {name: float(chosen[name]) for name in ("best_epoch", "temperature", "threshold", "log_loss")}
    fitted.metrics.log(step=state.step, epoch=state.best_epoch, phase="selection", metrics=metrics)
    return kept


def score(fitted: Fitted, recorded: RecordedSelection) -> Scored:
    """Open the outer fold, which takes a selection on record, and score its originals."""
    state, chosen = fitted.state, recorded.selection
    outer = fitted.clips.test.open(recorded)
    test = _scores(fitted, outer.rows)
    _refuse_nonfinite(outer, test.logits)
    logits = test.logits + chosen.prior_logit
    scores = probabilities(logits, chosen.temperature)
    decisions = decide(scores, chosen.threshold)
    metrics = {
        "roc_auc": roc_auc(test.labels, scores),
        "balanced_accuracy": balanced_accuracy(test.labels, decisions),
    }
    fitted.metrics.log(step=state.step, epoch=state.best_epoch, phase="test", metrics=metrics)
    summary = TrainingSummary(
        history=tuple(state.history),
        best_epoch=chosen.best_epoch,
        temperature=chosen.temperature,
        threshold=chosen.threshold,
        recorded=recorded,
        steps=state.step,
        nonfinite_steps=state.nonfinite_steps,
        micro_batch=state.micro_batch,
        micro_batch_schedule=tuple(state.micro_batches.changes),
        inexact_because=tuple(state.inexact_because),
        seconds=fitted.seconds,
    )
    return Scored(summary, outer, logits, scores)


def _refuse_nonfinite(outer: OuterFold, logits: FloatArray) -> None:
    lost = [row.video_id for row, finite in zip(outer.rows, np.isfinite(logits), strict=True) if not finite]
    if lost:
        raise DataError(
            f"the network says nothing finite of {len(lost)} test videos, the first: {', '.join(lost[:5])}. Look at "
            "their clips, turn amp off, or train with a lower learning_rate."
        )


def _scores(fitted: Fitted, rows: Sequence[ClipRow]) -> BinaryScores:
    """On every rank all of them."""
    scores, whole = BinaryScores(), BinaryScores()
    fitted.engine.predict(ClipDataset(fitted.source, rows), fitted.state.best_model, scores)
    whole.add_document(fitted.ranks.from_leader("scores", scores.to_document))
    return whole


_logger = logging.getLogger(__name__)


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
    ranks: Ranks | None = None,
) -> FoldOutcome:
    """Train and score outer fold ``fold``, going on from what an earlier attempt saved.

    With ``config.num_ranks`` above 1 other processes do it together and this one waits for them, unless it is one of
    them.

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
        ranks: of which this process is one; None: it is no rank, and starts them where there are to be several.

    Raises:
        StoppedError: ``stop`` said so; everything is saved (exit code 75).
        DataError: no such fold, clips that are missing, or a training part of one class.
        CheckpointMismatchError: what was saved belongs to other parameters or data.
        UsageError: the requested device is not there.
        MemoryExhaustedError: one clip alone, or the optimizer's step, does not fit into memory.
        CheckpointWriteError: the disk is full or read-only.
        RankLostError: one of several ranks was killed.
    """
    if ranks is None and config.num_ranks > 1:
        train_on_ranks(paths, config, STAGE, fold, attempt=attempt, memory=memory, stop=stop, progress=progress)
        outcome = read_outcome(paths.fold_outcome(fold))
        if outcome is None:
            raise RankLostError(f"the ranks ended and left no outcome; {paths.logs} says why.")
        return outcome
    ranks = ranks or Ranks()
    source, clips = read_fold(paths, config, fold)
    fingerprint = sha256_of_json([training_parameters(config, fold), clips.fingerprint])
    outcome = _outcome_of(ranks, lambda: _finished(paths, fold, fingerprint))
    if outcome is not None:
        return outcome

    asked = stop is not None and stop()  # first of all, because from then on a signal only sets a flag
    if any(wish for (wish,) in ranks.meet("begin", asked)):
        raise StoppedError("stopped as asked before training: resume with run_notebooks.py --resume latest.")
    compute = resolve_device(config.device, config.amp)
    _logger.info("fold %d, attempt %d, on %s", fold, attempt, compute.describe())
    shuffled = read_control_fold(paths, config, fold, source) if config.shuffled_label_control else None
    with training_memory(paths, config, STAGE, fold, compute, memory, ranks.rank) as kept:
        around = Surroundings(config, fold, source, compute, kept, stop, paths, ranks)
        scored, control, predicted = _train_and_score(around, clips, shuffled, metric_log, progress)
    most = int(max(peak for (peak,) in ranks.meet("peaks", peak_rss_bytes())))

    def written() -> FoldOutcome:
        write_table(_predictions(fold, scored, control), PREDICTIONS, paths.predictions(fold))
        outcome = _outcome(around, clips, scored, control, predicted, most, fingerprint)
        write_outcome(paths.fold_outcome(fold), outcome)
        return outcome

    outcome = _outcome_of(ranks, written)
    if outcome is None:
        raise RuntimeError("rank 0 wrote an outcome and handed on none")
    return outcome


def _outcome_of(ranks: Ranks, make: Callable[[], FoldOutcome | None]) -> FoldOutcome | None:
    """What ``make`` gives on rank 0, on every rank."""

    def as_text() -> str:
        outcome = make()
        return outcome_to_json(outcome) if outcome is not None else ""

    text = ranks.from_leader("outcome", as_text)
    return outcome_from_json(text) if text else None


def _finished(paths: RunPaths, fold: int, fingerprint: str) -> FoldOutcome | None:
    """The outcome of an earlier attempt, where that came to the end with just these parameters and clips."""
    outcome = read_outcome(paths.fold_outcome(fold))
    if outcome is None or outcome.fingerprint != fingerprint or not paths.predictions(fold).exists():
        return None
    return outcome


def _train_and_score(
    around: Surroundings,
    clips: FoldClips,
    shuffled: FoldClips | None,
    metric_log: MetricSink,
    progress: Progress | None,
) -> tuple[Scored, Scored | None, int | None]:
    """Scores of the model and of its control, and the predicted peak of memory in bytes."""
    paths, fold, kept = around.paths, around.fold, around.memory
    first, second = _halves(progress) if shuffled else (progress, None)
    settings, predicted = _settings(around, fold_task(around, clips))
    folder = paths.fold_checkpoints(fold)
    fitted = fit(around, clips, settings, folder, metric_log, kept.observer, first)
    fitted_control = None
    if shuffled is not None:
        folder, log = paths.control_checkpoints(fold), ControlLog(metric_log)
        fitted_control = fit(around, shuffled, settings, folder, log, kept.control_observer, second)
    chosen, chosen_control = choose(fitted), choose(fitted_control) if fitted_control else None
    # Only now, when all that was chosen is on the disk, is the outer fold looked at.
    scored = score(fitted, chosen)
    return scored, score(fitted_control, chosen_control) if fitted_control and chosen_control else None, predicted


def _settings(around: Surroundings, task: VideoTask) -> tuple[EngineSettings, int | None]:
    """The engine's settings with a micro-batch that memory is planned for, and the peak that plan predicts."""
    settings = engine_settings(around.config, around.fold)
    micro_batch, predicted = around.ranks.from_leader(
        "preflight",
        lambda: planned_micro_batch(
            around.paths,
            around.config,
            task,
            settings,
            around.compute,
            around.memory.observer,
            num_ranks=around.ranks.size,
        ),
    )
    return replace(settings, micro_batch=micro_batch), predicted


def _predictions(fold: int, scored: Scored, control: Scored | None) -> pl.DataFrame:
    """PREDICTIONS rows of the outer fold, in the order of the video ids."""
    chosen, outer = scored.summary.selection, scored.outer
    columns = {
        "video_id": [row.video_id for row in outer.rows],
        "group_id": [outer.group_of[row.video_id] for row in outer.rows],
        "label": [LABELS[row.label] for row in outer.rows],
        "fold": fold,
        "score": scored.scores,
        "threshold": chosen.threshold,
        "logit": scored.logits,
        "temperature": chosen.temperature,
        "control_score": control.scores if control else None,
        "control_label": [LABELS[row.label] for row in control.outer.rows] if control else None,
    }
    types = {name: column.dtype.type for name, column in PREDICTIONS.columns.items()}
    return pl.DataFrame(columns, schema=types)


def _outcome(
    around: Surroundings,
    clips: FoldClips,
    scored: Scored,
    control: Scored | None,
    predicted_peak_bytes: int | None,
    peak_rss: int,
    fingerprint: str,
) -> FoldOutcome:
    return FoldOutcome(
        fold=around.fold,
        model=around.config.model,
        num_parameters=DETECTORS.get(around.config.model).num_parameters(),
        device=around.compute.describe(),
        num_train_videos=len({row.video_id for row in clips.train}),
        num_train_clips=len(clips.train),
        num_validation_videos=len(clips.validation),
        num_test_videos=len(clips.test),
        missing_videos=clips.missing,
        training=scored.summary,
        control=control.summary if control else None,
        predicted_peak_bytes=predicted_peak_bytes,
        peak_rss_bytes=peak_rss,
        peak_device_bytes=peak_device_bytes(around.compute.device),
        fingerprint=fingerprint,
        num_ranks=around.ranks.size,
    )


def _halves(progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    """Progress of the model as the first half of the whole, of the control as the second."""
    if progress is None:
        return None, None
    return lambda done, planned: progress(done, 2 * planned), lambda done, planned: progress(
        planned + done, 2 * planned
    )
