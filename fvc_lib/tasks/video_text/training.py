"""Task video_text: the samples and losses of a training, the training itself, and the prediction of its test part.

A sample pairs a clip with a text. Three losses, with a weight for each, may be combined: contrastive learning,
captioning and masked modelling.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import polars as pl
import safetensors.torch
import torch
from torch import Tensor, nn

from fvc_lib.corpus.video_texts import video_text_root
from fvc_lib.detectors.network import weights_path
from fvc_lib.detectors.own.transformer import TokenNumbers
from fvc_lib.detectors.own.video_text import JointSpace, NetworkPlan, VideoEncoder, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, MASK, PAD, TextTokenizer
from fvc_lib.detectors.texts.transformers_encoders import OWN, encoder_fingerprint, encoder_tensors
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
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
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.video_text import DIRECTIONS, KS, Ranking, retrieval_metrics
from fvc_lib.services.atomic_files import atomic_output, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CAPTIONS, PARTS, RETRIEVAL_RANKS, VIDEO_TEXTS, frame_of, read_table, write_table
from fvc_lib.services.tasks import VIDEO_TEXT as STAGE
from fvc_lib.tasks import recipe
from fvc_lib.tasks.recipe import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome
from fvc_lib.tasks.video.data import ClipSource, open_clips, stream_of
from fvc_lib.video.clips import making
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)
_LOSSES = ("caption_loss", "token_accuracy", "masked_loss")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")
_TOKENS = "caption_tokens"
_MASKED_SHARE = 0.3  # share of a clip's frames that masked modelling hides
_TEXT_WIDTH, _TEXT_LAYERS, _TEXT_HEADS = 128, 2, 4  # of the text transformer and the decoder


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
    """Return a hex SHA-256 digest of the clip settings and of the ids, texts and parts of all pairs."""
    return sha256_of_json([source.settings_hash, pairs.sort("pair_id").select("pair_id", "text", "part").rows()])


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
    """

    def __init__(self, source: ClipSource, pairs: pl.DataFrame, tokenizer: TextTokenizer, max_tokens: int) -> None:
        self._source, self._video_ids, self.sample_ids = source, tuple(pairs["video_id"]), tuple(pairs["pair_id"])
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
class PreparedSamples:
    """The N samples of ``data`` with further tensors.

    Masked modelling adds the tensor ``hidden``, bool (T,): True for the frames of the clip that are hidden. The choice
    depends on the seed, the epoch and the sample id only, not on order, batch, worker or rank.

    Attributes:
        data: a data set with ``__len__`` and ``__getitems__``, and perhaps a ``stream``.
        extra: further tensors by name, (N, ...), one row per sample.
        num_hidden: number of frames to hide per clip; 0: no mask.
        seed: seed of the masks.
        epoch: epoch of the masks, from 0.
    """

    data: Any
    extra: Mapping[str, Tensor]
    num_hidden: int = 0
    seed: int = 0
    epoch: int = 0

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
        tensors = batch.tensors | {name: rows[list(indices)] for name, rows in self.extra.items()}
        if self.num_hidden:
            hidden = torch.zeros(tensors["frames"].shape[:2], dtype=torch.bool)
            for row, sample_id in zip(hidden, batch.sample_ids, strict=True):
                generator = np.random.default_rng(stable_seed("hidden frames", self.seed, self.epoch, sample_id))
                row[generator.permutation(len(row))[: self.num_hidden].tolist()] = True
            tensors["hidden"] = hidden
        return Batch(batch.sample_ids, tensors)

    def at_epoch(self, epoch: int) -> "PreparedSamples":
        """Return the same samples with the masks of ``epoch`` (from 0)."""
        return replace(self, epoch=epoch)


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

    def measured(self) -> dict[str, Ranking]:
        """Return the retrieval metrics of both directions, by cosine similarity."""
        return retrieval_metrics(self.video_embeddings, self.text_embeddings, self.pairs)


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
        found = retrieval.measured() if retrieval.is_finite else {}
        for direction in DIRECTIONS:
            for name in (*(f"recall@{k}" for k in KS), "mrr"):
                metrics[f"{direction}/{name}"] = found[direction].metrics[name] if found else math.nan
        return metrics


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


# --- Training


@dataclass(frozen=True)
class VideoTextParts:
    """What a training reads.

    Attributes:
        pairs: VIDEO_TEXTS with indices (``task.numbered``), only videos that have a clip.
        source: the clips.
        tokenizer: tokenizer that was trained on the texts of the training part.
    """

    pairs: pl.DataFrame
    source: ClipSource
    tokenizer: TextTokenizer

    def of(self, part: str) -> pl.DataFrame:
        """Return the pairs of ``part``: train, validation or test."""
        return self.pairs.filter(pl.col("part") == part)

    def samples(self, part: str, config: RunConfig) -> PreparedSamples:
        """Return the samples of a part, in the order of ``of(part)``."""
        pairs, num_frames, num_hidden, extra = self.of(part), config.clips.num_frames, 0, dict[str, Tensor]()
        data = VideoTextDataset(self.source, pairs, self.tokenizer, config.max_text_tokens)
        if config.masked_weight:
            num_hidden = min(max(round(_MASKED_SHARE * num_frames), 1), num_frames - 1)
        if folder := _encoder_folder(config):  # each distinct text is encoded once
            texts = pairs["text"].unique(maintain_order=True).to_list()
            row_of = {text: row for row, text in enumerate(texts)}
            encoded = encoder_tensors(folder, texts, config.max_text_tokens)
            extra = {name: rows[[row_of[text] for text in pairs["text"]]] for name, rows in encoded.items()}
        return PreparedSamples(data, extra, num_hidden, stable_seed(STAGE, config.seed))


def train_video_text(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train, choose the epoch on the validation part, and predict the test part once with that epoch's weights.

    Reads ``tables/video_texts.parquet`` and the videos' clips; missing clips are made. Writes the checkpoints, next to
    them ``tokenizer.json``, and ``tables/retrieval_ranks.parquet``, ``tables/captions.parquet`` and
    ``tables/test_embeddings.safetensors``. Resumes an earlier attempt.

    Raises:
        DataError: too many videos have no clip, a part is empty, or an embedding of the test part is not finite.
        UsageError: as ``check_config``.
        FvcError: as ``recipe.train``, which explains ``options``.
    """
    pairs, stop = read_table(paths.video_texts, VIDEO_TEXTS), options.get("stop")
    check_config(config)
    if options.get("ranks") is None and config.num_ranks > 1:
        make_clips(config, pairs, stop=stop)  # before ranks are started

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        parts = read_parts(paths, config, ranks, stop)
        ranks.from_leader("tokenizer", lambda: parts.tokenizer.save(tokenizer_file(paths)))
        outputs = [paths.retrieval_ranks, paths.captions, paths.embeddings]
        return replace(split_training(parts, config), finish=partial(_finish, paths, parts, config), outputs=outputs)

    return recipe.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    paths: RunPaths, parts: VideoTextParts, config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    (model,) = trained
    task, outputs, pairs = model.network.task, VideoTextOutputs(config), parts.of("test")
    assert isinstance(task, VideoTextTask)
    with task.writing_captions():
        model.predict(parts.samples("test", config), outputs)
    retrieval = outputs.retrieval_set()
    if retrieval is not None and not retrieval.is_finite:
        raise DataError(
            f"{paths.run_id}: embeddings of test videos or texts are not finite. Turn amp off, or train with a lower "
            "learning_rate."
        )
    model.log("test", outputs.compute())

    def write() -> None:
        ranks = frame_of(None, RETRIEVAL_RANKS)
        if retrieval is not None:
            ranks = retrieval_ranks(pairs, retrieval)
        write_embeddings(paths.embeddings, retrieval)
        write_table(ranks, RETRIEVAL_RANKS, paths.retrieval_ranks)
        write_table(written_captions(pairs, outputs, parts.tokenizer), CAPTIONS, paths.captions)

    return Finished([TrainingRecord(**model.record())], write)


def check_config(config: RunConfig) -> None:
    """Raise ``UsageError`` if parameters contradict each other, or a network or text encoder does not load."""
    if not config.contrastive_weight and not config.caption_weight:
        raise UsageError(
            "contrastive_weight and caption_weight are both 0: nothing would be learned that can be measured. Give one "
            "of them a weight."
        )
    if config.masked_weight and config.clips.num_frames < 2:
        raise UsageError("masked_weight: a clip of one frame leaves none to predict from. Use more num_frames.")
    if _encoder_folder(config):
        encoder_tensors(_encoder_folder(config), ["a text"], config.max_text_tokens)
    with forked_random_state(0, torch.device("cpu")):
        VideoEncoder(network_plan(config, config.vocabulary_size))


def tokenizer_file(paths: RunPaths) -> Path:
    """Return the path of the run's ``tokenizer.json``."""
    return paths.stage_training(STAGE) / "tokenizer.json"


def read_parts(
    paths: RunPaths, config: RunConfig, ranks: Ranks | None = None, stop: Callable[[], bool] | None = None
) -> VideoTextParts:
    """Return the run's pairs and their clips; rank 0 makes missing clips.

    Raises:
        DataError: too many videos have no clip, or a part has no pair.
        StoppedError: ``stop`` returned True.
    """
    ranks = ranks or Ranks()
    pairs = read_table(paths.video_texts, VIDEO_TEXTS)
    missing = ranks.from_leader("clips", lambda: list(make_clips(config, pairs, stop=stop)[1]))
    remaining = numbered(pairs.filter(~pl.col("video_id").is_in(missing)))
    empty = [part for part in PARTS if part not in set(remaining["part"])]
    if empty:
        raise DataError(
            f"no pair is left of the part {' and '.join(empty)}: {len(missing)} videos have no clip. Add videos, or "
            "make the groups of the corpus smaller."
        )
    texts = remaining.filter(pl.col("part") == "train")["text"]
    tokenizer = TextTokenizer.train(texts.unique(), config.vocabulary_size)
    _logger.info("%d pairs, a vocabulary of %d tokens", remaining.height, tokenizer.vocabulary_size)
    # A transformers encoder has tokens of its own.
    if ranks.rank == 0 and (config.caption_weight or not _encoder_folder(config)):
        lengths = tokenizer.num_tokens(remaining["text"].unique().to_list())
        if num_cut := sum(length > config.max_text_tokens for length in lengths):
            _logger.warning(
                "%d of %d texts are longer than max_text_tokens %d and are cut; the longest has %d tokens",
                num_cut, len(lengths), config.max_text_tokens, max(lengths),
            )  # fmt: skip
    source = open_clips(config, clips_of(ClipStore.of(config), pairs, missing))
    return VideoTextParts(remaining, source, tokenizer)


def split_training(parts: VideoTextParts, config: RunConfig) -> Training[TrainingRecord]:
    """Return the training of ``parts`` that ``config`` describes, without scoring of the test part.

    Raises:
        UsageError: the text encoder is missing.
    """
    task = VideoTextTask(
        parts.samples("train", config),
        parts.samples("validation", config),
        network_plan(config, parts.tokenizer.vocabulary_size),
        config,
    )
    encoder = _encoder_folder(config)
    # Versions of the tokenizer library may learn different tokens from the same texts.
    fingerprint = sha256_of_json([pairs_fingerprint(parts.source, parts.pairs), parts.tokenizer.fingerprint])
    settings = recipe.settings_of(config, stable_seed(STAGE, config.seed), DETECTORS.get(config.model).micro_batch)
    return Training(
        stage=STAGE,
        model_name=config.model,
        settings=settings,
        parameters=config.training_values() | {"text_encoder": encoder_fingerprint(encoder) if encoder else OWN},
        networks=[Network(task, fingerprint)],
        sizes={f"num_{part}": parts.of(part).height for part in PARTS},
    )


def network_plan(config: RunConfig, vocabulary_size: int) -> NetworkPlan:
    """Return the plan of the network that ``config`` describes; a loss with weight 0 adds no part to the network."""
    return NetworkPlan(
        trunk=config.model,
        num_frames=config.clips.num_frames,
        side=config.clips.side,
        weights=weights_path(config.model_weights),
        vocabulary_size=vocabulary_size,
        max_tokens=config.max_text_tokens,
        numbers=TokenNumbers(PAD, BEGIN, END, (MASK,)),
        embedding_size=config.embedding_size,
        width=_TEXT_WIDTH,
        layers=_TEXT_LAYERS,
        heads=_TEXT_HEADS,
        text_encoder=_encoder_folder(config),
        contrastive=config.contrastive_loss if config.contrastive_weight else None,
        num_together=config.effective_batch_size,
        captions=config.caption_weight > 0,
        masked=config.masked_weight > 0,
    )


def _encoder_folder(config: RunConfig) -> str:
    """Return the folder of the text encoder from the transformers library; empty where FVC's encoder is used."""
    return config.text_encoder if config.contrastive_weight and config.text_encoder != OWN else ""


def text_tensors(config: RunConfig, tokenizer: TextTokenizer, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return the network's inputs for N ``texts`` by name, one row per text.

    These are ``tokens`` int64 (N, L), and the inputs of a transformers text encoder if one is used.
    """
    folder = _encoder_folder(config)
    extra = encoder_tensors(folder, texts, config.max_text_tokens) if folder else {}
    return {"tokens": tokenizer.encode(texts, config.max_text_tokens)} | dict(extra)


def retrieval_ranks(pairs: pl.DataFrame, retrieval: RetrievalSet) -> pl.DataFrame:
    """Return the table RETRIEVAL_RANKS with a row per video and per text, in the order of the embeddings.

    A text whose videos are of several groups gets the first of these group ids in sorted order.

    Args:
        pairs: rows in the order in which the outputs were collected.
        retrieval: embeddings and pairs of the test part.
    """
    measured = retrieval.measured()
    first_group = pairs.select(pl.col("group_id").min().over("text_id")).to_series()
    places = dict(zip(DIRECTIONS, (retrieval.video_places, retrieval.text_places), strict=True))
    queries = dict(zip(DIRECTIONS, (pairs["video_id"], pairs["text_id"]), strict=True))
    groups = dict(zip(DIRECTIONS, (pairs["group_id"], first_group), strict=True))
    tables = []
    for direction, found in measured.items():
        rows = places[direction][found.queries]
        data = {
            "direction": [direction] * rows.size,
            "query_id": queries[direction][rows],
            "group_id": groups[direction][rows],
            "rank": found.ranks,
            "num_candidates": np.full(rows.size, found.num_candidates, dtype=np.int64),
            "num_positives": found.num_positives,
        }
        tables.append(frame_of(data, RETRIEVAL_RANKS))
    return pl.concat(tables)


def written_captions(pairs: pl.DataFrame, outputs: VideoTextOutputs, tokenizer: TextTokenizer) -> pl.DataFrame:
    """Return the table CAPTIONS with one row per video, sorted by id; empty if no captions were written."""
    tokens = outputs.caption_tokens
    if tokens is None:
        return frame_of(None, CAPTIONS)
    captions = pl.Series("caption", [tokenizer.decode(row).strip() for row in tokens], dtype=pl.String)
    return (
        pairs.with_columns(captions)
        .group_by("video_id", maintain_order=True)
        .agg(
            pl.col("group_id").first(),
            pl.col("path").first(),
            pl.col("caption").first(),
            pl.col("text").unique(maintain_order=True).str.join("\n").alias("references"),
        )
        .sort("video_id")
    )


def write_embeddings(path: Path, retrieval: RetrievalSet | None) -> None:
    """Write ``video_embeddings``, ``text_embeddings`` and ``pairs`` (see ``RetrievalSet``) to ``path``.

    Rows are sorted by id, as RETRIEVAL_RANKS is within each direction.
    """
    empty = torch.zeros(0, 0)
    tensors = {
        "video_embeddings": empty if retrieval is None else retrieval.video_embeddings.contiguous(),
        "text_embeddings": empty if retrieval is None else retrieval.text_embeddings.contiguous(),
        "pairs": torch.zeros(0, 2, dtype=torch.int64) if retrieval is None else torch.from_numpy(retrieval.pairs),
    }
    with atomic_output(path) as temporary:
        safetensors.torch.save_file(tensors, temporary)
