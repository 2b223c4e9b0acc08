"""Detectors beside each other: what their number costs."""

import plotly.graph_objects as go

from fvc_lib.analysis.figures.theme import CONTROL, SERIES, figure, nothing_to_show, translucent
from fvc_lib.analysis.read.comparison import MAIN_METRIC, Detector, DetectorComparison
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name

_COSTS = {
    "milliseconds_per_clip": "Forward pass of one clip (ms)",
    "num_parameters": "Parameters",
    "training_seconds": "Training of all folds (s)",
}


def cost_figure(found: DetectorComparison, cost: str = "milliseconds_per_clip") -> go.Figure:
    """ROC AUC of each detector, with its interval, against one of its costs on a logarithmic axis.

    Hollow: not every run of it is above its controls. Small dashes are the single runs' smallest and largest value.
    """
    title = _COSTS[cost]
    shown = [(each, value) for each in found.detectors if (value := each.cost.get(cost))]
    if not shown:
        return nothing_to_show("Quality against cost", f"{title} is not recorded for any detector.")
    metric, videos = metric_name(MAIN_METRIC), found.detectors[0].intervals[MAIN_METRIC]
    drawn = figure(
        _finding(shown, metric),
        f"{videos.num_rows:,} videos in {count_text(videos.num_groups, 'group')}; bars: {found.confidence:.0%} "
        "intervals over groups of the mean over seeds; dashes: smallest and largest run; hollow: not above controls",
        height=420,
    )
    for number, (detector, value) in enumerate(shown):
        interval, color = detector.intervals[MAIN_METRIC], SERIES[number % len(SERIES)]
        ends = detector.spread[MAIN_METRIC] if len(detector.runs) > 1 else ()
        drawn.add_trace(
            go.Scatter(
                x=[value] * len(ends), y=list(ends), mode="markers", showlegend=False, hoverinfo="skip",
                marker={"symbol": "line-ew", "size": 16, "line": {"color": translucent(color, 0.7), "width": 2}},
            )
        )  # fmt: skip
        text = interval_text(interval.value, interval.low, interval.high)
        drawn.add_trace(
            go.Scatter(
                x=[value], y=[interval.value], mode="markers", name=figure_text(detector.name),
                marker={
                    "size": 12, "color": color if detector.is_above_controls else "white",
                    "line": {"color": color, "width": 2},
                },
                error_y={
                    "type": "data", "symmetric": False, "array": [interval.high - interval.value],
                    "arrayminus": [interval.value - interval.low], "color": color, "width": 5,
                },
                hovertemplate=f"{figure_text(detector.name)}<br>{text}<br>{detector.spread_text()}<extra></extra>",
            )
        )  # fmt: skip
    drawn.add_hline(y=0.5, line={"color": CONTROL, "width": 1, "dash": "dash"}, layer="below")
    drawn.update_xaxes(title_text=title, type="log")
    drawn.update_yaxes(title_text=metric)
    return drawn.update_layout(legend={"orientation": "h", "y": -0.22, "x": 0})


def _finding(shown: list[tuple[Detector, float]], metric: str) -> str:
    best = max(shown, key=lambda pair: pair[0].intervals[MAIN_METRIC].value)[0]
    cheapest = min(shown, key=lambda pair: pair[1])[0]
    if best is cheapest:
        return f"{best.name} has the highest {metric} and costs least"
    return f"{best.name} has the highest {metric}, {cheapest.name} costs least"
