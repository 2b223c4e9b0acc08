"""Figures and tables of the tasks image and video_text hold what their tables hold."""

import itertools

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.analysis.figures import tasks
from tests.analysis.task_runs import (
    CLASSES,
    HOSTILE,
    image_predictions_of,
    image_results_of,
    images_of,
    target_predictions_of,
    targets_of,
    video_text_results_of,
)
from tests.analysis.test_figures import subtitle, ticks, title, values

IMAGES = images_of()
TARGETS = targets_of(IMAGES)
RESULTS = image_results_of()
MANY = tuple(f"class {number} with a name longer than the axis has room for" for number in range(101))


def test_the_bars_of_the_classes_are_the_counts() -> None:
    figure = tasks.classes_figure(IMAGES)
    for part, trace in zip(("train", "validation", "test"), figure.data, strict=True):
        assert trace.name == part
        assert sum(trace.x) == IMAGES.filter(part=part).height
    assert title(figure) == "4 classes of 30 images each"


def test_very_many_classes_and_images_stay_a_figure_of_bounded_size() -> None:
    images = images_of(6000, MANY)
    bars, matrix = tasks.classes_figure(images), tasks.confusion_figure(image_predictions_of(images))
    assert len(set(bars.data[0].y)) == 30
    assert "the 30 largest classes" in subtitle(bars)
    assert np.shape(matrix.data[0].z) == (32, 32)
    assert "the 32 of 101 classes with most mistakes" in subtitle(matrix)
    assert len(set(matrix.data[0].y)) == 32  # shortened names are told apart by their numbers
    scatter = tasks.target_scatter_figure(target_predictions_of(images, targets_of(images)), RESULTS, {})
    assert max(len(trace.x) for trace in scatter.data) == 800


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=30))
@settings(max_examples=20, deadline=None)
def test_every_field_of_the_matrix_is_counted(pairs: list[tuple[str, str]]) -> None:
    rows = [{"class_label": true, "predicted_label": called, "group_id": "g"} for true, called in pairs]
    figure = tasks.confusion_figure(pl.DataFrame(rows))
    names = sorted({name for pair in pairs for name in pair})
    for (row, true), (column, called) in itertools.product(enumerate(names), enumerate(names)):
        count, total = pairs.count((true, called)), sum(own == true for own, _ in pairs)
        assert figure.data[0].z[row][column] == pytest.approx(count / max(total, 1), abs=1e-4)
        assert figure.data[0].text[row][column] == (str(count) if count else "")
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    most = max((wrong.count(pair) for pair in wrong), default=0)
    named = {0: "No test image", 1: "once"}.get(most, f"{most} times")
    assert named in title(figure)


def test_predicted_numbers_stand_in_their_unit_with_the_mean() -> None:
    means = tasks.training_means(IMAGES, TARGETS)
    figure = tasks.target_scatter_figure(target_predictions_of(IMAGES, TARGETS), RESULTS, means)
    assert title(figure).startswith("calories: off by 16.0 [14.0, 18.0] kcal on average; always saying the mean is off")
    assert figure.layout.xaxis.title.text == "True calories (kcal)"
    assert figure.layout.xaxis2.title.text == "True mass (g)"
    drawn = [trace.y[0] for trace in figure.data if trace.name == "Mean predictor"]
    assert drawn == pytest.approx([means["calories"], means["mass"]])
    training = IMAGES.filter(part="train")["image_id"]
    known = TARGETS.filter(pl.col("image_id").is_in(training.implode()), target="mass")
    assert means["mass"] == pytest.approx(known["value"].mean())


def test_the_models_numbers_stand_above_their_best_controls() -> None:
    shown = [("all", "top1"), ("target:calories", "r2"), ("all", "not_there")]
    figure = tasks.beside_controls_figure(RESULTS, shown, counted="images")
    assert values(figure) == [0.75, 0.25, 0.9, -0.02]
    assert ticks(figure)[1] == "<i>Top-1 accuracy, most frequent class</i>"
    assert title(figure) == "Top-1 accuracy is 0.750 [0.670, 0.830]; most frequent class reaches 0.250 [0.190, 0.310]"
    assert "n = 30 images of the test part in 15 groups" in subtitle(figure)
    texts = tasks.beside_controls_figure(video_text_results_of(), [("video_to_text", "recall@1")], counted="queries")
    assert title(texts) == "Recall@1, video to text is 0.720 [0.620, 0.820]; chance reaches 0.067"


def test_a_table_has_a_column_for_each_control_and_says_which_way_is_better() -> None:
    table = tasks.metric_and_control_table(RESULTS, ["target:"])
    columns = ["of", "metric", "unit", "better", "Model", "Mean predictor", "num_samples", "num_groups"]
    assert table.columns == columns
    assert table["better"].to_list() == ["lower", "higher"] * 2
    assert table["Mean predictor"][0] == "50.00 [45.00, 55.00]"
    alone = tasks.metric_and_control_table(RESULTS, ["all"])
    assert not {"of", "unit"} & set(alone.columns)
    both = tasks.metric_and_control_table(RESULTS, ["all", "target:"])
    assert both["Most frequent class"].to_list()[-1] == "none"
    assert tasks.metric_and_control_table(RESULTS, ["captions"]).is_empty()


def test_each_class_stands_with_its_numbers_the_worst_first() -> None:
    is_worst = (pl.col("subject") == f"class:{CLASSES[1]}") & (pl.col("metric") == "f1")
    table = tasks.class_table(RESULTS.with_columns(value=pl.when(is_worst).then(0.2).otherwise("value")))
    assert table["class"][0] == CLASSES[1]
    assert set(table["class"]) == set(CLASSES)
    assert HOSTILE in set(table["class"])
    assert tasks.class_table(RESULTS.clear()).is_empty()
