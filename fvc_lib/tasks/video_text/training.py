"""Task video_text: make clips, train on pairs of a clip and a text, predict the test part and write its tables.

The loss is the weighted sum of a contrastive loss and a captioning loss.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import polars as pl
import safetensors.torch
import torch
from torch import Tensor, nn

from fvc_lib.corpus.video_texts import video_text_root
from fvc_lib.detectors.own.video_text import JointSpace, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.detectors.texts.transformers_encoders import OWN, encoder_folder, encoder_tensors
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleColumns, SampleSet
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.video_text import DIRECTIONS, KS, retrieval_metrics
from fvc_lib.services.atomic_files import atomic_output, content_digest, sha256_of_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
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
from fvc_lib.tasks.video.data import ClipDataset, ClipRow, ClipSource, open_clips
from fvc_lib.video.clips import making
from fvc_lib.video.clips.shards import write_shards
from fvc_lib.video.clips.store import ClipStore

_logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"  # file of the tokenizer, next to the weights
TOKENS = "caption_tokens"
_LOSSES = ("caption_loss", "token_accuracy")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")


# --- Samples, outputs and losses.


def numbered(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return ``pairs`` (VIDEO_TEXTS) with columns ``video_index`` and ``text_index``, both int64.

    An index is the position of the row's video id or text id among the sorted distinct ids, from 0.
    """
    number = {column: pl.col(f"{column}_id").rank("dense").cast(pl.Int64) - 1 for column in ("video", "text")}
    return pairs.with_columns(video_index=number["video"], text_index=number["text"])


class VideoTextDataset(ClipDataset):
    """Samples that pair a clip with a text, in the order of the table.

    A sample has ``frames`` uint8 (T, 3, S, S), ``tokens`` int64 (L,), ``video_index`` int64 () and ``text_index``
    int64 (). Equal indices mean the same video or text. With a text encoder from the transformers library, a sample
    also has the input tensors of that encoder.

    Args:
        source: the clips of all videos of ``pairs``.
        pairs: a table of pairs with the columns ``video_index`` and ``text_index`` (``numbered`` adds these).
        tokenizer: turns texts into tokens.
        config: gives L, the number of tokens per text, and the text encoder.
    """

    def __init__(self, source: ClipSource, pairs: pl.DataFrame, tokenizer: TextTokenizer, config: RunConfig) -> None:
        super().__init__(source, [ClipRow(video_id, 0, 0) for video_id in pairs["video_id"]])
        self.sample_ids = tuple(pairs["pair_id"])
        self._numbers = {name: torch.tensor(pairs[name].to_list(), dtype=torch.int64) for name in _INDICES}
        # Encode each text once: with many videos per text, tokens would dominate memory.
        texts = pairs["text"].unique(maintain_order=True)
        self._texts = text_tensors(tokenizer, texts.to_list(), config)
        row_of = pairs["text"].replace_strict(texts, range(len(texts)), return_dtype=pl.Int64)
        self._text_row = torch.tensor(row_of.to_list(), dtype=torch.int64)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices`` as one batch."""
        rows = torch.tensor(indices, dtype=torch.int64)
        tensors = {"frames": super().__getitems__(indices).tensors["frames"]}
        tensors |= {name: values[self._text_row[rows]] for name, values in self._texts.items()}
        tensors |= {name: numbers[rows] for name, numbers in self._numbers.items()}
        return Batch(tuple(self.sample_ids[index] for index in indices), tensors)


def text_tensors(tokenizer: TextTokenizer, texts: Sequence[str], config: RunConfig) -> dict[str, Tensor]:
    """Return the network's inputs for N texts, by name, one row per text.

    These are ``tokens`` int64 (N, L), and the inputs of the text encoder if there is one.

    Args:
        tokenizer: turns texts into tokens.
        texts: the N texts.
        config: gives L, the number of tokens per text, and the text encoder.
    """
    tensors, folder = {"tokens": tokenizer.encode(texts, config.max_text_tokens)}, encoder_folder(config)
    return tensors | encoder_tensors(folder, texts, config.max_text_tokens) if folder else tensors


class VideoTextOutputs(SampleColumns):
    """A collector of a network's outputs for all pairs of a video and a text, which computes metrics from them.

    It stores the video index and the text index of every pair. If the network returns embeddings, losses and written
    captions, these are stored too.
    """

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the network's outputs for the pairs of ``batch`` to the collected ones.

        Raises:
            ValueError: the outputs still require grad.
        """
        columns = {name: outputs[name].float() for name in (*_LOSSES, *_EMBEDDINGS) if name in outputs}
        columns |= {name: batch.tensors[name] for name in _INDICES}
        if TOKENS in outputs:
            columns[TOKENS] = outputs[TOKENS].to(torch.int32)  # the engine hands outputs on as floats
        self.add(batch.sample_ids, columns)

    def retrieval_set(self) -> dict[str, Any]:
        """Return the embeddings of the distinct videos and texts, between which retrieval is measured.

        Returns:
            The arguments of ``retrieval_metrics``: ``video_embeddings`` float32 (N, E) and ``text_embeddings`` float32
            (M, E), unit vectors sorted by video or text id, and ``pairs`` int64 (P, 2), the distinct (video row, text
            row) that belong together. Empty if the network returns no embeddings.
        """
        if _EMBEDDINGS[0] not in self:
            return {}
        found, rows = dict[str, Any](), []
        for name, index in zip(_EMBEDDINGS, _INDICES, strict=True):
            _, first, row = np.unique(self.column(index).numpy(), return_index=True, return_inverse=True)
            found[f"{name}s"] = self.column(name)[first].contiguous()
            rows.append(row.reshape(-1))
        found["pairs"] = torch.from_numpy(np.unique(np.stack(rows, axis=1), axis=0))
        return found

    def compute(self) -> dict[str, float]:
        """Return the metrics by name: mean losses, and recall@k and MRR (mean reciprocal rank) in both directions.

        The directions are video to text and text to video. The retrieval metrics are NaN if an embedding is not finite,
        and left out without embeddings.
        """
        metrics = {name: float(self.column(name).double().mean()) for name in _LOSSES if name in self}
        retrieval = self.retrieval_set()
        if not retrieval:
            return metrics
        are_finite = all(bool(rows.isfinite().all()) for rows in retrieval.values())
        measured = retrieval_metrics(**retrieval) if are_finite else {}
        for direction in DIRECTIONS:
            for name in (*(f"recall@{k}" for k in KS), "mrr"):
                metrics[f"{direction}/{name}"] = measured[direction].metrics[name] if measured else math.nan
        return metrics


class VideoTextTask:
    """Data, network and loss of task video_text: the weighted sum of a contrastive loss and a captioning loss.

    Every sample weighs 1; a caption's loss is the mean over its tokens. The contrastive loss compares all samples of
    the effective batch. So the engine computes it (``joint_loss``) on the outputs of all micro-batches together.

    Args:
        training: training samples with the tensors that ``VideoTextNetwork.forward`` reads.
        validation: validation samples with the same tensors.
        config: the run's parameters, with the weights of the losses. A loss with weight 0 adds no part to the network.
        vocabulary_size: number of tokens of the tokenizer.

    Attributes:
        writes_captions: whether ``forward`` of a network with a decoder also writes captions and returns their
            ``caption_tokens`` (B, L); initially False.
    """

    joint_tensors = _INDICES

    def __init__(self, training: SampleSet, validation: SampleSet, config: RunConfig, vocabulary_size: int) -> None:
        self.training_data, self.validation_data = training, validation
        self.config, self._vocabulary_size = config, vocabulary_size
        self.writes_captions = False

    @property
    def joint_outputs(self) -> tuple[str, ...]:
        """The names of the outputs that the contrastive loss compares; empty without a contrastive loss."""
        return _EMBEDDINGS if self.config.contrastive_weight else ()

    def build_model(self) -> nn.Module:
        """Return the network, initialised from torch's current random state."""
        return VideoTextNetwork(self.config, self._vocabulary_size)

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        """Return the network's outputs for a batch, by name (``VideoTextNetwork.forward``)."""
        outputs: Outputs = model(batch.tensors, self.writes_captions)
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Return the weighted captioning loss, summed over the samples, and the number of samples as its weight.

        The loss is 0 if the network has no decoder.
        """
        device = next(iter(outputs.values())).device
        total = torch.zeros((), device=device)
        if self.config.caption_weight:
            total = total + self.config.caption_weight * outputs["caption_loss"].float().sum()
        return LossSum(total, torch.tensor(float(len(batch)), device=device))

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted contrastive loss of all samples of the effective batch.

        Args:
            model: the network.
            outputs: the embeddings of all samples.
            tensors: ``video_index`` and ``text_index`` of all samples.
        """
        assert isinstance(model.joint, JointSpace)
        compared = [outputs[name].float() for name in _EMBEDDINGS] + [tensors[name] for name in _INDICES]
        return self.config.contrastive_weight * model.joint.scale.contrastive(*compared)

    def new_accumulator(self) -> VideoTextOutputs:
        """Return an empty ``VideoTextOutputs``, which collects the outputs of an evaluation."""
        return VideoTextOutputs()


# --- The training.


def make_clips(
    config: RunConfig,
    pairs: pl.DataFrame,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[str]:
    """Make the clips of ``pairs`` in the shared store, and return the sorted ids of the videos without a clip.

    Existing clips with the same settings are used again. The reason for a missing clip is logged. If ``clip_source``
    needs shards (files with many clips), they are written too.

    Args:
        config: ``num_frames`` and ``fixed_size`` decide the clips; ``corpus`` and ``data_dir`` name the folder.
        pairs: a VIDEO_TEXTS table.
        progress: called with (done, total) numbers of videos.

    Raises:
        DataError: more than ``max_rejected_share`` of the videos have no clip.
        OSError: clips cannot be written.
    """
    store = ClipStore.of(config)
    videos = pairs.unique("video_id", keep="first").sort("video_id").with_columns(label=pl.lit(""), group_id=pl.lit(""))
    root = video_text_root(config)
    report = making.make_clips(store, videos, root, 0, None, progress=progress, workers=config.workers)
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


def train_video_text(
    paths: RunPaths, config: RunConfig, fold: int | None = None, **options: Unpack[TrainingOptions]
) -> TrainingOutcome[TrainingRecord]:
    """Train a video-text network, choose the epoch on the validation part, and predict the test part once.

    The test part is predicted with the weights of the chosen epoch. An earlier attempt is resumed. The input is
    ``tables/video_texts.parquet`` and the videos' clips; missing clips are made. The outputs are the checkpoints, next
    to them ``tokenizer.json``, and ``tables/retrieval_ranks.parquet``, ``tables/captions.parquet`` and
    ``tables/test_embeddings.safetensors``.

    Raises:
        DataError: too many videos have no clip, a part is empty, or an output for the test part is not finite.
        UsageError: no loss has a weight, or the network, the text encoder or its tokenizer does not load.
        FvcError: another error of a training. ``shared_training.OpenTraining`` lists these, and explains ``options``.
    """
    check_config(config)
    read = partial(video_text_training, paths, config)
    return shared_training.train(STAGE, fold, paths, config, read, TrainingRecord, **options)


def check_config(config: RunConfig) -> None:
    """Check that at least one loss has a weight above 0, and that network and text encoder load.

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


def video_text_training(paths: RunPaths, config: RunConfig, ranks: Ranks | None = None) -> Training[TrainingRecord]:
    """Return the plan of a training on the run's pairs (data, network, settings, final scoring), which has not begun.

    The tokenizer is trained here, on the texts of the training part. Missing clips are made by rank 0 of the ranks.

    Args:
        paths: paths of the run.
        config: the run's parameters.
        ranks: the processes that share the training; None: this process alone.

    Raises:
        DataError: too many videos have no clip, or a part has no pair.
        UsageError: the text encoder is missing.
    """
    listed = read_table(paths.video_texts, VIDEO_TEXTS)
    missing = (ranks or Ranks()).from_leader("clips", lambda: make_clips(config, listed))
    pairs = numbered(listed.filter(~pl.col("video_id").is_in(missing)))
    if empty := [part for part in PARTS if part not in set(pairs["part"])]:
        raise DataError(
            f"no pair is left of the part {' and '.join(empty)}: {len(missing)} videos have no clip. Add videos, or "
            "make the groups of the corpus smaller."
        )
    tokenizer = TextTokenizer.train(pairs.filter(part="train")["text"].unique(), config.vocabulary_size)
    encoder = encoder_folder(config)
    # A text encoder from the transformers library has its own tokenizer, so these lengths do not apply to it.
    if config.caption_weight or not encoder:
        lengths = np.array(tokenizer.num_tokens(pairs["text"].unique().to_list()))
        if num_cut := int((lengths > config.max_text_tokens).sum()):
            _logger.warning(
                "%d of %d texts are longer than max_text_tokens %d and are cut; the longest has %d tokens",
                num_cut, len(lengths), config.max_text_tokens, lengths.max(),
            )  # fmt: skip
    source = open_clips(config, _clips_of(ClipStore.of(config), listed, missing))
    of_part = {part: pairs.filter(part=part) for part in PARTS}
    data = {part: VideoTextDataset(source, rows, tokenizer, config) for part, rows in of_part.items()}
    task = VideoTextTask(data["train"], data["validation"], config, tokenizer.vocabulary_size)
    texts = pairs.sort("pair_id").select("pair_id", "text", "part").rows()
    # Versions of the tokenizer library may learn different tokens from the same texts.
    fingerprint = sha256_of_json([source.settings_hash, texts, tokenizer.fingerprint])
    micro_batch = DETECTORS.get(config.model).micro_batch
    return Training(
        stage=STAGE,
        model_name=config.model,
        settings=shared_training.settings_of(config, stable_seed(STAGE, config.seed), micro_batch),
        parameters=config.training_values() | {"text_encoder": content_digest(encoder) if encoder else OWN},
        networks=[Network(task, fingerprint)],
        sizes={f"num_{part}": rows.height for part, rows in of_part.items()},
        finish=partial(_finish, paths, task, data["test"], of_part["test"], tokenizer),
        outputs=[
            paths.retrieval_ranks, paths.captions, paths.embeddings, paths.training_checkpoints(STAGE) / TOKENIZER
        ],
    )  # fmt: skip


def _finish(
    paths: RunPaths,
    task: VideoTextTask,
    test: VideoTextDataset,
    pairs: pl.DataFrame,
    tokenizer: TextTokenizer,
    trained: Sequence[TrainedNetwork],
) -> Finished[TrainingRecord]:
    """Predict the test part once, and log its metrics.

    Args:
        paths: paths of the run.
        task: the task of the training. It is changed: from now on its network also writes captions.
        test: samples of the test part.
        pairs: the pairs of the test part, in the same order.
        tokenizer: tokenizer of the captions.
        trained: the trained network, as the only element.

    Returns:
        The record of the training, and a function that writes the tables, the embeddings and the tokenizer.

    Raises:
        DataError: an output for the test part is not finite.
    """
    (model,) = trained
    found = VideoTextOutputs()
    task.writes_captions = True
    model.predict(test, found)
    retrieval, metrics = found.retrieval_set(), found.compute()
    if not all(map(math.isfinite, metrics.values())):
        raise DataError("outputs for the test part are not finite. Turn amp off, or train with a lower learning_rate.")
    model.log("test", metrics)

    def write() -> None:
        with atomic_output(paths.embeddings) as temporary:
            safetensors.torch.save_file(retrieval, temporary)
        write_table(retrieval_ranks(pairs, retrieval), RETRIEVAL_RANKS, paths.retrieval_ranks)
        write_table(_written_captions(pairs, found, tokenizer), CAPTIONS, paths.captions)
        tokenizer.save(paths.training_checkpoints(STAGE) / TOKENIZER)

    return Finished({"": TrainingRecord(**model.record())}, write)


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
