"""Every figure states a finding, its sample size and its axes, treats names as text, and says when it is empty."""

import base64
import io
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fvc_lib.analysis.figures import comparisons, corpus, logs, results, roc_and_calibration as ranking, tasks, theme
from fvc_lib.analysis.figures.still import _draw_trace
from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.headline import FORGERIES, protocol_cautions
from fvc_lib.analysis.read.runs import read_tables
from fvc_lib.services import tables
from fvc_lib.services.run_paths import RunPaths
from tests.analysis import task_runs
from tests.analysis.memory_story import memory_of, troubled_run

IMAGES = task_runs.images_of()
TARGETS = task_runs.targets_of(IMAGES)
PREDICTED = task_runs.image_predictions_of(IMAGES)
NUMBERS = task_runs.target_predictions_of(IMAGES, TARGETS)


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def subtitle(figure: go.Figure) -> str:
    return str(figure.layout.title.subtitle.text).replace("<br>", " ")


def ticks(figure: go.Figure) -> list[str]:
    return list(figure.layout.yaxis.ticktext)


def annotations(run: RunPaths) -> pl.DataFrame:
    rows = tables.read_table(run.index, tables.INDEX) if run.index.is_file() else tables.frame_of([], tables.INDEX)
    return rows.with_columns(is_present=pl.lit(value=True))


def figures_of(run: RunPaths) -> dict[str, go.Figure]:
    """All figures of one run."""
    predictions, memory = queries.predictions([run]).frame, memory_of(run)
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
        "groups": corpus.group_sizes_figure(annotations(run)),
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
    still = Image.open(io.BytesIO(base64.b64decode(figure_bundle(figure)["image/png"])))
    assert still.size == (900, figure.layout.height)
    assert len(still.getcolors()) > 8


def test_a_still_picture_names_classes_as_they_are_called() -> None:
    (trace,), panel = tasks.confusion_figure(PREDICTED).data, Figure().subplots()
    _draw_trace(panel, trace.to_plotly_json(), "black", is_stacked=False)
    assert any("<img" in label.get_text() for label in panel.get_yticklabels())


@pytest.mark.slow
def test_figures_of_a_run_have_a_finding_an_n_and_axes(run: RunPaths) -> None:
    drawn = figures_of(run)
    numbers = tasks.target_scatter_figure(NUMBERS)
    for figure in (*drawn.values(), tasks.confusion_figure(PREDICTED), numbers):
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


def test_figures_of_an_empty_run_say_why_they_are_empty(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "e" / "run_x")
    empty = (
        comparisons.levels_figure(tables.frame_of([], tables.ROBUSTNESS_RESULTS)),
        tasks.confusion_figure(PREDICTED.clear()),
        tasks.target_scatter_figure(NUMBERS.clear()),
    )
    for figure in (*figures_of(run).values(), *empty):
        assert "nothing to show" in title(figure)
        assert subtitle(figure)
        assert not figure.data


# --- Corpus


def test_a_ring_shows_in_the_still_picture() -> None:
    row = theme.Row("ring", 0.5, color="#D55E00", hollow=True, text=" ")
    picture = figure_bundle(theme.interval_chart("A", "b", [row], names="n", values="v"))["image/png"]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"))
    assert (abs(pixels - np.array([0xD5, 0x5E, 0])) < 8).all(-1).sum() > 10


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
    assert title(figure).startswith(f"ROC AUC: model {row['value']:.3f}; highest control: ")
    alone = rows.filter(source="model").with_columns(low=pl.lit(None, pl.Float64), high=pl.lit(None, pl.Float64))
    figure = results.controls_figure(alone)
    assert "no control" in title(figure)
    assert figure.data[0].error_x.array is None


def test_tables_of_results_hold_every_metric_and_the_verdict_of_each_check(run: RunPaths) -> None:
    rows = tables.read_table(run.results, tables.RESULTS)
    table = results.metric_table(rows)
    assert table.columns == ["metric", "better", "by_video", "by_group", "fold_mean", "fold_std"]
    assert table.filter(metric="Brier score")["better"].item() == "lower"
    assert table["by_group"].null_count() == 0
    controls = results.control_table(rows)
    assert controls["metric"].to_list() == table["metric"].to_list()
    assert controls.width == 2 + rows["source"].n_unique()
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
    asked = {"protocol": "cross_corpus", "target_corpora": ["mora", "open_sora_mb"]}
    (caution,) = protocol_cautions(asked, found, "roc_auc")
    assert caution.endswith(
        "The number is the plain mean over 2 targets, the worst first: mora 0.600, open_sora_mb 0.900."
    )
    within = {"protocol": "kfold", "source_column": "corpus", "more_corpora": []}
    assert protocol_cautions(within, found, "roc_auc") == ()
    (caution,) = protocol_cautions({**within, "source_column": "place"}, found, "roc_auc")
    assert "-p protocol leave_one_source_out" in caution
    table = comparisons.target_table(found)
    assert table["target"].to_list() == ["mora", "open_sora_mb"]
    assert comparisons.target_table(found, "source:").is_empty()
    assert table["standing"].to_list() == ["not above control", "above control"]
    assert table["Model"].to_list() == ["0.600 [0.550, 0.650]", "0.900 [0.850, 0.950]"]


# --- Logs


def test_peaks_are_the_highest_of_all_folds_with_their_range_and_the_budget(tmp_path: Path) -> None:
    found = memory_of(troubled_run(tmp_path / "e" / "run_x"))
    figure = logs.phase_peaks_figure(found)
    peak = dict(zip(ticks(figure), (trace.x[0] for trace in figure.data), strict=True))
    assert peak["04_fold_training:<br>train"] == 1930
    assert peak["01_data_index:<br>whole stage"] == 430
    (down,) = figure.data[ticks(figure).index("04_fold_training:<br>train")].error_x.arrayminus
    assert down == 1930 - 1836
    for drawn in (figure, logs.stage_timeline_figure(found)):
        assert "budget" in {note.text for note in drawn.layout.annotations}
    points, line = logs.growth_figure(found).data[:2]
    assert points.name == line.name == "04_fold_training, fold 0, attempt 1, train, process: leaks"
    assert line.x == (2, 10)
    assert line.y[1] - line.y[0] == pytest.approx(8 * 92)
    assert title(logs.growth_figure(found)).startswith("Memory leaks: 92.0 MB more with every epoch")


# --- Images, videos and texts


def test_every_field_of_the_matrix_is_counted() -> None:
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("c", "a"), ("c", "a")]
    rows = [{"class_label": true, "predicted_label": called, "group_id": "g"} for true, called in pairs]
    figure = tasks.confusion_figure(pl.DataFrame(rows))
    assert np.array(figure.data[0].z).tolist() == [[0.5, 0.5, 0], [0, 1, 0], [1, 0, 0]]
    assert np.array(figure.data[0].text).tolist() == [["1", "1", ""], ["", "1", ""], ["2", "", ""]]
    assert title(figure) == "40.0% of the test images are recognised"


NUMBER = 60


@pytest.fixture(scope="module")
def tied():
    """Features of which one follows the size, one the codec, one the label, one nothing; and their index."""
    draw = np.random.default_rng(4)
    sizes, codecs = draw.integers(100, 2000, NUMBER), draw.integers(0, 3, NUMBER)
    labels = draw.integers(0, 2, NUMBER)
    ids = [f"video{number}" for number in range(NUMBER)]
    columns = {
        "a_size_mean": np.log(sizes) * -3.0,
        "a_codec_mean": codecs * 10 + draw.random(NUMBER),
        "a_label_mean": labels + 0.2 * draw.random(NUMBER),
        "a_noise_mean": draw.random(NUMBER),
        "a_same_mean": np.ones(NUMBER),
    }
    features = pl.DataFrame(
        {"video_id": ids, "group_id": [f"g{number // 2}" for number in range(NUMBER)]}
        | {"label": np.where(labels == 1, "fake", "real")}
        | columns,
        schema_overrides=dict.fromkeys(columns, pl.Float32),
    ).with_columns(
        pl.when(pl.int_range(pl.len()) >= 3).then("a_noise_mean").alias("a_noise_mean"),
        pl.lit(None, pl.Float32).alias("a_none_mean"),
    )
    index = pl.DataFrame(
        {"video_id": ids, "width": sizes, "height": sizes, "num_frames": draw.integers(10, 500, NUMBER)}
        | {"bits_per_second": [None] * 5 + draw.random(NUMBER - 5).tolist(), "codec": [f"c{code}" for code in codecs]}
    )
    return features, index.sample(fraction=1, shuffle=True, seed=1)


def test_ties_tell_which_feature_follows_what(tied):
    found = corpus.feature_ties(*tied)
    rows = {row["feature"]: row for row in found.iter_rows(named=True)}
    assert rows["a_size_mean"]["size"] == pytest.approx(1)
    assert rows["a_codec_mean"]["codec"] == pytest.approx(0.94, abs=0.03)
    assert rows["a_label_mean"]["auc"] == 1
    assert found["feature"][:2].to_list() == ["a_size_mean", "a_codec_mean"]
    assert rows["a_noise_mean"]["strongest"] < 0.5
    assert rows["a_noise_mean"]["missing"] == pytest.approx(3 / NUMBER)
    assert (rows["a_same_mean"]["strongest"], rows["a_same_mean"]["auc"]) == (None, 0.5)
    assert (rows["a_none_mean"]["strongest"], rows["a_none_mean"]["auc"], rows["a_none_mean"]["missing"]) == (
        None,
        None,
        1,
    )
