"""The training of task image: read the split, train one network, predict the test part, write tables and labels."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import polars as pl
import torch

from fvc_lib.corpus.images import image_root
from fvc_lib.detectors.frames.backbone import build_backbone
from fvc_lib.detectors.network import recomputable_blocks_of
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import content_digest, write_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import IMAGE_RECOGNITION as STAGE
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.image.task import (
    LABELS,
    ImageDataset,
    ImageRecords,
    ImageScores,
    ImageTask,
    balancing_weights,
    calibrated,
    image_parts,
)
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings
from fvc_lib.tasks.shared_training import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome

DEFAULT_MICRO_BATCH = 8


def train_images(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train, choose the epoch on the validation part, and predict the test part once with that epoch's weights.

    Reads ``tables/images.parquet`` and ``tables/image_targets.parquet``. Writes the checkpoints, next to them
    ``labels.json`` (classes, targets, their scaling and the calibration), and
    ``tables/image_predictions.parquet`` and ``tables/target_predictions.parquet``. Resumes an earlier attempt.

    Raises:
        VideoError: a picture is missing or damaged.
        DataError: the training part lacks a class or a target, or an output for a test picture is not finite.
        UsageError: backbone or weights do not load.
        FvcError: as ``shared_training.train``, which explains ``options``.
    """
    read = partial(image_training, paths, config)
    return shared_training.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def image_training(paths: RunPaths, config: RunConfig, _ranks: Ranks | None = None) -> Training[TrainingRecord]:
    """Return the training of the pictures in the run's tables that ``config`` describes, before it begins.

    Every rank reads all tables, so ``_ranks`` has no effect.

    Raises:
        DataError: as ``image_parts``.
    """
    images = tables.read_table(paths.images, tables.IMAGES)
    parts = image_parts(images, tables.read_table(paths.image_targets, tables.IMAGE_TARGETS))
    balances = config.class_balance == "loss"
    weights = balancing_weights(parts.train, len(parts.labels.classes)) if balances else 1.0
    mixing = MixSettings(MIX_SHARE, config.mixup_alpha, config.cutmix_alpha)
    validation = ImageDataset(image_root(config), parts.validation, parts.labels, config.image_size, weights)
    training = replace(validation, records=parts.train, mixing=mixing, seed=stable_seed("images", config.seed))
    initial = content_digest(config.backbone_weights) if config.backbone_weights else ""
    return Training(
        stage=STAGE,
        model_name=config.backbone,
        settings=shared_training.settings_of(config, stable_seed(STAGE, config.seed), DEFAULT_MICRO_BATCH),
        parameters=config.training_values() | {"backbone_weights": initial},
        networks=[Network(ImageTask(training, validation, config), parts.fingerprint)],
        sizes={f"num_{part}": getattr(parts, part).table.height for part in tables.PARTS},
        finish=partial(_finish, paths, validation, replace(validation, records=parts.test)),
        outputs=[paths.image_predictions, paths.target_predictions, paths.training_checkpoints(STAGE) / LABELS],
    )


def _finish(
    paths: RunPaths, validation: ImageDataset, test: ImageDataset, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    """Predict the test part once, and fit the temperature of the class logits on the validation part.

    Args:
        paths: paths of the run.
        validation: samples of the validation part.
        test: samples of the test part.
        trained: the trained network, as the only element.

    Returns:
        The record of the training, and a function that writes the tables of classes and numbers, and the labels.

    Raises:
        DataError: an output for a test picture is not finite.
    """
    (model,) = trained
    fitted, scores = ImageScores(test.labels), ImageScores(test.labels)
    model.predict(validation, fitted)
    model.predict(test, scores)
    classes = class_predictions(test.records, scores)
    numbers = target_predictions(test.records, scores)
    if not (scores.has_finite_logits and numbers["predicted"].is_finite().all()):
        raise DataError(
            "the network's outputs for test pictures are not finite. Turn amp off, or train with a lower learning_rate."
        )
    model.log("test", scores.compute())

    def write() -> None:
        write_json(paths.training_checkpoints(STAGE) / LABELS, asdict(calibrated(test.labels, fitted, scores)))
        tables.write_table(classes, tables.IMAGE_PREDICTIONS, paths.image_predictions)
        tables.write_table(numbers, tables.TARGET_PREDICTIONS, paths.target_predictions)

    return Finished({"": TrainingRecord(**model.record())}, write)


def require_backbone(config: RunConfig) -> None:
    """Check backbone, weights and image size before the corpus is indexed.

    Raises:
        UsageError: backbone or weights do not load, the backbone rejects the image size, or it does not support
            ``gradient_checkpointing``.
    """
    weights, size = Path(config.backbone_weights) if config.backbone_weights else None, config.image_size
    with forked_random_state(config.seed, torch.device("cpu")):
        backbone = build_backbone(config.backbone, weights, size, pretrained=weights is not None)
        with torch.no_grad():
            backbone.eval()(torch.zeros(1, 1, 3, size, size, dtype=torch.uint8))
    if config.gradient_checkpointing:
        recomputable_blocks_of(backbone)


def class_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table IMAGE_PREDICTIONS, one row per picture that has a class.

    Args:
        records: the pictures of a part.
        scores: the outputs for these pictures, in the same order.
    """
    classes, names = scores.classes(), np.array(scores.labels.classes, dtype=object)
    columns = {
        "class_label": names[classes.class_indices],
        "predicted_label": names[classes.predicted],
        "probability": classes.probabilities,
        "rank_of_class": classes.ranks,
    }
    return tables.frame_of(records.table[classes.rows].to_dict() | columns, tables.IMAGE_PREDICTIONS)


def target_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table TARGET_PREDICTIONS, one row per known value: all rows of the first target, then of the next.

    Args:
        records: the pictures of a part.
        scores: the outputs for these pictures, in the same order.
    """
    rows = list[tuple[object, ...]]()
    for place, (name, unit) in enumerate(zip(scores.labels.targets, scores.labels.units, strict=True)):
        of_target, _, predicted = scores.target(name)
        values = records.values[of_target, place].tolist()
        pictures = records.table.select("image_id", "group_id", "path")[of_target].rows()
        rows += [
            (*picture, name, unit, *both) for picture, *both in zip(pictures, values, predicted.tolist(), strict=True)
        ]
    return tables.frame_of(rows, tables.TARGET_PREDICTIONS)
