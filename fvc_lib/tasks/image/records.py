"""From the tables of task image to what is known of each picture, part by part."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import TypeAdapter, ValidationError

from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.services.atomic_files import path_from_text, write_json
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import PARTS

# ----------------------------------------------------------------------------------------------------
# What a model of task image answers: which classes, which numbers, and how these are scaled for it.


@dataclass(frozen=True)
class ImageLabels:
    """Kept with the model: without it the outputs are numbers without names.

    Attributes:
        classes: C names, in the order of the class logits.
        targets: T names, in the order of the values.
        units: of each target, as kcal or g; may be empty.
        means: of each target over the training pictures that have it.
        deviations: likewise, the standard deviation; 1 where all are equal.
    """

    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()

    def scaled(self, values: FloatArray) -> FloatArray:
        """Values (..., T) in their units, as the network sees them: mean 0, deviation 1."""
        result: FloatArray = (values - np.array(self.means)) / np.array(self.deviations)
        return result

    def in_units(self, scaled: FloatArray) -> FloatArray:
        """What the network says, (..., T), in the targets' units."""
        result: FloatArray = scaled * np.array(self.deviations) + np.array(self.means)
        return result


def labels_of_training(
    classes: tuple[str, ...], targets: tuple[str, ...], units: tuple[str, ...], values: FloatArray
) -> ImageLabels:
    """The scaling by ``values`` float64 (N, T) of the training part, NaN where not known.

    Raises:
        DataError: a target that no training picture has.
    """
    counts = np.isfinite(values).sum(axis=0)
    unknown = [name for name, count in zip(targets, counts, strict=True) if not count]
    if unknown:
        raise DataError(
            f"targets {', '.join(unknown)}: no picture of the training part has this number, so it cannot be learned. "
            "Choose others with -p targets, or give the training pictures this number."
        )
    if not targets:
        return ImageLabels(classes)
    means, deviations = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    deviations = np.where(deviations > 1e-12 * np.maximum(1.0, np.abs(means)), deviations, 1.0)
    return ImageLabels(classes, targets, units, tuple(means.tolist()), tuple(deviations.tolist()))


def write_labels(path: Path, labels: ImageLabels) -> None:
    """Replace ``path`` atomically."""
    write_json(path, asdict(labels))


def read_labels(path: Path) -> ImageLabels:
    """What ``write_labels`` wrote.

    Raises:
        DataError: missing or damaged.
    """
    try:
        return TypeAdapter(ImageLabels).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{str(path)!r}: no names of classes and targets: {reason}. Train again.") from error


UNKNOWN_CLASS = -1
_NAMED_AT_MOST = 10


@dataclass(frozen=True)
class ImageRecords:
    """N pictures in the order of their ids.

    Attributes:
        image_ids: one per picture.
        group_ids: likewise.
        paths: relative to the corpus' root, as tables have them (``services.path_text``).
        class_indices: int64 (N,), places in ``ImageLabels.classes``; -1 where none is known.
        values: float64 (N, T) in the targets' units; NaN where not known.
    """

    image_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    paths: tuple[str, ...]
    class_indices: IntArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.image_ids)


@dataclass(frozen=True)
class ImageParts:
    """A split corpus; ``fingerprint`` is of all of it but the paths: contents, labels, numbers and parts."""

    labels: ImageLabels
    train: ImageRecords
    validation: ImageRecords
    test: ImageRecords
    fingerprint: str


def image_parts(images: pl.DataFrame, targets: pl.DataFrame) -> ImageParts:
    """The parts of ``images`` (IMAGES) with what ``targets`` (IMAGE_TARGETS) says of them.

    Pictures of which nothing is known take no part. Classes and targets are in the order of their names.

    Raises:
        DataError: a part is empty; a class or target is unknown to the training part; one target with two units.
    """
    classes = tuple(sorted(images["class_label"].drop_nulls().unique().to_list()))
    units = _units(targets)
    values = _wide(images, targets, tuple(units))
    known = values.filter(pl.any_horizontal(pl.col("class_label").is_not_null(), *map(_is_known, units)))
    parts = {part: _records(known.filter(pl.col("part") == part), classes, tuple(units)) for part in PARTS}
    empty = [part for part, records in parts.items() if not len(records)]
    if empty:
        raise DataError(
            f"images: no picture with a class or a number in the {' and the '.join(empty)} part. Give the corpus more "
            "groups, or look at split_validation_share and split_test_share."
        )
    _refuse_untrained_classes(parts["train"], classes)
    labels = labels_of_training(classes, tuple(units), tuple(units.values()), parts["train"].values)
    fingerprint = _fingerprint(labels, parts)
    return ImageParts(labels, parts["train"], parts["validation"], parts["test"], fingerprint)


def require_files(root: Path, parts: ImageParts) -> None:
    """Check before training that every picture is still there.

    Raises:
        DataError: some are not; up to ten are named.
    """
    everything = (path for part in (parts.train, parts.validation, parts.test) for path in part.paths)
    missing = [path for path in everything if not (root / path_from_text(path)).is_file()]
    if missing:
        more = f" and {len(missing) - _NAMED_AT_MOST} more" if len(missing) > _NAMED_AT_MOST else ""
        raise DataError(
            f"{len(missing)} pictures are gone from {str(root)!r} since they were indexed: "
            f"{', '.join(map(repr, missing[:_NAMED_AT_MOST]))}{more}. Put them back, or index the corpus anew in a new "
            "run."
        )


def _units(targets: pl.DataFrame) -> dict[str, str]:
    """The unit of each target, in the order of their names."""
    pairs = targets.select("target", "unit").unique().sort("target", "unit")
    twice = pairs.filter(pl.col("target").is_duplicated())["target"].unique().sort().to_list()
    if twice:
        raise DataError(f"targets {', '.join(twice)}: got several units each. Give every row of a target the same.")
    return {str(target): str(unit) for target, unit in pairs.iter_rows()}


def _wide(images: pl.DataFrame, targets: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """``images`` in the order of the ids with a column ``value:NAME`` per target, null where not known."""
    wide = images.sort("image_id")
    for name in names:
        column = targets.filter(pl.col("target") == name).select("image_id", pl.col("value").alias(f"value:{name}"))
        wide = wide.join(column, on="image_id", how="left", maintain_order="left")
    return wide


def _is_known(target: str) -> pl.Expr:
    return pl.col(f"value:{target}").is_not_null()


def _records(part: pl.DataFrame, classes: Sequence[str], targets: Sequence[str]) -> ImageRecords:
    number_of = {label: number for number, label in enumerate(classes)}
    columns = [part[f"value:{name}"].to_numpy() for name in targets]
    indices = [UNKNOWN_CLASS if label is None else number_of[label] for label in part["class_label"]]
    return ImageRecords(
        image_ids=tuple(part["image_id"]),
        group_ids=tuple(part["group_id"]),
        paths=tuple(part["path"]),
        class_indices=np.array(indices, dtype=np.int64),
        values=np.stack(columns, axis=1).astype(np.float64) if columns else np.empty((part.height, 0)),
    )


def _refuse_untrained_classes(train: ImageRecords, classes: Sequence[str]) -> None:
    learned = set(train.class_indices.tolist())
    unlearned = [label for number, label in enumerate(classes) if number not in learned]
    if unlearned:
        named = ", ".join(map(repr, unlearned[:_NAMED_AT_MOST]))
        raise DataError(
            f"{len(unlearned)} classes have no picture in the training part, so they cannot be learned: {named}. Leave "
            "them out of the corpus, or give them more groups."
        )


def _fingerprint(labels: ImageLabels, parts: Mapping[str, ImageRecords]) -> str:
    digest = hashlib.sha256(repr((labels.classes, labels.targets, labels.units)).encode("utf-8", "surrogateescape"))
    for part, records in parts.items():
        digest.update(f"{part}\x1f{len(records)}\n".encode())
        digest.update("\n".join(records.image_ids).encode("utf-8", "surrogateescape"))
        digest.update(records.class_indices.tobytes())
        digest.update(records.values.tobytes())
    return digest.hexdigest()
