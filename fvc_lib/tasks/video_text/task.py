"""Task video_text: samples that pair a clip with a text, the network, its outputs and its losses.

The loss is the weighted sum of a contrastive loss and a captioning loss.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from fvc_lib.detectors.own.video_text import JointSpace, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.detectors.texts.transformers_encoders import encoder_folder, encoder_tensors
from fvc_lib.engine.task import Batch, LossSum, Outputs, SampleColumns, SampleSet
from fvc_lib.metrics.video_text import DIRECTIONS, KS, retrieval_metrics
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video.data import ClipDataset, ClipRow, ClipSource

TOKENIZER = "tokenizer.json"  # file of the tokenizer, next to the weights
TOKENS = "caption_tokens"
_LOSSES = ("caption_loss", "token_accuracy")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")


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
        pairs: rows of the table that ``numbered`` returns.
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
    """Collect the outputs for all pairs of a video and a text, and compute metrics of them.

    It keeps the indices of video and text of every pair. It also keeps the embeddings, losses and written captions, if
    the network returns them.
    """

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the outputs for one batch.

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
    """Train with the weighted sum of a contrastive loss and a captioning loss.

    Every sample weighs 1; a caption's loss is the mean over its tokens. The contrastive loss compares all samples of
    the effective batch. So it is the engine's joint loss, which is computed on the outputs of all micro-batches.

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
        """Return an empty collector of outputs."""
        return VideoTextOutputs()
