"""Figures and tables of the tasks image and video_text: numbers next to their controls, classes, targets.

Unless a docstring says otherwise, ``results`` are rows of TASK_RESULTS in ``services.tables``, ``images`` of IMAGES,
``targets`` of IMAGE_TARGETS, and ``predictions`` of IMAGE_PREDICTIONS. A target is a number that a network predicts for
an image. ``confidence`` is the coverage of the intervals.
"""

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard.panels import PANELS, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.results import BETTER_DIRECTION, NAME_OF_METRIC
from fvc_lib.analysis.pages.display import HtmlSentences, HtmlTable
from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.analysis.read.queries import Selection, confidence_of, table_of
from fvc_lib.analysis.wording import figure_text, interval_text
from fvc_lib.services.tables import PARTS

DIRECTIONS = ("video_to_text", "text_to_video")
_MOST_CLASSES = 32  # in a confusion matrix
_MOST_TARGETS = 8
_MOST_POINTS = 800  # test images that are drawn for a target


# --- Numbers next to their controls


def metric_and_control_table(results: pl.DataFrame, subjects: Sequence[str]) -> pl.DataFrame:
    """Return a table of the metrics of the model and its controls, one row per subject and metric.

    A subject is what a metric is about, such as ``captions``, or ``target:calories`` for one predicted number.

    Args:
        results: rows of TASK_RESULTS.
        subjects: the subjects to show. One that ends in ``:`` stands for all subjects that begin with it, such as
            ``target:`` for all targets.

    Returns:
        The columns ``of metric unit better Model``, one column per control, and ``num_samples num_groups``. ``of`` is
        the readable name of the subject, and ``better`` is ``higher`` or ``lower``. Values are text with intervals.
        Null means that a control has no value for the metric.
    """
    rows = results.filter(pl.any_horizontal(map(_about, subjects)))
    texts = [
        "undefined" if value is None else interval_text(value, low, high, 2 if unit else 3)
        for value, low, high, unit in rows.select("value", "low", "high", "unit").iter_rows()
    ]
    rows = rows.with_columns(pl.Series("text", texts, pl.String), _renamed("source", wording.source_name))
    counts = ["num_samples", "num_groups"]
    wide = rows.pivot("source", index=["subject", "metric", "unit", *counts], values="text")
    about = _renamed("subject", wording.subject_name).alias("of")
    sources = wide.drop("subject", "metric", "unit", *counts).columns
    return wide.select(about, NAME_OF_METRIC, "unit", BETTER_DIRECTION, *sources, *counts)


def _renamed(column: str, name: Callable[[str], str]) -> pl.Expr:
    return pl.col(column).map_elements(name, pl.String)


def _about(subject: str) -> pl.Expr:
    return pl.col("subject").str.starts_with(subject) if subject.endswith(":") else pl.col("subject") == subject


# --- The data


def part_table(rows: pl.DataFrame, counted: dict[str, str]) -> pl.DataFrame:
    """Count the samples in each part of the split (training, validation, test), one row per part.

    Args:
        rows: one row per sample, with ``part`` and ``split_source``.
        counted: further counts, as ``{new_column: column}``: ``new_column`` of the result is the number of distinct
            values of ``column`` in ``rows``.

    Returns:
        Columns ``part split num_rows``, then those of ``counted``. ``split`` is ``official`` (published with the
        corpus), ``made`` or both, joined by a comma. It is null for an empty part.
    """
    num_different = {name: pl.col(column).drop_nulls().n_unique() for name, column in counted.items()}
    splits = pl.col("split_source").unique().sort().str.join(", ")
    counts = rows.group_by("part").agg(split=splits, num_rows=pl.len(), **num_different)
    return pl.DataFrame({"part": PARTS}).join(counts, on="part", how="left", maintain_order="left").fill_null(0)


def target_table(images: pl.DataFrame, targets: pl.DataFrame) -> pl.DataFrame:
    """Return statistics of each target, a number that a network predicts for an image. One row per target.

    Columns are ``target unit num_images num_groups mean std least most``. They are computed over those ``images`` that
    have a number for the target.

    Args:
        images: rows of ``tables.IMAGES``.
        targets: rows of ``tables.IMAGE_TARGETS``.
    """
    value = pl.col("value")
    statistics = {"mean": value.mean(), "std": value.std(), "least": value.min(), "most": value.max()}
    counts = {"num_images": pl.len(), "num_groups": pl.col("group_id").n_unique()}
    known = targets.join(images, on="image_id", how="semi")
    return known.group_by("target", "unit", maintain_order=True).agg(**counts, **statistics)


def rejected_table(rejected: pl.DataFrame) -> pl.DataFrame:
    """Return one row per reason for rejecting files, the most frequent first.

    Columns are ``reason number one_of_them what_and_remedy``. ``one_of_them`` is the path of an example, the first
    rejected file with this reason. ``what_and_remedy`` is the explanation that was recorded for it.
    """
    first = {"one_of_them": pl.col("path").first(), "what_and_remedy": pl.col("detail").first()}
    counts = rejected.group_by("reason").agg(number=pl.len(), **first)
    return counts.sort("number", "reason", descending=[True, False])


# --- Images: classes and targets


def class_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return the metrics of the model on the test images of each class, one row per class, the lowest F1 first.

    Columns are ``class precision recall f1 num_images num_groups``. ``results`` are rows of ``tables.TASK_RESULTS``.
    """
    rows = results.filter(_about("class:"), source="model")
    metrics = {name: pl.col("value").filter(metric=name).first() for name in ("precision", "recall", "f1")}
    counts = {"num_images": pl.col("num_samples").max(), "num_groups": pl.col("num_groups").max()}
    name = pl.col("subject").str.strip_prefix("class:").alias("class")
    return rows.group_by(name).agg(**metrics, **counts).sort("f1", "class", nulls_last=True)


def confusion_figure(predictions: pl.DataFrame) -> go.Figure:
    """Return a figure of the confusion matrix of the test images.

    Rows are true classes, columns are predicted classes. The shade of a cell is its share of the true class, and the
    text is the number of images. If there are more than 32 classes, the 32 with the most mistakes are drawn.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Confusion of classes", "No test image has a class.")
    classes, codes = np.unique(predictions["class_label", "predicted_label"].to_numpy(), return_inverse=True)
    counts = np.zeros((classes.size, classes.size), np.int64)
    np.add.at(counts, tuple(codes.reshape(-1, 2).T), 1)
    # A mistake counts for two classes: the true one and the predicted one.
    mistakes = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    chosen = np.sort(np.argsort(-mistakes, kind="stable")[:_MOST_CLASSES])
    cells = counts[np.ix_(chosen, chosen)]
    counted = theme.in_groups(predictions.height, "test image", predictions["group_id"].n_unique())
    drawn = theme.figure(
        f"{counts.trace() / counts.sum():.1%} of the test images are recognised",
        f"{counted}; at most {_MOST_CLASSES} classes, those with most mistakes; darker: a larger share of the class; "
        "numbers: images",
        height=150 + 26 * max(4, len(cells)),
    )
    # Row numbers distinguish classes whose shortened names are equal.
    numbers = [str(number) for number in range(1, len(cells) + 1)]
    named = zip(classes[chosen], numbers, strict=True)
    ticks = [f"{figure_text(theme.shortened(name, 18))}  {number}" for name, number in named]
    num_images = counts.sum(1)[chosen, None]
    drawn.add_heatmap(
        y=ticks, z=cells / np.maximum(num_images, 1), x=numbers,
        zmin=0, zmax=1, colorscale=["#FFFFFF", theme.REAL], xgap=1, ygap=1, showscale=False,
        text=np.where(cells, cells.astype(str), ""), texttemplate="%{text}",
        hovertemplate="%{y}, called %{x}: %{z:.1%}",
    )  # fmt: skip
    drawn.update_yaxes(title_text="Is", autorange="reversed", showgrid=False, type="category", dtick=1)
    return drawn.update_xaxes(title_text="Was called (row number)", showgrid=False, type="category", tickangle=0)


def target_scatter_figure(predictions: pl.DataFrame) -> go.Figure:
    """Return scatter plots of predicted against true numbers of the test images, one panel per target.

    At most eight targets are drawn. ``predictions`` are rows of TARGET_PREDICTIONS.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Predicted numbers", "No number of a test image was predicted.")
    targets = predictions.select("target", "unit").unique(maintain_order=True).rows()[:_MOST_TARGETS]
    counted = theme.in_groups(predictions["image_id"].n_unique(), "test image", predictions["group_id"].n_unique())
    drawn, places = theme.panel_grid(
        "Predicted against true numbers of the test images",
        f"{counted}; exact predictions lie on the dashed line; at most {_MOST_TARGETS} targets, the table has all",
        [theme.shortened(target, 24) for target, _ in targets],
        columns=2, panel_height=290, horizontal_spacing=0.09,
    )  # fmt: skip
    for (target, unit), where in zip(targets, places, strict=True):
        rows = predictions.filter(target=target).sort("image_id").head(_MOST_POINTS)
        true, predicted = rows["value"].to_list(), rows["predicted"].to_list()
        ends = [min(true + predicted), max(true + predicted)]
        look = {"where": where, "showlegend": where == places[0]}
        theme.add_line(drawn, ends, ends, "Exact", theme.NEUTRAL, width=1, dash="dash", **look)
        marker = {"size": 5, "color": theme.translucent(theme.REAL, 0.5)}
        theme.add_line(drawn, true, predicted, "Test image", theme.REAL, mode="markers", marker=marker, **look)
        drawn.update_xaxes(title_text=figure_text(f"True {target} ({unit or 'no unit'})"), **where)
    return drawn.update_yaxes(title_text="Predicted, in the unit below", col=1)


# --- Panels of the dashboard

_TASKS = ("image", "video_text")


@PANELS.register_panel("standing", at=20, tasks=_TASKS)
def _standing_panel(selection: Selection) -> Shown:
    headline = run_headline(selection.detailed, with_memory=False)
    return HtmlSentences([f"{headline.verdict.standing}: {headline.verdict.sentence}", *headline.cautions])


@PANELS.register_panel("metrics and controls", at=21, tasks=_TASKS)
def _metrics_panel(selection: Selection) -> Shown:
    table = metric_and_control_table(table_of(selection, "task_results"), ["all", "target:", *DIRECTIONS, "captions"])
    caption = f"Every metric of the test part, with {confidence_of(selection):.0%} intervals over groups"
    return HtmlTable(table, caption=caption, missing="none")


PANELS.register_panel("confusion", at=50, tasks=("image",))(
    lambda selection: confusion_figure(table_of(selection, "image_predictions"))
)


PANELS.register_panel("targets", at=52, tasks=("image",))(
    lambda selection: target_scatter_figure(table_of(selection, "target_predictions"))
)
