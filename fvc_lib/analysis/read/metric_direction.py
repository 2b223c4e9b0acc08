"""Of which metrics less is better, of which more, and which are shares of a whole."""

from __future__ import annotations

from typing import Literal

from fvc_lib.metrics.cross_validation import LOWER_IS_BETTER, METRICS

Direction = Literal["lower", "higher"]

_LOWER = (
    *sorted(LOWER_IS_BETTER), "loss", "log_loss", "mean_absolute_error", "mean_squared_error", "median_rank",
    "mean_rank", "mae", "rmse", "caption_loss", "masked_loss",
)  # fmt: skip
_HIGHER = (
    *sorted(METRICS.keys() - LOWER_IS_BETTER), "accuracy", "top1", "top5", "precision", "recall", "macro_precision",
    "macro_recall", "macro_f1", "r2", "mrr", "ndcg", "mean_positive_similarity", "token_f1",
    "content_word_recall", "exact_match", "bleu4", "token_accuracy",
)  # fmt: skip
# How names begin that say of what they are: mae_calories, video_to_text/recall@5.
_KINDS: tuple[tuple[str, Direction], ...] = (
    ("mae_", "lower"),
    ("rmse_", "lower"),
    ("r2_", "higher"),
    ("recall@", "higher"),
)


_SHARES = frozenset(
    {
        "roc_auc", "average_precision", "f1", "balanced_accuracy", "accuracy", "top1", "top5", "precision", "recall",
        "macro_precision", "macro_recall", "macro_f1", "mrr", "ndcg", "token_f1", "content_word_recall", "exact_match",
        "bleu4", "token_accuracy",
    }
)  # fmt: skip


def is_share(metric: str) -> bool:
    """Whether ``metric`` lies in [0, 1] and is read against both ends."""
    name = metric.rpartition("/")[2]
    return name in _SHARES or name.startswith("recall@")


def direction(metric: str) -> Direction:
    """Which way ``metric`` gets better.

    Raises:
        ValueError: it is not known here, or has no better way, such as a learning rate.
    """
    name = metric.rpartition("/")[2]
    if name in _LOWER:
        return "lower"
    if name in _HIGHER:
        return "higher"
    for begins, better in _KINDS:
        if name.startswith(begins):
            return better
    known = ", ".join((*_LOWER, *_HIGHER))
    raise ValueError(f"metric: got {metric!r}, wanted one of {known}; or say direction='lower' or 'higher'.")
