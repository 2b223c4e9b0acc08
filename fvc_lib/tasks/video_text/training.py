"""Train task video_text on one split and predict its test part once."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import polars as pl
import safetensors.torch
import torch
from torch import Tensor

from fvc_lib.detectors.network import weights_path
from fvc_lib.detectors.own.transformer import TokenNumbers
from fvc_lib.detectors.own.video_text import NetworkPlan, VideoEncoder
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, MASK, PAD, TextTokenizer
from fvc_lib.detectors.texts.transformers_encoders import OWN, encoder_fingerprint, encoder_tensors
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.retrieval import RetrievalMetrics
from fvc_lib.services.atomic_files import atomic_output, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CAPTIONS, PARTS, RETRIEVAL_RANKS, VIDEO_TEXTS, frame_of, read_table, write_table
from fvc_lib.services.tasks import VIDEO_TEXT as STAGE
from fvc_lib.tasks import recipe
from fvc_lib.tasks.recipe import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome
from fvc_lib.tasks.video.data import ClipSource, open_clips
from fvc_lib.tasks.video_text import task as video_text
from fvc_lib.tasks.video_text.task import RetrievalSet, VideoTextOutputs, VideoTextTask
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)
_MASKED_SHARE = 0.3  # share of a clip's frames that masked modelling hides
_TEXT_WIDTH, _TEXT_LAYERS, _TEXT_HEADS = 128, 2, 4  # of the text transformer and the decoder


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
        video_text.make_clips(config, pairs, stop=stop)  # before ranks are started

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        parts = read_parts(paths, config, ranks, stop)
        ranks.from_leader("tokenizer", lambda: parts.tokenizer.save(tokenizer_file(paths)))
        outputs = [paths.retrieval_ranks, paths.captions, paths.embeddings]
        return replace(split_training(parts, config), finish=partial(_finish, paths, parts, config), outputs=outputs)

    return recipe.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    paths: RunPaths, parts: "VideoTextParts", config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    (model,) = trained
    task, outputs, pairs = model.network.task, VideoTextOutputs(config), parts.of("test")
    assert isinstance(task, VideoTextTask)
    with task.writing_captions():
        model.predict(parts.samples("test", config), outputs)
    retrieval = outputs.retrieval_set()
    if retrieval is not None and not retrieval.is_finite:
        videos = retrieval.video_places[~retrieval.video_embeddings.isfinite().all(1).numpy()]
        texts = retrieval.text_places[~retrieval.text_embeddings.isfinite().all(1).numpy()]
        lost = [outputs.sample_ids[number] for number in (*videos, *texts)]
        raise DataError(
            f"the embeddings of {len(lost)} test videos or texts are not finite, the first in the pairs "
            f"{', '.join(lost[:5])}. Turn amp off, or train with a lower learning_rate."
        )
    model.log("test", outputs.compute())

    def write() -> None:
        ranks = frame_of(None, RETRIEVAL_RANKS)
        if retrieval is not None:
            ranks = retrieval_ranks(pairs, retrieval, video_text.measured_retrieval(retrieval))
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

    def samples(self, part: str, config: RunConfig) -> video_text.PreparedSamples:
        """Return the samples of a part, in the order of ``of(part)``."""
        pairs, num_frames, hidden, beside = self.of(part), config.clips.num_frames, None, dict[str, Tensor]()
        data = video_text.VideoTextDataset(self.source, pairs, self.tokenizer, config.max_text_tokens)
        if config.masked_weight:
            num_hidden = min(max(round(_MASKED_SHARE * num_frames), 1), num_frames - 1)
            hidden = video_text.HiddenFrames(num_frames, num_hidden, stable_seed(STAGE, config.seed))
        if folder := _encoder_folder(config):  # each distinct text is encoded once
            texts = pairs["text"].unique(maintain_order=True).to_list()
            row_of = {text: row for row, text in enumerate(texts)}
            encoded = encoder_tensors(folder, texts, config.max_text_tokens)
            beside = {name: rows[[row_of[text] for text in pairs["text"]]] for name, rows in encoded.items()}
        return video_text.PreparedSamples(data, beside, hidden)


def read_parts(
    paths: RunPaths, config: RunConfig, ranks: Ranks | None = None, stop: Callable[[], bool] | None = None
) -> "VideoTextParts":
    """Return the run's pairs and their clips; rank 0 makes missing clips.

    Raises:
        DataError: too many videos have no clip, or a part has no pair.
        StoppedError: ``stop`` returned True.
    """
    ranks = ranks or Ranks()
    pairs = read_table(paths.video_texts, VIDEO_TEXTS)
    missing = ranks.from_leader("clips", lambda: list(video_text.make_clips(config, pairs, stop=stop)[1]))
    remaining = video_text.numbered(pairs.filter(~pl.col("video_id").is_in(missing)))
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
    source = open_clips(config, video_text.clips_of(ClipStore.of(config), pairs, missing))
    return VideoTextParts(remaining, source, tokenizer)


def split_training(parts: "VideoTextParts", config: RunConfig) -> Training[TrainingRecord]:
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
    fingerprint = sha256_of_json([video_text.pairs_fingerprint(parts.source, parts.pairs), parts.tokenizer.fingerprint])
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
    beside = encoder_tensors(folder, texts, config.max_text_tokens) if folder else {}
    return {"tokens": tokenizer.encode(texts, config.max_text_tokens)} | dict(beside)


def retrieval_ranks(pairs: pl.DataFrame, retrieval: RetrievalSet, metrics: RetrievalMetrics) -> pl.DataFrame:
    """Return the table RETRIEVAL_RANKS with a row per video and per text, in the order of the embeddings.

    A text whose videos are of several groups gets the first of these group ids in sorted order.

    Args:
        pairs: rows in the order in which the outputs were collected.
        retrieval: embeddings and pairs of the test part.
        metrics: the ranks in both directions.
    """
    pairs = pairs.with_columns(first_group=pl.col("group_id").min().over("text_id"))
    tables = []
    for direction, places, columns in (
        ("video_to_text", retrieval.video_places, ("video_id", "group_id")),
        ("text_to_video", retrieval.text_places, ("text_id", "first_group")),
    ):
        found = getattr(metrics, direction)
        queries = pairs[places[found.query_indices].tolist()]
        data = {
            "direction": [direction] * found.num_queries,
            "query_id": queries[columns[0]],
            "group_id": queries[columns[1]],
            "rank": found.ranks,
            "num_candidates": np.full(found.num_queries, found.num_candidates, dtype=np.int64),
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
