"""Classes and numbers of any pictures by a finished run of task image: decoded, cut and scored as its test part was."""

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from fvc_lib.engine.device import Precision, deterministic_algorithms, resolve_device
from fvc_lib.engine.task import Batch
from fvc_lib.metrics.calibration import class_probabilities
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import read_json_object
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import IMAGE_RECOGNITION as STAGE
from fvc_lib.tasks.image.data import ImageDataset, ImageLabels, ImageRecords, decoded_side, middle_view
from fvc_lib.tasks.image.task import Calibration, ImageTask
from fvc_lib.tasks.image.training import DEFAULT_MICRO_BATCH, calibration_file, labels_file
from fvc_lib.tasks.predicting import Prediction, trained_network
from fvc_lib.tasks.video.verdicts.scoring import scratch_folder

_DECODE = "fvc_lib.video.decode.still_image:write_picture"
_CLASS = ("class", "probability", "probability_uncalibrated", "runner_up", "runner_up_probability")
_TEXTS = frozenset({"class", "runner_up"})


class ImagePredictor:
    """See ``tasks.predicting.Predictor``."""

    kind = "image"

    def __init__(self, paths: RunPaths) -> None:
        self._config, self.name = run_config(paths), paths.run_id
        self._compute = resolve_device(self._config.device, self._config.amp)
        self.labels = _labels(paths)
        nothing = ImageRecords((), (), (), np.empty(0, np.int64), np.empty((0, len(self.labels.targets))))
        dataset = ImageDataset(Path(), nothing, self.labels, self._config.image_size)
        self._task = ImageTask(dataset, dataset, self._config)
        self._network = trained_network(paths, STAGE, self._task.build_model, self._task.question(), self._compute)
        images = tables.read_table(paths.images, tables.IMAGES)
        self.contents = dict(images.select("content_sha256", "part").iter_rows())
        self.calibration = _calibration(paths)
        self.notes = _notes(paths, self.labels, self.calibration)
        self._targets = [f"{n} ({u})" if u else n for n, u in zip(self.labels.targets, self.labels.units, strict=True)]
        types = {name: pl.String() if name in _TEXTS else pl.Float64() for name in _CLASS if self.labels.classes}
        self.columns = types | dict.fromkeys(self._targets, pl.Float64())

    def predictions(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Prediction]:
        """See ``Predictor``."""
        size, ready = self._config.image_size, list[tuple[int, str, torch.Tensor]]()
        batch_size = self._config.batch_size or DEFAULT_MICRO_BATCH
        with scratch_folder(self._config) as folder:
            targets = [folder / f"{number}.npy" for number in range(len(files))]
            items = [
                {"source": str(file), "target": str(target), "shortest_side": decoded_side(size, training=False)}
                for file, target in zip(files, targets, strict=True)
            ]
            with closing(run_isolated(_DECODE, items, workers=workers)) as answers:
                for answer in answers:
                    value: dict[str, str] = answer.value or {}
                    failure = f"the decoder gave up: {answer.detail}" if answer.failure else value.get("image_error")
                    if failure:
                        yield Prediction(answer.position, failure=failure)
                        continue
                    pixels = torch.from_numpy(np.load(targets[answer.position])).permute(2, 0, 1)
                    targets[answer.position].unlink()
                    ready.append((answer.position, value["content_sha256"], middle_view(pixels, size)))
                    if len(ready) == batch_size:
                        yield from self._answers(ready)
                        ready = []
            yield from self._answers(ready)

    def _answers(self, pictures: Sequence[tuple[int, str, torch.Tensor]]) -> Generator[Prediction]:
        if not pictures:
            return
        views = torch.stack([view for _, _, view in pictures])
        batch = Batch(tuple(content for _, content, _ in pictures), {"image": views.to(self._compute.device)})
        with torch.inference_mode(), deterministic_algorithms(self._compute.device):
            with Precision(self._compute).autocast():
                outputs = self._task.forward(self._network, batch)
            logits, scaled = (outputs[name].double().cpu().numpy() for name in ("class_logits", "values"))
        if not (np.isfinite(logits).all() and np.isfinite(scaled).all()):
            raise DataError(f"{self.name}: the network says nothing finite of a picture.")
        numbers = self.labels.in_units(scaled) if self.labels.targets else scaled
        for (position, content, view), row, own in zip(pictures, logits, numbers.tolist(), strict=True):
            values = self._of_classes(row) | dict(zip(self._targets, own, strict=True))
            title, lines = self._told(values)
            yield Prediction(position, values, title, lines, view.numpy(), content)

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

    def _told(self, values: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
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


def _labels(paths: RunPaths) -> ImageLabels:
    found = read_json_object(labels_file(paths))
    try:
        return ImageLabels(**{name: tuple(value) for name, value in found.items()})
    except TypeError as error:
        raise DataError(
            f"{str(labels_file(paths))!r}: does not name the classes and numbers that the network gives ({error}). "
            f"Finish the run, or train again: {command_text('--force', STAGE[:2], '--resume', paths.root)}"
        ) from error


def _calibration(paths: RunPaths) -> Calibration | None:
    found = read_json_object(calibration_file(paths))
    try:
        return Calibration(**found)
    except TypeError:  # of an earlier version, or without classes
        return None


def _notes(paths: RunPaths, labels: ImageLabels, calibration: Calibration | None) -> tuple[str, ...]:
    notes = []
    if labels.classes and calibration is None:
        anew = command_text("--force", STAGE[:2], "--resume", paths.root)
        notes.append(
            "The run has no calibration, so 'probability' is empty, and 'probability_uncalibrated' is no probability "
            f"to be relied on. To get one, train again: {anew}"
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
