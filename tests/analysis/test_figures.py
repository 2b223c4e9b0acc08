"""Every figure states a finding, its sample size and its axes, treats names as text, and says when it is empty."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest

from fvc_lib.analysis.figures import comparisons, corpus, logs, results, roc_and_calibration as ranking, tasks, theme
from fvc_lib.analysis.memory import run_memory
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.headline import FORGERIES
from fvc_lib.analysis.read.runs import read_tables
from fvc_lib.services import tables
from fvc_lib.services.run_paths import RunPaths
from tests.analysis import task_runs
from tests.analysis.memory_story import StoryWriter, troubled_run

HOSTILE = "<a href='http://x'>b</a>"
IMAGES = task_runs.images_of()
TARGETS = task_runs.targets_of(IMAGES)
MEANS = tasks.training_means(IMAGES, TARGETS)
PREDICTED = task_runs.image_predictions_of(IMAGES)
NUMBERS = task_runs.target_predictions_of(IMAGES, TARGETS)
RESULTS = task_runs.image_results_of()


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def subtitle(figure: go.Figure) -> str:
    return str(figure.layout.title.subtitle.text).replace("<br>", " ")


def ticks(figure: go.Figure) -> list[str]:
    return list(figure.layout.yaxis.ticktext)


def values(figure: go.Figure) -> list[float]:
    return [trace.x[0] for trace in figure.data]


def annotations(run: RunPaths) -> pl.DataFrame:
    rows = tables.read_table(run.index, tables.INDEX) if run.index.is_file() else tables.frame_of([], tables.INDEX)
    return rows.with_columns(is_present=pl.lit(value=True))


def figures_of(run: RunPaths) -> dict[str, go.Figure]:
    """All figures of one run."""
    predictions, memory = queries.predictions([run]).frame, run_memory(run)
    return {
        "controls": results.controls_figure(queries.results([run]).frame),
        "scores": results.score_distribution_figure(predictions),
        "slices": results.slices_figure(read_tables([("", run.slices)], tables.SLICES).frame),
        "roc": ranking.roc_figure(predictions, replicates=10),
        "calibration": ranking.calibration_figure(predictions, replicates=10),
        "abstaining": ranking.risk_coverage_figure(predictions, replicates=10),
        "curves": logs.learning_curves_figure(queries.learning_curves([run]).frame),
        "peaks": logs.phase_peaks_figure(memory),
        "timeline": logs.stage_timeline_figure(memory),
        "growth": logs.growth_figure(memory),
        "codecs": corpus.index_overview_figure(queries.index_counts(run, "codec").frame, "codec"),
        "folds": corpus.fold_balance_figure(queries.fold_balance(run).frame),
        "groups": corpus.group_sizes_figure(annotations(run)),
    }


OF_A_TASK: dict[str, Callable[[int], go.Figure]] = {  # with so many rows of each table
    "confusion": lambda most: tasks.confusion_figure(PREDICTED.head(most)),
    "numbers": lambda most: tasks.target_scatter_figure(NUMBERS.head(most), RESULTS, MEANS),
}


def check_look(figure: go.Figure) -> None:
    assert len(title(figure)) > 20
    assert "n = " in subtitle(figure)
    for direction in ("x", "y"):
        named = [figure.layout[name].title.text for name in figure.layout if name.startswith(f"{direction}axis")]
        assert any(named), f"no {direction} axis has a title"
    assert figure.layout.template.layout.font.family == theme.FONT
    shown = figure.to_json().replace("\\u003c", "<")
    assert "<img" not in shown
    assert "<a " not in shown
    assert len(shown) < 400_000


def test_figures_of_a_run_have_a_finding_an_n_and_axes(run: RunPaths) -> None:
    drawn = figures_of(run)
    for figure in drawn.values():
        check_look(figure)
    predictions = queries.predictions([run]).frame
    right = ((predictions["score"] >= predictions["threshold"]) == (predictions["label"] == "fake")).mean()
    assert title(drawn["scores"]).startswith(f"{right:.0%} of the videos")
    area = queries.results([run]).frame.filter(source="model", scope="all", metric="roc_auc")["value"][0]
    assert f"AUC {area:.3f}" in title(drawn["roc"])
    one = predictions.head(1)
    assert "nothing to show" in title(ranking.roc_figure(one))
    for figure in (results.score_distribution_figure(one), ranking.calibration_figure(one)):
        assert "n = 1 video" in subtitle(figure)


@pytest.mark.parametrize("name", OF_A_TASK)
def test_figures_of_a_task_have_a_finding_an_n_and_axes(name: str) -> None:
    check_look(OF_A_TASK[name](10_000))
    assert "nothing to show" in title(OF_A_TASK[name](0))


def test_figures_of_an_empty_run_say_why_they_are_empty(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "e" / "run_x")
    empty = comparisons.levels_figure(tables.frame_of([], tables.ROBUSTNESS_RESULTS))
    for figure in (*figures_of(run).values(), empty):
        assert "nothing to show" in title(figure)
        assert subtitle(figure)
        assert not figure.data


def test_names_are_text_in_titles_ticks_and_legends(tmp_path: Path) -> None:
    curves = pl.DataFrame(
        {"stage": [HOSTILE] * 2, "fold": [None] * 2, "phase": [HOSTILE] * 2,
         "metric": [HOSTILE] * 2, "step": [1, 1], "epoch": [0, 0], "value": [0.1, 0.2]},
        schema_overrides={"fold": pl.Int64},
    )  # fmt: skip
    counts = pl.DataFrame({"label": ["real"], "value": [HOSTILE], "num_videos": [3]})
    name = HOSTILE.replace("/", "|")
    writer = StoryWriter(RunPaths(tmp_path / "e" / "run_x"), stage=name)
    writer.sample(500, name).event("out_of_memory", name)
    for epoch in range(6):
        writer.sample(500, epoch=epoch, device=name, rss_mb=100)
    found = run_memory(writer.run)
    for figure in (
        corpus.index_overview_figure(counts, HOSTILE),
        logs.learning_curves_figure(curves, HOSTILE), logs.phase_peaks_figure(found),
        logs.stage_timeline_figure(found), logs.growth_figure(found),
    ):  # fmt: skip
        assert "<a " not in figure.to_json().replace("\\u003c", "<").replace('\\"', '"')


# --- Corpus


def test_rare_values_are_added_up_and_none_is_lost() -> None:
    rows = [(label, f"v{n:02d}", 40 - n) for n in range(30) for label in ("real", "fake")]
    counts = pl.DataFrame(rows, schema=["label", "value", "num_videos"], orient="row")
    figure = corpus.index_overview_figure(counts, "codec")
    assert sum(sum(trace.x) for trace in figure.data) == counts["num_videos"].sum()
    assert (ticks(figure)[-1], len(ticks(figure))) == ("other", 15)


def test_groups_are_counted_by_size_and_by_the_labels_they_hold() -> None:
    sizes = {"a": ["real"], "b": ["fake"] * 3, "c": ["fake", "real"], "d": ["fake"] * 4, "e": ["parody"]}
    members = [(group, label) for group, labels in sizes.items() for label in labels]
    figure = corpus.group_sizes_figure(pl.DataFrame(members, schema=["group_id", "label"], orient="row"))
    bars = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data}
    assert bars == {"real only": {0: 1}, "fake only": {1: 1, 2: 1}, "real and fake": {1: 1}, "neither": {0: 1}}
    assert figure.layout.yaxis.ticktext == ("1", "2 to 3", "4 to 7")


# --- Results


def test_the_controls_figure_shows_each_score_with_its_interval(run: RunPaths) -> None:
    rows = tables.read_table(run.results, tables.RESULTS)
    figure = results.controls_figure(rows)
    row = rows.filter(source="model", scope="all", metric="roc_auc").row(0, named=True)
    point = figure.data[0]
    ends = (point.x[0], point.x[0] + point.error_x.array[0], point.x[0] - point.error_x.arrayminus[0])
    assert ends == pytest.approx((row["value"], row["high"], row["low"]))
    assert ticks(figure)[0] == "Model"
    assert title(figure).startswith("The model is above its best control")
    alone = rows.filter(source="model").with_columns(low=pl.lit(None, pl.Float64), high=pl.lit(None, pl.Float64))
    figure = results.controls_figure(alone)
    assert "Not shown to be above" in title(figure)
    assert figure.data[0].error_x.array is None


def test_tables_of_results_hold_every_metric_and_each_folds_choices(run: RunPaths) -> None:
    rows = tables.read_table(run.results, tables.RESULTS)
    table = results.metric_table(rows)
    assert table.columns == ["metric", "better", "by_video", "by_group", "fold_mean", "fold_std"]
    assert table.filter(metric="Brier score")["better"].item() == "lower"
    assert table["by_group"].null_count() == 0
    controls = results.control_table(rows)
    assert controls["metric"].to_list() == table["metric"].to_list()
    assert controls.width == 2 + rows["source"].n_unique()
    predictions = queries.predictions([run]).frame
    chosen = results.chosen_table(predictions, {2: (7, 18, 5)})
    assert chosen["epoch"].to_list() == [None, None, 7, None, None]
    assert chosen["num_test_videos"].sum() == predictions.height
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    assert results.audit_table(audit)["verdict"].to_list() == ["passed", "for information"]
    assert results.failed_checks(audit) == []
    assert results.failed_checks(audit.with_columns(passed=pl.lit(value=False))) == audit["finding"].to_list()


# --- Comparisons


def test_targets_stand_worst_first_each_with_its_own_controls() -> None:
    at = {"all": (0.75, 0.5), "target:open_sora_mb": (0.9, 0.5), "target:mora": (0.6, 0.7)}
    rows = []
    for scope, (model, control) in at.items():
        for source in ("model", *FORGERIES.strict_controls):
            value = {"model": model, "shuffled_labels": 0.5}.get(source, control)
            rows.append((source, scope, "roc_auc", value, value - 0.05, value + 0.05, None, None, 40, 20))
    found = tables.frame_of(rows, tables.RESULTS)
    assert comparisons.targets_of(found) == ["mora", "open_sora_mb"]
    table = comparisons.target_table(found)
    assert table["standing"].to_list() == ["not above control", "above control"]
    assert table["Model"].to_list() == ["0.600 [0.550, 0.650]", "0.900 [0.850, 0.950]"]


# --- Logs


@pytest.fixture
def story(tmp_path: Path) -> StoryWriter:
    return StoryWriter(RunPaths(tmp_path / "e" / "run_x"))


def test_peaks_are_the_highest_of_all_folds_with_their_range_and_the_budget(tmp_path: Path) -> None:
    found = run_memory(troubled_run(tmp_path / "e" / "run_x"))
    figure = logs.phase_peaks_figure(found)
    peak = dict(zip(ticks(figure), values(figure), strict=True))
    assert peak["04_fold_training:<br>train"] == 1930
    assert peak["01_data_index:<br>whole stage"] == 430
    (down,) = figure.data[ticks(figure).index("04_fold_training:<br>train")].error_x.arrayminus
    assert down == 1930 - 1836
    for drawn in (figure, logs.stage_timeline_figure(found)):
        assert "budget" in {note.text for note in drawn.layout.annotations}
    points, line = logs.growth_figure(found).data[:2]
    assert points.name == line.name == "04_fold_training, fold 0, attempt 1, train, process"
    assert line.x == (2, 10)
    assert line.y[1] - line.y[0] == pytest.approx(8 * 92)
    assert title(logs.growth_figure(found)).startswith("Memory leaks: 92.0 MB more with every epoch")


def test_stages_lie_end_to_end_with_events_at_their_moment(story: StoryWriter) -> None:
    index = StoryWriter(story.run, "01_data_index", None)
    for _ in range(10):
        index.sample(300, "setup")
    story.sample(500, "setup").sample(900).event("out_of_memory", "it <b>ended</b>", seconds=0.5).sample(800)
    figure = logs.stage_timeline_figure(run_memory(story.run))
    first, second = (trace for trace in figure.data if trace.name == "process")
    assert list(first.x) == list(range(1, 11))
    assert list(second.x) == [11, 12, 13.5]
    event = next(trace for trace in figure.data if trace.name == "out of memory")
    assert (event.x[0], event.text[0]) == (12.5, "it &lt;b&gt;ended&lt;/b&gt;")


def test_a_device_and_its_process_have_a_line_each(story: StoryWriter) -> None:
    for used in (2000, 6000, 4000):
        story.sample(700).sample(used, seconds=0, device="cuda:0", rss_mb=600)
    found = run_memory(story.run)
    lines = {trace.name: list(trace.y) for trace in logs.stage_timeline_figure(found).data}
    assert lines == {"cuda:0": [2000, 6000, 4000], "process": [700, 700, 700]}
    assert "04_fold_training:<br>train, cuda:0" in ticks(logs.phase_peaks_figure(found))


def test_a_long_log_is_thinned_and_keeps_its_peak(story: StoryWriter) -> None:
    path = story.run.memory("04_fold_training", 0)
    path.parent.mkdir(parents=True)
    used = [500 + second % 7 for second in range(9_000)] + [900]
    lines = [
        json.dumps({"timestamp": second, "elapsed_seconds": second, "phase": "train", "rss_mb": each})
        for second, each in enumerate(used)
    ]
    path.write_text("\n".join(lines) + "\n")
    (line,) = logs.stage_timeline_figure(run_memory(story.run)).data
    assert len(line.x) <= 3000
    assert (max(line.y), min(line.y)) == (900, 503)  # the highest of four neighbours


# --- Images, videos and texts

MANY = tuple(f"class {number} with a name longer than the axis has room for" for number in range(101))


def test_of_very_many_classes_the_32_with_most_mistakes_are_drawn() -> None:
    rows = [
        {"class_label": true, "predicted_label": called, "group_id": "g"} for true, called in itertools.pairwise(MANY)
    ]
    matrix = tasks.confusion_figure(pl.DataFrame(rows))
    assert np.shape(matrix.data[0].z) == (32, 32)
    assert "the 32 of 101 classes with most mistakes" in subtitle(matrix)
    assert len(set(matrix.data[0].y)) == 32  # shortened names are told apart by their numbers


def test_every_field_of_the_matrix_is_counted() -> None:
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("c", "a"), ("c", "a")]
    rows = [{"class_label": true, "predicted_label": called, "group_id": "g"} for true, called in pairs]
    figure = tasks.confusion_figure(pl.DataFrame(rows))
    assert np.array(figure.data[0].z).tolist() == [[0.5, 0.5, 0], [0, 1, 0], [1, 0, 0]]
    assert np.array(figure.data[0].text).tolist() == [["1", "1", ""], ["", "1", ""], ["2", "", ""]]
    assert title(figure) == "40.0% of the test images are recognised"


def test_predicted_numbers_stand_in_their_unit_with_the_mean() -> None:
    means = tasks.training_means(IMAGES, TARGETS)
    figure = tasks.target_scatter_figure(task_runs.target_predictions_of(IMAGES, TARGETS), RESULTS, means)
    assert title(figure) == "calories: off by 16.0 [14.0, 18.0] kcal on average"
    assert figure.layout.xaxis.title.text == "True calories (kcal)"
    assert figure.layout.xaxis2.title.text == "True mass (g)"
    drawn = [trace.y[0] for trace in figure.data if trace.name == "Mean predictor"]
    assert drawn == pytest.approx([means["calories"], means["mass"]])
    training = IMAGES.filter(part="train")["image_id"]
    known = TARGETS.filter(pl.col("image_id").is_in(training.implode()), target="mass")
    assert means["mass"] == pytest.approx(known["value"].mean())


def test_a_table_has_a_column_for_each_control_and_says_which_way_is_better() -> None:
    table = tasks.metric_and_control_table(RESULTS, ["target:"])
    columns = ["of", "metric", "unit", "better", "Model", "Mean predictor", "num_samples", "num_groups"]
    assert table.columns == columns
    assert table["better"].to_list() == ["lower", "higher"] * 2
    assert table["Mean predictor"][0] == "50.00 [45.00, 55.00]"
    both = tasks.metric_and_control_table(RESULTS, ["all", "target:"])
    assert both["Most frequent class"].to_list()[-1] is None
    assert tasks.metric_and_control_table(RESULTS, ["captions"]).is_empty()
