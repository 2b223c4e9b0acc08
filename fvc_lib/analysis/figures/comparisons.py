"""Figures that set results side by side: targets of a protocol, disturbed videos, detectors, and pairs of runs."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.comparison import Comparison, DetectorComparison, compare, difference_text, p_text
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, Score, judge, overall_scores
from fvc_lib.analysis.read.naming import run_marks
from fvc_lib.analysis.read.protocols import TARGET_SCOPE
from fvc_lib.analysis.read.queries import results as results_of
from fvc_lib.analysis.read.robustness import UNDISTURBED
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, number_text, source_name
from fvc_lib.metrics.declaration import direction
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import RunPaths

_MAIN = HEADLINE_METRIC
_NAME = metric_name(_MAIN)

# --- Targets of a protocol: corpora or generators


def targets_of(results: pl.DataFrame) -> list[str]:
    """Return the targets in ``results`` (tables.RESULTS), the model's worst first."""
    model = results.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=_MAIN)
    return [scope.removeprefix(TARGET_SCOPE) for scope in model.sort("value", "scope", nulls_last=True)["scope"]]


def target_scores(results: pl.DataFrame, target: str) -> tuple[Score, ...]:
    """Return the scores of the model and its controls at one target."""
    return overall_scores(results.filter(scope=f"{TARGET_SCOPE}{target}").with_columns(scope=pl.lit("all")))


def target_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return a row per target, worst first.

    Columns are ``target videos groups``, the ROC AUC of the model and of each control with intervals, ``standing``.
    """
    rows = []
    for target in targets_of(results):
        scores = target_scores(results, target)
        sizes = results.filter(scope=f"{TARGET_SCOPE}{target}", source="model").select("num_videos", "num_groups")
        texts = {source_name(score.source): interval_text(score.value, score.low, score.high) for score in scores}
        counts = dict(zip(("videos", "groups"), sizes.row(0), strict=True))
        rows.append({"target": target, **counts, **texts, "standing": judge(scores).standing})
    return pl.DataFrame(rows)


def targets_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return the model at each target with its interval, worst first, and its best honest control."""
    targets = targets_of(results)
    if not targets:
        return theme.nothing_to_show("Targets", "This run's protocol has none: its folds are all of one kind.")
    rows, reached = [], []
    for target in targets:
        scores = [score for score in target_scores(results, target) if score.source not in DISHONEST_CONTROLS]
        model = next((score for score in scores if score.source == "model"), Score("model", None))
        controls = [score for score in scores if score.source != "model" and score.value is not None]
        tick = figure_text(theme.shortened(target, 40))
        reached.append(number_text(model.value, 2))
        rows.append(Row(tick, model.value, model.low, model.high))
        if controls:
            best = max(controls, key=lambda score: score.value or 0.0)
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


def target_matrix(runs: Sequence[RunPaths]) -> HtmlTable:
    """Return a row per run and a column per target: ROC AUC with its interval."""
    rows = results_of(runs).frame.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=_MAIN)
    texts = [interval_text(*row) for row in rows.select("value", "low", "high").iter_rows()]
    target = pl.col("scope").str.strip_prefix(TARGET_SCOPE).alias("target")
    cells = rows.select("run_id", target, pl.Series("text", texts, dtype=pl.String))
    matrix = cells.pivot("target", index="run_id", values="text", sort_columns=True) if texts else cells.head(0)
    marks = zip(runs, run_marks(runs), strict=True)
    trained = {path_to_text(run.run_id): " · ".join(filter(None, mark)) for run, mark in marks}
    targets = [name for name in matrix.columns if name != "run_id"]
    table = matrix.select(pl.col("run_id").replace(trained).alias("trained"), "run_id", *targets)
    names = {"trained": "Trained"} | {name: name for name in targets}
    return HtmlTable(table, f"{_NAME} at each target: a row for each run", names, missing="–")


# --- Disturbed videos: ROBUSTNESS_RESULTS


def levels_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return the ROC AUC of each level with its interval, worst first, undisturbed on top."""
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

_COSTS = {
    "milliseconds_per_clip": "Forward pass of one clip (ms)",
    "num_parameters": "Parameters",
    "training_seconds": "Training of all folds (s)",
}


def cost_figure(comparison: DetectorComparison, cost: str = "milliseconds_per_clip") -> go.Figure:
    """Return the ROC AUC of each detector, with its interval, against one of its costs on a logarithmic axis.

    Hollow points: not every run of the detector is above its controls.
    """
    title = _COSTS[cost]
    shown = [(detector.cost[cost], detector) for detector in comparison.detectors if detector.cost.get(cost)]
    if not shown:
        return theme.nothing_to_show("Quality against cost", f"{title} is not recorded for any detector.")
    best = max(shown, key=lambda pair: pair[1].intervals[_MAIN].value)[1].name
    cheapest = min(shown, key=lambda pair: pair[0])[1].name
    counted = comparison.detectors[0].intervals[_MAIN]
    end = "and costs least" if best == cheapest else f"and {cheapest} costs least"
    drawn = theme.figure(
        f"{best} has the highest {_NAME} {end}",
        f"{theme.in_groups(counted.num_rows, 'video', counted.num_groups)}; bars: {comparison.confidence:.0%} "
        "intervals over groups of the mean over seeds; hollow: not above controls",
        height=420,
    )
    for number, (value, detector) in enumerate(shown):
        interval = detector.intervals[_MAIN]
        color = theme.SERIES[number % len(theme.SERIES)]
        point = theme.add_line(drawn, [value], [interval.value], detector.name, color, mode="markers")
        fill = color if detector.is_above_controls else "white"
        point.marker = {"size": 12, "color": fill, "line": {"color": color, "width": 2}}
        point.error_y = theme.error_bar([interval.value], [interval.low], [interval.high], color)
        text = interval_text(interval.value, interval.low, interval.high)
        point.hovertemplate = f"{figure_text(detector.name)}<br>{text}<br>{detector.spread_text()}<extra></extra>"
    drawn.add_hline(y=0.5, line={"color": theme.CONTROL, "width": 1, "dash": "dash"}, layer="below")
    drawn.update_xaxes(title_text=title, type="log")
    drawn.update_yaxes(title_text=_NAME)
    return drawn.update_layout(legend=theme.LEGEND_BELOW)


# --- Pairs of runs

_MOST_PAIRS = 20  # the table has all


def difference_figure(comparison: Comparison) -> go.Figure:
    """Return each pair's difference with its interval, filled where a difference is shown."""
    name = metric_name(comparison.metric)
    if not comparison.pairs:
        # A bar between reasons: one may end with a command, which the next must not seem to continue.
        reasons = " | ".join(refusal.reason for refusal in comparison.refusals)
        return theme.nothing_to_show(f"Differences in {name}", reasons or "Choose two or more runs.")
    rows, reach = [], 0.01
    for pair in comparison.pairs[:_MOST_PAIRS]:
        ends = (pair.difference.value, pair.difference.low, pair.difference.high)
        value, low, high = (end if math.isfinite(end) else None for end in ends)
        reach = max(reach, *(abs(end) for end in ends if math.isfinite(end)))
        tick = f"{figure_text(pair.second)}<br>minus {figure_text(pair.first)}"
        text = figure_text(f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}")
        color = theme.MODEL if pair.is_shown else theme.NEUTRAL
        rows.append(Row(tick, value, low, high, color, not pair.is_shown, text))
    shown = sum(pair.is_shown for pair in comparison.pairs)
    pairs = f"{count_text(len(comparison.pairs), 'pair')} of runs"
    finding = f"{shown or 'None'} of {pairs} show a difference in {name}"
    better = "below" if direction(comparison.metric) == "lower" else "above"
    drawn = theme.interval_chart(
        comparison.pairs[0].finding if len(comparison.pairs) == 1 else finding,
        _pairs_subtitle(comparison),
        rows,
        names="Pair of runs",
        values=f"{name}, second run minus first ({better} 0: the second is better)",
        chance=0.0,
        row_height=46,
    )
    drawn.update_xaxes(range=[-1.1 * reach, 1.1 * reach])  # around zero, so that the distance from it shows
    return drawn.update_layout(margin={"r": 270})


def _pairs_subtitle(comparison: Comparison) -> str:
    sizes = sorted({(pair.difference.num_rows, pair.difference.num_groups) for pair in comparison.pairs})
    parts = [theme.in_groups(rows, "video", groups) for rows, groups in sizes]
    parts.append(f"bars: {comparison.confidence:.0%} intervals over groups, same draws for both runs")
    parts.append("p adjusted for all pairs (Holm)")
    if len(comparison.pairs) > _MOST_PAIRS:
        parts.append(f"the first {_MOST_PAIRS} of {len(comparison.pairs)} pairs")
    if comparison.refusals:
        parts.append(f"{count_text(len(comparison.refusals), 'refusal')}, listed below")
    return "; ".join(parts)


# --- Panels of the dashboard


@PANELS.register_panel("protocol targets", at=39, follows=("runs",), tasks=("video",))
def _targets_panel(selection: Selection) -> Shown:
    matrix = target_matrix(selection.runs)
    return matrix if matrix.frame.height else NOTHING


@PANELS.register_panel("comparison", at=73, follows=("runs",), tasks=("video",))
def _difference_panel(selection: Selection) -> Shown:
    return difference_figure(compare(selection.runs, replicates=1000))
