"""Runs and detectors compared: who is refused, what a difference is, and what may be called best."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.figures.comparisons import cost_figure
from fvc_lib.analysis.read import detector_comparison
from fvc_lib.analysis.read.comparison import (
    JudgedRun,
    comparable_runs,
    compare,
    judged_runs,
    names_of,
    replicates_of,
    with_data_of_first,
)
from fvc_lib.analysis.read.detector_comparison import BEST, HIGHEST, DetectorComparison
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import group_interval
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import frame_of, read_table, write_table
from tests.analysis.conftest import change_predictions, detector_runs, predictions_of, set_parameters

MakeRun = Callable[..., RunPaths]
Change = Callable[[pl.DataFrame], pl.DataFrame]


@pytest.fixture
def two_runs(make_run: MakeRun) -> list[RunPaths]:
    return [make_run(name="run_a", skill=0.8), make_run(name="run_b", skill=3.0)]


# --- Pairs of runs


def test_a_difference_is_that_of_the_runs_numbers_and_shown_with_its_p(two_runs):
    found = compare(two_runs, replicates=200, seed=4)
    (pair,) = found.pairs
    frames = [predictions_of(run) for run in two_runs]
    labels = (frames[0]["label"] == "fake").to_numpy().astype(int)
    within = within_folds(roc_auc, frames[0]["fold"].to_numpy())
    alone = [
        group_interval(labels, frame["score"].to_numpy(), frame["group_id"].to_list(), within, replicates=200, seed=4)
        for frame in frames
    ]
    assert list(found.values.values()) == alone
    assert pair.difference.value == pytest.approx(alone[1].value - alone[0].value)
    assert (pair.difference.num_rows, pair.difference.num_groups, pair.is_shown) == (96, 24, True)
    assert "run_b is above run_a" in pair.finding
    assert pair.holm_p_value == pair.difference.p_value
    two_runs[0].params_yaml.write_text(RunConfig(dev_groups=20).to_yaml())
    (tried,) = compare(two_runs, replicates=200).pairs
    assert (tried.is_shown, "trial on 20 groups: no difference is claimed" in tried.finding) == (False, True)


def set_where(column: str, value: pl.Expr, **where: str) -> Change:
    return lambda frame: frame.with_columns(pl.when(**where).then(value).otherwise(column).alias(column))


@pytest.mark.parametrize(
    ("changed", "number"),
    [
        (lambda frame: frame.filter(pl.col("video_id") > f"{2:016x}"), 3),
        (set_where("label", pl.lit("fake"), group_id="group_000"), 4),
        (set_where("group_id", pl.lit("alone"), video_id=f"{5:016x}"), 1),
        (set_where("fold", (pl.col("fold") + 1) % 5, group_id="group_003"), 4),
    ],
)
def test_a_run_on_other_data_is_refused_and_the_others_are_compared(changed, number, two_runs):
    change_predictions(two_runs[1], changed)
    alike, refusals = with_data_of_first(judged_runs(two_runs)[0])
    assert [run.name for run in alike] == ["run_a"]
    ((name, reason),) = refusals
    assert name == "run_b"
    assert f"{number} video" in reason
    assert f"--resume {two_runs[0].root} --fork" in reason


def end_badly(run: RunPaths, state: str) -> None:
    status = json.loads(run.status_json.read_text())
    status["stages"]["04_fold_training_fold_4"]["state"] = state
    write_json(run.status_json, status)


def without_predictions(run: RunPaths) -> None:
    run.predictions(1).unlink()
    run.status_json.unlink()


def leak(run: RunPaths) -> None:
    row = ("groups_in_two_folds", 1, None, "1 of 24 groups in more than one fold.", False)
    write_table(frame_of([row], tables.LEAKAGE_AUDIT), tables.LEAKAGE_AUDIT, run.leakage_audit)


def turn_labels(run: RunPaths) -> None:
    turned = pl.when(pl.col("label") == "fake").then(pl.lit("real")).otherwise(pl.lit("fake"))
    write_table(read_table(run.folds, tables.FOLDS).with_columns(label=turned), tables.FOLDS, run.folds)


def unfinished(run: RunPaths) -> None:
    run.status_json.write_text(run.status_json.read_text().replace('"done"', '"failed"', 1))


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda run: end_badly(run, "failed"), ["04_fold_training_fold_4: failed", "--resume {run}"]),
        (lambda run: end_badly(run, "running"), ["04_fold_training_fold_4", "--resume {run}"]),
        (without_predictions, ["predictions_fold_1"]),
        (lambda run: run.folds.unlink(), ["folds.parquet"]),
        (lambda run: run.params_yaml.write_text(RunConfig(shuffle_labels=True).to_yaml()), ["shuffle_labels"]),
        (leak, ["1 of 24 groups in more than one fold."]),
        (turn_labels, ["96 differ"]),
        (lambda run: run.predictions(2).write_bytes(b"PAR1 torn"), ["predictions_fold_2.parquet"]),
        (lambda run: run.results.write_bytes(b"torn"), ["kfold_results.feather"]),
        (unfinished, ["--resume {run}"]),
        (lambda run: run.results.unlink(), ["missing"]),
    ],
)
def test_a_run_that_cannot_be_compared_is_refused_with_the_reason(spoil, facts, run):
    spoil(run)
    judged, refusals = judged_runs([run], finished=True)
    assert judged == []
    ((name, reason),) = refusals
    assert name == run.run_id
    assert [fact for fact in facts if fact.format(run=run.root) not in reason] == []


def test_nothing_is_claimed_of_one_run_too_few_groups_or_an_undefined_metric(two_runs):
    for runs in ([], two_runs[:1], [two_runs[0], two_runs[0]]):
        assert compare(runs).pairs == ()
    with pytest.raises(UsageError, match="Did you mean 'roc_auc'"):
        compare(two_runs, metric="rocauc")
    for run in two_runs:  # one group of fakes is left
        change_predictions(run, lambda frame: frame.filter((pl.col("label") == "real") | (group == "group_001")))
    (pair,) = compare(two_runs).pairs
    assert (pair.is_shown, "Holm p undefined" in pair.finding) == (False, True)
    for run in two_runs:
        change_predictions(run, lambda frame: frame.filter(pl.col("label") == "real"))
    assert "undefined" in compare(two_runs).pairs[0].finding


group = pl.col("group_id")


# --- Detectors: means over seeds


@pytest.fixture
def runs(tmp_path: Path, written_run: Callable[[int, float], RunPaths]) -> list[RunPaths]:
    return detector_runs(tmp_path / "runs", written_run)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, written_run: Callable[[int, float], RunPaths]) -> object:
    """One comparison for all tests that change nothing."""
    measured = {"num_parameters": 1000, "num_trained": 10, "milliseconds_per_clip": 2.5}
    return compare_detectors(
        detector_runs(tmp_path_factory.mktemp("detectors"), written_run), replicates=100,
        measure_costs=lambda parts: [measured if part.model == "frame_cnn" else {} for part in parts],
    )  # fmt: skip


def compare_detectors(runs: list[RunPaths], reference: RunPaths | None = None, **more: Any) -> DetectorComparison:
    return detector_comparison.compare_detectors(*comparable_runs(runs, reference), **more)


def marks(found: DetectorComparison) -> list[str]:
    return [detector_comparison.mark(found.metrics["roc_auc"], name) for name in found.runs]


def auc(judged: JudgedRun) -> float:
    return float(replicates_of([judged], "roc_auc", replicates=1, seed=0).values[0])


def test_runs_that_differ_in_their_seed_alone_are_one_detector_with_a_mean_and_a_spread(found):
    assert list(found.runs) == ["frame_cnn", "r2plus1d_small"]
    means = []
    for name, runs in found.runs.items():
        values = list(map(auc, runs))
        means.append(np.mean(values))
        assert found.metrics["roc_auc"].values[name].value == pytest.approx(means[-1])
        assert found.metrics["roc_auc"].spread[name] == pytest.approx((min(values), max(values)))
        assert found.costs[name]["peak_rss_bytes"] > 0
    (pair,) = found.differences
    assert pair.difference.value == pytest.approx(means[1] - means[0])
    assert pair.is_shown
    assert marks(found) == ["", BEST]
    assert BEST in detector_comparison.detector_table(found)["roc_auc"][1]


@pytest.mark.slow
def test_the_best_value_is_marked_as_best_only_above_its_controls_and_all_others(runs):
    results = read_table(runs[3].results, tables.RESULTS)
    write_table(results.filter(pl.col("source") != "shuffled_labels"), tables.RESULTS, runs[3].results)
    without = compare_detectors(runs, reference=runs[0], replicates=100)
    assert marks(without)[1] == HIGHEST
    assert detector_comparison.detector_table(without)["above_controls"][1] == "1 of 2 runs"
    assert not without.differences[0].is_shown
    assert "only 1 of 2 runs" in without.differences[0].finding

    twin = RunPaths(shutil.copytree(runs[2].root, runs[2].root.with_name("run_c0")))
    set_parameters(twin, model="r2plus1d_small", epochs=7)
    close = compare_detectors([runs[0], runs[2], twin], replicates=50)
    assert BEST not in marks(close)
    assert list(close.runs)[1:] == ["r2plus1d_small", "r2plus1d_small, epochs 7"]


@pytest.mark.slow
def test_a_training_counts_once_and_what_is_not_compared_is_listed_with_its_reason(runs):
    copy = RunPaths(shutil.copytree(runs[2].root, runs[2].root.with_name("run_b9")))
    set_parameters(copy, model="r2plus1d_small", confidence=0.9)  # a fork that keeps its trainings
    runs[3].results.unlink()
    found = compare_detectors([*runs, copy], reference=copy, replicates=50)
    assert [[run.name for run in runs] for runs in found.runs.values()] == [["run_b9"], ["run_a0", "run_a1"]]
    left_out = detector_comparison.left_out_table(found)
    assert left_out["run_id"].to_list() == ["run_b1", "run_b0"]
    with pytest.raises(DataError, match="the reference cannot be compared"):
        compare_detectors(runs, reference=runs[3], replicates=50)
    with pytest.raises(DataError, match="wanted two or more"):
        compare_detectors(runs[:1], replicates=50)


@pytest.mark.parametrize("field", ["model", "crop"])
def test_a_users_file_counts_by_what_it_held_when_it_was_trained_with(runs, tmp_path, field):
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass")
    for run, digest in zip(runs[:2], ("1", "2"), strict=True):
        set_parameters(run, **{field: f"{file}:Mine"})
        path = run.stage_checkpoint("04_fold_training", 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"fingerprint": {"parameters": {field: f"mine.py:Mine@{digest}"}}}))
    first, second = judged_runs(runs[:2])[0]
    assert first.detector != second.detector
    assert names_of([first, second])[0].endswith(" of run_a0")


def test_the_files_hold_numbers_and_each_publication_once(found, tmp_path):
    files = {path.name: path for path in detector_comparison.write_tables(found, tmp_path / "comparison")}
    numbers = pl.read_csv(files["detectors.csv"])
    assert numbers.filter(quantity="num_parameters").select("detector", "value").rows() == [("frame_cnn", 1000)]
    auc, difference = (numbers.filter(quantity=name) for name in ("roc_auc", "roc_auc_minus_reference"))
    assert auc["value"][1] == pytest.approx(found.metrics["roc_auc"].values["r2plus1d_small"].value)
    assert auc["mark"].to_list() == [None, BEST]
    assert difference["value"].to_list() == [found.differences[0].difference.value]
    assert numbers.filter(quantity="holm_p")["value"].to_list() == [found.differences[0].holm_p_value]
    assert pl.read_csv(files["runs.csv"])["run_id"].sort().to_list() == ["run_a0", "run_a1", "run_b0", "run_b1"]
    sentences = files["answer.txt"].read_text().splitlines()
    assert sentences[0].split(" has the highest ROC AUC, ")[0] in found.runs
    assert found.differences[0].finding in sentences
    bibliography = files["references.bib"].read_text()
    assert bibliography.count("@inproceedings{tran2018closer,") == 1
    assert bibliography.count("% corpus clips") == 1
    assert [trace.name for trace in cost_figure(found).data][1] == "frame_cnn<br>2.5 ms a clip, 1,000 parameters"
