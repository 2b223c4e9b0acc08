"""Score video files by the networks of a finished training, decoded as the run decoded its own videos.

Files are decoded by the code that makes training clips, in isolated processes. Clips lie on the disk until a batch is
scored. The caller names the folds that judge a file: a fold's network must not judge what it was trained on.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
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
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FINAL_VALIDATION, PREDICTIONS, read_table
from fvc_lib.services.tasks import DEFAULT_TASK, FINAL_TRAINING
from fvc_lib.tasks.decoding import FileToScore, decoded_files, scratch_folder
from fvc_lib.tasks.predicting import Trained
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.video.classical.judging import FittedModel, fitted_model, measured_features, probe
from fvc_lib.tasks.video.summary import TrainingSummary
from fvc_lib.video.clips.clip_file import Pixels, load_clip_file
from fvc_lib.video.clips.store import ClipStore

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]

FINAL = -1  # the network of all groups, in place of a fold's number
_SAME_LOGIT = 1e-3  # half precision adds up differently in another order
_MEASURED_AT_ONCE = 64  # files whose features are measured together
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoldNetwork:
    """One fold's network, and how its logits become scores.

    Attributes:
        trained: the network on the disk.
        prior_logit: added to its logits, which are then divided by ``temperature``.
        threshold: the lowest score of a video that is called fake.
        base_rate: share of fakes at which its scores are probabilities, that of the inner validation videos; None: not
            known, or they were of one class.
        device: of its training; empty of a bundle.
    """

    trained: Trained
    prior_logit: float
    temperature: float
    threshold: float
    base_rate: float | None = None
    device: str = ""

    @property
    def weights(self) -> str:
        """Hex SHA-256 of its weights, as the training noted it."""
        return self.trained.digest


class Networks:
    """The networks of a finished training of task video, each loaded when it is first needed.

    New videos are judged by those of all folds, or by the network of all groups (``FINAL``) alone where it is there.

    Args:
        name: of the run, for messages.
        config: the run's.
        folds: by number.
        held: the most networks in memory at once; None: all.
    """

    def __init__(self, name: str, config: RunConfig, folds: Mapping[int, FoldNetwork], *, held: int | None = 1) -> None:
        self.name, self.config, self.folds = name, config, folds
        self.compute = resolve_device(config.device, config.amp)
        self._precision = Precision(self.compute)
        self.batch_size = config.batch_size or DETECTORS.get(config.model).micro_batch
        self._held, self._networks = held or len(folds), OrderedDict[int, nn.Module]()
        self._fitted: dict[int, FittedModel] = {}
        self.remarks: list[str] = []  # cautions on changed code of the networks that were loaded
        self.sees_frames = config.of_features != "forensic"
        if not self.sees_frames:
            self.batch_size = _MEASURED_AT_ONCE

    @property
    def store(self) -> ClipStore:
        """The run's settings of decoding; nothing is written to it."""
        return ClipStore.of(self.config)

    @property
    def judges(self) -> tuple[int, ...]:
        """The folds whose networks judge new videos, or ``FINAL``."""
        return (FINAL,) if FINAL in self.folds else tuple(sorted(self.folds))

    @property
    def base_rates(self) -> tuple[float | None, ...]:
        """The base rate of each judge."""
        return tuple(self.folds[fold].base_rate for fold in self.judges)

    @cached_property
    def sees_order(self) -> bool:
        """Whether a network's answer depends on the order of a clip's frames, as one that looks at motion."""
        if not self.sees_frames:
            return False
        clips = self.config.clips
        shape = (1, clips.num_frames, 3, clips.side, clips.side)
        clip = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        others = np.concatenate([clip, np.roll(clip, 1, axis=1), clip[:, ::-1]])
        logits = self.raw_logits(self.network(self.judges[0]), np.ascontiguousarray(others))
        return bool(np.ptp(logits) > _SAME_LOGIT * max(1.0, float(np.abs(logits).max())))

    def logits(self, fold: int, clips: Pixels, features: list[Features] | None = None) -> Floats:
        """Return the mean logit of each video, float64 (V,), at the training's share of fakes.

        Args:
            fold: whose network judges.
            clips: uint8 (V, N, T, 3, S, S), N clips of each video.
            features: receives the inputs of the network's head from the same pass: float32 (V, F), the mean over time
                and space and over each video's clips. It receives nothing where these are not one row per clip.

        Raises:
            DataError: the network returns values that are not finite.
        """
        network, flat, inputs = self.network(fold), clips.reshape(-1, *clips.shape[2:]), list[Tensor]()
        with ExitStack() as stack:
            if features is not None:
                stack.enter_context(_head_inputs(network, inputs))
            values = self.raw_logits(network, flat, inputs)
        if features is not None and sum(map(len, inputs)) == len(flat):  # more, where the head sees single frames
            pooled = torch.cat(inputs)
            features.append(pooled.reshape(len(clips), -1, pooled.shape[-1]).mean(1).numpy())
        values = torch.from_numpy(values).reshape(len(clips), -1).mean(1).numpy()
        if not np.isfinite(values).all():
            raise DataError(f"{self.name}, {name_of(fold)}: the network returns values that are not finite.")
        return np.asarray(values + self.folds[fold].prior_logit)

    def raw_logits(self, network: nn.Module, clips: Pixels, inputs: list[Tensor] | None = None) -> Floats:
        """Return what ``network`` gives of clips uint8 (N, T, 3, S, S), float64 (N,); to the bit as of each alone.

        A hook may fill ``inputs`` with a row per clip; rows of a pass that ran out of memory are removed.
        """
        flat, found, done = torch.from_numpy(clips), list[Tensor](), 0
        inputs, passes, device = [] if inputs is None else inputs, 0, self.compute.device
        with torch.inference_mode(), deterministic_algorithms(device):
            while done < len(flat):
                size = clips_in_a_pass(device, self.batch_size)
                these = flat[done : done + size]
                try:
                    with self._precision.autocast():
                        some = network(filled_up(these, size).to(device))[: len(these)]
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or size == 1:
                        raise
                    del inputs[passes:]
                    self.batch_size = max(1, self.batch_size // 2)
                    release_cached_memory(device)
                    continue
                inputs[passes:] = [each[: len(these)] for each in inputs[passes:]]
                passes = len(inputs)
                found.append(some.double().cpu())
                done += len(some)
        return np.asarray(torch.cat(found).numpy())

    def score(self, fold: int, logit: float) -> float:
        """Return the calibrated probability of fake."""
        return float(probabilities(np.array([logit]), self.folds[fold].temperature)[0])

    def check(self) -> None:
        """Load every network once; raise as ``Trained.built``."""
        for fold in self.folds:
            self.network(fold) if self.sees_frames else self.fitted(fold)

    def fitted(self, fold: int) -> FittedModel:
        """Return the model of ``fold`` on forensic features; raise as ``Trained.state``."""
        if fold not in self._fitted:
            trained = self.folds[fold].trained
            self._fitted[fold] = fitted_model(trained.weights, trained.state(), self.config)
        return self._fitted[fold]

    def network(self, fold: int) -> nn.Module:
        """Return the network of ``fold``, in evaluation mode on its device; raise as ``Trained.built``."""
        if not self.sees_frames:
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
        trained = self.folds[fold].trained
        if self.config.of_features:
            arrays = {name: each.numpy() for name, each in trained.state().items()}
            return probe(self.config, arrays).eval().to(self.compute.device)
        network, cautions = trained.built(lambda: build_detector(self.config))
        for caution in cautions:
            if caution not in self.remarks:
                self.remarks.append(caution)
                _logger.warning(caution)
        return network.to(self.compute.device)


def name_of(fold: int) -> str:
    """Return ``fold 2``, or the name of ``FINAL``."""
    return "the network of all groups" if fold == FINAL else f"fold {fold}"


def networks_of_run(
    paths: RunPaths, folds: Collection[int] | None = None, *, held: int | None = 1, final: bool = False
) -> Networks:
    """Return the networks of a run's ``folds`` (None: all); with ``final`` the network of all groups, too.

    Raises:
        UsageError: the run is of another task, or one of its trainings is not finished.
        DataError: a file of the run is damaged.
    """
    refuse_damaged(paths.root, logs=False)
    config = run_config(paths)
    if config.task != DEFAULT_TASK:
        raise UsageError(f"{paths.run_id} is of task {config.task}; videos are scored by runs of {DEFAULT_TASK}.")
    wanted = range(config.num_trainings) if folds is None else sorted(folds)
    if missing := [fold for fold in wanted if read_outcome(paths.fold_outcome(fold), TrainingSummary) is None]:
        raise UsageError(
            f"{paths.run_id}: fold {', '.join(map(str, missing))} is not finished, so there is no network to ask. "
            f"Name another run, or finish this one: {command_text('--resume', paths.root)}"
        )
    networks = {fold: _fold_network(paths, config, fold) for fold in wanted}
    if final:
        network, ratio = _fold_network(paths, config, FINAL), held_back(paths, networks)
        if 0 < (threshold := network.threshold) < 1:  # the same videos above it
            threshold = float(probabilities(np.log([threshold / (1 - threshold)]), ratio)[0])
        networks[FINAL] = replace(network, temperature=network.temperature * ratio, threshold=threshold)
    return Networks(paths.run_id, config, networks, held=held)


def _fold_network(paths: RunPaths, config: RunConfig, fold: int) -> FoldNetwork:
    """Return the network of one finished training; raise ``UsageError`` where that of all groups is not finished."""
    is_final = fold == FINAL
    file = paths.stage_outcome(FINAL_TRAINING) if is_final else paths.fold_outcome(fold)
    outcome = read_outcome(file, TrainingSummary)
    if outcome is None:
        raise UsageError(
            f"{paths.run_id} has no network of all groups, or it is not finished. Train it: "
            f"{command_text('--resume', paths.root, '-p', 'train_final', 'true')}"
        )
    training = outcome.training
    chosen = training.selection
    trained = Trained(
        name=f"{paths.run_id}, {name_of(fold)}",
        config=config,
        weights=(paths.stage_training(FINAL_TRAINING) if is_final else paths.fold_checkpoints(fold)) / BEST,
        digest=training.best_weights,
        network=outcome.network,
        remedy=f"Train it again: {command_text('--force', '04b' if is_final else '04', '--resume', paths.root)}",
    )
    rate = chosen.num_fake / chosen.num_videos if chosen.num_real and chosen.num_fake else None
    return FoldNetwork(
        trained, chosen.prior_logit, training.temperature, training.threshold, rate, device=outcome.device
    )


def held_back(paths: RunPaths, folds: Collection[int]) -> float:
    """Return the number, at least 1, that divides the log odds of the network of all groups.

    It makes that network no surer than the folds': over the videos that chose its epoch the median size of its log odds
    is at most that of their out-of-fold log odds. Its own temperature was fitted on few videos that it knows well.

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
            "fold, so its scores cannot be compared with theirs. Leave --final out."
        )
    return max(1.0, mine / theirs) if theirs else 1.0


@contextmanager
def _head_inputs(network: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Append the inputs of the head in each forward pass to ``found``, float32 (N, F)."""

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
    """The logits of a file by fold, or the ``failure`` that prevented them.

    Attributes:
        position: of the file in the list.
        logits: the mean over its clips, at the training's share of fakes.
        features: the inputs of each network's head, float32 (F,), where asked for and known.
        lasts: whether another attempt would fail the same; False after a crash or a timeout.
    """

    position: int
    logits: Mapping[int, float] = field(default_factory=dict)
    features: Mapping[int, Features] = field(default_factory=dict)
    failure: str = ""
    lasts: bool = True


def score_files(
    networks: Networks, files: Sequence[FileToScore], *, workers: int = 0, stop: Callable[[], bool] = lambda: False
) -> Generator[FileScores]:
    """Decode and score ``files``; yield each as soon as it is known, in any order.

    Put files of one fold together: its network is then loaded once.

    Args:
        networks: of the run or bundle.
        files: N.
        workers: processes that decode; 0: one per core.
        stop: asked between batches.

    Raises:
        StoppedError: ``stop`` returned True.
        OSError: a clip cannot be written.
        FvcError: as ``Networks.logits``, or the code that decodes was changed since it was loaded here.
    """
    waiting: dict[int, FileToScore] = {}
    if not files:
        return
    with scratch_folder(networks.config) as folder:
        clips = [folder / f"{number}.npy" for number in range(len(files))]
        with closing(decoded_files(networks.store, files, clips, workers=workers)) as answers:
            for answer in answers:
                if stop():
                    raise StoppedError("stopped as asked; what was scored is kept, and the same command goes on")
                if answer.failure:
                    yield FileScores(answer.position, failure=answer.failure, lasts=answer.lasts)
                    continue
                waiting[answer.position] = files[answer.position]
                if len(waiting) * networks.config.clips_per_video >= networks.batch_size:
                    yield from score_clips(networks, waiting, clips)
                    waiting = {}
            yield from score_clips(networks, waiting, clips)


def score_clips(
    networks: Networks,
    files: Mapping[int, FileToScore],
    clips: Sequence[Path],
    *,
    seen: Callable[[int, Pixels], None] = lambda _position, _clips: None,
    features: bool = False,
) -> Iterator[FileScores]:
    """Yield the scores of decoded ``files``, by their position in ``clips``; their clips are deleted.

    Args:
        networks: of the run or bundle.
        files: by position.
        clips: file of each position.
        seen: called with the position and the clips of each file, uint8 (N, T, 3, S, S), before it is judged.
        features: whether to return the inputs of the heads.
    """
    positions, shape, number = list(files), networks.store.shape, networks.config.clips_per_video
    pixels = np.empty((len(files), *shape), np.uint8)
    for place, position in enumerate(positions):
        load_clip_file(clips[position], pixels[place], shape)
        clips[position].unlink()
    videos = pixels.reshape(len(files), number, shape[0] // number, *shape[1:])
    for place, position in enumerate(positions):
        seen(position, videos[place])
    if not networks.sees_frames:
        yield from _score_features(networks, files)
        return
    found: dict[int, dict[int, float]] = {position: {} for position in positions}
    inputs: dict[int, dict[int, Features]] = {position: {} for position in positions}
    for fold in sorted({fold for file in files.values() for fold in file.folds}):
        places = [place for place, position in enumerate(positions) if fold in files[position].folds]
        taken = list[Features]() if features else None
        for place, logit in zip(places, networks.logits(fold, videos[places], taken).tolist(), strict=True):
            found[positions[place]][fold] = logit
        for rows in taken or ():
            for place, row in zip(places, rows, strict=True):
                inputs[positions[place]][fold] = row
    for position, logits in found.items():
        yield FileScores(position, logits, inputs[position])


def _score_features(networks: Networks, files: Mapping[int, FileToScore]) -> Iterator[FileScores]:
    """Measure the forensic features of ``files`` and judge by them; raise as ``score_files``."""
    if any(file.recipe for file in files.values()):
        raise UsageError(f"{networks.name}: its model sees features; only networks score disturbed videos.")
    positions, todo = list(files), [(file.path, file.content_sha256) for file in files.values()]
    for place, found, failure in measured_features(networks.config, networks.store.recipe, todo):
        position, logits = positions[place], dict[int, float]()
        if not failure:
            for fold in files[position].folds:
                logits[fold] = float(networks.fitted(fold).logits([found])[0]) + networks.folds[fold].prior_logit
        yield FileScores(position, logits, failure=failure)
