"""Differences of two models on the same videos, and the rule by which a result is above its control.

A control is a score without real knowledge, such as that of shuffled labels. Two intervals that overlap do not show
that two models are equally good. A hard video is mostly hard for both models; only a paired comparison, here of the
same groups, removes that effect.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr

from fvc_lib.metrics.classification import ANY_NUMBER, FloatArray
from fvc_lib.metrics.intervals import ReplicateValues, deviations, interval_ends

# Differences up to this size are rounding, as of sums in another order, and count as 0.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class PairedDifference:
    """The second model's metric minus the first's, with an interval that contains it."""

    value: float  # on all rows; NaN where either metric is undefined
    low: float  # lower end; NaN where ``value`` is NaN, or where a class has fewer than two groups
    high: float  # upper end; NaN in the same cases
    p_value: float  # two-sided, of the hypothesis that there is no difference; NaN where the ends are NaN
    confidence: float  # nominal coverage of the interval, such as 0.95
    replicates: int  # number of half-samples with a defined difference
    num_groups: int  # number of groups
    num_rows: int  # number of rows


def paired_difference(drawn: ReplicateValues, first: int, second: int, *, confidence: float = 0.95) -> PairedDifference:
    """Return the second measure minus the first, with an interval and a p-value.

    In every half-sample both models are judged on the same groups. Interval and p-value are those of Student's t, from
    the mean square of the half-samples' differences about the value (``metrics.intervals.group_interval``). A
    difference that is the same in all half-samples gets an interval as wide as the bound of a perfect value. The
    p-value is at least 2 / 2 ** groups, the smallest p-value of a test that swaps the models within groups. Swapping
    the two measures changes only the signs.

    Args:
        drawn: values of at least two measures.
        first: index of the first measure in ``drawn``.
        second: index of the second measure.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: ``confidence`` is outside (0, 1).
    """
    value = float(_without_rounding(drawn.values[second] - drawn.values[first]))
    differences = _without_rounding(drawn.replicates[second] - drawn.replicates[first])[None]
    differences = differences[:, np.isfinite(differences[0]) & math.isfinite(value)]
    ends = interval_ends(np.array([value]), differences, ANY_NUMBER, drawn.groups, confidence)
    low, high = (float(end[0]) for end in ends)
    if low == high != 0:
        unseen = 1 - (1 - confidence) ** (1 / drawn.groups.comparisons)
        low, high = low - unseen, high + unseen
    spread = float(deviations(np.array([value]), differences)[1][0])
    p_value = 1.0
    if value or not math.isfinite(spread):
        distance = -abs(value) / spread if spread else -math.inf
        in_tails = 2 * stdtr(drawn.groups.degrees_of_freedom, distance)
        p_value = float(np.maximum(in_tails, 2.0 ** (1 - drawn.num_groups)))  # NaN where nothing was drawn
    return PairedDifference(value, low, high, p_value, confidence, differences.size, drawn.num_groups, drawn.num_rows)


def holm(p_values: npt.ArrayLike) -> FloatArray:
    """Return Holm's adjusted p-values (M,) of ``p_values`` (M,); one of at most alpha is significant at level alpha.

    The k-th smallest of M p-values is multiplied by M - k + 1. The result is at least that of the next smaller p-value,
    and at most 1. NaN means that nothing was tested: it stays NaN and does not count in M. Source: S. Holm, "A simple
    sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).

    Raises:
        ValueError: another shape, or a value outside [0, 1].
    """
    values = np.asarray(p_values, dtype=np.float64)
    tested = ~np.isnan(values)
    if values.ndim != 1 or not ((values[tested] >= 0) & (values[tested] <= 1)).all():
        raise ValueError(f"p_values: got {values.tolist()}, wanted (M,) in [0, 1], NaN where nothing was tested.")
    order = np.flatnonzero(tested)[np.argsort(values[tested], kind="stable")]
    scaled = values[order] * np.arange(order.size, 0, -1)
    adjusted = np.full(values.shape, np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def _without_rounding(differences: FloatArray) -> FloatArray:
    return np.where(np.abs(differences) <= _ROUNDING, 0.0, differences)


# --- The rule by which a result may be called above its control


def is_above_control(
    value: float | None, low: float | None, control_value: float | None, control_high: float | None
) -> bool:
    """Return whether a result lies above its control, given the intervals of both.

    The difference of the values must exceed sqrt(a ** 2 + b ** 2), where a is the distance from the result down to
    ``low`` and b that from the control up to ``control_high``. This is the lower limit of a difference by the MOVER
    method for independent results: G. Y. Zou and A. Donner, "Construction of confidence limits about effect measures",
    Statistics in Medicine 27 (2008). Two results on the same videos mostly rise and fall together; for them the rule is
    conservative.

    A result within its control's interval is never above it. Nor is a result whose interval contains the control's
    value. A control whose interval has no width, such as a constant score with an AUC of 0.5, counts as a fixed number.
    Where a value or an end is missing (None or NaN), the answer is False.

    The simpler rule, that each value lies outside the other's interval, errs more often. For two independent, equally
    good results it is true in 8.3 of 100 cases, this rule in 2.5. In simulations with percentile intervals of the AUC
    (20 to 380 groups of equal size, or 20 to 100 of uneven sizes, independent scores) it was true in 7.0 to 9.2 of 100
    cases, this rule in 2.7 to 4.0. With scores that share 0.7 of their variance it was at most 1.5, this rule at most
    0.3.
    """
    if value is None or low is None or control_value is None or control_high is None:
        return False
    # A comparison with NaN is false, which is what is wanted of an undefined number.
    return value - control_value > math.hypot(max(value - low, 0.0), max(control_high - control_value, 0.0))
