"""Similarities without rounding: which of two dot products is the larger, and whether they are equal.

A matrix product rounds differently with every block shape, so ranks taken from it would depend on how it was cut. Here
a similarity is the real dot product of two rows of float32 numbers. Doubles settle nearly every comparison of two; the
rest, among them all ties, is summed without error.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.weighting import FloatArray

BoolArray = npt.NDArray[np.bool_]
SingleArray = npt.NDArray[np.float32]

_NUMBERS_AT_ONCE = 1 << 17  # of one operand: 1 MB as doubles, which stays in the cache


def rows_at_once(dimensions: int) -> int:
    """Pairs of rows that are multiplied together at once."""
    return max(16, _NUMBERS_AT_ONCE // dimensions)


def double_rounding(dimensions: int) -> float:
    """Most that a dot product in doubles is off, per product of the rows' norms, in whatever order it is summed.

    Products of float32 numbers are exact as doubles, so only the sum rounds. Source: N. J. Higham, "Accuracy and
    Stability of Numerical Algorithms" (2002), section 3.1.
    """
    return 1.01 * (dimensions + 2) * 2.0**-53


def single_rounding(dimensions: int) -> float:
    """The same of a dot product in float32, whose products round too."""
    return 1.01 * (dimensions + 2) * 2.0**-24


def flushed(dimensions: int, norms: FloatArray | float, other_norms: FloatArray | float) -> FloatArray | float:
    """Most that it is off besides, where tiny numbers are flushed to zero."""
    return dimensions * 2.0**-125 * (1 + norms + other_norms)


def double_products(left: SingleArray, right: SingleArray) -> FloatArray:
    """float64 (K,): dot products of the rows of two float32 (K, D)."""
    return np.asarray(np.vecdot(left.astype(np.float64), right.astype(np.float64)))


def at_least(query: SingleArray, candidate: SingleArray, positive: SingleArray) -> BoolArray:
    """Whether ``query . candidate >= query . positive`` in real numbers: bool (K,).

    Args:
        query: float32 (K, D).
        candidate: likewise.
        positive: likewise.
    """
    same = (candidate == positive).all(axis=1)
    if same.all():
        return np.asarray(same)
    query, candidate, positive = (rows[~same].astype(np.float64) for rows in (query, candidate, positive))
    parts = _exact_parts(np.concatenate([query * candidate, -query * positive], axis=1))
    same[~same] = [math.fsum(row) >= 0 for row in parts]
    return np.asarray(same)


def exact_values(left: SingleArray, right: SingleArray) -> FloatArray:
    """float64 (K, R): dot products of rows without rounding, which lexicographic order orders as numbers.

    The first column is the product rounded to the nearest double, the next what is left rounded likewise, and so on
    until nothing is left. Equal products have equal rows.
    """
    terms = [list(row) for row in _exact_parts(left.astype(np.float64) * right.astype(np.float64))]
    columns: list[list[float]] = []
    while not columns or any(columns[-1]):
        columns.append([math.fsum(row) for row in terms])
        for row, value in zip(terms, columns[-1], strict=True):
            row.append(-value)
    return np.array(columns).T


def _exact_parts(terms: FloatArray) -> FloatArray:
    """float64 (K, R) with the same sums as the rows of ``terms`` (K, T), without rounding; overwrites ``terms``.

    The leading bits of all terms of a row are cut off at one place, so that their sum is exact, until nothing is left.
    Source: S. M. Rump, T. Ogita and S. Oishi, "Accurate floating-point summation part I", SIAM J. Sci. Comput. 31
    (2008), algorithm 3.2.
    """
    headroom = math.ceil(math.log2(terms.shape[1] + 2))
    sums = [np.zeros(len(terms))]
    while (largest := np.abs(terms).max(axis=1, initial=0)).any():
        _, exponent = np.frexp(largest)
        cut = np.where(largest > 0, np.ldexp(1.0, exponent + headroom), 0)[:, None]
        leading = (cut + terms) - cut
        terms -= leading
        sums.append(leading.sum(axis=1))
    return np.stack(sums, axis=1)
