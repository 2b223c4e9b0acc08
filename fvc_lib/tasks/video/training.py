"""Train the model of an outer fold and its controls, and score the fold's test videos once.

Epoch, temperature and threshold are chosen on the inner validation part. With ``inner_validation_share`` 0 there is no
such part. Then the network is trained on all training groups for all epochs, and its last weights are the result.
Temperature and threshold come from cross-fitting: the training groups are divided into two halves, and each half is
scored by a further network that is trained on the other half.

A control is the same training on other labels, for example shuffled ones; the model is compared with it.

``train_fold`` without a fold trains one model on all groups. No group is left to test this model.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.detectors import effort
from fvc_lib.detectors.classical import refuse_settings
from fvc_lib.detectors.network import build_detector, num_trained_stages, train_last, trunk_stages
from fvc_lib.detectors.probe import refuse_random_trunk
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import EngineSettings
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.step import first_step
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleColumns
from fvc_lib.metrics.classification import FloatArray, IntArray, balanced_accuracy, roc_auc
from fvc_lib.services.checkpoint_files import weights_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.memory import NoObserver
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import not_reported
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
from fvc_lib.services.tasks import FINAL_TRAINING, FOLD_TRAINING, KFOLD
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings
from fvc_lib.tasks.shared_training import (
    OUTCOME,
    ControlLog,
    Finished,
    Network,
    OpenTraining,
    TrainedClass,
    TrainedNetwork,
    Training,
    TrainingOptions,
    TrainingOutcome,
    settings_of,
)
from fvc_lib.tasks.video import classical, data
from fvc_lib.tasks.video.calibration import RecordedSelection, Selection, held_out_loss
from fvc_lib.tasks.video.controls import rows_to_train_on
from fvc_lib.tasks.video.data import ClipDataset, ClipRow, ClipSource, FoldClips
from fvc_lib.tasks.video.features import with_features
from fvc_lib.tasks.video.results import forensic_features, scores_across_sources
from fvc_lib.tasks.video.summary import (
    TrainingSummary,
    choose,
    predictions_table,
    score_outer_fold,
    validation_table,
)

_logger = logging.getLogger(__name__)
Parts = dict[str, FoldClips]  # clips of the model (key: empty text) and of its controls (key: the control's name)


def train_fold(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingSummary]:
    """Train the model of outer fold ``fold`` (0-based) and its controls, and score the fold's test videos.

    An attempt that was stopped is resumed. For a finished fold, the stored outcome is returned without training. Reads
    ``tables/folds.parquet`` and the clips. Writes ``checkpoints/fold_K`` and ``tables/predictions_fold_K.parquet``.

    Without a fold, train one model on all groups (``train_final``). It is not tested, and none of its control
    models (such as one that learns shuffled labels) is trained. Writes
    ``checkpoints/04b_final_training`` and ``tables/final_validation.parquet``.

    Raises:
        DataError: the fold does not exist, clips are missing, or the training part has one class.
        FvcError: an error that ``OpenTraining`` describes; its docstring also explains the options.
    """
    return open_training(paths, config, fold, **options).run()


def open_training(
    paths: RunPaths,
    config: RunConfig,
    fold: int | None = None,
    network: Callable[[], nn.Module] | None = None,
    **options: Unpack[TrainingOptions],
) -> OpenTraining[TrainingSummary]:
    """Return the training of an outer fold as an object, so that the caller can write the loop over its batches.

    ``train_fold`` runs the same training in a single call. After the loop, the object's method ``finish`` scores the
    test videos and writes the files that ``train_fold`` writes. A model on features has no batches: ``finish`` fits it.

    Args:
        paths: the run.
        config: the run's configuration.
        fold: the outer fold, from 0; None: all groups.
        network: class or function that builds the network; None: the one that ``config.model`` names. It maps uint8
            frames (B, T, 3, H, W) to logits (B,). Its memory is not measured before the training. The name of its class
            is recorded. Commands that load the trained weights later can only find a class that is in a file.
        options: optional arguments of ``OpenTraining``, such as ``metric_log``.

    Raises:
        UsageError: ``network`` is given, but the run's model is one on features or is trained on several ranks.
        FvcError: an error that ``train_fold`` describes.
    """
    stage = _stage_of(fold)
    if network is not None and (config.of_features or config.num_ranks > 1):
        raise UsageError(
            f"network: got one for a run with model {config.model!r} and num_ranks {config.num_ranks}. The loop trains "
            "it in a run of a network in one process, such as one with model frame_cnn."
        )
    begins_ranks = config.num_ranks > 1 and options.get("ranks") is None  # then each rank calls this again

    def read(ranks: Ranks) -> Training[TrainingSummary]:
        if config.of_features:
            return _training_on_features(paths, config, fold, options)
        source, parts = read_fold(paths, config, fold)
        outcome = paths.training_checkpoints(stage, fold) / OUTCOME
        if not (begins_ranks or outcome.exists() or network):
            place = (fold or 0) + ranks.rank / ranks.size
            source = _with_features(paths, config, source, place, options)
        return _training(paths, config, source, parts, network)

    measured = config if network is None else config.model_copy(update={"memory_preflight": False})
    return OpenTraining(stage, fold, paths, measured, read, TrainingSummary, **options)


def first_look(paths: RunPaths, config: RunConfig, fold: int) -> tuple[list[str], list[pl.DataFrame], Batch | None]:
    """Describe the training of a fold before it begins.

    For a network, one real training step is taken on the first batch. The errors are those of ``train_fold``.

    Returns:
        ``(lines, tables, batch)``: lines of text, two tables, and the batch of that step. The tables list the parts and
        tensors of a network, or the feature families and candidate settings of a model on features. For such a model
        ``batch`` is None.
    """
    if config.of_features:
        source, parts = _read_clips(paths, config, fold)
        source = _features_of(paths, config, source, fold, {})
        text, tables = classical.look_at_features(config, source, parts[""])
        return [text], tables, None
    step = first_step(fold_training(paths, config, fold).task, config)
    return list(step.lines), [step.network, step.tensors], step.batch


def counts_table(outcome: TrainingOutcome[TrainingSummary]) -> pl.DataFrame:
    """Return a table that counts the videos and clips that a training used.

    The columns are ``part`` (what is counted, such as ``outer test videos``) and ``number``.
    """
    done = outcome.training
    rows = [
        ("training videos", outcome.num_train),
        ("training clips with augmented copies", outcome.num_train_samples),
        ("videos that chose", outcome.num_validation),
        ("outer test videos", outcome.num_test),
        ("videos without a clip, or without features that the model sees", len(outcome.missing)),
        ("clips in memory at once", done.micro_batch),
        ("steps skipped for a loss that was not finite", done.nonfinite_steps),
    ]
    return pl.DataFrame(rows, schema=["part", "number"], orient="row")


def fold_training(paths: RunPaths, config: RunConfig, fold: int | None = None) -> Training[TrainingSummary]:
    """Return the training of a network for an outer fold, without starting it.

    If ``fold`` is None, it is the training on all groups. The errors are those of ``train_fold``.
    """
    return _training(paths, config, *read_fold(paths, config, fold))


def read_fold(paths: RunPaths, config: RunConfig, fold: int | None) -> tuple[Any, Parts]:
    """Return ``(source, parts)``: an object that reads the data of videos, and the videos of each part of a fold.

    ``parts`` maps a name to ``FoldClips`` (training, validation and test part): the empty text for the model, and the
    name of each control. The source holds the run's clips. For a model on forensic features it is a ``FeatureTable``,
    and for a model on clips and forensic features it is ``Views``.

    Raises:
        DataError: clips or features are missing or damaged; the fold does not exist or a part of it lacks a class; or
            ``wavelet_bands`` is on and no fake has a real counterpart.
    """
    table = read_table(paths.folds, FOLDS) if config.protocol == KFOLD else read_table(paths.protocol, PROTOCOL)
    rows = rows_to_train_on(table, config, fold)
    known = list[tuple[str, int]]()
    source: Any = None
    if config.of_features != "forensic":
        made = read_table(paths.augmented_metadata, AUGMENTED)
        source = data.open_clips(config, made)
        known = data.made_clips(made)
    gone = sorted({video_id for video_id, number in known if not source.has(video_id, number)})
    if config.of_features in ("forensic", "both"):
        measured = classical.FeatureTable(forensic_features(paths.features, config), config)
        source = measured if source is None else classical.Views(source, measured)
    clips = data.fold_clips(rows, source, config, fold)
    if gone:  # folds would train on different videos
        raise DataError(f"clips of {len(gone)} videos are gone, the first: {gone[0]}. Run 03_augmentation again.")
    if config.wavelet_bands:
        clips = data.with_counterparts(clips, read_table(paths.index, INDEX))
    controls = data.control_clips(rows, lambda: read_table(paths.index, INDEX), source, config, clips)
    return source, {"": clips, **controls}


def across_sources(paths: RunPaths, config: RunConfig, index: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return scores of each video by models that were trained on no video of the same source.

    The models are the run's model on features, and the metadata control, which sees no pixel. The result maps the names
    of the two to tables of scores (``results.scores_across_sources``).

    The result is empty for other protocols than ``kfold``. It is also empty for networks, because training them again
    takes long; the protocol ``leave_one_source_out`` does that. If the clips were deleted, or the column
    ``config.source_column`` does not have two sources of each label, it is empty and a warning is logged.
    """
    if not config.of_features or config.protocol != KFOLD:
        return {}
    try:
        source, _ = _read_clips(paths, config, 0)
        source = _features_of(paths, config, source, 0, {})
    except DataError as error:
        _logger.warning("no scores across sources: %s", error)
        return {}
    folds = read_table(paths.folds, FOLDS)
    there = folds.filter([source.has(video_id, 0) for video_id in folds["video_id"]])
    across = scores_across_sources(index, there, config, partial(classical.out_of_fold_logits, config, source))
    if not across and config.source_column != "corpus" and not config.shuffle_labels:
        _logger.warning(
            "source_column: got %r, which gives no scores across sources: each label needs videos of two sources. "
            "Sources that share a group count as one. Name another column of the manifest.",
            config.source_column,
        )
    return across


# The network, its loss and its scores


class VideoTask:
    """The training task of a network on real and fake clips: its data, network and class-weighted cross-entropy.

    Args:
        training: the clips that the network is trained on.
        validation: the clips whose loss chooses the epoch.
        config: gives the network, the epochs in which its stages (blocks of layers) are frozen, and the label
            smoothing.
        weights: loss weights of (real, fake); (1, 1) weighs all clips alike.
        build: builds the network; None: the one that ``config`` names.
    """

    def __init__(
        self,
        training: ClipDataset,
        validation: ClipDataset,
        *,
        config: RunConfig,
        weights: tuple[float, float],
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.training_data, self.validation_data = training, validation
        self._build = build or partial(build_detector, config)
        self._config, self._weights = config, weights
        self._trained: frozenset[str] = frozenset()  # names of the parameters that ``tune`` trains

    def build_model(self) -> nn.Module:
        """Return a new network; weights that are not pretrained come from torch's current random state."""
        model = self._build()
        trained = (name for name, p in model.named_parameters() if p.requires_grad)
        self._trained = frozenset(trained)
        return model

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Freeze or unfreeze the stages (blocks of layers) below the head for ``epoch``, as the configuration says.

        Parameters that the setting ``tune`` excludes from training stay frozen.
        """
        freeze_epochs, stage_epochs = self._config.freeze_backbone_epochs, self._config.unfreeze_stage_epochs
        if not (freeze_epochs or stage_epochs):
            return
        trained = {parameter for name, parameter in model.named_parameters() if name in self._trained}
        stages = [part for stage in trunk_stages(model) if (part := trained.intersection(stage))]
        number = num_trained_stages(epoch, len(stages), freeze_epochs=freeze_epochs, stage_epochs=stage_epochs)
        train_last(stages, number)

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return ``logits`` (B,), positive for fake; in training with ``tune effort`` also ``penalty`` (B,).

        Effort trains only the smallest singular values of attention weights. Its penalty keeps the trained parts
        orthogonal to the pretrained weights (``effort.penalty``). It does not depend on the clips, so all B entries
        are equal.

        Raises:
            UsageError: the network does not return one logit per clip.
        """
        if "features" in batch.tensors:
            logits = model.logits_of(batch.tensors["features"])  # type: ignore[operator]
        else:
            logits = model(batch.tensors["frames"])
        if logits.shape != (len(batch),):
            raise UsageError(
                f"model {self._config.model!r}: got an output of shape {tuple(logits.shape)} for {len(batch)} clips, "
                f"wanted logits ({len(batch)},), one per clip, positive for fake. Squeeze the last dimension, or give "
                "the class an attribute num_features to have a head added to its features."
            )
        penalty = effort.penalty(model) if model.training else None
        return {"logits": logits} if penalty is None else {"logits": logits, "penalty": penalty.expand(len(batch))}

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the class-weighted sum of cross-entropy and penalty over the batch, and the sum of the weights."""
        labels = batch.tensors.get("target", batch.tensors["label"])
        real, fake = self._weights
        as_real = real * (1 - labels)
        as_fake = fake * labels
        weights = as_real + as_fake
        share = self._config.label_smoothing / 2  # of a sample's weight that its other class gets
        targets = ((1 - share) * as_fake + share * as_real) / weights
        loss = F.binary_cross_entropy_with_logits(outputs["logits"].float(), targets, weights, reduction="sum")
        # With the weights of the clips the penalty counts once in the mean, however the batch is split.
        penalty = (outputs["penalty"] * weights).sum() if "penalty" in outputs else 0.0
        return LossSum(loss + penalty, weights.sum())

    def new_accumulator(self) -> "BinaryScores":
        """Return an empty ``BinaryScores``, which collects logits and labels of videos and computes metrics of them."""
        return BinaryScores(self._config.clips_per_video)


class BinaryScores(SampleColumns):
    """Logits and labels of N videos, collected batch by batch, and metrics of them.

    A video has ``clips`` consecutive samples, one per clip. Its logit is the mean over these samples. ``update`` reads
    ``outputs["logits"]`` (B,) and ``batch.tensors["label"]`` (B,) of 0 and 1.
    """

    def __init__(self, clips: int = 1) -> None:
        super().__init__()
        self._clips = clips
        self.add([], {"logits": torch.zeros(0, dtype=torch.float64), "labels": torch.zeros(0, dtype=torch.int64)})

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch of outputs and labels.

        Raises:
            ValueError: the outputs still require grad.
        """
        labels = batch.tensors["label"].to(torch.int64)
        self.add(batch.sample_ids, {"logits": outputs["logits"].double(), "labels": labels})

    @property
    def logits(self) -> FloatArray:
        """Logits, float64 (N,), averaged over each video's clips; positive means fake."""
        return self._of_videos().numpy()

    @property
    def scores(self) -> FloatArray:
        """Uncalibrated probabilities of fake, float64 (N,)."""
        return torch.sigmoid(self._of_videos()).numpy()  # one call for all: calls on parts may round differently

    @property
    def labels(self) -> IntArray:
        """Labels, int64 (N,): 0 is real, 1 is fake."""
        return self.column("labels")[:: self._clips].numpy()

    def _of_videos(self) -> torch.Tensor:
        return self.column("logits").reshape(-1, self._clips).mean(1)

    def compute(self) -> dict[str, float]:
        """Return the ROC AUC and the balanced accuracy at a score of 0.5.

        Both are NaN if only one class is present or a score is not finite.
        """
        scores = self.scores
        if not np.isfinite(scores).all():
            return {"roc_auc": math.nan, "balanced_accuracy": math.nan}
        accuracy = balanced_accuracy(self.labels, (scores >= 0.5).astype(np.float64))
        return {"roc_auc": float(roc_auc(self.labels, scores)), "balanced_accuracy": float(accuracy)}


def engine_settings(config: RunConfig, fold: int | None) -> EngineSettings:
    """Return the engine's settings for training on an outer fold, or on all groups (``fold`` is None)."""
    seed = stable_seed("fold", config.seed, "final" if fold is None else fold)
    micro_batch = DETECTORS.get(config.model).micro_batch
    return settings_of(config, seed, micro_batch)


# Networks


def _training(
    paths: RunPaths, config: RunConfig, source: Any, parts: Parts, build: Callable[[], nn.Module] | None = None
) -> Training[TrainingSummary]:
    """Return the training that fits the model and its controls, and scores the fold's test videos at the end.

    ``build`` builds the network; None: the one that ``config.model`` names.
    """
    clips = parts[""]
    number = config.clips_per_video
    fold = clips.fold
    inner_parts = {name: _inner_parts(name, of, config) for name, of in parts.items()}
    all_parts = dict[str, FoldClips]()
    for name, of in parts.items():
        all_parts |= {name: of, **inner_parts[name]}

    def finish(trained: Sequence[TrainedNetwork]) -> Finished[TrainingSummary]:
        all_networks = dict(zip(all_parts, trained, strict=True))
        networks = {name: all_networks[name] for name in parts}
        outputs = dict[str, FloatArray]()
        for name, network in networks.items():
            inner_networks = [(all_networks[inner], part) for inner, part in inner_parts[name].items()]
            judges = inner_networks or [(network, parts[name])]
            outputs[name] = _logits_that_choose(judges, source, parts[name], number)
        summaries = {name: _summary(network, outputs[name], parts[name], config) for name, network in networks.items()}
        judges_of = {name: (partial(_logits, each, source, number), each.log) for name, each in networks.items()}
        return _finished(paths, parts, summaries, outputs[""], judges_of)

    model_name = config.model if build is None else getattr(build, "__name__", "a network of a notebook cell")
    to_train = [Network(_task(source, of, config, build), of.fingerprint, name) for name, of in all_parts.items()]
    return Training(
        stage=_stage_of(fold),
        fold=fold,
        model_name=model_name,
        settings=engine_settings(config, fold),
        parameters={"fold": fold, **config.training_values()},
        networks=to_train,
        sizes=_sizes(clips),
        finish=finish,
        outputs=[_output_of(paths, fold)],
    )


def _stage_of(fold: int | None) -> str:
    return FINAL_TRAINING if fold is None else FOLD_TRAINING


def _output_of(paths: RunPaths, fold: int | None) -> Path:
    """Return the path of the table that the training of ``fold`` writes last; None is the training on all groups."""
    return paths.final_validation if fold is None else paths.predictions(fold)


def _inner_parts(name: str, clips: FoldClips, config: RunConfig) -> Parts:
    """Return the parts for cross-fitting, by the names of the networks that are trained on them.

    In cross-fitting, each half of the training groups is scored by a network that is trained on the other half. The
    result is empty if the run has an inner validation part, because then nothing is cross-fitted. ``name`` is the name
    of the control, or empty for the model.
    """
    parts = data.inner_parts(clips, config.seed) if config.cross_fits else ()
    return {f"{name}/inner_{number}".lstrip("/"): part for number, part in enumerate(parts)}


def _finished(
    paths: RunPaths,
    parts: Parts,
    summaries: Mapping[str, TrainingSummary],
    outputs: FloatArray,
    judges: Mapping[str, tuple[Callable[[Sequence[ClipRow]], FloatArray], Callable[..., None]]],
    kind: TrainedClass | None = None,
) -> Finished[TrainingSummary]:
    """Score the test videos of an outer fold, and return the finished training.

    Call it only when every choice (epoch, temperature, threshold) is on disk. A training on all groups has no test
    videos, so only its validation logits are kept.

    Args:
        paths: the run.
        parts: the clips of the model and its controls, by name. In a training on all groups they have no test part.
        summaries: the summaries of the trainings, by name.
        outputs: the model's logits of the N videos on which temperature and threshold were chosen, float64 (N,).
        judges: by name, a function that returns the logits of clips, and one that logs the metrics of the test videos.
        kind: the class of a model that is fitted without training steps; None for a network.
    """
    fold = parts[""].fold
    inner = validation_table(fold, parts[""], outputs, summaries[""].recorded)
    if fold is None:
        return Finished(summaries, partial(write_table, inner, FINAL_VALIDATION, paths.final_validation), kind)
    scored = {name: score_outer_fold(summary, parts[name], *judges[name]) for name, summary in summaries.items()}
    predictions = predictions_table(fold, scored)

    def write() -> None:
        write_table(inner, VALIDATION_PREDICTIONS, paths.validation_predictions(fold))
        write_table(predictions, PREDICTIONS, paths.predictions(fold))

    return Finished(summaries, write, kind)


def _sizes(clips: FoldClips) -> dict[str, Any]:
    """Return the sizes of the parts and the ids of missing videos, as keyword arguments of ``TrainingOutcome``."""
    return {
        "num_train": len({row.video_id for row in clips.train}),
        "num_train_samples": len(clips.train),
        "num_validation": len(clips.validation),
        "num_test": len(clips.test),
        "missing": clips.missing,
    }


def _with_features(paths: RunPaths, config: RunConfig, source: Any, place: float, options: TrainingOptions) -> Any:
    """Return ``source`` with the features that a frozen trunk computes from its clips (``with_features``).

    If the trunk is not frozen, ``source`` itself is returned.

    Args:
        paths: the run.
        config: the run's configuration.
        source: the clips.
        place: the fold number plus rank / ranks. It decides at which clip the computation begins, so that folds and
            ranks that work at the same time compute different clips.
        options: gives ``stop`` and ``progress``.
    """
    made = data.made_clips(read_table(paths.augmented_metadata, AUGMENTED))
    device = resolve_device(config.device, "off").device
    stop = options.get("stop") or (lambda: False)
    report = options.get("progress") or not_reported
    counted = partial(report, what="features of clips")
    return with_features(source, made, config, device, begin=place / config.num_trainings, stop=stop, progress=counted)


def _task(source: ClipSource, clips: FoldClips, config: RunConfig, build: Callable[[], nn.Module] | None) -> VideoTask:
    weights = _loss_weights(clips, config)
    mixing = MixSettings(MIX_SHARE, config.mixup_alpha, config.cutmix_alpha)
    used = mixing if mixing.mixes else None
    seed = stable_seed("clips", config.seed, "final" if clips.fold is None else clips.fold)
    number, bands = config.clips_per_video, config.wavelet_bands
    training = ClipDataset(source, clips.train, clips=number, draws=True, mixing=used, bands=bands, seed=seed)
    # Validation data choose an epoch. With cross-fitting none is chosen.
    choosing = () if config.cross_fits else clips.validation
    validation = ClipDataset(source, choosing, clips=number)
    return VideoTask(training, validation, config=config, weights=weights, build=build)


def _summary(trained: TrainedNetwork, outputs: FloatArray, clips: FoldClips, config: RunConfig) -> TrainingSummary:
    """Choose temperature and threshold of a network, and return the summary of its training.

    ``outputs`` are the network's logits of the N videos ``clips.validation``, float64 (N,).
    """
    state = trained.state
    epoch = 0 if config.cross_fits else state.best_epoch

    def recorded() -> dict[str, Any]:
        if epoch:
            loss = state.history[epoch - 1].validation["loss"]
        else:
            labels = data.labels_of(clips.validation)
            weight_of_label = np.array(_loss_weights(clips, config))
            loss = held_out_loss(labels, outputs, weight_of_label[labels])
        weights = weights_digest(state.best_model)
        of_training = {"validation_loss": loss, "num_epochs": len(state.history), "best_epoch": epoch}
        return asdict(choose(clips, config, outputs, trained.checkpoints, weights, **of_training))

    document = trained.ranks.from_leader("selection", recorded)
    chosen = Selection(**document.pop("selection"))
    logged = ("best_epoch", "temperature", "threshold", "log_loss")
    trained.log("selection", {name: getattr(chosen, name) for name in logged})
    return TrainingSummary(
        **{**trained.record(), "best_epoch": chosen.best_epoch},
        temperature=chosen.temperature,
        threshold=chosen.threshold,
        recorded=RecordedSelection(chosen, **document),
    )


def _loss_weights(clips: FoldClips, config: RunConfig) -> tuple[float, float]:
    """Return the weights of (real, fake) in the loss; both are 1 if the configuration does not balance the loss."""
    return data.class_weights(clips.train) if config.class_balance == "loss" else (1.0, 1.0)


def _logits_that_choose(
    judges: Sequence[tuple[TrainedNetwork, FoldClips]], source: ClipSource, clips: FoldClips, num_clips: int
) -> FloatArray:
    """Return the logits of the N videos ``clips.validation``, float64 (N,), which choose temperature and threshold.

    Args:
        judges: pairs of a network and clips; the network scores the ``validation`` part of these clips. Together these
            parts have all N videos.
        source: the clips.
        clips: the fold.
        num_clips: number of clips of a video, whose logits are averaged.
    """
    logits = dict[ClipRow, float]()
    for judge, part in judges:
        found = _logits(judge, source, num_clips, part.validation)
        logits |= zip(part.validation, found.tolist(), strict=True)
    return np.array([logits[row] for row in clips.validation])


def _logits(trained: TrainedNetwork, source: ClipSource, num_clips: int, rows: Sequence[ClipRow]) -> FloatArray:
    """Return the logit of each of N ``rows``, float64 (N,): the mean over its ``num_clips`` clips."""
    scores = BinaryScores(num_clips)
    trained.predict(ClipDataset(source, rows, clips=num_clips), scores)
    return scores.logits


# Models on features


def _read_clips(paths: RunPaths, config: RunConfig, fold: int | None) -> tuple[Any, Parts]:
    """Check the settings of a model on features, and return the source and the parts of a fold (``read_fold``).

    Raises:
        UsageError: settings that a model on features does not use, or a trunk without pretrained weights.
    """
    refuse_settings(config)
    if config.of_features != "forensic":
        refuse_random_trunk(config)
    return read_fold(paths, config, fold)


def _features_of(
    paths: RunPaths, config: RunConfig, source: Any, fold: int | None, options: TrainingOptions
) -> classical.Source:
    """Return the features of the videos in ``source``. Features of a trunk are computed here if they are missing.

    Raises:
        StoppedError: the function ``stop`` in ``options`` returned True; computed features stay in the cache.
    """
    if config.of_features == "forensic":
        return source  # type: ignore[no-any-return]
    clips = source.clips if config.of_features == "both" else source
    featured = classical.EmbeddedClips(_with_features(paths, config, clips, fold or 0, options), config)
    return replace(source, clips=featured) if config.of_features == "both" else featured


def _training_on_features(
    paths: RunPaths, config: RunConfig, fold: int | None, options: TrainingOptions
) -> Training[TrainingSummary]:
    """Return the training of a model on features.

    Such a training has no steps. Its function ``finish`` fits the model and its controls, and scores the test videos.
    """
    clip_source, parts = _read_clips(paths, config, fold)
    clips, stage = parts[""], _stage_of(fold)
    log = options["metric_log"]
    memory = options.get("memory") or NoObserver()
    stop = options.get("stop") or (lambda: False)
    report = options.get("progress") or not_reported

    def finish(_: Sequence[TrainedNetwork]) -> Finished[TrainingSummary]:
        paths.stage_checkpoint(stage, fold).unlink(missing_ok=True)  # it lists files that are written from here on
        source, folder = (
            _features_of(paths, config, clip_source, fold, options),
            paths.training_checkpoints(stage, fold),
        )
        logs = {name: ControlLog(log, name) if name else log for name in parts}
        found = dict[str, classical.Found]()
        summaries = dict[str, TrainingSummary]()
        memory.at("train", epoch=1)
        for number, (name, of) in enumerate(parts.items()):
            report(number, len(parts), what="classifiers fitted")
            found[name], summaries[name] = classical.fit(config, source, of, folder / name, logs[name], stop)
        report(len(parts), len(parts), what="classifiers fitted")
        memory.at("test")
        judges = {
            name: (
                partial(classical.logits_of_rows, config, source, of.arrays),
                partial(logs[name].log, step=0, epoch=1),
            )
            for name, of in found.items()
        }
        kind = classical.trained_class(config, source, found[""].arrays)
        return _finished(paths, parts, summaries, found[""].held_out, judges, kind)

    return Training(
        stage=stage,
        fold=fold,
        model_name=config.model,
        settings=engine_settings(config, fold),
        parameters={"fold": fold, **config.training_values()},
        data_fingerprint=clips.fingerprint,
        sizes=_sizes(clips),
        finish=finish,
        outputs=[_output_of(paths, fold)],
    )
