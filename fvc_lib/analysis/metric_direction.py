"""Of which metrics less is better, and of which more."""

from __future__ import annotations

from typing import Literal

Direction = Literal["lower", "higher"]

_LOWER = (
    "loss", "log_loss", "brier_score", "brier_score_uncalibrated", "expected_calibration_error",
    "expected_calibration_error_uncalibrated", "equal_error_rate", "mean_absolute_error", "mean_squared_error",
    "median_rank",
)  # fmt: skip
_HIGHER = (
    "roc_auc", "average_precision", "true_positive_rate_at_5_percent", "f1", "balanced_accuracy", "accuracy",
    "matthews_correlation",
)  # fmt: skip


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
