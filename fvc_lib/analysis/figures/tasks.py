"""What figures of the tasks image and video_text share: a model's numbers, each beside its best control.

``results`` are rows of ``tables.TASK_RESULTS``; ``images``, ``targets``, ``rejected`` of the tables of that name;
``confidence`` is the coverage that the intervals were made with.
"""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard.panels import PANELS, Selection, Shown, confidence_of, runs_alike
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import interval_point
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.headline import MeasuredScores, Score, measured_scores, run_verdict
from fvc_lib.analysis.read.naming import run_names
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.tables import PARTS

_LOWEST_DRAWN = -1.0  # what is below stands at the edge; its number is beside it
_MOST_CHARACTERS = 40  # of a name on the axis


def beside_controls_figure(
    results: pl.DataFrame, shown: Sequence[tuple[str, str]], *, counted: tuple[str, str], confidence: float = 0.95
) -> go.Figure:
    """Numbers without a unit as points with intervals, and below each in grey what the best control reaches.

    ``shown`` has subject and metric of each row; those not recorded are left out; higher must be better. ``counted`` is
    what was judged, in the singular and in the plural.
    """
    rows = [row for each in shown if (row := _row(results, *each)) is not None]
    if not rows:
        return theme.nothing_to_show("The model beside its controls", "None of these numbers is recorded.")
    scores = [each for name, model, control in rows for each in _named(name, model, control)]
    figure = theme.figure(_finding(rows), _subtitle(results, shown, counted, confidence), height=150 + 36 * len(scores))
    shown_range = theme.range_of([_drawn(score) for _, score in scores], 0.0)
    theme.draw_intervals(figure, [_point(*each) for each in scores], "Metric", "Value (no unit)", shown_range)
    return figure


def _point(tick: str, score: Score) -> tuple[go.Scatter, Score]:
    color, size = (theme.MODEL, 11) if score.source == "model" else (theme.CONTROL, 9)
    return interval_point(tick, _drawn(score), color, size=size), score


def runs_beside_controls_figure(
    runs: Sequence[tuple[str, MeasuredScores]], *, num_left_out: int = 0, confidence: float = 0.95
) -> go.Figure:
    """Return the main number of several runs with the first one's measure, each above its best control."""
    scored = [
        (name, found) for name, found in runs if any(s.source == "model" and s.value is not None for s in found.scores)
    ]
    if not scored:
        return theme.nothing_to_show("Runs compared", "No chosen run of this task has recorded a result yet.")
    measure = scored[0][1].measure.name
    alike = [(name, found) for name, found in scored if found.measure.name == measure]
    rows = [row for name, found in alike for row in _of_run(name, found)]
    left = num_left_out + len(runs) - len(alike)
    beside = f"; {wording.count_text(left, 'chosen run')} without it or of another task left out" if left else ""
    best_name, best = max(alike, key=lambda each: each[1].scores[0].value or 0.0)
    value = wording.interval_text(best.scores[0].value, best.scores[0].low, best.scores[0].high)
    finding = f"{best_name} has the highest {measure}, {value}" if len(alike) > 1 else f"{measure} of one run: {value}"
    figure = theme.figure(
        finding,
        f"n = {wording.count_text(len(alike), 'run')}; bars: {confidence:.0%} intervals; how they overlap does not "
        f"tell whether a difference is one; the best of many runs is partly luck{beside}",
        height=150 + 36 * len(rows),
    )
    shown_range = theme.range_of([_drawn(score) for _, score in rows], 0.0)
    theme.draw_intervals(figure, [_point(*each) for each in rows], "Run", measure, shown_range)
    return figure


def best_control(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    """Return the control with the best value of ``metric``; None where there is none."""
    return _best(results.filter(pl.col("source") != "model"), subject, metric)


def model_score(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    """Return the model's ``metric``; None where it is not recorded or not defined."""
    return _best(results.filter(pl.col("source") == "model"), subject, metric)


def _best(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    found = results.filter(pl.col("subject") == subject, pl.col("metric") == metric).drop_nulls("value")
    found = found.sort("value", "source", descending=[wording.better_direction(metric) == "higher", False])
    return Score(*found.select("source", "value", "low", "high").row(0)) if found.height else None


def _row(results: pl.DataFrame, subject: str, metric: str) -> tuple[str, Score, Score | None] | None:
    model, named = model_score(results, subject, metric), wording.metric_name(metric)
    name = named if subject == "all" else f"{named}, {wording.subject_name(subject)}"
    return (name, model, best_control(results, subject, metric)) if model else None


def _finding(rows: Sequence[tuple[str, Score, Score | None]]) -> str:
    name, model, control = rows[0]
    text = f"{name} is {wording.interval_text(model.value, model.low, model.high)}"
    if control is None:
        return f"{text}, without a control beside it"
    reached = wording.interval_text(control.value, control.low, control.high)
    return f"{text}; {wording.source_name(control.source).lower()} reaches {reached}"


def _of_run(name: str, found: MeasuredScores) -> list[tuple[str, Score]]:
    model = found.scores[0]
    shown = wording.figure_text(name)
    groups = wording.count_text(found.num_groups or 0, "group")
    counted = f"{wording.count_text(found.num_samples or 0, found.measure.one)}, {groups}"
    rows = [(f"{shown}<br>{counted}", _drawn(model))]
    controls = [score for score in found.scores[1:] if score.value is not None]
    if controls:
        best = max(controls, key=lambda score: score.value or 0.0)
        source = wording.figure_text(wording.source_name(best.source).lower())
        rows.append((f"<i>{source}<br>of {shown}</i>", _drawn(best)))
    return rows


def _drawn(score: Score) -> Score:
    """Where ``score`` is drawn: an R² has no lower end, and one far below 0 would leave the others no room."""
    value, low = (None if end is None else max(end, _LOWEST_DRAWN) for end in (score.value, score.low))
    return Score(score.source, value, low, score.high if score.high is None else max(score.high, _LOWEST_DRAWN))


def _subtitle(
    results: pl.DataFrame, shown: Sequence[tuple[str, str]], counted: tuple[str, str], confidence: float
) -> str:
    subject, metric = next(each for each in shown if model_score(results, *each) is not None)
    of_it = (pl.col("subject") == subject) & (pl.col("metric") == metric) & (pl.col("source") == "model")
    num_samples, num_groups = results.filter(of_it).select("num_samples", "num_groups").row(0)
    text = (
        f"n = {wording.count_text(num_samples, *counted)} of the test part in {wording.count_text(num_groups, 'group')}"
    )
    return f"{text}; bars: {confidence:.0%} intervals over groups"


def _named(name: str, model: Score, control: Score | None) -> list[tuple[str, Score]]:
    shown = wording.figure_text(theme.shortened(name, _MOST_CHARACTERS))
    if control is None:
        return [(shown, model)]
    source = wording.figure_text(wording.source_name(control.source).lower())
    return [(shown, model), (f"<i>{shown}, {source}</i>", control)]


# --- Tables of the tasks image and video_text: the data, every metric beside its controls, and what fits the machine

_MODEL = "model"
_DIGITS_WITH_UNIT = 2


def part_table(rows: pl.DataFrame, counted: dict[str, str]) -> pl.DataFrame:
    """Return the counts of each part of the split: ``part split num_rows`` and ``counted``.

    ``counted`` names columns of the answer, and the columns of ``rows`` whose different values they count. A part
    without rows is there with zeros.
    """
    parts = pl.DataFrame({"part": PARTS})
    found = rows.group_by("part").agg(
        split=pl.col("split_source").unique().sort().str.join(", "),
        num_rows=pl.len(),
        **{name: pl.col(column).drop_nulls().n_unique() for name, column in counted.items()},
    )
    joined = parts.join(found, on="part", how="left", maintain_order="left")
    return joined.with_columns(pl.col("split").fill_null("none"), pl.col("num_rows", *counted).fill_null(0))


def target_table(images: pl.DataFrame, targets: pl.DataFrame) -> pl.DataFrame:
    """Return the targets of the images: ``target unit num_images num_groups mean std least most``."""
    known = targets.join(images.select("image_id"), on="image_id", how="semi")
    value = pl.col("value")
    return known.group_by("target", "unit", maintain_order=True).agg(
        num_images=pl.len(), num_groups=pl.col("group_id").n_unique(), mean=value.mean(), std=value.std(),
        least=value.min(), most=value.max(),
    )  # fmt: skip


def training_means(images: pl.DataFrame, targets: pl.DataFrame) -> dict[str, float]:
    """Return the mean of each target over the training part, which the mean predictor predicts."""
    training = images.filter(pl.col("part") == "train").select("image_id")
    means = targets.join(training, on="image_id", how="semi").group_by("target").agg(pl.col("value").mean())
    return dict(means.sort("target").iter_rows())


def rejected_table(rejected: pl.DataFrame) -> pl.DataFrame:
    """Return rejected files by reason, most frequent first: ``reason number one_of_them what_and_remedy``."""
    counted = rejected.group_by("reason").agg(
        number=pl.len(), one_of_them=pl.col("path").first(), what_and_remedy=pl.col("detail").first()
    )
    return counted.sort("number", "reason", descending=[True, False])


def metric_and_control_table(results: pl.DataFrame, subjects: Sequence[str]) -> pl.DataFrame:
    """Every metric of ``subjects`` in this order, beside the controls that have it; ``target:`` means all targets.

    Columns: ``of`` (where there are several subjects), ``metric unit better model``, one for each control,
    ``num_samples num_groups``; numbers are text with their intervals.
    """
    rows = pl.concat([results.filter(_about(subject)) for subject in subjects]) if subjects else results.clear()
    controls = rows.filter(pl.col("source") != _MODEL)["source"].unique(maintain_order=True).to_list()
    columns = [_MODEL, *controls]
    known = {(row["source"], row["subject"], row["metric"]): row for row in rows.iter_rows(named=True)}
    shown = rows.select("subject", "metric").unique(maintain_order=True)
    lines = []
    for subject, metric in shown.iter_rows():
        cells = {source: known.get((source, subject, metric)) for source in columns}
        first = next(row for row in cells.values() if row is not None)
        texts = {wording.source_name(source): _text(row) for source, row in cells.items()}
        lines.append(
            {
                "of": wording.subject_name(subject),
                "metric": wording.metric_name(metric),
                "unit": first["unit"],
                "better": wording.better_direction(metric),
            }
            | texts
            | {"num_samples": first["num_samples"], "num_groups": first["num_groups"]}
        )
    texts_schema = {wording.source_name(source): pl.String for source in columns}
    schema = {**dict.fromkeys(("of", "metric", "unit", "better"), pl.String), **texts_schema}
    table = pl.DataFrame(lines, schema={**schema, "num_samples": pl.Int64, "num_groups": pl.Int64}, orient="row")
    needless = [] if shown["subject"].n_unique() > 1 else ["of"]
    needless += [] if (table["unit"] != "").any() else ["unit"]
    return table.drop(needless)


def class_table(results: pl.DataFrame) -> pl.DataFrame:
    """Each class: ``class precision recall f1 num_images num_groups``, the worst F1 first."""
    rows = results.filter(_about("class:") & (pl.col("source") == _MODEL))
    empty = {"class": pl.String, "precision": pl.Float64, "recall": pl.Float64, "f1": pl.Float64}
    if rows.is_empty():
        return pl.DataFrame(schema={**empty, "num_images": pl.Int64, "num_groups": pl.Int64})
    names = pl.col("subject").map_elements(wording.subject_name, return_dtype=pl.String)
    rows = rows.with_columns(names.alias("class"))
    wide = rows.pivot("metric", index="class", values="value", on_columns=["precision", "recall", "f1"])
    counts = rows.group_by("class").agg(pl.col("num_samples").max().alias("num_images"), pl.col("num_groups").max())
    return wide.join(counts, on="class").sort("f1", "class", nulls_last=True)


def _about(subject: str) -> pl.Expr:
    named = pl.col("subject")
    return named.str.starts_with(subject) if subject.endswith(":") else named == subject


def _text(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none"
    value, low, high = row["value"], row["low"], row["high"]
    if value is None:
        return "undefined"
    digits = _DIGITS_WITH_UNIT if row["unit"] or abs(value) >= 10 else 3
    return wording.interval_text(value, low, high, digits) if low is not None else wording.number_text(value, digits)


# --- Panels of the dashboard

_TASKS = ("image", "video_text")


@PANELS.register_panel("standing", at=20, tasks=_TASKS)
def _standing_panel(selection: Selection) -> Shown:
    run = selection.detailed
    found = measured_scores(run)
    verdict = run_verdict(run, found)
    table = pl.DataFrame({"standing": [verdict.standing], "in_words": [" ".join((verdict.sentence, *found.cautions))]})
    return HtmlTable(table, caption=f"{path_to_text(run.run_id)} beside what knows nothing of its test part")


@PANELS.register_panel("runs of the task", at=71, follows=("runs",), tasks=_TASKS)
def _runs_panel(selection: Selection) -> Shown:
    named = dict(zip(selection.runs, map(path_to_text, run_names(selection.runs)), strict=True))
    alike = runs_alike(selection)
    scored = [(named[run], measured_scores(run)) for run in alike]
    left_out = len(named) - len(alike)
    return runs_beside_controls_figure(scored, num_left_out=left_out, confidence=confidence_of(selection))
