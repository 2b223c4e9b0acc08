"""Figures and tables of the tasks image and video_text: numbers next to their controls, classes, targets, retrieval.

Frames are rows of the tables in ``services.tables`` that their names say: ``results`` of TASK_RESULTS, ``images`` of
IMAGES, ``targets`` of IMAGE_TARGETS, ``predictions`` of IMAGE_PREDICTIONS, ``ranks`` of RETRIEVAL_RANKS.
``confidence`` is the coverage of the intervals in them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis import wording
from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown, confidence_of, table_of
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import Row
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.read.headline import Score, measured_scores, run_verdict
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, number_text
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.tables import PARTS

DIRECTIONS = ("video_to_text", "text_to_video")
_PART_COLORS = {"train": theme.SERIES[0], "validation": theme.SERIES[4], "test": theme.SERIES[1]}
_MOST_BARS = 30  # classes
_MOST_CLASSES = 32  # in a confusion matrix
_MOST_TARGETS = 8
_MOST_POINTS = 800  # of each target
_MOST_PLACES = 400  # of a retrieval curve
_LOWEST_DRAWN = -1.0  # an R² has no lower end; its number stands next to the point


# --- Numbers next to their controls


def beside_controls_figure(
    results: pl.DataFrame, shown: Sequence[tuple[str, str]], *, counted: str, confidence: float = 0.95
) -> go.Figure:
    """Return numbers without a unit as points with intervals, and below each its best control.

    Args:
        results: of one run.
        shown: subject and metric of each row; those not recorded are left out; higher must be better.
        counted: what was judged, in the plural.
        confidence: coverage of the intervals.
    """
    rows: list[Row] = []
    finding = subtitle = ""
    for subject, metric in shown:
        model = model_score(results, subject, metric)
        if model is None:
            continue
        control = best_control(results, subject, metric)
        name = wording.metric_name(metric) + ("" if subject == "all" else f", {wording.subject_name(subject)}")
        tick = figure_text(theme.shortened(name, 40))
        rows.append(_drawn(tick, model, theme.MODEL))
        reached = "without a control"
        if control is not None:
            source = wording.source_name(control.source).lower()
            rows.append(_drawn(f"<i>{tick}, {figure_text(source)}</i>", control, theme.CONTROL))
            reached = f"{source} reaches {interval_text(control.value, control.low, control.high)}"
        if not finding:
            finding = f"{name} is {interval_text(model.value, model.low, model.high)}; {reached}"
            known = results.filter(source="model", subject=subject, metric=metric)
            num_samples, num_groups = known.select("num_samples", "num_groups").row(0)
            subtitle = f"n = {num_samples:,} {counted} of the test part in {count_text(num_groups, 'group')}"
    if not rows:
        return theme.nothing_to_show("The model and its controls", "None of these numbers is recorded.")
    subtitle += f"; bars: {confidence:.0%} intervals over groups"
    axes = {"names": "Metric", "values": "Value (no unit)"}
    return theme.interval_chart(finding, subtitle, rows, shown=(0.0, 1.0), chance=None, row_height=36, **axes)


def _drawn(tick: str, score: Score, color: str) -> Row:
    ends = (score.value, score.low, score.high)
    value, low, high = (None if end is None else max(end, _LOWEST_DRAWN) for end in ends)
    return Row(tick, value, low, high, color, text=interval_text(*ends))


def best_control(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    """Return the control with the best value of ``metric``; None where there is none."""
    return _best(results.filter(pl.col("source") != "model"), subject, metric)


def model_score(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    """Return the model's ``metric``; None where it is not recorded or undefined."""
    return _best(results.filter(source="model"), subject, metric)


def _best(results: pl.DataFrame, subject: str, metric: str) -> Score | None:
    rows = results.filter(subject=subject, metric=metric).drop_nulls("value")
    rows = rows.sort("value", "source", descending=[wording.better_direction(metric) == "higher", False])
    return Score(*rows.select("source", "value", "low", "high").row(0)) if rows.height else None


def metric_and_control_table(results: pl.DataFrame, subjects: Sequence[str]) -> pl.DataFrame:
    """Return every metric of ``subjects`` next to its controls; a subject ``target:`` stands for all targets.

    Returns:
        ``of metric unit better Model``, a column for each control, ``num_samples num_groups``. Numbers are text with
        their intervals. ``of`` and ``unit`` are left out where they say nothing.
    """
    chosen = [results.filter(_about(subject)) for subject in subjects]
    rows = pl.concat([results.clear(), *chosen])
    texts = [_value_text(row) for row in rows.iter_rows(named=True)]
    source = pl.col("source").map_elements(wording.source_name, pl.String)
    cells = rows.with_columns(source=source, text=pl.Series(texts, dtype=pl.String))
    names = cells["source"].unique(maintain_order=True).to_list()
    names = ["Model", *(name for name in names if name != "Model")]
    counts = {name: pl.col(name).first() for name in ("unit", "num_samples", "num_groups")}
    table = cells.group_by("subject", "metric", maintain_order=True).agg(
        **counts, **{name: pl.col("text").filter(source=name).first().fill_null("none") for name in names}
    )
    shown = table.select(
        pl.col("subject").map_elements(wording.subject_name, pl.String).alias("of"),
        pl.col("metric").map_elements(wording.metric_name, pl.String),
        "unit",
        pl.col("metric").map_elements(wording.better_direction, pl.String).alias("better"),
        *names,
        "num_samples",
        "num_groups",
    )
    needless = ["of"] * (table["subject"].n_unique() < 2) + ["unit"] * (not (table["unit"] != "").any())
    return shown.drop(needless)


def _about(subject: str) -> pl.Expr:
    return pl.col("subject").str.starts_with(subject) if subject.endswith(":") else pl.col("subject") == subject


def _value_text(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return "undefined"
    return interval_text(row["value"], row["low"], row["high"], 2 if row["unit"] or abs(row["value"]) >= 10 else 3)


# --- The data


def part_table(rows: pl.DataFrame, counted: dict[str, str]) -> pl.DataFrame:
    """Return the counts of each part of the split: ``part split num_rows`` and ``counted``.

    ``counted`` maps a column of the answer to the column of ``rows`` whose different values it counts.
    """
    counts = rows.group_by("part").agg(
        split=pl.col("split_source").unique().sort().str.join(", "),
        num_rows=pl.len(),
        **{name: pl.col(column).drop_nulls().n_unique() for name, column in counted.items()},
    )
    joined = pl.DataFrame({"part": PARTS}).join(counts, on="part", how="left", maintain_order="left")
    return joined.with_columns(pl.col("split").fill_null("none"), pl.col("num_rows", *counted).fill_null(0))


def target_table(images: pl.DataFrame, targets: pl.DataFrame) -> pl.DataFrame:
    """Return the targets of the images: ``target unit num_images num_groups mean std least most``."""
    known = targets.join(images.select("image_id"), on="image_id", how="semi")
    value = pl.col("value")
    statistics = {"mean": value.mean(), "std": value.std(), "least": value.min(), "most": value.max()}
    counts = {"num_images": pl.len(), "num_groups": pl.col("group_id").n_unique()}
    return known.group_by("target", "unit", maintain_order=True).agg(**counts, **statistics)


def training_means(images: pl.DataFrame, targets: pl.DataFrame) -> dict[str, float]:
    """Return the mean of each target over the training part: the answers of the mean predictor."""
    training = targets.join(images.filter(part="train").select("image_id"), on="image_id", how="semi")
    return dict(training.group_by("target").agg(pl.col("value").mean()).sort("target").iter_rows())


def rejected_table(rejected: pl.DataFrame) -> pl.DataFrame:
    """Return rejected files by reason, most frequent first: ``reason number one_of_them what_and_remedy``."""
    first = {"one_of_them": pl.col("path").first(), "what_and_remedy": pl.col("detail").first()}
    counts = rejected.group_by("reason").agg(number=pl.len(), **first)
    return counts.sort("number", "reason", descending=[True, False])


def classes_figure(images: pl.DataFrame) -> go.Figure:
    """Return the images of each class by part of the split, the largest classes first."""
    if images.is_empty():
        return theme.nothing_to_show("Images by class", "The index has no images.")
    named = images.with_columns(pl.col("class_label").fill_null("no class"))
    sizes = images.drop_nulls("class_label").group_by("class_label").len()["len"]
    finding = "No image has a class: only numbers are learned"
    if len(sizes):
        least, most = min(sizes.to_list()), max(sizes.to_list())
        spread = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        finding = f"{count_text(len(sizes), 'class', 'classes')} of {spread} images each"
    parts = dict(images.group_by("part").len().iter_rows())
    per_part = ", ".join(f"{parts.get(part, 0):,} {part}" for part in PARTS)
    groups = count_text(images["group_id"].n_unique(), "group")
    names = theme.commonest(named["class_label"], _MOST_BARS)
    cut = f"; the {_MOST_BARS} largest classes" if named["class_label"].n_unique() > _MOST_BARS else ""
    return theme.bar_chart(
        finding,
        f"n = {count_text(images.height, 'image')} ({per_part}) in {groups}, none of them in two parts{cut}",
        named.group_by("class_label", "part").len(),
        _PART_COLORS,
        names=names,
        titles=("Class", "Images"),
    )


# --- Images: classes and targets


def class_table(results: pl.DataFrame) -> pl.DataFrame:
    """Return each class, the worst F1 first: ``class precision recall f1 num_images num_groups``."""
    rows = results.filter(_about("class:"), source="model")
    rows = rows.with_columns(pl.col("subject").str.strip_prefix("class:").alias("class"))
    metrics = {name: pl.col("value").filter(metric=name).first() for name in ("precision", "recall", "f1")}
    counts = {"num_images": pl.col("num_samples").max(), "num_groups": pl.col("num_groups").max()}
    return rows.group_by("class").agg(**metrics, **counts).sort("f1", "class", nulls_last=True)


def confusion_figure(predictions: pl.DataFrame) -> go.Figure:
    """Return for the images of each class (rows) the share that was called each class (columns).

    Of more than 32 classes, those with most mistakes are drawn.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Confusion of classes", "No test image has a class.")
    is_wrong = pl.col("class_label") != pl.col("predicted_label")
    wrong = predictions.filter(is_wrong)
    both = pl.concat([predictions["class_label"], predictions["predicted_label"].rename("class_label")])
    mistaken = pl.concat([wrong["class_label"], wrong["predicted_label"].rename("class_label")])
    num_all = both.n_unique()
    most = theme.commonest(mistaken, _MOST_CLASSES)
    classes = sorted(both.unique() if num_all <= _MOST_CLASSES else most)
    counts = np.zeros((len(classes), len(classes)), np.int64)
    inside = predictions.filter(pl.col("class_label").is_in(classes) & pl.col("predicted_label").is_in(classes))
    for true, called, count in inside.group_by("class_label", "predicted_label").len().iter_rows():
        counts[classes.index(true), classes.index(called)] = count
    sizes = dict(predictions.group_by("class_label").len().iter_rows())
    totals = np.array([max(sizes.get(name, 0), 1) for name in classes])
    finding = "No test image is called another class"
    if wrong.height:
        pairs = wrong.group_by("class_label", "predicted_label").len()
        true, called, count = pairs.sort(-pl.col("len").cast(pl.Int64), "class_label", "predicted_label").row(0)
        times = f"{count} times" if count > 1 else "once, as is every mistake"
        finding = f"The most frequent mistake: {_short(true)} called {_short(called)}, {times}"
    right = 1 - wrong.height / predictions.height
    counted = theme.in_groups(predictions.height, "test image", predictions["group_id"].n_unique())
    cut = f"; the {len(classes)} of {num_all} classes with most mistakes" if len(classes) < num_all else ""
    subtitle = f"{counted}, {right:.1%} of them right{cut}; darker: a larger share of the class; numbers: images"
    drawn = theme.figure(finding, subtitle, height=150 + 26 * max(4, len(classes)))
    numbers = [str(number) for number in range(1, len(classes) + 1)]
    ticks = [f"{figure_text(theme.shortened(name, 18))}  {number}" for number, name in enumerate(classes, start=1)]
    texts = np.where(counts > 0, counts.astype(str), "")
    look = {
        "text": texts,
        "texttemplate": "%{text}",
        "showscale": False,
        "hovertemplate": "%{y}, called %{x}: %{z:.1%}",
    }
    theme.heat_map(
        drawn, (counts / totals[:, None]).round(4), numbers, ticks, colors=("#FFFFFF", theme.REAL), low=0, **look
    )
    drawn.update_yaxes(title_text="Is")
    return drawn.update_xaxes(title_text="Was called (row number)", tickangle=0)


def target_scatter_figure(
    predictions: pl.DataFrame, results: pl.DataFrame, means: Mapping[str, float], *, confidence: float = 0.95
) -> go.Figure:
    """Return predicted over true numbers of the test images, a panel per target in its unit.

    Args:
        predictions: of TARGET_PREDICTIONS.
        results: of the run.
        means: of ``training_means``.
        confidence: coverage of the intervals.
    """
    if predictions.is_empty():
        return theme.nothing_to_show("Predicted numbers", "No number of a test image was predicted.")
    targets = predictions.select("target", "unit").unique(maintain_order=True).rows()
    shown = targets[:_MOST_TARGETS]
    scores = [model_score(results, f"target:{target}", "r2") for target, _ in shown]
    titles = [
        f"{_short(target)}: R² {number_text(score.value)}" if score else _short(target)
        for (target, _), score in zip(shown, scores, strict=True)
    ]
    counted = theme.in_groups(predictions["image_id"].n_unique(), "test image", predictions["group_id"].n_unique())
    subtitle = f"{counted}; {confidence:.0%} intervals over groups"
    if len(targets) > len(shown):
        subtitle += f"; {len(targets) - len(shown)} more targets are in the table"
    drawn, places = theme.panel_grid(
        _target_finding(results, *shown[0]), subtitle, titles, columns=2, panel_height=290, horizontal_spacing=0.09
    )
    for (target, unit), where in zip(shown, places, strict=True):
        rows = predictions.filter(target=target).sort("image_id").head(_MOST_POINTS)
        true, predicted = rows["value"].to_list(), rows["predicted"].to_list()
        ends = [min(*true, *predicted), max(*true, *predicted)]
        look = {"where": where, "showlegend": where == places[0]}
        theme.add_line(drawn, ends, ends, "Exact", theme.NEUTRAL, width=1, dash="dash", **look)
        if target in means:
            theme.add_line(drawn, ends, [means[target]] * 2, "Mean predictor", theme.CONTROL, **look)
        points = theme.add_line(drawn, true, predicted, "Test image", theme.REAL, mode="markers", **look)
        points.marker = {"size": 5, "color": theme.translucent(theme.REAL, 0.5)}
        in_unit = f" ({unit})" if unit else ""
        drawn.update_xaxes(title_text=figure_text(f"True {target}{in_unit}"), **where)
    return drawn.update_yaxes(title_text="Predicted, in the unit below", col=1)


def _target_finding(results: pl.DataFrame, target: str, unit: str) -> str:
    error, mean = (find(results, f"target:{target}", "mae") for find in (model_score, best_control))
    if error is None:
        return f"Numbers of the test images: {_short(target)}"
    in_unit = f" {unit}" if unit else ""
    finding = f"{_short(target)}: off by {interval_text(error.value, error.low, error.high, 1)}{in_unit} on average"
    if mean is not None:
        finding += f"; always saying the mean is off by {number_text(mean.value, 1)}{in_unit}"
    return finding


def _short(name: str) -> str:
    return theme.shortened(name, 24)


# --- Videos and texts


def found_within_figure(ranks: pl.DataFrame) -> go.Figure:
    """Return the share of queries with a match among the first k candidates, in both directions, and chance."""
    if ranks.is_empty():
        return theme.nothing_to_show("Retrieval", "No query of the test part is recorded.")
    firsts, counted = [], []
    drawn = theme.figure("", "", height=420)
    for direction, color in zip(DIRECTIONS, theme.SERIES, strict=False):
        rows = ranks.filter(direction=direction)
        if rows.is_empty():
            continue
        name = direction.replace("_", " ")
        query, candidate = direction.split("_to_")
        most = int(rows["num_candidates"].to_numpy().max())
        places = np.unique(np.geomspace(1, most, _MOST_PLACES).round().astype(np.int64))
        shares = np.searchsorted(np.sort(rows["rank"].to_numpy()), places, side="right") / rows.height
        line = theme.add_line(drawn, places, shares.round(5), name, color)
        by_chance = chance_within(rows, places).round(5)
        chance = theme.add_line(drawn, places, by_chance, f"{name}, chance", color, dash="dot")
        line.hovertemplate = chance.hovertemplate = "%{y:.1%} within the first %{x}"
        line.line.shape = chance.line.shape = "hv"
        firsts.append(f"{float((rows['rank'] == 1).to_numpy().mean()):.0%} from {name}")
        counted.append(f"{count_text(rows.height, query)} among {count_text(most, candidate)}")
    groups = count_text(ranks["group_id"].n_unique(), "group")
    subtitle = f"n = {' and '.join(counted)} of the test part, {groups}; ties count against the model"
    finding = f"The first place holds a match for {' and '.join(firsts)}"
    drawn.update_layout(title=theme.figure(finding, subtitle).layout.title, legend=theme.LEGEND)
    theme.shares(drawn, "Candidates looked at, best first (logarithmic)", "Queries with a match (share)")
    return drawn.update_xaxes(type="log", range=None)


def chance_within(ranks: pl.DataFrame, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the share of queries (K,), of one direction, that a random order satisfies within ``places`` (K,) from 1.

    Of P positives among N candidates one is within the first k with probability 1 - C(N - P, k) / C(N, k).
    """
    total = np.zeros(places.size)
    for candidates, positives, count in ranks.group_by("num_candidates", "num_positives").len().iter_rows():
        # The product over the positives of the share that is missed, given that all before it were.
        missed = np.ones(places.size)
        for number in range(positives):
            missed *= np.clip(candidates - number - places, 0, None) / (candidates - number)
        total += count * (1 - missed)
    return total / max(ranks.height, 1)


_TASKS = ("image", "video_text")


@PANELS.register_panel("standing", at=20, tasks=_TASKS)
def _standing_panel(selection: Selection) -> Shown:
    run = selection.detailed
    measured = measured_scores(run)
    verdict = run_verdict(run, measured)
    words = " ".join((verdict.sentence, *measured.cautions))
    table = pl.DataFrame({"standing": [verdict.standing], "in_words": [words]})
    return HtmlTable(table, caption=f"{path_to_text(run.run_id)} and what knows nothing of its test part")


@PANELS.register_panel("metrics and controls", at=21, tasks=_TASKS)
def _metrics_panel(selection: Selection) -> Shown:
    table = metric_and_control_table(table_of(selection, "task_results"), ["all", "target:", *DIRECTIONS, "captions"])
    caption = f"Every metric of the test part, with {confidence_of(selection):.0%} intervals over groups"
    return HtmlTable(table, caption=caption)


@PANELS.register_panel("confusion", at=50, tasks=("image",))
def _confusion_panel(selection: Selection) -> Shown:
    return confusion_figure(table_of(selection, "image_predictions"))


@PANELS.register_panel("classes", at=51, tasks=("image",))
def _class_table_panel(selection: Selection) -> Shown:
    table = class_table(table_of(selection, "task_results"))
    return HtmlTable(table, caption="Each class of the test part, the worst F1 first") if table.height else NOTHING


@PANELS.register_panel("targets", at=52, tasks=("image",))
def _targets_panel(selection: Selection) -> Shown:
    predicted, results = table_of(selection, "target_predictions"), table_of(selection, "task_results")
    if predicted.is_empty():
        return NOTHING
    means = training_means(table_of(selection, "images"), table_of(selection, "image_targets"))
    return target_scatter_figure(predicted, results, means, confidence=confidence_of(selection))


@PANELS.register_panel("ranks", at=55, tasks=("video_text",))
def _ranks_panel(selection: Selection) -> Shown:
    return found_within_figure(table_of(selection, "retrieval_ranks"))
