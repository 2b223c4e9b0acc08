"""Train a model on features for one outer fold: choose settings on inner folds of groups, then test once.

Parts, seal, controls, calibration and tables are those of a network (``tasks/video/training.py``). Candidate settings
take the place of epochs. Each is fitted to inner folds of the training part, groups kept together. The one with the
lowest loss is fitted to the whole training part. The inner validation part then chooses temperature and threshold. A
training takes seconds, so a stopped one starts over.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from fvc_lib.corpus.folds import make_folds, most_folds
from fvc_lib.detectors import classical
from fvc_lib.detectors.classical import Arrays, ClassicalModel
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.training_state import MetricSink
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, IntArray, balanced_accuracy, decide, roc_auc
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.checkpoint_files import BEST, weights_digest, write_weights_with_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, command_text
from fvc_lib.services.memory.budget import peak_rss_bytes
from fvc_lib.services.memory.policy import NoObserver
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tables import LABELS, PREDICTIONS, VALIDATION_PREDICTIONS, write_table
from fvc_lib.services.tasks import FOLD_TRAINING as STAGE, REAL_SOURCES, SHUFFLED_LABELS
from fvc_lib.tasks.recipe import (
    ControlLog,
    TrainedClass,
    TrainingOptions,
    TrainingOutcome,
    outcome_to_json,
    read_outcome,
)
from fvc_lib.tasks.video import data
from fvc_lib.tasks.video.classical.inputs import EmbeddedClips, read_feature_fold
from fvc_lib.tasks.video.classical.judging import description
from fvc_lib.tasks.video.classical.table import FeatureTable
from fvc_lib.tasks.video.data import ClipRow, FoldClips
from fvc_lib.tasks.video.selection import RecordedSelection, record_selection, select_calibration, settings_text
from fvc_lib.tasks.video.summary import (
    Candidate,
    Scored,
    TrainingSummary,
    digest_of_state,
    predictions_table,
    training_parameters,
    validation_table,
)

INNER_FOLDS = 3
_logger = logging.getLogger(__name__)


def train_on_features(
    paths: RunPaths, config: RunConfig, fold: int, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingSummary]:
    """Fit and test a model for outer fold ``fold`` (0-based); arguments and files as of ``train_fold``.

    Raises:
        StoppedError: ``stop`` returned True between two candidates.
        DataError: as ``train_fold``.
        UsageError: settings that only a network has a use for.
    """
    log, memory = options["metric_log"], options.get("memory") or NoObserver()
    stop = options.get("stop") or (lambda: False)
    progress = options.get("progress") or (lambda _done, _total: None)
    memory.at("setup")
    read = read_feature_fold(paths, config, fold, stop=stop)
    clips, folder = read.clips, paths.training_checkpoints(STAGE, fold)
    fingerprint = sha256_of_json([training_parameters(config, fold), clips.fingerprint])
    finished = read_outcome(folder / "outcome.json", TrainingSummary)
    if finished is not None and finished.fingerprint == fingerprint and paths.predictions(fold).exists():
        return replace(finished, train_anew=command_text("--force", STAGE[:2], "--resume", paths.root))
    paths.stage_checkpoint(STAGE, fold).unlink(missing_ok=True)  # it lists files that are written from here on
    trainings = {
        name: _Training(config, read.source, of, folder / name, ControlLog(log, name) if name else log)
        for name, of in {"": clips, **read.controls}.items()
    }
    memory.at("train", epoch=1)
    fitted = {}
    for number, (name, training) in enumerate(trainings.items()):
        progress(number, len(trainings))
        fitted[name] = training.fit(stop)
    # Every choice is on the disk now: the outer fold may be opened.
    memory.at("test")
    scored = {name: trainings[name].test(each) for name, each in fitted.items()}
    progress(len(trainings), len(trainings))
    memory.at("report")
    network = _described(config, read.source, _num_learned(fitted[""].arrays))
    _logger.info("%s: %s", stage_key(STAGE, fold), network.sentences())
    validation = validation_table(fold, clips, fitted[""].validation_logits, fitted[""].recorded)
    write_table(validation, VALIDATION_PREDICTIONS, paths.validation_predictions(fold))
    write_table(predictions_table(fold, scored), PREDICTIONS, paths.predictions(fold))
    summaries = {name: each.summary for name, each in scored.items()}
    outcome = TrainingOutcome(
        fold=fold,
        model=config.model,
        num_parameters=network.num_parameters,
        device="cpu",
        num_train=len({row.video_id for row in clips.train}),
        num_train_samples=len(clips.train),
        num_validation=len(clips.validation),
        num_test=len(clips.test),
        missing=clips.missing,
        training=summaries[""],
        control=summaries.get(SHUFFLED_LABELS),
        sources=summaries.get(REAL_SOURCES),
        predicted_peak_bytes=None,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=None,
        fingerprint=fingerprint,
        finished_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        network=network,
    )
    write_text(folder / "outcome.json", outcome_to_json(outcome))
    return outcome


@dataclass(frozen=True)
class FeatureLook:
    """What a model on features is about to see and to choose from; the counterpart of a network's ``FirstStep``."""

    text: str
    families: pl.DataFrame
    candidates: pl.DataFrame
    setup: tuple[str, ...] = ("a model on features: no steps, micro-batches or accelerator, so no memory is planned",)
    batch: None = None

    def sentence(self) -> str:
        """Return the model, its features and the number of rows that it is fitted to."""
        return self.text

    def network_table(self) -> pl.DataFrame:
        """Return ``family features missing_share`` of the training part."""
        return self.families

    def tensor_table(self) -> pl.DataFrame:
        """Return ``settings``, one row per candidate."""
        return self.candidates


def look_at_features(paths: RunPaths, config: RunConfig, fold: int) -> FeatureLook:
    """Describe the training of ``fold`` before anything is fitted; raises as ``train_on_features``."""
    read = read_feature_fold(paths, config, fold)
    families, missing = np.array(read.source.families), np.isnan(read.source.of(read.clips.train))
    rows = [
        (family, int((families == family).sum()), float(missing[:, families == family].mean()))
        for family in dict.fromkeys(families.tolist())
    ]
    schema = {"family": pl.String, "features": pl.Int64, "missing_share": pl.Float64}
    settings = [settings_text(each) for each in _model_of(config).candidates]
    text = f"{config.model} on {len(read.clips.train)} rows. {_described(config, read.source).sentences()}"
    return FeatureLook(text, pl.DataFrame(rows, schema=schema, orient="row"), pl.DataFrame({"settings": settings}))


def _model_of(config: RunConfig) -> ClassicalModel:
    model: ClassicalModel = DETECTORS.get(config.model).build()  # type: ignore[misc]  # a model on features has it
    return model


def _described(config: RunConfig, source: FeatureTable | EmbeddedClips, num_learned: int = 0) -> TrainedClass:
    """Return the estimator, its features and the package that fits it, as an outcome records a network."""
    packages = (DETECTORS.get(config.model).packages if config.of_features == "forensic" else ()) or ("scikit-learn",)
    fitter = ", ".join(f"{name} {version(name)}" for name in packages)
    families = ", ".join(dict.fromkeys(source.families))
    note = f"{len(source.names):,} features of {families}; fitted by {fitter} in one piece, on the CPU"
    name = f"{classical.__name__}:{config.model}"
    return TrainedClass(name, str(classical.__file__), "", num_learned, notes=(note,))


def _num_learned(arrays: Arrays) -> int:
    """Return how many numbers were learned, including those that fill in and scale features."""
    return int(sum(array.size for array in arrays.values() if array.dtype.kind == "f"))


@dataclass(frozen=True)
class _Fitted:
    """A fitted model with its recorded choices, before the outer fold is opened."""

    arrays: Arrays
    candidates: tuple[Candidate, ...]
    recorded: RecordedSelection
    validation_logits: FloatArray  # (V,) of the inner validation part
    seconds: float

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors."""
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.arrays.items()}


@dataclass(frozen=True)
class _Training:
    """One training of a fold: the model's own, or a control's."""

    config: RunConfig
    source: FeatureTable | EmbeddedClips
    clips: FoldClips
    folder: Path
    log: MetricSink

    def fit(self, stop: Callable[[], bool]) -> _Fitted:
        """Choose settings, fit the training part, calibrate on the inner validation part; write and record all."""
        began, model, rows = time.monotonic(), _model_of(self.config), self.clips.train
        values, labels = self.source.of(rows), _labels_of(rows)
        weights, folds, losses = self._weights_of(labels), self._inner_folds(), list[float]()
        for number, settings in enumerate(model.candidates):
            if stop():
                raise StoppedError("stopped as requested before the model was fitted: resume the run to fit it.")
            losses.append(_inner_loss(model, settings, values, labels, weights, folds))
            self.log.log(step=number + 1, epoch=1, phase="candidates", metrics={"inner_loss": losses[-1]})
        known = [loss if math.isfinite(loss) else math.inf for loss in losses]
        settings = model.candidates[int(np.argmin(known))]  # the simplest one if several are equal or none is known
        arrays = model.fit(values, labels, weights, settings)
        candidates = tuple(Candidate(dict(each), loss) for each, loss in zip(model.candidates, losses, strict=True))
        recorded, logits = self._calibrate(model, arrays, settings)
        return _Fitted(arrays, candidates, recorded, logits, time.monotonic() - began)

    def _calibrate(
        self, model: ClassicalModel, arrays: Arrays, settings: Mapping[str, float]
    ) -> tuple[RecordedSelection, FloatArray]:
        """Write the model, then choose and record temperature and threshold; also return the logits (V,)."""
        config, clips = self.config, self.clips
        state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        write_weights_with_digest(self.folder / BEST, state, description(config, settings, self.source.names))
        labels = _labels_of(clips.validation)
        logits = model.logits(arrays, self.source.of(clips.validation))
        loss = _loss(labels, logits, self._weights_of(labels))
        prior = data.prior_logit(clips.train, config.class_balance)
        chosen = select_calibration(
            labels, logits + prior, clips.num_validation_groups, validation_loss=loss, prior_logit=prior,
            point=config.operating_point,
        )  # fmt: skip
        chosen = replace(chosen, settings=dict(settings), num_candidates=len(model.candidates))
        recorded = record_selection(self.folder, RecordedSelection(chosen, clips.fingerprint, digest_of_state(state)))
        logged = asdict(recorded.selection)
        self.log.log(step=0, epoch=1, phase="validation", metrics={"loss": loss})
        names = ("temperature", "threshold", "log_loss")
        self.log.log(step=0, epoch=1, phase="selection", metrics={name: logged[name] for name in names})
        return recorded, logits + prior

    def test(self, fitted: _Fitted) -> Scored:
        """Open the outer fold, which needs a recorded selection, and score it."""
        recorded, chosen = fitted.recorded, fitted.recorded.selection
        outer = self.clips.test.open(recorded)
        labels, values = _labels_of(outer.rows), self.source.of(outer.rows)
        logits = _model_of(self.config).logits(fitted.arrays, values) + chosen.prior_logit
        scores = probabilities(logits, chosen.temperature)
        decisions = decide(scores, chosen.threshold)
        metrics = {"roc_auc": roc_auc(labels, scores), "balanced_accuracy": balanced_accuracy(labels, decisions)}
        self.log.log(step=0, epoch=1, phase="test", metrics=metrics)
        summary = TrainingSummary(
            history=(),
            best_epoch=0,
            steps=0,
            nonfinite_steps=0,
            micro_batch=0,
            micro_batch_schedule=(),
            inexact_because=(),
            seconds=fitted.seconds,
            best_weights=weights_digest(fitted.state),
            temperature=chosen.temperature,
            threshold=chosen.threshold,
            recorded=recorded,
            candidates=fitted.candidates,
            seen=tuple(self.source.names),
        )
        return Scored(summary, outer, logits, scores)

    def _weights_of(self, labels: IntArray) -> FloatArray:
        """Return the weight (N,) of each row in the loss, as a network's: both classes count alike if balanced."""
        balanced = self.config.class_balance == "loss"
        weights = np.array(data.class_weights(self.clips.train) if balanced else (1.0, 1.0))
        return np.asarray(weights[labels])

    def _inner_folds(self) -> npt.NDArray[np.int64] | None:
        """Return the inner fold (N,) of each training row; None if a class has fewer than two groups."""
        rows, group_of = self.clips.train, self.clips.groups
        videos = {row.video_id: LABELS[row.label] for row in rows}
        groups = [group_of[video_id] for video_id in videos]
        frame = pl.DataFrame({"video_id": list(videos), "group_id": groups, "label": list(videos.values())})
        num_folds = min(INNER_FOLDS, most_folds(frame))
        if num_folds < 2:
            return None
        folds = make_folds(frame, num_folds, stable_seed("inner folds", self.config.seed) % 2**32)
        fold_of = dict(folds.select("video_id", "fold").iter_rows())
        return np.array([fold_of[row.video_id] for row in rows])


def _labels_of(rows: tuple[ClipRow, ...]) -> IntArray:
    return np.array([row.label for row in rows])


def _inner_loss(
    model: ClassicalModel,
    settings: Mapping[str, float],
    values: FloatArray,
    labels: IntArray,
    weights: FloatArray,
    folds: npt.NDArray[np.int64] | None,
) -> float:
    """Return the loss of ``settings`` on inner folds that the model was not fitted to; NaN without inner folds."""
    if folds is None:
        return math.nan
    logits = np.empty(len(labels))
    for fold in range(int(folds.max()) + 1):
        fitted, held_out = folds != fold, folds == fold
        arrays = model.fit(values[fitted], labels[fitted], weights[fitted], settings)
        logits[held_out] = model.logits(arrays, values[held_out])
    return _loss(labels, logits, weights)


def _loss(labels: IntArray, logits: FloatArray, weights: FloatArray) -> float:
    """Return the weighted mean cross-entropy in nats of log odds (N,)."""
    return float(np.average(np.logaddexp(0, np.where(labels == 1, -logits, logits)), weights=weights))
