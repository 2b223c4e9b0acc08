"""One training of a fold, of the model or of its control, from clips to scores of the outer fold."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.data import ClipDataset, ClipRow, ClipSource, class_weights, prior_logit
from fvc_lib.learning.device import ComputeDevice
from fvc_lib.learning.engine import Engine
from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.fold_data import FoldClips
from fvc_lib.learning.fold_outcome import FoldOutcome, TrainingSummary
from fvc_lib.learning.fold_settings import training_parameters
from fvc_lib.learning.outer_fold import OuterFold
from fvc_lib.learning.ranks import Ranks
from fvc_lib.learning.selection import RecordedSelection, Selection, record_selection, select
from fvc_lib.learning.training_memory import TrainingMemory
from fvc_lib.learning.training_state import TrainingState
from fvc_lib.learning.video_task import VideoTask
from fvc_lib.learning.watching import MetricSink
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import balanced_accuracy, roc_auc
from fvc_lib.metrics.thresholds import decide
from fvc_lib.metrics.weighting import FloatArray
from fvc_lib.services.checkpoints import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.memory_observer import MemoryObserver
from fvc_lib.services.run_paths import RunPaths

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Surroundings:
    """What both trainings of a fold share; ``replayed`` is the outcome whose micro-batches are to be repeated."""

    config: RunConfig
    fold: int
    source: ClipSource
    compute: ComputeDevice
    memory: TrainingMemory
    stop: Callable[[], bool] | None
    replayed: FoldOutcome | None
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
        shortages=around.memory.shortages,
        stop=around.stop,
        progress=progress,
        ranks=around.ranks,
    )
    state = engine.fit()
    replayed, num_ranks = around.replayed, around.ranks.size
    if replayed is not None and replayed.num_ranks != num_ranks:
        state.inexact_because.append(f"the replayed training had {replayed.num_ranks} ranks, this one {num_ranks}")
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
