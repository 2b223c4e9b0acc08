"""Runs of tasks without folds: their report, their row, the dashboard beside them, and why they are not compared."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from fvc_lib.analysis.dashboard.dashboard import Dashboard
from fvc_lib.analysis.dashboard.panels import NOTHING, panels
from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.pages.report import summary_lines, write_run_report, write_runs_index
from fvc_lib.analysis.read.headline import Score, judge, run_headline, task_scores
from fvc_lib.analysis.read.queries import Selection
from fvc_lib.services.errors import command_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import IMAGES, TASK_RESULTS, read_table, write_table
from tests.analysis.conftest import notebook
from tests.analysis.task_runs import (
    framed,
    image_results_of,
    result,
    write_image_run,
    write_video_text_run,
)

Write = Callable[[Path], RunPaths]
WRITE: dict[str, Write] = {"image": write_image_run, "video_text": write_video_text_run}
NAMES = {"image": "Top-1 accuracy", "video_text": "Recall@1, text to video"}
JUDGED = {"image": "30 images of the test part, in 15 groups", "video_text": "30 texts of the test part, in 15 groups"}


@pytest.fixture(params=WRITE)
def task(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def task_run(task: str, tmp_path: Path) -> RunPaths:
    return WRITE[task](tmp_path / "runs")


def test_the_one_number_is_the_tasks_own_beside_its_control(task: str, task_run: RunPaths) -> None:
    headline = run_headline(task_run)
    value = 0.75 if task == "image" else 0.72
    assert headline.measure.name == NAMES[task]
    assert headline.model_score is not None
    assert headline.model_score.value == value
    assert headline.verdict.standing == "above control"
    assert headline.num_samples == 30
    assert headline.measure.circumstances(30, 15).startswith(JUDGED[task])
    assert "forensic" not in headline.measure.circumstances(30, 15)
    assert any("synthetic" in caution for caution in headline.cautions)
    assert not any("fakes" in caution for caution in headline.cautions)


def test_without_its_control_a_task_claims_nothing(task: str, task_run: RunPaths) -> None:
    control = "majority_class" if task == "image" else "chance"
    table = read_table(task_run.task_results, TASK_RESULTS)
    write_table(table.filter(pl.col("source") != control), TASK_RESULTS, task_run.task_results)
    verdict = run_headline(task_run).verdict
    assert verdict.standing == "not shown"
    assert command_text("--only", "10" if task == "image" else "20", "--resume", task_run.root) in verdict.sentence


def test_classes_that_were_never_tested_are_named_and_no_overall_figure_is_meant(tmp_path: Path) -> None:
    run = write_image_run(tmp_path)
    images = read_table(run.images, IMAGES)
    moved = pl.when(pl.col("class_label").is_in(["apple pie", "bibimbap"])).then(pl.lit("train")).otherwise("part")
    write_table(images.with_columns(part=moved), IMAGES, run.images)
    told = "\n".join(summary_lines(run))
    assert "2 of 4 classes were never tested (apple pie, bibimbap): the number is of the others" in told
    assert "no overall figure is meant" in told


def test_a_corpus_without_classes_is_judged_by_its_numbers() -> None:
    rows = image_results_of().filter(~pl.col("subject").str.starts_with("class:") & (pl.col("subject") != "all"))
    found = task_scores(rows, "image")
    assert found.measure.name == "R², calories"
    assert [score.source for score in found.scores] == ["model", "mean_predictor"]
    assert judge(found.scores, measure=found.measure).standing == "above control"


def test_what_chance_reaches_is_exact_and_other_controls_without_an_interval_are_not() -> None:
    rows = framed(
        [result("model", "text_to_video", "recall@5", 0.5, 0.1), result("chance", "text_to_video", "recall@5", 0.2)],
        TASK_RESULTS,
    )
    found = task_scores(rows, "video_text")
    assert found.measure.name == "Recall@5, text to video"
    assert found.scores[1] == Score("chance", 0.2, 0.2, 0.2)
    assert judge(found.scores, measure=found.measure).standing == "above control"
    other = task_scores(rows.with_columns(source=pl.col("source").replace("chance", "guess")), "video_text")
    assert judge(other.scores, measure=other.measure).standing == "not above control"


def test_report_list_and_terminal_tell_the_same_number(task: str, task_run: RunPaths) -> None:
    stage = {"image": "10_image_recognition", "video_text": "20_video_text"}[task]
    notebook(task_run.executed_notebook(stage), new_markdown_cell("# A question?"), new_code_cell("1"))
    write_run_report(task_run)
    write_runs_index(task_run.root.parent.parent)
    number = {"image": "0.750 [0.670, 0.830]", "video_text": "0.720 [0.620, 0.820]"}[task]
    report = task_run.report_html.read_text(encoding="utf-8")
    listed = (task_run.root.parent.parent / "index.html").read_text(encoding="utf-8")
    told = "\n".join(summary_lines(task_run))
    for text in (report, listed, told):
        assert NAMES[task] in text
        assert number in text
    assert JUDGED[task] in report
    for text in (report, listed):
        assert "AUC" not in text
        assert "0 · 0.5 · 1" in text
    assert ("30 images" if task == "image" else "30 texts") in listed
    assert ("images        30 in 15 groups" if task == "image" else "texts         30 in 15 groups") in told


def test_another_task_in_detail_brings_its_own_metrics_and_compares_its_own_runs(
    make_run: Callable[..., RunPaths],
) -> None:
    video = make_run()
    runs_dir = video.root.parents[1]
    images = [write_image_run(runs_dir), write_image_run(runs_dir, "run_20250307_101500_abcdef04")]
    write_table(image_results_of(top1=0.6), TASK_RESULTS, images[1].task_results)
    board = Dashboard(runs_dir, Selection((*images, video, write_video_text_run(runs_dir)), detail=video))
    shown = {panel.name: panel for panel in panels()}
    assert PLOTLY in shown["roc"].bundle(board.selection)
    assert shown["confusion"].bundle(board.selection)["text/plain"] == NOTHING
    assert board.choose(detail=images[0]).metrics == ("loss", "top1")
    for name in ("roc", "parameters"):
        assert shown[name].bundle(board.selection)["text/plain"] == NOTHING
    assert board.choose(detail=video).metrics == ("loss",)
