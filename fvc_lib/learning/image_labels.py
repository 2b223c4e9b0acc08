"""What a model of task image answers: which classes, which numbers, and how these are scaled for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fvc_lib.metrics.weighting import FloatArray
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.errors import DataError


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
