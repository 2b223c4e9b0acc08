"""Figures of an audit: detectors with intervals, their curves, slices, calibration, and how far they agree.

``audit`` is what was found, ``videos`` and ``scores`` the table it was found in. Of many detectors the first few, in
the order of their numbers, have colours; the rest is grey.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.audit.numbers import Audit
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import interval_point, series_style
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC as MAIN_METRIC, Score
from fvc_lib.analysis.wording import count_text, figure_text, metric_name, number_text, source_name
from fvc_lib.metrics.calibration import reliability_bins
from fvc_lib.metrics.classification import FloatArray, IntArray, confusion_curve

_MOST_COLOURED = 5
_MOST_POINTS = 400  # of a curve: more are not to be seen
_MOST_SLICES = 25
_NAME = 26  # characters


def _name(detector: str) -> str:
    return figure_text(theme.shortened(detector, _NAME))


def _n(audit: Audit) -> str:
    return f"n = {count_text(audit.num_videos, 'video')} in {count_text(audit.num_groups, 'group')}"


def detectors_figure(audit: Audit) -> go.Figure:
    """Return the main metric of every detector and control as points with intervals."""
    name = metric_name(MAIN_METRIC)
    points = []
    for detector in audit.detectors:
        score = Score("model", *audit.compared(detector))
        above = audit.above_controls(detector)
        points.append((interval_point(_name(detector), score, theme.MODEL, hollow=not above), score))
    own = audit.controls.filter(detector=audit.detectors[0])
    for source, *ends in own.select("source", "value", "low", "high").iter_rows():
        score = Score(source, *ends)
        tick = figure_text(source_name(source))
        points.append((interval_point(tick, score, theme.CONTROL, hollow=source in DISHONEST_CONTROLS), score))
    value = audit.compared(audit.detectors[0])[0]
    n = _n(audit) if audit.is_complete or not audit.num_common else f"n = the {audit.num_common:,} videos all answered"
    figure = theme.figure(
        f"{audit.detectors[0]} has the highest {name}, {number_text(value)}" if len(audit.detectors) > 1 else
        f"{name} of {audit.detectors[0]}: {number_text(value)}",
        f"{n}; bars: {audit.settings.confidence:.0%} intervals over groups; grey: controls; hollow: not shown "
        "to be above all controls, or no honest split",
        height=150 + 30 * len(points),
    )  # fmt: skip
    theme.draw_intervals(figure, points, "", name, theme.range_of([score for _, score in points], 0.4))
    theme.draw_chance(figure, 0.5)
    return figure


def roc_figure(audit: Audit, videos: pl.DataFrame, scores: pl.DataFrame) -> go.Figure:
    """Return the ROC curve of every detector on the videos that it answered."""
    figure = theme.figure(
        "How many fakes are found, for each share of reals called fake",
        f"{_n(audit)}; the {min(_MOST_COLOURED, len(audit.detectors))} highest in colour, others grey",
        height=440,
    )
    for number, detector in reversed(list(enumerate(audit.detectors))):
        labels, column = _answered(videos, scores, detector)
        if np.unique(labels).size < 2:
            continue
        curve = confusion_curve(labels, column, np.ones((1, labels.size)))
        chosen = _thinned(curve.thresholds.size + 1)
        coloured = number < _MOST_COLOURED
        color, dash = series_style(number) if coloured else (theme.translucent(theme.CONTROL, 0.45), "solid")
        figure.add_trace(
            go.Scatter(
                x=np.round(curve.false_positive_rates[0][chosen], 5),
                y=np.round(curve.true_positive_rates[0][chosen], 5),
                mode="lines", name=_name(detector) if coloured else "others", legendrank=number,
                legendgroup=detector if coloured else "others",
                showlegend=coloured or number == len(audit.detectors) - 1,
                line={"color": color, "dash": dash, "width": 2 if coloured else 1},
                hovertemplate="FPR %{x:.3f}, TPR %{y:.3f}<extra>" + _name(detector) + "</extra>",
            )
        )  # fmt: skip
    figure.add_trace(theme.diagonal("chance"))
    figure.update_xaxes(title_text="Reals called fake", range=[-0.01, 1.01])
    figure.update_yaxes(title_text="Fakes found", range=[-0.01, 1.01])
    return figure.update_layout(legend={"orientation": "h", "y": -0.18, "x": 0})


def _answered(videos: pl.DataFrame, scores: pl.DataFrame, detector: str) -> tuple[IntArray, FloatArray]:
    rows = scores[detector].is_not_null()
    return theme.fake_labels(videos.filter(rows)), scores[detector].filter(rows).to_numpy()


def _thinned(size: int) -> IntArray:
    return np.unique(np.linspace(0, size - 1, min(size, _MOST_POINTS)).astype(np.int64))


def slices_figure(audit: Audit, detector: str) -> go.Figure:
    """One detector's slices, worst first; small ones are pale."""
    rows = audit.slices.filter((pl.col("detector") == detector) & pl.col("auc").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Slices", "The table names no generators, real sources or corpora, or one each.")
    shown = rows.head(_MOST_SLICES)
    points = []
    for row in shown.iter_rows(named=True):
        by = row["slice_by"].replace("_", " ")
        tick = figure_text(f"{by}: {theme.shortened(row['value'], _NAME)} (n = {row['num_videos']:,})")
        score = Score("slice", row["auc"], row["low"], row["high"])
        color = theme.CONTROL if row["is_small"] else theme.MODEL
        points.append((interval_point(tick, score, color, hollow=row["is_small"], size=9), score))
    large = rows.filter(~pl.col("is_small"))
    worst = large.row(0, named=True) if large.height else None
    figure = theme.figure(
        f"{detector} is worst for {worst['slice_by'].replace('_', ' ')} {worst['value']}, {number_text(worst['auc'])}"
        if worst
        else "Every slice is small: none says how well the detector does there",
        f"{count_text(rows.height, 'slice')}, worst first"
        + (f", {_MOST_SLICES} shown" if rows.height > _MOST_SLICES else "")
        + "; a generator against all reals, a real source against all fakes; pale: few groups; bars are not adjusted "
        "for how many slices are looked at",
        height=150 + 28 * shown.height,
    )
    theme.draw_intervals(
        figure, points, "", metric_name(MAIN_METRIC), theme.range_of([score for _, score in points], 0.4)
    )
    theme.draw_chance(figure, 0.5)
    return figure


def calibration_figure(audit: Audit, videos: pl.DataFrame, scores: pl.DataFrame) -> go.Figure:
    """Share of fakes against mean score, of the detectors whose scores may be probabilities."""
    drawn: list[go.Scatter] = []
    for detector in audit.detectors:
        labels, column = _answered(videos, scores, detector)
        if not column.size or column.min() < 0 or column.max() > 1:
            continue
        if len(drawn) == _MOST_COLOURED:
            break
        bins = reliability_bins(labels, column)
        held = bins.counts > 0
        color, dash = series_style(len(drawn))
        drawn.append(
            go.Scatter(
                x=bins.mean_scores[held], y=bins.fake_shares[held], mode="lines+markers", name=_name(detector),
                line={"color": color, "dash": dash, "width": 2}, customdata=bins.counts[held],
                marker={"size": 4 + 8 * np.sqrt(bins.counts[held] / bins.counts.max())},
                hovertemplate="mean score %{x:.2f}, fakes %{y:.2f}, %{customdata} videos<extra></extra>",
            )
        )  # fmt: skip
    if not drawn:
        return theme.nothing_to_show("Calibration", "No detector's scores lie in [0, 1], so none are probabilities.")
    figure = theme.figure(
        "Does a score of 0.8 mean fake in eight of ten cases?",
        f"{_n(audit)}; ten bins of one width, larger points hold more videos; the share depends on how many fakes the "
        "table has",
        height=420,
    )
    figure.add_traces(drawn)
    figure.add_trace(theme.diagonal("calibrated"))
    figure.update_xaxes(title_text="Mean score", range=[-0.02, 1.02])
    figure.update_yaxes(title_text="Share of fakes", range=[-0.02, 1.02])
    return figure.update_layout(legend={"orientation": "h", "y": -0.2, "x": 0})


def agreement_figure(audit: Audit) -> go.Figure:
    """Rank correlation of every pair of detectors."""
    if audit.correlations is None:
        return theme.nothing_to_show("Agreement", "There is one detector, or no video that all answered.")
    pairs = audit.correlations[np.triu_indices(len(audit.detectors), 1)]
    ticks = [_name(detector) for detector in audit.detectors]
    few = len(ticks) <= 8
    equal = audit.equal_decisions
    figure = theme.figure(
        f"How alike two detectors rank the videos: from {np.nanmin(pairs):.2f} to {np.nanmax(pairs):.2f}"
        if np.isfinite(pairs).any()
        else "A score is constant, so nothing agrees with it",
        f"Spearman's correlation on the {audit.num_common:,} videos that all answered; hover: share of equal decisions",
        height=200 + 26 * max(len(ticks), 5),
    )
    figure.add_trace(
        go.Heatmap(
            z=np.round(audit.correlations, 3), x=ticks, y=ticks, zmin=-1, zmax=1,
            colorscale=[[0, theme.FAKE], [0.5, "#FFFFFF"], [1, theme.REAL]], xgap=1, ygap=1,
            customdata=None if equal is None else np.round(equal, 3),
            texttemplate="%{z:.2f}" if few else None, colorbar={"title": {"text": "ρ"}, "thickness": 12},
            hovertemplate="%{y}, %{x}<br>ρ %{z:.3f}"
            + ("<br>equal decisions %{customdata:.1%}" if equal is not None else "")
            + "<extra></extra>",
        )
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_xaxes(showgrid=False, tickangle=-40)
