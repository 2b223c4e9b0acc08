import json
import shutil
from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.read.comparison import compare, lines, p_text
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import METRICS, within_folds
from fvc_lib.metrics.intervals import group_interval
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table, write_table
from fvc_lib.tasks.video.results import kfold_results

MakeRun = Callable[..., RunPaths]


def predictions_of(run: RunPaths) -> pl.DataFrame:
    return pl.concat([read_table(run.predictions(fold), tables.PREDICTIONS) for fold in range(5)]).sort("video_id")


def change_predictions(run: RunPaths, changed: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """What 04 would have written, had it predicted something else; folds follow, so the run agrees with itself."""
    predictions = changed(predictions_of(run))
    for fold in range(5):
        write_table(predictions.filter(pl.col("fold") == fold), tables.PREDICTIONS, run.predictions(fold))
    write_table(predictions.select("video_id", "group_id", "label", "fold"), tables.FOLDS, run.folds)


@pytest.fixture
def two_runs(make_run: MakeRun) -> list[RunPaths]:
    return [make_run(name="run_a", skill=0.8), make_run(name="run_b", skill=3.0)]


@pytest.fixture
def three_runs(two_runs: list[RunPaths], make_run: MakeRun) -> list[RunPaths]:
    return [*two_runs, make_run(name="run_c", seed=1, skill=0.8)]


def test_the_difference_is_that_of_the_runs_numbers_second_minus_first(two_runs: list[RunPaths]) -> None:
    comparison = compare(two_runs, replicates=300, seed=4)
    (pair,) = comparison.pairs
    frames = [predictions_of(run) for run in two_runs]
    labels = (frames[0]["label"] == "fake").to_numpy().astype(int)
    folds = frames[0]["fold"].to_numpy()
    alone = [
        group_interval(
            labels, frame["score"].to_numpy(), frame["group_id"].to_list(), within_folds(roc_auc, folds),
            replicates=300, seed=4,
        )
        for frame in frames
    ]  # fmt: skip
    assert list(comparison.values.values()) == alone
    assert (pair.first, pair.second) == ("run_a", "run_b")
    assert pair.difference.value == pytest.approx(alone[1].value - alone[0].value)
    assert (pair.difference.num_rows, pair.difference.num_groups) == (96, 24)


def test_a_fork_that_keeps_its_trainings_is_not_compared_with_the_run_it_comes_from(
    two_runs: list[RunPaths],
) -> None:
    fork = RunPaths(shutil.copytree(two_runs[0].root, two_runs[0].root.with_name("run_fork")))
    write_text(fork.params_yaml, RunConfig(model="frame_cnn", operating_point="fpr=0.1").to_yaml())
    change_predictions(fork, lambda predictions: predictions.with_columns(threshold=pl.lit(0.9)))
    found = compare([*two_runs, fork], replicates=300)
    assert {(pair.first, pair.second) for pair in found.pairs} == {("run_a", "run_b"), ("run_b", "run_fork")}
    assert [refusal.runs for refusal in found.refusals] == [("run_a", "run_fork")]


def test_of_a_trial_no_difference_is_shown(two_runs: list[RunPaths]) -> None:
    assert compare(two_runs, replicates=300).pairs[0].is_shown
    two_runs[0].params_yaml.write_text(RunConfig(dev_groups=20).to_yaml())
    (pair,) = compare(two_runs, replicates=300).pairs
    assert (pair.is_shown, "is above" in pair.finding) == (False, False)
    assert "run_a is a trial on 20 groups" in pair.finding


def test_a_shown_difference_is_said_with_its_interval_and_p(two_runs: list[RunPaths]) -> None:
    (pair,) = compare(two_runs).pairs
    assert pair.is_shown
    value, low, high = pair.difference.value, pair.difference.low, pair.difference.high
    assert low > 0
    told = f"run_b is above run_a by {value:.3f} [{low:.3f}, {high:.3f}] ROC AUC, Holm p {p_text(pair.holm_p_value)}."
    assert pair.finding == told
    (turned,) = compare(two_runs[::-1]).pairs
    assert turned.finding == told
    assert turned.difference.value == pytest.approx(-value)


def test_no_difference_shown_is_not_called_equality(two_runs: list[RunPaths], make_run: MakeRun) -> None:
    copy = make_run(name="run_copy", skill=0.8)
    change_predictions(copy, lambda predictions: predictions.with_columns(pl.col("score") * 0.999))
    (pair,) = compare([two_runs[0], copy], replicates=200).pairs
    assert not pair.is_shown
    assert pair.finding == (
        "No difference in ROC AUC is shown between run_a and run_copy: +0.000 [+0.000, +0.000], Holm p 1.000."
    )
    assert "equal" not in "\n".join(lines(compare([two_runs[0], copy], replicates=200)))


def test_p_values_are_adjusted_for_all_pairs(three_runs: list[RunPaths]) -> None:
    pairs = compare(three_runs, replicates=400).pairs
    assert [(pair.first, pair.second) for pair in pairs] == [("run_a", "run_b"), ("run_a", "run_c"), ("run_b", "run_c")]
    raw, adjusted = ([getattr(pair, name) for pair in pairs] for name in ("difference", "holm_p_value"))
    raw = [difference.p_value for difference in raw]
    assert min(adjusted) == pytest.approx(3 * min(raw))
    assert all(after >= before for before, after in zip(raw, adjusted, strict=True))
    # The same pair alone has the same difference and needs no adjustment.
    (alone,) = compare(three_runs[:2], replicates=400).pairs
    assert alone.difference == pairs[0].difference
    assert alone.holm_p_value == alone.difference.p_value


def test_results_and_comparison_give_a_run_the_same_number(two_runs: list[RunPaths]) -> None:
    run = two_runs[0]
    predictions = predictions_of(run).with_columns(control_score=None, control_label=None)
    predictions = predictions.cast({"control_score": pl.Float64, "control_label": pl.String})
    config = RunConfig(bootstrap_replicates=100)
    index, folds = read_table(run.index, tables.INDEX), read_table(run.folds, tables.FOLDS)
    results = kfold_results(index, folds, predictions, config).filter(source="model", scope="all")
    written = {row[0]: row[1:] for row in results.select("metric", "value", "low", "high").iter_rows()}
    assert set(METRICS) <= set(written)
    for metric in ("roc_auc", "f1", "expected_calibration_error"):
        found = compare(two_runs, metric=metric, replicates=100, seed=config.seed).values["run_a"]
        np.testing.assert_allclose([found.value, found.low, found.high], written[metric], atol=1e-12)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda frame: frame.filter(pl.col("video_id") > f"{2:016x}"), "3 of 96 videos only in run_a"),
        (
            lambda frame: frame.with_columns(
                label=pl.when(pl.col("group_id") == "group_000").then(pl.lit("fake")).otherwise("label")
            ),
            "4 videos with another label",
        ),
        (
            lambda frame: frame.with_columns(
                group_id=pl.when(pl.col("video_id") == f"{5:016x}").then(pl.lit("alone")).otherwise("group_id")
            ),
            "1 video with another group (for example '0000000000000005')",
        ),
        (
            lambda frame: frame.with_columns(
                fold=pl.when(pl.col("group_id") == "group_003").then((pl.col("fold") + 1) % 5).otherwise("fold")
            ),
            "4 videos with another fold (for example '000000000000000c')",
        ),
    ],
    ids=["videos", "labels", "groups", "folds"],
)
def test_runs_on_other_data_are_refused_with_what_differs_and_a_remedy(
    changed: Callable[[pl.DataFrame], pl.DataFrame], told: str, two_runs: list[RunPaths]
) -> None:
    change_predictions(two_runs[1], changed)
    comparison = compare(two_runs, replicates=100)
    assert comparison.pairs == ()
    (refusal,) = comparison.refusals
    assert refusal.runs == ("run_a", "run_b")
    assert told in refusal.reason
    assert "(for example '" in refusal.reason
    assert f"{command_text('--resume', two_runs[0].root)} --fork" in refusal.reason


def test_runs_that_fit_are_compared_beside_one_that_does_not(three_runs: list[RunPaths]) -> None:
    change_predictions(three_runs[1], lambda frame: frame.filter(pl.col("video_id") > f"{2:016x}"))
    comparison = compare(three_runs, replicates=100)
    assert [(pair.first, pair.second) for pair in comparison.pairs] == [("run_a", "run_c")]
    (refusal,) = comparison.refusals
    assert refusal.reason.startswith("run_b and run_a, run_c were not judged on the same videos and folds: 3 of 96")
    assert set(comparison.values) == {"run_a", "run_c"}


def test_a_run_being_trained_is_refused_and_the_others_are_compared(
    three_runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = json.loads(three_runs[0].status_json.read_text())
    status["stages"]["04_fold_training_fold_2"]["state"] = "running"
    write_json(three_runs[0].status_json, status)
    monkeypatch.setattr("fvc_lib.analysis.read.records.is_held", lambda lock: True)
    comparison = compare(three_runs, replicates=100)
    (refusal,) = comparison.refusals
    assert "it is being trained (04_fold_training_fold_2)" in refusal.reason
    assert len(comparison.pairs) == 1


def test_a_run_whose_later_stages_run_is_compared(two_runs: list[RunPaths]) -> None:
    status = json.loads(two_runs[0].status_json.read_text())
    status["state"] = status["stages"]["05_kfold_results"]["state"] = "running"
    write_json(two_runs[0].status_json, status)
    assert len(compare(two_runs, replicates=100).pairs) == 1


def end_badly(run: RunPaths, state: str) -> None:
    status = json.loads(run.status_json.read_text())
    status["stages"]["04_fold_training_fold_4"]["state"] = state
    write_json(run.status_json, status)


def without_predictions(run: RunPaths) -> None:
    run.predictions(1).unlink()
    run.predictions(3).unlink()
    run.status_json.unlink()


def leak(run: RunPaths) -> None:
    schema = {name: column.dtype.type for name, column in tables.LEAKAGE_AUDIT.columns.items()}
    row = ("groups_in_two_folds", 1, None, "1 of 24 groups in more than one fold.", False)
    write_table(pl.DataFrame([row], schema=schema, orient="row"), tables.LEAKAGE_AUDIT, run.leakage_audit)


def turn_labels(run: RunPaths) -> None:
    turned = pl.when(pl.col("label") == "fake").then(pl.lit("real")).otherwise(pl.lit("fake"))
    write_table(read_table(run.folds, tables.FOLDS).with_columns(label=turned), tables.FOLDS, run.folds)


GO_ON = "--resume {run}"


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda run: end_badly(run, "failed"), ["04_fold_training_fold_4: failed", GO_ON]),
        (lambda run: end_badly(run, "running"), ["04_fold_training_fold_4: stopped without a word", GO_ON]),
        (without_predictions, ["fold 1, 3 of 5", GO_ON]),
        (lambda run: run.folds.unlink(), ["folds.parquet"]),
        (lambda run: run.params_yaml.write_text(RunConfig(shuffle_labels=True).to_yaml()), ["shuffle_labels"]),
        (leak, ["1 of 24 groups in more than one fold."]),
        (turn_labels, ["96 do not fit", "'0000000000000000'"]),
        (lambda run: run.predictions(2).write_bytes(b"PAR1 torn"), ["predictions_fold_2.parquet"]),
    ],
)
def test_a_run_that_cannot_be_compared_is_refused_with_the_reason(
    spoil: Callable[[RunPaths], object], facts: list[str], two_runs: list[RunPaths]
) -> None:
    spoil(two_runs[1])
    compared = compare(two_runs)
    assert compared.pairs == ()
    (refusal,) = compared.refusals
    assert refusal.runs == ("run_b",)
    assert [fact for fact in facts if fact.format(run=two_runs[1].root) not in refusal.reason] == []


def test_one_run_or_one_twice_has_nothing_to_be_compared_with(two_runs: list[RunPaths]) -> None:
    for runs in ([], two_runs[:1], [two_runs[0], two_runs[0]]):
        comparison = compare(runs)
        assert (comparison.pairs, comparison.refusals, comparison.values) == ((), (), {})
        assert lines(comparison) == ("There is no pair of runs to compare: give two or more.",)


def test_an_undefined_metric_and_too_few_groups_are_said(two_runs: list[RunPaths]) -> None:
    for run in two_runs:  # one group of fakes is left
        change_predictions(
            run, lambda frame: frame.filter((pl.col("label") == "real") | (pl.col("group_id") == "group_001"))
        )
    (pair,) = compare(two_runs).pairs
    assert "without an interval, since fewer than two groups hold one of the classes" in pair.finding
    assert not pair.is_shown
    for run in two_runs:
        change_predictions(run, lambda frame: frame.filter(pl.col("label") == "real"))
    comparison = compare(two_runs)
    assert comparison.pairs[0].finding == "ROC AUC is undefined for run_a or run_b: nothing to compare."
    assert any("undefined" in line for line in lines(comparison))


def test_the_lines_hold_numbers_pairs_findings_refusals_and_what_they_are_not_about(
    three_runs: list[RunPaths], make_run: MakeRun
) -> None:
    odd = make_run(name="run_\n\x1b[31m<b>'d'")
    odd.predictions(0).unlink()
    shown = lines(compare([*three_runs, odd], replicates=200))
    assert shown[0] == "ROC AUC with 95% interval; higher is better"
    assert shown[1].startswith("  run_a  0.")
    assert "(96 videos in 24 groups)" in shown[1]
    assert sum("Holm p" in line for line in shown) == 3
    assert any(line.startswith("Not compared: run_ \\x1b[31m<b>'d': there are no predictions") for line in shown)
    assert any("not of other trainings" in line for line in shown)
    assert all(line.isprintable() for line in shown)


def test_an_unknown_metric_is_refused_with_the_one_that_was_meant(two_runs: list[RunPaths]) -> None:
    with pytest.raises(UsageError, match="Did you mean 'roc_auc'"):
        compare(two_runs, metric="rocauc")
