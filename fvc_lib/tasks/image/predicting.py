"""Predict classes and numbers for new pictures with a trained network.

Pictures are decoded, cropped and scored like those of the training's test part.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import PIL
import polars as pl
import torch
from pydantic import TypeAdapter, ValidationError

from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.metrics.calibration import class_probabilities
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import path_to_text, read_json_object, sha256_of_json, write_json
from fvc_lib.services.code_versions import code_hash
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.tasks.decoding import DecodedFile
from fvc_lib.tasks.image.training import LABELS, ImageLabels, image_model, middle_view
from fvc_lib.tasks.predicting import Finding, OneNetwork, Trained
from fvc_lib.video.clips.store import Pixels

_DECODER = "fvc_lib.video.decode.still_image"
_CLASS = {"class": pl.String(), "probability": pl.Float64(), "runner_up": pl.String()}


class ImagePredictor(OneNetwork):
    """The predictor of task image: it predicts a class and numbers for new pictures.

    Args:
        trained: the trained network.
        labels: names of the network's outputs, and the temperature of the class logits.
    """

    kind = "image"
    file_word = "picture"
    files_of_run = tables.IMAGES

    def __init__(self, trained: Trained, labels: ImageLabels) -> None:
        super().__init__(trained)
        self.labels, self.parts = labels, asdict(labels)
        self.network = self._build(partial(image_model, self.config, labels))
        if labels.classes:
            always = "known classes is always named, also of a picture that shows none of them."
            self.notes = [_calibration(labels), f"One of {len(labels.classes):,} {always}", *self.notes]
        self._targets = [f"{n} ({u})" if u else n for n, u in zip(labels.targets, labels.units, strict=True)]
        self.columns = (_CLASS if labels.classes else {}) | dict.fromkeys(self._targets, pl.Float64())

    @classmethod
    def read(cls, trained: Trained, folder: Path, files: pl.DataFrame | None) -> Self:
        """Read ``labels.json`` in ``folder``, and return the predictor of the network ``trained``.

        The argument ``files`` has no effect.
        """
        path = folder / LABELS
        try:
            return cls(trained, TypeAdapter(ImageLabels).validate_python(read_json_object(path)))
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise DataError(f"{str(path)!r}: is not what a training writes ({why}). {trained.remedy}") from error

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the labels and the table of the run's files to ``folder``, and return an empty dict.

        The dict is the task's section of ``bundle.json``.
        """
        write_json(folder / LABELS, self.parts)
        return super().write(folder)

    @property
    def decode_hash(self) -> str:
        """The hex SHA-256 of Pillow's version and of the code that decodes pictures.

        If it differs from the hash at the training, predictions may differ a little from the run's.
        """
        return sha256_of_json([PIL.__version__, code_hash(_DECODER)])

    def _decoded(
        self, files: Sequence[Path], targets: Sequence[Path], workers: int
    ) -> Generator[tuple[ProbeResult, DecodedFile]]:
        items = [
            {"source": str(file), "target": str(target), "shortest_side": self.config.image_size}
            for file, target in zip(files, targets, strict=True)
        ]
        with closing(run_isolated(f"{_DECODER}:write_picture", items, workers=workers)) as answers:
            for answer in answers:
                gave_up = {"reason": answer.failure, "detail": f"the decoder gave up: {answer.detail}"}
                probed = ProbeResult.read(path_to_text(files[answer.position]), answer.value or gave_up)
                yield probed, DecodedFile(answer.position)

    def _answer(self, probed: ProbeResult, decoded: Pixels) -> Finding:
        view = middle_view(torch.from_numpy(decoded).permute(2, 0, 1), self.config.image_size)
        with self._computing():
            outputs = self.network(view[None].to(self.compute.device))
        logits, scaled = (outputs[name].double().cpu().numpy() for name in ("class_logits", "values"))
        if not (np.isfinite(logits).all() and np.isfinite(scaled).all()):
            raise DataError(f"{self.name}: the network says nothing finite of a picture.")
        labels = self.labels
        values = dict[str, str | float | None]()
        lines = list[str]()
        if labels.classes:
            # If logits are equal, the first class is taken, as in the test part.
            first, *second = [labels.classes[place] for place in np.argsort(-logits[0], kind="stable")[:2]]
            values = {"class": first, "probability": None, "runner_up": next(iter(second), None)}
            lines = [first, "probability not calibrated", *(f"then {name}" for name in second)]
            if labels.temperature is not None:
                values["probability"] = float(class_probabilities(logits, labels.temperature).max())
                lines[1] = f"probability {values['probability']:.2f}"
        numbers = dict(zip(self._targets, labels.in_units(scaled)[0].tolist(), strict=True))
        values |= numbers
        lines += [f"{name} {number:.4g}" for name, number in numbers.items()]
        return Finding(probed.path, probed.content_sha256, values, lines[0], tuple(lines[1:]))


def _calibration(labels: ImageLabels) -> str:
    """Return a sentence on the calibration of the class probabilities: the temperature and the error on the test part.

    The sentence says that there is no calibration if ``labels`` have no temperature.
    """
    if labels.temperature is None:
        return "The run has no calibration: 'probability' is empty."
    return (
        f"Probabilities: temperature {labels.temperature:.3g}, fitted on the validation part, which also chose the "
        f"epoch. On the test part they are off by {labels.calibration_error:.2f} on average over ten bins."
    )
