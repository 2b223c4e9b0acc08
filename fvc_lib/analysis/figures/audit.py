"""Figures of an audit: detectors with intervals, their ROC curves, and their agreement.

``audit`` holds the numbers. ``videos`` and ``scores`` are the arguments of ``audit_scores`` that they come from.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.audit.numbers import Audit
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC as MAIN_METRIC
from fvc_lib.analysis.wording import figure_text, metric_name, number_text, source_name
from fvc_lib.metrics.classification import confusion_curve

_MOST_COLOURED = 5
_MOST_POINTS = 400  # of a curve
_NAME = metric_name(MAIN_METRIC)


def detectors_figure(audit: Audit) -> go.Figure:
    """Return a figure of the ROC AUC of every detector, and of the controls of the first detector, with intervals."""
    rows = []
    for detector in audit.detectors:
        tick = figure_text(theme.shortened(detector, 26))
        value, low, high = audit.compared(detector)
        rows.append(Row(tick, value, low, high, hollow=not audit.above_controls(detector)))
    first = audit.detectors[0]
    controls = audit.controls.filter(detector=first).select("source", "value", "low", "high")
    for source, value, low, high in controls.iter_rows():
        tick = figure_text(source_name(source))
        rows.append(Row(tick, value, low, high, theme.CONTROL, source in DISHONEST_CONTROLS))
    highest = number_text(audit.compared(first)[0])
    counted = theme.in_groups(audit.num_videos, "video", audit.num_groups)
    if not audit.is_complete and audit.num_common:
        counted = f"n = the {audit.num_common:,} videos all answered"
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
    """Return a figure of the ROC curve of every detector, on the videos that it answered.

    The five detectors with the highest ROC AUC are coloured, the others grey.
    """
    drawn = theme.figure(
        "Share of the fakes that are found, for each share of reals called fake",
        f"{theme.in_groups(audit.num_videos, 'video', audit.num_groups)}; "
        f"the {min(_MOST_COLOURED, len(audit.detectors))} highest in colour, others grey",
        height=440,
    )
    for number, detector in reversed(list(enumerate(audit.detectors))):
        known = videos.with_columns(score=scores[detector]).drop_nulls("score")
        labels = theme.fake_labels(known)
        if np.unique(labels).size < 2:
            continue
        curve = confusion_curve(labels, known["score"].to_numpy(), np.ones((1, labels.size)))
        places = theme.thinned(curve.thresholds.size + 1, _MOST_POINTS)
        x, y = (rates[0][places].round(5) for rates in (curve.false_positive_rates, curve.true_positive_rates))
        is_coloured = number < _MOST_COLOURED
        color = theme.SERIES[number] if is_coloured else theme.translucent(theme.CONTROL, 0.45)
        look = {"width": 1 + is_coloured, "showlegend": is_coloured, "legendrank": number}
        theme.add_line(drawn, x, y, theme.shortened(detector, 26), color, **look)
    theme.add_reference(drawn, "chance", 0, 1)
    theme.shares(drawn, "Reals called fake", "Fakes found")
    return drawn.update_layout(legend=theme.LEGEND_BELOW)


def agreement_figure(audit: Audit) -> go.Figure:
    """Return a heat map of Spearman's rank correlation for every pair of detectors."""
    if audit.correlations is None:
        return theme.nothing_to_show("Agreement", "There is one detector, or no video that all answered.")
    pairs = audit.correlations[np.triu_indices(len(audit.detectors), 1)]
    finding = "A score is constant, so nothing agrees with it"
    if np.isfinite(pairs).any():
        finding = f"Two detectors' rankings correlate by {np.nanmin(pairs):.2f} to {np.nanmax(pairs):.2f}"
    subtitle = f"Spearman's correlation on the {audit.num_common:,} videos that all answered"
    ticks = [figure_text(theme.shortened(detector, 26)) for detector in audit.detectors]
    drawn = theme.figure(finding, subtitle, height=200 + 26 * max(len(ticks), 5))
    look = {"texttemplate": "%{z:.2f}" if len(ticks) <= 8 else "", "hovertemplate": "%{y}, %{x}: %{z:.3f}"}
    colors = (theme.FAKE, "#FFFFFF", theme.REAL)
    theme.heat_map(drawn, audit.correlations.round(3), ticks, ticks, colors=colors, low=-1, **look)
    return drawn.update_xaxes(tickangle=-40)
