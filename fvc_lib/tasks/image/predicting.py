"""Classes and numbers of any pictures by a finished training of task image: decoded, cut and scored as its test part
was.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import PIL
import polars as pl
import torch
from pydantic import TypeAdapter, ValidationError

from fvc_lib.engine.device import Precision, deterministic_algorithms
from fvc_lib.engine.task import Batch
from fvc_lib.metrics.calibration import class_probabilities
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import path_to_text, read_json_object, sha256_of_json, write_json
from fvc_lib.services.code.code_version import code_hash
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.decoding import scratch_folder
from fvc_lib.tasks.image.data import ImageDataset, ImageLabels, ImageRecords, decoded_side, middle_view
from fvc_lib.tasks.image.task import Calibration, ImageTask
from fvc_lib.tasks.image.training import calibration_file, labels_file
from fvc_lib.tasks.predicting import Finding, OneNetwork, Picture, Trained, no_picture

_DECODER = "fvc_lib.video.decode.still_image"
_CLASS = ("class", "probability", "probability_uncalibrated", "runner_up", "runner_up_probability")
_TEXTS = frozenset({"class", "runner_up"})
_LABELS, _CALIBRATION = "labels.json", "calibration.json"


class ImagePredictor(OneNetwork):
    """See ``Predictor``; ``labels`` are what the network's outputs mean, ``calibration`` how sure it may be called."""

    kind = "image"

    def __init__(self, trained: Trained, labels: ImageLabels, calibration: Calibration | None) -> None:
        super().__init__(trained)
        self.labels, self.calibration = labels, calibration
        nothing = ImageRecords((), (), (), np.empty(0, np.int64), np.empty((0, len(labels.targets))))
        dataset = ImageDataset(Path(), nothing, labels, self.config.image_size)
        self.task = ImageTask(dataset, dataset, self.config)
        self.network = self._build(self.task.build_model)
        self.notes = _notes(labels, calibration)
        self._targets = [f"{n} ({u})" if u else n for n, u in zip(labels.targets, labels.units, strict=True)]
        types = {name: pl.String() if name in _TEXTS else pl.Float64() for name in _CLASS if labels.classes}
        self.columns = types | dict.fromkeys(self._targets, pl.Float64())

    @classmethod
    def from_run(cls, trained: Trained, paths: RunPaths) -> Self:
        """See ``Predictor``."""
        return cls(trained, _labels(labels_file(paths), trained), _calibration(calibration_file(paths)))

    @classmethod
    def from_bundle(cls, trained: Trained, folder: Path) -> Self:
        """See ``Predictor``."""
        calibration = _calibration(folder / _CALIBRATION)
        if calibration is None and (folder / _CALIBRATION).is_file():
            raise DataError(f"{str(folder / _CALIBRATION)!r}: is no calibration that a run has. {trained.remedy}")
        return cls(trained, _labels(folder / _LABELS, trained), calibration)

    @staticmethod
    def files_of_run(paths: RunPaths) -> pl.DataFrame:
        """See ``Predictor``."""
        return tables.read_table(paths.images, tables.IMAGES).select("content_sha256", "part")

    def write(self, folder: Path) -> dict[str, Any]:
        """See ``Predictor``."""
        write_json(folder / _LABELS, asdict(self.labels))
        if self.calibration is not None:
            write_json(folder / _CALIBRATION, asdict(self.calibration))
        return super().write(folder)

    @property
    def decode_hash(self) -> str:
        """Of Pillow and what calls it."""
        return sha256_of_json([PIL.__version__, code_hash(_DECODER)])

    def identity_of_parts(self) -> Any:
        """See ``Predictor``."""
        return [asdict(self.labels), self.calibration and asdict(self.calibration)]

    def findings(self, files: Sequence[Path], *, workers: int = 0, picture: Picture = no_picture) -> Generator[Finding]:
        """See ``Predictor``."""
        size = self.config.image_size
        with scratch_folder(self.config) as folder:
            targets = [folder / f"{number}.npy" for number in range(len(files))]
            items = [
                {"source": str(file), "target": str(target), "shortest_side": decoded_side(size, training=False)}
                for file, target in zip(files, targets, strict=True)
            ]
            with closing(run_isolated(f"{_DECODER}:write_picture", items, workers=workers)) as answers:
                for answer in answers:
                    file, said = files[answer.position], dict[str, str](answer.value or {})
                    path = path_to_text(file)
                    if answer.failure:
                        yield Finding(path, failure=f"the decoder gave up: {answer.detail}", lasts=False)
                    elif "image_error" in said:
                        passing = said["image_error"].startswith(f"{str(file)!r}: unreadable: ")
                        yield Finding(path, failure=said["image_error"], lasts=not passing)
                    else:
                        pixels = torch.from_numpy(np.load(targets[answer.position])).permute(2, 0, 1)
                        targets[answer.position].unlink()
                        yield self._judged(path, said["content_sha256"], middle_view(pixels, size), picture)

    def _judged(self, path: str, content: str, view: torch.Tensor, picture: Picture) -> Finding:
        batch = Batch((content,), {"image": view[None].to(self.compute.device)})
        with torch.inference_mode(), deterministic_algorithms(self.compute.device):
            with Precision(self.compute).autocast():
                outputs = self.task.forward(self.network, batch)
            logits, scaled = (outputs[name][0].double().cpu().numpy() for name in ("class_logits", "values"))
        if not (np.isfinite(logits).all() and np.isfinite(scaled).all()):
            raise DataError(f"{self.name}: the network says nothing finite of a picture.")
        numbers = self.labels.in_units(scaled).tolist() if self.labels.targets else []
        values = self._of_classes(logits) | dict(zip(self._targets, numbers, strict=True))
        title, lines = self._told(values)
        return Finding(path, content, values, title, lines, picture(path, view.numpy()))

    def _of_classes(self, logits: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, str | float | None]:
        """Columns of the class; calibrated ones are empty where the run has no temperature."""
        classes = self.labels.classes
        if not classes:
            return {}
        order = np.argsort(-logits, kind="stable")  # of equal ones the first, as in the test part
        first, second = int(order[0]), int(order[1]) if len(order) > 1 else None
        found = None
        if self.calibration is not None:
            found = class_probabilities(logits[None], self.calibration.temperature)[0]
        return {
            "class": classes[first],
            "probability": None if found is None else float(found[first]),
            "probability_uncalibrated": float(class_probabilities(logits[None], 1.0)[0, first]),
            "runner_up": None if second is None else classes[second],
            "runner_up_probability": None if found is None or second is None else float(found[second]),
        }

    def _told(self, values: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        lines = [
            f"{name} {values[column]:.4g} {unit}".strip()
            for name, unit, column in zip(self.labels.targets, self.labels.units, self._targets, strict=True)
        ]
        if "class" not in values:
            return lines[0], tuple(lines[1:])
        sure = values["probability"]
        told = "probability not calibrated" if sure is None else f"probability {sure:.2f}"
        if values["runner_up"] is not None:
            own = values["runner_up_probability"]
            lines.insert(0, f"then {values['runner_up']}" + ("" if own is None else f", {own:.2f}"))
        return str(values["class"]), (told, *lines)


def _labels(path: Path, trained: Trained) -> ImageLabels:
    try:
        labels = TypeAdapter(ImageLabels).validate_python(read_json_object(path))
        lengths = {len(each) for each in (labels.targets, labels.units, labels.means, labels.deviations)}
        numbers = (*labels.means, *labels.deviations)
        if len(lengths) > 1 or not np.isfinite(numbers).all() or not (labels.classes or labels.targets):
            raise ValueError("classes, targets, units, means and deviations do not belong together")
    except (ValidationError, ValueError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{str(path)!r}: does not name the classes and numbers that the network gives ({why}). {trained.remedy}"
        ) from error
    return labels


def _calibration(path: Path) -> Calibration | None:
    """None without classes, of an earlier version, and where a file says what no training does."""
    try:
        found = TypeAdapter(Calibration).validate_python(read_json_object(path))
    except ValidationError:
        return None
    return found if 0 < found.temperature < np.inf else None


def _notes(labels: ImageLabels, calibration: Calibration | None) -> tuple[str, ...]:
    notes = []
    if labels.classes and calibration is None:
        notes.append(
            "The run has no calibration, so 'probability' is empty, and 'probability_uncalibrated' is no probability "
            "to be relied on. A training by this version has one."
        )
    elif calibration is not None:
        notes.append(
            f"Probabilities: temperature {calibration.temperature:.3g}, fitted on {calibration.num_validation:,} "
            "validation pictures, which also chose the epoch. On the test part's "
            f"{calibration.num_test:,} pictures they are off by {calibration.error:.2f} on average over ten bins "
            f"({calibration.error_uncalibrated:.2f} without the temperature)."
        )
    if labels.classes:
        notes.append(
            f"One of {len(labels.classes):,} known classes is always named, also of a picture that shows none of them."
        )
    notes.append("Files of the run are known again by their content alone: an altered copy of one is not.")
    return tuple(notes)
