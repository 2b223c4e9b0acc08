"""Train the model of an outer fold and its controls, choose on the inner validation part, and score the fold once.

A control is the same training on other labels, for example shuffled ones; the model is compared with it.

``train_fold`` without a fold trains one network on all groups, which has no test part.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Unpack

import polars as pl

from fvc_lib.detectors.classical import refuse_random_trunk, refuse_settings, trunk_config
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.first_step import first_step
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.task import Batch
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.memory import NoObserver, peak_rss_bytes
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    AUGMENTED,
    FINAL_VALIDATION,
    FOLDS,
    INDEX,
    PREDICTIONS,
    PROTOCOL,
    VALIDATION_PREDICTIONS,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import FINAL_TRAINING, FOLD_TRAINING, KFOLD, REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings
from fvc_lib.tasks.recipe import (
    ControlLog,
    Finished,
    Network,
    TrainedNetwork,
    Training,
    TrainingOptions,
    TrainingOutcome,
    outcome_to_json,
    read_outcome,
    train,
)
from fvc_lib.tasks.video import classical, data
from fvc_lib.tasks.video.data import ClipDataset, ClipRow, ClipSource, FoldClips
from fvc_lib.tasks.video.features import with_features
from fvc_lib.tasks.video.results import forensic_features
from fvc_lib.tasks.video.selection import RecordedSelection, Selection, record_selection, select
from fvc_lib.tasks.video.summary import (
    Scored,
    TrainingSummary,
    digest_of_state,
    predictions_table,
    score_outer_fold,
    validation_table,
)
from fvc_lib.tasks.video.task import BinaryScores, VideoTask, engine_settings


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
        return _train_on_features(paths, config, fold, **options)
    stage, table = (
        (FINAL_TRAINING, paths.final_validation) if fold is None else (FOLD_TRAINING, paths.predictions(fold))
    )
    begins_ranks = config.num_ranks > 1 and options.get("ranks") is None  # then each rank calls this again

    def read(ranks: Ranks) -> Training[TrainingSummary]:
        source, clips, controls = read_fold(paths, config, fold)
        outcome = paths.training_checkpoints(stage, fold) / "outcome.json"
        if not (begins_ranks or (outcome.exists() and table.exists())):
            place = (fold or 0) + ranks.rank / ranks.size
            source = _with_features(paths, config, source, config, place, options)
        return _training(paths, config, source, {"": clips, **controls})

    return train(stage, fold, paths, config, read, TrainingSummary, **options)


def first_look(paths: RunPaths, config: RunConfig, fold: int) -> tuple[list[str], list[pl.DataFrame], Batch | None]:
    """Describe the training of a fold before it begins; raises as ``train_fold``.

    For a network, one real training step is taken on the first batch.

    Returns:
        Lines of text; two tables (a network's parts and tensors, or the feature families and candidate settings of a
        model on features); and the batch of that step, None for a model on features.
    """
    if config.of_features:
        text, tables = classical.look_at_features(config, *_read_features(paths, config, fold, {})[:2])
        return [text], tables, None
    step = first_step(fold_training(paths, config, fold).task, config)
    return [*step.setup, step.sentence()], [step.network_table(), step.tensor_table()], step.batch


def fold_training(paths: RunPaths, config: RunConfig, fold: int | None = None) -> Training[TrainingSummary]:
    """Return the training of one outer fold, or of all groups, on clips; raises as ``train_fold``."""
    source, clips, controls = read_fold(paths, config, fold)
    return _training(paths, config, source, {"": clips, **controls})


def read_fold(paths: RunPaths, config: RunConfig, fold: int | None) -> tuple[Any, FoldClips, dict[str, FoldClips]]:
    """Return the source of a fold's data, the fold's parts, and each control's parts by name (``data.control_clips``).

    The source is the run's clips, or a ``FeatureTable`` for a model on forensic features.

    Raises:
        DataError: as ``data.open_clips``, ``data.fold_clips`` and ``forensic_features``, or a clip that was made is
            missing now.
    """
    table = read_table(paths.folds, FOLDS) if config.protocol == KFOLD else read_table(paths.protocol, PROTOCOL)
    rows, known = data.rows_to_train_on(table, config, fold), set[str]()
    again = f"Make them again: {command_text('--from', '03', '--resume', paths.root)}"
    source: Any = None
    if config.of_features == "forensic":
        source = classical.FeatureTable(forensic_features(paths.features, config), config)
    else:
        made = read_table(paths.augmented_metadata, AUGMENTED)
        known = set(made["video_id"])
        try:
            source = data.open_clips(config, made)
        except DataError as error:
            raise DataError(f"{error} {again}") from error
    clips = data.fold_clips(rows, source, config, fold)
    if gone := [video_id for video_id in clips.missing if video_id in known]:  # folds would train on different videos
        raise DataError(
            f"clips of {len(gone)} videos were made and are gone from the clip store, the first: "
            f"{', '.join(gone[:5])}. {again}"
        )
    return source, clips, data.control_clips(rows, lambda: read_table(paths.index, INDEX), source, config, clips)


# Networks


def _training(
    paths: RunPaths, config: RunConfig, source: Any, parts: dict[str, FoldClips]
) -> Training[TrainingSummary]:
    """Return the training of the model and its controls.

    ``parts`` holds the model's clips under the empty name, and each control's under its name.
    """
    clips, number = parts[""], config.clips_per_video
    fold = clips.fold

    def finish(trained: Sequence[TrainedNetwork]) -> Finished[TrainingSummary]:
        chosen = [choose(network, source, of, config) for network, of in zip(trained, parts.values(), strict=True)]
        summaries = [_summary(network, each[0]) for network, each in zip(trained, chosen, strict=True)]
        inner = validation_table(fold, clips, chosen[0][1], chosen[0][0])
        if fold is None:
            return Finished(summaries, lambda: write_table(inner, FINAL_VALIDATION, paths.final_validation))
        # Open the outer folds only after every choice is on disk.
        scored = {
            name: score(network, summary, parts[name], source, number)
            for name, network, summary in zip(parts, trained, summaries, strict=True)
        }
        table = predictions_table(fold, scored)

        def write() -> None:
            write_table(inner, VALIDATION_PREDICTIONS, paths.validation_predictions(fold))
            write_table(table, PREDICTIONS, paths.predictions(fold))

        return Finished(summaries, write)

    return Training(
        stage=FINAL_TRAINING if fold is None else FOLD_TRAINING,
        fold=fold,
        model_name=config.model,
        settings=engine_settings(config, fold),
        parameters={"fold": fold, **config.training_values()},
        networks=[Network(_task(source, of, config), of.fingerprint, name) for name, of in parts.items()],
        sizes=_sizes(clips),
        finish=finish,
        outputs=[paths.final_validation if fold is None else paths.predictions(fold)],
    )


def _sizes(clips: FoldClips) -> dict[str, Any]:
    """Return the sizes of the parts and the missing videos, by the field names of ``TrainingOutcome``."""
    return {
        "num_train": len({row.video_id for row in clips.train}),
        "num_train_samples": len(clips.train),
        "num_validation": len(clips.validation),
        "num_test": len(clips.test),
        "missing": clips.missing,
    }


def _with_features(
    paths: RunPaths, config: RunConfig, source: Any, trunk: RunConfig, place: float, options: TrainingOptions
) -> Any:
    """Return ``source`` with the features that the trunk of ``trunk`` gives its clips (``with_features``).

    ``place`` is the fold number plus rank / ranks. It sets the clip to begin at, so folds, ranks and runs that work at
    the same time compute different clips.
    """
    made = data.made_clips(read_table(paths.augmented_metadata, AUGMENTED))
    device = resolve_device(config.device, "off").device
    begin = (place / config.num_trainings + stable_seed(paths.run_id) / 2**63) % 1
    return with_features(source, made, trunk, device, begin=begin, stop=options.get("stop") or (lambda: False))


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
    """Choose temperature and threshold on the inner validation part.

    Returns:
        The record of the choice, which opens the sealed ``clips.test`` and is already on disk; and the logits (N,) of
        the inner validation videos.
    """
    state, validation = trained.state, _scores(trained, source, clips.validation, config.clips_per_video)
    prior = data.prior_logit(clips.train, config.class_balance)
    logits = validation.logits + prior

    def recorded() -> dict[str, Any]:
        chosen = select(
            validation.labels, logits, clips.num_validation_groups, prior_logit=prior, point=config.operating_point,
            validation_loss=state.history[state.best_epoch - 1].validation["loss"], num_epochs=len(state.history),
            best_epoch=state.best_epoch,
        )  # fmt: skip
        weights = digest_of_state(state.best_model)
        return asdict(record_selection(trained.checkpoints, RecordedSelection(chosen, clips.fingerprint, weights)))

    document = trained.ranks.from_leader("selection", recorded)
    kept = RecordedSelection(**{**document, "selection": Selection(**document["selection"])})
    names = ("best_epoch", "temperature", "threshold", "log_loss")
    trained.log("selection", {name: document["selection"][name] for name in names})
    return kept, logits


def score(
    trained: TrainedNetwork, summary: TrainingSummary, clips: FoldClips, source: ClipSource, num_clips: int = 1
) -> Scored:
    """Open the outer fold and score ``num_clips`` clips of each of its videos; raises as ``score_outer_fold``."""
    return score_outer_fold(summary, clips, lambda rows: _scores(trained, source, rows, num_clips).logits, trained.log)


def _summary(trained: TrainedNetwork, recorded: RecordedSelection) -> TrainingSummary:
    chosen = recorded.selection
    return TrainingSummary(
        **{**trained.record(), "best_epoch": chosen.best_epoch},
        temperature=chosen.temperature,
        threshold=chosen.threshold,
        recorded=recorded,
    )


def _scores(trained: TrainedNetwork, source: ClipSource, rows: Sequence[ClipRow], clips: int) -> BinaryScores:
    scores = BinaryScores(clips)
    trained.predict(ClipDataset(source, rows, clips=clips), scores)
    return scores


# Models on features


def _read_features(
    paths: RunPaths, config: RunConfig, fold: int, options: TrainingOptions
) -> tuple[classical.Source, FoldClips, dict[str, FoldClips]]:
    """Return the features, the parts and the controls' parts of a fold; compute missing features of a trunk.

    Raises:
        StoppedError: ``stop`` of the options returned True; computed features stay in the cache.
        UsageError: settings that a model on features does not use, or a trunk without pretrained weights.
    """
    refuse_settings(config)
    if config.of_features == "embedding":
        refuse_random_trunk(config)
    source, clips, controls = read_fold(paths, config, fold)
    if config.of_features == "forensic":
        return source, clips, controls
    featured = _with_features(paths, config, source, trunk_config(config), fold, options)
    return classical.EmbeddedClips(featured, config), clips, controls


def _train_on_features(
    paths: RunPaths, config: RunConfig, fold: int, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingSummary]:
    """Fit and test a model on features; writes the same files and raises the same errors as ``train_fold``."""
    log, memory = options["metric_log"], options.get("memory") or NoObserver()
    stop, progress = options.get("stop") or (lambda: False), options.get("progress") or (lambda _done, _total: None)
    memory.at("setup")
    source, clips, controls = _read_features(paths, config, fold, options)
    folder = paths.training_checkpoints(FOLD_TRAINING, fold)
    fingerprint = sha256_of_json([{"fold": fold, **config.training_values()}, clips.fingerprint])
    finished = read_outcome(folder / "outcome.json", TrainingSummary)
    if finished is not None and finished.fingerprint == fingerprint and paths.predictions(fold).exists():
        return replace(finished, train_anew=command_text("--force", FOLD_TRAINING[:2], "--resume", paths.root))
    paths.stage_checkpoint(FOLD_TRAINING, fold).unlink(missing_ok=True)  # it lists files that are written from here on
    parts, fitted = {"": clips, **controls}, dict[str, classical.Fitted]()
    logs = {name: ControlLog(log, name) if name else log for name in parts}
    memory.at("train", epoch=1)
    for name, of in parts.items():
        progress(len(fitted), len(parts))
        fitted[name] = classical.fit(config, source, of, folder / name, logs[name], stop)
    # Open the outer folds only after every choice is on disk.
    memory.at("test")
    scored = {name: classical.score(config, source, of, fitted[name], logs[name]) for name, of in parts.items()}
    progress(len(parts), len(parts))
    memory.at("report")
    model, summaries = fitted[""], {name: each.summary for name, each in scored.items()}
    inner = validation_table(fold, clips, model.validation_logits, model.recorded)
    write_table(inner, VALIDATION_PREDICTIONS, paths.validation_predictions(fold))
    write_table(predictions_table(fold, scored), PREDICTIONS, paths.predictions(fold))
    network = classical.trained_class(config, source, model.arrays)
    outcome = TrainingOutcome(
        fold=fold,
        model=config.model,
        num_parameters=network.num_parameters,
        device="cpu",
        training=summaries[""],
        control=summaries.get(SHUFFLED_LABELS),
        sources=summaries.get(REAL_SOURCES),
        predicted_peak_bytes=None,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=None,
        fingerprint=fingerprint,
        finished_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        network=network,
        **_sizes(clips),
    )
    write_text(folder / "outcome.json", outcome_to_json(outcome))
    return outcome
