"""Texts as token ids: byte-pair encoding of UTF-8 bytes, learned from the training texts.

The method is that of R. Sennrich et al., "Neural machine translation of rare words with subword units" (ACL 2016), on
bytes as in GPT-2. So any text can be encoded, and is decoded unchanged. The four special tokens (padding, beginning,
end, mask) have ids but do not stand for any text: ``<end>`` in a caption is encoded as letters and brackets.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.errors import DataError

PAD, BEGIN, END, MASK = range(4)
NUM_MARKS = 4
SMALLEST_VOCABULARY = NUM_MARKS + 256  # all bytes
# One thread: the processes that load data are forks, and threads do not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextTokenizer:
    """A learned vocabulary of byte-pair tokens.

    Ids are 0 to ``vocabulary_size - 1``. First come four special tokens (padding, beginning, end, mask), then the 256
    bytes, then the merged sequences of bytes.
    """

    def __init__(self, byte_pairs: Any) -> None:
        self._byte_pairs = byte_pairs

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary_size: int) -> "TextTokenizer":
        """Learn a vocabulary of at most ``vocabulary_size`` tokens from ``texts``, including the four special tokens.

        The order of ``texts`` does not matter. Pairs of tokens that occur only once are not merged, because this would
        only memorise texts. ``vocabulary_size`` must be at least ``SMALLEST_VOCABULARY``.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        byte_pairs = Tokenizer(models.BPE())
        byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        byte_pairs.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size - NUM_MARKS,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        byte_pairs.train_from_iterator(sorted(texts), trainer)
        return cls(byte_pairs)

    @classmethod
    def load(cls, path: Path) -> "TextTokenizer":
        """Load a tokenizer from the JSON file ``path``, which ``save`` wrote.

        Raises:
            DataError: the file is missing or of another format.
        """
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{str(path)!r}: is no tokenizer of a training of task video_text: {error}.") from error

    @property
    def vocabulary_size(self) -> int:
        """Return the number of token ids, including the four special tokens (padding, beginning, end, mask)."""
        return NUM_MARKS + int(self._byte_pairs.get_vocab_size())

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary, in hexadecimal."""
        return sha256_of_json(self._byte_pairs.to_str())

    def encode(self, texts: Sequence[str], max_tokens: int) -> Tensor:
        """Return the token ids of B texts, int64 (B, max_tokens).

        A row is ``BEGIN``, the text's tokens, ``END``, then ``PAD``. Long texts are cut. ``max_tokens`` must be at
        least 2. No text may hold lone surrogates, which UTF-8 cannot encode.
        """
        ids = torch.full((len(texts), max_tokens), PAD, dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            tokens = self._tokens(text)[: max_tokens - 2]
            row[: len(tokens) + 2] = torch.tensor([BEGIN, *tokens, END])
        return ids

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of every uncut text, including the special tokens of beginning and end."""
        return [len(self._tokens(text)) + 2 for text in texts]

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of token ids (L,) up to the first ``END``.

        Other special tokens, such as padding, are skipped. Invalid UTF-8 becomes U+FFFD.
        """
        numbers = takewhile(lambda number: number != END, map(int, ids))
        tokens = [number - NUM_MARKS for number in numbers if number >= NUM_MARKS]
        return str(self._byte_pairs.decode(tokens, skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON, atomically."""
        write_text(path, self._byte_pairs.to_str())

    def _tokens(self, text: str) -> list[int]:
        return [number + NUM_MARKS for number in self._byte_pairs.encode(text, add_special_tokens=False).ids]
