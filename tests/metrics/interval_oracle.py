"""The ends of an interval as the textbooks have them, from the metric's value in each half-sample."""

import numpy as np
from scipy import special, stats


def naive_ends(value, replicates, degrees, *, scale="logit", confidence=0.95):
    """``scale``: that on which the interval is symmetric."""
    drawn = np.array([each for each in replicates if np.isfinite(each)])
    reach = stats.t.ppf((1 + confidence) / 2, degrees) * np.sqrt(np.mean((drawn - value) ** 2))
    if scale == "plain":
        return value - reach, value + reach
    if scale == "log":
        return tuple(np.exp(np.log(value) + sign * reach / value) for sign in (-1, 1))
    slope = 1 / (value * (1 - value))
    return tuple(special.expit(special.logit(value) + sign * reach * slope) for sign in (-1, 1))
