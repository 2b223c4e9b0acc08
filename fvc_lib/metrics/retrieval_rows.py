"""The embeddings of one side of a retrieval: as float32 numbers, in the order in which they are streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fvc_lib.metrics.retrieval_exact import SingleArray, rows_at_once
from fvc_lib.metrics.weighting import FloatArray, IntArray

_LARGEST_WHOLE = 2.0**22  # whole numbers up to this are float32 numbers, and so are halves of them
_UNITS = 2.0**-100, 2.0**100  # whose reciprocals are float32 numbers too
_LARGEST_PRODUCT = 2.0**53  # and sums up to this are doubles


@dataclass(frozen=True)
class Rows:
    """Rows of embeddings at their places in the stream.

    Attributes:
        embeddings: (R, D), wherever they are and of any real type.
        norms: float64 (R,), by place, not less than the true ones.
        order: int64 (R,), which row stands at each place; none: each stands at its own.
        unit: what the numbers are divided by, without rounding; similarities are in products of both sides' units.
        largest: magnitude after that, where all are whole numbers so small that products of both sides' rows are exact
            as doubles; none where they are not.
    """

    embeddings: torch.Tensor
    norms: FloatArray
    order: IntArray | None = None
    unit: float = 1.0
    largest: float | None = None

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def dimensions(self) -> int:
        """Numbers per row."""
        return self.embeddings.shape[1]

    def between(self, start: int, stop: int) -> torch.Tensor:
        """float32 (stop - start, D): the rows of places ``[start, stop)``; a view where nothing has to be changed."""
        if self.order is None:
            return self._as_single(self.embeddings[start:stop])
        return self._as_single(self._taken(self.order[start:stop]))

    def at(self, places: IntArray) -> SingleArray:
        """float32 (K, D): the rows of ``places`` (K,)."""
        return self._as_single(self._taken(places if self.order is None else self.order[places])).cpu().numpy()

    def _taken(self, rows: IntArray) -> torch.Tensor:
        return self.embeddings.index_select(0, torch.from_numpy(rows).to(self.embeddings.device))

    def _as_single(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(torch.float32)
        return rows if self.unit == 1.0 else (rows / self.unit).round_()  # devices may multiply by 1 / unit


def in_whole_numbers(videos: Rows, texts: Rows) -> tuple[Rows, Rows]:
    """Both in units of which all their numbers are small multiples, so that no product is rounded; else as they are.

    Embeddings of a few values (bits, signs, counts) have ties everywhere, which doubles would otherwise leave to
    comparisons one by one.
    """
    of_videos = _unit_and_largest(videos)
    of_texts = _unit_and_largest(texts) if of_videos is not None else None
    if of_videos is None or of_texts is None or of_videos[1] * of_texts[1] * videos.dimensions > _LARGEST_PRODUCT:
        return videos, texts
    return _in_units(videos, *of_videos), _in_units(texts, *of_texts)


def _in_units(rows: Rows, unit: float, largest: float) -> Rows:
    return replace(rows, norms=rows.norms / unit, unit=unit, largest=largest)


def _unit_and_largest(rows: Rows) -> tuple[float, float] | None:
    """A unit of which all numbers are multiples by at most 2^22, and the largest multiple; mostly one look tells."""
    found = _in_units_of_the_least(rows) or _in_powers_of_two(rows)
    return found if found is not None and _UNITS[0] <= found[0] <= _UNITS[1] else None


def _in_units_of_the_least(rows: Rows) -> tuple[float, float] | None:
    unit, largest = 0.0, 0.0
    for numbers in _magnitudes(rows):
        if unit == 0 and numbers.any():
            unit = float(numbers[numbers > 0].min())
        multiples = np.rint(numbers / unit) if unit else numbers
        largest = max(largest, float(multiples.max()))
        if largest > _LARGEST_WHOLE or (multiples * unit != numbers).any():
            return None
    return unit or 1.0, largest


def _in_powers_of_two(rows: Rows) -> tuple[float, float] | None:
    grain, largest = np.inf, 0.0
    for numbers in _magnitudes(rows):
        mantissa, exponent = np.frexp(numbers[numbers > 0])
        bits = np.ldexp(mantissa, 24).astype(np.int64)
        grain = min(grain, float(np.ldexp((bits & -bits).astype(np.float64), exponent - 24).min(initial=np.inf)))
        largest = max(largest, float(numbers.max()))
        if largest > grain * _LARGEST_WHOLE:
            return None
    return (grain, largest / grain) if largest else (1.0, 0.0)


def _magnitudes(rows: Rows) -> Iterator[FloatArray]:
    step = rows_at_once(rows.dimensions)
    for start in range(0, len(rows), step):
        yield np.abs(rows.between(start, min(start + step, len(rows))).cpu().numpy().astype(np.float64))
