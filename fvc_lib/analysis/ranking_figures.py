"""How well the score ranks fakes above reals: ROC and precision-recall curves with bands."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.figure_parts import (
    band_trace,
    diagonal,
    fake_labels,
    fold_line,
    level_line,
    videos_and_groups,
)
from fvc_lib.analysis.pr_bands import pr_band
from fvc_lib.analysis.roc_bands import roc_band
from fvc_lib.metrics.classification import true_positive_rate_at
from fvc_lib.metrics.weighting import FloatArray
from fvc_lib.metrics.within_folds import within_folds

_HALF = 0.5


def roc_figure(
    predictions: pl.DataFrame,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> go.Figure:
    """The ROC curve averaged over folds, each fold's own behind it, with a cluster-bootstrap band over groups.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        replicates: bootstrap replicates of the band.
        seed: of the draws.
        confidence: pointwise coverage of the band.
    """
    if predictions["label"].n_unique() < 2:
        return theme.nothing_to_show("ROC curve", "Predictions of both classes are needed; none or one is recorded.")
    band = roc_band(
        fake_labels(predictions), predictions["score"].to_numpy(), predictions["group_id"].to_list(),
        predictions["fold"].to_numpy(), replicates=replicates, seed=seed, confidence=confidence,
    )  # fmt: skip
    # The metric of the results and no point of the mean curve, which ties would let lie above it.
    reached = (
        within_folds(true_positive_rate_at, predictions["fold"].to_numpy()) if band.folds else true_positive_rate_at
    )
    found = float(reached(fake_labels(predictions), predictions["score"].to_numpy()))
    figure = theme.figure(
        f"At 5% false alarms the model finds {found:.0%} of the fakes; AUC {band.area:.3f}",
        _subtitle(predictions, confidence, has_band=band.has_interval),
        height=460,
    )
    if band.has_interval:
        figure.add_trace(band_trace(band.false_positive_rates, band.low, band.high))
    shown = "FPR %{x:.3f}<br>TPR %{y:.3f}<extra></extra>"
    _add_curves(figure, band.false_positive_rates, band.mean, band.folds, band.fold_rates, shown)
    figure.add_trace(diagonal("Chance"))
    figure.update_xaxes(title_text="False positive rate (share of reals called fake)", range=[-0.01, 1.01])
    figure.update_yaxes(title_text="True positive rate (share of fakes found)", range=[-0.01, 1.01])
    figure.update_layout(legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"})
    return figure


def pr_figure(
    predictions: pl.DataFrame,
    *,
    replicates: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> go.Figure:
    """The precision-recall curve averaged over folds with a band, beside what guessing reaches: the share of fakes.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        replicates: bootstrap replicates of the band.
        seed: of the draws.
        confidence: pointwise coverage of the band.
    """
    if predictions["label"].n_unique() < 2:
        why = "Predictions of both classes are needed; none or one is recorded."
        return theme.nothing_to_show("Precision and recall", why)
    band = pr_band(
        fake_labels(predictions), predictions["score"].to_numpy(), predictions["group_id"].to_list(),
        predictions["fold"].to_numpy(), replicates=replicates, seed=seed, confidence=confidence,
    )  # fmt: skip
    figure = theme.figure(
        f"Where half of the fakes are found, {band.precision_at(_HALF):.0%} of what is called fake is fake; "
        f"average precision {band.area:.3f}, by guessing {band.chance:.3f}",
        _subtitle(predictions, confidence, has_band=band.has_interval),
        height=460,
    )
    if band.has_interval:
        figure.add_trace(band_trace(band.recalls, band.low, band.high))
    shown = "recall %{x:.3f}<br>precision %{y:.3f}<extra></extra>"
    _add_curves(figure, band.recalls, band.mean, band.folds, band.fold_precisions, shown)
    figure.add_trace(level_line("Guessing (share of fakes)", (band.chance, band.chance)))
    figure.update_xaxes(title_text="Recall (share of fakes found)", range=[-0.01, 1.01])
    figure.update_yaxes(title_text="Precision (share of fakes among those called fake)", range=[-0.01, 1.02])
    figure.update_layout(legend={"x": 0.02, "y": 0.04, "xanchor": "left", "yanchor": "bottom"})
    return figure


def _subtitle(predictions: pl.DataFrame, confidence: float, *, has_band: bool) -> str:
    told = f"band: {confidence:.0%} pointwise cluster bootstrap over groups"
    band = told if has_band else "too few groups for a band"
    return f"{videos_and_groups(predictions)}; curves compare within folds; {band}"


def _add_curves(
    figure: go.Figure, grid: FloatArray, mean: FloatArray, folds: Sequence[int], heights: FloatArray, shown: str
) -> None:
    """The folds' own curves and, over them, their mean."""
    for position, fold in enumerate(folds):
        look = fold_line(fold, is_first=position == 0)
        figure.add_trace(go.Scatter(x=grid, y=heights[position], hovertemplate=f"fold {fold}<br>{shown}", **look))
    line = {"color": theme.MODEL, "width": 2.5}
    figure.add_trace(go.Scatter(x=grid, y=mean, mode="lines", name="Model", line=line, hovertemplate=shown))
