"""How far a score can be believed as a probability, before and after its temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.curve_bands import pointwise_interval
from fvc_lib.analysis.figure_parts import diagonal, fake_labels, videos_and_groups
from fvc_lib.metrics.calibration import equal_width_edges, expected_calibration_error, reliability_bins
from fvc_lib.metrics.intervals import draw_group_counts, group_codes
from fvc_lib.metrics.weighting import FloatArray, IntArray, divide

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
