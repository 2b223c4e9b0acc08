"""Task image from tables to predictions: train on one split, look at the test part once, write what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import polars as pl
import torch

from fvc_lib.corpus.images import image_root
from fvc_lib.detectors.frames.backbone import backbone_network, fitting_weights, named_backbone
from fvc_lib.engine.distributed.ranks import Ranks
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    IMAGE_PREDICTIONS,
    IMAGE_TARGETS,
    IMAGES,
    TARGET_PREDICTIONS,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import IMAGE_RECOGNITION as STAGE
from fvc_lib.tasks import recipe
from fvc_lib.tasks.image import data
from fvc_lib.tasks.image.data import ImageAugmentation, ImageDataset, ImageParts, ImageRecords, MixSettings
from fvc_lib.tasks.image.task import ImageScores, ImageTask, ImageTaskSettings
from fvc_lib.tasks.recipe import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome

DEFAULT_MICRO_BATCH = 8


def train_images(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train, choosing the epoch on the validation part, and predict the test part once with that epoch's weights.

    Reads ``tables/images.parquet`` and ``tables/image_targets.parquet``; writes the checkpoints, beside them
    ``labels.json`` (names of classes and targets, and the targets' scaling), ``tables/image_predictions.parquet`` and
    ``tables/target_predictions.parquet``. Goes on from what an earlier attempt saved.

    Args:
        paths: the run.
        config: its resolved parameters.
        fold: None: this task has one split.
        options: ``metric_log``, ``attempt``, ``memory``, ``stop``, ``progress``, ``ranks``: see ``TrainingOptions``.

    Raises:
        DataError: pictures that are gone, an empty part, or a test part of which the network says nothing finite.
        UsageError: the backbone or its weights, or balanced sampling where pictures have no class.
        FvcError: as ``recipe.train``.
    """

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        root, parts = read_image_parts(paths, config)
        data.require_files(root, parts)
        outputs = [paths.image_predictions, paths.target_predictions, labels_file(paths)]
        finish = partial(_finish, paths, root, parts, config)
        return replace(image_split_training(root, parts, config), finish=finish, outputs=outputs)

    return recipe.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    paths: RunPaths, root: Path, parts: ImageParts, config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    (model,) = trained
    scores = ImageScores(parts.labels)
    model.predict(ImageDataset(root, parts.test, parts.labels, config.image_size), scores)
    refuse_nonfinite(scores)
    model.log("test", scores.compute())

    def write() -> None:
        data.write_labels(labels_file(paths), parts.labels)
        write_table(class_predictions(parts.test, scores), IMAGE_PREDICTIONS, paths.image_predictions)
        write_table(target_predictions(parts.test, scores), TARGET_PREDICTIONS, paths.target_predictions)

    return Finished([TrainingRecord(**model.record())], write)


def training_parameters(config: RunConfig, fold: int | None = None) -> dict[str, Any]:
    """What a checkpoint is bound to beside the data, as JSON values; a fork goes on from one by it.

    Args:
        config: the run's resolved parameters.
        fold: None: this task has one split.

    Raises:
        UsageError: the file of the backbone's weights cannot be read.
    """
    parameters = config.training_values()
    # Not where the file lies but what is in it.
    parameters["backbone_weights"] = _content(Path(config.backbone_weights)) if config.backbone_weights else ""
    return parameters


def require_backbone(config: RunConfig) -> None:
    """Refuse a backbone, or weights, that the training could not begin with: before an index of hours, not after it.

    Raises:
        UsageError: as ``build_backbone``; or ``gradient_checkpointing`` with a backbone that has nothing for it.
    """
    with forked_random_state(config.seed, torch.device("cpu")):
        try:
            with torch.device("meta"):  # names and shapes are enough, and take no memory
                backbone = named_backbone(config.backbone)
        except (RuntimeError, NotImplementedError):  # its set-up computes with values
            backbone = named_backbone(config.backbone)
    if config.backbone_weights:
        fitting_weights(backbone_network(backbone), Path(config.backbone_weights))
    if config.gradient_checkpointing:
        backbone.recomputable_blocks()


def read_image_parts(paths: RunPaths, config: RunConfig) -> tuple[Path, ImageParts]:
    """The corpus' folder and its split, from the run's tables."""
    images, targets = read_table(paths.images, IMAGES), read_table(paths.image_targets, IMAGE_TARGETS)
    return image_root(config), data.image_parts(images, targets)


def image_split_training(root: Path, parts: ImageParts, config: RunConfig) -> Training[TrainingRecord]:
    """What ``config`` asks to be learned from ``parts``; nothing is scored or written.

    Raises:
        UsageError: balanced sampling where pictures have no class, or a file of weights that cannot be read.
    """
    weights = Path(config.backbone_weights) if config.backbone_weights else None
    task = image_task(root, parts, config, weights)
    balance = config.class_balance == "sampler"
    if balance and task.training_data.classes is None:
        raise UsageError(
            "class_balance sampler: some training pictures have no class, and would never be drawn. "
            "Take -p class_balance loss or none."
        )
    seed = stable_seed(STAGE, config.seed)
    return Training(
        stage=STAGE,
        model_name=config.backbone,
        settings=recipe.settings_of(config, seed, DEFAULT_MICRO_BATCH, balance_classes=balance),
        parameters=training_parameters(config),
        networks=[Network(task, parts.fingerprint)],
        sizes=recipe.sizes_of(len(parts.train), len(parts.validation), len(parts.test)),
        finish=recipe.record_alone,
        record=TrainingRecord,
    )


def image_task(root: Path, parts: ImageParts, config: RunConfig, weights: Path | None = None) -> ImageTask:
    """The task of ``config`` on the training and validation parts."""
    balanced = config.class_balance == "loss" and parts.labels.classes
    class_weights = data.balancing_weights(parts.train, len(parts.labels.classes)) if balanced else None
    mixing = MixSettings(config.mix_share, config.mixup_alpha, config.cutmix_alpha)
    augmentation = ImageAugmentation(stable_seed("images", config.seed), mixing)
    size = config.image_size
    training = ImageDataset(
        root, parts.train, parts.labels, size, class_weights=class_weights, augmentation=augmentation
    )
    validation = ImageDataset(root, parts.validation, parts.labels, size, class_weights=class_weights)
    settings = ImageTaskSettings(
        backbone=config.backbone,
        backbone_weights=weights,
        freeze_epochs=config.freeze_backbone_epochs,
        stage_epochs=config.unfreeze_stage_epochs,
        label_smoothing=config.label_smoothing,
        focal_gamma=config.focal_gamma,
        regression_weight=config.regression_weight,
    )
    return ImageTask(training, validation, settings)


def labels_file(paths: RunPaths) -> Path:
    """Where the names of classes and targets are kept, beside the checkpoints they belong to."""
    return paths.stage_training(STAGE) / "labels.json"


def refuse_nonfinite(scores: ImageScores) -> None:
    """Raise ``DataError`` where the network said something of a test picture that is no number."""
    ids, classes = scores.sample_ids, scores.classes()
    lost = {ids[row] for row in classes.rows[classes.ranks < 1]}
    for name in scores.labels.targets:
        target = scores.target(name)
        lost |= {ids[row] for row in target.rows[~np.isfinite(target.predicted)]}
    if lost:
        raise DataError(
            f"the network says nothing finite of {len(lost)} test pictures, the first: "
            f"{', '.join(sorted(lost)[:5])}. Turn amp off, or train with a lower learning_rate."
        )


def class_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """IMAGE_PREDICTIONS of those of ``records`` that have a class, in their order."""
    found, classes = scores.classes(), scores.labels.classes
    columns = {
        **_identity(records, found.rows.tolist()),
        "class_label": [classes[number] for number in found.class_indices],
        "predicted_label": [classes[number] for number in found.predicted],
        "probability": found.probabilities,
        "rank_of_class": found.ranks,
    }
    return frame_of(columns, IMAGE_PREDICTIONS)


def target_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """TARGET_PREDICTIONS of ``records`` where a number is known, target by target."""
    tables = [frame_of(None, TARGET_PREDICTIONS)]
    for name, unit in zip(scores.labels.targets, scores.labels.units, strict=True):
        found = scores.target(name)
        columns = {
            **_identity(records, found.rows.tolist()),
            "target": [name] * found.rows.size,
            "unit": [unit] * found.rows.size,
            "value": records.values[found.rows, scores.labels.targets.index(name)],
            "predicted": found.predicted,
        }
        tables.append(frame_of(columns, TARGET_PREDICTIONS))
    return pl.concat(tables)


def _identity(records: ImageRecords, rows: list[int]) -> dict[str, list[str]]:
    columns = {"image_id": records.image_ids, "group_id": records.group_ids, "path": records.paths}
    return {name: [column[row] for row in rows] for name, column in columns.items()}


def _content(path: Path) -> str:
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise UsageError(f"backbone_weights {str(path)!r}: {error.strerror}. Give a readable file.") from error
