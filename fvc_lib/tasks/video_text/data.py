"""Videos with texts as samples: stored clips beside tokens, and numbers that say which of them are the same."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fvc_lib.corpus.video_texts import video_text_root
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import Batch, Sample
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.tasks.video.data import ClipSource
from fvc_lib.video.clips.making import make_originals
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)


def make_clips(
    config: RunConfig,
    pairs: pl.DataFrame,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> tuple[ClipSource, tuple[str, ...]]:
    """Make the clip of every video of ``pairs`` in the shared store, reusing what any run made with these settings.

    Args:
        config: ``num_frames`` and ``fixed_size`` decide the clips, ``corpus`` and ``data_dir`` where the videos lie.
        pairs: a VIDEO_TEXTS table.
        progress: called with (videos done, videos in all).
        stop: asked after each video.

    Returns:
        Where the clips are read from, uint8 (num_frames, 3, fixed_size, fixed_size) each; and the ids of the videos
        that have none, sorted. What is wrong with each of those is logged.

    Raises:
        DataError: more than ``max_rejected_share`` of the videos have no clip; the first are named.
        StoppedError: ``stop`` said so; what was made is kept.
        OSError: clips cannot be written.
    """
    videos = pairs.unique("video_id", keep="first", maintain_order=True).sort("video_id")

    def watched(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        if stop is not None and done < total and stop():
            raise StoppedError(f"stopped after the clips of {done} of {total} videos; run it again to go on.")

    store = ClipStore.of(config)
    report = make_originals(store, videos, video_text_root(config), progress=watched, workers=config.probe_workers)
    for video_id, reason in report.failed:
        _logger.warning("video %s has no clip and takes no part: %s", video_id, reason)
    if len(report.failed) > config.max_rejected_share * videos.height:
        reasons = " ".join(reason for _, reason in report.failed[:3])
        raise DataError(
            f"{len(report.failed)} of {videos.height} videos have no clip (allowed share: "
            f"{config.max_rejected_share:g}). {reasons} Index the corpus again in a new run if its files were changed."
        )
    return store, tuple(sorted(video_id for video_id, _ in report.failed))


def without_videos(pairs: pl.DataFrame, video_ids: Collection[str]) -> pl.DataFrame:
    """``pairs`` (VIDEO_TEXTS) but for those of the videos named."""
    return pairs.filter(~pl.col("video_id").is_in(sorted(video_ids)))


def pairs_fingerprint(source: ClipSource, pairs: pl.DataFrame) -> str:
    """Hex SHA-256 over which clips, made with which settings, stand beside which texts, and in which part."""
    digest = hashlib.sha256(source.settings_hash.encode())
    for row in pairs.sort("pair_id").select("pair_id", "text", "part").iter_rows():
        digest.update(("\x1f".join(row) + "\n").encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class PairNumbers:
    """A number for every video and every text of a table: equal for what is the same, whatever part it is in.

    Attributes:
        of_video: number in [0, videos) by ``video_id``.
        of_text: number in [0, texts) by ``text_id``.
    """

    of_video: Mapping[str, int]
    of_text: Mapping[str, int]

    @classmethod
    def of(cls, table: pl.DataFrame) -> PairNumbers:
        """Numbers in the order of the sorted ids of ``table`` (VIDEO_TEXTS)."""
        videos, texts = (
            {name: number for number, name in enumerate(sorted(set(table[column])))}
            for column in ("video_id", "text_id")
        )
        return cls(videos, texts)


class VideoTextDataset:
    """Pairs as samples, one per row of the table and in its order; nothing is random.

    A sample's tensors are ``frames`` uint8 (T, 3, S, S), ``tokens`` int64 (L,), ``video_index`` int64 () and
    ``text_index`` int64 (), by which equal videos and equal texts are known.
    """

    def __init__(
        self,
        source: ClipSource,
        pairs: pl.DataFrame,
        tokenizer: TextTokenizer,
        max_tokens: int,
        numbers: PairNumbers | None = None,
    ) -> None:
        """Read nothing but the table.

        Args:
            source: where the videos' clips are; it must have those of all ``pairs``.
            pairs: a VIDEO_TEXTS table, or some of its rows such as one part.
            tokenizer: gives the tokens.
            max_tokens: L, beginning and end included.
            numbers: those of the whole table, when ``pairs`` are a part of it; none: numbers of ``pairs`` alone.

        Raises:
            DataError: a clip is missing.
        """
        numbers = PairNumbers.of(pairs) if numbers is None else numbers
        self._source = source
        self.sample_ids: tuple[str, ...] = tuple(pairs["pair_id"])
        self._video_ids = tuple(pairs["video_id"])
        missing = sorted({video_id for video_id in self._video_ids if not source.has(video_id, 0)})
        if missing:
            raise DataError(
                f"{len(missing)} videos have no clip in the clip store: {', '.join(missing[:10])}. Make them with "
                "the same num_frames and fixed_size: run 20_video_text again."
            )
        self._video_index = torch.tensor([numbers.of_video[name] for name in self._video_ids], dtype=torch.int64)
        self._text_index = torch.tensor([numbers.of_text[name] for name in pairs["text_id"]], dtype=torch.int64)
        # Each text once: of a corpus with twenty texts per video, or one beside many, this is what memory goes to.
        texts = dict(zip(pairs["text_id"], pairs["text"], strict=True))
        self._tokens = tokenizer.encode(list(texts.values()), max_tokens)
        place_of = {name: place for place, name in enumerate(texts)}
        self._token_row = torch.tensor([place_of[name] for name in pairs["text_id"]], dtype=torch.int64)

    @property
    def classes(self) -> None:
        """None: there is nothing to draw evenly from."""
        return

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices`` as one batch, each clip read straight into its place."""
        frames = np.empty((len(indices), *self._source.shape), np.uint8)
        for index, place in zip(indices, frames, strict=True):
            self._source.load(self._video_ids[index], 0, place)
        rows = torch.tensor(indices, dtype=torch.int64)
        tensors = {
            "frames": torch.from_numpy(frames),
            "tokens": self._tokens[self._token_row[rows]],
            "video_index": self._video_index[rows],
            "text_index": self._text_index[rows],
        }
        return Batch(tuple(self.sample_ids[index] for index in indices), tensors)


# Clips and texts as samples, with what the network's options want beside them: hidden frames, other tokens.


class BatchedSamples(Protocol):
    """A data set that reads several samples at once, such as ``video_text_data.VideoTextDataset``."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int], /) -> Batch:
        """The samples of ``indices`` as one batch."""
        ...


@dataclass(frozen=True)
class HiddenFrames:
    """Which frames of a clip masked modelling hides; the same for any order, batch, worker and rank.

    Attributes:
        num_frames: of a clip.
        num_hidden: of them.
        seed: of the draws.
        epoch: another one hides others.
    """

    num_frames: int
    num_hidden: int
    seed: int
    epoch: int = 0

    def of(self, sample_id: str) -> Tensor:
        """Bool (T,), true where a frame of this sample is hidden."""
        generator = np.random.default_rng(stable_seed("hidden frames", self.seed, self.epoch, sample_id))
        hidden = torch.zeros(self.num_frames, dtype=torch.bool)
        hidden[generator.permutation(self.num_frames)[: self.num_hidden].tolist()] = True
        return hidden


def num_hidden_frames(num_frames: int, share: float) -> int:
    """The nearest number to ``share`` of ``num_frames`` that hides at least one and leaves at least one."""
    return min(max(round(share * num_frames), 1), num_frames - 1)


@dataclass(frozen=True)
class PreparedSamples:
    """``data`` with more tensors: ``hidden`` bool (T,) where frames are hidden, and ``beside``.

    Attributes:
        data: clips and texts.
        beside: tensors by name, each (N, ...), a row per sample.
        hidden: None: nothing is hidden.
    """

    data: BatchedSamples
    beside: Mapping[str, Tensor]
    hidden: HiddenFrames | None = None

    @property
    def classes(self) -> None:
        """There are none."""

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of ``indices`` as one batch."""
        batch = self.data.__getitems__(indices)
        tensors = batch.tensors | {name: rows[list(indices)] for name, rows in self.beside.items()}
        if self.hidden is not None:
            tensors["hidden"] = torch.stack([self.hidden.of(sample_id) for sample_id in batch.sample_ids])
        return Batch(batch.sample_ids, tensors)

    def at_epoch(self, epoch: int) -> PreparedSamples:
        """The same samples, with the frames hidden that ``epoch`` (0-based) hides."""
        return self if self.hidden is None else replace(self, hidden=replace(self.hidden, epoch=epoch))
