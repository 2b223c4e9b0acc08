"""Whether a short, noisy series keeps growing: Theil and Sen's slope with Mann and Kendall's test.

Both look at every pair of points, so a single spike moves neither. H. Theil (1950), P. K. Sen (1968): the median of the
slopes between all pairs. H. B. Mann (1945), M. G. Kendall: how many pairs rise, against chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# One warm-up epoch is left out, and below four points no order is rarer by chance than one in twenty.
MIN_EPOCHS = 5
MIN_MB_PER_EPOCH = 2.0
MIN_GROWN_SHARE = 0.05
SIGNIFICANCE = 0.05
RULE = (
    "a leak is a slope (Theil-Sen, the first epoch left out as warm-up) of more than "
    f"{MIN_MB_PER_EPOCH:g} MB per epoch that over all epochs adds more than {MIN_GROWN_SHARE:.0%} of the peak, that "
    f"the first and the second half show as well, and that chance explains in under {SIGNIFICANCE:.0%} (Mann-Kendall)"
)
_MOST_POINTS = 1000  # all pairs of a thousand points are half a million slopes
_EXACT_UP_TO = 40

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Growth:
    """How a series of one value per epoch grows.

    Attributes:
        num_epochs: points given, the warm-up included.
        slope_mb: per epoch; None with fewer than two epochs after the first.
        level_mb: the fitted line at epoch 0; None likewise.
        p_value: probability of so much order by chance, one-sided; None likewise.
        verdict: by ``RULE``.
    """

    num_epochs: int
    slope_mb: float | None
    level_mb: float | None
    p_value: float | None
    verdict: str  # "leak", "no leak" or "too few epochs"


def growth(epochs: Numbers, used_mb: Numbers) -> Growth:
    """Judge memory over epochs by ``RULE``.

    Args:
        epochs: (n,) ascending, no two alike.
        used_mb: (n,) one finite value each.

    Raises:
        ValueError: the two differ in length, or the epochs do not ascend.
    """
    if epochs.shape != used_mb.shape or np.any(np.diff(epochs) <= 0):
        raise ValueError(f"epochs: got {epochs.tolist()} for {used_mb.size} values, wanted one ascending epoch each.")
    if epochs.size < 3:
        return Growth(epochs.size, None, None, None, "too few epochs")
    kept = np.unique(np.linspace(1, epochs.size - 1, _MOST_POINTS).round().astype(int))
    x, y = epochs[kept], used_mb[kept]
    slope, p_value = theil_sen_slope(x, y), mann_kendall_p(y)
    level = float(np.median(y - slope * x))
    if epochs.size < MIN_EPOCHS:
        return Growth(epochs.size, slope, level, p_value, "too few epochs")
    enough = max(MIN_MB_PER_EPOCH, MIN_GROWN_SHARE * float(np.max(used_mb)) / float(epochs[-1] - epochs[0]))
    middle = x.size // 2
    # A single step would pass the first test, but one of the halves beside it is flat.
    halves = ((x[: x.size - middle], y[: x.size - middle]), (x[middle:], y[middle:]))
    steady = all(theil_sen_slope(*half) > enough for half in ((x, y), *halves))
    return Growth(epochs.size, slope, level, p_value, "leak" if steady and p_value < SIGNIFICANCE else "no leak")


def theil_sen_slope(x: Numbers, y: Numbers) -> float:
    """The median slope over all pairs of points; ``x`` (n,) ascending, n of at least 2."""
    first, second = np.triu_indices(x.size, k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def mann_kendall_p(y: Numbers) -> float:
    """Probability that values in random order would rise in as many pairs as ``y`` (n,) does, or more.

    Exact up to 40 points, normal beyond. Ties count as neither rise nor fall, and the test is then on the safe side.
    """
    first, second = np.triu_indices(y.size, k=1)
    score = int(np.sum(np.sign(y[second] - y[first])))
    if y.size > _EXACT_UP_TO:
        deviation = math.sqrt(y.size * (y.size - 1) * (2 * y.size + 5) / 18)
        return 0.5 * math.erfc((score - 1) / deviation / math.sqrt(2))
    # P(number of falling pairs): the i-th value falls below 0 to i-1 of those before it, each as likely.
    falling = np.ones(1)
    for count in range(2, y.size + 1):
        falling = np.convolve(falling, np.full(count, 1 / count))
    most_falling = (y.size * (y.size - 1) // 2 - score) // 2
    return float(min(1.0, falling[: most_falling + 1].sum()))
