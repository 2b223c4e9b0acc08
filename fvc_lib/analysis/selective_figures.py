"""What abstaining would gain: the share of wrong decisions among the videos a run is surest of."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import theme
from fvc_lib.analysis.curve_bands import pointwise_interval
from fvc_lib.analysis.figure_parts import band_trace, fake_labels, level_line, videos_and_groups
from fvc_lib.metrics.intervals import draw_group_counts, group_codes
from fvc_lib.metrics.selective import RiskCoverage, risk_coverage
from fvc_lib.metrics.weighting import FloatArray

_HALF = 0.5
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
