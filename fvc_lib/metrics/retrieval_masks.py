"""Comparing a block of scores with thresholds and counting what passes, eight answers at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from fvc_lib.metrics.weighting import IntArray

COMPARED_BY_NUMPY = frozenset({"cpu"})  # which does it in half of torch's time
_ROWS_PER_SUM = 128  # and a byte of a column's sum one answer of each row
_WORDS_AT_ONCE = 4096


class Mask:
    """Answers (R, C), each a byte of 0 or 1; rows and columns are filled up with 0 to whole sums and words.

    There are at most ``retrieval_plan.MOST_TEXTS`` columns: a byte of a row's sum holds one answer of every word.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.shape = rows, columns
        padded = -(-rows // _ROWS_PER_SUM) * _ROWS_PER_SUM, -(-columns // 8) * 8
        self._bytes = torch.zeros(padded, dtype=torch.bool, device=device)
        self._answers = self._bytes[:rows, :columns]
        self._words = self._bytes.view(torch.int64)

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

    def differing(self, other: Mask) -> None:
        """Answer where this and ``other`` differ."""
        torch.bitwise_xor(self._words, other._words, out=self._words)

    def positions(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Rows and columns of the answers that are 1, some at a time, in order."""
        words = self._words.reshape(-1).nonzero().squeeze(1)
        every = self._bytes.view(torch.uint8).reshape(-1, 8)
        for start in range(0, len(words), _WORDS_AT_ONCE):
            some = words[start : start + _WORDS_AT_ONCE]
            word, byte = every[some].nonzero().cpu().numpy().T
            places = some.cpu().numpy()[word] * 8 + byte
            yield places // self._bytes.shape[1], places % self._bytes.shape[1]
