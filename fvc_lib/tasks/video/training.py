"""Train an outer fold and its controls, choose on the inner validation part, and score the fold once.

``train_fold`` without a fold trains one network on all groups, which has no test part.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fvc_lib.engine.device import clips_in_a_pass, resolve_device
from fvc_lib.engine.first_step import FirstStep, first_step
from fvc_lib.engine.memory import planned_micro_batch
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, balanced_accuracy, decide, roc_auc
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.memory.policy import MemoryObserver, NoObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    FINAL_VALIDATION,
    LABELS,
    PREDICTIONS,
    VALIDATION_PREDICTIONS,
    frame_of,
    write_table,
)
from fvc_lib.services.tasks import FINAL_TRAINING, FOLD_TRAINING
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings
from fvc_lib.tasks.recipe import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome, train
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.classical.training import FeatureLook, look_at_features, train_on_features
from fvc_lib.tasks.video.data import ClipDataset, ClipRow, ClipSource, FoldClips
from fvc_lib.tasks.video.features import with_features
from fvc_lib.tasks.video.selection import RecordedSelection, Selection, record_selection, select
from fvc_lib.tasks.video.summary import (
    Scored,
    TrainingSummary,
    digest_of_state,
    predictions_table,
    training_parameters,
    validation_table,
)
from fvc_lib.tasks.video.task import BinaryScores, VideoTask, engine_settings


@dataclass(frozen=True)
class FeatureWork:
    """How to compute a frozen trunk's features: when to stop, who watches memory, and the ranks that share the work."""

    stop: Callable[[], bool]
    memory: MemoryObserver
    ranks: Ranks


def train_fold(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingSummary]:
    """Train and score outer fold ``fold`` (0-based), resuming an earlier attempt.

    Reads ``tables/folds.parquet`` and the clips. Writes ``checkpoints/fold_K`` and
    ``tables/predictions_fold_K.parquet``. A finished fold returns its outcome without training.

    Without a fold, train one network on all groups (``train_final``). It is not tested and has no controls. Writes
    ``checkpoints/final`` and ``tables/final_validation.parquet``.

    Raises:
        DataError: the fold does not exist, clips are missing, or the training part has one class.
        FvcError: as ``recipe.train``, which explains the options.
    """
    if config.of_features:
        if fold is None:
            raise UsageError(f"train_final: {config.model} sees features, and one network of all groups sees clips.")
        return train_on_features(paths, config, fold, **options)
    stop = options.get("stop") or (lambda: False)

    memory = options.get("memory") or NoObserver()
    begins_ranks = config.num_ranks > 1 and options.get("ranks") is None  # then each rank calls this again

    def read(ranks: Ranks) -> Training[TrainingSummary]:
        outcome = paths.training_checkpoints(_stage(fold), fold) / "outcome.json"
        finished = outcome.exists() and _table(paths, fold).exists()
        features = None if finished or begins_ranks else FeatureWork(stop, memory, ranks)
        return fold_training(paths, config, fold, features=features)

    return train(_stage(fold), fold, paths, config, read, TrainingSummary, **options)


def _stage(fold: int | None) -> str:
    return FINAL_TRAINING if fold is None else FOLD_TRAINING


def _table(paths: RunPaths, fold: int | None) -> Path:
    """Return the table that is written last."""
    return paths.final_validation if fold is None else paths.predictions(fold)


def first_look(paths: RunPaths, config: RunConfig, fold: int) -> FirstStep | FeatureLook:
    """Return the inputs and outputs of one real step, or the features that a model sees; raises as ``train_fold``."""
    if config.of_features:
        return look_at_features(paths, config, fold)
    return first_step(fold_training(paths, config, fold).task, config)


def fold_training(
    paths: RunPaths, config: RunConfig, fold: int | None = None, *, features: FeatureWork | None = None
) -> Training[TrainingSummary]:
    """Return the training of one outer fold, or of all groups; raises as ``train_fold``.

    With ``features``, a frozen trunk's features of all clips are computed first and replace the clips.
    """
    source, clips, controls = data.read_fold(paths, config, fold)
    peak_bytes = None
    if features is not None:
        source, peak_bytes = _with_features(paths, source, clips, config, features)
    every = {"": clips, **controls}
    networks = [Network(_task(source, each, config), each.fingerprint, name) for name, each in every.items()]

    def finish(trained: Sequence[TrainedNetwork]) -> Finished[TrainingSummary]:
        parts = every.values()
        judged = [choose(each, source, of, config) for each, of in zip(trained, parts, strict=True)]
        chosen = [recorded for recorded, _ in judged]
        if fold is None:
            return _finish_final(paths, trained[0], *judged[0], clips)
        # Open the outer folds only after every choice is on disk.
        scored = [score(*each, source, config.clips_per_video) for each in zip(trained, parts, chosen, strict=True)]
        table = predictions_table(fold, dict(zip(every, scored, strict=True)))

        def write() -> None:
            inner = validation_table(fold, clips, judged[0][1], chosen[0])
            write_table(inner, VALIDATION_PREDICTIONS, paths.validation_predictions(fold))
            write_table(table, PREDICTIONS, paths.predictions(fold))

        return Finished([each.summary for each in scored], write)

    return Training(
        stage=_stage(fold),
        fold=fold,
        model_name=config.model,
        settings=engine_settings(config, fold),
        parameters=training_parameters(config, fold),
        networks=networks,
        sizes={
            "num_train": len({row.video_id for row in clips.train}),
            "num_train_samples": len(clips.train),
            "num_validation": len(clips.validation),
            "num_test": len(clips.test),
            "missing": clips.missing,
        },
        finish=finish,
        outputs=[_table(paths, fold)],
        peak_bytes_before=peak_bytes,
    )


def _with_features(
    paths: RunPaths, source: ClipSource, clips: FoldClips, config: RunConfig, work: FeatureWork
) -> tuple[Any, int | None]:
    """Return ``with_features`` and the predicted peak in bytes; None if nothing was predicted.

    The batch size is the one that the memory plan allows for a training step on clips.
    """
    compute, ranks, fold = resolve_device(config.device, config.amp), work.ranks, clips.fold or 0
    peaks: list[int | None] = []

    def planned() -> int:
        task, settings = _task(source, clips, config), engine_settings(config, clips.fold)
        settings = replace(settings, micro_batch=clips_in_a_pass(compute.device, settings.micro_batch))
        plan = planned_micro_batch(config, task, settings, compute, work.memory, num_ranks=ranks.size, stop=work.stop)
        peaks.append(plan[1])
        return plan[0]

    featured = with_features(
        source,
        data.made_clips(paths),
        config,
        compute.device,
        # Folds, ranks and the runs of a sweep begin at different clips, and so share the work.
        begin=((fold + ranks.rank / ranks.size) / config.num_trainings + stable_seed(paths.run_id) / 2**63) % 1,
        stop=work.stop,
        batch_size=lambda missing: ranks.from_leader("features", lambda: planned() if missing else 1),
    )
    return featured, max((peak for peak in peaks if peak is not None), default=None)


def _task(source: ClipSource, clips: FoldClips, config: RunConfig) -> VideoTask:
    weights = data.class_weights(clips.train) if config.class_balance == "loss" else (1.0, 1.0)
    balanced = config.class_balance in ("sampler", "batch")
    mixing = MixSettings(MIX_SHARE, config.mixup_alpha, config.cutmix_alpha, balanced)
    seed = stable_seed("clips", config.seed, "final" if clips.fold is None else clips.fold)
    number = config.clips_per_video
    training = ClipDataset(
        source, clips.train, clips=number, draws=True, mixing=mixing if mixing.mixes else None, seed=seed
    )
    validation = ClipDataset(source, clips.validation, clips=number)
    return VideoTask(training, validation, config=config, weights=weights)


def choose(
    trained: TrainedNetwork, source: ClipSource, clips: FoldClips, config: RunConfig
) -> tuple[RecordedSelection, FloatArray]:
    """Choose temperature and threshold on the inner validation part; return the record and the part's logits (N,).

    The record is on disk when this returns, and opens the sealed ``clips.test``.
    """
    state, validation = trained.state, _scores(trained, source, clips.validation, config.clips_per_video)
    prior = data.prior_logit(clips.train, config.class_balance)
    logits = validation.logits + prior

    def recorded() -> dict[str, Any]:
        chosen = select(
            state.history, state.best_epoch, validation.labels, logits, clips.num_validation_groups,
            prior_logit=prior, point=config.operating_point,
        )  # fmt: skip
        weights = digest_of_state(state.best_model)
        return asdict(record_selection(trained.checkpoints, RecordedSelection(chosen, clips.fingerprint, weights)))

    document = trained.ranks.from_leader("selection", recorded)
    kept = RecordedSelection(**{**document, "selection": Selection(**document["selection"])})
    chosen = asdict(kept.selection)
    trained.log("selection", {name: chosen[name] for name in ("best_epoch", "temperature", "threshold", "log_loss")})
    return kept, logits


def score(
    trained: TrainedNetwork, clips: FoldClips, recorded: RecordedSelection, source: ClipSource, num_clips: int = 1
) -> Scored:
    """Open the outer fold with its recorded selection, and score ``num_clips`` clips of each video.

    Raises:
        DataError: a logit of a test video is not finite.
    """
    chosen, outer = recorded.selection, clips.test.open(recorded)
    test = _scores(trained, source, outer.rows, num_clips)
    lost = [row.video_id for row, finite in zip(outer.rows, np.isfinite(test.logits), strict=True) if not finite]
    if lost:
        raise DataError(
            f"the logits of {len(lost)} test videos are not finite, the first: {', '.join(lost[:5])}. Look at their "
            "clips, turn amp off, or train with a lower learning_rate."
        )
    logits = test.logits + chosen.prior_logit
    scores = probabilities(logits, chosen.temperature)
    decisions = decide(scores, chosen.threshold)
    measured = {"roc_auc": roc_auc(test.labels, scores), "balanced_accuracy": balanced_accuracy(test.labels, decisions)}
    trained.log("test", measured)
    return Scored(_summary(trained, recorded), outer, logits, scores)


def _summary(trained: TrainedNetwork, recorded: RecordedSelection) -> TrainingSummary:
    chosen = recorded.selection
    return TrainingSummary(
        **{**trained.record(), "best_epoch": chosen.best_epoch},
        temperature=chosen.temperature,
        threshold=chosen.threshold,
        recorded=recorded,
    )


def _finish_final(
    paths: RunPaths, trained: TrainedNetwork, recorded: RecordedSelection, logits: FloatArray, clips: FoldClips
) -> Finished[TrainingSummary]:
    """Return the table of the network of all groups: its ``logits`` of its inner validation videos."""
    columns = {
        "video_id": [row.video_id for row in clips.validation],
        "group_id": [clips.validation_groups[row.video_id] for row in clips.validation],
        "label": [LABELS[row.label] for row in clips.validation],
        "logit": logits,
        "temperature": recorded.selection.temperature,
    }
    table = frame_of(columns, FINAL_VALIDATION)
    return Finished([_summary(trained, recorded)], lambda: write_table(table, FINAL_VALIDATION, paths.final_validation))


def _scores(trained: TrainedNetwork, source: ClipSource, rows: Sequence[ClipRow], clips: int) -> BinaryScores:
    scores = BinaryScores(clips)
    trained.predict(ClipDataset(source, rows, clips=clips), scores)
    return scores
