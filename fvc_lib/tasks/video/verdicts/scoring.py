"""Score video files with the networks of a finished run, decoded as the run decoded its videos.

Files are decoded in isolated processes, by the code that makes training clips. Clips are on the disk until a batch is
scored. The caller names the folds whose networks judge a file: a network must not judge a video that trained it.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import build_detector, head_of
from fvc_lib.engine.device import (
    Precision,
    clips_in_a_pass,
    deterministic_algorithms,
    filled_up,
    resolve_device,
)
from fvc_lib.engine.step import in_batches
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.decoding import DecodedFile, FileToScore, decoded_files, scratch_folder
from fvc_lib.tasks.predicting import Trained
from fvc_lib.tasks.video.classical import FittedModel, description, fitted_model, forensic_families, probe
from fvc_lib.video.clips.store import ClipStore, Pixels, load_clip_file

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]

FINAL = -1  # stands for the network trained on all groups (none is kept for a test) where a fold's number is expected


@dataclass(frozen=True)
class FoldNetwork:
    """The network of one fold, and the numbers that turn its output into a calibrated probability of fake.

    Attributes:
        trained: the network as stored on the disk.
        prior_logit: number that is added to the network's output.
        temperature: divisor of that sum.
        base_rate: share of fakes among the videos on which the scores were calibrated. None if they were not
            calibrated, or these videos were of one class.
        device: the device of the training; empty in a bundle.
    """

    trained: Trained
    prior_logit: float
    temperature: float
    base_rate: float | None = None
    device: str = ""

    @property
    def weights(self) -> str:
        """Hex SHA-256 of the weights, as recorded by the training."""
        return self.trained.digest


class Networks:
    """The networks of a finished run of task video. A network is loaded when it is first needed, and stays in memory.

    New videos are judged by the networks of all folds. If ``folds`` has a network trained on all groups (``FINAL``),
    that network judges new videos alone.

    Args:
        name: name of the run, for messages.
        config: parameters of the run.
        folds: maps the number of a fold, or ``FINAL``, to its network.
    """

    def __init__(self, name: str, config: RunConfig, folds: Mapping[int, FoldNetwork]) -> None:
        self.name, self.config, self.folds = name, config, folds
        self.compute = resolve_device(config.device, config.amp)
        self._precision = Precision(self.compute)
        self.sees_frames = config.of_features != "forensic"
        self.batch_size = config.batch_size or DETECTORS.get(config.model).micro_batch
        self.families = [family.name for _, family in forensic_families(config)]
        self.measured_by = description(config, {}).get("families", "")  # a digest of the code that measures them
        self._networks: dict[int, Any] = {}
        self._forensic: dict[int, FittedModel] = {}
        self.remarks: dict[str, None] = {}  # cautions on changed code of the networks that were loaded, in order

    @property
    def store(self) -> ClipStore:
        """The clip store of the run, for its decode settings; nothing is written to it."""
        return ClipStore.of(self.config)

    @property
    def judges(self) -> tuple[int, ...]:
        """Numbers of the folds whose networks judge new videos, sorted.

        They are ``(FINAL,)`` if there is a network trained on all groups, which then judges alone.
        """
        return (FINAL,) if FINAL in self.folds else tuple(sorted(self.folds))

    @property
    def digests(self) -> bytes:
        """The SHA-256 of the weights of all networks in ``judges``, 32 bytes each, in that order."""
        digests = (self.folds[fold].weights for fold in self.judges)
        return bytes.fromhex("".join(digests))

    @property
    def base_rates(self) -> tuple[float | None, ...]:
        """The share of fakes on which each network in ``judges`` was calibrated, in that order; None: not known."""
        return tuple(self.folds[fold].base_rate for fold in self.judges)

    def logits(self, folds: Sequence[int], clips: Pixels, features: dict[int, list[Features]] | None = None) -> Floats:
        """Return the logits of V videos by the networks of K ``folds``, float64 (V, K).

        A logit is the mean over the clips of a video, with ``prior_logit`` added. The part of forensic features is not
        included: the caller adds ``forensic_logit`` if the model takes such features. For a model on forensic features
        alone, the returned value is therefore just ``prior_logit``.

        Args:
            folds: the K folds whose networks judge.
            clips: uint8 (V, N, T, 3, S, S), N clips of each of V videos.
            features: a dict from fold to a list, to which one array is appended, float32 (V, F): the inputs of the
                network's head, averaged over time, space and the clips of a video. Nothing is appended if the input of
                the head does not have one row per clip.

        Raises:
            DataError: a network returns values that are not finite.
        """
        inputs = None if features is None else dict[int, list[Tensor]]()
        if not self.sees_frames:
            return np.tile([self.folds[fold].prior_logit for fold in folds], (len(clips), 1))
        all_clips = clips.reshape(-1, *clips.shape[2:])
        values = self.raw_logits(folds, all_clips, inputs)
        if features is not None:
            for fold, parts in (inputs or {}).items():
                rows = torch.cat(parts)
                if len(rows) == len(values):
                    of_videos = rows.reshape(len(clips), -1, rows.shape[-1])
                    features.setdefault(fold, []).append(of_videos.mean(1).numpy())
        values = values.reshape(len(clips), -1, len(folds)).mean(1)
        are_finite = np.isfinite(values).all(0)
        for fold, is_finite in zip(folds, are_finite, strict=True):
            if not is_finite:
                raise DataError(f"{self.name}, {name_of(fold)}: the network returns values that are not finite.")
        return np.asarray(values + [self.folds[fold].prior_logit for fold in folds])

    def raw_logits(self, folds: Sequence[int], clips: Pixels, inputs: dict[int, list[Tensor]] | None = None) -> Floats:
        """Return the outputs of K networks for N clips as float64 (N, K), without ``prior_logit`` and temperature.

        The output for a clip is bit for bit the same, whatever the other clips are.

        Args:
            folds: the K folds whose networks compute.
            clips: uint8 (N, T, 3, S, S).
            inputs: a dict from fold to a list, to which the inputs of the network's head are appended, float32 (B, F)
                for every batch of B clips. None: they are not needed.
        """
        flat = torch.from_numpy(np.ascontiguousarray(clips))
        given = dict[int, Tensor]()
        device = self.compute.device
        networks = {fold: self.network(fold) for fold in folds}

        def note(fold: int, _head: nn.Module, args: tuple[Tensor]) -> None:
            features = args[0].detach().float()  # (B, F), (B, T, F) or (B, F, ...)
            features = features.mean(1) if features.ndim == 3 else features
            features = features.flatten(2).mean(2) if features.ndim > 3 else features
            given[fold] = features.cpu()

        def compute(start: int, size: int) -> Tensor:
            some = flat[start : start + size]
            given.clear()
            with self._precision.autocast():
                batch = filled_up(some, size).to(device)
                outputs = self._outputs(networks.values(), batch)
            for fold, rows in given.items():  # empty where the inputs are not needed
                if inputs is not None and len(rows) == size:
                    inputs.setdefault(fold, []).append(rows[: len(some)])
            return outputs[: len(some)].double().cpu()

        with torch.inference_mode(), deterministic_algorithms(device), ExitStack() as stack:
            for fold, network in networks.items() if inputs is not None else ():
                hook = head_of(network).register_forward_pre_hook(partial(note, fold))
                stack.callback(hook.remove)
            batch_size = clips_in_a_pass(device, self.batch_size)
            logits = list(in_batches(len(flat), batch_size, device, compute))
        return np.asarray(torch.cat(logits).numpy())

    def forensic_logit(self, fold: int, features: Mapping[str, float]) -> float:
        """Return what forensic features add to the logit of a video by the network of ``fold``; 0 if it takes none.

        Args:
            fold: number of the fold.
            features: the features by column; absent ones count as missing.

        Raises:
            UsageError: the stored model does not fit the features that this installation measures.
        """
        if not self.families:
            return 0.0
        if fold not in self._forensic:
            trained = self.folds[fold].trained
            fitted = fitted_model(trained.weights, trained.state(), self.config)
            self.remarks |= dict.fromkeys(filter(None, [fitted.caution]))
            self._forensic[fold] = fitted
        return float(self._forensic[fold].logits([features])[0])

    def _outputs(self, networks: Collection[Any], frames: Tensor) -> Tensor:
        """Return the outputs of K networks for B clips, (B, K).

        If the networks share a frozen trunk, the trunk runs only once.
        """
        if not self.config.of_features:
            return torch.stack([network(frames) for network in networks], 1)
        seen = self._trunk(frames)
        return torch.stack([network.logits_of(seen) for network in networks], 1)

    def load(self, folds: Iterable[int]) -> None:
        """Load the networks of ``folds`` now, so that errors such as a missing file are raised early."""
        for fold in folds:
            self.forensic_logit(fold, {})
            if self.sees_frames:
                self.network(fold)

    def network(self, fold: int) -> Any:
        """Return the network of ``fold`` in evaluation mode on its device, loaded at the first call.

        Raises:
            UsageError, FvcError: the network cannot be built, or its weights cannot be loaded (``Trained.built``).
        """
        if fold not in self._networks:
            trained = self.folds[fold].trained
            if self.config.of_features:
                network: Any = probe(self._trunk, self.config, trained.weights, trained.state()).eval()
            else:
                network, cautions = trained.built(lambda: build_detector(self.config))
                self.remarks |= dict.fromkeys(cautions)
            self._networks[fold] = network.to(self.compute.device)
        return self._networks[fold]

    @cached_property
    def _trunk(self) -> Any:
        """The frozen trunk that the networks of all folds share, on its device.

        Only a model on the features of a trunk has one.
        """
        network: Any = build_detector(self.config)
        return network.trunk.eval().to(self.compute.device)


@contextmanager
def half_of_the_cores() -> Iterator[None]:
    """Let torch use half of the cores during the block, because other processes decode on them at the same time.

    A thread per core would be slow: torch's threads wait for one another, also for those whose core is busy decoding.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, available_cores() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def name_of(fold: int) -> str:
    """Return the name of a fold for messages, such as ``fold 2``; ``the network of all groups`` for ``FINAL``."""
    return "the network of all groups" if fold == FINAL else f"fold {fold}"


# --- Files


@dataclass(frozen=True)
class FileScores:
    """The logits of a file, or the ``failure`` that prevented them.

    Attributes:
        position: index of the file in the caller's list of files.
        logits: by number of the fold whose network judges the file, the mean logit over the file's clips, with
            ``prior_logit`` added.
        features: by the same numbers, the inputs of the network's head, float32 (F,); empty if not requested or not
            available.
        failure: why the file has no logits; empty if it was scored.
        lasts: whether another attempt would fail in the same way; False after a crash or a timeout.
    """

    position: int
    logits: dict[int, float] = field(default_factory=dict)
    features: dict[int, Features] = field(default_factory=dict)
    failure: str = ""
    lasts: bool = True


def score_files(networks: Networks, files: Sequence[FileToScore], *, workers: int = 0) -> Generator[FileScores]:
    """Decode and score ``files``; yield the result of a file as soon as it is computed, in any order.

    Sort ``files`` by fold, so that the network of a fold is loaded only once.

    Args:
        networks: the networks of a run or bundle.
        files: the files, with the folds that judge them.
        workers: number of processes that decode; 0: one per core.

    Raises:
        OSError: a clip cannot be written.
        FvcError: a network returns values that are not finite, or the decoding code was changed after it was loaded.
    """
    if not files:
        return
    with scratch_folder(networks.config) as folder:
        clips = [folder / f"{number}.npy" for number in range(len(files))]
        with closing(decoded_files(networks.store, files, clips, networks.families, workers=workers)) as answers:
            yield from score_decoded(networks, files, clips, answers)


def score_decoded(
    networks: Networks,
    files: Sequence[FileToScore],
    clips: Sequence[Path],
    answers: Iterable[DecodedFile],
    **options: Any,
) -> Iterator[FileScores]:
    """Yield the scores of ``files`` in batches, while they are decoded; a file without a clip has a failure.

    Args:
        networks: the networks of a run or bundle.
        files: the files, with the folds that judge them.
        clips: their clip files.
        answers: the results of decoding them, in any order.
        options: the arguments ``seen`` and ``features`` of ``score_clips``.

    Raises:
        FvcError: a network returns values that are not finite.
    """
    waiting: dict[int, tuple[FileToScore, DecodedFile]] = {}
    for answer in answers:
        if answer.failure:
            yield FileScores(answer.position, failure=answer.failure, lasts=answer.lasts)
            continue
        waiting[answer.position] = files[answer.position], answer
        if len(waiting) * networks.config.clips_per_video >= networks.batch_size:
            yield from score_clips(networks, waiting, clips, **options)
            waiting = {}
    yield from score_clips(networks, waiting, clips, **options)


def score_clips(
    networks: Networks,
    files: Mapping[int, tuple[FileToScore, DecodedFile]],
    clips: Sequence[Path],
    *,
    seen: Callable[[int, Pixels], None] = lambda _position, _clips: None,
    features: bool = False,
) -> Iterator[FileScores]:
    """Yield the scores of decoded ``files``, and delete their clip files.

    Args:
        networks: the networks of a run or bundle.
        files: the files with the results of decoding them, by their position in ``clips``.
        clips: clip files; ``clips[position]`` belongs to ``files[position]``.
        seen: called with the position and the clips of each file, uint8 (N, T, 3, S, S), before it is judged.
        features: whether the results also have the inputs of the networks' heads.

    Raises:
        FvcError: a network returns values that are not finite.
    """
    positions = list(files)
    shape = networks.store.shape
    number = networks.config.clips_per_video
    frames_per_clip = shape[0] // number
    videos = np.empty((len(files), number, frames_per_clip, *shape[1:]), np.uint8)
    for video, position in zip(videos, positions, strict=True):
        load_clip_file(clips[position], video.reshape(shape), shape)
        clips[position].unlink()
        seen(position, video)
    scores = [FileScores(position, {}, {}) for position in positions]
    for folds in sorted({file.folds for file, _ in files.values()}):
        rows = [row for row, position in enumerate(positions) if files[position][0].folds == folds]
        heads = dict[int, list[Features]]() if features else None
        of_rows = networks.logits(folds, videos[rows], heads).tolist()
        for row, logits in zip(rows, of_rows, strict=True):
            _, decoded = files[positions[row]]
            for fold, logit in zip(folds, logits, strict=True):
                forensic_logit = networks.forensic_logit(fold, decoded.forensic)
                scores[row].logits[fold] = logit + forensic_logit
        for fold, (part,) in (heads or {}).items():
            for row, head in zip(rows, part, strict=True):
                scores[row].features[fold] = head
    yield from scores
