"""New files and models on features: the same numbers measured of a file, or a trunk and a line on what it says."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from fvc_lib.detectors.classical.model import Arrays, ClassicalModel, FloatArray
from fvc_lib.detectors.network import Detector, build_detector
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.video.classical.embeddings import trunk_config
from fvc_lib.video.features.family import families_named
from fvc_lib.video.features.measuring import MEASURE_FUNCTION, TIMEOUT_SECONDS
from fvc_lib.video.features.worker import code_of as code_of_family
from fvc_lib.video.reencode import TIMEOUT_SECONDS as REENCODE_SECONDS

_MODELS = "fvc_lib.detectors.classical"
_logger = logging.getLogger(__name__)


def description(config: RunConfig, settings: Mapping[str, float], names: Sequence[str]) -> dict[str, Any]:
    """What stands beside a fitted model's arrays: settings, the features it sees, and the code of their families."""
    told: dict[str, Any] = {"settings": dict(settings)}
    if config.of_features == "forensic":
        families = families_named(config.feature_families)
        told |= {"features": list(names), "families": {each.name: code_of_family(each) for each in families}}
    return told


def described_in(path: Path) -> dict[str, Any]:
    """``description`` as the file ``path`` has it."""
    with safetensors.safe_open(path, "numpy") as opened:
        return dict(json.loads((opened.metadata() or {}).get("fvc", "{}")))


@dataclass(frozen=True)
class FittedModel:
    """A model on forensic features, and which features it sees, by the names of their columns."""

    model: ClassicalModel
    arrays: Arrays
    names: tuple[str, ...]

    def logits(self, measured: Sequence[Mapping[str, float]]) -> FloatArray:
        """Float64 (N,) of N videos' features by name; one that is not there is missing."""
        rows = [[each.get(name, np.nan) for name in self.names] for each in measured]
        return self.model.logits(self.arrays, np.array(rows, np.float32).astype(np.float64))


def fitted_model(path: Path, state: Mapping[str, Tensor], config: RunConfig) -> FittedModel:
    """Of the arrays ``state``, which the file ``path`` holds.

    Raises:
        UsageError: the file does not say which features it sees, or the families installed here do not have some.
    """
    told = described_in(path)
    names = tuple(told.get("features", ()))
    if not names:
        again = command_text("--force", "04", "--resume", "RUN")
        raise UsageError(f"{str(path)!r}: does not say which features the model sees. Fit it anew: {again}")
    families = families_named(config.feature_families)
    known = {column for family in families for column in family.columns()}
    if lacking := [name for name in names if name not in known]:
        raise UsageError(
            f"{str(path)!r}: the model sees {len(lacking)} features that are not measured here, such as {lacking[0]}. "
            "Judge with the version of FVC that it was fitted with, or fit it anew."
        )
    then = told.get("families", {})
    if other := [each.name for each in families if each.name in then and then[each.name] != code_of_family(each)]:
        _logger.warning(
            "%s: %s are measured by other code, or with other versions of packages, than when the model was fitted: "
            "scores may differ a little",
            path, ", ".join(other),
        )  # fmt: skip
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    return FittedModel(DETECTORS.get(config.model).build(), arrays, names)  # type: ignore[misc]


class FeatureMeasurer:
    """Measures the features of files as a run's were, each in a worker process."""

    def __init__(self, config: RunConfig, recipe: str, cache_dir: Path) -> None:
        self._families = families_named(config.feature_families)
        self._encoded = [recipe, str(cache_dir)] if recipe else []

    @cached_property
    def _codes(self) -> dict[str, str]:
        return {each.name: code_of_family(each) for each in self._families}

    @property
    def sees_order(self) -> bool:
        """Whether a family looks at pairs of frames."""
        return any(each.of == "pairs" for each in self._families)

    def measure(self, files: Sequence[tuple[Path, str]]) -> Iterator[tuple[int, dict[str, float], str]]:
        """Position, features by column, and why there are none, of each path and content (empty: not compared)."""
        items = [
            {"source": str(path), "content_sha256": content, "families": self._codes, "encoded": self._encoded}
            for path, content in files
        ]
        seconds = REENCODE_SECONDS if self._encoded else TIMEOUT_SECONDS
        answers = run_isolated(MEASURE_FUNCTION, items, timeout_seconds=seconds)
        with closing(answers):
            for answer in answers:
                said = answer.value or {}
                if "code_changed" in said:
                    raise FvcError("the code of a feature was changed since it was loaded here. Start anew.")
                why = f"features: {answer.detail}" if answer.failure else str(said.get("video_error", ""))
                yield answer.position, self._by_column(said.get("values", {})), why

    def _by_column(self, values: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
        return {
            column: np.nan if value is None else float(value)
            for family in self._families
            if family.name in values
            for column, value in zip(family.columns(), values[family.name], strict=True)
        }


class _Line(nn.Module):
    """What a fitted logistic regression says of a trunk's features, as a head."""

    weight: Tensor
    offset: Tensor

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        weight = arrays["weight"] / arrays["scale"]  # a trunk's features are never missing: none has an indicator
        offset = arrays["intercept"][0] - arrays["mean"] @ weight
        self.register_buffer("weight", torch.from_numpy(weight))
        self.register_buffer("offset", torch.tensor(float(offset), dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        """Logits float64 (B,) of features (B, T, F)."""
        return features.mean(1).to(self.weight.dtype) @ self.weight + self.offset


def probe(config: RunConfig, built_with: str, arrays: Arrays) -> nn.Module:
    """The frozen trunk of ``config`` with the fitted line as its head: a network on clips, as others are."""
    network = build_detector(trunk_config(config).model_copy(update={"model_weights": built_with}))
    trunk = network.trunk
    return Detector(trunk, _Line(arrays))
