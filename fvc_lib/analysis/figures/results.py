"""Figures of a result: the model beside its controls and beside other runs, and how its scores lie.

``results``, ``slices``, ``audit`` and ``predictions`` are one run's rows of the tables of that name;
``confidence`` is the coverage that the intervals were made with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import polars as pl
import polars.selectors as cs

from fvc_lib.analysis.dashboard.panels import PANELS, Selection, Shown, confidence_of, of_folds, table_of
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import interval_point, value_label, videos_and_groups
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read import headline
from fvc_lib.analysis.read.headline import Score
from fvc_lib.analysis.read.queries import compare_runs, fold_table, results as read_results
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, number_text, source_name
from fvc_lib.metrics.declaration import UNCALIBRATED, declaration, direction
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.tables import SLICES

# --- Tables of a result: every metric by video and by group, and what each fold chose before it saw its test videos


BY_VIDEO, BY_GROUP = "all", "all_by_group"


def better_direction(metric: str) -> str:
    """``lower`` or ``higher``; a metric that is not known here, of a foreign table, counts as the latter."""
    try:
        return direction(metric)
    except ValueError:
        return "higher"


def metric_table(results: pl.DataFrame) -> pl.DataFrame:
    """The model's metrics over all folds, with intervals: a vote for each video, and a vote for each group.


    Returns:
        ``metric better by_video by_group fold_mean fold_std``; the two columns between are text with intervals.
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
    # No control has a temperature, so metrics before it are the model's alone.
    rows = results.filter((pl.col("scope") == BY_VIDEO) & ~pl.col("metric").str.ends_with(UNCALIBRATED))
    better = pl.col("metric").map_elements(better_direction, return_dtype=pl.String)
    rows = rows.with_columns(
        better=better,
        metric=pl.col("metric").map_elements(metric_name, return_dtype=pl.String),
        source=pl.col("source").map_elements(source_name, return_dtype=pl.String),
    )
    return rows.pivot("source", index=["metric", "better"], values="value")


def chosen_table(predictions: pl.DataFrame, epochs: Mapping[int, tuple[int, int, int]] | None = None) -> pl.DataFrame:
    """What each fold's inner validation part chose, and the test videos that it was then applied to, once.

    Args:
        predictions: one run's rows of ``tables.PREDICTIONS``.
        epochs: by fold the epoch chosen, and the videos and groups of the inner validation part that chose it.

    Returns:
        ``fold epoch temperature threshold num_inner_videos num_inner_groups num_test_videos num_test_groups
        called_fake_share`` in the order of the folds; null is not recorded.
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


_INNER_SCHEMA = {
    "fold": pl.Int64, "epoch": pl.Int64, "num_inner_videos": pl.Int64, "num_inner_groups": pl.Int64,
}  # fmt: skip
_METRIC_SCHEMA = {
    "metric": pl.String, "better": pl.String, "by_video": pl.String, "by_group": pl.String, "fold_mean": pl.Float64,
    "fold_std": pl.Float64,
}  # fmt: skip


def _interval(row: dict[str, float | None] | None) -> str | None:
    return None if row is None else interval_text(row["value"], row["low"], row["high"])


def controls_figure(
    results: pl.DataFrame,
    metric: str = headline.HEADLINE_METRIC,
    *,
    confidence: float = 0.95,
    leaks: Sequence[str] = (),
) -> go.Figure:
    """The model's number and its controls' as points with interval bars: the first figure of a report.

    Args:
        results: one run's rows of ``tables.RESULTS``.
        metric: the metric compared; its chance line at 0.5 is drawn for the AUC and balanced accuracy.
        confidence: the coverage the intervals were made with, for the subtitle.
        leaks: findings of the run's leakage audit that did not pass, where it is known already.
    """
    scores = [score for score in headline.overall_scores(results, metric) if score.value is not None]
    if not scores:
        return theme.nothing_to_show("Model and controls", f"No {metric_name(metric)} over all folds is recorded.")
    verdict = headline.judge(scores, leaks) if metric == headline.HEADLINE_METRIC else None
    figure = theme.figure(
        verdict.sentence if verdict else f"{metric_name(metric)} of the model beside its controls",
        f"{_counts(results)}; bars: {confidence:.0%} cluster-bootstrap intervals over groups",
        height=150 + 44 * len(scores),
    )
    for score in scores:
        figure.add_trace(_score_point(score))
        figure.add_annotation(value_label(_tick(score), score))
    chance = _chance(metric)
    if chance is not None:
        figure.add_vline(x=chance, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
        small = {"size": 11, "color": theme.NEUTRAL}
        figure.add_annotation(x=chance, y=1, yref="paper", yanchor="bottom", text="chance", showarrow=False, font=small)
    if verdict:
        _stamp(figure, verdict.standing)
    figure.update_yaxes(categoryorder="array", categoryarray=[_tick(s) for s in reversed(scores)], showgrid=False)
    figure.update_yaxes(title_text="Scored by")
    figure.update_xaxes(title_text=figure_text(metric_name(metric)), range=_score_range(scores))
    figure.update_layout(showlegend=False, margin={"r": 170})
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
    for label, color in theme.LABEL_COLORS.items():
        scores = predictions.filter(pl.col("label") == label)["score"].to_numpy()
        figure.add_trace(
            go.Histogram(
                x=scores, name=f"{label} (n = {scores.size})", xbins={"start": 0, "end": 1.0001, "size": 0.05},
                marker={"color": theme.translucent(color, 0.6), "line": {"color": color, "width": 1}},
                hovertemplate="score %{x}<br>%{y} videos<extra>" + label + "</extra>",
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


def run_comparison_figure(comparison: pl.DataFrame, metric: str = headline.HEADLINE_METRIC) -> go.Figure:
    """The same metric of several runs as points with their intervals.

    Args:
        comparison: rows of ``queries.compare_runs``.
        metric: which of them.
    """
    rows = comparison.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show("Runs compared", f"No chosen run has recorded its {metric_name(metric)}.")
    is_lower_better = better_direction(metric) == "lower"
    best = rows.sort("value", descending=not is_lower_better).row(0, named=True)
    finding = (
        f"{best['run_id']} has the {'lowest' if is_lower_better else 'highest'} {metric_name(metric)}, "
        f"{number_text(best['value'])}"
        if rows.height > 1
        else f"{metric_name(metric)} of one run: {interval_text(best['value'], best['low'], best['high'])}"
    )
    figure = theme.figure(
        finding,
        f"n = {count_text(rows.height, 'run')}; how bars overlap does not tell whether a difference is one, the "
        "pairwise comparison does; the best of many runs is partly luck; runs on other folds or data do not compare",
        height=150 + 40 * rows.height,
    )
    for row in rows.iter_rows(named=True):
        score = Score("model", row["value"], row["low"], row["high"])
        label = f"{row['run_id']} ({count_text(row['num_videos'], 'video')}, {count_text(row['num_groups'], 'group')})"
        figure.add_trace(interval_point(figure_text(label), score, theme.MODEL))
        figure.add_annotation(value_label(figure_text(label), score))
    figure.update_yaxes(title_text="Run", autorange="reversed", showgrid=False, type="category")
    figure.update_xaxes(title_text=figure_text(metric_name(metric)))
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def _tick(score: Score) -> str:
    name = figure_text(source_name(score.source))
    return f"{name}<br><i>not an honest split</i>" if score.source in headline.DISHONEST_CONTROLS else name


def _score_point(score: Score) -> go.Scatter:
    color = theme.MODEL if score.source == "model" else theme.CONTROL
    return interval_point(_tick(score), score, color, hollow=score.source in headline.DISHONEST_CONTROLS)


def _stamp(figure: go.Figure, standing: str) -> None:
    """The verdict in words, in its colour, over the column of values."""
    color = theme.STANDING_COLORS[standing]
    figure.add_annotation(
        x=1, xref="paper", y=1, yref="paper", xanchor="left", yanchor="bottom", xshift=14, yshift=6, showarrow=False,
        text=f"<b>{standing}</b>", font={"size": 13, "color": color}, bordercolor=color, borderwidth=1.5, borderpad=4,
    )  # fmt: skip


def _score_range(scores: Sequence[Score]) -> list[float]:
    """From a little below the lowest value shown to a little above the highest, at least [0.4, 1]."""
    values = [v for s in scores for v in (s.value, s.low, s.high) if v is not None]
    return [min(0.4, *values) - 0.03, max(1.0, *values) + 0.03]


def _counts(results: pl.DataFrame) -> str:
    rows = results.filter((pl.col("scope") == "all") & (pl.col("source") == "model"))
    rows = rows if rows.height else results.filter(pl.col("scope") == "all")
    num_videos, num_groups = rows.select("num_videos", "num_groups").row(0)
    return f"n = {count_text(num_videos, 'video')} in {count_text(num_groups, 'group')}"


# --- Every metric of the model in one figure: a vote for each video, and a vote for each group


_VOTES = (
    (BY_VIDEO, "a vote for each video", theme.MODEL, False),
    (BY_GROUP, "a vote for each group", theme.REAL, True),
)
_NO_GAP = 0.0005  # less than the digits that are shown
_ASIDE = 0.14  # of a row's height: so far each kind of vote is from its middle


def metrics_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """The model's metrics over all folds as points with intervals, weighted in both ways.

    A large group of copies counts once when groups vote: where the two differ much, a few groups make the result.
    """
    rows = results.filter((pl.col("source") == "model") & pl.col("scope").is_in([BY_VIDEO, BY_GROUP]))
    rows = rows.filter(pl.col("value").is_not_null() & ~pl.col("metric").str.ends_with(UNCALIBRATED))
    if rows.is_empty():
        return theme.nothing_to_show("Every metric", "No metric over all folds is recorded.")
    metrics = rows["metric"].unique(maintain_order=True).to_list()
    figure = theme.figure(_finding(rows), _subtitle(rows, confidence), height=170 + 38 * len(metrics))
    for (scope, name, color, hollow), aside in zip(_VOTES, (-_ASIDE, _ASIDE), strict=True):
        for position, metric in enumerate(metrics):
            row = rows.filter((pl.col("scope") == scope) & (pl.col("metric") == metric))
            if row.is_empty():
                continue
            score = Score("model", *row.select("value", "low", "high").row(0))
            point = interval_point(name, score, color, hollow=hollow, size=9)
            point.update(y=[position + aside], legendgroup=scope, showlegend=position == 0)
            point.hovertemplate = f"{_metric_tick(metric)}, {name}: %{{x:.3f}}<extra></extra>"
            figure.add_trace(point)
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"})
    figure.update_yaxes(title_text="Metric", range=[len(metrics) - 0.45, -0.55], showgrid=False)
    figure.update_yaxes(tickvals=list(range(len(metrics))), ticktext=[_metric_tick(metric) for metric in metrics])
    lowest = min(0.0, *(v for v in (*rows["value"], *rows["low"]) if v is not None))
    figure.update_xaxes(title_text="Value (no unit)", range=[lowest - 0.02, 1.02])
    return figure


def _metric_tick(metric: str) -> str:
    return f"{figure_text(metric_name(metric))}{' (lower is better)' if better_direction(metric) == 'lower' else ''}"


def _finding(rows: pl.DataFrame) -> str:
    both = rows.pivot("scope", index="metric", values="value")
    if BY_GROUP not in both.columns or BY_VIDEO not in both.columns:
        return "Every metric over all folds, a vote for each video"
    both = both.with_columns(gap=(pl.col(BY_GROUP) - pl.col(BY_VIDEO)).abs()).drop_nulls().sort("gap", descending=True)
    if both.is_empty():
        return "No metric is defined both by video and by group"
    most = both.row(0, named=True)
    if most["gap"] < _NO_GAP:
        return f"Counting groups instead of videos changes none of {count_text(both.height, 'metric')}"
    return (
        f"Counting groups instead of videos moves {metric_name(most['metric'])} most, by {most['gap']:.3f} "
        f"to {most[BY_GROUP]:.3f}"
    )


def _subtitle(rows: pl.DataFrame, confidence: float) -> str:
    num_videos, num_groups = rows.select("num_videos", "num_groups").row(0)
    counted = f"n = {count_text(num_videos, 'video')} in {count_text(num_groups, 'group')}"
    return f"{counted}; bars: {confidence:.0%} cluster-bootstrap intervals over groups"


# --- The result by platform, codec, length and the like: where it holds, where it does not, and where nobody knows


def _chance(metric: str) -> float | None:
    declared = declaration(metric)
    return declared.chance if declared else None


def slices_figure(
    slices: pl.DataFrame, metric: str = headline.HEADLINE_METRIC, *, confidence: float = 0.95
) -> go.Figure:
    """One metric in each slice as a point with its interval, grouped by what the slices are by; small ones are pale.

    Args:
        slices: one run's rows of ``tables.SLICES``.
        metric: which metric; a slice where it is undefined is listed without a point.
        confidence: coverage of the intervals, for the subtitle.
    """
    rows = slices.filter(pl.col("metric") == metric)
    if rows.is_empty():
        return theme.nothing_to_show("Slices", f"No {metric_name(metric)} by slice is recorded.")
    rows = rows.with_columns(order=pl.col("slice_by").rank("dense")).sort("order", -pl.col("num_videos"), "value")
    figure = theme.figure(
        _slice_finding(rows, metric), _slice_subtitle(rows, confidence), height=150 + 27 * rows.height
    )
    names: list[list[str]] = [[], []]
    for row in rows.iter_rows(named=True):
        _add_slice(figure, row, names)
    chance = _chance(metric)
    if chance is not None:
        figure.add_vline(x=chance, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
    shown = [v for v in (*rows["number"], *rows["low"], *rows["high"]) if v is not None]
    low, high = (min(0.4, *shown), max(1.0, *shown)) if shown else (0.0, 1.0)
    figure.update_xaxes(title_text=figure_text(metric_name(metric)), range=[low - 0.03, high + 0.03])
    figure.update_yaxes(title_text="Slice", autorange="reversed", showgrid=False, type="multicategory")
    figure.update_yaxes(showdividers=True, dividercolor=theme.GRID)
    figure.update_layout(showlegend=False, margin={"r": 150})
    return figure


def _add_slice(figure: go.Figure, row: dict[str, object], names: list[list[str]]) -> None:
    """A point, or a note where there is none, and its numbers; ``names`` collects what stands on the axis."""
    by = figure_text(str(row["slice_by"]).replace("_", " "))
    small = ", small" if row["is_small"] else ""
    tick = f"{figure_text(_shortened(row['value']))} (n = {row['num_videos']:,}{small})"
    score = Score("slice", *(_number(row[name]) for name in ("number", "low", "high")))
    color = theme.translucent(theme.CONTROL, 0.75) if row["is_small"] else theme.MODEL
    point = interval_point(tick, score, color, hollow=bool(row["is_small"]), size=9)
    point.y = [[by], [tick]]
    point.customdata = [[figure_text(row["value"]), row["num_real"], row["num_fake"], row["num_groups"]]]
    point.hovertemplate = (
        "%{customdata[0]}: %{x:.3f}<br>%{customdata[1]} real, %{customdata[2]} fake, %{customdata[3]} groups"
        "<extra></extra>"
    )
    figure.add_trace(point)
    position = len(names[0])
    names[0].append(by)
    names[1].append(tick)
    text = interval_text(score.value, score.low, score.high, 2) if score.value is not None else "one class only"
    ink = theme.CONTROL if row["is_small"] or score.value is None else theme.MODEL
    figure.add_annotation(
        x=1, xref="paper", xanchor="left", xshift=12, y=position, yref="y", showarrow=False, text=text,
        font={"size": 11.5, "color": ink},
    )  # fmt: skip


def _slice_finding(rows: pl.DataFrame, metric: str) -> str:
    """The lowest and the highest of the slices that are large enough to say something."""
    told = rows.filter(~pl.col("is_small") & pl.col("number").is_not_null()).sort("number")
    if told.is_empty():
        return "Every slice is too small, or of one class: none says how well the network does there"
    low, high = told.row(0, named=True), told.row(-1, named=True)
    name, least, most = metric_name(metric), *(number_text(row["number"], 2) for row in (low, high))
    if told.height == 1:
        return f"{name} is {least} for {_named(low)}, the one slice large enough"
    if least == most:
        return f"{name} is {least} in each of the {told.height} slices that are large enough"
    return f"{name} is lowest for {_named(low)}, {least}, and highest for {_named(high)}, {most}"


def _slice_subtitle(rows: pl.DataFrame, confidence: float) -> str:
    num_small = int(rows["is_small"].sum())
    return (
        f"n = {count_text(_num_videos(rows), 'video')} in {count_text(rows.height, 'slice')}, {num_small} "
        f"of them small (pale: few groups of a class); bars: {confidence:.0%} cluster bootstrap over groups, not "
        "adjusted for how many slices are looked at"
    )


def _num_videos(rows: pl.DataFrame) -> int:
    """All videos: what slices by one property add up to; those by manipulation share their reals."""
    sums = rows.group_by("slice_by").agg(pl.col("num_videos", "num_fake").sum(), pl.col("num_real").max())
    shared = pl.col("slice_by") == "manipulation"
    counted = pl.when(shared).then(pl.col("num_fake") + pl.col("num_real")).otherwise("num_videos")
    return int(sums.select(counted.max()).item())


def _named(row: dict[str, object]) -> str:
    return f"{str(row['slice_by']).replace('_', ' ')} {_shortened(row['value'])}"


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:31]}…"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# --- What a careless split would have claimed, beside what this one claims; and the list of what was looked at


_SHOWN = {
    "group_lookup_by_row": "Recognising groups, split by row",
    "group_lookup_by_group": "Recognising groups, split by group",
    "model": "The network, split by group",
}


def audit_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """An oracle that only recognises a video's group, under a split by row and by group, and the model."""
    rows = results.filter((pl.col("scope") == "all") & (pl.col("metric") == headline.HEADLINE_METRIC))
    known = {row["source"]: row for row in rows.iter_rows(named=True) if row["value"] is not None}
    by_row, by_group = (known.get(name) for name in ("group_lookup_by_row", "group_lookup_by_group"))
    if by_row is None or by_group is None:
        return theme.nothing_to_show("Leakage", "The group-lookup controls are not recorded.")
    figure = theme.figure(
        f"Split by row, merely recognising groups would have claimed an AUC of {by_row['value']:.3f}; "
        f"split by group it gets {by_group['value']:.3f}",
        f"n = {count_text(by_row['num_videos'], 'video')} in {count_text(by_row['num_groups'], 'group')}; the gap "
        f"is what a split by row lets leak; bars: {confidence:.0%} cluster bootstrap over groups",
        height=290,
    )
    for source, tick in _SHOWN.items():
        row = known.get(source)
        if row is None:
            continue
        score = Score(source, row["value"], row["low"], row["high"])
        color = {"model": theme.MODEL, "group_lookup_by_row": theme.NOT_ABOVE_CONTROL}.get(source, theme.CONTROL)
        figure.add_trace(interval_point(tick, score, color, hollow=source == "group_lookup_by_row"))
        figure.add_annotation(value_label(tick, score))
    figure.add_vline(x=0.5, line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, layer="below")
    figure.update_xaxes(title_text=figure_text(metric_name(headline.HEADLINE_METRIC)), range=[0.37, 1.03])
    figure.update_yaxes(title_text="Scored by", autorange="reversed", showgrid=False)
    figure.update_layout(showlegend=False, margin={"r": 170})
    return figure


def audit_table(audit: pl.DataFrame) -> pl.DataFrame:
    """The audit as a reader meets it: ``check finding verdict``; what was counted or measured is in the finding."""
    verdict = (
        pl.when(pl.col("passed"))
        .then(pl.lit("passed"))
        .when(pl.col("passed").is_null())
        .then(pl.lit("for information"))
        .otherwise(pl.lit("FAILED"))
    )
    return audit.select(pl.col("check").str.replace_all("_", " ", literal=True), "finding", verdict=verdict)


def failed_checks(audit: pl.DataFrame) -> list[str]:
    """The findings of checks that did not pass."""
    return audit.filter(~pl.col("passed").fill_null(value=True))["finding"].to_list()


# --- Panels of the dashboard


@PANELS.register_panel("controls", at=10, tasks=("video",))
def _controls_panel(selection: Selection) -> Shown:
    run = selection.detailed
    return controls_figure(read_results([run]).frame, confidence=confidence_of(run), leaks=headline.audit_failures(run))


@PANELS.register_panel("folds", at=40, follows=("folds",), tasks=("video",))
def _folds_panel(selection: Selection) -> Shown:
    table = fold_table([selection.detailed]).frame.select(
        ~cs.by_name("run_id", require_all=False) & ~cs.ends_with(UNCALIBRATED)
    )
    run_id = path_to_text(selection.detailed.run_id)
    return HtmlTable(of_folds(selection, table), caption=f"{run_id}: the network on each outer fold")


@PANELS.register_panel("slices", at=44, tasks=("video",))
def _slices_panel(selection: Selection) -> Shown:
    run = selection.detailed
    return slices_figure(table_of(run, run.slices, SLICES), confidence=confidence_of(run))


@PANELS.register_panel("runs", at=70, follows=("runs",), tasks=("video",))
def _runs_panel(selection: Selection) -> Shown:
    return run_comparison_figure(compare_runs(selection.runs).frame)
