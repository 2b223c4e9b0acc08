"""Figures and tables of the tasks image and video_text: numbers next to their controls, classes, targets.

Unless a docstring says otherwise, ``results`` are rows of TASK_RESULTS in ``services.tables``, ``images`` of IMAGES,
``targets`` of IMAGE_TARGETS, and ``predictions`` of IMAGE_PREDICTIONS. A target is a number that a network predicts for
an image. ``confidence`` is the coverage of the intervals.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown, confidence_of, table_of
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.headline import Score, measured_scores, run_verdict
from fvc_lib.analysis.wording import count_text, figure_text, interval_text
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.tables import PARTS

DIRECTIONS = ("video_to_text", "text_to_video")
_MOST_CLASSES = 32  # in a confusion matrix
_MOST_TARGETS = 8
_MOST_POINTS = 800  # of each target
_LOWEST_DRAWN = -1.0  # an R² has no lower end; its number stands next to the point


# --- Numbers next to their controls


def beside_controls_figure(
    results: pl.DataFrame, shown: Sequence[tuple[str, str]], *, counted: str, confidence: float = 0.95
) -> go.Figure:
    """Return a figure of metrics with intervals; the best control stands below each metric.

    Args:
        results: results of one run.
        shown: pairs of subject and metric. A metric must have no unit, and higher must be better. Pairs that are not
            recorded are left out.
        counted: name of the samples, in the plural.
        confidence: coverage of the intervals.
    """
    rows: list[Row] = []
    finding = ""
    recorded = set(results.filter(source="model").drop_nulls("value").select("subject", "metric").rows())
    for subject, metric in [pair for pair in shown if pair in recorded]:
        scores = [best_score(results, subject, metric, of_controls=of_controls) for of_controls in (False, True)]
        name = wording.metric_name(metric) + ("" if subject == "all" else f", {wording.subject_name(subject)}")
        tick = figure_text(theme.shortened(name, 40))
        for score in filter(None, scores):
            ends = (score.value, score.low, score.high)
            value, low, high = (None if end is None else max(end, _LOWEST_DRAWN) for end in ends)
            is_model, source = score.source == "model", wording.source_name(score.source).lower()
            label, color = (tick, theme.MODEL) if is_model else (f"<i>{tick}, {figure_text(source)}</i>", theme.CONTROL)
            rows.append(Row(label, value, low, high, color, text=interval_text(*ends)))
            finding += f"{name} is {rows[-1].text}" if len(rows) == 1 else ""
    if not rows:
        return theme.nothing_to_show("The model and its controls", "None of these numbers is recorded.")
    samples = results.filter(source="model").select("num_samples", "num_groups").row(0)
    return theme.interval_chart(
        finding,
        f"n = {samples[0]:,} {counted} of the test part in {count_text(samples[1], 'group')}; italic: the best "
        f"control; bars: {confidence:.0%} intervals over groups",
        rows,
        names="Metric",
        values="Value (no unit)",
        shown=(0.0, 1.0),
        chance=None,
        row_height=36,
    )


def best_score(results: pl.DataFrame, subject: str, metric: str, *, of_controls: bool = False) -> Score | None:
    """Return the score of the model, or with ``of_controls`` that of its best control.

    None if ``metric`` of ``subject`` is not recorded or undefined.
    """
    rows = results.filter((pl.col("source") != "model") == of_controls, subject=subject, metric=metric)
    rows = rows.drop_nulls("value")
    rows = rows.sort("value", "source", descending=[wording.better_direction(metric) == "higher", False])
    return Score(*rows.select("source", "value", "low", "high").row(0)) if rows.height else None


def metric_and_control_table(results: pl.DataFrame, subjects: Sequence[str]) -> pl.DataFrame:
    """Return every metric of ``subjects`` for the model and its controls; the subject ``target:`` means all targets.

    Returns:
        ``of metric unit better Model``, one column per control, and ``num_samples num_groups``. Numbers are text with
        intervals. ``of`` is left out if there is one subject, ``unit`` if no metric has one.
    """
    rows = pl.concat([results.clear(), *(results.filter(_about(subject)) for subject in subjects)])
    texts = pl.Series("text", [_value_text(row) for row in rows.iter_rows(named=True)], pl.String)
    cells = rows.with_columns(texts, _renamed("source", wording.source_name))
    names = cells.sort(pl.col("source") != "Model", maintain_order=True)["source"].unique(maintain_order=True)
    counts = {name: pl.col(name).first() for name in ("unit", "num_samples", "num_groups")}
    table = cells.group_by("subject", "metric", maintain_order=True).agg(
        **counts, **{name: pl.col("text").filter(source=name).first().fill_null("none") for name in names}
    )
    better = _renamed("metric", wording.better_direction).alias("better")
    about = _renamed("subject", wording.subject_name).alias("of")
    metric = _renamed("metric", wording.metric_name)
    shown = table.select(about, metric, "unit", better, *names, "num_samples", "num_groups")
    needless = ["of"] * (table["subject"].n_unique() < 2) + ["unit"] * (not (table["unit"] != "").any())
    return shown.drop(needless)


def _renamed(column: str, name: Callable[[str], str]) -> pl.Expr:
    return pl.col(column).map_elements(name, pl.String)


def _about(subject: str) -> pl.Expr:
    return pl.col("subject").str.starts_with(subject) if subject.endswith(":") else pl.col("subject") == subject


def _value_text(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return "undefined"
    return interval_text(row["value"], row["low"], row["high"], 2 if row["unit"] or abs(row["value"]) >= 10 else 3)


# --- The data


def part_table(rows: pl.DataFrame, counted: dict[str, str]) -> pl.DataFrame:
    """Return one row per part of the split: ``part split num_rows`` and the columns of ``counted``.

    A key of ``counted`` is the name of a column to return. Its value is the column of ``rows`` whose distinct values
    are counted. ``split`` says where the split comes from.
    """
    counts = rows.group_by("part").agg(
        split=pl.col("split_source").unique().sort().str.join(", "),
        num_rows=pl.len(),
        **{name: pl.col(column).drop_nulls().n_unique() for name, column in counted.items()},
    )
    joined = pl.DataFrame({"part": PARTS}).join(counts, on="part", how="left", maintain_order="left")
    return joined.with_columns(pl.col("split").fill_null("none"), pl.col("num_rows", *counted).fill_null(0))


def target_table(images: pl.DataFrame, targets: pl.DataFrame) -> pl.DataFrame:
    """Return one row per target: ``target unit num_images num_groups mean std least most``, over ``images``."""
    known = targets.join(images.select("image_id"), on="image_id", how="semi")
    value = pl.col("value")
    statistics = {"mean": value.mean(), "std": value.std(), "least": value.min(), "most": value.max()}
    counts = {"num_images": pl.len(), "num_groups": pl.col("group_id").n_unique()}
    return known.group_by("target", "unit", maintain_order=True).agg(**counts, **statistics)


def training_means(images: pl.DataFrame, targets: pl.DataFrame) -> dict[str, float]:
    """Return by target its mean over the training images; the control "mean predictor" always answers this mean."""
    training = targets.join(images.filter(part="train").select("image_id"), on="image_id", how="semi")
    return dict(training.group_by("target").agg(pl.col("value").mean()).sort("target").iter_rows())


def rejected_table(rejected: pl.DataFrame) -> pl.DataFrame:
    """Return one row per reason of rejection, the most frequent first: ``reason number one_of_them what_and_remedy``.

    ``one_of_them`` is the path of a rejected file, ``what_and_remedy`` the explanation recorded for a file.
    """
    first = {"one_of_them": pl.col("path").first(), "what_and_remedy": pl.col("detail").first()}
    counts = rejected.group_by("reason").agg(number=pl.len(), **first)
    return counts.sort("number", "reason", descending=[True, False])


# --- Images: classes and targets


def class_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return one row per class, the lowest F1 first: ``class precision recall f1 num_images num_groups``."""
    rows = results.filter(_about("class:"), source="model")
    metrics = {name: pl.col("value").filter(metric=name).first() for name in ("precision", "recall", "f1")}
    counts = {"num_images": pl.col("num_samples").max(), "num_groups": pl.col("num_groups").max()}
    name = pl.col("subject").str.strip_prefix("class:").alias("class")
    return rows.group_by(name).agg(**metrics, **counts).sort("f1", "class", nulls_last=True)


def confusion_figure(predictions: pl.DataFrame) -> go.Figure:
    """Return a confusion matrix: rows are true classes, columns predicted classes, cells the share of the row.

    If there are more than 32 classes, the 32 with the most mistakes are drawn.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Confusion of classes", "No test image has a class.")
    is_wrong = pl.col("class_label") != pl.col("predicted_label")
    counts = predictions.group_by("class_label", "predicted_label").len("count")
    counts = counts.sort("count", "class_label", "predicted_label", descending=[True, False, False])
    wrong = counts.filter(is_wrong)
    finding = "No test image is called another class"
    if wrong.height:
        true, called, count = wrong.row(0)
        finding = f"The most frequent mistake: {_short(true)} called {_short(called)}, {count_text(count, 'time')}"
    names = [of.unpivot(["class_label", "predicted_label"])["value"] for of in (counts, predictions.filter(is_wrong))]
    num_all = names[0].n_unique()
    classes = sorted(theme.commonest(names[num_all > _MOST_CLASSES], _MOST_CLASSES))
    pairs = pl.DataFrame({"class_label": classes}).join(pl.DataFrame({"predicted_label": classes}), how="cross")
    cells = pairs.join(counts, on=["class_label", "predicted_label"], how="left", maintain_order="left")
    sizes = predictions.group_by("class_label").len("size")
    cells = cells.join(sizes, on="class_label", how="left", maintain_order="left").fill_null(0)
    shape = (len(classes), len(classes))
    shares = cells.select((pl.col("count") / pl.col("size").clip(1)).round(4)).to_numpy().reshape(shape)
    counted = theme.in_groups(predictions.height, "test image", predictions["group_id"].n_unique())
    right = 1 - wrong["count"].sum() / predictions.height
    cut = f"; the {len(classes)} of {num_all} classes with most mistakes" if len(classes) < num_all else ""
    subtitle = f"{counted}, {right:.1%} of them right{cut}; darker: a larger share of the class; numbers: images"
    drawn = theme.figure(finding, subtitle, height=150 + 26 * max(4, len(classes)))
    numbers = list(map(str, range(1, len(classes) + 1)))
    # The numbers tell shortened names apart.
    ticks = [f"{figure_text(theme.shortened(name, 18))}  {n}" for name, n in zip(classes, numbers, strict=True)]
    texts = cells["count"].cast(pl.String).replace("0", "").to_numpy().reshape(shape)
    look = {"showscale": False, "text": texts, "texttemplate": "%{text}"}
    hover = "%{y}, called %{x}: %{z:.1%}"
    theme.heat_map(
        drawn, shares, numbers, ticks, colors=("#FFFFFF", theme.REAL), low=0, hovertemplate=hover, **look
    )  # fmt: skip
    drawn.update_yaxes(title_text="Is")
    return drawn.update_xaxes(title_text="Was called (row number)", tickangle=0)


def target_scatter_figure(
    predictions: pl.DataFrame, results: pl.DataFrame, means: Mapping[str, float], *, confidence: float = 0.95
) -> go.Figure:
    """Return scatter plots of predicted against true numbers of the test images, one panel per target.

    At most eight targets are drawn.

    Args:
        predictions: rows of TARGET_PREDICTIONS.
        results: results of the run.
        means: mean of each target, from ``training_means``.
        confidence: coverage of the intervals.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Predicted numbers", "No number of a test image was predicted.")
    targets = predictions.select("target", "unit").unique(maintain_order=True).rows()[:_MOST_TARGETS]
    titles = []
    for target, unit in targets:
        score = best_score(results, f"target:{target}", "mae")
        error = interval_text(score.value, score.low, score.high, 1) if score else "not recorded"
        titles.append(f"{_short(target)}: off by {error} {unit}".strip())
    counted = theme.in_groups(predictions["image_id"].n_unique(), "test image", predictions["group_id"].n_unique())
    drawn, places = theme.panel_grid(
        f"{titles[0]} on average",
        f"{counted}; {confidence:.0%} intervals over groups; at most {_MOST_TARGETS} targets, the table has all",
        titles,
        columns=2,
        panel_height=290,
        horizontal_spacing=0.09,
    )
    for (target, unit), where in zip(targets, places, strict=True):
        rows = predictions.filter(target=target).sort("image_id").head(_MOST_POINTS)
        true, predicted = rows["value"].to_list(), rows["predicted"].to_list()
        ends = [min(true + predicted), max(true + predicted)]
        look = {"where": where, "showlegend": where == places[0]}
        theme.add_line(drawn, ends, ends, "Exact", theme.NEUTRAL, width=1, dash="dash", **look)
        if target in means:
            theme.add_line(drawn, ends, [means[target]] * 2, "Mean predictor", theme.CONTROL, **look)
        marker = {"size": 5, "color": theme.translucent(theme.REAL, 0.5)}
        theme.add_line(drawn, true, predicted, "Test image", theme.REAL, mode="markers", marker=marker, **look)
        drawn.update_xaxes(title_text=figure_text(f"True {target} ({unit})" if unit else f"True {target}"), **where)
    return drawn.update_yaxes(title_text="Predicted, in the unit below", col=1)


def _short(name: str) -> str:
    return theme.shortened(name, 24)


# --- Panels of the dashboard

_TASKS = ("image", "video_text")


@PANELS.register_panel("standing", at=20, tasks=_TASKS)
def _standing_panel(selection: Selection) -> Shown:
    run = selection.detailed
    measured = measured_scores(run)
    verdict = run_verdict(run, measured)
    words = " ".join((verdict.sentence, *measured.cautions))
    table = pl.DataFrame({"standing": [verdict.standing], "in_words": [words]})
    return HtmlTable(table, caption=f"{path_to_text(run.run_id)} against its controls")


@PANELS.register_panel("metrics and controls", at=21, tasks=_TASKS)
def _metrics_panel(selection: Selection) -> Shown:
    table = metric_and_control_table(table_of(selection, "task_results"), ["all", "target:", *DIRECTIONS, "captions"])
    caption = f"Every metric of the test part, with {confidence_of(selection):.0%} intervals over groups"
    return HtmlTable(table, caption=caption)


@PANELS.register_panel("confusion", at=50, tasks=("image",))
def _confusion_panel(selection: Selection) -> Shown:
    return confusion_figure(table_of(selection, "image_predictions"))


@PANELS.register_panel("targets", at=52, tasks=("image",))
def _targets_panel(selection: Selection) -> Shown:
    predicted, results = table_of(selection, "target_predictions"), table_of(selection, "task_results")
    if predicted.is_empty():
        return NOTHING
    means = training_means(table_of(selection, "images"), table_of(selection, "image_targets"))
    return target_scatter_figure(predicted, results, means, confidence=confidence_of(selection))
