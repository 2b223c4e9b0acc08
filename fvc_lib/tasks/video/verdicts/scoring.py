"""Scores of video files by the networks of a finished run, with the run's own eyes.

Files are decoded by the code that makes training clips (``video/clips/worker.py``): the same frames, fit, crop and
normalisation, in isolated processes, so that a bad file costs itself alone. Clips lie on the disk until they are
scored, a batch at a time; no more networks than ``held`` are in memory. Which folds judge a file its caller says: a
fold's network must not judge what it was trained on.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import build_detector, head_of
from fvc_lib.engine.device import (
    Precision,
    clips_in_a_pass,
    deterministic_algorithms,
    filled_up,
    release_cached_memory,
    resolve_device,
)
from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.training_state import weights_digest
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, FvcError, StoppedError, UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FINAL_VALIDATION, PREDICTIONS, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, FINAL_TRAINING
from fvc_lib.tasks.decoding import FileToScore, decoded_files, scratch_folder
from fvc_lib.tasks.predicting import cautions_on_code
from fvc_lib.tasks.recipe import TrainedClass, TrainingOutcome, read_outcome
from fvc_lib.tasks.video.classical.judging import (
    FeatureMeasurer,
    FittedModel,
    fitted_model,
    probe,
)
from fvc_lib.tasks.video.summary import TrainingSummary
from fvc_lib.video.clips.clip_file import Pixels, load_clip_file
from fvc_lib.video.clips.store import ClipStore

FINAL = -1  # in place of a fold's number: the network of all groups
_SAME_LOGIT = 1e-3  # half precision adds up differently in another order
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoldNetwork:
    """One fold's network on the disk, and how its logits become scores.

    Attributes:
        path: of its best weights, with their digest beside.
        weights: hex SHA-256 of them, as their training noted it (``weights_digest``).
        prior_logit: added to its logits; then they are divided by ``temperature``.
        threshold: from this score on a video is called fake.
        base_rate: share of fakes at which its scores are probabilities: that of the inner validation videos; None: not
            known, or they were of one class.
        trained: its class.
    """

    path: Path
    weights: str
    prior_logit: float
    temperature: float
    threshold: float
    base_rate: float | None = None
    trained: TrainedClass | None = None


_MEASURED_AT_ONCE = 64  # files whose features are measured together


class Networks:
    """The networks of a finished training of task video, loaded where they are first needed.

    New videos are judged by those of all folds; where there is a network of all groups (``FINAL``), by it alone.

    Args:
        name: of the run, for messages.
        config: the run's.
        folds: by number.
        built_with: the ``model_weights`` that a network is built with before it is given its own.
        damaged: what to do about weights that are not those of a fold, given the fold.
        held: so many networks are in memory at most; none: all.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        folds: Mapping[int, FoldNetwork],
        *,
        built_with: str,
        damaged: Callable[[int], str],
        held: int | None = 1,
    ) -> None:
        self.name, self.config, self.folds = name, config, folds
        self.compute = resolve_device(config.device, config.amp)
        self._precision = Precision(self.compute)
        self._batch = config.batch_size or DETECTORS.get(config.model).micro_batch
        self._built_with, self._damaged = built_with, damaged
        self._held, self._networks = held or len(folds), OrderedDict[int, nn.Module]()
        self._fitted: dict[int, FittedModel] = {}
        self.remarks: list[str] = []  # sentences on code that has changed, of the networks that were loaded
        self.measurer: FeatureMeasurer | None = None  # where models see forensic features in place of clips
        if config.of_features == "forensic":
            self.measurer = FeatureMeasurer(config, self.store.recipe, Path(config.cache_dir))
            self._batch = _MEASURED_AT_ONCE

    @property
    def store(self) -> ClipStore:
        """What names the run's settings of decoding; nothing is written to it."""
        return ClipStore.of(self.config)

    @property
    def judges(self) -> tuple[int, ...]:
        """The folds whose networks judge new videos, or ``FINAL``."""
        return (FINAL,) if FINAL in self.folds else tuple(sorted(self.folds))

    @property
    def base_rates(self) -> tuple[float | None, ...]:
        """Of each of the judges, as ``FoldNetwork`` has it."""
        return tuple(self.folds[fold].base_rate for fold in self.judges)

    @property
    def batch_size(self) -> int:
        """Clips that are taken to the networks together; a forward pass has ``clips_in_a_pass`` of them."""
        return self._batch

    @cached_property
    def sees_order(self) -> bool:
        """Whether the order of a clip's frames matters to a network: one that looks at motion."""
        if self.measurer is not None:
            return False
        clip = np.random.default_rng(0).integers(0, 256, (1, *self._clip_shape), dtype=np.uint8)
        others = np.concatenate([clip, np.roll(clip, 1, axis=1), clip[:, ::-1]])
        logits = self.raw_logits(self.network(self.judges[0]), np.ascontiguousarray(others))
        return bool(np.ptp(logits) > _SAME_LOGIT * max(1.0, float(np.abs(logits).max())))

    @property
    def _clip_shape(self) -> tuple[int, int, int, int]:
        clips = self.config.clips
        return (clips.num_frames, 3, clips.side, clips.side)

    def weights(self, fold: int) -> str:
        """Hex SHA-256 of the weights of ``fold``, as its training noted it."""
        return self.folds[fold].weights

    def logits(
        self, fold: int, clips: Pixels, features: list[np.ndarray[Any, np.dtype[np.float32]]] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """float64 (V,) of videos uint8 (V, N, T, 3, S, S), N clips each: their mean, on the share of fakes of training.

        From the same forward pass what goes into the network's head is appended to ``features``, where it is given:
        float32 (V, F), the mean over time, or over time and space, and over each video's clips; nothing where that
        is not one row for each clip.

        Raises:
            DataError: the network says nothing finite.
        """
        network, flat, inputs = self.network(fold), clips.reshape(-1, *clips.shape[2:]), list[Tensor]()
        if features is None:
            values = self.raw_logits(network, flat)
        else:
            # They are others where the head sees frames one by one.
            with _head_inputs(network, inputs):
                values = self.raw_logits(network, flat, inputs)
            if sum(map(len, inputs)) == len(flat):
                pooled = torch.cat(inputs)
                features.append(pooled.reshape(len(clips), -1, pooled.shape[-1]).mean(1).numpy())
        values = torch.from_numpy(values).reshape(len(clips), -1).mean(1).numpy()
        if not np.isfinite(values).all():
            raise DataError(f"{self.name}, {name_of(fold)}: the network says nothing finite of a video.")
        return np.asarray(values + self.folds[fold].prior_logit)

    def raw_logits(
        self, network: nn.Module, clips: Pixels, beside: list[Tensor] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """float64 (N,) of clips uint8 (N, T, 3, S, S), as ``network`` gives them; to the bit what each has alone.

        A pass for which there was no memory leaves nothing in ``beside``, which a hook fills.
        """
        flat, found, done = torch.from_numpy(clips), [], 0
        kept, device = 0, self.compute.device
        with torch.inference_mode(), deterministic_algorithms(device):
            while done < len(flat):
                size = clips_in_a_pass(device, self._batch)
                these = flat[done : done + size]
                try:
                    with self._precision.autocast():
                        some = network(filled_up(these, size).to(device))[: len(these)]
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or size == 1:
                        raise
                    if beside is not None:
                        del beside[kept:]
                    self._batch = max(1, self._batch // 2)
                    release_cached_memory(self.compute.device)
                    continue
                if beside is not None:
                    beside[kept:] = [each[: len(these)] for each in beside[kept:]]
                    kept = len(beside)
                found.append(some.double().cpu())
                done += len(some)
        return np.asarray(torch.cat(found).numpy())

    def score(self, fold: int, logit: float) -> float:
        """Return the calibrated probability of fake."""
        return float(probabilities(np.array([logit]), self.folds[fold].temperature)[0])

    def check(self) -> None:
        """Load every network once; raises as ``logits``, where one is damaged or of other code."""
        for fold in self.folds:
            self.network(fold) if self.measurer is None else self.fitted(fold)

    def fitted(self, fold: int) -> FittedModel:
        """Return the model of ``fold`` on forensic features; raise as ``logits``."""
        if fold not in self._fitted:
            self._fitted[fold] = fitted_model(self.folds[fold].path, self._state(fold), self.config)
        return self._fitted[fold]

    def network(self, fold: int) -> nn.Module:
        """Return the network of ``fold``, in evaluation mode on its device; raise as ``logits``."""
        if self.measurer is not None:
            raise UsageError(
                f"{self.name}: model {self.config.model!r} sees features of the whole video and no frames: it has no "
                "scores of windows, and no maps of where a video is called fake."
            )
        if fold not in self._networks:
            while len(self._networks) >= self._held:
                self._networks.popitem(last=False)
            self._networks[fold] = self._loaded(fold)
        self._networks.move_to_end(fold)
        return self._networks[fold]

    def _loaded(self, fold: int) -> nn.Module:
        """With the weights whose digest the training noted.

        Raises:
            FvcError: the file is damaged or another's.
            UsageError: the network's code has changed, or what it is built with is gone.
        """
        state, wanted = self._state(fold), self.folds[fold]
        if self.config.of_features:
            network = probe(self.config, self._built_with, {name: each.numpy() for name, each in state.items()}).eval()
            return network.to(self.compute.device)
        with forked_random_state(0, torch.device("cpu")):
            network = build_detector(self.config.model_copy(update={"model_weights": self._built_with})).eval()
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            told = " ".join(str(error).split())[:300]
            raise UsageError(f"{self.name}: its weights do not fit the network of this version ({told}).") from error
        if wanted.trained is not None:
            remedy = "Bring that code back, or train again."
            for caution in cautions_on_code(self.name, wanted.trained, network, remedy):
                if caution not in self.remarks:
                    self.remarks.append(caution)
                    _logger.warning(caution)
        return network.to(self.compute.device)

    def _state(self, fold: int) -> dict[str, Tensor]:
        path, wanted = self.folds[fold].path, self.folds[fold]
        state = load_weights(path)
        if weights_digest(state) != wanted.weights:
            raise FvcError(
                f"{str(path)!r}: is not what {name_of(fold)} was judged by (its outcome has another digest). "
                f"{self._damaged(fold)}"
            )
        return state


def name_of(fold: int) -> str:
    """``fold 2``, or what ``FINAL`` is called."""
    return "the network of all groups" if fold == FINAL else f"fold {fold}"


class RunNetworks(Networks):
    """Those of a run, best weights of each fold; with ``final`` the network of all groups besides.

    Attributes:
        config: the run's.
        outcomes: of the folds that are there, by number.

    Raises:
        UsageError: the run is of another task, or one of ``folds`` is not finished.
    """

    def __init__(
        self, paths: RunPaths, folds: Collection[int] | None = None, *, held: int | None = 1, final: bool = False
    ) -> None:
        refuse_damaged(paths.root, logs=False)
        self.paths, config = paths, run_config(paths)
        if config.task != DEFAULT_TASK:
            raise UsageError(f"{paths.run_id} is of task {config.task}; videos are scored by runs of {DEFAULT_TASK}.")
        wanted = range(config.num_trainings) if folds is None else sorted(folds)
        found = {fold: read_outcome(paths.fold_outcome(fold), TrainingSummary) for fold in wanted}
        missing = [fold for fold, outcome in found.items() if outcome is None]
        if missing:
            raise UsageError(
                f"{paths.run_id}: fold {', '.join(map(str, missing))} is not finished, so there is no network to ask. "
                f"Name another run, or finish this one: {command_text('--resume', paths.root)}"
            )
        self.outcomes: dict[int, TrainingOutcome[TrainingSummary]] = {f: o for f, o in found.items() if o is not None}
        networks = {
            fold: _fold_network(paths.fold_checkpoints(fold), outcome) for fold, outcome in self.outcomes.items()
        }
        if final:
            of_all = read_outcome(paths.stage_outcome(FINAL_TRAINING), TrainingSummary)
            if of_all is None:
                raise UsageError(
                    f"{paths.run_id} has no network of all groups, or it is not finished. Train it: "
                    f"{command_text('--resume', paths.root, '-p', 'train_final', 'true')}"
                )
            network = _fold_network(paths.stage_training(FINAL_TRAINING), of_all)
            ratio, threshold = held_back(paths, self.outcomes), network.threshold
            if 0 < threshold < 1:  # the same videos above it
                threshold = float(probabilities(np.log([threshold / (1 - threshold)]), ratio)[0])
            networks[FINAL] = replace(network, temperature=network.temperature * ratio, threshold=threshold)
        super().__init__(
            paths.run_id,
            config,
            networks,
            built_with=config.model_weights,
            damaged=lambda fold: (
                "Train it again: " + command_text("--force", "04b" if fold == FINAL else "04", "--resume", paths.root)
            ),
            held=held,
        )


def held_back(paths: RunPaths, folds: Collection[int]) -> float:
    """By what the log odds of the network of all groups are divided, at least 1.

    It is never surer than the folds' networks: of the videos that chose its epoch the median size of its log odds is at
    most that of their out-of-fold log odds. Fitted on few videos that it knows well, its own temperature makes it so.

    Raises:
        UsageError: none of these videos has an out-of-fold score.
    """
    stored = pl.concat([read_table(paths.predictions(fold), PREDICTIONS) for fold in folds])
    stored = stored.select("video_id", out_of_fold=(pl.col("logit") / pl.col("temperature")).abs())
    own = (pl.col("logit") / pl.col("temperature")).abs()
    both = read_table(paths.final_validation, FINAL_VALIDATION).join(stored, on="video_id").select(own, "out_of_fold")
    mine, theirs = both.median().row(0)
    if not both.height:
        raise UsageError(
            f"{paths.run_id}: none of the videos that chose the epoch of the network of all groups is tested by a "
            "fold, so its scores cannot be set beside theirs. Leave --final out."
        )
    return max(1.0, mine / theirs) if theirs else 1.0


def _fold_network(folder: Path, outcome: TrainingOutcome[TrainingSummary]) -> FoldNetwork:
    training = outcome.training
    chosen = training.selection
    return FoldNetwork(
        path=folder / BEST,
        weights=training.best_weights,
        prior_logit=chosen.prior_logit,
        temperature=training.temperature,
        threshold=training.threshold,
        base_rate=chosen.num_fake / chosen.num_videos if chosen.num_real and chosen.num_fake else None,
        trained=outcome.network,
    )


@contextmanager
def _head_inputs(network: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Append to ``found`` what goes into the head in each forward pass, float32 (N, F)."""

    def take(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        features = given[0].detach().float()
        if features.ndim == 3:
            features = features.mean(1)  # (B, T, F)
        elif features.ndim > 3:
            features = features.flatten(2).mean(2)  # (B, F, ...)
        found.append(features.cpu())

    hook = head_of(network).register_forward_pre_hook(take)
    try:
        yield
    finally:
        hook.remove()


# --- Files


@dataclass(frozen=True)
class FileScores:
    """What was found of a file, by fold; or the ``failure`` why nothing was.

    Attributes:
        position: of the file in the list.
        logits: mean over its clips, on the share of fakes of training.
        scores: calibrated probabilities of fake.
        features: where asked for, what goes into the network's head, float32 (F,); none of a network without one.
        lasts: whether the same file would fail again; not so where its worker died or took too long.
    """

    position: int
    logits: Mapping[int, float] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    features: Mapping[int, np.ndarray[Any, np.dtype[np.float32]]] = field(default_factory=dict)
    failure: str = ""
    lasts: bool = True


def score_files(
    networks: Networks,
    files: Sequence[FileToScore],
    *,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
    seen: Callable[[int, Pixels], None] = lambda _position, _clips: None,
) -> Generator[FileScores]:
    """Decode ``files`` and have them judged; what is finished comes at once, in any order.

    Files that one fold judges should stand together: its network is then loaded once.

    Args:
        networks: of the run or bundle.
        files: N.
        workers: processes that decode; 0: one per core.
        stop: asked between batches.
        seen: is given the position of a file and its clips, uint8 (N, T, 3, S, S), before they are judged.

    Raises:
        StoppedError: ``stop`` said so.
        OSError: a clip cannot be written.
        FvcError: as ``Networks`` has it, or the code that decodes was changed since it was loaded here.
    """
    config = networks.config
    waiting: list[int] = []
    if not files:
        return
    with scratch_folder(config) as folder:
        clips = [folder / f"{number}.npy" for number in range(len(files))]
        with closing(decoded_files(networks.store, files, clips, workers=workers)) as answers:
            for answer in answers:
                if stop():
                    raise StoppedError("stopped as asked; what was scored is kept, and the same command goes on")
                if answer.failure:
                    yield FileScores(answer.position, failure=answer.failure, lasts=answer.lasts)
                    continue
                waiting.append(answer.position)
                if len(waiting) * config.clips_per_video >= networks.batch_size:
                    yield from score_clips(networks, files, clips, waiting, seen)
                    waiting = []
            yield from score_clips(networks, files, clips, waiting, seen)


def score_clips(
    networks: Networks,
    files: Sequence[FileToScore] | Mapping[int, FileToScore],
    clips: Sequence[Path],
    positions: Sequence[int],
    seen: Callable[[int, Pixels], None],
    *,
    features: bool = False,
) -> Iterator[FileScores]:
    """Have those ``files`` judged that stand at ``positions``, and whose ``clips`` are there; these go.

    With ``features`` these are told as well, from the same forward pass.
    """
    config, shape = networks.config, networks.store.shape
    found: dict[int, dict[int, float]] = {position: {} for position in positions}
    beside: dict[int, dict[int, np.ndarray[Any, np.dtype[np.float32]]]] = {position: {} for position in positions}
    pixels = np.empty((len(positions), *shape), np.uint8)
    for place, position in enumerate(positions):
        load_clip_file(clips[position], pixels[place], shape)
        clips[position].unlink()
    number = config.clips_per_video
    videos = pixels.reshape(len(positions), number, shape[0] // number, *shape[1:])
    for place, position in enumerate(positions):
        seen(position, videos[place])
    if networks.measurer is not None:
        yield from _score_features(networks, networks.measurer, files, positions)
        return
    for fold in sorted({fold for position in positions for fold in files[position].folds}):
        places = [place for place, position in enumerate(positions) if fold in files[position].folds]
        taken = list[np.ndarray[Any, np.dtype[np.float32]]]() if features else None
        for place, logit in zip(places, networks.logits(fold, videos[places], taken).tolist(), strict=True):
            found[positions[place]][fold] = logit
        for rows in taken or ():
            for place, row in zip(places, rows, strict=True):
                beside[positions[place]][fold] = row
    for position, logits in found.items():
        scores = {fold: networks.score(fold, logit) for fold, logit in logits.items()}
        yield FileScores(position, logits, scores, beside[position])


def _score_features(
    networks: Networks,
    measurer: FeatureMeasurer,
    files: Sequence[FileToScore] | Mapping[int, FileToScore],
    positions: Sequence[int],
) -> Iterator[FileScores]:
    """Judge the files at ``positions`` by their forensic features, measured now; raise as ``Networks``."""
    if any(files[position].recipe for position in positions):
        raise UsageError(
            f"{networks.name}: its model sees features, and disturbed videos are scored by networks alone."
        )
    asked = [(files[position].path, files[position].content_sha256) for position in positions]
    for place, found, failure in measurer.measure(asked):
        position, logits = positions[place], dict[int, float]()
        if failure:
            yield FileScores(position, failure=failure)
            continue
        for fold in files[position].folds:
            logits[fold] = float(networks.fitted(fold).logits([found])[0]) + networks.folds[fold].prior_logit
        yield FileScores(position, logits, {fold: networks.score(fold, logit) for fold, logit in logits.items()})
