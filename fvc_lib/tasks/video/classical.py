"""Models on features, such as a logistic regression: read a fold's features, fit a model, and judge new files with it.

A probe has several views of a video, which are kinds of features (``RunConfig.views``). Each view has a model of its
own, and the logit of a video is their weighted mean. Any other model has one view without a name.

As for a network (``tasks/video/training.py``), the test part is sealed until the choices are recorded, the controls are
trained in the same way, and the same tables are written. A network holds back an inner validation part of the training
groups, but these models are fitted to all training groups. Every candidate setting is fitted to and tested on
inner folds of the training part, which keep groups together. The candidate with the lowest loss is then fitted to the
whole training part. Its held-out logits, from models that did not see the video's group, choose temperature and
threshold. A training takes seconds, so a stopped one starts over.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from fvc_lib.services.errors import FvcError, StoppedError, UsageError, command_text
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.shared_training import TrainedClass
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.calibration import held_out_loss, settings_text
from fvc_lib.tasks.video.data import ClipRow, FoldClips
from fvc_lib.tasks.video.features import FeatureSource
from fvc_lib.tasks.video.summary import Candidate, TrainingSummary, choose
from fvc_lib.video.features.family import FeatureFamily, families_named
from fvc_lib.video.features.worker import code_of

INNER_FOLDS = 5
_FRAMES_TRIED = 8  # of a made-up video; models on all frames take four or more


# Features of a fold's videos


_FRAMES, _PIXELS, _CODING = "frames", "pixels", "coding"  # the views of a probe


def forensic_families(config: RunConfig) -> list[tuple[str, FeatureFamily]]:
    """Return the families of forensic features that the model takes, as pairs ``(view, family)``.

    A family is a set of related features that one function measures. A view is a kind of features: ``pixels`` or
    ``coding`` for a probe, an empty text for a model on forensic features alone. The families are in the order of the
    model's features; for a probe, ``pixels`` come before ``coding``. The result is empty for models without forensic
    features.

    Raises:
        UsageError: a probe has a view for which ``config.feature_families`` names no family.
    """
    if config.of_features not in ("forensic", "both"):
        return []
    families = families_named(config.feature_families)
    if config.of_features == "forensic":
        return [("", family) for family in families]
    views = [(_CODING if family.of == "stream" else _PIXELS, family) for family in families]
    wanted = [(view, family) for view, family in views if view in config.views]
    if missing := {*config.views.split(",")} - {_FRAMES, *(view for view, _ in wanted)}:
        raise UsageError(
            f"views: got {config.views!r}, and feature_families {config.feature_families!r} names no family of "
            f"{', '.join(sorted(missing))}. Name one, or leave the view out."
        )
    return sorted(wanted, key=lambda pair: pair[0] == _CODING)


@dataclass(frozen=True)
class Column:
    """One feature: its view, the family that it belongs to, and its name.

    A view is a kind of features, such as ``frames`` or ``pixels``; it is empty if the model has only one view.
    """

    view: str
    family: str
    name: str


class FeatureTable:
    """Forensic features of a run's videos.

    Args:
        measured: ``video_id`` and at least F float64 columns, null where missing (``results.forensic_features``).
        config: names the model and the families (``forensic_families``).

    Attributes:
        columns: the F features, in order.
    """

    def __init__(self, measured: pl.DataFrame, config: RunConfig) -> None:
        families = forensic_families(config)
        self.columns = [Column(view, family.name, name) for view, family in families for name in family.columns()]
        names = [column.name for column in self.columns]
        self._values = dict(zip(measured["video_id"], measured.select(names).to_numpy(), strict=True))

    @cached_property
    def settings_hash(self) -> str:
        """Hex SHA-256 of the column names, video ids and values."""
        names = [column.name for column in self.columns]
        return sha256_of_json([names, [(name, row.tobytes().hex()) for name, row in self._values.items()]])

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the table has this copy of the video. It has originals (augmentation index 0) only."""
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
    def columns(self) -> list[Column]:
        """The F features, in order. Their family is the name of the trunk, and feature 3 is named ``TRUNK_3``."""
        trunk = self.config.model.partition(":")[2] or self.config.model
        view = _FRAMES if self.config.of_features == "both" else ""
        return [Column(view, trunk, f"{trunk}_{number}") for number in range(self.features.feature_shape[1])]

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether this copy of the video has a clip; augmentation index 0 is the original."""
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


@dataclass(frozen=True)
class Views:
    """The features of a probe with several views: those that a trunk computes from frames, and forensic features.

    ``clips`` is an ``EmbeddedClips``. It may also be a source of clips without computed features; then only ``has`` and
    ``settings_hash`` can be used.
    """

    clips: Any
    forensic: FeatureTable

    @property
    def settings_hash(self) -> str:
        """Hex SHA-256 of the settings of the clips and of the forensic features."""
        return sha256_of_json([self.clips.settings_hash, self.forensic.settings_hash])

    @property
    def columns(self) -> list[Column]:
        """The F features, in order: those of the trunk, then the forensic features."""
        return [*self.clips.columns, *self.forensic.columns]

    def has(self, video_id: str, augmentation_index: int) -> bool:
        """Return whether the video has a clip and forensic features."""
        return self.clips.has(video_id, augmentation_index) and self.forensic.has(video_id, augmentation_index)

    def of(self, rows: Sequence[ClipRow]) -> FloatArray:
        """Return the features of N ``rows``, float64 (N, F): those of the trunk, then the forensic ones.

        A missing feature is NaN.
        """
        return np.hstack([self.clips.of(rows), self.forensic.of(rows)])


Source = FeatureTable | EmbeddedClips | Views


def look_at_features(config: RunConfig, source: Source, clips: FoldClips) -> tuple[str, list[pl.DataFrame]]:
    """Describe a training before anything is fitted.

    Returns:
        ``(text, [families, settings])``: a sentence and two tables. The table ``families`` has the number of features
        and the share of missing values of every family; ``settings`` has the candidate settings.
    """
    missing = np.isnan(source.of(clips.train)).reshape(-1, len(source.columns)).mean(0)
    columns = pl.DataFrame({"family": [column.family for column in source.columns], "missing": missing})
    families = columns.group_by("family", maintain_order=True).agg(features=pl.len(), missing_share=pl.mean("missing"))
    settings = pl.DataFrame({"settings": map(settings_text, model_of(config).candidates)})
    text = f"{config.model} on {len(clips.train)} rows: {trained_class(config, source, {}).facts()}"
    return text, [families, settings]


def model_of(config: RunConfig) -> ClassicalModel:
    """Return the estimator that ``config.model`` names."""
    model: ClassicalModel = DETECTORS.get(config.model).estimator
    return model


def trained_class(config: RunConfig, source: Source, arrays: Arrays) -> TrainedClass:
    """Return the description of the estimator and its features for the record of a training.

    ``arrays`` are those of the fitted model. All their floats count as parameters, also those that replace
    missing features and scale all features.
    """
    families = ", ".join(dict.fromkeys(column.family for column in source.columns))
    note = f"{len(source.columns):,} features of {families}; fitted in one piece, on the CPU"
    name = f"{classical.__name__}:{config.model}"
    file = str(classical.__file__)
    number = sum(array.size for array in arrays.values() if array.dtype.kind == "f")
    return TrainedClass(name, file, num_parameters=number, notes=(note,))


# One training


@dataclass(frozen=True)
class Found:
    """The result of a search over candidate settings on training rows.

    N is the number of rows without pseudo-fakes, which are reals whose face was blended with itself.

    Attributes:
        arrays: the model with the best settings, fitted to all rows. With several views, a name is ``VIEW/NAME``, and
            ``VIEW/share`` is the weight of the view.
        best: the best settings with their loss.
        candidates: all settings with their losses.
        held_out: float64 (N,), logits of the N rows by models that were fitted without the row's inner fold.
    """

    arrays: Arrays
    best: Candidate
    candidates: tuple[Candidate, ...]
    held_out: FloatArray


def fit(
    config: RunConfig, source: Source, clips: FoldClips, folder: Path, log: MetricSink, stop: Callable[[], bool]
) -> tuple[Found, TrainingSummary]:
    """Choose settings, fit the training part, and calibrate on held-out logits of the same part.

    Writes the fitted model and the record of the choices to ``folder``. The test videos of the outer fold are not read.

    Returns:
        ``(found, summary)``: the fitted model with the results of the search, and the summary of the training.

    Raises:
        StoppedError: ``stop`` returned True between two candidates.
    """
    began = time.monotonic()
    found = fitted(config, source, clips.train, stop)
    for number, candidate in enumerate(found.candidates, start=1):
        log.log(step=number, epoch=1, phase="candidates", metrics={"inner_loss": candidate.inner_loss})
    weights = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.arrays.items()}
    write_weights_with_digest(folder / BEST, weights, description(config, found.best.settings))
    digest = weights_digest(weights)
    recorded = choose(
        clips,
        config,
        found.held_out,
        folder,
        digest,
        validation_loss=found.best.inner_loss,
        settings=found.best.settings,
        num_candidates=len(found.candidates),
    )
    chosen = recorded.selection
    log.log(step=0, epoch=1, phase="validation", metrics={"loss": chosen.validation_loss})
    metrics = {"temperature": chosen.temperature, "threshold": chosen.threshold, "log_loss": chosen.log_loss}
    log.log(step=0, epoch=1, phase="selection", metrics=metrics)
    summary = TrainingSummary(
        history=(),
        best_epoch=0,
        steps=0,
        nonfinite_steps=0,
        micro_batch=0,
        micro_batch_schedule=(),
        inexact_because=(),
        seconds=time.monotonic() - began,
        best_weights=digest,
        temperature=chosen.temperature,
        threshold=chosen.threshold,
        recorded=recorded,
        candidates=found.candidates,
        seen=tuple(column.name for column in source.columns),
    )
    return found, summary


def arrays_of(path: Path, weights: Mapping[str, Tensor], config: RunConfig, sizes: Mapping[str, int]) -> Arrays:
    """Return the arrays of a fitted model as NumPy arrays, after checking that they fit together.

    ``weights`` were read from the file ``path``. ``sizes`` maps each view (kind of features) to its number of features;
    only the arrays of these views are returned. For the check, the model computes the logits of two made-up videos,
    which uses all arrays.

    Raises:
        UsageError: an array is missing or does not fit the others.
    """
    own = {name: tensor.numpy() for name, tensor in weights.items() if name.rpartition("/")[0] in sizes}
    model, total = model_of(config), sum(sizes.values())
    try:
        logits = logits_of(config, own, np.zeros((2, _FRAMES_TRIED, total) if model.per_frame else (2, total)))
        if logits.shape != (2,):
            raise ValueError(f"logits of shape {logits.shape}")
    except FvcError:
        raise
    except Exception as error:  # a missing array is a KeyError; NumPy, torch and the boosters have their own
        raise UsageError(
            f"{str(path)!r}: its arrays do not fit {total:,} features: {error}. Get the file again, or train again."
        ) from error
    return own


def logits_of_rows(config: RunConfig, source: Source, arrays: Arrays, rows: Sequence[ClipRow]) -> FloatArray:
    """Return the logits of N ``rows``, float64 (N,), by the fitted model with these ``arrays``."""
    return logits_of(config, arrays, source.of(rows))


def logits_of(config: RunConfig, arrays: Arrays, values: FloatArray) -> FloatArray:
    """Return the logits of N videos, float64 (N,), from their features ``values``, float64 (N, F) or (N, T, F).

    ``arrays`` are those of the fitted model. If the model has several views (kinds of features), ``arrays`` may hold
    only some of the views. Then ``values`` have only the columns of these views, and the result is the part of the
    weighted mean that these views contribute.
    """
    model = model_of(config)
    views = dict.fromkeys(name.partition("/")[0] for name in arrays if "/" in name)
    if not views:
        return model.logits(arrays, values)
    logits = np.zeros(len(values))
    for view in sorted(views, key=(_FRAMES, _PIXELS, _CODING).index):
        own = {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{view}/")}
        seen, values = np.split(values, [len(own["median"])], axis=1)
        logits += own.pop("share") * model.logits(own, seen)
    if values.shape[1]:
        raise ValueError(f"a view of {values.shape[1]} features is not stored")
    return logits


def fitted(
    config: RunConfig, source: Source, train: Sequence[ClipRow], stop: Callable[[], bool] = lambda: False
) -> Found:
    """Choose settings on inner folds of the rows ``train``, and fit the model with these settings to all the rows.

    A pseudo-fake (a real whose face was blended with itself) is in the inner fold of that real. Pseudo-fakes are
    training rows, but the loss that chooses the settings, and the held-out logits, are computed without them.

    A model may have several views, which are kinds of features, each with a model of its own. Its logit is the weighted
    mean of their logits. The weights are inversely proportional to the standard deviations of the held-out logits.

    Raises:
        StoppedError: ``stop`` returned True between two candidates.
    """
    labels = data.labels_of(train)
    weights = np.array(data.class_weights(train) if config.class_balance == "loss" else (1.0, 1.0))[labels]
    judged = np.array([not row.is_pseudo_fake for row in train])
    folds = data.inner_folds(train, INNER_FOLDS, config.seed)
    views = dict[str, Found]()
    sizes = Counter(column.view for column in source.columns)
    parts = np.split(source.of(train), np.cumsum([*sizes.values()])[:-1], axis=-1)
    for view, values in zip(sizes, parts, strict=True):
        views[view] = _fitted_view(model_of(config), (values, labels, weights), judged, folds, stop)
    if len(views) == 1:
        return next(iter(views.values()))
    held_out = np.stack([found.held_out for found in views.values()])
    spreads = held_out.std(1)
    # The features of a view with a tiny spread hardly vary. It gets no weight, since its noise would be blown up.
    shares = np.where(spreads > spreads.max() / 10, 1 / np.maximum(spreads, 1e-12), 0.0) + 1e-12
    shares /= shares.sum()
    arrays: Arrays = {}
    for (view, found), share in zip(views.items(), shares, strict=True):
        of_view = {**found.arrays, "share": np.array([share])}
        arrays |= {f"{view}/{name}": array for name, array in of_view.items()}
    logits = shares @ held_out
    best = Candidate(views[_FRAMES].best.settings, held_out_loss(labels[judged], logits, weights[judged]))
    return Found(arrays, best, (best,), logits)


def _fitted_view(
    model: ClassicalModel,
    rows: tuple[FloatArray, IntArray, FloatArray],
    judged: IntArray,
    folds: IntArray,
    stop: Callable[[], bool],
) -> Found:
    """Choose the settings of the model for one view (a kind of features), and fit it to all training rows.

    Args:
        model: the estimator.
        rows: features (N, F) or (N, T, F), labels (N,) and loss weights (N,) of the training rows.
        judged: bool (N,), the rows on which the settings are compared; pseudo-fakes are only fitted.
        folds: the inner fold of every row, (N,).
        stop: called before every candidate setting; returns True to stop.

    Returns:
        The fitted model, its settings, and the loss of every candidate on inner folds that its fit did not use.
    """
    candidates = list[Candidate]()
    held_out = list[FloatArray]()
    values, labels, weights = rows
    for settings in model.candidates:
        if stop():
            raise StoppedError("stopped as requested before the model was fitted: resume the run to fit it.")
        logits = np.empty(len(folds))
        for fold in np.unique(folds):  # each row by a model that was fitted to the other folds
            out = folds == fold
            arrays = model.fit(values[~out], labels[~out], weights[~out], settings)
            logits[out] = model.logits(arrays, values[out])
        held_out.append(logits[judged])
        inner_loss = held_out_loss(labels[judged], held_out[-1], weights[judged])
        candidates.append(Candidate(dict(settings), inner_loss))
    # Take the first, simplest candidate if several are equal.
    best = int(np.argmin([candidate.inner_loss for candidate in candidates]))
    return Found(model.fit(*rows, model.candidates[best]), candidates[best], tuple(candidates), held_out[best])


def out_of_fold_logits(config: RunConfig, source: Source, folds: pl.DataFrame) -> pl.DataFrame:
    """Return each video's logit by a model that was fitted to the other folds.

    The result is the table ``folds`` (FOLDS), sorted by ``video_id``, with the logit as column ``score``.

    Raises:
        DataError: a fold's training part lacks a label.
    """
    scored = []
    for (fold,), tested in folds.sort("video_id").partition_by("fold", as_dict=True, maintain_order=True).items():
        rows = data.rows_to_fit(folds.filter(pl.col("fold") != fold), source, config)
        logits = logits_of_rows(config, source, fitted(config, source, rows).arrays, data.clip_rows(tested))
        scored.append(tested.with_columns(score=pl.Series(logits)))
    return pl.concat(scored).sort("video_id")


# New files


def description(config: RunConfig, settings: Mapping[str, float]) -> dict[str, Any]:
    """Return the metadata to store in the file of a fitted model, as a dict.

    The dict has the model's ``settings``. For a model on forensic features it also has ``features`` (their names) and
    ``families`` (a digest of the code that measures them).
    """
    families = [family for _, family in forensic_families(config)]
    if not families:
        return {"settings": dict(settings)}
    features = [name for family in families for name in family.columns()]
    code = sha256_of_json([code_of(family) for family in families])
    return {"settings": dict(settings), "features": features, "families": code}


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
    """A fitted model on forensic features, or the part of a probe that takes forensic features.

    ``names`` are the F feature columns that it expects, in order. ``caution`` is a warning if other code measured the
    features of its training; otherwise it is empty.
    """

    config: RunConfig
    arrays: Arrays
    names: tuple[str, ...]
    caution: str

    def logits(self, measured: Sequence[Mapping[str, float | None]]) -> FloatArray:
        """Return logits float64 (N,) of N videos, from their features by name; absent features count as missing."""
        rows = [[features.get(name) for name in self.names] for features in measured]
        return logits_of(self.config, self.arrays, np.array(rows, np.float32).astype(np.float64))


_OTHER_CODE = (
    "Forensic features are measured by other code or package versions than when the model was fitted: scores may "
    "differ a little."
)


def fitted_model(path: Path, weights: Mapping[str, Tensor], config: RunConfig) -> FittedModel:
    """Return the model on forensic features with the arrays ``weights``, read from the file ``path``.

    Raises:
        UsageError: the model sees features that this installation does not measure, or an array is missing or unfit.
    """
    stored, here = described_in(path), description(config, {})
    names = tuple(stored.get("features", ()))
    lacking = sorted(set(names) - set(here.get("features", ())))
    if lacking:
        raise UsageError(
            f"{str(path)!r}: the model sees features not measured here, such as {lacking[0]}. Judge with the version "
            f"that fitted it, or fit it again: {command_text('--force', '04', '--resume', 'RUN')}"
        )
    caution = "" if stored.get("families") == here["families"] else _OTHER_CODE
    views = {name: view for view, family in forensic_families(config) for name in family.columns()}
    arrays = arrays_of(path, weights, config, Counter(views[name] for name in names))
    return FittedModel(config, arrays, names, caution)


class _Fitted(nn.Module):
    """A fitted model on features, as the head of a frozen trunk (the pretrained network below the head)."""

    def __init__(self, config: RunConfig, arrays: Arrays) -> None:
        super().__init__()
        self._config, self._arrays = config, arrays

    def forward(self, features: Tensor) -> Tensor:
        """Return logits float64 (B,) of features (B, T, F)."""
        values = features.cpu().numpy().astype(np.float64)
        values = values if model_of(self._config).per_frame else values.mean(1)
        return torch.from_numpy(logits_of(self._config, self._arrays, values)).to(features.device)


def probe(trunk: Any, config: RunConfig, path: Path, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a network on clips: the frozen ``trunk`` with a fitted model as its head.

    If the probe also takes forensic features, the network returns the part of the logit that frames contribute.

    Args:
        trunk: the frozen network below the head.
        config: names the model.
        path: the file with the model's arrays.
        weights: the arrays.

    Raises:
        UsageError: an array is missing or does not fit the others.
    """
    sizes = {_FRAMES if config.of_features == "both" else "": trunk.frame_feature_size}
    return Detector(trunk, _Fitted(config, arrays_of(path, weights, config, sizes)))
