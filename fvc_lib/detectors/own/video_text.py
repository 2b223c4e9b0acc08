"""The network of task video_text (retrieval and captions): a video encoder, and parts for texts and captions.

Only the parts that the configured losses need are built, so every parameter receives a gradient.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.network import recomputable_blocks_of, trunk_of_config
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, MASK, PAD
from fvc_lib.detectors.texts.transformers_encoders import TransformersEncoder, encoder_folder
from fvc_lib.engine.task import Outputs
from fvc_lib.services.config import RunConfig
from fvc_lib.services.registry import DETECTORS

# --- A small pre-norm transformer for texts, frames and captions, with the same results in training and evaluation.
# After A. Vaswani et al., "Attention is all you need" (2017), with the norm before each part (R. Xiong et al., "On
# layer normalization in the transformer architecture", ICML 2020). The layers of torch are not used: without gradient
# they compute in another way, which rounds differently; and their keys have a bias, which the softmax cancels. There is
# no dropout, so the result of a sample does not depend on its batch.

_EXPANSION = 4  # width of the hidden layer after each attention, relative to the model's, as in the paper
_INITIAL_DEVIATION = 0.02  # standard deviation of initial embeddings, as in GPT-2 and CLIP


class Attention(nn.Module):
    """Scaled dot-product attention of ``heads`` heads on states of size ``width``, a multiple of ``heads``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, asking: Tensor, seen: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the attended values, float (B, Q, W).

        Args:
            asking: float (B, Q, W), states from which the queries are computed.
            seen: float (B, K, W), states from which keys and values are computed.
            hidden: bool that broadcasts to (B, Q, K), true where a query must not see a key. Every query must see at
                least one key. None: nothing is hidden.
        """
        projected = (self.query(asking), self.key(seen), self.value(seen))
        queries, keys, values = (
            states.unflatten(2, (self._heads, -1)).transpose(1, 2) for states in projected
        )  # (B, heads, positions, W / heads)
        scores = queries @ keys.transpose(2, 3) * (1 / queries.shape[-1] ** 0.5)
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        mixed = scores.softmax(dim=3) @ values
        return self.output(mixed.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """A pre-norm layer: self-attention, then a two-layer network on every position.

    Args:
        width: W, size of a state.
        heads: number of attention heads.
        with_memory: whether every position also attends to a memory (cross-attention), between the two parts.
    """

    def __init__(self, width: int, heads: int, *, with_memory: bool = False) -> None:
        super().__init__()
        self.own_norm = nn.LayerNorm(width)
        self.own_attention = Attention(width, heads)
        if with_memory:
            self.memory_norm = nn.LayerNorm(width)
            self.memory_attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, _EXPANSION * width)
        self.contract = nn.Linear(_EXPANSION * width, width)

    def forward(self, positions: Tensor, hidden: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """Return the new states (B, L, W).

        Args:
            positions: float (B, L, W), states of L positions.
            hidden: bool that broadcasts to (B, L, L), true where a position must not see another; as for ``Attention``.
            memory: float (B, K, W), states of K other positions to attend to; only for a layer with memory.
        """
        own = self.own_norm(positions)
        positions = positions + self.own_attention(own, own, hidden)
        if memory is not None:
            positions = positions + self.memory_attention(self.memory_norm(positions), memory)
        return positions + self.contract(F.gelu(self.expand(self.norm(positions))))


class Transformer(nn.Module):
    """A pre-norm transformer: learned position embeddings, ``layers`` layers and a last norm.

    Args:
        width: W, size of a state.
        heads: number of attention heads per layer.
        layers: number of layers.
        num_places: largest number of positions of an input.
        with_memory: whether layers also attend to a memory (cross-attention).
    """

    def __init__(self, width: int, heads: int, layers: int, num_places: int, *, with_memory: bool = False) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(num_places, width) * _INITIAL_DEVIATION)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, with_memory=with_memory) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, positions: Tensor, hidden: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """Return the states (B, L, W) for inputs ``positions`` (B, L, W), to which position embeddings are added here.

        L is at most ``num_places``. ``hidden``, bool that broadcasts to (B, L, L), is true where a position must not
        see another. ``memory``, float (B, K, W), are states of other positions to which layers with memory attend.
        """
        positions = positions + self.places[: positions.shape[1]]
        for layer in self.layers:
            positions = layer(positions, hidden, memory)
        return self.norm(positions)


def token_embedding(vocabulary_size: int, width: int) -> nn.Embedding:
    """Return an embedding layer for V tokens with weights (V, W).

    Initial values are small, so that the weights can also be those of the output layer.
    """
    embedding = nn.Embedding(vocabulary_size, width)
    nn.init.normal_(embedding.weight, std=_INITIAL_DEVIATION)
    return embedding


# --- Captions: a decoder that reads a clip's frames and writes a text token by token.
# After O. Vinyals et al., "Show and tell" (CVPR 2015), with a transformer: causal attention to the tokens so far,
# attention to the clip, and the tokens' embeddings as weights of the output (O. Press and L. Wolf, "Using the output
# embedding to improve language models", EACL 2017).


class CaptionDecoder(nn.Module):
    """A causal transformer over a vocabulary of V tokens, with a clip's features as memory.

    Args:
        vocabulary_size: V.
        max_tokens: length of the longest text, with its begin and end tokens.
        width: W, size of token embeddings and of the clip's features.
        heads: attention heads per layer.
        layers: number of layers.
    """

    def __init__(self, vocabulary_size: int, max_tokens: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self.embedding = token_embedding(vocabulary_size, width)
        self.transformer = Transformer(width, heads, layers, max_tokens - 1, with_memory=True)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """Return logits (B, L, V): at every position, the logits of the next token over the vocabulary.

        Args:
            tokens: int64 (B, L), token ids of B texts.
            memory: float (B, T, W), features of the clips.
        """
        return self._states(tokens, memory) @ self.embedding.weight.T

    def score(self, tokens: Tensor, memory: Tensor) -> Outputs:
        """Return the loss and the accuracy of predicting every token of given texts from the tokens before it.

        Padding does not count.

        Args:
            tokens: int64 (B, L), the texts.
            memory: float (B, T, W), features of the clips.

        Returns:
            A mapping with ``caption_loss`` float32 (B,), the mean cross-entropy per token in nats; and
            ``token_accuracy`` float32 (B,), the share of tokens whose logit is the highest, without gradient.
        """
        logits, wanted = self(tokens[:, :-1], memory).float(), tokens[:, 1:]
        counted = (wanted != PAD).float()
        counted = counted / counted.sum(1, keepdim=True).clamp_min(1)
        # Flat, because CUDA knows no deterministic cross-entropy over several dimensions.
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
        right = (logits.detach().argmax(2) == wanted).float()
        return {"caption_loss": (losses * counted).sum(1), "token_accuracy": (right * counted).sum(1)}

    @torch.no_grad()
    def write(self, memory: Tensor) -> Tensor:
        """Write a text for every sample by greedy decoding: the most probable token is taken at every step.

        A text without an end token is cut at ``max_tokens``. Samples do not influence each other.

        Args:
            memory: float (B, T, W), features of the clips.

        Returns:
            int64 (B, max_tokens): the begin token, the text, the end token, and padding.
        """
        tokens = torch.full((len(memory), self._max_tokens), PAD, device=memory.device)
        tokens[:, 0] = BEGIN
        ended = tokens[:, 0] == END
        for place in range(1, self._max_tokens):
            following = self._states(tokens[:, :place], memory)[:, -1] @ self.embedding.weight.T
            following[:, [PAD, BEGIN, MASK]] = -torch.inf
            token = following.argmax(1)
            tokens[:, place] = token.where(~ended, PAD)
            ended |= token == END
            if bool(ended.all()):
                break
        return tokens

    def _states(self, tokens: Tensor, memory: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = torch.ones(1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
        return self.transformer(self.embedding(tokens), later, memory)


# --- Contrastive losses
# Contrastive losses compare all videos of a batch with all of its texts, several of which may belong together. They are
# sums over samples (pairs of a video and a text).

# As in CLIP: a temperature between 1/100 and 1 that begins at 0.07. The scale is its inverse.
LOG_SCALE_BOUNDS = (0.0, math.log(100.0))
SOFTMAX_LOG_SCALE = math.log(1 / 0.07)
SIGMOID_LOG_SCALE = math.log(10.0)  # as in SigLIP


def positive_pairs(video_index: Tensor, text_index: Tensor) -> Tensor:
    """Return a matrix, bool (B, B), that marks the videos and texts of a batch that belong together.

    A sample is a pair of a video and a text; videos and texts may occur in several samples. Entry (i, j) is true if any
    sample has both the video of sample i and the text of sample j.

    Args:
        video_index: int64 (B,), equal for equal videos.
        text_index: int64 (B,), equal for equal texts.
    """
    same_video, same_text = ((index[:, None] == index).float() for index in (video_index, text_index))
    return same_video @ same_text > 0  # the number of samples with this video and this text


def _softmax_of_queries(similarities: Tensor, positives: Tensor) -> Tensor:
    """Return the cross-entropy over candidates, summed over the queries, a scalar.

    After A. Radford et al., "Learning transferable visual models from natural language supervision" (CLIP, 2021). The
    target of a query with several positives is spread evenly over them, as in J. Yang et al., "Unified contrastive
    learning in image-text-label space" (CVPR 2022).

    Args:
        similarities: float (Q, C), queries by candidates, already multiplied by the scale.
        positives: bool (Q, C), at least one true value in every row.
    """
    wanted = positives.to(similarities.dtype)
    return -(similarities.log_softmax(1) * (wanted / wanted.sum(1, keepdim=True))).sum()


class SimilarityScale(nn.Module):
    """A layer for scaled cosine similarities of videos and texts, and the contrastive loss on them.

    Similarities are multiplied by a learned scale. For the sigmoid loss, a learned bias is added. The bias begins near
    the log odds that a random video and text of a batch belong together. (SigLIP begins at -10, for batches of 32,768.)

    Args:
        loss: ``softmax`` or ``sigmoid``.
        num_together: number of samples of an effective batch, over all micro-batches and ranks (processes).
    """

    def __init__(self, loss: str, num_together: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(SOFTMAX_LOG_SCALE if loss == "softmax" else SIGMOID_LOG_SCALE))
        if loss == "sigmoid":
            self.bias = nn.Parameter(torch.tensor(-math.log(max(num_together, 2))))
        self._loss = loss

    def forward(self, video: Tensor, text: Tensor) -> Tensor:
        """Return the scaled similarities (V, T) of unit vectors of videos (V, E) and texts (T, E)."""
        with torch.no_grad():  # after the last step, as in CLIP; ``clamp`` in the graph would stop the gradient
            self.log_scale.clamp_(*LOG_SCALE_BOUNDS)
        similarities = video @ text.T * self.log_scale.exp()
        return similarities + self.bias if self._loss == "sigmoid" else similarities

    def contrastive(self, video: Tensor, text: Tensor, video_index: Tensor, text_index: Tensor) -> Tensor:
        """Return the contrastive loss summed over all B samples, a scalar.

        The sigmoid loss (X. Zhai et al., "Sigmoid loss for language image pre-training", SigLIP, ICCV 2023) is the
        binary cross-entropy of whether a video and a text belong together, over all pairs. The softmax loss is half of
        the sum of two cross-entropies: of every video over all texts, and of every text over all videos.

        Args:
            video: unit vectors (B, E) of the videos of all samples.
            text: unit vectors (B, E) of the texts of all samples.
            video_index: int64 (B,), equal for equal videos.
            text_index: int64 (B,), equal for equal texts.
        """
        similarities, positives = self(video, text), positive_pairs(video_index, text_index)
        if self._loss == "sigmoid":
            return -F.logsigmoid(torch.where(positives, similarities, -similarities)).sum()
        return 0.5 * (_softmax_of_queries(similarities, positives) + _softmax_of_queries(similarities.T, positives.T))


# --- The network

_TEMPORAL_LAYERS = 1  # transformer layers above the trunk; a clip has few frames


class VideoEncoder(nn.Module):
    """A detector's trunk (its network without head), followed by a transformer over the features of the frames.

    A trunk on whole clips gives the transformer a single vector per clip.

    Args:
        config: the run's parameters: ``model`` names the detector, ``model_weights`` its weights. The number and size
            of frames per clip are also taken from here.
        width: W, number of features of a frame in the transformer.
        heads: number of attention heads of the transformer.

    Raises:
        UsageError: the detector has no trunk, or the weights do not fit.
    """

    def __init__(self, config: RunConfig, width: int, heads: int) -> None:
        super().__init__()
        self.trunk = trunk = trunk_of_config(DETECTORS.get(config.model), config)
        self.norm = nn.LayerNorm(trunk.frame_feature_size)
        self.narrow = nn.Linear(trunk.frame_feature_size, width)
        num_places = config.clips.num_frames if getattr(trunk, "per_frame", True) else 1
        self.transformer = Transformer(width, heads, _TEMPORAL_LAYERS, num_places)

    def forward(self, frames: Tensor) -> Tensor:
        """Return features (B, T', W) of frames uint8 (B, T, 3, H, W); T' is T, or 1 for a trunk on whole clips."""
        features = getattr(self.trunk, "frame_features", self.trunk)(frames)
        features = features.unsqueeze(1) if features.dim() == 2 else features
        return self.transformer(self.narrow(self.norm(features)))


class TextEncoder(nn.Module):
    """A small transformer over a text's tokens; the features of a text are the mean of its states over the tokens."""

    def __init__(self, vocabulary_size: int, max_tokens: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.output_size = width
        self.embedding = token_embedding(vocabulary_size, width)
        self.transformer = Transformer(width, heads, layers, max_tokens)

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the features (B, W) of B texts; ``tensors`` holds their tokens, ``tokens`` int64 (B, L)."""
        tokens = tensors["tokens"]
        padding = tokens == PAD
        states = self.transformer(self.embedding(tokens), padding[:, None, :])
        there = (~padding).to(states.dtype)[:, :, None]
        return (states * there).sum(1) / there.sum(1)


class JointSpace(nn.Module):
    """A network that maps videos and texts to unit vectors in a common space, where they can be compared.

    It consists of a text encoder, a linear projection for videos and one for texts, and a scale for similarities.
    """

    def __init__(self, config: RunConfig, vocabulary_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        folder, sizes = encoder_folder(config), (vocabulary_size, config.max_text_tokens, width, heads, layers)
        self.text = TransformersEncoder(folder) if folder else TextEncoder(*sizes)
        self.video_projection = nn.Linear(width, config.embedding_size, bias=False)
        self.text_projection = nn.Linear(self.text.output_size, config.embedding_size, bias=False)
        self.scale = SimilarityScale(config.contrastive_loss, config.effective_batch_size)

    def of_videos(self, memory: Tensor) -> Tensor:
        """Return unit vectors float32 (B, E) of clips whose frames have the features ``memory`` (B, T, W)."""
        return F.normalize(self.video_projection(memory.mean(1)).float(), dim=1)

    def of_texts(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return unit vectors float32 (B, E) of texts; ``tensors`` are the inputs of the text encoder."""
        return F.normalize(self.text_projection(self.text(tensors)).float(), dim=1)


class VideoTextNetwork(nn.Module):
    """A network for retrieval of videos by texts, and for captions.

    It has a video encoder. With ``contrastive_weight`` it also has a joint space (vectors of videos and texts that can
    be compared), with ``caption_weight`` a caption decoder.

    Args:
        config: the run's parameters.
        vocabulary_size: number of tokens of the tokenizer.
        width: features of a frame or token in the transformers.
        heads: attention heads of a transformer's layer.
        layers: layers of the transformers of texts and captions.
    """

    def __init__(
        self, config: RunConfig, vocabulary_size: int, *, width: int = 128, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.video = VideoEncoder(config, width, heads)
        self.joint = JointSpace(config, vocabulary_size, width, heads, layers) if config.contrastive_weight else None
        self.captions = (
            CaptionDecoder(vocabulary_size, config.max_text_tokens, width=width, heads=heads, layers=layers)
            if config.caption_weight
            else None
        )

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the parts whose activations gradient checkpointing computes again."""
        transformers = [module for module in self.modules() if isinstance(module, Transformer)]
        return *recomputable_blocks_of(self.video.trunk), *(layer for each in transformers for layer in each.layers)

    def forward(self, tensors: Mapping[str, Tensor], write: bool = False) -> Outputs:
        """Return the outputs that losses and metrics need, B samples each.

        Args:
            tensors: ``frames`` uint8 (B, T, 3, S, S), ``tokens`` int64 (B, L), and for a pretrained text encoder
                the tensors of ``encoder_tensors``.
            write: whether to generate captions.

        Returns:
            With a contrastive loss, ``video_embedding`` and ``text_embedding`` float32 (B, E), unit vectors. With
            captions, ``caption_loss`` and ``token_accuracy`` float32 (B,); and if ``write``, ``caption_tokens`` int64
            (B, max_tokens).
        """
        memory, outputs = self.video(tensors["frames"]), Outputs()
        if self.joint is not None:
            outputs["video_embedding"] = self.joint.of_videos(memory)
            outputs["text_embedding"] = self.joint.of_texts(tensors)
        if self.captions is not None:
            outputs |= self.captions.score(tensors["tokens"], memory)
            if write:
                outputs["caption_tokens"] = self.captions.write(memory)
        return outputs
