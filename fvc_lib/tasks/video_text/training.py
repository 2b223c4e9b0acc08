"""Task video_text: the samples and losses of a training, the training itself, and the prediction of its test part.

A sample pairs a clip with a text. The loss is the weighted sum of a contrastive loss and a captioning loss.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
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
from fvc_lib.engine.task import Batch, LossSum, Outputs, Sample, SampleColumns, SampleSet, Stream
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.video_text import DIRECTIONS, KS, Ranking, retrieval_metrics
from fvc_lib.services.atomic_files import atomic_output, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CAPTIONS, PARTS, RETRIEVAL_RANKS, VIDEO_TEXTS, frame_of, read_table, write_table
from fvc_lib.services.tasks import VIDEO_TEXT as STAGE
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.shared_training import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome
from fvc_lib.tasks.video.data import ClipSource, open_clips, stream_of
from fvc_lib.video.clips import making
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)
_LOSSES = ("caption_loss", "token_accuracy")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")
_TOKENS = "caption_tokens"
_TEXT_WIDTH, _TEXT_LAYERS, _TEXT_HEADS = 128, 2, 4  # of the text transformer and the decoder

# --- Samples


def make_clips(
    config: RunConfig,
    pairs: pl.DataFrame,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    stop: Callable[[], bool] | None = None,
) -> tuple[ClipSource, tuple[str, ...]]:
    """Make the clips of ``pairs`` in the shared store; existing clips with the same settings are used again.

    The reason for a missing clip is logged. If ``clip_source`` needs shards (files with many clips), they are written
    too.

    Args:
        config: ``num_frames`` and ``fixed_size`` decide the clips; ``corpus`` and ``data_dir`` name the folder.
        pairs: a VIDEO_TEXTS table.
        progress: called with (videos done, videos).
        stop: called after each video; returns True to stop.

    Returns:
        ``(source, missing)``: the source of the clips, uint8 (num_frames, 3, fixed_size, fixed_size), and the sorted
        ids of the videos without a clip.

    Raises:
        DataError: more than ``max_rejected_share`` of the videos have no clip.
        StoppedError: ``stop`` returned True; the clips made so far stay.
        OSError: clips cannot be written.
    """
    store, videos = ClipStore.of(config), pairs.unique("video_id", keep="first").sort("video_id")
    unlabelled = videos.with_columns(label=pl.lit(""), group_id=pl.lit(""))

    def watched(done: int, total: int) -> None:
        progress(done, total)
        if stop is not None and done < total and stop():
            raise StoppedError(f"stopped after the clips of {done} of {total} videos; run it again to go on.")

    root = video_text_root(config)
    report = making.make_clips(store, unlabelled, root, 0, None, progress=watched, workers=config.workers)
    for video_id, reason in report.failed:
        _logger.warning("video %s has no clip and takes no part: %s", video_id, reason)
    if len(report.failed) > config.max_rejected_share * videos.height:
        raise DataError(
            f"{len(report.failed)} of {videos.height} videos have no clip (allowed share: "
            f"{config.max_rejected_share:g}). The first: {report.failed[0][1]} Index the corpus again in a new run if "
            "its files were changed."
        )
    missing = tuple(sorted(video_id for video_id, _ in report.failed))
    if config.clip_source != "store":
        write_shards(store, _clips_of(store, pairs, missing))
    return store, missing


def _clips_of(store: ClipStore, pairs: pl.DataFrame, missing: Sequence[str]) -> pl.DataFrame:
    """Return a table AUGMENTED with one row per video that is not in ``missing``: its original clip, unlabelled."""
    videos = pairs.select("video_id").unique().sort("video_id").filter(~pl.col("video_id").is_in(missing))
    return videos.select(
        pl.format("{}_0", "video_id").alias("clip_id"),
        "video_id",
        group_id=pl.lit(""),
        label=pl.lit(""),
        augmentation_index=pl.lit(0),
        operations=pl.lit("[]"),
        settings_hash=pl.lit(store.settings_hash),
        clip_path=pl.lit(""),
    )


def numbered(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return ``pairs`` (VIDEO_TEXTS) with columns ``video_index`` and ``text_index``.

    An index is the position of the row's video id or text id among the sorted distinct ids, from 0.
    """
    number = {column: pl.col(f"{column}_id").rank("dense").cast(pl.Int64) - 1 for column in ("video", "text")}
    return pairs.with_columns(video_index=number["video"], text_index=number["text"])


class VideoTextDataset:
    """Samples that pair a clip with a text, in the order of the table.

    A sample has ``frames`` uint8 (T, 3, S, S), ``tokens`` int64 (L,), ``video_index`` int64 () and ``text_index``
    int64 (). Equal indices mean the same video or text. With a text encoder from the transformers library, a sample
    also has the input tensors of that encoder.

    Args:
        source: the clips of all videos of ``pairs``.
        pairs: rows of the table that ``numbered`` returns.
        tokenizer: turns texts into tokens.
        max_tokens: L, the number of tokens per text, beginning and end included.
        encoder: folder of a text encoder from the transformers library; empty: none.
    """

    classes = None  # no balanced sampling

    def __init__(
        self, source: ClipSource, pairs: pl.DataFrame, tokenizer: TextTokenizer, max_tokens: int, encoder: str = ""
    ) -> None:
        self._source, self._video_ids, self.sample_ids = source, tuple(pairs["video_id"]), tuple(pairs["pair_id"])
        self._numbers = {name: torch.tensor(pairs[name].to_list(), dtype=torch.int64) for name in _INDICES}
        # Encode each text once: with many videos per text, tokens would dominate memory.
        texts = pairs["text"].unique(maintain_order=True).to_list()
        self._texts = text_tensors(tokenizer, texts, max_tokens, encoder)
        row_of = {text: row for row, text in enumerate(texts)}
        self._text_row = torch.tensor([row_of[text] for text in pairs["text"]], dtype=torch.int64)

    @property
    def stream(self) -> Stream | None:
        """Return the shard of every sample and the position in it; None if the source allows random access."""
        return stream_of(self._source, [(video_id, 0) for video_id in self._video_ids])

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> Sample:
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: rows[0] for name, rows in batch.tensors.items()})

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` as one batch."""
        frames = np.empty((len(indices), *self._source.shape), np.uint8)
        for index, place in zip(indices, frames, strict=True):
            self._source.load(self._video_ids[index], 0, place)
        rows = torch.tensor(indices, dtype=torch.int64)
        tensors = {"frames": torch.from_numpy(frames)}
        tensors |= {name: values[self._text_row[rows]] for name, values in self._texts.items()}
        tensors |= {name: numbers[rows] for name, numbers in self._numbers.items()}
        return Batch(tuple(self.sample_ids[index] for index in indices), tensors)


def text_tensors(
    tokenizer: TextTokenizer, texts: Sequence[str], max_tokens: int, encoder: str = ""
) -> dict[str, Tensor]:
    """Return the network's inputs for N ``texts`` by name, one row per text.

    These are ``tokens`` int64 (N, L), where L is ``max_tokens``, and the inputs of the transformers text encoder in the
    folder ``encoder`` (empty: no encoder).
    """
    tensors = {"tokens": tokenizer.encode(texts, max_tokens)}
    return tensors | encoder_tensors(encoder, texts, max_tokens) if encoder else tensors


# --- Outputs and losses


class VideoTextOutputs(SampleColumns):
    """Collect the indices of all pairs, and those embeddings, losses and written captions that the network returns."""

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add one batch; ``ValueError`` where the outputs still require grad."""
        columns = {name: outputs[name].float() for name in (*_LOSSES, *_EMBEDDINGS) if name in outputs}
        columns |= {name: batch.tensors[name] for name in _INDICES}
        if _TOKENS in outputs:
            columns[_TOKENS] = outputs[_TOKENS].to(torch.int32)  # the engine hands outputs on as floats
        self.add(batch.sample_ids, columns)

    def retrieval_set(self) -> dict[str, Tensor]:
        """Return the embeddings of the distinct videos and texts, between which retrieval is measured.

        Returns:
            ``video_embeddings`` float32 (N, E) and ``text_embeddings`` float32 (M, E), unit vectors sorted by video or
            text id, and ``pairs`` int64 (P, 2), the distinct (video row, text row) that belong together. Empty if the
            network returns no embeddings.
        """
        if _EMBEDDINGS[0] not in self:
            return {}
        found, rows = dict[str, Tensor](), []
        for name, index in zip(_EMBEDDINGS, _INDICES, strict=True):
            _, first, row = np.unique(self.column(index).numpy(), return_index=True, return_inverse=True)
            found[f"{name}s"] = self.column(name)[first].contiguous()
            rows.append(row.reshape(-1))
        found["pairs"] = torch.from_numpy(np.unique(np.stack(rows, axis=1), axis=0))
        return found

    def compute(self) -> dict[str, float]:
        """Return the mean losses, and recall@k and MRR (mean reciprocal rank) in both directions.

        The retrieval metrics are NaN if an embedding is not finite, and left out without embeddings.
        """
        metrics = {name: float(self.column(name).double().mean()) for name in _LOSSES if name in self}
        retrieval = self.retrieval_set()
        if not retrieval:
            return metrics
        measured = rankings(retrieval) if are_finite(retrieval) else {}
        for direction in DIRECTIONS:
            for name in (*(f"recall@{k}" for k in KS), "mrr"):
                metrics[f"{direction}/{name}"] = measured[direction].metrics[name] if measured else math.nan
        return metrics


def rankings(retrieval: Mapping[str, Tensor]) -> dict[str, Ranking]:
    """Return the retrieval ranking of both directions (video to text, text to video), by the direction's name.

    ``retrieval`` is a result of ``VideoTextOutputs.retrieval_set`` that is not empty.
    """
    return retrieval_metrics(retrieval["video_embeddings"], retrieval["text_embeddings"], retrieval["pairs"])


def are_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether all values of all ``tensors`` are finite."""
    return all(bool(rows.isfinite().all()) for rows in tensors.values())


class VideoTextTask:
    """Train with the weighted sum of a contrastive loss and a captioning loss.

    Every sample weighs 1; a caption's loss is the mean over its tokens. The contrastive loss compares all samples of
    the effective batch. So it is the engine's joint loss, which is computed on the outputs of all micro-batches.

    Args:
        training: training samples with the tensors that ``VideoTextNetwork.forward`` reads.
        validation: validation samples with the same tensors.
        plan: sizes and parts of the network.
        config: weights of the losses. A weight is above 0 if and only if ``plan`` has the part of that loss.

    Attributes:
        writes_captions: whether ``forward`` of a network with a decoder also writes captions and returns their
            ``caption_tokens`` (B, L); initially False.
    """

    joint_tensors = _INDICES

    def __init__(self, training: SampleSet, validation: SampleSet, plan: NetworkPlan, config: RunConfig) -> None:
        self.training_data, self.validation_data = training, validation
        self.config, self._plan = config, plan
        self.writes_captions = False

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that the joint loss compares; empty without a contrastive loss."""
        return _EMBEDDINGS if self._plan.contrastive else ()

    def build_model(self) -> nn.Module:
        """Return the network, initialised from torch's current random state."""
        return VideoTextNetwork(self._plan)

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the outputs of ``VideoTextNetwork.forward``."""
        outputs: Outputs = model(batch.tensors, self.writes_captions)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the weighted captioning loss, summed over samples that weigh 1; it is 0 without a decoder."""
        device = next(iter(outputs.values())).device
        total = torch.zeros((), device=device)
        if self._plan.captions:
            total = total + self.config.caption_weight * outputs["caption_loss"].float().sum()
        return LossSum(total, torch.tensor(float(len(batch)), device=device))

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], rows: range) -> Tensor:
        """Return the weighted contrastive loss of the samples ``rows``, compared with the whole effective batch."""
        space = model.joint
        assert isinstance(space, JointSpace)
        video, text = (outputs[name].float() for name in _EMBEDDINGS)
        indices = tensors["video_index"], tensors["text_index"]
        return self.config.contrastive_weight * space.scale.contrastive(video, text, *indices, rows)

    def new_accumulator(self) -> VideoTextOutputs:
        """Return an empty ``VideoTextOutputs``."""
        return VideoTextOutputs()


# --- Training


@dataclass(frozen=True)
class VideoTextParts:
    """The corpus of a training: its pairs of videos and texts, the clips, and the tokenizer.

    Attributes:
        pairs: VIDEO_TEXTS with indices (``numbered``), only videos that have a clip.
        source: the clips.
        tokenizer: tokenizer that was trained on the texts of the training part.
    """

    pairs: pl.DataFrame
    source: ClipSource
    tokenizer: TextTokenizer

    def of(self, part: str) -> pl.DataFrame:
        """Return the pairs of ``part``: train, validation or test."""
        return self.pairs.filter(part=part)

    def samples(self, part: str, config: RunConfig) -> VideoTextDataset:
        """Return the samples of a part, in the order of ``of(part)``."""
        encoder = encoder_folder(config)
        return VideoTextDataset(self.source, self.of(part), self.tokenizer, config.max_text_tokens, encoder)


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
        FvcError: as ``shared_training.train``, which explains ``options``.
    """
    check_config(config)

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        parts = read_parts(paths, config, ranks, options.get("stop"))
        ranks.from_leader("tokenizer", lambda: parts.tokenizer.save(tokenizer_file(paths)))
        outputs = [paths.retrieval_ranks, paths.captions, paths.embeddings]
        return replace(split_training(parts, config), finish=partial(_finish, paths, parts, config), outputs=outputs)

    return shared_training.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    paths: RunPaths, parts: VideoTextParts, config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    """Predict the test part; return the record of the training and a function that writes the predictions."""
    (model,) = trained
    task, outputs, pairs = model.network.task, VideoTextOutputs(), parts.of("test")
    assert isinstance(task, VideoTextTask)
    task.writes_captions = True
    model.predict(parts.samples("test", config), outputs)
    retrieval = outputs.retrieval_set()
    if not are_finite(retrieval):
        raise DataError(
            f"{paths.run_id}: embeddings of test videos or texts are not finite. Turn amp off, or train with a lower "
            "learning_rate."
        )
    model.log("test", outputs.compute())

    def write() -> None:
        with atomic_output(paths.embeddings) as temporary:
            safetensors.torch.save_file(retrieval, temporary)
        write_table(retrieval_ranks(pairs, retrieval), RETRIEVAL_RANKS, paths.retrieval_ranks)
        write_table(_written_captions(pairs, outputs, parts.tokenizer), CAPTIONS, paths.captions)

    return Finished([TrainingRecord(**model.record())], write)


def check_config(config: RunConfig) -> None:
    """Raise ``UsageError`` if no loss has a weight, or a network or text encoder does not load."""
    if not config.contrastive_weight and not config.caption_weight:
        raise UsageError(
            "contrastive_weight and caption_weight are both 0: nothing would be learned. Give one of them a weight."
        )
    if folder := encoder_folder(config):
        encoder_tensors(folder, ["a text"], config.max_text_tokens)
    with forked_random_state(0, torch.device("cpu")):
        VideoEncoder(network_plan(config, config.vocabulary_size))


def tokenizer_file(paths: RunPaths) -> Path:
    """Return the path of the run's ``tokenizer.json``."""
    return paths.training_checkpoints(STAGE) / "tokenizer.json"


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
    texts = remaining.filter(part="train")["text"]
    tokenizer = TextTokenizer.train(texts.unique(), config.vocabulary_size)
    _logger.info("%d pairs, a vocabulary of %d tokens", remaining.height, tokenizer.vocabulary_size)
    # A text encoder from the transformers library has its own tokenizer, so these lengths do not apply to it.
    if ranks.rank == 0 and (config.caption_weight or not encoder_folder(config)):
        lengths = np.array(tokenizer.num_tokens(remaining["text"].unique().to_list()))
        if num_cut := int((lengths > config.max_text_tokens).sum()):
            _logger.warning(
                "%d of %d texts are longer than max_text_tokens %d and are cut; the longest has %d tokens",
                num_cut, len(lengths), config.max_text_tokens, lengths.max(),
            )  # fmt: skip
    source = open_clips(config, _clips_of(ClipStore.of(config), pairs, missing))
    return VideoTextParts(remaining, source, tokenizer)


def split_training(parts: VideoTextParts, config: RunConfig) -> Training[TrainingRecord]:
    """Return the training of ``parts`` that ``config`` describes, without scoring of the test part.

    Raises:
        UsageError: the text encoder is missing.
    """
    plan = network_plan(config, parts.tokenizer.vocabulary_size)
    task = VideoTextTask(parts.samples("train", config), parts.samples("validation", config), plan, config)
    encoder = encoder_folder(config)
    rows = parts.pairs.sort("pair_id").select("pair_id", "text", "part").rows()
    # Versions of the tokenizer library may learn different tokens from the same texts.
    fingerprint = sha256_of_json([parts.source.settings_hash, rows, parts.tokenizer.fingerprint])
    return Training(
        stage=STAGE,
        model_name=config.model,
        settings=shared_training.settings_of(
            config, stable_seed(STAGE, config.seed), DETECTORS.get(config.model).micro_batch
        ),
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
        text_encoder=encoder_folder(config),
        contrastive=config.contrastive_loss if config.contrastive_weight else None,
        num_together=config.effective_batch_size,
        captions=config.caption_weight > 0,
    )


def encoder_folder(config: RunConfig) -> str:
    """Return the folder of the text encoder from the transformers library; empty where FVC's encoder is used."""
    return config.text_encoder if config.contrastive_weight and config.text_encoder != OWN else ""


def retrieval_ranks(pairs: pl.DataFrame, retrieval: Mapping[str, Tensor]) -> pl.DataFrame:
    """Return the table RETRIEVAL_RANKS: one row per query, first all videos and then all texts, sorted by id.

    The table is empty without embeddings. If the videos of a text are in several groups, the text gets the group id
    that sorts first.

    Args:
        pairs: the pairs of the test part.
        retrieval: embeddings and pairs of the test part, as ``VideoTextOutputs.retrieval_set`` returns them.
    """
    if not retrieval:
        return frame_of(None, RETRIEVAL_RANKS)
    measured, tables = rankings(retrieval), []
    for direction, column in zip(DIRECTIONS, ("video_id", "text_id"), strict=True):
        found = measured[direction]
        queries = pairs.group_by(pl.col(column).alias("query_id")).agg(pl.col("group_id").min()).sort("query_id")
        table = queries[found.queries].with_columns(
            direction=pl.lit(direction),
            rank=pl.Series(found.ranks),
            num_candidates=pl.lit(found.num_candidates, pl.Int64),
            num_positives=pl.Series(found.num_positives),
        )
        tables.append(table.select(list(RETRIEVAL_RANKS.columns)))
    return pl.concat(tables)


def _written_captions(pairs: pl.DataFrame, outputs: VideoTextOutputs, tokenizer: TextTokenizer) -> pl.DataFrame:
    """Return the table CAPTIONS with one row per video, sorted by id; empty if no captions were written."""
    if _TOKENS not in outputs:
        return frame_of(None, CAPTIONS)
    captions = [tokenizer.decode(row).strip() for row in outputs.column(_TOKENS)]
    references = pl.col("text").unique(maintain_order=True).str.join("\n").alias("references")
    by_video = pairs.with_columns(caption=pl.Series(captions, dtype=pl.String)).group_by("video_id")
    return by_video.agg(pl.col("group_id", "path", "caption").first(), references).sort("video_id")
