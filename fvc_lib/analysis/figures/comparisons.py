"""Figures that compare results: targets, disturbed videos, detectors, pairs of runs, audits and verdicts.

A target is a corpus or generator that a protocol only tests on.
"""

import math
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.audit.numbers import Audit
from fvc_lib.analysis.dashboard.panels import PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.read.comparison import Comparison, DetectorComparison, compare, difference_text, p_text
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, Score, judge, overall_scores
from fvc_lib.analysis.read.robustness import UNDISTURBED
from fvc_lib.analysis.read.runs import TARGET_SCOPE
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, number_text, source_name
from fvc_lib.metrics.classification import confusion_curve
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
    rows = []
    for target in targets:
        model, *controls = target_scores(results, target)
        tick = figure_text(theme.shortened(target, 40))
        rows.append(Row(tick, model.value, model.low, model.high))
        known = [each for each in controls if each.source not in DISHONEST_CONTROLS and each.value is not None]
        for best in sorted(known, key=lambda each: -(each.value or 0))[:1]:
            control = f"{tick}<br><i>{figure_text(source_name(best.source)).lower()}</i>"
            rows.append(Row(control, best.value, best.low, best.high, theme.CONTROL, hollow=True))
    worst = target_scores(results, targets[0])[0].value
    return theme.interval_chart(
        f"{_NAME} is lowest at {targets[0]}: {number_text(worst, 2)}",
        f"n = {count_text(len(targets), 'target')}; hollow: its best control; bars: {confidence:.0%} intervals "
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
    rows = []
    for row in known:
        is_before = row["level"] == UNDISTURBED
        tick = figure_text(UNDISTURBED if is_before else f"{row['kind']}, {row['strength']}")
        rows.append(Row(tick, row["value"], row["low"], row["high"], hollow=is_before))
    before, worst = known[:2]
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
    counted = comparison.detectors[0].intervals[_MAIN]
    drawn = theme.figure(
        f"{best} has the highest {_NAME}; {min(shown, key=lambda detector: detector.cost[cost]).name} costs least",
        f"{theme.in_groups(counted.num_rows, 'video', counted.num_groups)}; bars: {comparison.confidence:.0%} "
        "intervals over groups of the mean over seeds; hollow: not above controls",
        height=420,
    )
    for number, detector in enumerate(shown):
        value, low, high, *_ = detector.intervals[_MAIN].row()
        color = theme.SERIES[number % len(theme.SERIES)]
        fill = color if detector.is_above_controls else "white"
        marker = {"size": 12, "color": fill, "line": {"color": color, "width": 2}}
        hover = f"{figure_text(detector.name)}<br>{interval_text(value, low, high)}<extra></extra>"
        point = theme.add_line(
            drawn, [detector.cost[cost]], [value], detector.name, color, mode="markers", marker=marker,
            hovertemplate=hover,
        )  # fmt: skip
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
        reasons = " | ".join(reason for _, reason in comparison.refusals)
        return theme.nothing_to_show(f"Differences in {name}", reasons or "Choose two or more runs.")
    rows, reach = [], 0.01
    for pair in pairs[:_MOST_PAIRS]:
        ends = (pair.difference.value, pair.difference.low, pair.difference.high)
        value, low, high = (end if math.isfinite(end) else None for end in ends)
        reach = max(reach, *(abs(end or 0.0) for end in (value, low, high)))
        tick = f"{figure_text(pair.second)}<br>minus {figure_text(pair.first)}"
        text = figure_text(f"{difference_text(*ends)}, Holm p {p_text(pair.holm_p_value)}")
        color = theme.MODEL if pair.is_shown else theme.NEUTRAL
        rows.append(Row(tick, value, low, high, color, not pair.is_shown, text))
    shown, first = sum(pair.is_shown for pair in pairs), pairs[0].difference
    more = f"; the first {_MOST_PAIRS} of {len(pairs)} pairs" if len(pairs) > _MOST_PAIRS else ""
    better = "below" if direction(comparison.metric) == "lower" else "above"
    drawn = theme.interval_chart(
        pairs[0].finding
        if len(pairs) == 1
        else f"{shown or 'None'} of {len(pairs)} pairs of runs show a difference in {name}",
        f"{theme.in_groups(first.num_rows, 'video', first.num_groups)}; bars: {comparison.confidence:.0%} intervals "
        f"over groups, same draws for both runs; p adjusted for all pairs (Holm){more}",
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


# --- An audit of anyone's scores

_MOST_COLOURED = 5
_MOST_POINTS = 400  # of a curve


def detectors_figure(audit: Audit) -> go.Figure:
    """Return a figure of the ROC AUC of every detector, and of the controls of the first detector, with intervals."""
    rows, first = [], audit.detectors[0]
    for detector in audit.detectors:
        tick = figure_text(theme.shortened(detector, 26))
        rows.append(Row(tick, *audit.compared(detector), hollow=not audit.above_controls(detector)))
    controls = audit.controls.filter(detector=first).select("source", "value", "low", "high")
    for source, value, low, high in controls.iter_rows():
        tick = figure_text(source_name(source))
        rows.append(Row(tick, value, low, high, theme.CONTROL, source in DISHONEST_CONTROLS))
    counted = theme.in_groups(audit.num_videos, "video", audit.num_groups)
    if 0 < audit.num_common < audit.num_videos:
        counted = f"n = the {audit.num_common:,} videos all answered"
    return theme.interval_chart(
        f"{_NAME} of {first}{', the highest' * (len(audit.detectors) > 1)}: {number_text(audit.compared(first)[0])}",
        f"{counted}; bars: {audit.settings.confidence:.0%} intervals over groups; grey: controls; hollow: not shown "
        "to be above all controls, or no honest split",
        rows,
        names="",
        values=_NAME,
        row_height=30,
    )


def audit_roc_figure(audit: Audit, videos: pl.DataFrame, scores: pl.DataFrame) -> go.Figure:
    """Return a figure of the ROC curve of every detector, on the videos that it answered.

    The five detectors with the highest ROC AUC are coloured, the others grey. ``videos`` and ``scores`` are the
    arguments of ``audit_scores``.
    """
    drawn = theme.figure(
        "Share of the fakes that are found, for each share of reals called fake",
        f"{theme.in_groups(audit.num_videos, 'video', audit.num_groups)}; "
        f"the {min(_MOST_COLOURED, len(audit.detectors))} highest in colour, others grey",
        height=440,
    )
    for number, detector in reversed(list(enumerate(audit.detectors))):
        known = videos.with_columns(score=scores[detector]).drop_nulls("score")
        if known["label"].n_unique() < 2:
            continue
        curve = confusion_curve(theme.fake_labels(known), known["score"].to_numpy(), np.ones((1, known.height)))
        places = theme.thinned(curve.thresholds.size + 1, _MOST_POINTS)
        x, y = (rates[0][places].round(5) for rates in (curve.false_positive_rates, curve.true_positive_rates))
        is_coloured = number < _MOST_COLOURED
        color = theme.SERIES[number] if is_coloured else theme.translucent(theme.CONTROL, 0.45)
        theme.add_line(drawn, x, y, theme.shortened(detector, 26), color, showlegend=is_coloured, legendrank=number)
    theme.add_reference(drawn, "chance", 0, 1)
    theme.shares(drawn, "Reals called fake", "Fakes found")
    return drawn.update_layout(legend=theme.LEGEND_BELOW)


# --- Verdicts on files: rows of VERDICTS

_MOST_VIDEOS = 40
_SYMBOLS = {"fake": "diamond", "real": "circle", "undecided": "circle-open"}
_COLORS = {**theme.LABEL_COLORS, "undecided": theme.MODEL}


def ruler_figure(table: pl.DataFrame, tested: pl.DataFrame) -> go.Figure:
    """Return a figure: scores of files with their range over networks, below the scores of the run's reals and fakes.

    ``table`` holds rows of VERDICTS. ``tested`` holds ``label score`` of the run's videos; a score is by a network that
    was not trained on the video. At most 40 files are drawn.
    """
    shown = table.drop_nulls("score").head(_MOST_VIDEOS)
    if shown.is_empty():
        return theme.nothing_to_show("Scores", "No file has one.")
    decided = (shown["verdict"] != "undecided").sum()
    drawn = theme.figure(
        f"Scores of {count_text(shown.height, 'video')}, {decided} of them decided, below those of the run's videos",
        "Ticks: the run's videos, each scored by a network that had not seen it; bars: range over the folds' networks; "
        f"hollow: undecided; at most {_MOST_VIDEOS} files, verdicts.csv has all",
        height=210 + 26 * shown.height,
    )
    for label, color in theme.LABEL_COLORS.items():
        scores = tested.filter(label=label)["score"].to_list()
        tick = {"symbol": "line-ns", "size": 14, "line": {"width": 1.5, "color": theme.translucent(color, 0.6)}}
        theme.add_line(drawn, scores, [f"known {label}s"] * len(scores), label, color, mode="markers", marker=tick)
    ends = [pl.col(name).fill_null(pl.col("score")) for name in ("score_low", "score_high")]
    for number, row in enumerate(shown.with_columns(ends).iter_rows(named=True), start=1):
        color, score = _COLORS[row["verdict"]], row["score"]
        name = figure_text(f"{number} {theme.shortened(Path(row['path']).name, 22)}")
        mark = {"symbol": _SYMBOLS[row["verdict"]], "size": 11, "color": color}
        point = theme.add_line(drawn, [score], [name], row["verdict"], color, mode="markers", marker=mark)
        point.error_x = theme.error_bar([score], [row["score_low"]], [row["score_high"]], color)
    drawn.update_yaxes(autorange="reversed", showgrid=False, type="category")
    drawn.update_xaxes(title_text="score (0 real, 1 fake)", range=[-0.03, 1.03])
    return drawn.update_layout(showlegend=False)


def verdict_table(table: pl.DataFrame) -> pl.DataFrame:
    """Return one row per file: ``file verdict score probability reasons``; ``score`` is text with its range.

    ``probability`` is left out if no file has one. ``table`` holds rows of VERDICTS.
    """
    scores = [
        "" if row[0] is None else interval_text(*row)
        for row in table.select("score", "score_low", "score_high").iter_rows()
    ]
    unread = pl.when(pl.col("failure").is_null()).then(pl.lit("no prediction")).otherwise(pl.lit("not read"))
    shown = table.select(
        pl.col("path").str.split("/").list.last().alias("file"),
        pl.coalesce("verdict", unread).alias("verdict"),
        pl.Series("score", scores, dtype=pl.String),
        "probability",
        pl.col("reasons").str.replace_all("\n", " "),
    )
    return shown if table["probability"].count() else shown.drop("probability")
