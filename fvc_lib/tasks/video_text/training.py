"""The training of task video_text: make the clips, train one network, predict the test part and write its tables."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import polars as pl
import safetensors.torch
import torch

from fvc_lib.corpus.video_texts import video_text_root
from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.detectors.texts.transformers_encoders import OWN, encoder_folder, encoder_tensors
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.video_text import retrieval_metrics
from fvc_lib.services.atomic_files import atomic_output, content_digest, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    AUGMENTED,
    CAPTIONS,
    PARTS,
    RETRIEVAL_RANKS,
    VIDEO_TEXTS,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import VIDEO_TEXT as STAGE
from fvc_lib.tasks import shared_training
from fvc_lib.tasks.shared_training import Finished, Network, TrainedNetwork, Training, TrainingOptions, TrainingOutcome
from fvc_lib.tasks.video.data import ClipSource, open_clips
from fvc_lib.tasks.video_text.task import (
    TOKENIZER,
    TOKENS,
    VideoTextDataset,
    VideoTextOutputs,
    VideoTextTask,
    numbered,
)
from fvc_lib.video.clips import making
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)


def make_clips(
    config: RunConfig,
    pairs: pl.DataFrame,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    stop: Callable[[], bool] | None = None,
) -> list[str]:
    """Make the clips of ``pairs`` in the shared store, and return the sorted ids of the videos without a clip.

    Existing clips with the same settings are used again. The reason for a missing clip is logged. If ``clip_source``
    needs shards (files with many clips), they are written too.

    Args:
        config: ``num_frames`` and ``fixed_size`` decide the clips; ``corpus`` and ``data_dir`` name the folder.
        pairs: a VIDEO_TEXTS table.
        progress: called with (done, total) numbers of videos.
        stop: called after each video; returns True to stop.

    Raises:
        DataError: more than ``max_rejected_share`` of the videos have no clip.
        StoppedError: ``stop`` returned True; the clips made so far stay.
        OSError: clips cannot be written.
    """
    store = ClipStore.of(config)
    videos = pairs.unique("video_id", keep="first").sort("video_id").with_columns(label=pl.lit(""), group_id=pl.lit(""))

    def watched(done: int, total: int) -> None:
        progress(done, total)
        if stop is not None and done < total and stop():
            raise StoppedError(f"stopped after the clips of {done} of {total} videos; run it again to go on.")

    report = making.make_clips(
        store, videos, video_text_root(config), 0, None, progress=watched, workers=config.workers
    )
    for video_id, reason in report.failed:
        _logger.warning("video %s has no clip and takes no part: %s", video_id, reason)
    if len(report.failed) > config.max_rejected_share * videos.height:
        raise DataError(
            f"{len(report.failed)} of {videos.height} videos have no clip (allowed share: "
            f"{config.max_rejected_share:g}). The first: {report.failed[0][1]} Index the corpus again in a new run if "
            "its files were changed."
        )
    missing = sorted(video_id for video_id, _ in report.failed)
    if config.clip_source != "store":
        write_shards(store, _clips_of(store, videos, missing))
    return missing


def _clips_of(store: ClipStore, pairs: pl.DataFrame, missing: Sequence[str]) -> pl.DataFrame:
    """Return the clips of the videos of ``pairs`` as rows of AUGMENTED, the form that clip sources read.

    There is one row per video, for its clip without augmentation. Videos in ``missing`` are left out. The columns that
    this task does not need, such as the label, are empty.
    """
    videos = pairs.select("video_id").unique().sort("video_id").filter(~pl.col("video_id").is_in(missing))
    return videos.with_columns(
        clip_id=pl.format("{}_0", "video_id"),
        group_id=pl.lit(""),
        label=pl.lit(""),
        augmentation_index=pl.lit(0),
        operations=pl.lit("[]"),
        settings_hash=pl.lit(store.settings_hash),
        clip_path=pl.lit(""),
    ).select(list(AUGMENTED.columns))


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
        """Return the pairs of ``part``, which is ``train``, ``validation`` or ``test``."""
        return self.pairs.filter(part=part)

    def samples(self, part: str, config: RunConfig) -> VideoTextDataset:
        """Return the samples of ``part`` (``train``, ``validation`` or ``test``), in the order of ``of(part)``."""
        return VideoTextDataset(self.source, self.of(part), self.tokenizer, config)


def train_video_text(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train, choose the epoch on the validation part, and predict the test part once with that epoch's weights.

    Reads ``tables/video_texts.parquet`` and the videos' clips; missing clips are made. Writes the checkpoints, next to
    them ``tokenizer.json``, and ``tables/retrieval_ranks.parquet``, ``tables/captions.parquet`` and
    ``tables/test_embeddings.safetensors``. Resumes an earlier attempt.

    Raises:
        DataError: too many videos have no clip, a part is empty, or an output for the test part is not finite.
        UsageError: as ``check_config``.
        FvcError: as ``shared_training.train``, which explains ``options``.
    """
    check_config(config)
    tables = paths.retrieval_ranks, paths.captions, paths.embeddings
    outputs = [*tables, paths.training_checkpoints(STAGE) / TOKENIZER]

    def read(ranks: Ranks) -> Training[TrainingRecord]:
        parts = read_parts(paths, config, ranks, options.get("stop"))
        return replace(split_training(parts, config), finish=partial(_finish, outputs, parts, config), outputs=outputs)

    return shared_training.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def _finish(
    outputs: Sequence[Path], parts: VideoTextParts, config: RunConfig, trained: Sequence[TrainedNetwork]
) -> Finished[TrainingRecord]:
    """Predict the test part once.

    Args:
        outputs: paths of the table of ranks, the table of captions, and the files of embeddings and of the tokenizer.
        parts: the corpus.
        config: the run's parameters.
        trained: the trained network, as the only element.

    Returns:
        The record of the training, and a function that writes ``outputs``.

    Raises:
        DataError: an output for the test part is not finite.
    """
    (model,) = trained
    task = model.network.task
    found = VideoTextOutputs()
    pairs = parts.of("test")
    ranks_file, captions_file, embeddings_file, tokenizer_file = outputs
    assert isinstance(task, VideoTextTask)
    task.writes_captions = True
    model.predict(parts.samples("test", config), found)
    retrieval, metrics = found.retrieval_set(), found.compute()
    if not all(map(math.isfinite, metrics.values())):
        raise DataError("outputs for the test part are not finite. Turn amp off, or train with a lower learning_rate.")
    model.log("test", metrics)

    def write() -> None:
        with atomic_output(embeddings_file) as temporary:
            safetensors.torch.save_file(retrieval, temporary)
        write_table(retrieval_ranks(pairs, retrieval), RETRIEVAL_RANKS, ranks_file)
        write_table(_written_captions(pairs, found, parts.tokenizer), CAPTIONS, captions_file)
        parts.tokenizer.save(tokenizer_file)

    return Finished({"": TrainingRecord(**model.record())}, write)


def check_config(config: RunConfig) -> None:
    """Check that there is something to learn, and that the networks load.

    Raises:
        UsageError: no loss has a weight, or the network, the text encoder or its tokenizer does not load.
    """
    if not config.contrastive_weight and not config.caption_weight:
        raise UsageError(
            "contrastive_weight and caption_weight are both 0: nothing would be learned. Give one of them a weight."
        )
    if folder := encoder_folder(config):
        encoder_tensors(folder, ["a text"], config.max_text_tokens)
    with forked_random_state(0, torch.device("cpu")):
        VideoTextNetwork(config, config.vocabulary_size)


def read_parts(
    paths: RunPaths, config: RunConfig, ranks: Ranks | None = None, stop: Callable[[], bool] | None = None
) -> VideoTextParts:
    """Return the run's pairs with their clips and a new tokenizer; rank 0 of the ranks makes missing clips.

    Args:
        paths: paths of the run.
        config: the run's parameters.
        ranks: the processes that share the training; None: this process alone.
        stop: called after each video; returns True to stop.

    Raises:
        DataError: too many videos have no clip, or a part has no pair.
        StoppedError: ``stop`` returned True.
    """
    ranks = ranks or Ranks()
    pairs = read_table(paths.video_texts, VIDEO_TEXTS)
    missing = ranks.from_leader("clips", lambda: make_clips(config, pairs, stop=stop))
    remaining = numbered(pairs.filter(~pl.col("video_id").is_in(missing)))
    empty = [part for part in PARTS if part not in set(remaining["part"])]
    if empty:
        raise DataError(
            f"no pair is left of the part {' and '.join(empty)}: {len(missing)} videos have no clip. Add videos, or "
            "make the groups of the corpus smaller."
        )
    texts = remaining.filter(part="train")["text"]
    tokenizer = TextTokenizer.train(texts.unique(), config.vocabulary_size)
    # A text encoder from the transformers library has its own tokenizer, so these lengths do not apply to it.
    if config.caption_weight or not encoder_folder(config):
        lengths = np.array(tokenizer.num_tokens(remaining["text"].unique().to_list()))
        if num_cut := int((lengths > config.max_text_tokens).sum()):
            _logger.warning(
                "%d of %d texts are longer than max_text_tokens %d and are cut; the longest has %d tokens",
                num_cut, len(lengths), config.max_text_tokens, lengths.max(),
            )  # fmt: skip
    source = open_clips(config, _clips_of(ClipStore.of(config), pairs, missing))
    return VideoTextParts(remaining, source, tokenizer)


def split_training(parts: VideoTextParts, config: RunConfig) -> Training[TrainingRecord]:
    """Return the training that ``config`` describes, without the scoring of the test part.

    Args:
        parts: the corpus.
        config: the run's parameters.

    Raises:
        UsageError: the text encoder is missing.
    """
    vocabulary_size = parts.tokenizer.vocabulary_size
    task = VideoTextTask(parts.samples("train", config), parts.samples("validation", config), config, vocabulary_size)
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
        parameters=config.training_values() | {"text_encoder": content_digest(encoder) if encoder else OWN},
        networks=[Network(task, fingerprint)],
        sizes={f"num_{part}": parts.of(part).height for part in PARTS},
    )


def retrieval_ranks(pairs: pl.DataFrame, retrieval: Mapping[str, Any]) -> pl.DataFrame:
    """Return the table RETRIEVAL_RANKS: one row per query, first all videos and then all texts, each sorted by id.

    A query is a video for which texts are ranked, or a text for which videos are ranked. The table is empty without
    embeddings. If the videos of a text are in several groups, the text gets the group id that sorts first.

    Args:
        pairs: the pairs of the test part.
        retrieval: embeddings and pairs of the test part, as ``VideoTextOutputs.retrieval_set`` returns them.
    """
    if not retrieval:
        return frame_of(None, RETRIEVAL_RANKS)
    tables = []
    for (direction, found), column in zip(retrieval_metrics(**retrieval).items(), ("video_id", "text_id"), strict=True):
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
    """Return the table CAPTIONS, one row per video, sorted by id; empty if the network writes no captions.

    Args:
        pairs: the pairs of the test part.
        outputs: the outputs for these pairs, in the same order.
        tokenizer: turns tokens into text.
    """
    if TOKENS not in outputs:
        return frame_of(None, CAPTIONS)
    captions = [tokenizer.decode(row).strip() for row in outputs.column(TOKENS)]
    references = pl.col("text").unique(maintain_order=True).str.join("\n").alias("references")
    by_video = pairs.with_columns(caption=pl.Series(captions, dtype=pl.String)).group_by("video_id")
    return by_video.agg(pl.col("group_id", "path", "caption").first(), references).sort("video_id")
