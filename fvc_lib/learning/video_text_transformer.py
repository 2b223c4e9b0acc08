"""A small pre-norm transformer, for texts, frames and captions, that gives the same numbers in training and scoring.

After A. Vaswani et al., "Attention is all you need" (2017), with the norm before each part (R. Xiong et al., "On layer
normalization in the transformer architecture", ICML 2020). Torch's own layers take another path without gradient, which
rounds otherwise, and give keys a bias, which the softmax cancels: it would never be trained. There is no dropout, so
nothing is drawn, and a sample's numbers do not depend on which others it is computed with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.services.errors import UsageError

_EXPANSION = 4  # of the hidden layer after each attention, as in the paper
_INITIAL_DEVIATION = 0.02  # of embeddings, as in GPT-2 and CLIP


class Attention(nn.Module):
    """Scaled dot-product attention with several heads.

    Args:
        width: numbers per position.
        heads: divides ``width``.

    Raises:
        UsageError: it does not.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"text_heads: got {heads}, wanted a divisor of text_width, which is {width}.")
        self._heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, asking: Tensor, seen: Tensor, hidden: Tensor | None = None) -> Tensor:
        """(B, Q, W) from ``asking`` (B, Q, W) and ``seen`` (B, K, W).

        Args:
            asking: positions that look.
            seen: positions that are looked at.
            hidden: bool that broadcasts to (B, Q, K); true where a position must not be seen. One is seen by each.
        """
        queries, keys, values = (
            self._by_head(x) for x in (self.query(asking), self.key(seen), self.value(seen))
        )  # (B, heads, positions, W / heads)
        scores = queries @ keys.transpose(2, 3) * (1 / queries.shape[-1] ** 0.5)
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        found = scores.softmax(dim=3) @ values
        result: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return result

    def _by_head(self, positions: Tensor) -> Tensor:
        batch, length, width = positions.shape
        return positions.view(batch, length, self._heads, width // self._heads).transpose(1, 2)


class TransformerLayer(nn.Module):
    """Attention to oneself, to a memory where there is one, then a small network at each position.

    Args:
        width: numbers per position.
        heads: of attention.
        with_memory: whether there is a memory to look at.
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
        """(B, L, W) from ``positions`` (B, L, W); ``hidden`` as in ``Attention``; ``memory`` (B, K, W), seen whole."""
        own = self.own_norm(positions)
        positions = positions + self.own_attention(own, own, hidden)
        if self._with_memory:
            positions = positions + self.memory_attention(self.memory_norm(positions), memory)
        result: Tensor = positions + self.contract(F.gelu(self.expand(self.norm(positions))))
        return result


class Transformer(nn.Module):
    """Layers between embeddings with places and a last norm.

    Args:
        width: numbers per position.
        heads: of attention.
        layers: how many.
        num_places: the longest sequence.
        with_memory: whether the layers look at a memory.
    """

    def __init__(self, width: int, heads: int, layers: int, num_places: int, *, with_memory: bool = False) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(num_places, width) * _INITIAL_DEVIATION)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, with_memory=with_memory) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, positions: Tensor, hidden: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """(B, L, W) from ``positions`` (B, L, W), L at most ``num_places``; see ``TransformerLayer``."""
        positions = positions + self.places[: positions.shape[1]]
        for layer in self.layers:
            positions = layer(positions, hidden, memory)
        result: Tensor = self.norm(positions)
        return result


def token_embedding(vocabulary_size: int, width: int) -> nn.Embedding:
    """Embeddings (V, W) that begin small, so that they may also serve as the output's weights."""
    embedding = nn.Embedding(vocabulary_size, width)
    nn.init.normal_(embedding.weight, std=_INITIAL_DEVIATION)
    return embedding


def later_places(length: int, device: torch.device) -> Tensor:
    """Bool (1, L, L): what lies after each position, which a decoder must not see."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).triu(1)
