"""Judge new files by models on features: measure the same features, or run the trunk with a fitted line as its head."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from fvc_lib.detectors.classical import Arrays, ClassicalModel, trunk_config
from fvc_lib.detectors.network import Detector, build_detector
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.registry import DETECTORS
from fvc_lib.video.features.family import families_named
from fvc_lib.video.features.measuring import measure_files
from fvc_lib.video.features.worker import code_of

_logger = logging.getLogger(__name__)


def description(config: RunConfig, settings: Mapping[str, float], names: Sequence[str]) -> dict[str, Any]:
    """Return what is stored with a fitted model: settings, its features' names, and their families' code."""
    stored: dict[str, Any] = {"settings": dict(settings)}
    if config.of_features == "forensic":
        families = families_named(config.feature_families)
        stored |= {"features": list(names), "families": {each.name: code_of(each) for each in families}}
    return stored


def described_in(path: Path) -> dict[str, Any]:
    """Return the ``description`` in the file ``path``."""
    with safetensors.safe_open(path, "numpy") as opened:
        return dict(json.loads((opened.metadata() or {}).get("fvc", "{}")))


@dataclass(frozen=True)
class FittedModel:
    """A fitted model on forensic features; ``names`` are the columns that it sees."""

    model: ClassicalModel
    arrays: Arrays
    names: tuple[str, ...]

    def logits(self, measured: Sequence[Mapping[str, float]]) -> FloatArray:
        """Return float64 (N,) of the features of N videos by name; absent ones are missing."""
        rows = [[each.get(name, np.nan) for name in self.names] for each in measured]
        return self.model.logits(self.arrays, np.array(rows, np.float32).astype(np.float64))


def fitted_model(path: Path, state: Mapping[str, Tensor], config: RunConfig) -> FittedModel:
    """Return the model with the arrays ``state``, read from the file ``path``.

    Raises:
        UsageError: the file does not name the model's features, or some are not measured by this installation.
    """
    stored = described_in(path)
    names = tuple(stored.get("features", ()))
    if not names:
        remedy = command_text("--force", "04", "--resume", "RUN")
        raise UsageError(f"{str(path)!r}: does not name the features that the model sees. Fit it again: {remedy}")
    families = families_named(config.feature_families)
    known = {column for family in families for column in family.columns()}
    if lacking := [name for name in names if name not in known]:
        raise UsageError(
            f"{str(path)!r}: the model sees {len(lacking)} features that are not measured here, such as {lacking[0]}. "
            "Judge with the version of FVC that fitted it, or fit it again."
        )
    then = stored.get("families", {})
    if changed := [each.name for each in families if each.name in then and then[each.name] != code_of(each)]:
        _logger.warning(
            "%s: %s are measured by other code or package versions than when the model was fitted: scores may differ "
            "a little", path, ", ".join(changed),
        )  # fmt: skip
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    return FittedModel(DETECTORS.get(config.model).build(), arrays, names)  # type: ignore[misc]


def measured_features(
    config: RunConfig, recipe: str, files: Sequence[tuple[Path, str]]
) -> Iterator[tuple[int, dict[str, float], str]]:
    """Measure the forensic features of ``files`` as the run's were, each file in a worker process.

    Args:
        config: the run's.
        recipe: by which each file is re-encoded first; empty: none.
        files: paths with content hashes; an empty hash is not compared.

    Yields:
        Position, features by column, and the reason why there are none (else empty).
    """
    families = families_named(config.feature_families)
    names = [family.name for family in families]
    wanted = [(path, content, names) for path, content in files]
    with closing(measure_files(wanted, recipe, Path(config.cache_dir))) as measurements:
        for position, measured, failure in measurements:
            features = {
                column: np.nan if value is None else float(value)
                for family in families
                if family.name in measured
                for column, value in zip(family.columns(), measured[family.name][1], strict=True)
            }
            yield position, features, f"features: {failure}" if failure else ""


class _Line(nn.Module):
    """A fitted logistic regression as the head of a trunk."""

    weight: Tensor
    offset: Tensor

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        weight = (
            arrays["weight"] / arrays["scale"]
        )  # a trunk's features are never missing, so no column is an indicator
        offset = arrays["intercept"][0] - arrays["mean"] @ weight
        self.register_buffer("weight", torch.from_numpy(weight))
        self.register_buffer("offset", torch.tensor(float(offset), dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits float64 (B,) of features (B, T, F)."""
        return features.mean(1).to(self.weight.dtype) @ self.weight + self.offset


def probe(config: RunConfig, arrays: Arrays) -> nn.Module:
    """Return the frozen trunk of ``config`` with the fitted line as its head: a network on clips like others."""
    network = build_detector(trunk_config(config))
    return Detector(network.trunk, _Line(arrays))
