"""The AUC of every slice of one class against the whole other class, in all half-samples at once.

One detector's scores are ranked once. A slice's AUC is the mean, over its own videos, of the share of the other class
that they stand on the right side of; so all slices share the same cumulative sums.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.metrics.classification import FloatArray, IntArray, divide

NOT_KNOWN, ALL_OTHERS = "not known", "all others"
_MOST_SLICES = 30


@dataclass(frozen=True)
class SlicedClass:
    """One class cut into slices, ready for any number of weights of its rows.

    Made by ``sliced_class``; ``aucs`` is (S, R) for S slices under R sets of weights of all N rows.
    """

    rows: IntArray  # (n,), rows of the class that are in a slice, slice by slice
    starts: IntArray  # (S,), where each slice begins in ``rows``; none is empty
    others: IntArray  # (m,), rows of the other class, ascending by score
    below: IntArray  # (n,), how many of ``others`` score less than each of ``rows``
    up_to: IntArray  # (n,), how many score no more
    fakes_are_sliced: bool

    def aucs(self, weights: FloatArray) -> FloatArray:
        """(S, R) from weights (R, N); NaN where a slice or the other class weighs nothing."""
        ahead = np.zeros((weights.shape[0], self.others.size + 1))
        np.cumsum(weights[:, self.others], axis=1, out=ahead[:, 1:])
        total = ahead[:, -1:]
        won = (np.take(ahead, self.below, axis=1) + np.take(ahead, self.up_to, axis=1)) / 2  # a tie is half a win
        if not self.fakes_are_sliced:
            won = total - won
        own = weights[:, self.rows]
        won *= own
        return divide(
            np.add.reduceat(won, self.starts, axis=1), np.add.reduceat(own, self.starts, axis=1) * total
        ).T  # fmt: skip


def slices_of(column: pl.Series, of_class: npt.NDArray[np.bool_]) -> tuple[list[str], IntArray]:
    """The values of ``column`` in the class, and which of them each row (N,) has, -1 outside the class.

    The rarest of many are one slice, and so are the rows without a value.
    """
    known = column.to_numpy()[of_class]
    present = pl.Series("value", known, dtype=pl.String)
    counts = present.drop_nulls().value_counts(sort=True).sort("count", "value", descending=[True, False])
    values = counts["value"].to_list()
    if not values:
        return [], np.empty(0, dtype=np.int64)
    shown = values if len(values) <= _MOST_SLICES else values[: _MOST_SLICES - 1]
    code_of = {value: number for number, value in enumerate(shown)}
    names = list(shown)
    if len(values) > len(shown):
        code_of |= dict.fromkeys(values[len(shown) :], len(names))
        names.append(ALL_OTHERS)
    if present.null_count():
        code_of[None] = len(names)
        names.append(NOT_KNOWN)
    of_row = np.full(of_class.size, -1, dtype=np.int64)
    of_row[of_class] = [code_of[value] for value in known.tolist()]
    return names, of_row


def sliced_class(labels: IntArray, scores: FloatArray, slice_of_row: IntArray, *, sliced_label: int) -> SlicedClass:
    """Rank the rows once.

    Args:
        labels: int64 (N,) of 0 (real) and 1 (fake).
        scores: float64 (N,), higher for fake.
        slice_of_row: int64 (N,), 0 to S - 1 for rows of ``sliced_label`` that are in a slice, -1 for all others; no
            slice without a row.
        sliced_label: the class that is cut; each slice is set against the whole other class.

    Raises:
        ValueError: no slice, an empty one, or a row of the other class in one.
    """
    inside = np.flatnonzero(slice_of_row >= 0)
    rows = inside[np.argsort(slice_of_row[inside], kind="stable")]
    counts = np.bincount(slice_of_row[rows]) if rows.size else np.zeros(1, dtype=np.int64)
    if not counts.all() or (labels[rows] != sliced_label).any():
        raise ValueError(f"slice_of_row: wanted slices from 0 on, none of them empty, of rows labelled {sliced_label}.")
    others = np.flatnonzero(labels != sliced_label)
    others = others[np.argsort(scores[others], kind="stable")]
    return SlicedClass(
        rows,
        np.concatenate([[0], np.cumsum(counts)[:-1]]),
        others,
        np.searchsorted(scores[others], scores[rows], side="left"),
        np.searchsorted(scores[others], scores[rows], side="right"),
        sliced_label == 1,
    )
