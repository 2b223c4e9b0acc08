"""Of which metrics less is better, and of which more."""

from __future__ import annotations

from typing import Literal

from fvc_lib.metrics.over_folds import LOWER_IS_BETTER, METRICS

Direction = Literal["lower", "higher"]

_LOWER = (*sorted(LOWER_IS_BETTER), "loss", "log_loss", "mean_absolute_error", "mean_squared_error", "median_rank")
_HIGHER = (*sorted(METRICS.keys() - LOWER_IS_BETTER), "accuracy")


def direction(metric: str) -> Direction:
    """Which way ``metric`` gets better.

    Raises:
        ValueError: it is not known here, or has no better way, such as a learning rate.
    """
    if metric in _LOWER:
        return "lower"
    if metric in _HIGHER:
        return "higher"
    known = ", ".join((*_LOWER, *_HIGHER))
    raise ValueError(f"metric: got {metric!r}, wanted one of {known}; or say direction='lower' or 'higher'.")
