"""Task video_text: samples that pair a clip with a text, the losses, and the collected outputs."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor, nn

from fvc_lib.corpus.video_texts import video_text_root
from fvc_lib.detectors.own.video_text import JointSpace, NetworkPlan, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.engine.random_state import stable_seed
from fvc_lib.engine.task import (
    Batch,
    LossSum,
    Outputs,
    Sample,
    SampleColumns,
    SampleSet,
    Stream,
    StreamedSampleSet,
)
from fvc_lib.metrics.retrieval import RetrievalMetrics, retrieval_metrics
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.tasks.video.data import ClipSource, stream_of
from fvc_lib.tasks.video_text.results import RECALL_AT
from fvc_lib.video.clips import making
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)
_LOSSES = ("caption_loss", "token_accuracy", "masked_loss")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")
_TOKENS = "caption_tokens"


def make_clips(
    config: RunConfig,
    pairs: pl.DataFrame,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> tuple[ClipSource, tuple[str, ...]]:
    """Make the clips of ``pairs`` in the shared store; existing clips with the same settings are used again.

    Args:
        config: ``num_frames`` and ``fixed_size`` decide the clips; ``corpus`` and ``data_dir`` name the folder.
        pairs: a VIDEO_TEXTS table.
        progress: called with (videos done, videos).
        stop: called after each video; returns True to stop.

    The reason for a missing clip is logged. Shards are written too if ``clip_source`` needs them.

    Returns:
        ``(source, missing)``: the source of the clips, uint8 (num_frames, 3, fixed_size, fixed_size), and the sorted
        ids of the videos without a clip.

    Raises:
        DataError: more than ``max_rejected_share`` of the videos have no clip.
        StoppedError: ``stop`` returned True; the clips made so far stay.
        OSError: clips cannot be written.
    """
    videos = pairs.unique("video_id", keep="first", maintain_order=True).sort("video_id")

    def watched(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        if stop is not None and done < total and stop():
            raise StoppedError(f"stopped after the clips of {done} of {total} videos; run it again to go on.")

    store, unlabelled = ClipStore.of(config), videos.with_columns(label=pl.lit(""), group_id=pl.lit(""))
    report = making.make_clips(
        store, unlabelled, video_text_root(config), 0, None, progress=watched, workers=config.workers
    )
    for video_id, reason in report.failed:
        _logger.warning("video %s has no clip and takes no part: %s", video_id, reason)
    if len(report.failed) > config.max_rejected_share * videos.height:
        reasons = " ".join(reason for _, reason in report.failed[:3])
        raise DataError(
            f"{len(report.failed)} of {videos.height} videos have no clip (allowed share: "
            f"{config.max_rejected_share:g}). {reasons} Index the corpus again in a new run if its files were changed."
        )
    failed = tuple(sorted(video_id for video_id, _ in report.failed))
    if config.clip_source != "store":
        write_shards(store, clips_of(store, pairs, failed))
    return store, failed


def clips_of(store: ClipStore, pairs: pl.DataFrame, without: Sequence[str]) -> pl.DataFrame:
    """Return AUGMENTED rows without labels: the original clip of each video whose id is not in ``without``."""
    videos = pairs.filter(~pl.col("video_id").is_in(without)).select("video_id").unique().sort("video_id")
    return videos.select(
        pl.format("{}_0", "video_id").alias("clip_id"),
        "video_id",
        *(pl.lit("").alias(name) for name in ("group_id", "label")),
        pl.lit(0).alias("augmentation_index"),
        pl.lit("[]").alias("operations"),
        pl.lit(store.settings_hash).alias("settings_hash"),
        pl.lit("").alias("clip_path"),
    )


def pairs_fingerprint(source: ClipSource, pairs: pl.DataFrame) -> str:
    """Return a hex SHA-256 of the clip settings and of the ids, texts and parts of all pairs."""
    digest = hashlib.sha256(source.settings_hash.encode())
    for row in pairs.sort("pair_id").select("pair_id", "text", "part").iter_rows():
        digest.update(("\x1f".join(row) + "\n").encode())
    return digest.hexdigest()


def numbered(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return VIDEO_TEXTS with columns ``video_index`` and ``text_index``: numbers from 0 of the sorted distinct ids."""
    number = {column: pl.col(f"{column}_id").rank("dense").cast(pl.Int64) - 1 for column in ("video", "text")}
    return pairs.with_columns(video_index=number["video"], text_index=number["text"])


class VideoTextDataset:
    """Pairs of a clip and a text as samples, in the order of the table.

    A sample has ``frames`` uint8 (T, 3, S, S), ``tokens`` int64 (L,), ``video_index`` int64 () and ``text_index``
    int64 (). Equal indices mean the same video or text.

    Args:
        source: the clips of all videos of ``pairs``.
        pairs: rows of the table that ``numbered`` returns.
        tokenizer: turns texts into tokens.
        max_tokens: L, the number of tokens per text, beginning and end included.

    Raises:
        DataError: a clip is missing.
    """

    def __init__(self, source: ClipSource, pairs: pl.DataFrame, tokenizer: TextTokenizer, max_tokens: int) -> None:
        self._source, self._video_ids, self.sample_ids = source, tuple(pairs["video_id"]), tuple(pairs["pair_id"])
        if missing := sorted({video_id for video_id in self._video_ids if not source.has(video_id, 0)}):
            raise DataError(
                f"{len(missing)} videos have no clip in the clip store: {', '.join(missing[:10])}. Make them with "
                "the same num_frames and fixed_size: run 20_video_text again."
            )
        self._numbers = {name: torch.tensor(pairs[name].to_list(), dtype=torch.int64) for name in _INDICES}
        # Tokenise each text once: with many videos per text, tokens would dominate memory.
        texts = dict(zip(pairs["text_id"], pairs["text"], strict=True))
        self._tokens = tokenizer.encode(list(texts.values()), max_tokens)
        row_of = {name: row for row, name in enumerate(texts)}
        self._token_row = torch.tensor([row_of[name] for name in pairs["text_id"]], dtype=torch.int64)

    @property
    def stream(self) -> Stream | None:
        """Return the order of the clips in shards that are read as a stream; None for random access."""
        return stream_of(self._source, [(video_id, 0) for video_id in self._video_ids])

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` as one batch."""
        frames = np.empty((len(indices), *self._source.shape), np.uint8)
        for index, place in zip(indices, frames, strict=True):
            self._source.load(self._video_ids[index], 0, place)
        rows = torch.tensor(indices, dtype=torch.int64)
        tensors = {
            "frames": torch.from_numpy(frames),
            "tokens": self._tokens[self._token_row[rows]],
        } | {name: numbers[rows] for name, numbers in self._numbers.items()}
        return Batch(tuple(self.sample_ids[index] for index in indices), tensors)


@dataclass(frozen=True)
class HiddenFrames:
    """Draw the ``num_hidden`` frames per clip that masked modelling hides in ``epoch``.

    The choice depends on the seed, the epoch and the sample id only, not on order, batch, worker or rank.
    """

    num_frames: int
    num_hidden: int
    seed: int
    epoch: int = 0

    def of(self, sample_id: str) -> Tensor:
        """Return a mask of the sample's frames, bool (T,): True where a frame is hidden."""
        generator = np.random.default_rng(stable_seed("hidden frames", self.seed, self.epoch, sample_id))
        hidden = torch.zeros(self.num_frames, dtype=torch.bool)
        hidden[generator.permutation(self.num_frames)[: self.num_hidden].tolist()] = True
        return hidden


@dataclass(frozen=True)
class PreparedSamples:
    """The N samples of ``data`` with further tensors.

    Attributes:
        data: a data set with ``__len__`` and ``__getitems__``, and perhaps a ``stream``.
        beside: further tensors by name, (N, ...), one row per sample.
        hidden: makes the tensor ``hidden``, bool (T,), the mask of a sample's hidden frames; None: no mask.
    """

    data: Any
    beside: Mapping[str, Tensor]
    hidden: HiddenFrames | None = None

    classes = None  # no balanced sampling

    @property
    def stream(self) -> Stream | None:
        """Return the stream of ``data``; None where it has none."""
        return self.data.stream if isinstance(self.data, StreamedSampleSet) else None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` as one batch."""
        batch: Batch = self.data.__getitems__(indices)
        tensors = batch.tensors | {name: rows[list(indices)] for name, rows in self.beside.items()}
        if self.hidden is not None:
            tensors["hidden"] = torch.stack([self.hidden.of(sample_id) for sample_id in batch.sample_ids])
        return Batch(batch.sample_ids, tensors)

    def at_epoch(self, epoch: int) -> "PreparedSamples":
        """Return the same samples with the masks of ``epoch`` (from 0)."""
        return self if self.hidden is None else replace(self, hidden=replace(self.hidden, epoch=epoch))


@dataclass(frozen=True)
class RetrievalSet:
    """The distinct videos and texts of a part, between which retrieval is measured.

    Attributes:
        video_embeddings: float32 (N, E), unit vectors.
        text_embeddings: float32 (M, E), unit vectors.
        pairs: int64 (P, 2), distinct pairs (video row, text row) that belong together.
        video_places: int64 (N,), index of the first collected sample of each video.
        text_places: int64 (M,), index of the first collected sample of each text.
    """

    video_embeddings: Tensor
    text_embeddings: Tensor
    pairs: npt.NDArray[np.int64]
    video_places: npt.NDArray[np.int64]
    text_places: npt.NDArray[np.int64]

    @property
    def is_finite(self) -> bool:
        """Whether all embeddings are finite."""
        return bool(self.video_embeddings.isfinite().all() and self.text_embeddings.isfinite().all())


def measured_retrieval(found: RetrievalSet) -> RetrievalMetrics:
    """Return the retrieval metrics of both directions, by cosine similarity."""
    return retrieval_metrics(found.video_embeddings, found.text_embeddings, found.pairs, ks=RECALL_AT)


class VideoTextOutputs(SampleColumns):
    """Collect the embeddings, losses, indices and written captions of all pairs that the network returns."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch; ``ValueError`` where the outputs still require grad."""
        columns = {name: outputs[name].float() for name in (*_LOSSES, *_EMBEDDINGS) if name in outputs}
        columns |= {name: batch.tensors[name] for name in _INDICES}
        if _TOKENS in outputs:
            columns[_TOKENS] = outputs[_TOKENS].to(torch.int32)  # the engine hands outputs on as floats
        self.add(batch.sample_ids, columns)

    @property
    def caption_tokens(self) -> Tensor | None:
        """Return the tokens of the written captions, int32 (P, L) for P samples; None if none were written."""
        return self.column(_TOKENS) if _TOKENS in self else None

    def retrieval_set(self) -> RetrievalSet | None:
        """Return the distinct videos and texts with their embeddings; None if the network returns no embeddings."""
        if not all(name in self for name in _EMBEDDINGS):
            return None
        videos, texts = (self.column(name) for name in _EMBEDDINGS)
        (_, video_places, video_rows), (_, text_places, text_rows) = (
            np.unique(self.column(name).numpy(), return_index=True, return_inverse=True) for name in _INDICES
        )
        pairs = np.unique(np.stack([video_rows.reshape(-1), text_rows.reshape(-1)], axis=1), axis=0)
        return RetrievalSet(videos[video_places], texts[text_places], pairs, video_places, text_places)

    def compute(self) -> dict[str, float]:
        """Return the mean losses, and recall@k and MRR (mean reciprocal rank) in both directions.

        The retrieval metrics are NaN if an embedding is not finite, and left out without embeddings.
        """
        metrics = {name: float(self.column(name).double().mean()) for name in _LOSSES if name in self}
        retrieval = self.retrieval_set()
        if retrieval is None:
            return metrics
        found = measured_retrieval(retrieval).as_metrics() if retrieval.is_finite else {}
        names = [*(f"recall@{k}" for k in RECALL_AT), "mrr"]
        measured = [f"{direction}/{name}" for direction in ("video_to_text", "text_to_video") for name in names]
        return metrics | {name: found.get(name, math.nan) for name in measured}


class VideoTextTask:
    """Contrastive learning, captioning and masked modelling, each with its weight.

    Every sample weighs 1; a caption's loss is the mean over its tokens. The contrastive loss compares all samples of
    the effective batch, so it is the engine's joint loss (a loss over the outputs of all micro-batches).

    Args:
        training: training samples with the tensors that ``VideoTextNetwork.forward`` reads.
        validation: validation samples with the same tensors.
        plan: sizes and parts of the network.
        config: weights of the losses. A weight is above 0 exactly where ``plan`` has the part of that loss.
    """

    joint_tensors = _INDICES

    def __init__(self, training: SampleSet, validation: SampleSet, plan: NetworkPlan, config: RunConfig) -> None:
        self.training_data = training
        self.validation_data = validation
        self._plan, self.config = plan, config
        self._writing = False

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that the joint loss compares; empty without a contrastive loss."""
        return _EMBEDDINGS if self._plan.contrastive else ()

    def build_model(self) -> nn.Module:
        """Return the network, initialised from torch's current random state."""
        return VideoTextNetwork(self._plan)

    @contextmanager
    def writing_captions(self) -> Iterator[None]:
        """Make ``forward`` also return written captions, ``caption_tokens`` (B, L), if the network has a decoder."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the outputs of ``VideoTextNetwork.forward``."""
        outputs: Outputs = model(batch.tensors, self._writing)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the weighted captioning and masked-modelling losses, summed over the samples; each weighs 1."""
        device = next(iter(outputs.values())).device
        total = torch.zeros((), device=device)
        if self._plan.captions:
            total = total + self.config.caption_weight * outputs["caption_loss"].float().sum()
        if self._plan.masked:
            total = total + self.config.masked_weight * outputs["masked_loss"].float().sum()
        return LossSum(total, torch.tensor(float(len(batch)), device=device))

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], rows: range) -> Tensor:
        """Return the weighted contrastive loss of ``rows`` against the whole effective batch."""
        space = model.joint
        assert isinstance(space, JointSpace)
        video, text = (outputs[name].float() for name in _EMBEDDINGS)
        indices = tensors["video_index"], tensors["text_index"]
        return self.config.contrastive_weight * space.scale.contrastive(video, text, *indices, rows)

    def new_accumulator(self) -> VideoTextOutputs:
        """Return an empty ``VideoTextOutputs``."""
        return VideoTextOutputs(self.config)
