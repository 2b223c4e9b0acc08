"""A small pre-norm transformer for texts, frames and captions, with the same results in training and evaluation.

After A. Vaswani et al., "Attention is all you need" (2017), with the norm before each part (R. Xiong et al., "On layer
normalization in the transformer architecture", ICML 2020). The layers of torch are not used: without gradient they
compute in another way, which rounds differently; and their keys have a bias, which the softmax cancels. There is no
dropout, so the result of a sample does not depend on its batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.engine.task import Outputs

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
        queries, keys, values = (
            self._by_head(x) for x in (self.query(asking), self.key(seen), self.value(seen))
        )  # (B, heads, positions, W / heads)
        scores = queries @ keys.transpose(2, 3) * (1 / queries.shape[-1] ** 0.5)
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        mixed = scores.softmax(dim=3) @ values
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _by_head(self, positions: Tensor) -> Tensor:
        batch, length, width = positions.shape
        return positions.view(batch, length, self._heads, width // self._heads).transpose(1, 2)


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
        self._with_memory = with_memory
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
        if self._with_memory:
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

        L is at most ``num_places``. The other arguments are those of ``TransformerLayer``.
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


def later_places(length: int, device: torch.device) -> Tensor:
    """Return the causal mask bool (1, L, L): entry (0, i, j) is true if j comes after i, so i must not see j."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).triu(1)


# --- Captions: a decoder that reads a clip's frames and writes a text token by token.
# After O. Vinyals et al., "Show and tell" (CVPR 2015), with a transformer: causal attention to the tokens so far,
# attention to the clip, and the tokens' embeddings as weights of the output (O. Press and L. Wolf, "Using the output
# embedding to improve language models", EACL 2017).


@dataclass(frozen=True)
class TokenNumbers:
    """The ids of the special tokens in a vocabulary."""

    padding: int
    begin: int
    end: int
    others: tuple[int, ...] = ()  # further tokens that are never written, such as a mask


class CaptionDecoder(nn.Module):
    """A causal transformer over a vocabulary of V tokens, with a clip's features as memory.

    Args:
        vocabulary_size: V.
        max_tokens: length of the longest text, with its begin and end tokens.
        width: W, size of token embeddings and of the clip's features.
        heads: attention heads per layer.
        layers: number of layers.
        numbers: ids of the special tokens.
    """

    def __init__(
        self, vocabulary_size: int, max_tokens: int, *, width: int, heads: int, layers: int, numbers: TokenNumbers
    ) -> None:
        super().__init__()
        self._numbers = numbers
        self._max_tokens = max_tokens
        self.embedding = token_embedding(vocabulary_size, width)
        self.transformer = Transformer(width, heads, layers, max_tokens - 1, with_memory=True)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """Return logits (B, L, V): for every token, those of the token that follows it.

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
        counted = (wanted != self._numbers.padding).float()
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
        batch, numbers = len(memory), self._numbers
        tokens = torch.full((batch, self._max_tokens), numbers.padding, device=memory.device)
        tokens[:, 0] = numbers.begin
        ended = torch.zeros(batch, dtype=torch.bool, device=memory.device)
        for place in range(1, self._max_tokens):
            following = self._states(tokens[:, :place], memory)[:, -1] @ self.embedding.weight.T
            following[:, [numbers.padding, numbers.begin, *numbers.others]] = -torch.inf
            token = following.argmax(1)
            tokens[:, place] = token.where(~ended, numbers.padding)
            ended |= token == numbers.end
            if bool(ended.all()):
                break
        return tokens

    def _states(self, tokens: Tensor, memory: Tensor) -> Tensor:
        hidden = later_places(tokens.shape[1], tokens.device)
        return self.transformer(self.embedding(tokens), hidden, memory)
