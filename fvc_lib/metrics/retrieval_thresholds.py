"""Between what scores a candidate is, may be or is not at least as similar as each positive of a query."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fvc_lib.metrics.retrieval_positives import Positives
from fvc_lib.metrics.weighting import FloatArray, IntArray

Array = npt.NDArray[np.generic]
_FLOATS: dict[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float64: np.float64}


class Thresholds:
    """Between what scores a candidate may or may not be as similar as a positive, of consecutive queries.

    Queries with fewer positives come first.

    Attributes:
        first: int64 (Q,), place of each query's lowest positive in ``low`` and ``high``.
        number: int64 (Q,), its positives.
        low: (P,), what reaches less than this is less similar.
        high: (P,), what reaches this is at least as similar.
    """

    def __init__(
        self,
        positives: Positives,
        start: int,
        margins: FloatArray,
        scale: float,
        dtype: torch.dtype,
        *,
        is_exact: bool,
    ) -> None:
        starts = positives.starts[start : start + margins.size + 1]
        self.offset = int(starts[0])  # place of the first positive among those of all queries
        self.first, self.number = starts[:-1] - starts[0], np.diff(starts)
        similarity = positives.similarity[starts[0] : starts[-1]]
        self._none = _highest(dtype)
        if is_exact:
            self.low = self.high = similarity.astype(np.int32 if dtype == torch.int32 else _FLOATS[dtype])
            return
        around = np.repeat(margins + positives.margin[start : start + margins.size], self.number)
        self.low = _outward((similarity - around) / scale, -1, dtype)
        self.high = _outward((similarity + around) / scale, 1, dtype)

    def level(self, values: Array, level: int, start: int, stop: int) -> Array:
        """(stop - start,): of the queries ``[start, stop)``, that of the ``level``-th lowest positive.

        What nothing reaches where there is none.
        """
        number, first = self.number[start:stop], self.first[start:stop]
        asking = int(np.searchsorted(number, level, side="right"))
        reached = np.empty(stop - start, dtype=values.dtype)
        reached[:asking] = self._none
        reached[asking:] = values[first[asking:] + level]
        return reached

    def passed(self, values: Array, query: IntArray, scores: Array) -> IntArray:
        """int64 (K,): how many thresholds of its query each score reaches, by bisection."""
        left, right = np.zeros_like(query), self.number[query].copy()
        for _ in range(int(right.max(initial=0)).bit_length()):
            middle = (left + right) // 2
            searching = left < right
            place = np.minimum(self.first[query] + middle, values.size - 1)
            reached = searching & (values[place] <= scores)
            left, right = np.where(reached, middle + 1, left), np.where(searching & ~reached, middle, right)
        return left


def _outward(values: FloatArray, towards: int, dtype: torch.dtype) -> Array:
    """The next number of the scores' format below (``towards`` -1) or above (1) each value."""
    if dtype == torch.int32:
        whole = np.floor(values) - 1 if towards < 0 else np.ceil(values) + 1
        return np.asarray(np.clip(whole, -_highest(dtype), _highest(dtype)).astype(np.int32))
    kind = _FLOATS[dtype]
    return np.asarray(np.nextafter(values.astype(kind), kind(towards * np.inf)))


def _highest(dtype: torch.dtype) -> float | int:
    """What no score reaches."""
    return 2**31 - 1 if dtype == torch.int32 else np.inf
