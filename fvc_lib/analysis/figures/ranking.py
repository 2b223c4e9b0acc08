"""How well the score ranks fakes above reals: ROC and precision-recall curves with bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.bands import pointwise_interval, pr_band, roc_band
from fvc_lib.analysis.figures.theme import band_trace, diagonal, fake_labels, fold_line, level_line, videos_and_groups
from fvc_lib.metrics.calibration import (
    RiskCoverage,
    equal_width_edges,
    expected_calibration_error,
    reliability_bins,
    risk_coverage,
)
from fvc_lib.metrics.classification import FloatArray, IntArray, divide, true_positive_rate_at
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import draw_group_counts, group_codes

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


# ----------------------------------------------------------------------------------------------------
# How far a score can be believed as a probability, before and after its temperature.


_FEWEST_GROUPS = 2  # of fewer there is no telling how groups vary


@dataclass(frozen=True)
class BinnedShares:
    """The filled ones of the bins of a reliability diagram, B of them.

    Attributes:
        mean_scores: float64 (B,).
        fake_shares: float64 (B,).
        low: float64 (B,), lower end of the share's interval; NaN where a bin holds fewer than two groups.
        high: float64 (B,).
        counts: int64 (B,), videos.
        num_groups: int64 (B,).
    """

    mean_scores: FloatArray
    fake_shares: FloatArray
    low: FloatArray
    high: FloatArray
    counts: IntArray
    num_groups: IntArray


def binned_shares(
    labels: IntArray,
    scores: FloatArray,
    groups: list[str],
    *,
    num_bins: int = 10,
    replicates: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> BinnedShares:
    """The share of fakes in each bin of one width, with a cluster-bootstrap interval over groups.

    A replicate draws groups as the intervals of the metrics do; a bin that it leaves empty has no share in it.
    """
    edges = equal_width_edges(num_bins)
    bins = reliability_bins(labels, scores, edges)
    filled = np.flatnonzero(bins.counts)
    inside = np.searchsorted(edges[1:-1], scores, side="right")[:, None] == filled
    group_of_row, num_groups = group_codes(groups, labels.size)
    in_bin = np.array([np.unique(group_of_row[column]).size for column in inside.T], dtype=np.int64)
    blocks = draw_group_counts(labels, group_of_row, num_groups, replicates=replicates, seed=seed)
    weights = [counts[:, group_of_row] for counts in blocks]
    shares = np.concatenate([divide(w @ (inside * labels[:, None]), w @ inside.astype(np.float64)) for w in weights])
    ends = [pointwise_interval(column[:, None], confidence) for column in shares.T]
    low, high = (np.array([end[side][0] for end in ends]) for side in (0, 1))
    known = in_bin >= _FEWEST_GROUPS
    return BinnedShares(
        bins.mean_scores[filled], bins.fake_shares[filled], np.where(known, low, np.nan), np.where(known, high, np.nan),
        bins.counts[filled], in_bin,
    )  # fmt: skip


def calibration_figure(
    predictions: pl.DataFrame, num_bins: int = 10, *, replicates: int = 1000, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Share of fakes against mean score in bins, with intervals; the score before its temperature behind it.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        num_bins: bins of one width over [0, 1].
        replicates: bootstrap replicates of each bin's interval.
        seed: of the draws.
        confidence: coverage of each bin's interval.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Calibration", "No predictions are recorded.")
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    before = _probabilities(predictions["logit"].to_numpy())
    edges, groups = equal_width_edges(num_bins), predictions["group_id"].to_list()
    now, then = (expected_calibration_error(labels, values, edges=edges) for values in (scores, before))
    shares = binned_shares(
        labels, scores, groups, num_bins=num_bins, replicates=replicates, seed=seed, confidence=confidence
    )
    figure = theme.figure(
        f"A score is off the share of fakes by {now:.2f} on average; before its temperature by {then:.2f}",
        f"{videos_and_groups(predictions)}; {shares.counts.size} of {num_bins} bins hold videos, the larger the point "
        f"the more; bars: {confidence:.0%} cluster bootstrap, none for a bin of one group; the error (ECE) is biased "
        "upwards when bins hold few",
        height=460,
    )
    figure.add_trace(diagonal("Perfectly calibrated"))
    old = reliability_bins(labels, before, edges)
    held = old.counts > 0
    figure.add_trace(
        go.Scatter(
            x=old.mean_scores[held], y=old.fake_shares[held], mode="markers+lines", name="Before temperature",
            line={"color": theme.CONTROL, "width": 1, "dash": "dot"}, customdata=old.counts[held],
            marker={"color": "white", "size": 8, "symbol": "diamond", "line": {"color": theme.CONTROL, "width": 1.5}},
            hovertemplate="before<br>mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>%{customdata} videos"
            "<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(_bins_trace(shares))
    figure.update_xaxes(title_text="Mean score in the bin (probability of fake)", range=[-0.02, 1.02])
    figure.update_yaxes(title_text="Share of fakes in the bin (of its videos)", range=[-0.04, 1.04])
    figure.update_layout(legend={"x": 0.02, "y": 0.98})
    return figure


def _bins_trace(shares: BinnedShares) -> go.Scatter:
    known = np.isfinite(shares.low)
    up = np.where(known, shares.high - shares.fake_shares, 0.0)
    down = np.where(known, shares.fake_shares - shares.low, 0.0)
    return go.Scatter(
        x=shares.mean_scores, y=shares.fake_shares, mode="markers+lines", name="Score",
        line={"color": theme.MODEL, "width": 1.5},
        error_y={
            "type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": theme.MODEL,
            "thickness": 1.2, "width": 4,
        },
        marker={
            "color": theme.MODEL, "size": 6 + 14 * np.sqrt(shares.counts / max(shares.counts.max(), 1)),
            "opacity": 0.85, "line": {"color": "white", "width": 1},
        },
        customdata=np.stack([shares.counts, shares.num_groups], axis=1),
        hovertemplate="mean score %{x:.2f}<br>share of fakes %{y:.2f}<br>"
        "%{customdata[0]} videos in %{customdata[1]} groups<extra></extra>",
    )  # fmt: skip


def _probabilities(logits: FloatArray) -> FloatArray:
    """The logistic function, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


# ----------------------------------------------------------------------------------------------------
# What abstaining would gain: the share of wrong decisions among the videos a run is surest of.


_GRID = np.linspace(0.05, 1.0, 96)


def risk_coverage_figure(
    predictions: pl.DataFrame, *, replicates: int = 500, seed: int = 0, confidence: float = 0.95
) -> go.Figure:
    """The share of wrong decisions against the share of videos decided, the surest first, with a band over groups.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``; each fold decides by its own threshold.
        replicates: how often the groups are drawn for the band.
        seed: of the draws.
        confidence: pointwise coverage of the band.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Abstaining", "No predictions are recorded.")
    labels, scores = fake_labels(predictions), predictions["score"].to_numpy()
    thresholds = predictions["threshold"].to_numpy()
    curve = risk_coverage(labels, scores, thresholds)
    everything, half = float(curve.risks[-1]), float(_risk_at(curve, np.array([_HALF]))[0])
    group_of_row, num_groups = group_codes(predictions["group_id"].to_list(), labels.size)
    drawn = []
    for counts in draw_group_counts(labels, group_of_row, num_groups, replicates=replicates, seed=seed):
        for of_group in counts.astype(np.int64):
            rows = np.repeat(np.arange(labels.size), of_group[group_of_row])
            drawn.append(_risk_at(risk_coverage(labels[rows], scores[rows], thresholds[rows]), _GRID))
    low, high = pointwise_interval(np.array(drawn), confidence)
    figure = theme.figure(
        _finding(everything, half),
        f"{videos_and_groups(predictions)}; sure: far from the fold's threshold; area {curve.area:.3f}; "
        f"band: {confidence:.0%} pointwise cluster bootstrap over groups",
    )
    if np.isfinite(low).all():
        figure.add_trace(band_trace(_GRID, low, high))
    figure.add_trace(
        go.Scatter(
            x=curve.coverages, y=curve.risks, mode="lines", name="Model", line={"color": theme.MODEL, "width": 2.5},
            line_shape="hv", customdata=curve.confidences,
            hovertemplate="decided %{x:.0%}<br>wrong %{y:.1%}<br>at least %{customdata:.3f} from the threshold"
            "<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(level_line("Deciding every video", (everything, everything)))
    figure.update_xaxes(title_text="Coverage (share of videos decided, the surest first)", range=[0, 1.01])
    top = max(0.5, float(curve.risks.max()), float(np.nanmax(high)) if np.isfinite(high).any() else 0.0)
    figure.update_yaxes(title_text="Risk (share of these decided wrongly)", range=[-0.01, top + 0.03])
    figure.update_layout(legend={"x": 0.02, "y": 0.98})
    return figure


def _finding(everything: float, half: float) -> str:
    told = f"Deciding every video, {everything:.0%} are wrong; deciding only the surest half, {half:.0%}"
    return told if half < everything else f"{told}: abstaining gains nothing"


def _risk_at(curve: RiskCoverage, coverages: FloatArray) -> FloatArray:
    """The risk of the smallest decided set that covers at least each of ``coverages``."""
    place = np.searchsorted(curve.coverages, coverages - 1e-9)
    return curve.risks[np.minimum(place, curve.risks.size - 1)]
