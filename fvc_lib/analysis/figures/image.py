"""Figures of image recognition: what the corpus holds, which classes are confused, and how far numbers are off.

``images`` are rows of ``tables.IMAGES``, ``predictions`` of ``tables.IMAGE_PREDICTIONS``, where nothing else is said.
"""

import zlib
from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown, confidence_of, table_of
from fvc_lib.analysis.figures import tasks, theme
from fvc_lib.analysis.figures.corpus import LEGEND
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, number_text
from fvc_lib.services.tables import PARTS

_PART_COLORS = {"train": theme.SERIES[0], "validation": theme.SERIES[4], "test": theme.SERIES[1]}
_MOST_BARS = 30  # classes with a bar of their own
_MOST_CLASSES = 32  # in a matrix that can still be read
_NUMBERS_UP_TO = 12  # classes, in a matrix with a number in each field
_MOST_POINTS = 800  # of each target
_PANELS_PER_ROW = 2
_MOST_PANELS = 8
_MOST_CHARACTERS = 24


def classes_figure(images: pl.DataFrame) -> go.Figure:
    """Images of each class by part of the split, large classes first; of very many the largest."""
    if images.is_empty():
        return theme.nothing_to_show("Images by class", "The index has no images.")
    named = images.with_columns(pl.col("class_label").fill_null("no class"))
    sizes = named.group_by("class_label").agg(count=pl.len()).sort("count", "class_label", descending=[True, False])
    largest = sizes["class_label"].head(_MOST_BARS).to_list()
    counts = named.group_by("class_label", "part").agg(count=pl.len())
    ticks = _unique_ticks(largest)
    more = f"; of the classes the {len(largest)} largest" if sizes.height > len(largest) else ""
    figure = theme.figure(_class_finding(images), _images_and_groups(images) + more, height=150 + 26 * len(ticks))
    for part in PARTS:
        rows = {row["class_label"]: row["count"] for row in counts.filter(pl.col("part") == part).iter_rows(named=True)}
        figure.add_trace(
            go.Bar(
                x=[rows.get(name, 0) for name in ticks], y=list(ticks.values()), orientation="h", name=part,
                marker={"color": _PART_COLORS[part]}, hovertemplate="%{y}: %{x} images<extra>" + part + "</extra>",
            )
        )  # fmt: skip
    figure.update_yaxes(title_text="Class", showgrid=False, type="category")
    figure.update_yaxes(categoryorder="array", categoryarray=list(ticks.values())[::-1])
    figure.update_xaxes(title_text="Images")
    figure.update_layout(barmode="stack", legend=LEGEND)
    return figure


def confusion_figure(predictions: pl.DataFrame) -> go.Figure:
    """Of the images of each class (rows) the share that was called each class (columns).

    Of many classes those that have most mistakes in them are drawn, and the rest is left out, which is said.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Confusion of classes", "No test image has a class.")
    classes = _most_confused(predictions)
    places = {name: index for index, name in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes)), np.int64)
    inside = predictions.filter(pl.col("class_label").is_in(classes) & pl.col("predicted_label").is_in(classes))
    for true, called, count in inside.group_by("class_label", "predicted_label").len().iter_rows():
        counts[places[true], places[called]] = count
    sizes = dict(predictions.group_by("class_label").len().iter_rows())
    totals = np.array([sizes.get(name, 0) for name in classes])
    shares = counts / np.maximum(totals, 1)[:, None]
    num_all = _class_names(predictions).len()
    left_out = f"; the {len(classes)} of {num_all} classes with most mistakes" if len(classes) < num_all else ""
    subtitle = f"{_judged(predictions)}{left_out}; darker: a larger share of the class"
    figure = theme.figure(_confusion_finding(predictions), subtitle, height=150 + 26 * max(4, len(classes)))
    numbers = [str(index) for index in range(1, len(classes) + 1)]
    rows = [
        f"{figure_text(theme.shortened(name, 18))}  {number}" for number, name in zip(numbers, classes, strict=True)
    ]
    figure.add_trace(
        go.Heatmap(
            z=shares.round(4), x=numbers, y=rows, zmin=0, zmax=1, xgap=1, ygap=1, showscale=False,
            colorscale=[[0, "#FFFFFF"], [0.02, "#E3EDF5"], [1, theme.REAL]],
            customdata=_hover_texts(counts, classes), hovertemplate="%{customdata}, %{z:.1%} of it<extra></extra>",
            **_numbers(counts, len(classes)),
        )
    )  # fmt: skip
    figure.update_yaxes(title_text="Is", autorange="reversed", showgrid=False, type="category", dtick=1)
    figure.update_xaxes(title_text="Was called (row number)", showgrid=False, type="category", tickangle=0)
    return figure


def target_scatter_figure(
    predictions: pl.DataFrame, results: pl.DataFrame, means: Mapping[str, float], *, confidence: float = 0.95
) -> go.Figure:
    """Predicted over true numbers of the test images, a panel per target in its unit, with its training ``means``."""
    if predictions.is_empty():
        return theme.nothing_to_show("Predicted numbers", "No number of a test image was predicted.")
    targets = predictions.select("target", "unit").unique(maintain_order=True).rows()
    shown = targets[:_MOST_PANELS]
    columns = min(_PANELS_PER_ROW, len(shown))
    num_rows = -(-len(shown) // columns)
    height = 130 + 290 * num_rows
    scores = [(target, tasks.model_score(results, f"target:{target}", "r2")) for target, _ in shown]
    titles = [f"{_short(name)}: R² {number_text(score.value)}" if score else _short(name) for name, score in scores]
    figure = make_subplots(
        rows=num_rows, cols=columns, horizontal_spacing=0.09, vertical_spacing=96 / height if num_rows > 1 else 0,
        subplot_titles=[figure_text(title) for title in titles],
    )  # fmt: skip
    finding, subtitle = _target_finding(predictions, results, shown[0], confidence)
    more = f"; {len(targets) - len(shown)} more targets are in the table" if len(targets) > len(shown) else ""
    figure.update_layout(theme.figure(finding, subtitle + more, height=height).layout)
    for index, (target, unit) in enumerate(shown):
        where = {"row": index // columns + 1, "col": index % columns + 1}
        rows = _thinned(predictions.filter(pl.col("target") == target))
        _add_panel(figure, rows, means.get(target), where, first=index == 0)
        in_unit = f" ({unit})" if unit else ""
        figure.update_xaxes(title_text=figure_text(f"True {target}{in_unit}"), **where)
        if where["col"] == 1:  # on a phone a second title would lie in the panel before it
            figure.update_yaxes(title_text="Predicted, in the unit below", **where)
    figure.update_annotations(font={"size": 12, "color": theme.NEUTRAL})
    beside = {"y": 1 - 42 / height, "yref": "container", "yanchor": "top"}
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", **beside})
    return figure


def _unique_ticks(names: list[str]) -> dict[str | None, str]:
    """Names for an axis, shortened and escaped; two that would be one there are numbered."""
    ticks: dict[str | None, str] = {}
    for number, name in enumerate(names):
        text = figure_text(_short(name))
        ticks[name] = text if text not in ticks.values() else f"{text} ({number})"
    return ticks


def _class_finding(images: pl.DataFrame) -> str:
    sizes = images.drop_nulls("class_label").group_by("class_label").len()["len"]
    if sizes.is_empty():
        return "No image has a class: only numbers are learned"
    least, most = min(sizes.to_list()), max(sizes.to_list())
    spread = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{count_text(sizes.len(), 'class', 'classes')} of {spread} images each"


def _images_and_groups(images: pl.DataFrame) -> str:
    parts = dict(images.group_by("part").len().iter_rows())
    per_part = ", ".join(f"{parts.get(part, 0):,} {part}" for part in PARTS)
    counted = f"n = {count_text(images.height, 'image')} ({per_part})"
    return f"{counted} in {count_text(images['group_id'].n_unique(), 'group')}, none of them in two parts"


def _class_names(predictions: pl.DataFrame) -> pl.Series:
    return pl.concat([predictions["class_label"], predictions["predicted_label"].rename("class_label")]).unique().sort()


def _most_confused(predictions: pl.DataFrame) -> list[str]:
    names = _class_names(predictions)
    if names.len() <= _MOST_CLASSES:
        return names.to_list()
    wrong = predictions.filter(pl.col("class_label") != pl.col("predicted_label"))
    both = pl.concat([wrong["class_label"], wrong["predicted_label"].rename("class_label")])
    counts = dict(both.value_counts().iter_rows())
    return sorted(sorted(names, key=lambda name: (-counts.get(name, 0), name))[:_MOST_CLASSES])


def _numbers(counts: np.ndarray, num_classes: int) -> dict[str, object]:
    if num_classes > _NUMBERS_UP_TO:
        return {}
    return {"text": [[f"{n:,}" if n else "" for n in row] for row in counts.tolist()], "texttemplate": "%{text}"}


def _hover_texts(counts: np.ndarray, classes: list[str]) -> list[list[str]]:
    names = [figure_text(_short(name)) for name in classes]
    return [
        [f"{true}<br>called {called}<br>{count:,} images" for called, count in zip(names, row, strict=True)]
        for true, row in zip(names, counts.tolist(), strict=True)
    ]


def _confusion_finding(predictions: pl.DataFrame) -> str:
    wrong = predictions.filter(pl.col("class_label") != pl.col("predicted_label"))
    if wrong.is_empty():
        return "No test image is called another class"
    pairs = wrong.group_by("class_label", "predicted_label").len()
    true, called, count = pairs.sort("len", "class_label", "predicted_label", descending=[True, False, False]).row(0)
    often = f"The most frequent mistake: {_short(true)} called {_short(called)}, {count} times"
    return often if count > 1 else f"No mistake is made twice; one is {_short(true)} called {_short(called)}"


def _short(name: str) -> str:
    return theme.shortened(name, _MOST_CHARACTERS)


def _judged(predictions: pl.DataFrame) -> str:
    right = (predictions["class_label"] == predictions["predicted_label"]).mean()
    groups = count_text(predictions["group_id"].n_unique(), "group")
    share = f"{right:.1%} of them right" if isinstance(right, float) else ""
    return f"n = {count_text(predictions.height, 'test image')} in {groups}, {share}"


def _target_finding(
    predictions: pl.DataFrame, results: pl.DataFrame, first: tuple[str, str], confidence: float
) -> tuple[str, str]:
    target, unit = first
    error, mean = (
        tasks.model_score(results, f"target:{target}", "mae"),
        tasks.best_control(results, f"target:{target}", "mae"),
    )
    in_unit = f" {unit}" if unit else ""
    claim = f"Numbers of the test images, {count_text(predictions['target'].n_unique(), 'target')}"
    if error is not None:
        claim = f"{_short(target)}: off by {interval_text(error.value, error.low, error.high, 1)}{in_unit} on average"
    if error is not None and mean is not None:
        claim += f"; always saying the mean is off by {number_text(mean.value, 1)}{in_unit}"
    images, groups = predictions["image_id"].n_unique(), predictions["group_id"].n_unique()
    counted = f"n = {count_text(images, 'test image')} in {count_text(groups, 'group')}"
    return claim, f"{counted}; {confidence:.0%} intervals over groups"


def _thinned(rows: pl.DataFrame) -> pl.DataFrame:
    """At most so many points as can be told apart; the ids decide which, so it is the same everywhere."""
    if rows.height <= _MOST_POINTS:
        return rows
    ids = pl.col("image_id").map_elements(lambda name: zlib.crc32(name.encode()), return_dtype=pl.Int64)
    return rows.sort(ids, "image_id").head(_MOST_POINTS)


def _add_panel(
    figure: go.Figure, rows: pl.DataFrame, mean: float | None, where: dict[str, int], *, first: bool
) -> None:
    true, predicted = rows["value"].to_numpy(), rows["predicted"].to_numpy()
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    figure.add_trace(
        go.Scatter(
            x=ends, y=ends, mode="lines", name="Exact", legendgroup="exact", showlegend=first, hoverinfo="skip",
            line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"},
        ),
        **where,
    )  # fmt: skip
    if mean is not None:
        figure.add_trace(
            go.Scatter(
                x=ends, y=[mean, mean], mode="lines", name="Mean predictor", legendgroup="mean", showlegend=first,
                line={"color": theme.CONTROL, "width": 2}, hovertemplate="training mean %{y:.4g}<extra></extra>",
            ),
            **where,
        )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=true, y=predicted, mode="markers", name="Test image", legendgroup="model", showlegend=first,
            marker={"size": 5, "color": theme.translucent(theme.REAL, 0.5)},
            hovertemplate="true %{x:.4g}<br>predicted %{y:.4g}<extra></extra>",
        ),
        **where,
    )  # fmt: skip


# --- Panels of the dashboard

_CLASSES = (("all", "top1"), ("all", "top5"), ("all", "macro_f1"))


@PANELS.register_panel("classes beside controls", at=21, tasks=("image",))
def _classes_panel(selection: Selection) -> Shown:
    found, confidence = table_of(selection, "task_results"), confidence_of(selection)
    return tasks.beside_controls_figure(found, _CLASSES, counted=("image", "images"), confidence=confidence)


@PANELS.register_panel("targets beside the mean", at=22, tasks=("image",))
def _target_errors_panel(selection: Selection) -> Shown:
    found = table_of(selection, "task_results")
    # A corpus without numbers has no such panel; one whose results are to come has one that says so.
    if found.height and not found["subject"].str.starts_with("target:").any():
        return NOTHING
    table = tasks.metric_and_control_table(found, ["target:"])
    return HtmlTable(table, caption="Numbers of the test images, beside always saying the training mean")


@PANELS.register_panel("confusion", at=50, tasks=("image",))
def _confusion_panel(selection: Selection) -> Shown:
    return confusion_figure(table_of(selection, "image_predictions"))


@PANELS.register_panel("classes", at=51, tasks=("image",))
def _class_table_panel(selection: Selection) -> Shown:
    table = tasks.class_table(table_of(selection, "task_results"))
    return HtmlTable(table, caption="Each class of the test part, the worst F1 first") if table.height else NOTHING


@PANELS.register_panel("targets", at=52, tasks=("image",))
def _targets_panel(selection: Selection) -> Shown:
    predicted, found = table_of(selection, "target_predictions"), table_of(selection, "task_results")
    if predicted.is_empty():
        return NOTHING
    means = tasks.training_means(table_of(selection, "images"), table_of(selection, "image_targets"))
    return target_scatter_figure(predicted, found, means, confidence=confidence_of(selection))
