"""Figures of an audit: detectors with intervals, their ROC curves, slices, and their agreement.

``audit`` holds the numbers, ``videos`` and ``scores`` the table they come from.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.audit.numbers import Audit
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC as MAIN_METRIC
from fvc_lib.analysis.wording import count_text, figure_text, metric_name, number_text, source_name
from fvc_lib.metrics.classification import confusion_curve

_MOST_COLOURED = 5
_MOST_POINTS = 400  # of a curve
_MOST_SLICES = 25
_NAME = metric_name(MAIN_METRIC)


def _tick(detector: str) -> str:
    return figure_text(theme.shortened(detector, 26))


def _counted(audit: Audit) -> str:
    return theme.in_groups(audit.num_videos, "video", audit.num_groups)


def detectors_figure(audit: Audit) -> go.Figure:
    """Return the main metric of every detector, and of the first one's controls, as points with intervals."""
    first = audit.detectors[0]
    rows = []
    for detector in audit.detectors:
        value, low, high = audit.compared(detector)
        rows.append(Row(_tick(detector), value, low, high, hollow=not audit.above_controls(detector)))
    controls = audit.controls.filter(detector=first).select("source", "value", "low", "high")
    for source, value, low, high in controls.iter_rows():
        is_dishonest = source in DISHONEST_CONTROLS
        rows.append(Row(figure_text(source_name(source)), value, low, high, theme.CONTROL, is_dishonest))
    highest = number_text(audit.compared(first)[0])
    shared = not audit.is_complete and audit.num_common
    counted = f"n = the {audit.num_common:,} videos all answered" if shared else _counted(audit)
    return theme.interval_chart(
        f"{first} has the highest {_NAME}, {highest}" if len(audit.detectors) > 1 else f"{_NAME} of {first}: {highest}",
        f"{counted}; bars: {audit.settings.confidence:.0%} intervals over groups; grey: controls; hollow: not shown "
        "to be above all controls, or no honest split",
        rows,
        names="",
        values=_NAME,
        row_height=30,
    )


def roc_figure(audit: Audit, videos: pl.DataFrame, scores: pl.DataFrame) -> go.Figure:
    """Return the ROC curve of every detector on the videos that it answered; the five highest have colours."""
    drawn = theme.figure(
        "Share of the fakes that are found, for each share of reals called fake",
        f"{_counted(audit)}; the {min(_MOST_COLOURED, len(audit.detectors))} highest in colour, others grey",
        height=440,
    )
    for number, detector in reversed(list(enumerate(audit.detectors))):
        answered = scores[detector].is_not_null()
        labels = theme.fake_labels(videos.filter(answered))
        if np.unique(labels).size < 2:
            continue
        curve = confusion_curve(labels, scores[detector].filter(answered).to_numpy(), np.ones((1, labels.size)))
        places = theme.thinned(curve.thresholds.size + 1, _MOST_POINTS)
        x, y = (rates[0][places].round(5) for rates in (curve.false_positive_rates, curve.true_positive_rates))
        if number < _MOST_COLOURED:
            theme.add_line(drawn, x, y, _tick(detector), theme.series_style(number)[0], legendrank=number)
        else:
            grey = theme.translucent(theme.CONTROL, 0.45)
            theme.add_line(drawn, x, y, _tick(detector), grey, width=1, showlegend=False)
    theme.add_reference(drawn, "chance", 0, 1)
    theme.shares(drawn, "Reals called fake", "Fakes found")
    return drawn.update_layout(legend=theme.LEGEND_BELOW)


def slices_figure(audit: Audit, detector: str) -> go.Figure:
    """Return one detector's slices, worst first; small ones are pale."""
    slices = audit.slices.filter(pl.col("auc").is_not_null(), detector=detector)
    if slices.is_empty():
        return theme.nothing_to_show("Slices", "The table names no generators, real sources or corpora, or one each.")
    rows = []
    for row in slices.head(_MOST_SLICES).iter_rows(named=True):
        name = f"{row['slice_by'].replace('_', ' ')}: {theme.shortened(row['value'], 26)} (n = {row['num_videos']:,})"
        color = theme.CONTROL if row["is_small"] else theme.MODEL
        rows.append(Row(figure_text(name), row["auc"], row["low"], row["high"], color, row["is_small"]))
    finding = "Every slice is small: none tells how well the detector does there"
    for worst in slices.filter(~pl.col("is_small")).head(1).iter_rows(named=True):
        by = worst["slice_by"].replace("_", " ")
        finding = f"{detector} is worst for {by} {worst['value']}, {number_text(worst['auc'])}"
    cut = f", {_MOST_SLICES} shown" if slices.height > _MOST_SLICES else ""
    return theme.interval_chart(
        finding,
        f"{count_text(slices.height, 'slice')}, worst first{cut}; a generator against all reals, a real source against "
        "all fakes; pale: few groups; bars are not adjusted for the number of slices",
        rows,
        names="",
        values=_NAME,
        row_height=28,
    )


def agreement_figure(audit: Audit) -> go.Figure:
    """Return the rank correlation of every pair of detectors."""
    if audit.correlations is None:
        return theme.nothing_to_show("Agreement", "There is one detector, or no video that all answered.")
    pairs = audit.correlations[np.triu_indices(len(audit.detectors), 1)]
    ticks = [_tick(detector) for detector in audit.detectors]
    finding = "A score is constant, so nothing agrees with it"
    if np.isfinite(pairs).any():
        finding = f"Two detectors' rankings correlate by {np.nanmin(pairs):.2f} to {np.nanmax(pairs):.2f}"
    subtitle = f"Spearman's correlation on the {audit.num_common:,} videos that all answered"
    drawn = theme.figure(finding, subtitle, height=200 + 26 * max(len(ticks), 5))
    look = {"texttemplate": "%{z:.2f}" if len(ticks) <= 8 else "", "hovertemplate": "%{y}, %{x}: %{z:.3f}"}
    colors = (theme.FAKE, "#FFFFFF", theme.REAL)
    theme.heat_map(drawn, audit.correlations.round(3), ticks, ticks, colors=colors, low=-1, **look)
    return drawn.update_xaxes(tickangle=-40)
