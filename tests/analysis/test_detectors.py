"""Detectors beside each other: means over seeds, what is left out, and what may be called best."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.figures.comparisons import cost_figure
from fvc_lib.analysis.read import comparison, comparison_tables
from fvc_lib.analysis.read.comparison import BEST, HIGHEST, JudgedRun, compare_detectors, read_judged_run
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table, write_table

MakeOne = Callable[..., RunPaths]


@pytest.fixture
def make_one(make_run: Callable[..., RunPaths]) -> MakeOne:
    def make(name: str, skill: float, drawn: int = 0, **parameters: object) -> RunPaths:
        run = make_run(name=name, seed=drawn, skill=skill)
        write_text(run.params_yaml, resolve_config({"model": "frame_cnn", **parameters}, environ={}).to_yaml())
        return run

    return make


@pytest.fixture
def runs(make_one: MakeOne) -> list[RunPaths]:
    """A weak detector of two seeds and a strong one of two."""
    return [
        make_one("run_a0", 0.4, drawn=1),
        make_one("run_a1", 0.6, drawn=2, seed=1, folds_seed=0),
        make_one("run_b0", 4.0, drawn=3, model="r2plus1d_small"),
        make_one("run_b1", 3.0, drawn=4, model="r2plus1d_small", seed=1, folds_seed=0),
    ]


def auc(run: RunPaths) -> float:
    judged = read_judged_run(run, run.run_id)
    assert isinstance(judged, JudgedRun)
    return float(comparison.replicates_of([judged], "roc_auc", replicates=1, seed=0).values[0])


def test_runs_that_differ_in_their_seed_alone_are_one_detector_with_a_mean_and_a_spread(runs):
    found = compare_detectors(runs, replicates=300)
    assert [each.name for each in found.detectors] == ["frame_cnn", "r2plus1d_small"]
    assert [[run.config.seed for run in each.runs] for each in found.detectors] == [[0, 1], [0, 1]]
    values = [[auc(run) for run in runs[:2]], [auc(run) for run in runs[2:]]]
    for detector, ones in zip(found.detectors, values, strict=True):
        assert detector.intervals["roc_auc"].value == pytest.approx(np.mean(ones))
        assert detector.spread["roc_auc"] == pytest.approx((min(ones), max(ones)))
        assert detector.cost["peak_rss_bytes"] > 0
    (pair,) = found.differences
    assert pair.difference.value == pytest.approx(np.mean(values[1]) - np.mean(values[0]))
    assert pair.is_shown
    table = comparison_tables.detector_table(found)
    assert table["over_seeds"][0] == f"{min(values[0]):.3f} to {max(values[0]):.3f} over 2 seeds"
    assert table["difference"][0] == "reference"
    assert compare_detectors(runs, reference=runs[2], replicates=50).detectors[0].name == "r2plus1d_small"


def test_the_best_value_is_marked_as_best_only_above_its_controls_and_all_others(runs, make_one):
    found = compare_detectors(runs, replicates=300)
    assert found.best["roc_auc"] == ("r2plus1d_small", True)
    assert BEST in comparison_tables.metric_table(found)["roc_auc"][1]
    assert r"\textbf{" in comparison_tables.paper_table(found)

    results = read_table(runs[3].results, tables.RESULTS)
    write_table(results.filter(pl.col("source") != "shuffled_labels"), tables.RESULTS, runs[3].results)
    without = compare_detectors(runs, replicates=300)
    assert without.best["roc_auc"] == ("r2plus1d_small", False)
    assert comparison_tables.detector_table(without)["above_controls"][1] == "1 of 2 runs"
    assert without.differences[0].finding.endswith("only 1 of 2 runs of r2plus1d_small is above every control.")
    assert HIGHEST in comparison_tables.metric_table(without)["roc_auc"][1]
    assert r"\textbf{" not in comparison_tables.paper_table(without)

    twin = make_one("run_c0", 4.0, drawn=3, model="r2plus1d_small", epochs=7)
    close = compare_detectors([*runs[:3], twin], replicates=300)
    assert not close.best["roc_auc"][1], "two detectors that predict the same cannot both be best"
    assert [each.name for each in close.detectors][1:] == ["r2plus1d_small, epochs 20", "r2plus1d_small, epochs 7"]


def test_one_detector_trained_twice_has_its_spread_and_is_the_best_of_nothing(runs):
    alone = compare_detectors(runs[:2], replicates=50, metrics=["roc_auc"])
    low, high = alone.detectors[0].spread["roc_auc"]
    assert low < high
    assert alone.differences == ()
    assert alone.mark(alone.detectors[0], "roc_auc") == ""
    assert r"\textbf{" not in comparison_tables.paper_table(alone)


def other_folds(run: RunPaths) -> None:
    folds = read_table(run.folds, tables.FOLDS).with_columns((pl.col("fold") + 1) % 5)
    predictions = pl.concat([read_table(run.predictions(fold), tables.PREDICTIONS) for fold in range(5)])
    moved = predictions.with_columns((pl.col("fold") + 1) % 5)
    write_table(folds, tables.FOLDS, run.folds)
    for fold in range(5):
        write_table(moved.filter(fold=fold), tables.PREDICTIONS, run.predictions(fold))


def other_predictions(run: RunPaths) -> None:
    one = read_table(run.predictions(0), tables.PREDICTIONS)
    write_table(one.with_columns((1 - pl.col("score")).alias("score")), tables.PREDICTIONS, run.predictions(0))


def torn(run: RunPaths) -> None:
    run.results.write_bytes(b"torn")


def unfinished(run: RunPaths) -> None:
    run.status_json.write_text(run.status_json.read_text().replace('"done"', '"failed"', 1))


def no_results(run: RunPaths) -> None:
    run.results.unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_folds, "not judged on the same videos and folds"),
        (other_predictions, "its results are not those of its predictions"),
        (torn, "run_b1"),
        (unfinished, "--resume"),
        (no_results, "it has no results"),
    ],
)
def test_a_run_that_cannot_be_judged_is_left_out_by_name_and_as_reference_refused(runs, spoil, words):
    spoil(runs[3])
    found = compare_detectors(runs, replicates=50, metrics=["roc_auc"])
    assert [run.name for run in found.detectors[1].runs] == ["run_b0"]
    (row,) = comparison_tables.left_out_table(found).iter_rows(named=True)
    assert row["run_id"] == "run_b1"
    assert re.search(words, row["why"])
    if spoil is not other_folds:
        with pytest.raises(DataError, match="the reference cannot be compared"):
            compare_detectors(runs, reference=runs[3], replicates=50)


def test_without_a_reference_the_first_run_that_can_be_compared_is_taken_and_named(runs):
    unfinished(runs[0])
    unfinished(runs[1])
    failed = ["model big", "model big: it has no run: its command failed with exit code 2."]
    with pytest.raises(DataError, match=r"one detector.*run_a0.*run_a1"):
        compare_detectors(runs, replicates=50)
    third = [runs[0], runs[2], runs[1], runs[3]]
    (runs[1].status_json).write_text(runs[2].status_json.read_text())
    found = compare_detectors(third, replicates=50, metrics=["roc_auc"], without_run=[failed])
    assert [each.name for each in found.detectors] == ["r2plus1d_small", "frame_cnn"]
    assert found.cautions[0] == "run_a0, the first run, is left out: the reference is r2plus1d_small."
    left_out = comparison_tables.left_out_table(found)
    assert left_out["run_id"].to_list() == ["model big", "run_a0"]
    assert "exit code 2" in left_out["why"][0]
    for run in runs:
        unfinished(run)
    with pytest.raises(DataError, match=r"no run can be compared.*run_a0"):
        compare_detectors(runs, replicates=50)


def test_a_training_given_twice_counts_once(runs, make_one):
    again = make_one("run_b9", 4.0, drawn=3, model="r2plus1d_small")
    found = compare_detectors([*runs, again], replicates=50)
    assert [run.name for run in found.detectors[1].runs] == ["run_b9", "run_b1"]
    assert "newer" in comparison_tables.left_out_table(found)["why"][0]
    with pytest.raises(DataError, match="nothing to compare it with"):
        compare_detectors(runs[:1], replicates=50)


@pytest.mark.parametrize("field", ["model", "crop"])
def test_a_users_file_counts_by_what_it_held_when_it_was_trained_with(make_one, tmp_path, field):
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass")
    asked = f"{file}:Mine"
    runs = [make_one(name, skill, **{field: asked}) for name, skill in (("run_a", 1.0), ("run_b", 2.0))]
    for run, digest in zip(runs, ("1", "2"), strict=True):
        path = run.stage_checkpoint("04_fold_training", 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"fingerprint": {"parameters": {field: f"mine.py:Mine@{digest}"}}}))
    found = compare_detectors(runs, replicates=50, metrics=["roc_auc"])
    name = asked if field == "model" else "frame_cnn"
    assert [each.name for each in found.detectors] == [f"{name} of run_a", f"{name} of run_b"]


def test_the_files_hold_numbers_latex_and_each_publication_once(runs, tmp_path):
    found = compare_detectors(runs, replicates=50)
    measured = {"num_parameters": 1000, "num_trained": 10, "milliseconds_per_clip": 2.5}
    found = found.with_costs(lambda parts: [measured if part.model == "frame_cnn" else {} for part in parts])
    files = {path.name: path for path in comparison_tables.write_tables(found, tmp_path / "comparison")}
    numbers = pl.read_csv(files["detectors.csv"])
    assert numbers["num_parameters"].to_list() == [1000, None]
    assert numbers["roc_auc"][1] == pytest.approx(found.detectors[1].intervals["roc_auc"].value)
    assert set(pl.read_csv(files["runs.csv"])["run_id"]) == {run.run_id for run in runs}
    latex = files["detectors.tex"].read_text()
    assert r"r2plus1d\_small~\cite{tran2018closer}" in latex
    assert all(line.count("&") in (0, 8) for line in latex.splitlines())
    bibliography = files["references.bib"].read_text()
    assert bibliography.count("@inproceedings{tran2018closer,") == 1
    assert bibliography.count("sample corpus") == 1
    shown = cost_figure(found)
    assert [trace.name for trace in shown.data if trace.name] == ["frame_cnn"]
    assert "nothing to show" in cost_figure(compare_detectors(runs, replicates=50), "num_parameters").layout.title.text


def test_of_detectors_tried_on_a_part_of_the_corpus_nothing_is_claimed_anywhere(make_one, tmp_path):
    runs = [make_one("run_a", 0.4, drawn=1, dev_groups=20),
            make_one("run_b", 4.0, drawn=3, dev_groups=20, model="r2plus1d_small")]  # fmt: skip
    found = compare_detectors(runs, replicates=300)
    (pair,) = found.differences
    assert (pair.is_shown, " above " in pair.finding) == (False, False)
    assert "frame_cnn is a trial on 20 groups and r2plus1d_small is a trial on 20 groups" in pair.finding
    said = "This is a trial on 20 groups: it claims nothing of the corpus."
    assert said in (*found.cautions, *(run.headline.verdict.sentence for one in found.detectors for run in one.runs))
    files = {path.name: path for path in comparison_tables.write_tables(found, tmp_path / "comparison")}
    for name in ("detectors.csv", "runs.csv"):
        assert pl.read_csv(files[name])["trial"].to_list() == ["trial on 20 groups"] * 2
    assert files["detectors.tex"].read_text().count(said) == 1


def test_without_names_the_runs_of_the_newest_runs_experiment_are_compared(runs, make_one, tmp_path):
    image = make_one("run_a2", 0.5)
    write_text(image.params_yaml, resolve_config({"task": "image"}, environ={}).to_yaml())
    found = comparison.runs_to_compare([], tmp_path / "runs")
    assert [run.run_id for run in found] == [run.run_id for run in runs]
    assert comparison.runs_to_compare(["run_b0"], tmp_path / "runs")[0].run_id == "run_b0"
    assert comparison_tables.folder_of_comparison("", found) == Path(runs[0].root.parent / "comparison")
