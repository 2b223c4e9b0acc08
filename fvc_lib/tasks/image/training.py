"""Train task image on one split and predict its test part once."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import polars as pl
import torch

from fvc_lib.corpus.images import image_root
from fvc_lib.detectors.frames.backbone import EncoderBackbone, backbone_network, named_backbone, refused_size
from fvc_lib.detectors.weights import fitting_weights
from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import content_digest, write_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import IMAGE_RECOGNITION as STAGE
from fvc_lib.tasks import recipe
from fvc_lib.tasks.image import data
from fvc_lib.tasks.image.data import ImageDataset, ImageParts, ImageRecords
from fvc_lib.tasks.image.task import CALIBRATION, LABELS, ImageScores, ImageTask, calibration_of
from fvc_lib.tasks.mixing import MIX_SHARE, MixSettings
from fvc_lib.tasks.recipe import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome

DEFAULT_MICRO_BATCH = 8


def train_images(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train, choose the epoch on the validation part, and predict the test part once with that epoch's weights.

    Reads ``tables/images.parquet`` and ``tables/image_targets.parquet``. Writes the checkpoints, next to them
    ``labels.json`` (classes, targets and their scaling) and ``calibration.json``, and
    ``tables/image_predictions.parquet`` and ``tables/target_predictions.parquet``. Resumes an earlier attempt.

    Raises:
        DataError: a picture is missing, a part is empty, or an output for a test picture is not finite.
        UsageError: backbone or weights do not load, or balanced sampling is on while a picture has no class.
        FvcError: as ``recipe.train``, which explains ``options``.
    """

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        root, parts = read_image_parts(paths, config)
        data.require_files(root, parts)
        outputs = [paths.image_predictions, paths.target_predictions, paths.stage_training(STAGE) / LABELS]
        finish = partial(_finish, paths, root, parts, config)
        return replace(image_split_training(root, parts, config), finish=finish, outputs=outputs)

    return recipe.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    paths: RunPaths, root: Path, parts: ImageParts, config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    (model,) = trained
    scores, validation = ImageScores(parts.labels), ImageScores(parts.labels)
    model.predict(ImageDataset(root, parts.validation, parts.labels, config.image_size), validation)
    model.predict(ImageDataset(root, parts.test, parts.labels, config.image_size), scores)
    classes = class_predictions(parts.test, scores)
    numbers = target_predictions(parts.test, scores)
    lost = {*classes.filter(rank_of_class=0)["image_id"], *numbers.filter(~pl.col("predicted").is_finite())["image_id"]}
    if lost:
        raise DataError(
            f"the network's outputs for {len(lost)} test pictures are not finite, the first: "
            f"{', '.join(sorted(lost)[:5])}. Turn amp off, or train with a lower learning_rate."
        )
    model.log("test", scores.compute())
    calibration, folder = calibration_of(validation, scores), paths.stage_training(STAGE)

    def write() -> None:
        write_json(folder / LABELS, asdict(parts.labels))
        if calibration is not None:
            write_json(folder / CALIBRATION, asdict(calibration))
        tables.write_table(classes, tables.IMAGE_PREDICTIONS, paths.image_predictions)
        tables.write_table(numbers, tables.TARGET_PREDICTIONS, paths.target_predictions)

    return Finished([TrainingRecord(**model.record())], write)


def training_parameters(config: RunConfig) -> dict[str, Any]:
    """Return the parameters that a checkpoint is bound to, as JSON values; weights are given as a digest.

    Raises:
        UsageError: the file of the backbone's weights cannot be read.
    """
    weights = config.backbone_weights
    content = content_digest(weights) if weights else ""
    if weights and not content:
        raise UsageError(f"backbone_weights {weights!r}: no such file or folder. Give one that can be read.")
    return config.training_values() | {"backbone_weights": content}


def require_backbone(config: RunConfig) -> None:
    """Check backbone, weights and image size before the corpus is indexed.

    Raises:
        UsageError: backbone or weights do not load, the backbone rejects the image size, or it does not support
            ``gradient_checkpointing``.
    """
    weights, size = Path(config.backbone_weights) if config.backbone_weights else None, config.image_size
    with forked_random_state(config.seed, torch.device("cpu")):
        backbone = named_backbone(config.backbone, weights, size, pretrained=weights is not None)
        picture = torch.zeros(1, 3, size, size, dtype=torch.uint8)
        try:
            with torch.no_grad():
                backbone.eval()(picture)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise refused_size(backbone, picture, error) from error
    if weights is not None and not isinstance(backbone, EncoderBackbone):
        fitting_weights(backbone_network(backbone), weights, "backbone_weights")
    if config.gradient_checkpointing:
        backbone.recomputable_blocks()


def read_image_parts(paths: RunPaths, config: RunConfig) -> tuple[Path, ImageParts]:
    """Return the folder of the corpus, and the split into parts that the run's tables state."""
    images = tables.read_table(paths.images, tables.IMAGES)
    targets = tables.read_table(paths.image_targets, tables.IMAGE_TARGETS)
    return image_root(config), data.image_parts(images, targets)


def image_split_training(root: Path, parts: ImageParts, config: RunConfig) -> Training[TrainingRecord]:
    """Return the training of ``parts`` that ``config`` describes, without scoring of the test part.

    Raises:
        UsageError: as ``train_images``.
    """
    balanced = config.class_balance == "loss" and parts.labels.classes
    weights = data.balancing_weights(parts.train, len(parts.labels.classes)) if balanced else None
    evenly = config.class_balance in ("sampler", "batch")
    mixing = MixSettings(MIX_SHARE, config.mixup_alpha, config.cutmix_alpha, evenly)
    validation = ImageDataset(root, parts.validation, parts.labels, config.image_size, weights)
    training = replace(validation, records=parts.train, mixing=mixing, seed=stable_seed("images", config.seed))
    task = ImageTask(training, validation, config)
    balance, in_batches = config.class_balance == "sampler", config.class_balance == "batch"
    if (balance or in_batches) and task.training_data.classes is None:
        raise UsageError(
            f"class_balance {config.class_balance}: some training pictures have no class, and would never be drawn. "
            "Take -p class_balance loss or none."
        )
    seed = stable_seed(STAGE, config.seed)
    return Training(
        stage=STAGE,
        model_name=config.backbone,
        settings=recipe.settings_of(
            config, seed, DEFAULT_MICRO_BATCH, balance_classes=balance, balance_batches=in_batches
        ),
        parameters=training_parameters(config),
        networks=[Network(task, parts.fingerprint)],
        sizes={f"num_{part}": len(getattr(parts, part)) for part in tables.PARTS},
    )


def class_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table IMAGE_PREDICTIONS with a row for each of ``records`` that has a class, in their order."""
    classes, names = scores.classes(), np.array(scores.labels.classes, dtype=object)
    columns = {
        "class_label": names[classes.class_indices].tolist(),
        "predicted_label": names[classes.predicted].tolist(),
        "probability": classes.probabilities,
        "rank_of_class": classes.ranks,
    }
    table = pl.concat([_identity(records)[classes.rows], pl.DataFrame(columns)], how="horizontal")
    return tables.frame_of(table.to_dict(), tables.IMAGE_PREDICTIONS)


def target_predictions(records: ImageRecords, scores: ImageScores) -> pl.DataFrame:
    """Return the table TARGET_PREDICTIONS with a row per known value of ``records``, target by target."""
    parts = [tables.frame_of(None, tables.TARGET_PREDICTIONS)]
    for place, (name, unit) in enumerate(zip(scores.labels.targets, scores.labels.units, strict=True)):
        rows, _, predicted = scores.target(name)
        table = _identity(records)[rows].with_columns(
            target=pl.lit(name),
            unit=pl.lit(unit),
            value=pl.Series(records.values[rows, place]),
            predicted=pl.Series(predicted),
        )
        parts.append(tables.frame_of(table.to_dict(), tables.TARGET_PREDICTIONS))
    return pl.concat(parts)


def _identity(records: ImageRecords) -> pl.DataFrame:
    return pl.DataFrame({"image_id": records.image_ids, "group_id": records.group_ids, "path": records.paths})
