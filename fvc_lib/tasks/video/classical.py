"""Models on features, such as a logistic regression: read a fold's features, fit a model, and judge new files with it.

Sealed test part, controls and tables are as for a network (``tasks/video/training.py``). A network holds an inner
validation part back; these models are fitted to all training groups. Every candidate setting is fitted to and tested on
inner folds of the training part, which keep groups together. The candidate with the lowest loss is then fitted to the
whole training part. Its held-out logits, from models that did not see the video's group, choose temperature and
threshold. A training takes seconds, so a stopped one starts over.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import safetensors
import torch
from torch import Tensor, nn

from fvc_lib.detectors import classical
from fvc_lib.detectors.classical import Arrays, ClassicalModel
from fvc_lib.detectors.network import Detector
from fvc_lib.engine.training_state import MetricSink
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoint_files import BEST, DamagedCheckpointError, weights_digest, write_weights_with_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, UsageError, command_text
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.shared_training import TrainedClass
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.calibration import (
    RecordedSelection,
    held_out_loss,
    record_selection,
    select,
    settings_text,
)
from fvc_lib.tasks.video.data import ClipRow, FoldClips
from fvc_lib.tasks.video.features import FeatureSource
from fvc_lib.tasks.video.results import families_of
from fvc_lib.tasks.video.summary import Candidate, Scored, TrainingSummary, score_outer_fold
from fvc_lib.video.features.family import families_named
from fvc_lib.video.features.measuring import measure_files
from fvc_lib.video.features.worker import code_of

INNER_FOLDS = 5
_logger = logging.getLogger(__name__)


# Features of a fold's videos


class FeatureTable:
    """Forensic features of a run's videos.

    Args:
        measured: ``video_id`` and F float64 columns, null where missing (``results.forensic_features``).
        config: names the families; a family is a set of related features that one function measures.

    Attributes:
        names: the F columns, in order.
        families: the names of their families, in the same order.
    """

    def __init__(self, measured: pl.DataFrame, config: RunConfig) -> None:
        family_of, values = families_of(config), measured.drop("video_id", "group_id")
        self.names, self.families = tuple(values.columns), tuple(family_of[name] for name in values.columns)
        self._values = dict(zip(measured["video_id"], values.to_numpy(), strict=True))

    @cached_property
    def settings_hash(self) -> str:
        """Hex SHA-256 of the column names, video ids and values."""
        return sha256_of_json([self.names, [(name, row.tobytes().hex()) for name, row in self._values.items()]])

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the video was measured; augmented copies never are."""
        return augmentation_index == 0 and video_id in self._values

    def of(self, rows: Sequence[ClipRow]) -> FloatArray:
        """Return the features of N ``rows``, float64 (N, F); NaN where missing."""
        return np.stack([self._values[row.video_id] for row in rows])


@dataclass(frozen=True)
class EmbeddedClips:
    """Features that a frozen trunk computed for a run's clips."""

    features: FeatureSource
    config: RunConfig

    @property
    def families(self) -> tuple[str, ...]:
        """The family of each of the F features; always the name of the trunk."""
        return (self.config.model.partition(":")[2] or self.config.model,) * self.features.feature_shape[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the F features: the trunk's name and a number."""
        return tuple(f"{trunk}_{number}" for number, trunk in enumerate(self.families))

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the video has a clip."""
        return self.features.has(video_id, augmentation_index)

    def of(self, rows: Sequence[ClipRow]) -> FloatArray:
        """Return the features of N ``rows``, float64 (N, F), averaged over the frames and clips of a row.

        For an estimator that takes the features of all frames they are float64 (N, T, F).
        """
        number = self.config.clips_per_video
        clips = [(row.video_id, row.augmentation_index, clip) for row in rows for clip in range(number)]
        features = self.features.features(clips).numpy().astype(np.float64)
        if model_of(self.config).per_frame:
            return features
        return np.asarray(features.mean(1).reshape(len(rows), number, -1).mean(1))


Source = FeatureTable | EmbeddedClips


def look_at_features(config: RunConfig, source: Source, clips: FoldClips) -> tuple[str, list[pl.DataFrame]]:
    """Describe a training before anything is fitted.

    Returns:
        ``(text, [families, settings])``: a sentence, the families with their numbers of features and shares of missing
        values, and the candidate settings.
    """
    missing = np.isnan(source.of(clips.train)).reshape(-1, len(source.names)).mean(0)
    columns = pl.DataFrame({"family": source.families, "missing": missing})
    families = columns.group_by("family", maintain_order=True).agg(features=pl.len(), missing_share=pl.mean("missing"))
    settings = pl.DataFrame({"settings": map(settings_text, model_of(config).candidates)})
    text = f"{config.model} on {len(clips.train)} rows: {trained_class(config, source).facts()}"
    return text, [families, settings]


def model_of(config: RunConfig) -> ClassicalModel:
    """Return the estimator that ``config.model`` names."""
    model: ClassicalModel = DETECTORS.get(config.model).estimator
    return model


def trained_class(config: RunConfig, source: Source, num_numbers: int = 0) -> TrainedClass:
    """Return the description of the estimator, its features and its package for the record of a training.

    ``num_numbers`` is the number of floats in the fitted model. It includes the constants that replace missing features
    and scale all features.
    """
    packages = (DETECTORS.get(config.model).packages if config.of_features == "forensic" else ()) or ("scikit-learn",)
    fitter = ", ".join(f"{name} {version(name)}" for name in packages)
    families = ", ".join(dict.fromkeys(source.families))
    note = f"{len(source.names):,} features of {families}; fitted by {fitter} in one piece, on the CPU"
    name, file = f"{classical.__name__}:{config.model}", str(classical.__file__)
    return TrainedClass(name, file, num_parameters=num_numbers, notes=(note,))


# One training


@dataclass(frozen=True)
class Fitted:
    """A fitted model with its recorded choices, before the outer fold is opened.

    Attributes:
        weights: the arrays of the fitted model, by name.
        candidates: all candidate settings with their losses.
        recorded: the choices that were recorded.
        held_out_logits: logits of the N training videos by models that did not see their groups, with the prior logit
            added, float64 (N,). Pseudo-fakes (reals whose face was blended with itself) are left out.
        seconds: duration of the training.
    """

    weights: dict[str, Tensor]
    candidates: tuple[Candidate, ...]
    recorded: RecordedSelection
    held_out_logits: FloatArray
    seconds: float

    @property
    def num_numbers(self) -> int:
        """The number of floats in the model."""
        return sum(tensor.numel() for tensor in self.weights.values() if tensor.is_floating_point())


def fit(
    config: RunConfig, source: Source, clips: FoldClips, folder: Path, log: MetricSink, stop: Callable[[], bool]
) -> Fitted:
    """Choose settings, fit the training part, and calibrate on held-out logits of the same part.

    Writes the fitted model and the record of the choices to ``folder``.

    Raises:
        StoppedError: ``stop`` returned True between two candidates.
    """
    began, labels = time.monotonic(), labels_of(clips.validation)
    found = _fitted(config, source, clips.train, stop)
    for number, candidate in enumerate(found.candidates, start=1):
        log.log(step=number, epoch=1, phase="candidates", metrics={"inner_loss": candidate.inner_loss})
    weights = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.arrays.items()}
    write_weights_with_digest(folder / BEST, weights, description(config, found.best.settings, source.names))
    prior = data.prior_logit(clips.train, config.class_balance)
    chosen = select(
        labels,
        found.held_out + prior,
        clips.num_validation_groups,
        fewest_groups=clips.fewest_groups,
        validation_loss=found.best.inner_loss,
        prior_logit=prior,
        point=config.operating_point,
        settings=found.best.settings,
        num_candidates=len(found.candidates),
    )
    recorded = record_selection(folder, RecordedSelection(chosen, clips.fingerprint, weights_digest(weights)))
    chosen = recorded.selection
    log.log(step=0, epoch=1, phase="validation", metrics={"loss": chosen.validation_loss})
    metrics = {"temperature": chosen.temperature, "threshold": chosen.threshold, "log_loss": chosen.log_loss}
    log.log(step=0, epoch=1, phase="selection", metrics=metrics)
    return Fitted(weights, found.candidates, recorded, found.held_out + prior, time.monotonic() - began)


def summary(source: Source, fitted: Fitted) -> TrainingSummary:
    """Return the summary of a fitted model."""
    return TrainingSummary(
        history=(),
        best_epoch=0,
        steps=0,
        nonfinite_steps=0,
        micro_batch=0,
        micro_batch_schedule=(),
        inexact_because=(),
        seconds=fitted.seconds,
        best_weights=weights_digest(fitted.weights),
        temperature=fitted.recorded.selection.temperature,
        threshold=fitted.recorded.selection.threshold,
        recorded=fitted.recorded,
        candidates=fitted.candidates,
        seen=tuple(source.names),
    )


def score(
    config: RunConfig, source: Source, clips: FoldClips, fitted: Fitted, done: TrainingSummary, log: MetricSink
) -> Scored:
    """Open the outer fold with the recorded selection in the summary ``done``, and score it.

    Raises:
        DataError: as ``score_outer_fold``.
    """
    model, arrays = model_of(config), arrays_of(fitted.weights)
    return score_outer_fold(
        done,
        clips,
        lambda rows: model.logits(arrays, source.of(rows)),
        lambda phase, metrics: log.log(step=0, epoch=1, phase=phase, metrics=metrics),
    )


def labels_of(rows: Sequence[ClipRow]) -> IntArray:
    """Return the labels of N ``rows``, int64 (N,): 0 is real, 1 is fake."""
    return np.array([row.label for row in rows])


def arrays_of(weights: Mapping[str, Tensor]) -> Arrays:
    """Return stored weights as NumPy arrays."""
    return {name: tensor.numpy() for name, tensor in weights.items()}


@dataclass(frozen=True)
class _Found:
    """The result of a search over candidate settings on training rows.

    N is the number of rows without pseudo-fakes, which are reals whose face was blended with itself.

    Attributes:
        arrays: the model with the best settings, fitted to all rows.
        best: the best settings with their loss.
        candidates: all settings with their losses.
        held_out: float64 (N,), logits of the N rows by models that were fitted without the row's inner fold.
    """

    arrays: Arrays
    best: Candidate
    candidates: tuple[Candidate, ...]
    held_out: FloatArray


def _fitted(config: RunConfig, source: Source, train: Sequence[ClipRow], stop: Callable[[], bool]) -> _Found:
    """Choose settings on inner folds of the rows ``train``, and fit the model to all of them.

    A pseudo-fake (a real whose face was blended with itself) is in the inner fold of that real. Models are fitted to
    pseudo-fakes, but the loss and the held-out logits leave them out.

    Raises:
        StoppedError: ``stop`` returned True between two candidates.
    """
    model, labels = model_of(config), labels_of(train)
    class_weights = np.array(data.class_weights(train) if config.class_balance == "loss" else (1.0, 1.0))
    rows = _Rows(source.of(train), labels, class_weights[labels])
    judged = np.array([not row.is_pseudo_fake for row in train])
    folds = data.inner_folds(train, INNER_FOLDS, config.seed)
    candidates, held_out = list[Candidate](), list[FloatArray]()
    for settings in model.candidates:
        if stop():
            raise StoppedError("stopped as requested before the model was fitted: resume the run to fit it.")
        held_out.append(_held_out_logits(model, settings, rows, folds)[judged])
        inner_loss = held_out_loss(labels[judged], held_out[-1], rows.weights[judged])
        candidates.append(Candidate(dict(settings), inner_loss))
    # Take the first, simplest candidate if several are equal.
    best = int(np.argmin([candidate.inner_loss for candidate in candidates]))
    arrays = rows.fit(model, model.candidates[best])
    return _Found(arrays, candidates[best], tuple(candidates), held_out[best])


def fitted_arrays(config: RunConfig, source: Source, train: Sequence[ClipRow]) -> Arrays:
    """Return the arrays of the model, fitted to all rows of ``train`` with settings chosen on inner folds."""
    return _fitted(config, source, train, lambda: False).arrays


def out_of_fold_logits(config: RunConfig, source: Source, folds: pl.DataFrame) -> pl.DataFrame:
    """Return ``folds`` (FOLDS), sorted by ``video_id``, with ``score``: the logit of a model fitted to the other folds.

    Raises:
        DataError: a fold's training part lacks a label.
    """
    scored = []
    for (fold,), tested in folds.sort("video_id").partition_by("fold", as_dict=True, maintain_order=True).items():
        fitted = data.rows_to_fit(folds.filter(pl.col("fold") != fold), source, config)
        arrays = fitted_arrays(config, source, fitted)
        logits = model_of(config).logits(arrays, source.of(data.clip_rows(tested)))
        scored.append(tested.with_columns(score=pl.Series(logits)))
    return pl.concat(scored).sort("video_id")


@dataclass(frozen=True)
class _Rows:
    """The N training rows: features ``values`` (N, F), ``labels`` (N,) and loss ``weights`` (N,)."""

    values: FloatArray
    labels: IntArray
    weights: FloatArray

    def fit(self, model: ClassicalModel, settings: Mapping[str, float], which: Any = slice(None)) -> Arrays:
        """Fit ``model`` with ``settings`` to the rows that ``which`` indexes, and return the fitted arrays."""
        return model.fit(self.values[which], self.labels[which], self.weights[which], settings)


def _held_out_logits(model: ClassicalModel, settings: Mapping[str, float], rows: _Rows, folds: IntArray) -> FloatArray:
    """Return the logits of the N training rows, float64 (N,), each by a model that was fitted to the other folds."""
    logits = np.empty(len(folds))
    for fold in np.unique(folds):
        held_out = folds == fold
        logits[held_out] = model.logits(rows.fit(model, settings, ~held_out), rows.values[held_out])
    return logits


# New files


def description(config: RunConfig, settings: Mapping[str, float], names: Sequence[str]) -> dict[str, Any]:
    """Return the metadata that are stored with a fitted model: its settings.

    A model on forensic features also has the names of the features, and a digest of the code that measures them.
    """
    if config.of_features != "forensic":
        return {"settings": dict(settings)}
    return {"settings": dict(settings), "features": list(names), "families": _measuring_code(config)}


def _measuring_code(config: RunConfig) -> str:
    return sha256_of_json([code_of(family) for family in families_named(config.feature_families)])


def described_in(path: Path) -> dict[str, Any]:
    """Return the metadata that ``description`` made for the fitted model in the file ``path``.

    Raises:
        DamagedCheckpointError: the header of the file cannot be read.
    """
    try:
        with safetensors.safe_open(path, "numpy") as opened:
            return dict(json.loads((opened.metadata() or {}).get("fvc", "{}")))
    except (safetensors.SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(f"{path}: damaged: {error}. Put a copy back, or train again.") from error


@dataclass(frozen=True)
class FittedModel:
    """A fitted model on forensic features; ``names`` are the F feature columns that it expects, in order."""

    model: ClassicalModel
    arrays: Arrays
    names: tuple[str, ...]

    def logits(self, measured: Sequence[Mapping[str, float]]) -> FloatArray:
        """Return logits float64 (N,) of N videos, from their features by name; absent features count as missing."""
        rows = [[features.get(name, np.nan) for name in self.names] for features in measured]
        return self.model.logits(self.arrays, np.array(rows, np.float32).astype(np.float64))


def fitted_model(path: Path, weights: Mapping[str, Tensor], config: RunConfig) -> FittedModel:
    """Return the model with the arrays ``weights``, read from the file ``path``.

    Raises:
        UsageError: the model sees features that this installation does not measure.
    """
    stored = described_in(path)
    names = tuple(stored.get("features", ()))
    lacking = sorted(set(names) - set(families_of(config)))
    if lacking or not names:
        raise UsageError(
            f"{str(path)!r}: the model sees features not measured here, such as {' '.join(lacking[:1])}. Judge "
            f"with the version that fitted it, or fit it again: {command_text('--force', '04', '--resume', 'RUN')}"
        )
    if stored["families"] != _measuring_code(config):
        _logger.warning(
            "%s: features are measured by other code or package versions than when the model was fitted: scores may "
            "differ a little", path,
        )  # fmt: skip
    return FittedModel(model_of(config), arrays_of(weights), names)


def measured_features(
    config: RunConfig, recipe: str, files: Sequence[tuple[Path, str]]
) -> Iterator[tuple[int, dict[str, float], str]]:
    """Measure the forensic features of ``files`` in worker processes, in the same way as those of the run's videos.

    Args:
        config: the run's parameters.
        recipe: name of the re-encoding that is applied to each file first; empty: none.
        files: paths with content hashes; an empty hash is not compared.

    Yields:
        ``(position, features, failure)``: the index of the file, its features by column, and the reason if it could not
        be measured (else empty).
    """
    columns = {family.name: family.columns() for family in families_named(config.feature_families)}
    wanted = [(path, content, list(columns)) for path, content in files]
    with closing(measure_files(wanted, recipe, Path(config.cache_dir))) as measurements:
        for position, measured, failure in measurements:
            features = dict[str, float]()
            for name, (_, values) in measured.items():
                numbers = [np.nan if value is None else float(value) for value in values]
                features |= zip(columns[name], numbers, strict=True)
            yield position, features, f"features: {failure}" if failure else ""


class _Fitted(nn.Module):
    """A fitted model on features, as the head of a frozen trunk (the pretrained network below the head)."""

    def __init__(self, model: ClassicalModel, arrays: Arrays) -> None:
        super().__init__()
        self._model, self._arrays = model, arrays

    def forward(self, features: Tensor) -> Tensor:
        """Return logits float64 (B,) of features (B, T, F)."""
        values = features.cpu().numpy().astype(np.float64)
        logits = self._model.logits(self._arrays, values if self._model.per_frame else values.mean(1))
        return torch.from_numpy(logits).to(features.device)


def probe(trunk: nn.Module, config: RunConfig, arrays: Arrays) -> nn.Module:
    """Return a network on clips: the frozen ``trunk`` with the fitted model of ``config`` as its head."""
    return Detector(trunk, _Fitted(model_of(config), arrays))
