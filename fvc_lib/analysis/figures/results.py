"""Figures of a result: the model beside its controls and beside other runs, pair by pair, and how its scores lie.

``results``, ``slices``, ``audit`` and ``predictions`` are one run's rows of the tables of that name;
``confidence`` is the coverage that the intervals were made with.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import polars.selectors as cs

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard import panels
from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import interval_point, value_label, videos_and_groups
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read import headline
from fvc_lib.analysis.read.comparison import Comparison, compare, difference_text, p_text
from fvc_lib.analysis.read.headline import Score
from fvc_lib.analysis.read.naming import run_names
from fvc_lib.analysis.read.queries import fold_table, parameter_differences
from fvc_lib.analysis.wording import better_direction, count_text, figure_text, interval_text, metric_name, number_text
from fvc_lib.metrics.declaration import UNCALIBRATED, declaration, direction
from fvc_lib.services.atomic_files import path_to_text

# --- Tables of a result: every metric by video and by group, and what each fold chose before it saw its test videos

BY_VIDEO, BY_GROUP = "all", "all_by_group"


def metric_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return the model's metrics over all folds: ``metric better by_video by_group fold_mean fold_std``.

    The two columns between, a vote for each video and a vote for each group, are text with intervals.
    """
    model = results.filter(pl.col("source") == "model")
    by_group = {row["metric"]: row for row in model.filter(pl.col("scope") == BY_GROUP).iter_rows(named=True)}
    rows = [
        {
            "metric": metric_name(row["metric"]),
            "better": better_direction(row["metric"]),
            "by_video": _interval(row),
            "by_group": _interval(by_group.get(row["metric"])),
            "fold_mean": row["fold_mean"],
            "fold_std": row["fold_std"],
        }
        for row in model.filter(pl.col("scope") == BY_VIDEO).iter_rows(named=True)
    ]
    return pl.DataFrame(rows, schema=_METRIC_SCHEMA)


def control_table(results: pl.DataFrame) -> pl.DataFrame:
    """Every metric over all folds, a row each: ``metric better`` and a column for each source, named in words."""
    # No control has a temperature, so metrics before it are the model's alone; the margin is between two rows.
    of_model = pl.col("metric").str.ends_with(UNCALIBRATED) | (pl.col("metric") == headline.MARGIN)
    rows = results.filter((pl.col("scope") == BY_VIDEO) & ~of_model)
    better = pl.col("metric").map_elements(better_direction, return_dtype=pl.String)
    rows = rows.with_columns(
        better=better,
        metric=pl.col("metric").map_elements(metric_name, return_dtype=pl.String),
        source=pl.col("source").map_elements(wording.source_name, return_dtype=pl.String),
    )
    return rows.pivot("source", index=["metric", "better"], values="value")


def chosen_table(predictions: pl.DataFrame, epochs: Mapping[int, tuple[int, int, int]] | None = None) -> pl.DataFrame:
    """Return the choices of each fold's inner validation part and the test videos they were applied to.

    ``epochs`` has by fold the epoch chosen, and the videos and groups that chose it. Columns: ``fold epoch temperature
    threshold num_inner_videos num_inner_groups num_test_videos num_test_groups called_fake_share``; null is not
    recorded.
    """
    known = epochs or {}
    inner = pl.DataFrame(
        [(fold, *known.get(fold, (None, None, None))) for fold in predictions["fold"].unique().sort()],
        schema=_INNER_SCHEMA, orient="row",
    )  # fmt: skip
    outer = predictions.group_by("fold").agg(
        pl.col("temperature").first(),
        pl.col("threshold").first(),
        num_test_videos=pl.len(),
        num_test_groups=pl.col("group_id").n_unique(),
        called_fake_share=(pl.col("score") >= pl.col("threshold")).mean(),
    )
    return inner.join(outer, on="fold", how="left", maintain_order="left").select(
        "fold", "epoch", "temperature", "threshold", "num_inner_videos", "num_inner_groups", "num_test_videos",
        "num_test_groups", "called_fake_share",
    )  # fmt: skip


_INNER_SCHEMA = dict.fromkeys(("fold", "epoch", "num_inner_videos", "num_inner_groups"), pl.Int64)
_METRIC_SCHEMA = {
    "metric": pl.String, "better": pl.String, "by_video": pl.String, "by_group": pl.String, "fold_mean": pl.Float64,
    "fold_std": pl.Float64,
}  # fmt: skip


def _interval(row: dict[str, float | None] | None) -> str | None:
    known = row is not None and row["value"] is not None
    return interval_text(row["value"], row["low"], row["high"]) if known else None  # type: ignore[index]


def controls_figure(
    results: pl.DataFrame, *, confidence: float = 0.95, verdict: headline.Verdict | None = None
) -> go.Figure:
    """Return the headline's number and its controls' as points with intervals.

    ``verdict``: what the run says of it; None: what ``results`` alone say.
    """
    metric = headline.HEADLINE_METRIC
    scores = [score for score in headline.overall_scores(results) if score.value is not None]
    if not scores:
        return theme.nothing_to_show("Model and controls", f"No {metric_name(metric)} over all folds is recorded.")
    verdict = verdict or headline.judge(scores, ())
    over = [s for s in headline.overall_scores(results, headline.MARGIN) if s.value is not None]
    margin = "".join(f"; margin over the trained floor: {interval_text(s.value, s.low, s.high)}" for s in over)
    figure = theme.figure(
        verdict.sentence,
        _counts(results, confidence) + margin,
        height=150 + 44 * len(scores),
    )
    shown = theme.range_of(scores, 0.4)
    theme.draw_intervals(figure, [(_score_point(s), s) for s in scores], "Scored by", metric_name(metric), shown)
    chance = _chance(metric)
    theme.draw_chance(figure, chance)
    if chance is not None:
        small = {"size": 11, "color": theme.NEUTRAL}
        figure.add_annotation(x=chance, y=1, yref="paper", yanchor="bottom", text="chance", showarrow=False, font=small)
    return figure


def score_distribution_figure(predictions: pl.DataFrame) -> go.Figure:
    """How the scores of reals and of fakes lie, and the mean decision threshold."""
    if predictions.is_empty():
        return theme.nothing_to_show("Scores", "No predictions are recorded.")
    right = ((pl.col("score") >= pl.col("threshold")) == (pl.col("label") == "fake")).mean()
    share = float(predictions.select(right).item())
    figure = theme.figure(
        f"{share:.0%} of the videos fall on the right side of their fold's threshold", videos_and_groups(predictions)
    )
    edges = np.arange(21) / 20
    for label, color in theme.LABEL_COLORS.items():
        # Counted here: the page holds a number for each bin, however many videos there are.
        scores = predictions.filter(pl.col("label") == label)["score"].to_numpy()
        counts, _ = np.histogram(scores, edges)
        figure.add_trace(
            go.Bar(
                x=(edges[:-1] + edges[1:]) / 2, y=counts, width=edges[1], name=f"{label} (n = {scores.size:,})",
                marker={"color": theme.translucent(color, 0.6), "line": {"color": color, "width": 1}},
                customdata=[f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)],
                hovertemplate="score %{customdata}<br>%{y} videos<extra>" + label + "</extra>",
            )
        )  # fmt: skip
    for threshold in predictions["threshold"].unique().sort():
        figure.add_vline(x=threshold, line={"color": theme.INK, "width": 1, "dash": "dot"})
    figure.update_layout(
        barmode="overlay", legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 1, "xanchor": "right"}
    )
    figure.update_xaxes(title_text="Score (probability of fake); dotted: thresholds of the folds", range=[0, 1])
    figure.update_yaxes(title_text="Videos")
    return figure


def _score_point(score: Score) -> go.Scatter:
    is_dishonest = score.source in headline.DISHONEST_CONTROLS
    name = figure_text(wording.source_name(score.source)) + "<br><i>not an honest split</i>" * is_dishonest
    return interval_point(name, score, theme.MODEL if score.source == "model" else theme.CONTROL, hollow=is_dishonest)


def _counts(results: pl.DataFrame, confidence: float) -> str:
    rows = results.filter((pl.col("scope") == BY_VIDEO) & (pl.col("source") == "model"))
    rows = rows if rows.height else results.filter(pl.col("scope") == BY_VIDEO)
    num_videos, num_groups = (rows if rows.height else results).select("num_videos", "num_groups").row(0)
    counted = f"n = {count_text(num_videos, 'video')} in {count_text(num_groups, 'group')}"
    return f"{counted}; bars: {confidence:.0%} intervals over groups"


# --- The result by platform, codec, length and the like: where it holds, where it does not, and where nobody knows


def _chance(metric: str) -> float | None:
    declared = declaration(metric)
    return declared.chance if declared else None


def slices_figure(
    slices: pl.DataFrame, metric: str = headline.HEADLINE_METRIC, *, confidence: float = 0.95
) -> go.Figure:
    """One metric in each slice as a point with its interval, the property with the largest gap first.

    Small slices are pale, undefined ones without a point.
    """
    rows = slices.filter(pl.col("metric") == metric)
    if rows.is_empty():
        return theme.nothing_to_show("Slices", f"No {metric_name(metric)} by slice is recorded.")
    # What parts its slices most comes first; of small slices chance alone makes a gap.
    number = pl.col("number").filter(~pl.col("is_small"))
    gap = (number.max() - number.min()).over("slice_by").fill_null(0)
    rows = rows.sort(-gap, "slice_by", -pl.col("num_videos"), "value")
    figure = theme.figure(
        _slice_finding(rows, metric), _slice_subtitle(rows, confidence), height=150 + 27 * rows.height
    )
    for position, row in enumerate(rows.iter_rows(named=True)):
        _add_slice(figure, row, position)
    theme.draw_chance(figure, _chance(metric))
    shown = [v for v in (*rows["number"], *rows["low"], *rows["high"]) if v is not None]
    low, high = (min(0.4, *shown), max(1.0, *shown)) if shown else (0.0, 1.0)
    figure.update_xaxes(title_text=figure_text(metric_name(metric)), range=[low - 0.03, high + 0.03])
    figure.update_yaxes(title_text="Slice", autorange="reversed", showgrid=False, type="multicategory")
    figure.update_yaxes(showdividers=True, dividercolor=theme.GRID)
    figure.update_layout(showlegend=False, margin={"r": 150})
    return figure


def _add_slice(figure: go.Figure, row: dict[str, Any], position: int) -> None:
    by = figure_text(str(row["slice_by"]).replace("_", " "))
    small = ", small" if row["is_small"] else ""
    tick = f"{figure_text(theme.shortened(row['value'], 32))} (n = {row['num_videos']:,}{small})"
    score = Score("slice", row["number"], row["low"], row["high"])
    color = theme.translucent(theme.CONTROL, 0.75) if row["is_small"] else theme.MODEL
    point = interval_point(tick, score, color, hollow=row["is_small"], size=9)
    point.y = [[by], [tick]]
    point.customdata = [[figure_text(row["value"]), row["num_real"], row["num_fake"], row["num_groups"]]]
    point.hovertemplate = (
        "%{customdata[0]}: %{x:.3f}<br>%{customdata[1]} real, %{customdata[2]} fake, %{customdata[3]} groups"
        "<extra></extra>"
    )
    figure.add_trace(point)
    text = interval_text(score.value, score.low, score.high, 2) if score.value is not None else "one class only"
    ink = theme.CONTROL if row["is_small"] or score.value is None else theme.MODEL
    figure.add_annotation(
        x=1, xref="paper", xanchor="left", xshift=12, y=position, yref="y", showarrow=False, text=text,
        font={"size": 11.5, "color": ink},
    )  # fmt: skip


_MOST_OF_ALL = 0.8  # a slice of more of the videos says what the whole says


def _slice_finding(rows: pl.DataFrame, metric: str) -> str:
    """Return a sentence on the lowest and highest slice among those neither small nor nearly everything."""
    large = rows.filter(~pl.col("is_small") & pl.col("number").is_not_null()).sort("number")
    comparable = large.filter(pl.col("num_videos") <= _MOST_OF_ALL * _num_videos(rows))
    if comparable.is_empty() and large.height:
        return (
            f"Nothing to compare: the slices large enough hold nearly all videos ({_named(large.row(0, named=True))})"
        )
    if comparable.is_empty():
        return "Every slice is too small, or of one class: none says how well the model does there"
    low, high = comparable.row(0, named=True), comparable.row(-1, named=True)
    name, least, most = metric_name(metric), *(number_text(row["number"], 2) for row in (low, high))
    if comparable.height == 1:
        return f"{name} is {least} for {_named(low)}, the one slice large enough"
    if least == most:
        return f"{name} is {least} in each of the {comparable.height} slices that are large enough"
    return f"{name} is lowest for {_named(low)}, {least}, and highest for {_named(high)}, {most}"


def _slice_subtitle(rows: pl.DataFrame, confidence: float) -> str:
    num_small = int(rows["is_small"].sum())
    return (
        f"n = {count_text(_num_videos(rows), 'video')} in {count_text(rows.height, 'slice')}, {num_small} "
        f"of them small (pale: few groups of a class); bars: {confidence:.0%} intervals over groups, not "
        "adjusted for how many slices are looked at"
    )


def _num_videos(rows: pl.DataFrame) -> int:
    """All videos: what slices by one property add up to, but for those that share their reals or their fakes."""
    real, fake = pl.col("num_real"), pl.col("num_fake")
    totals = rows.group_by("slice_by").agg(
        pl.when(pl.col("slice_by").first().is_in(["manipulation", "generator"]))
        .then(fake.sum() + real.max())
        .when(pl.col("slice_by").first() == "real_source")
        .then(real.sum() + fake.max())
        .otherwise(pl.col("num_videos").sum())
    )
    return int(totals.select(pl.exclude("slice_by").max()).item())


def _named(row: dict[str, object]) -> str:
    return f"{str(row['slice_by']).replace('_', ' ')} {theme.shortened(row['value'], 32)}"


# --- What a careless split would have claimed, beside what this one claims; and the list of what was looked at

_SHOWN = {
    "group_lookup_by_row": "Recognising groups, split by row",
    "group_lookup_by_group": "Recognising groups, split by group",
    "model": "The model, split by group",
}


def audit_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return an oracle that knows groups alone, split by row and by group, beside the model."""
    rows = results.filter((pl.col("scope") == "all") & (pl.col("metric") == headline.HEADLINE_METRIC))
    known = {row["source"]: row for row in rows.iter_rows(named=True) if row["value"] is not None}
    by_row, by_group = (known.get(name) for name in ("group_lookup_by_row", "group_lookup_by_group"))
    if by_row is None or by_group is None:
        return theme.nothing_to_show("Leakage", "The group-lookup controls are not recorded.")
    figure = theme.figure(
        f"Split by row, merely recognising groups would have claimed an AUC of {by_row['value']:.3f}; "
        f"split by group it gets {by_group['value']:.3f}",
        f"n = {count_text(by_row['num_videos'], 'video')} in {count_text(by_row['num_groups'], 'group')}; the gap "
        f"is what a split by row lets leak; bars: {confidence:.0%} intervals over groups",
        height=290,
    )
    points = []
    for source, tick in _SHOWN.items():
        if row := known.get(source):
            score = Score(source, row["value"], row["low"], row["high"])
            color = {"model": theme.MODEL, "group_lookup_by_row": theme.NOT_ABOVE_CONTROL}.get(source, theme.CONTROL)
            points.append((interval_point(tick, score, color, hollow=source == "group_lookup_by_row"), score))
    theme.draw_intervals(figure, points, "Scored by", metric_name(headline.HEADLINE_METRIC), [0.37, 1.03])
    theme.draw_chance(figure, 0.5)
    return figure


def audit_table(audit: pl.DataFrame) -> pl.DataFrame:
    """Return the audit as columns ``check finding verdict``."""
    verdict = pl.col("passed").replace_strict(
        {True: "passed", False: "FAILED", None: "for information"}, return_dtype=pl.String
    )
    return audit.select(pl.col("check").str.replace_all("_", " ", literal=True), "finding", verdict=verdict)


def failed_checks(audit: pl.DataFrame) -> list[str]:
    """Return the findings of checks that did not pass."""
    return audit.filter(~pl.col("passed").fill_null(value=True))["finding"].to_list()


# --- Pairwise differences of runs as points with interval bars around zero

_MOST_PAIRS = 20  # beyond that a chart is no longer read; the table has all


def difference_figure(comparison: Comparison) -> go.Figure:
    """Each pair's difference with its interval, filled where one is shown; without a pair the figure says why."""
    name = metric_name(comparison.metric)
    if not comparison.pairs:
        # A reason may end with a command, after which the next must not seem to go on.
        reasons = " | ".join(refusal.reason for refusal in comparison.refusals)
        return theme.nothing_to_show(f"Differences in {name}", reasons or "Choose two or more runs.")
    pairs = comparison.pairs[:_MOST_PAIRS]
    subtitle = _pairs_subtitle(comparison, len(pairs))
    figure = theme.figure(_pairs_finding(comparison), subtitle, height=170 + 46 * len(pairs))
    for pair in pairs:
        tick = f"{figure_text(pair.second)}<br>minus {figure_text(pair.first)}"
        color = theme.MODEL if pair.is_shown else theme.NEUTRAL
        ends = (pair.difference.value, pair.difference.low, pair.difference.high)
        score = Score("pair", *(end if math.isfinite(end) else None for end in ends))
        point = interval_point(tick, score, color, hollow=not pair.is_shown)
        figure.add_trace(point.update(hovertemplate="%{x:+.3f}<extra></extra>"))
        text = figure_text(f"{difference_text(pair)}, Holm p {p_text(pair.holm_p_value)}")
        look = {"text": text, "align": "left", "font": {"size": 12, "color": color}}
        figure.add_annotation({**value_label(tick, score), **look})
    figure.add_vline(x=0, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"})
    better = f"{'below' if direction(comparison.metric) == 'lower' else 'above'} 0: the second is better"
    # Around zero, so that how far a bar lies from it is seen.
    every = [end for pair in pairs for end in (pair.difference.value, pair.difference.low, pair.difference.high)]
    reach = 1.1 * (max((abs(end) for end in every if math.isfinite(end)), default=0.0) or 0.01)
    title = figure_text(f"{name}, second run minus first ({better})")
    figure.update_xaxes(title_text=title, range=[-reach, reach])
    figure.update_yaxes(title_text="Pair of runs", autorange="reversed", showgrid=False, type="category")
    figure.update_layout(showlegend=False, margin={"r": 270})
    return figure


def _pairs_finding(comparison: Comparison) -> str:
    if len(comparison.pairs) == 1:
        return comparison.pairs[0].finding
    shown = sum(pair.is_shown for pair in comparison.pairs)
    pairs = f"{count_text(len(comparison.pairs), 'pair')} of runs"
    return f"{shown or 'None'} of {pairs} show a difference in {metric_name(comparison.metric)}"


def _pairs_subtitle(comparison: Comparison, num_shown: int) -> str:
    sizes = sorted({(pair.difference.num_rows, pair.difference.num_groups) for pair in comparison.pairs})
    parts = [f"n = {count_text(rows, 'video')} in {count_text(groups, 'group')}" for rows, groups in sizes]
    parts.append(f"bars: {comparison.confidence:.0%} intervals over groups, same draws for both runs")
    parts.append("p adjusted for all pairs (Holm)")
    if num_shown < len(comparison.pairs):
        parts.append(f"the first {num_shown} of {len(comparison.pairs)} pairs")
    if comparison.refusals:
        parts.append(f"{count_text(len(comparison.refusals), 'refusal')}, told below")
    return "; ".join(parts)


# --- Panels of the dashboard


@PANELS.register_panel("controls", at=10, tasks=("video",))
def _controls_panel(selection: Selection) -> Shown:
    verdict = headline.run_verdict(selection.detailed, headline.measured_scores(selection.detailed))
    confidence = panels.confidence_of(selection)
    return controls_figure(panels.table_of(selection, "results"), confidence=confidence, verdict=verdict)


@PANELS.register_panel("folds", at=40, follows=("folds",), tasks=("video",))
def _folds_panel(selection: Selection) -> Shown:
    table = fold_table([selection.detailed]).frame.select(
        ~cs.by_name("run_id", require_all=False) & ~cs.ends_with(UNCALIBRATED)
    )
    run_id = path_to_text(selection.detailed.run_id)
    told = f"{run_id}: the model on each outer fold; –: undefined, or too few reals"
    return HtmlTable(panels.of_folds(selection, table), caption=told, missing="–")


@PANELS.register_panel("slices", at=44, tasks=("video",))
def _slices_panel(selection: Selection) -> Shown:
    return slices_figure(panels.table_of(selection, "slices"), confidence=panels.confidence_of(selection))


_REPLICATES = 1000


@PANELS.register_panel("parameters", at=72, follows=("runs",), reads=("params.yaml",))
def _parameters_panel(selection: Selection) -> Shown:
    """Return a row for each parameter that differs and a column for each run.

    Of runs of one task: what another task is asked differs in nearly everything.
    """
    runs = panels.runs_alike(selection)
    if len(runs) < 2:
        return NOTHING
    differing = parameter_differences(runs).frame
    beside = "chosen runs" if len(runs) == len(selection.runs) else "chosen runs of this task"
    if differing.is_empty():
        return f"Parameters of the {len(runs)} {beside}: no difference."
    columns = [f"run {number}" for number in range(len(runs))]  # not their ids: a copy has the same
    grouped = differing.group_by("parameter", maintain_order=True).agg("value", pl.col("changes_numbers").first())
    values = [pl.col("value").list.get(number).alias(name) for number, name in enumerate(columns)]
    names = dict(zip(columns, map(path_to_text, run_names(runs)), strict=True))
    table = grouped.select("parameter", *values, "changes_numbers")
    verb = "differs" if table.height == 1 else "differ"
    caption = f"{count_text(table.height, 'parameter')} {verb} between the {len(columns)} {beside}"
    return HtmlTable(table, caption=caption, names={**names, "changes_numbers": "Can change a number"})


@PANELS.register_panel("comparison", at=73, follows=("runs",), tasks=("video",))
def _difference_panel(selection: Selection) -> Shown:
    return difference_figure(compare(selection.runs, replicates=_REPLICATES))
