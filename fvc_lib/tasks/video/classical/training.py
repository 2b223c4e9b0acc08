"""One outer fold of a model on features: settings chosen on inner folds of groups, the outer fold looked at once.

Parts, seal, controls, calibration, threshold and tables are a network's (``tasks/video/training.py``). In place of
epochs there are candidate settings: each is fitted to inner folds of the training part's groups, the one of the lowest
loss is fitted to the whole training part, and the inner validation part, of which it has seen nothing, chooses
temperature and threshold. There is no optimizer's step, micro-batch, accelerator or checkpoint: a training that was
stopped keeps the losses of the candidates that were done.
"""

import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from fvc_lib.corpus.folds import make_folds, most_folds
from fvc_lib.detectors.classical.model import Arrays, ClassicalModel, Part
from fvc_lib.engine.memory import ControlMemory
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.training_state import MetricSink, weights_digest
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray, balanced_accuracy, decide, roc_auc
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.checkpoint_files import BEST, load_weights, write_weights_with_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError, command_text
from fvc_lib.services.memory.budget import peak_rss_bytes
from fvc_lib.services.memory.policy import MemoryObserver, NoObserver
from fvc_lib.services.records.digests import read_document, write_document
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
from fvc_lib.tasks.video.classical.embeddings import embeddings_of
from fvc_lib.tasks.video.classical.judging import description
from fvc_lib.tasks.video.classical.table import read_features, refuse_settings
from fvc_lib.tasks.video.data import FoldClips
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
_FIT = "fit.json"  # in the folder of a training: losses of the candidates that are done, and what they belong to
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeatureFold:
    """One outer fold as numbers: where they are, the fold, and that of each control by name."""

    source: Any  # FeatureTable, or EmbeddedClips with the same methods
    clips: FoldClips
    controls: dict[str, FoldClips]


@dataclass(frozen=True)
class Fitted:
    """A fitted model whose outer fold was not looked at yet."""

    arrays: Arrays
    candidates: tuple[Candidate, ...]
    chosen: int
    seconds: float

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors, by name."""
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.arrays.items()}


def read_feature_fold(
    paths: RunPaths, config: RunConfig, fold: int, *, stop: Callable[[], bool] = lambda: False
) -> FeatureFold:
    """What ``config`` fits a model to in ``fold``; raises as ``data.read_fold`` and ``read_features``."""
    refuse_settings(config)
    if config.of_features == "embedding":
        return FeatureFold(*embeddings_of(paths, config, fold, stop))
    source = read_features(paths, config)
    # Altered copies are of clips, which such a model does not see.
    of_videos = config.model_copy(update={"augmentations_per_video": 0})
    return FeatureFold(*data.read_fold(paths, of_videos, fold, source=source))


def train_on_features(
    paths: RunPaths, config: RunConfig, fold: int, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingSummary]:
    """Fit and score outer fold ``fold`` (0-based); arguments and files as of ``train_fold``.

    Raises:
        StoppedError: as asked, between two candidates; those that are done are not measured again.
        DataError: as ``train_fold``.
        UsageError: settings that only a network has a use for.
    """
    log, memory = options["metric_log"], options.get("memory") or NoObserver()
    stop, progress = options.get("stop") or (lambda: False), options.get("progress")
    memory.at("setup")
    read = read_feature_fold(paths, config, fold, stop=stop)
    folder, parameters = paths.training_checkpoints(STAGE, fold), training_parameters(config, fold)
    model: ClassicalModel = DETECTORS.get(config.model).build()  # type: ignore[misc]  # a model on features has it
    kind = described(model, config, read.source)
    fingerprint = sha256_of_json([parameters, read.clips.fingerprint])
    found = read_outcome(folder / "outcome.json", TrainingSummary)
    if found is not None and found.fingerprint == fingerprint and paths.predictions(fold).exists():
        return replace(found, train_anew=command_text("--force", STAGE[:2], "--resume", paths.root))
    paths.stage_checkpoint(STAGE, fold).unlink(missing_ok=True)  # it lists files that are written from here on
    every = {"": read.clips, **read.controls}
    _logger.info("%s: %s", stage_key(STAGE, fold), kind.sentences())
    fitted: dict[str, Fitted] = {}
    chosen: dict[str, RecordedSelection] = {}
    inner: dict[str, FloatArray] = {}
    for number, (name, clips) in enumerate(every.items()):
        observer = ControlMemory(memory, name) if name else memory
        fitter = _Fitter(
            model, read.source, clips, config, folder / name, ControlLog(log, name) if name else log, observer,
            sha256_of_json([parameters, clips.fingerprint]), stop,
            _part(progress, number, len(every)),
        )  # fmt: skip
        fitted[name] = fitter.fit()
        chosen[name], inner[name] = fitter.choose(fitted[name])
    # Only now, when all that was chosen is on the disk, is the outer fold looked at.
    memory.at("test")
    scored = {
        name: _score(model, read.source, clips, fitted[name], chosen[name], ControlLog(log, name) if name else log)
        for name, clips in every.items()
    }
    memory.at("report")
    validation = validation_table(fold, read.clips, inner[""], chosen[""])
    write_table(validation, VALIDATION_PREDICTIONS, paths.validation_predictions(fold))
    write_table(predictions_table(fold, scored), PREDICTIONS, paths.predictions(fold))
    records = {name: each.summary for name, each in scored.items()}
    clips = read.clips
    outcome = TrainingOutcome(
        fold=fold,
        model=config.model,
        num_parameters=_num_parameters(fitted[""].arrays),
        device="cpu",
        num_train=len({row.video_id for row in clips.train}),
        num_train_samples=len(clips.train),
        num_validation=len(clips.validation),
        num_test=len(clips.test),
        missing=clips.missing,
        training=records[""],
        control=records.get(SHUFFLED_LABELS),
        sources=records.get(REAL_SOURCES),
        predicted_peak_bytes=None,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=None,
        fingerprint=fingerprint,
        finished_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        network=replace(kind, num_parameters=_num_parameters(fitted[""].arrays)),
    )
    write_text(folder / "outcome.json", outcome_to_json(outcome))
    return outcome


@dataclass(frozen=True)
class FeatureLook:
    """What a model on features is about to see and to choose from, told as ``FirstStep`` tells of a network."""

    said: str
    families: pl.DataFrame
    candidates: pl.DataFrame
    setup: tuple[str, ...] = ("a model on features: no steps, micro-batches or accelerator, so no memory is planned",)
    batch: None = None

    def sentence(self) -> str:
        """The model, its features and how many rows it is fitted to."""
        return self.said

    def network_table(self) -> pl.DataFrame:
        """Columns family, features, missing_share of the training part."""
        return self.families

    def tensor_table(self) -> pl.DataFrame:
        """Column settings, the candidates."""
        return self.candidates


def look_at_features(paths: RunPaths, config: RunConfig, fold: int) -> FeatureLook:
    """Of training ``fold``, before anything is fitted; raises as ``train_on_features``."""
    read = read_feature_fold(paths, config, fold)
    model: ClassicalModel = DETECTORS.get(config.model).build()  # type: ignore[misc]
    families, missing = np.array(read.source.families), np.isnan(read.source.of(read.clips.train))
    rows = [
        (family, int((families == family).sum()), float(missing[:, families == family].mean()))
        for family in dict.fromkeys(families.tolist())
    ]
    known = {"family": pl.String, "features": pl.Int64, "missing_share": pl.Float64}
    settings = [settings_text(each) for each in model.candidates(len(read.clips.train))]
    kind = described(model, config, read.source)
    said = f"{config.model} ({kind.name.rpartition('.')[2]}) on {len(read.clips.train)} rows. {kind.sentences()}"
    return FeatureLook(said, pl.DataFrame(rows, schema=known, orient="row"), pl.DataFrame({"settings": settings}))


def described(model: ClassicalModel, config: RunConfig, source: Any) -> TrainedClass:
    """Which class is fitted, to how many features, and by which packages."""
    kind, spec = type(model), DETECTORS.get(config.model)
    families = dict.fromkeys(source.families)
    fitters = {name: name for name in spec.packages} if config.of_features == "forensic" else {}
    fitters = fitters or {"sklearn": "scikit-learn"}
    by = ", ".join(f"{name} {import_module(package).__version__}" for package, name in fitters.items())
    note = f"{len(source.names):,} features of {', '.join(families)}; fitted by {by} in one piece, on the CPU"
    return TrainedClass(f"{kind.__module__}.{kind.__qualname__}", inspect.getfile(kind), "", 0, notes=(note,))


def _num_parameters(arrays: Arrays) -> int:
    """Numbers that were learned, what fills in and scales features included."""
    return int(sum(array.size for array in arrays.values() if array.dtype.kind == "f"))


@dataclass(frozen=True)
class _Fitter:
    """Fits one model, or one of its controls."""

    model: ClassicalModel
    source: Any
    clips: FoldClips
    config: RunConfig
    folder: Path
    log: MetricSink
    memory: MemoryObserver
    fingerprint: str
    stop: Callable[[], bool]
    progress: Callable[[int, int], None] | None

    def fit(self) -> Fitted:
        """Choose settings on inner folds of groups and fit the whole training part with them; or what is there of it.

        Raises:
            StoppedError: as asked.
        """
        began, done = time.monotonic(), self._done()
        self.memory.at("train", epoch=1)
        part = self._part()
        settings = list(self.model.candidates(len(part.labels)))
        losses, folds = list(done.get("losses", ())), self._inner_folds(part)
        for number in range(len(losses), len(settings)):
            self._stop_or_go_on(number, len(settings))
            losses.append(self._inner_loss(part, folds, settings[number]))
            self._note(losses)
            self.log.log(step=number + 1, epoch=1, phase="candidates", metrics={"inner_loss": losses[-1]})
        self._stop_or_go_on(len(settings), len(settings))
        known = np.array([loss if math.isfinite(loss) else math.inf for loss in losses])
        chosen = int(known.argmin())  # the plainest of equals; the plainest of all where nothing was measured
        arrays = self._stored(done) or self.model.fit(part, settings[chosen])
        candidates = tuple(Candidate(dict(each), loss) for each, loss in zip(settings, losses, strict=True))
        fitted = Fitted(arrays, candidates, chosen, time.monotonic() - began)
        digest = weights_digest(fitted.state)
        told = description(self.config, settings[chosen], self.source.names)
        write_weights_with_digest(self.folder / BEST, fitted.state, told)
        self._note(losses, weights=digest)
        if self.progress:
            self.progress(len(settings) + 1, len(settings) + 1)
        return fitted

    def choose(self, fitted: Fitted) -> tuple[RecordedSelection, FloatArray]:
        """Temperature and threshold from the inner validation part, put on record with the settings; and its logits."""
        self.memory.at("validation", epoch=1)
        clips, config = self.clips, self.config
        labels = np.array([row.label for row in clips.validation])
        logits = self.model.logits(fitted.arrays, self.source.of(clips.validation))
        loss = _loss(labels, logits, self._weights_of(labels))
        prior = data.prior_logit(clips.train, config.class_balance)
        found = select_calibration(
            labels, logits + prior, clips.num_validation_groups, validation_loss=loss, prior_logit=prior,
            point=config.operating_point,
        )  # fmt: skip
        settings = fitted.candidates[fitted.chosen].settings
        found = replace(found, settings=settings, num_candidates=len(fitted.candidates))
        kept = record_selection(self.folder, RecordedSelection(found, clips.fingerprint, digest_of_state(fitted.state)))
        told = asdict(kept.selection)
        self.log.log(step=0, epoch=1, phase="validation", metrics={"loss": loss})
        self.log.log(
            step=0, epoch=1, phase="selection",
            metrics={name: told[name] for name in ("temperature", "threshold", "log_loss")},
        )  # fmt: skip
        return kept, logits + prior

    def _part(self) -> Part:
        rows = self.clips.train
        labels = np.array([row.label for row in rows])
        groups = np.array([self.clips.groups[row.video_id] for row in rows])
        seed = stable_seed("fold", self.config.seed, self.clips.fold or 0) % 2**32
        return Part(self.source.of(rows), labels, self._weights_of(labels), groups, seed)

    def _weights_of(self, labels: npt.NDArray[np.int64]) -> FloatArray:
        """(N,) as a network's loss has them: mean 1 over the training part, both classes of equal influence."""
        balanced = self.config.class_balance == "loss"
        weights = np.array(data.class_weights(self.clips.train) if balanced else (1.0, 1.0))
        found: FloatArray = weights[labels]
        return found

    def _inner_folds(self, part: Part) -> npt.NDArray[np.int64] | None:
        """(N,), the inner fold of each row, groups whole; None where a class has fewer than two groups."""
        videos = dict(zip((row.video_id for row in self.clips.train), part.labels.tolist(), strict=True))
        rows = pl.DataFrame(
            {
                "video_id": list(videos),
                "group_id": [self.clips.groups[video_id] for video_id in videos],
                "label": [LABELS[label] for label in videos.values()],
            }
        )
        number = min(INNER_FOLDS, most_folds(rows))
        if number < 2:
            return None
        folds = make_folds(rows, number, stable_seed("inner folds", self.config.seed) % 2**32)
        fold_of = dict(folds.select("video_id", "fold").iter_rows())
        return np.array([fold_of[row.video_id] for row in self.clips.train])

    def _inner_loss(self, part: Part, folds: npt.NDArray[np.int64] | None, settings: Mapping[str, float]) -> float:
        if folds is None:
            return math.nan
        logits = np.empty(len(part.labels))
        for fold in range(int(folds.max()) + 1):
            arrays = self.model.fit(part.only(folds != fold), settings)
            logits[folds == fold] = self.model.logits(arrays, part.values[folds == fold])
        return _loss(part.labels, logits, part.weights)

    def _stop_or_go_on(self, done: int, planned: int) -> None:
        if self.stop():
            raise StoppedError(
                f"stopped as asked with {done} of {planned} candidate settings measured, which are kept: resume the "
                "run to go on."
            )
        if self.progress:
            self.progress(done, planned + 1)

    def _done(self) -> dict[str, Any]:
        note = read_document(self.folder / _FIT)
        return note if note.get("fingerprint") == self.fingerprint else {}

    def _note(self, losses: list[float], weights: str = "") -> None:
        shown = [loss if math.isfinite(loss) else None for loss in losses]
        write_document(self.folder / _FIT, {"fingerprint": self.fingerprint, "losses": shown, "weights": weights})

    def _stored(self, done: Mapping[str, Any]) -> Arrays:
        """The model that an earlier attempt fitted; nothing where it did not, or its file is damaged."""
        try:
            state = load_weights(self.folder / BEST) if done.get("weights") else {}
        except (FvcError, OSError) as error:
            _logger.warning("%s: %s It is fitted again.", self.folder / BEST, error)
            return {}
        intact = bool(state) and weights_digest(state) == done["weights"]
        return {name: tensor.numpy() for name, tensor in state.items()} if intact else {}


def _loss(labels: npt.NDArray[np.int64], logits: FloatArray, weights: FloatArray) -> float:
    """Weighted mean cross-entropy in nats of log odds ``logits`` (N,)."""
    return float(np.average(np.logaddexp(0, np.where(labels == 1, -logits, logits)), weights=weights))


def _score(
    model: ClassicalModel, source: Any, clips: FoldClips, fitted: Fitted, recorded: RecordedSelection, log: MetricSink
) -> Scored:
    """Open the outer fold, which takes a selection on record, and score it."""
    chosen, outer = recorded.selection, clips.test.open(recorded)
    labels = np.array([row.label for row in outer.rows])
    logits = model.logits(fitted.arrays, source.of(outer.rows)) + chosen.prior_logit
    scores = probabilities(logits, chosen.temperature)
    decisions = decide(scores, chosen.threshold)
    measured = {"roc_auc": roc_auc(labels, scores), "balanced_accuracy": balanced_accuracy(labels, decisions)}
    log.log(step=0, epoch=1, phase="test", metrics=measured)
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
        seen=tuple(source.names),
    )
    return Scored(summary, outer, logits, scores, logits[:, None])


def _part(progress: Callable[[int, int], None] | None, number: int, count: int) -> Callable[[int, int], None] | None:
    """Progress of training ``number`` of ``count`` as its part of the whole."""
    if progress is None:
        return None
    return lambda done, planned: progress(number * planned + done, count * planned)
