"""Comparing a block of scores with thresholds and counting what passes, eight answers at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from fvc_lib.metrics.weighting import IntArray

COMPARED_BY_NUMPY = frozenset({"cpu"})  # which does it in half of torch's time
_ROWS_PER_SUM = 128  # and a byte of a column's sum one answer of each row
_ANSWERS_AT_ONCE = 1 << 15


class Mask:
    """Answers (R, C), each a byte of 0 or 1; rows and columns are filled up with 0 to whole sums and words.

    ``memory`` is bool, at least of the product of ``padded_shape``. There are at most ``retrieval_plan.MOST_TEXTS``
    columns: a byte of a row's sum holds one answer of every word.
    """

    def __init__(self, rows: int, columns: int, memory: torch.Tensor) -> None:
        self.shape = rows, columns
        padded = padded_shape(rows, columns)
        self._bytes = memory[: padded[0] * padded[1]].view(padded)
        self._bytes[rows:] = False
        self._bytes[:, columns:] = False
        self._answers = self._bytes[:rows, :columns]
        self._words = self._bytes.view(torch.int64)

    @property
    def size(self) -> int:
        """How many answers."""
        return self.shape[0] * self.shape[1]

    def compare(self, scores: torch.Tensor, thresholds: npt.NDArray[np.generic], axis: int) -> None:
        """Answer where ``scores`` (R, C) reach ``thresholds``, one per row (axis 0) or column (axis 1)."""
        shape = (-1, 1) if axis == 0 else (1, -1)
        if scores.device.type in COMPARED_BY_NUMPY:
            np.greater_equal(scores.numpy(), thresholds.reshape(shape), out=self._answers.numpy())
        else:
            reached = torch.from_numpy(thresholds.reshape(shape)).to(scores.device)
            torch.ge(scores, reached, out=self._answers)

    def counts(self, axis: int) -> IntArray:
        """int64: how many answers of each row (axis 0) or column (axis 1) are 1."""
        rows, columns = self.shape
        if axis == 0:
            sums = self._words.sum(1).view(torch.uint8).view(-1, 8).sum(1)[:rows]
        else:
            by_part = self._words.view(-1, _ROWS_PER_SUM, self._words.shape[1]).sum(1)
            sums = by_part.view(torch.uint8).sum(0)[:columns]
        return sums.cpu().numpy().astype(np.int64)

    def positions(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Rows and columns of the answers that are 1, some at a time, in order."""
        counts = self.counts(0)
        rows = np.flatnonzero(counts)
        turns = np.cumsum(counts[rows]) // _ANSWERS_AT_ONCE
        for some in np.split(rows, np.flatnonzero(np.diff(turns)) + 1):
            if some.size:
                words = self._words[torch.from_numpy(some).to(self._bytes.device)].cpu().numpy().reshape(-1)
                held = np.flatnonzero(words)  # mostly few; to look at every answer takes six times as long
                word, byte = np.nonzero(words[held].view(np.uint8).reshape(-1, 8))
                within, columns = np.divmod(held[word] * 8 + byte, self._bytes.shape[1])
                yield some[within], columns


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Of the bytes of a mask of ``rows`` x ``columns`` answers."""
    return -(-rows // _ROWS_PER_SUM) * _ROWS_PER_SUM, -(-columns // 8) * 8


class Masks:
    """Masks by name, of any shape up to ``rows`` x ``columns``, each in the memory of the one before."""

    def __init__(self, rows: int, columns: int) -> None:
        self._size = math.prod(padded_shape(rows, columns))
        self._memory: dict[str, torch.Tensor] = {}
        self._last: dict[str, Mask] = {}

    def get(self, name: str, scores: torch.Tensor) -> Mask:
        """A mask for ``scores`` (R, C); what it answered before under that name is lost."""
        rows, columns = scores.shape
        mask = self._last.get(name)
        if mask is None or mask.shape != (rows, columns):
            if name not in self._memory:
                self._memory[name] = torch.empty(self._size, dtype=torch.bool, device=scores.device)
            mask = self._last[name] = Mask(rows, columns, self._memory[name])
        return mask

    def forget(self) -> None:
        """Give back what they take."""
        self._memory.clear()
        self._last.clear()
