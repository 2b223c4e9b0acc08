"""One outer fold from tables to predictions: train, choose on inner validation, score the fold once; then a control."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl

from fvc_lib.learning.device import peak_device_bytes, resolve_device
from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.fold_data import FoldClips, read_control_fold, read_fold
from fvc_lib.learning.fold_fitting import ControlLog, Progress, Scored, Surroundings, choose, fit, fold_task, score
from fvc_lib.learning.fold_outcome import FoldOutcome, outcome_from_json, outcome_to_json, read_outcome, write_outcome
from fvc_lib.learning.fold_settings import engine_settings, training_parameters
from fvc_lib.learning.models import num_parameters
from fvc_lib.learning.ranks import OneRank, Ranks
from fvc_lib.learning.training_memory import planned_micro_batch, training_memory
from fvc_lib.learning.training_on_ranks import on_ranks
from fvc_lib.learning.video_task import VideoTask
from fvc_lib.learning.watching import MetricSink
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.memory_observer import MemoryObserver
from fvc_lib.services.process_memory import peak_rss_bytes
from fvc_lib.services.run_paths import RunPaths, find_run
from fvc_lib.services.tables import LABELS, PREDICTIONS, write_table

STAGE = "04_fold_training"
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
        UsageError: the requested device is not there, or the run to be replayed.
        MemoryExhaustedError: one clip alone, or the optimizer's step, does not fit into memory.
        CheckpointWriteError: the disk is full or read-only.
        RankLostError: one of several ranks was killed.
    """
    if ranks is None and config.num_ranks > 1:
        return on_ranks(
            paths, config, STAGE, fold, lambda: read_outcome(paths.fold_outcome(fold)),
            metric_log=metric_log, memory=memory, stop=stop, progress=progress,
        )  # fmt: skip
    ranks = ranks or OneRank()
    source, clips = read_fold(paths, config, fold)
    fingerprint = sha256_of_json([training_parameters(config, fold), clips.fingerprint])
    outcome = _outcome_of(ranks, lambda: _finished(paths, fold, fingerprint))
    if outcome is not None:
        return outcome

    asked = stop is not None and stop()  # first of all, because from then on a signal only sets a flag
    if any(wish for (wish,) in ranks.meet("begin", asked)):
        raise StoppedError("stopped as asked before training: resume with run_notebooks.py --resume latest.")
    compute, replayed = resolve_device(config.device, config.amp), _replayed(config, fold, fingerprint)
    _logger.info("fold %d, attempt %d, on %s", fold, attempt, compute.describe())
    shuffled = read_control_fold(paths, config, fold, source) if config.shuffled_label_control else None
    with training_memory(paths, config, STAGE, fold, compute, memory, ranks.rank) as kept:
        around = Surroundings(config, fold, source, compute, kept, stop, replayed, paths, ranks)
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
        schedule = around.replayed.control if around.replayed else None
        settings = replace(settings, replay=schedule.micro_batch_schedule if schedule else ())
        folder, log = paths.control_checkpoints(fold), ControlLog(metric_log)
        fitted_control = fit(around, shuffled, settings, folder, log, kept.control_observer, second)
    chosen, chosen_control = choose(fitted), choose(fitted_control) if fitted_control else None
    # Only now, when all that was chosen is on the disk, is the outer fold looked at.
    scored = score(fitted, chosen)
    return scored, score(fitted_control, chosen_control) if fitted_control and chosen_control else None, predicted


def _settings(around: Surroundings, task: VideoTask) -> tuple[EngineSettings, int | None]:
    """The engine's settings with a micro-batch that memory is planned for, and the peak that plan predicts."""
    settings = engine_settings(around.config, around.fold)
    if around.replayed is not None:
        settings = replace(settings, replay=around.replayed.training.micro_batch_schedule)
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


def _replayed(config: RunConfig, fold: int, fingerprint: str) -> FoldOutcome | None:
    """The fold's outcome in the run whose micro-batches are to be repeated.

    Raises:
        UsageError: there is no such run, it has not finished this fold, or it trained with other parameters or clips.
    """
    if not config.replay_run:
        return None
    run = find_run(Path(config.runs_dir), config.replay_run)
    outcome = read_outcome(run.fold_outcome(fold))
    if outcome is None:
        raise UsageError(f"replay_run: {run.run_id} has no finished fold {fold} whose schedule could be repeated.")
    if outcome.fingerprint != fingerprint:
        raise UsageError(
            f"replay_run: {run.run_id} trained fold {fold} with other parameters or clips; its schedule says nothing "
            "about this run. Give this run the same parameters, or leave replay_run out."
        )
    return outcome


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
        num_parameters=num_parameters(around.config.model),
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
