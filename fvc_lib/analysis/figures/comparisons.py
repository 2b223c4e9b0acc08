"""Figures that compare results: targets of a protocol, disturbed videos, detectors, and pairs of runs.

A target is a corpus or generator that a protocol only tests on.
"""

import math

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.read.comparison import Comparison, DetectorComparison, compare, difference_text, p_text
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, Score, judge, overall_scores
from fvc_lib.analysis.read.naming import TARGET_SCOPE
from fvc_lib.analysis.read.robustness import UNDISTURBED
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, number_text, source_name
from fvc_lib.metrics.declaration import direction

_MAIN = HEADLINE_METRIC
_NAME = metric_name(_MAIN)

# --- Targets of a protocol: corpora or generators


def targets_of(results: pl.DataFrame) -> list[str]:
    """Return the names of the targets in ``results`` (tables.RESULTS), the model's lowest ROC AUC first."""
    model = results.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=_MAIN)
    return [scope.removeprefix(TARGET_SCOPE) for scope in model.sort("value", "scope", nulls_last=True)["scope"]]


def target_scores(results: pl.DataFrame, target: str) -> tuple[Score, ...]:
    """Return the ROC AUC of the model and of its controls at one target, the model first."""
    return overall_scores(results.filter(scope=f"{TARGET_SCOPE}{target}").with_columns(scope=pl.lit("all")))


def target_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return one row per target, the model's lowest ROC AUC first.

    Columns are ``target videos groups``, the ROC AUC of the model and of each control as text with intervals, and
    ``standing`` (whether the model is above its controls).
    """
    rows = []
    for target in targets_of(results):
        scores = target_scores(results, target)
        own = results.filter(scope=f"{TARGET_SCOPE}{target}", source="model").row(0, named=True)
        texts = {source_name(score.source): interval_text(score.value, score.low, score.high) for score in scores}
        counts = {"videos": own["num_videos"], "groups": own["num_groups"]}
        rows.append({"target": target, **counts, **texts, "standing": judge(scores).standing})
    return pl.DataFrame(rows)


def targets_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return a figure of the ROC AUC at each target, the lowest first, and of the best honest control there."""
    targets = targets_of(results)
    if not targets:
        return theme.nothing_to_show("Targets", "This run's protocol has none: its folds are all of one kind.")
    rows, reached = [], []
    for target in targets:
        scores = {score.source: score for score in target_scores(results, target)}
        model = scores.pop("model", Score("model", None))
        tick = figure_text(theme.shortened(target, 40))
        reached.append(number_text(model.value, 2))
        rows.append(Row(tick, model.value, model.low, model.high))
        honest = [score for score in scores.values() if score.source not in DISHONEST_CONTROLS]
        best = max(honest, key=lambda score: score.value or 0.0, default=None)
        if best is not None and best.value is not None:
            control = f"{tick}<br><i>{figure_text(source_name(best.source)).lower()}</i>"
            rows.append(Row(control, best.value, best.low, best.high, theme.CONTROL, hollow=True))
    finding = f"{_NAME} is {reached[0]} at {targets[0]}"
    if len(targets) > 1:
        finding += f", the worst, and {reached[-1]} at {targets[-1]}, the best of {len(targets)} targets"
    means = [score for score in overall_scores(results) if score.source == "model"]
    mean = "".join(f"; mean over targets {interval_text(score.value, score.low, score.high)}" for score in means)
    return theme.interval_chart(
        finding,
        f"n = {count_text(len(targets), 'target')}{mean}; hollow: its best control; bars: {confidence:.0%} intervals "
        "over groups, not adjusted for the number of targets",
        rows,
        names="Target",
        values=_NAME,
    )


# --- Disturbed videos: ROBUSTNESS_RESULTS


def levels_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return a figure of the ROC AUC at each level of disturbance: undisturbed on top, then the lowest first."""
    known = results.filter(metric=_MAIN).drop_nulls("value").to_dicts()
    if len(known) < 2:
        return theme.nothing_to_show(f"{_NAME} by level", "No level has been scored.")
    before = next((row for row in known if row["level"] == UNDISTURBED), known[0])
    worst = next(row for row in known if row["level"] != UNDISTURBED)
    rows = []
    for row in known:
        is_before = row["level"] == UNDISTURBED
        tick = figure_text(UNDISTURBED if is_before else f"{row['kind']}, {row['strength']}")
        rows.append(Row(tick, row["value"], row["low"], row["high"], hollow=is_before))
    drawn = theme.interval_chart(
        f"Worst is {worst['kind']}, {worst['strength']}: {_NAME} {worst['value']:.3f}, undisturbed "
        f"{before['value']:.3f}",
        f"{theme.in_groups(before['num_videos'], 'video', before['num_groups'])}; bars: {confidence:.0%} intervals "
        "over groups; hollow: undisturbed; line: its value",
        rows,
        names="",
        values=_NAME,
    )
    return drawn.add_vline(x=before["value"], line={"color": theme.NEUTRAL, "width": 1}, layer="below")


# --- Detectors: quality against cost

_COSTS = {"milliseconds_per_clip": "Forward pass of one clip (ms)", "num_parameters": "Parameters"}


def cost_figure(comparison: DetectorComparison, cost: str = "milliseconds_per_clip") -> go.Figure:
    """Return a figure of the ROC AUC of each detector, with its interval, against its ``cost`` on a logarithmic axis.

    A point is hollow if a run of the detector is not above its controls.
    """
    shown = [detector for detector in comparison.detectors if detector.cost.get(cost)]
    if not shown:
        return theme.nothing_to_show("Quality against cost", f"{_COSTS[cost]} is not recorded for any detector.")
    best = max(shown, key=lambda detector: detector.intervals[_MAIN].value).name
    cheapest = min(shown, key=lambda detector: detector.cost[cost]).name
    counted = comparison.detectors[0].intervals[_MAIN]
    end = "and costs least" if best == cheapest else f"and {cheapest} costs least"
    drawn = theme.figure(
        f"{best} has the highest {_NAME} {end}",
        f"{theme.in_groups(counted.num_rows, 'video', counted.num_groups)}; bars: {comparison.confidence:.0%} "
        "intervals over groups of the mean over seeds; hollow: not above controls",
        height=420,
    )
    for number, detector in enumerate(shown):
        value, low, high, *_ = detector.intervals[_MAIN].row()
        color = theme.SERIES[number % len(theme.SERIES)]
        fill = color if detector.is_above_controls else "white"
        name, text = figure_text(detector.name), interval_text(value, low, high)
        look = {
            "marker": {"size": 12, "color": fill, "line": {"color": color, "width": 2}},
            "hovertemplate": f"{name}<br>{text}<br>{detector.spread_text()}<extra></extra>",
        }
        point = theme.add_line(drawn, [detector.cost[cost]], [value], detector.name, color, mode="markers", **look)
        if value is not None and low is not None and high is not None:
            point.error_y = theme.error_bar([value], [low], [high], color)
    drawn.add_hline(y=0.5, line={"color": theme.CONTROL, "width": 1, "dash": "dash"}, layer="below")
    drawn.update_xaxes(title_text=_COSTS[cost], type="log")
    drawn.update_yaxes(title_text=_NAME)
    return drawn.update_layout(legend=theme.LEGEND_BELOW)


# --- Pairs of runs

_MOST_PAIRS = 20  # the table has all


def difference_figure(comparison: Comparison) -> go.Figure:
    """Return a figure of the difference of each pair with its interval; a point is filled if the difference is shown.

    At most 20 pairs are drawn.
    """
    name, pairs = metric_name(comparison.metric), comparison.pairs
    if not pairs:
        # A bar between reasons: one may end with a command, which the next must not seem to continue.
        reasons = " | ".join(refusal.reason for refusal in comparison.refusals)
        return theme.nothing_to_show(f"Differences in {name}", reasons or "Choose two or more runs.")
    rows, reach = [], 0.01
    for pair in pairs[:_MOST_PAIRS]:
        ends = (pair.difference.value, pair.difference.low, pair.difference.high)
        reach = max(reach, *(abs(end) for end in ends if math.isfinite(end)))
        value, low, high = (end if math.isfinite(end) else None for end in ends)
        tick = f"{figure_text(pair.second)}<br>minus {figure_text(pair.first)}"
        text = figure_text(f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}")
        color = theme.MODEL if pair.is_shown else theme.NEUTRAL
        rows.append(Row(tick, value, low, high, color, not pair.is_shown, text))
    shown = sum(pair.is_shown for pair in pairs)
    finding = f"{shown or 'None'} of {len(pairs)} pairs of runs show a difference in {name}"
    sizes = sorted({(pair.difference.num_rows, pair.difference.num_groups) for pair in pairs})
    subtitle = "; ".join(
        [
            *(theme.in_groups(videos, "video", groups) for videos, groups in sizes),
            f"bars: {comparison.confidence:.0%} intervals over groups, same draws for both runs",
            "p adjusted for all pairs (Holm)",
            *[f"the first {_MOST_PAIRS} of {len(pairs)} pairs"] * (len(pairs) > _MOST_PAIRS),
            *[f"{count_text(len(comparison.refusals), 'refusal')}, listed below"] * bool(comparison.refusals),
        ]
    )
    better = "below" if direction(comparison.metric) == "lower" else "above"
    drawn = theme.interval_chart(
        pairs[0].finding if len(pairs) == 1 else finding,
        subtitle,
        rows,
        names="Pair of runs",
        values=f"{name}, second run minus first ({better} 0: the second is better)",
        chance=0.0,
        row_height=46,
    )
    drawn.update_xaxes(range=[-1.1 * reach, 1.1 * reach])  # around zero, so that the distance from it shows
    return drawn.update_layout(margin={"r": 270})


@PANELS.register_panel("comparison", at=73, follows=("runs",), tasks=("video",))
def _difference_panel(selection: Selection) -> Shown:
    return difference_figure(compare(selection.runs, replicates=1000))
