"""Captions: a decoder that reads a clip's frames and writes a text token by token.

After O. Vinyals et al., "Show and tell" (CVPR 2015), with a transformer: causal attention to what was written,
attention to the clip, and the tokens' embeddings as weights of the output (O. Press and L. Wolf, "Using the output
embedding to improve language models", EACL 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.learning.video_text_transformer import Transformer, later_places, token_embedding


@dataclass(frozen=True)
class TokenNumbers:
    """The tokens that are no text: filling, where a text begins and ends, and others that none may hold (a mask)."""

    padding: int
    begin: int
    end: int
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class CaptionScore:
    """How well texts were foreseen, per sample, over their tokens after the first and up to the end.

    Attributes:
        loss: float32 (B,), mean cross-entropy in nats per token.
        token_accuracy: float32 (B,), share of tokens that were the likeliest; without gradient.
    """

    loss: Tensor
    token_accuracy: Tensor


class CaptionDecoder(nn.Module):
    """A causal transformer over tokens, with a clip's features as memory.

    Args:
        vocabulary_size: V.
        max_tokens: of a text with its beginning and end.
        width: numbers per token and per feature.
        heads: of attention.
        layers: of the transformer.
        numbers: of the special tokens.
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
        """Logits (B, L, V) of what follows each of ``tokens`` int64 (B, L); ``memory`` is (B, T, W)."""
        return self._states(tokens, memory) @ self.embedding.weight.T

    def score(self, tokens: Tensor, memory: Tensor) -> CaptionScore:
        """How well each token of whole texts (B, L) is foreseen from those before it; padding counts for nothing."""
        logits, wanted = self(tokens[:, :-1], memory).float(), tokens[:, 1:]
        counted = (wanted != self._numbers.padding).float()
        counted = counted / counted.sum(1, keepdim=True).clamp_min(1)
        # Flat, because CUDA knows no deterministic cross-entropy over several dimensions.
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
        right = (logits.detach().argmax(2) == wanted).float()
        return CaptionScore((losses * counted).sum(1), (right * counted).sum(1))

    @torch.no_grad()
    def write(self, memory: Tensor, beam_width: int = 1) -> Tensor:
        """The likeliest texts that a beam search finds; with one beam, the likeliest token again and again.

        Texts are compared by the probability of all of their tokens, whatever their length. One that has ended stays
        among the beams as it is. What reaches ``max_tokens`` without an end is cut there. Samples do not see each
        other.

        Args:
            memory: float (B, T, W).
            beam_width: texts that are followed at once.

        Returns:
            int64 (B, max_tokens): beginning, text, end, padding.
        """
        batch, numbers = len(memory), self._numbers
        beams = _Beams.begun(batch, beam_width, self._max_tokens, numbers, memory.device)
        seen = memory.repeat_interleave(beam_width, 0)
        for place in range(1, self._max_tokens):
            states = self._states(beams.tokens[:, :, :place].flatten(0, 1), seen)[:, -1]
            following = (states @ self.embedding.weight.T).float().log_softmax(1)
            following[:, [numbers.padding, numbers.begin, *numbers.others]] = -torch.inf
            beams = beams.extended(following.view(batch, beam_width, -1), place, numbers)
            # Longer is never likelier: an ended text that leads is overtaken by none.
            if bool(beams.ended[:, 0].all()):
                break
        return beams.tokens[:, 0]

    def _states(self, tokens: Tensor, memory: Tensor) -> Tensor:
        hidden = later_places(tokens.shape[1], tokens.device)
        states: Tensor = self.transformer(self.embedding(tokens), hidden, memory)
        return states


@dataclass(frozen=True)
class _Beams:
    """Texts in the making, the likeliest first: tokens int64 (B, K, L), log-probabilities and ended (B, K)."""

    tokens: Tensor
    log_probabilities: Tensor
    ended: Tensor

    @classmethod
    def begun(cls, batch: int, width: int, max_tokens: int, numbers: TokenNumbers, device: torch.device) -> _Beams:
        tokens = torch.full((batch, width, max_tokens), numbers.padding, dtype=torch.int64, device=device)
        tokens[:, :, 0] = numbers.begin
        log_probabilities = torch.full((batch, width), -torch.inf, device=device)
        log_probabilities[:, 0] = 0.0  # the others are copies of the first until it has been continued
        return cls(tokens, log_probabilities, torch.zeros(batch, width, dtype=torch.bool, device=device))

    def extended(self, following: Tensor, place: int, numbers: TokenNumbers) -> _Beams:
        """With the best tokens at ``place``; ``following`` (B, K, V) are log-probabilities."""
        width, vocabulary_size = following.shape[1:]
        following = following.masked_fill(self.ended[:, :, None], -torch.inf)
        following[:, :, numbers.padding] = torch.where(self.ended, 0.0, -torch.inf)
        every = (self.log_probabilities[:, :, None] + following).flatten(1)
        best, places = every.topk(width, dim=1)
        beam, token = places // vocabulary_size, places % vocabulary_size
        tokens = self.tokens.gather(1, beam[:, :, None].expand(-1, -1, self.tokens.shape[2]))
        tokens[:, :, place] = token
        return _Beams(tokens, best, self.ended.gather(1, beam) | (token == numbers.end))
