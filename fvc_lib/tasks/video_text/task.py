"""Task video_text: samples that pair a clip with a text, the network, its outputs and its losses.

The loss is the weighted sum of a contrastive loss and a captioning loss.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import weights_path
from fvc_lib.detectors.own.transformer import TokenNumbers
from fvc_lib.detectors.own.video_text import JointSpace, NetworkPlan, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, MASK, PAD, TextTokenizer
from fvc_lib.detectors.texts.transformers_encoders import OWN, encoder_tensors
from fvc_lib.engine.task import Batch, LossSum, Outputs, Sample, SampleColumns, SampleSet
from fvc_lib.metrics.video_text import DIRECTIONS, KS, Ranking, retrieval_metrics
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video.data import ClipSource

TOKENIZER = "tokenizer.json"  # file of the tokenizer, next to the weights
TOKENS = "caption_tokens"
_LOSSES = ("caption_loss", "token_accuracy")
_EMBEDDINGS = ("video_embedding", "text_embedding")
_INDICES = ("video_index", "text_index")
_TEXT_WIDTH, _TEXT_LAYERS, _TEXT_HEADS = 128, 2, 4  # of the text transformer and the decoder


def numbered(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return ``pairs`` (VIDEO_TEXTS) with columns ``video_index`` and ``text_index``, both int64.

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
    """Return the network's inputs for N texts, by name, one row per text.

    These are ``tokens`` int64 (N, L), and the inputs of the text encoder if there is one.

    Args:
        tokenizer: turns texts into tokens.
        texts: the N texts.
        max_tokens: L, the number of tokens per text, beginning and end included.
        encoder: folder of a text encoder from the transformers library; empty: none.
    """
    tensors = {"tokens": tokenizer.encode(texts, max_tokens)}
    return tensors | encoder_tensors(encoder, texts, max_tokens) if encoder else tensors


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
        """Return the metrics by name: mean losses, and recall@k and MRR (mean reciprocal rank) in both directions.

        The directions are video to text and text to video. The retrieval metrics are NaN if an embedding is not finite,
        and left out without embeddings.
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
    """Return the ranking of texts for each video, and of videos for each text, by the direction's name.

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
        """The names of the outputs that the contrastive loss compares; empty without a contrastive loss."""
        return _EMBEDDINGS if self._plan.contrastive else ()

    def build_model(self) -> nn.Module:
        """Return the network, initialised from torch's current random state."""
        return VideoTextNetwork(self._plan)

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
        if self._plan.captions:
            total = total + self.config.caption_weight * outputs["caption_loss"].float().sum()
        return LossSum(total, torch.tensor(float(len(batch)), device=device))

    def joint_loss(self, model: nn.Module, outputs: Outputs, tensors: Mapping[str, Tensor], rows: range) -> Tensor:
        """Return the weighted contrastive loss of some samples, compared with all samples of the effective batch.

        Args:
            model: the network.
            outputs: the embeddings of all samples.
            tensors: ``video_index`` and ``text_index`` of all samples.
            rows: row numbers of the samples whose loss is returned.
        """
        space = model.joint
        assert isinstance(space, JointSpace)
        video, text = (outputs[name].float() for name in _EMBEDDINGS)
        indices = tensors["video_index"], tensors["text_index"]
        return self.config.contrastive_weight * space.scale.contrastive(video, text, *indices, rows)

    def new_accumulator(self) -> VideoTextOutputs:
        """Return an empty collector of outputs."""
        return VideoTextOutputs()


def network_plan(config: RunConfig, vocabulary_size: int) -> NetworkPlan:
    """Return the sizes and parts of the network that ``config`` describes.

    A loss with weight 0 adds no part to the network. ``vocabulary_size`` is the number of tokens of the tokenizer.
    """
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
