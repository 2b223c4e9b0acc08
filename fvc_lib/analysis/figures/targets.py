"""What a protocol's targets (corpora, generators) say one by one, worst first, and side by side for several runs."""

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import interval_point
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS, HEADLINE_METRIC, Score, judge, overall_scores
from fvc_lib.analysis.read.naming import run_marks
from fvc_lib.analysis.read.protocols import TARGET_SCOPE
from fvc_lib.analysis.read.queries import results as results_of
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, metric_name, number_text, source_name
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.run_paths import RunPaths


def targets_of(results: pl.DataFrame) -> list[str]:
    """Return the targets in ``results`` (tables.RESULTS), the model's worst first."""
    model = results.filter(
        pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=HEADLINE_METRIC
    ).sort("value", "scope", nulls_last=True)  # fmt: skip
    return [scope.removeprefix(TARGET_SCOPE) for scope in model["scope"]]


def target_scores(results: pl.DataFrame, target: str) -> tuple[Score, ...]:
    """Return the scores of the model and its controls at one target, as ``headline.overall_scores`` does over all."""
    rows = results.filter(scope=f"{TARGET_SCOPE}{target}").with_columns(scope=pl.lit("all"))
    return overall_scores(rows)


def target_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return a row per target, worst first: videos and groups, the model and its controls, and the standing.

    Columns ``target videos groups model``, one for each control, and ``standing``; numbers are AUC with intervals.
    """
    rows = []
    for target in targets_of(results):
        scores = target_scores(results, target)
        sizes = results.filter(scope=f"{TARGET_SCOPE}{target}", source="model").select("num_videos", "num_groups")
        told = {source_name(each.source): interval_text(each.value, each.low, each.high) for each in scores}
        videos, groups = sizes.row(0)
        rows.append({"target": target, "videos": videos, "groups": groups, **told, "standing": judge(scores).standing})
    return pl.DataFrame(rows)


def targets_figure(results: pl.DataFrame, *, confidence: float = 0.95) -> go.Figure:
    """Return the model at each target as a point with its interval, worst first, and its best control."""
    targets = targets_of(results)
    if not targets:
        return theme.nothing_to_show("Targets", "This run's protocol has none: its folds are all of one kind.")
    at = {target: target_scores(results, target) for target in targets}
    worst, best = (next(s for s in at[t] if s.source == "model") for t in (targets[0], targets[-1]))
    over_all = next((score for score in overall_scores(results) if score.source == "model"), None)
    name = metric_name(HEADLINE_METRIC)
    finding = f"{name} is {number_text(worst.value, 2)} at {targets[0]}"
    if len(targets) > 1:
        finding += f", the worst, and {number_text(best.value, 2)} at {targets[-1]}, the best of {len(targets)} targets"
    mean = f"; mean over targets {interval_text(over_all.value, over_all.low, over_all.high)}" if over_all else ""
    figure = theme.figure(
        finding,
        f"n = {count_text(len(targets), 'target')}{mean}; hollow: its best control; bars: {confidence:.0%} "
        "intervals over groups, not adjusted for how many targets are looked at",
        height=150 + 92 * len(targets),
    )
    points = []
    for target in targets:
        honest = [s for s in at[target] if s.source not in DISHONEST_CONTROLS and s.value is not None]
        control = max((s for s in honest if s.source != "model"), key=lambda s: s.value or 0.0, default=None)
        model = next((s for s in honest if s.source == "model"), Score("model", None))
        tick = figure_text(theme.shortened(target, 40))
        points.append((interval_point(tick, model, theme.MODEL), model))
        if control is not None:
            beside = f"{tick}<br><i>{figure_text(source_name(control.source)).lower()}</i>"
            points.append((interval_point(beside, control, theme.CONTROL, hollow=True), control))
    theme.draw_intervals(figure, points, "Target", name, theme.range_of([score for _, score in points], 0.4))
    theme.draw_chance(figure, 0.5)
    return figure


def target_matrix(runs: Sequence[RunPaths]) -> HtmlTable:
    """One row per run, named by what tells it apart, one column per target: ROC AUC with its interval."""
    frame = results_of(runs).frame.filter(
        pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=HEADLINE_METRIC
    )  # fmt: skip
    told = [interval_text(*row) for row in frame.select("value", "low", "high").iter_rows()]
    cells = frame.select("run_id", pl.col("scope").str.strip_prefix(TARGET_SCOPE).alias("target")).with_columns(
        pl.Series("told", told, dtype=pl.String)
    )
    matrix = cells.pivot("target", index="run_id", values="told", sort_columns=True) if cells.height else cells
    named = zip(runs, run_marks(runs), strict=True)
    marks = {path_to_text(run.run_id): " · ".join(filter(None, mark)) for run, mark in named}
    known = matrix.with_columns(trained=pl.col("run_id").replace(marks))
    targets = [name for name in matrix.columns if name != "run_id"]
    names = {name: name for name in targets} | {"trained": "Trained"}
    caption = f"{metric_name(HEADLINE_METRIC)} at each target: a row for each run"
    return HtmlTable(known.select("trained", "run_id", *targets), caption, names, missing="–")


@PANELS.register_panel("protocol targets", at=39, follows=("runs",), tasks=("video",))
def _targets(selection: Selection) -> Shown:
    matrix = target_matrix(selection.runs)
    return matrix if matrix.frame.height else NOTHING
