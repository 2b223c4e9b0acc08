"""One training of a fold, of the model or of its control, from clips to scores of the outer fold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.data import ClipDataset, ClipRow, ClipSource, class_weights
from fvc_lib.learning.device import ComputeDevice
from fvc_lib.learning.engine import Engine
from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.fold_data import FoldClips
from fvc_lib.learning.fold_memory import FoldMemory
from fvc_lib.learning.fold_outcome import FoldOutcome, TrainingSummary
from fvc_lib.learning.fold_settings import training_parameters
from fvc_lib.learning.ranks import Ranks
from fvc_lib.learning.training_state import TrainingState
from fvc_lib.learning.video_task import VideoTask
from fvc_lib.learning.watching import MetricSink
from fvc_lib.metrics.thresholds import best_threshold
from fvc_lib.services.checkpoints import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_observer import MemoryObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import LABELS

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Surroundings:
    """What both trainings of a fold share; ``replayed`` is the outcome whose micro-batches are to be repeated."""

    config: RunConfig
    fold: int
    source: ClipSource
    compute: ComputeDevice
    memory: FoldMemory
    stop: Callable[[], bool] | None
    replayed: FoldOutcome | None
    paths: RunPaths
    ranks: Ranks


@dataclass(frozen=True)
class Fitted:
    """A finished training whose outer fold was not looked at yet."""

    engine: Engine
    state: TrainingState
    source: ClipSource
    clips: FoldClips
    metrics: MetricSink
    ranks: Ranks
    seconds: float


@dataclass(frozen=True)
class Scored:
    """A finished training; the outer fold's scores (float in [0, 1]) and the logits they come from, by video id; and
    the labels it is judged by.
    """

    summary: TrainingSummary
    scores: Mapping[str, float]
    logits: Mapping[str, float]
    labels: Mapping[str, str]


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
    return Fitted(engine, state, around.source, clips, metrics, around.ranks, time.monotonic() - started)


def score(fitted: Fitted) -> Scored:
    """Choose the threshold on the inner validation part, then score the outer fold's originals once."""
    state, clips = fitted.state, fitted.clips
    validation = _scores(fitted, clips.validation)
    test = _scores(fitted, clips.test)
    fitted.metrics.log(step=state.step, epoch=state.best_epoch, phase="test", metrics=test.compute())
    summary = TrainingSummary(
        history=tuple(state.history),
        best_epoch=state.best_epoch,
        temperature=1.0,
        threshold=best_threshold(validation.labels, validation.scores),
        steps=state.step,
        nonfinite_steps=state.nonfinite_steps,
        micro_batch=state.micro_batch,
        micro_batch_schedule=tuple(state.micro_batches.changes),
        inexact_because=tuple(state.inexact_because),
        seconds=fitted.seconds,
    )
    ids = [row.video_id for row in clips.test]
    scores = dict(zip(ids, test.scores.tolist(), strict=True))
    logits = dict(zip(ids, test.logits.tolist(), strict=True))
    return Scored(summary, scores, logits, {row.video_id: LABELS[row.label] for row in clips.test})


def _scores(fitted: Fitted, rows: Sequence[ClipRow]) -> BinaryScores:
    """On every rank all of them."""
    scores, whole = BinaryScores(), BinaryScores()
    fitted.engine.predict(ClipDataset(fitted.source, rows), fitted.state.best_model, scores)
    whole.add_document(fitted.ranks.from_leader("scores", scores.to_document))
    return whole
