"""Figures and tables of the tasks image and video_text say what their tables hold, and hold on with strange content."""

import itertools
import json
import math
from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.analysis.figures.image import classes_figure, confusion_figure, target_scatter_figure
from fvc_lib.analysis.figures.tasks import (
    beside_controls_figure,
    class_table,
    metric_and_control_table,
    runs_beside_controls_figure,
    training_means,
)
from fvc_lib.analysis.figures.video_text import chance_within, found_within_figure, parts_table, text_use_figure
from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.read.headline import task_scores
from tests.analysis.task_runs import (
    CLASSES,
    HOSTILE,
    image_predictions_of,
    image_results_of,
    images_of,
    pairs_of,
    ranks_of,
    target_predictions_of,
    targets_of,
    video_text_results_of,
)

IMAGES = images_of()
TARGETS = targets_of(IMAGES)
PREDICTIONS = image_predictions_of(IMAGES)
NUMBERS = target_predictions_of(IMAGES, TARGETS)
RESULTS = image_results_of()
PAIRS = pairs_of()
MANY = tuple(f"class {number} with a name longer than the axis has room for" for number in range(101))

FIGURES: dict[str, tuple[Callable[[], go.Figure], Callable[[], go.Figure]]] = {
    "classes": (lambda: classes_figure(IMAGES), lambda: classes_figure(IMAGES.clear())),
    "confusion": (lambda: confusion_figure(PREDICTIONS), lambda: confusion_figure(PREDICTIONS.clear())),
    "numbers": (
        lambda: target_scatter_figure(NUMBERS, RESULTS, training_means(IMAGES, TARGETS)),
        lambda: target_scatter_figure(NUMBERS.clear(), RESULTS.clear(), {}),
    ),
    "controls": (
        lambda: beside_controls_figure(RESULTS, [("all", "top1")], counted=("image", "images")),
        lambda: beside_controls_figure(RESULTS.clear(), [("all", "top1")], counted=("image", "images")),
    ),
    "runs": (
        lambda: runs_beside_controls_figure([(HOSTILE, task_scores(RESULTS, "image"))]),
        lambda: runs_beside_controls_figure([("a run", task_scores(RESULTS.clear(), "image"))]),
    ),
    "retrieval": (lambda: found_within_figure(ranks_of(PAIRS)), lambda: found_within_figure(ranks_of(PAIRS).clear())),
    "texts": (lambda: text_use_figure(PAIRS), lambda: text_use_figure(PAIRS.clear())),
}


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def subtitle(figure: go.Figure) -> str:
    return str(figure.layout.title.subtitle.text).replace("<br>", " ")


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_named_n_is_said_and_nothing_of_the_data_is_markup(name: str) -> None:
    figure = FIGURES[name][0]()
    shown = json.dumps(figure.to_plotly_json(), default=lambda value: np.asarray(value).tolist())
    assert "<img" not in shown
    assert "n = " in subtitle(figure)
    axes = [axis for axis in figure.layout if axis.startswith("xaxis")]
    assert any(figure.layout[axis].title.text for axis in axes)
    assert figure.layout.yaxis.title.text
    assert len(json.dumps(figure_bundle(figure), default=str)) < 400_000


@pytest.mark.parametrize("name", FIGURES)
def test_without_data_a_figure_says_so(name: str) -> None:
    assert "nothing to show" in title(FIGURES[name][1]())


def test_the_training_part_stands_beside_the_validation_part_of_the_same_epoch() -> None:
    rows = [
        ("train", "text_to_video/mrr", 1, 0.5), ("validation", "text_to_video/mrr", 1, 0.4),
        ("train", "text_to_video/mrr", 2, 0.9), ("validation", "text_to_video/mrr", 2, 0.6),
        ("train", "loss", 2, 1.0), ("validation", "loss", 2, 2.0), ("train", "gradient_norm", 2, 3.0),
    ]  # fmt: skip
    curves = pl.DataFrame(rows, schema=["phase", "metric", "epoch", "value"], orient="row")
    assert parts_table(curves, 2).rows() == [("Mean reciprocal rank, text to video", 0.9, 0.6)]
    assert parts_table(curves.clear(), 2).is_empty()


def test_very_many_classes_and_images_stay_a_figure_of_bounded_size() -> None:
    images = images_of(6000, MANY)
    predictions = image_predictions_of(images)
    bars, matrix = classes_figure(images), confusion_figure(predictions)
    assert len(bars.data[0].y) == 30
    assert "the 30 largest" in subtitle(bars).replace("of the classes ", "")
    assert np.shape(matrix.data[0].z) == (32, 32)
    assert "the 32 of 101 classes with most mistakes" in subtitle(matrix)
    assert len(set(matrix.data[0].y)) == 32  # shortened names are told apart by their numbers
    numbers = target_predictions_of(images, targets_of(images))
    scatter = target_scatter_figure(numbers, RESULTS, {})
    assert max(len(trace.x) for trace in scatter.data) == 800
    assert len(json.dumps(figure_bundle(scatter), default=str)) < 400_000


def test_the_bars_of_the_classes_are_the_counts() -> None:
    figure = classes_figure(IMAGES)
    for part, trace in zip(("train", "validation", "test"), figure.data, strict=True):
        of_part = IMAGES.filter(pl.col("part") == part)
        assert trace.name == part
        assert sum(trace.x) == of_part.height
    assert title(figure) == "4 classes of 30 images each"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=30))
@settings(max_examples=20, deadline=None)
def test_every_field_of_the_matrix_is_what_is_counted(pairs: list[tuple[str, str]]) -> None:
    rows = [{"class_label": true, "predicted_label": called, "group_id": "g"} for true, called in pairs]
    figure = confusion_figure(pl.DataFrame(rows))
    names = sorted({name for pair in pairs for name in pair})
    for (row, true), (column, called) in itertools.product(enumerate(names), enumerate(names)):
        count, total = pairs.count((true, called)), sum(each[0] == true for each in pairs)
        assert figure.data[0].z[row][column] == pytest.approx(count / max(total, 1), abs=1e-4)
        assert figure.data[0].text[row][column] == (str(count) if count else "")


def test_the_matrix_says_the_most_frequent_mistake() -> None:
    wrong = PREDICTIONS.filter(pl.col("class_label") != pl.col("predicted_label"))
    most = wrong.group_by("class_label", "predicted_label").len()["len"].max()
    assert f"{most} times" in title(confusion_figure(PREDICTIONS))
    right = PREDICTIONS.with_columns(predicted_label=pl.col("class_label"))
    assert title(confusion_figure(right)) == "No test image is called another class"


def test_predicted_numbers_stand_in_their_unit_beside_the_mean() -> None:
    means = training_means(IMAGES, TARGETS)
    figure = target_scatter_figure(NUMBERS, RESULTS, means)
    assert title(figure).startswith("calories: off by 16.0 [14.0, 18.0] kcal on average; always saying the mean is off")
    assert figure.layout.xaxis.title.text == "True calories (kcal)"
    assert figure.layout.xaxis2.title.text == "True mass (g)"
    drawn = [trace.y[0] for trace in figure.data if trace.name == "Mean predictor"]
    assert drawn == pytest.approx([means["calories"], means["mass"]])
    training = IMAGES.filter(pl.col("part") == "train")["image_id"]
    known = TARGETS.filter(pl.col("image_id").is_in(training.implode()) & (pl.col("target") == "mass"))
    assert means["mass"] == pytest.approx(known["value"].mean())


def test_the_models_numbers_stand_above_their_best_controls() -> None:
    shown = [("all", "top1"), ("target:calories", "r2"), ("all", "not_there")]
    figure = beside_controls_figure(RESULTS, shown, counted=("image", "images"))
    assert [trace.x[0] for trace in figure.data] == [0.75, 0.25, 0.9, -0.02]
    assert title(figure) == "Top-1 accuracy is 0.750 [0.670, 0.830]; most frequent class reaches 0.250 [0.190, 0.310]"
    assert "n = 30 images of the test part in 15 groups" in subtitle(figure)
    texts = beside_controls_figure(
        video_text_results_of(), [("video_to_text", "recall@1")], counted=("query", "queries")
    )
    assert title(texts) == "Recall@1, video to text is 0.720 [0.620, 0.820]; chance reaches 0.067"


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_chance_is_what_counting_every_order_gives(kinds: list[tuple[int, int]]) -> None:
    """A query with P positives among N finds one within k unless all k are of the other N - P."""
    rows = [{"num_candidates": max(pair), "num_positives": min(pair)} for pair in kinds]
    places = np.arange(1, 8)
    expected = [
        np.mean([1 - math.comb(r["num_candidates"] - r["num_positives"], k) / math.comb(r["num_candidates"], k)
                 if k <= r["num_candidates"] else 1.0 for r in rows])
        for k in places
    ]  # fmt: skip
    np.testing.assert_allclose(chance_within(pl.DataFrame(rows), places), expected, atol=1e-12)


def test_the_curves_count_the_queries_that_found_theirs() -> None:
    ranks = ranks_of(PAIRS)
    figure = found_within_figure(ranks)
    assert [trace.name for trace in figure.data] == [
        "video to text", "video to text, chance", "text to video", "text to video, chance",
    ]  # fmt: skip
    found = ranks.filter(pl.col("direction") == "video_to_text")
    for place, share in zip(figure.data[0].x, figure.data[0].y, strict=True):
        assert share == pytest.approx((found["rank"] <= place).mean(), abs=1e-5)
    assert figure.data[0].y[-1] == figure.data[1].y[-1] == 1
    wide = ranks.with_columns(num_candidates=pl.lit(100_000, pl.Int64))
    assert all(len(trace.x) <= 400 for trace in found_within_figure(wide).data)


def test_a_table_has_a_column_for_each_control_and_says_which_way_is_better() -> None:
    table = metric_and_control_table(RESULTS, ["target:"])
    assert table.columns == [
        "of", "metric", "unit", "better", "Model", "Mean predictor", "num_samples", "num_groups",
    ]  # fmt: skip
    assert table["better"].to_list() == ["lower", "higher"] * 2
    assert table["Mean predictor"][0] == "50.00 [45.00, 55.00]"
    alone = metric_and_control_table(RESULTS, ["all"])
    assert "of" not in alone.columns
    assert "unit" not in alone.columns
    both = metric_and_control_table(RESULTS, ["all", "target:"])
    assert both["Most frequent class"].to_list()[-1] == "none"
    assert metric_and_control_table(RESULTS, ["captions"]).is_empty()


def test_each_class_stands_with_its_numbers_the_worst_first() -> None:
    worse = RESULTS.with_columns(
        value=pl.when((pl.col("subject") == f"class:{CLASSES[1]}") & (pl.col("metric") == "f1"))
        .then(0.2)
        .otherwise("value")
    )
    table = class_table(worse)
    assert table["class"][0] == CLASSES[1]
    assert set(table["class"]) == set(CLASSES)
    assert HOSTILE in set(table["class"])
    assert class_table(RESULTS.clear()).is_empty()
