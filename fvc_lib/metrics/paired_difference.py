"""Differences of two models on the same videos, and the rule by which a result is above its control.

Two intervals that overlap do not show that two models are alike. A hard video mostly costs both models; only a paired
comparison, here group by group, removes that.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr

from fvc_lib.metrics.classification import ANY_NUMBER, FloatArray
from fvc_lib.metrics.intervals import ReplicateValues, deviations, interval_ends

# Sums of the same numbers in another order differ by less than this: no difference between models.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class PairedDifference:
    """The second model's metric minus the first's, with an interval that contains it."""

    value: float  # on the rows as they are; NaN where either metric is undefined
    low: float  # lower end; NaN where ``value`` is, or where too few groups carry a class
    high: float  # upper end, likewise
    p_value: float  # two-sided, of the hypothesis that there is no difference; NaN where the ends are
    confidence: float  # nominal coverage of the interval, say 0.95
    replicates: int  # half-samples with a defined difference
    num_groups: int  # groups that were drawn from
    num_rows: int  # rows


def paired_difference(drawn: ReplicateValues, first: int, second: int, *, confidence: float = 0.95) -> PairedDifference:
    """Return the difference of two measures of one set of draws, by their numbers: of R models, R (R - 1) / 2 pairs.

    In every half-sample both models are judged on the same groups; interval and p-value are those of Student's t for
    the mean square of the differences about their value (``metrics.intervals.group_interval``). A difference that no
    half-sample changes gets the width of the bound that a perfect value gets. The p-value is at least 2 / 2 ** groups,
    the share of the ways to swap the models within groups that say as much. Swapping the models changes the signs and
    nothing else.

    Args:
        drawn: of at least two measures.
        first: the number of the first measure.
        second: of the second.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: a confidence outside (0, 1).
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
    """Return Holm's adjusted p-values (M,) of all ``p_values`` (M,) that were tested: adjusted <= alpha is a finding.

    The k-th smallest of M is multiplied by M - k + 1, never falls below a smaller one's, and stays at most 1. NaN stays
    NaN and is not counted: nothing was tested there. Source: S. Holm, "A simple sequentially rejective multiple test
    procedure", Scandinavian Journal of Statistics 6 (1979).

    Raises:
        ValueError: not (M,), or a value outside [0, 1].
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
    """Return whether a result lies above its control by more than both intervals together leave open.

    The difference must exceed the root of the squares of the two distances that point at each other: from the result
    down to ``low``, and from the control up to ``control_high``. That is the lower limit of a difference recovered from
    the limits of its parts (G. Y. Zou and A. Donner, "Construction of confidence limits about effect measures",
    Statistics in Medicine 27 (2008), the MOVER), for two results that know nothing of each other; for two on the same
    videos, which mostly rise and fall together, it is careful. A result within its control's interval is never above
    it, nor is one that has the control's value within its own; a control without spread (a constant score has an AUC of
    0.5 in every replicate) leaves the result's own interval alone to decide. Where a value or an end is missing (None
    or NaN) nothing was shown, and the answer is no.

    To ask only that each lies beyond the other's interval, as was done before, takes for known what is estimated twice:
    of two independent results that are equally good that is true in 8.3 of 100 cases (1.96 / sqrt(2) standard
    deviations of the difference), where this rule is true in 2.5. With percentile intervals of the AUC over 20 to 380
    groups of one size, or 20 to 100 of uneven sizes (simulated, independent scores), 7.0 to 9.2 became 2.7 to 4.0; with
    scores that share 0.7 of their variance at most 1.5 became at most 0.3.
    """
    if value is None or low is None or control_value is None or control_high is None:
        return False
    # A comparison with NaN is false, which is what is wanted of an undefined number.
    return value - control_value > math.hypot(max(value - low, 0.0), max(control_high - control_value, 0.0))
