"""Operating points: rules that choose a decision threshold, such as a largest false-alarm rate or costs of errors.

Choose the threshold on some videos, and judge its decisions on others. On the same videos decisions look too good.
"""

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fvc_lib.metrics.classification import (
    SHARE,
    FloatArray,
    IntArray,
    SumsMetric,
    best_threshold,
    cells_of_confusion,
    check_labels,
    check_scores,
    confusion_curve,
    divide,
)
from fvc_lib.metrics.intervals import group_codes, strata_of_groups

WANTED = "'best', 'fpr=SHARE' such as fpr=0.01, or 'cost=FALSE_ALARM:MISS' such as cost=5:1"
_NUMBER = r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
_FORM = re.compile(rf"best|fpr={_NUMBER}|cost={_NUMBER}:{_NUMBER}")


@dataclass(frozen=True)
class OperatingPoint:
    """The rule by which a decision threshold is chosen.

    Attributes:
        kind: ``best`` chooses the highest balanced accuracy. ``fpr`` finds as many fakes as possible while at most a
            given share of the reals is called fake. ``cost`` chooses the least cost, with equal weight of both classes.
        false_positive_rate: for ``fpr``, the largest share of the reals that may be called fake; else 1.
        false_alarm_cost: for ``cost``, the cost of a real called fake; else 1.
        miss_cost: for ``cost``, the cost of a fake called real; else 1.
    """

    kind: Literal["best", "fpr", "cost"] = "best"
    false_positive_rate: float = 1.0
    false_alarm_cost: float = 1.0
    miss_cost: float = 1.0

    def __str__(self) -> str:
        """Return the rule as a short text, such as ``best``, ``fpr=0.01`` or ``cost=5:1``.

        The function ``operating_point`` turns the text into an operating point again.
        """
        return {
            "best": "best",
            "fpr": f"fpr={self.false_positive_rate:g}",
            "cost": f"cost={self.false_alarm_cost:g}:{self.miss_cost:g}",
        }[self.kind]

    @property
    def says(self) -> str:
        """Return the rule in words, such as ``at most 1 % of the reals called fake``."""
        return {
            "best": "the highest balanced accuracy",
            "fpr": f"at most {100 * self.false_positive_rate:g} % of the reals called fake",
            "cost": f"the least cost where a false alarm costs {self.false_alarm_cost:g} and a missed fake "
            f"{self.miss_cost:g}, and reals and fakes count alike",
        }[self.kind]

    def is_resolved_by(self, num_real: int) -> bool:
        """Return whether ``num_real`` reals are enough to choose a threshold for this false-positive rate.

        They are enough if the rate permits at least one of them to be called fake. The result is always True for other
        kinds than ``fpr``.
        """
        return self.kind != "fpr" or num_real * self.false_positive_rate > 1 - 1e-9


def operating_point(text: str) -> OperatingPoint:
    """Return the operating point that ``text`` states: ``best``, ``fpr=0.01`` or ``cost=5:1``.

    ``cost=5:1`` means that a false alarm costs five times as much as a missed fake.

    Raises:
        ValueError: the text has another form, the share is not inside (0, 1), or a cost is not above 0.
    """
    bare = text.strip().lower().replace(" ", "")
    if found := _FORM.fullmatch(bare):
        share, *costs = (float(number or 1) for number in found.groups())
        share_fits = (share < 1) == bare.startswith("fpr")
        if share > 0 and min(costs) > 0 and share_fits:
            return OperatingPoint(bare.partition("=")[0], share, *costs)  # type: ignore[arg-type]
    raise ValueError(f"operating point: got {text!r}, wanted {WANTED}, a share inside (0, 1) and costs above 0.")


def threshold_at(point: OperatingPoint, labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the threshold that ``point`` chooses on these videos; a score of at least the threshold means fake.

    The threshold lies midway between neighbouring distinct scores. If all videos are called fake, it is the lowest
    score; if none is, it is infinity. ``fpr`` takes the lowest threshold at which at most the stated share of reals is
    called fake; it needs no fakes. ``best`` and ``cost`` need both classes, and take the highest of equally good
    thresholds. For scores in [0, 1], ``best`` is computed by ``best_threshold``.

    Args:
        point: rule that chooses the threshold.
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,), finite; any scale, higher for fake.

    Raises:
        ValueError: labels are not 0 and 1, scores are not N finite numbers, or a needed class is missing.
    """
    checked = check_labels(labels)
    values = check_scores(scores, checked.size)
    needs_fakes = point.kind != "fpr"
    if not (checked == 0).any() or (needs_fakes and not (checked == 1).any()):
        raise ValueError(f"operating point {point}: wanted {'reals and fakes' if needs_fakes else 'reals'}.")
    if point.kind == "best" and values.min() >= 0 and values.max() <= 1:
        return best_threshold(checked, values)
    curve = confusion_curve(checked, values, np.ones((1, checked.size)))
    hits = np.append(0.0, curve.true_positives[0])  # [k]: fakes at or above the k-th highest distinct score
    alarms = np.append(0.0, curve.false_positives[0])
    if point.kind == "fpr":
        # Counts, not rates, are compared: 1 of 20 must not fail 0.05 by rounding.
        most_alarms = point.false_positive_rate * curve.num_real[0] * (1 + 1e-12)
        called = np.flatnonzero(alarms <= most_alarms)[-1]
    else:
        # Costs of error rates, times the number of pairs: exact as long as the costs are whole numbers.
        misses = (curve.num_fake[0] - hits) * curve.num_real[0]
        costs = point.miss_cost * misses + point.false_alarm_cost * alarms * curve.num_fake[0]
        called = np.argmin(costs)  # the strictest
    # thresholds[k] calls exactly the k highest distinct scores fake. The middle of neighbouring floats may round down.
    upper = curve.thresholds[:-1]
    lower = curve.thresholds[1:]
    middle = upper / 2 + lower / 2
    is_between = (lower < middle) & (middle <= upper)
    between = np.where(is_between, middle, upper)
    strictest_first = [math.inf, *between, curve.thresholds[-1]]
    return float(strictest_first[called])


# A threshold is chosen on one half of the groups and applied to the other half.


def halves(labels: ArrayLike, groups: ArrayLike, *, seed: int = 0) -> IntArray:
    """Divide the groups into two halves at random; return the half of each row, 0 or 1, int64 (N,).

    All rows of a group are in the same half. Groups with reals only, with fakes only and with both are divided evenly.

    Raises:
        ValueError: labels are not 0 and 1, or ``groups`` is not (N,).
    """
    checked = check_labels(labels)
    group_of_row, num_groups = group_codes(groups, checked.size)
    generator = np.random.default_rng([seed, 1])
    half = np.zeros(num_groups, dtype=np.int64)
    start = 0
    for members in strata_of_groups(checked, group_of_row, num_groups):
        half[generator.permutation(members)] = (np.arange(members.size) + start) % 2
        start += members.size
    return half[group_of_row]


def crossed_thresholds(point: OperatingPoint, labels: ArrayLike, scores: ArrayLike, half: ArrayLike) -> FloatArray:
    """Return a threshold for each row, float64 (N,): the one that ``point`` chooses on the other half of the rows.

    Rows of half 0 get the threshold chosen on half 1, and the other way round. So the threshold of a row never depends
    on its own score or label.

    Args:
        point: rule that chooses a threshold.
        labels: int (N,) of 0 (real) and 1 (fake).
        scores: float (N,), higher for fake.
        half: (N,), the half of each row, 0 or 1 (``halves``).

    Raises:
        ValueError: labels are not 0 and 1, scores are not finite, or a half lacks a needed class (``threshold_at``).
    """
    checked, of_row = check_labels(labels), np.asarray(half)
    values = check_scores(scores, checked.size)
    chosen = [threshold_at(point, checked[of_row == part], values[of_row == part]) for part in (0, 1)]
    return np.where(of_row == 0, chosen[1], chosen[0])


@partial(SumsMetric, cells_of_confusion, bounds=SHARE)
def share_of_fakes_called(sums: FloatArray) -> FloatArray:
    """Return the share of fakes called fake: the true-positive rate, 0 to 1.

    Call it as ``share_of_fakes_called(labels, decisions)`` with decisions of 0 and 1; ``sums`` are internal.
    """
    return divide(sums[:, 0], sums[:, 0] + sums[:, 1])


@partial(SumsMetric, cells_of_confusion, bounds=SHARE)
def share_of_reals_called(sums: FloatArray) -> FloatArray:
    """Return the share of reals called fake: the false-positive rate, 0 to 1.

    Call it as ``share_of_reals_called(labels, decisions)`` with decisions of 0 and 1; ``sums`` are internal.
    """
    return divide(sums[:, 2], sums[:, 2] + sums[:, 3])
