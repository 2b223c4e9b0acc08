"""From a score to a decision: fake where the score reaches the threshold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fvc_lib.metrics.curves import confusion_curve
from fvc_lib.metrics.weighting import FloatArray, IntArray, check_labels, check_probabilities, check_scores


def decide(scores: npt.ArrayLike, threshold: npt.ArrayLike) -> IntArray:
    """1 (fake) where ``scores`` (N,) reach ``threshold``, a number or (N,) (say one per fold), else 0."""
    return (np.asarray(scores, dtype=np.float64) >= np.asarray(threshold, dtype=np.float64)).astype(np.int64)


def best_threshold(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """The threshold in [0, 1] with the highest balanced accuracy on ``labels`` (N,) and ``scores`` (N,).

    Candidates lie midway between neighbouring distinct scores (and between the outermost scores and 0 or 1),
    so that no validation video sits on the threshold. Among equally good ones the nearest to 0.5 wins, then
    the lower: the same for any order of the rows. With one class no threshold is better than another, and the
    answer is 0.5.

    To be called on the inner validation part only.

    Raises:
        ValueError: labels or scores that cannot be meant (shape, NaN, labels other than 0 and 1, scores
        outside [0, 1]).
    """
    checked = check_labels(labels)
    probabilities = check_probabilities(check_scores(scores, checked.size))
    if checked.min() == checked.max():
        return 0.5
    curve = confusion_curve(checked, probabilities, np.ones((1, checked.size)))
    # Counts times the other class's size: balanced accuracy in integers, so that equally good means equal.
    fakes, reals = curve.num_fake[0], curve.num_real[0]
    merit = np.append(0.0, curve.true_positives[0] * reals - curve.false_positives[0] * fakes)
    candidates = _midpoints(curve.thresholds)
    usable = candidates <= 1
    best = candidates[usable & (merit == merit[usable].max())]
    return float(best[np.lexsort((best, np.abs(best - 0.5)))[0]])


def _midpoints(descending: FloatArray) -> FloatArray:
    """(K + 1,): ``[k]`` separates the k highest of K distinct scores from the rest.

    Where the highest score is 1, no threshold in [0, 1] calls nothing fake: that candidate is infinite.
    """
    upper, lower = np.append(1.0, descending), np.append(descending, 0.0)
    middle = lower + (upper - lower) / 2
    # Between neighbouring floats the midpoint rounds to one of them; the lower one would be called fake.
    middle = np.where(middle <= lower, upper, middle)
    middle[0] = middle[0] if descending[0] < 1 else np.inf
    return middle
