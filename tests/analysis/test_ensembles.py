"""Several runs as one detector: who may be a member, what the mean is, and what is claimed of it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.special import expit

from fvc_lib.analysis.read import comparison, detector_comparison
from fvc_lib.analysis.read.headline import measured_scores, run_headline, run_verdict
from fvc_lib.analysis.read.runs import ensemble_text
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.records.ensembles import EnsembleRecord, members_of, read_ensemble
from fvc_lib.services.run_paths import ENSEMBLE_RECORD, RunPaths, find_run_or_ensemble
from fvc_lib.services.tables import read_table, write_table
from fvc_lib.tasks.video import ensembles
from tests.analysis.conftest import change_predictions, detector_runs


def runs_in(folder: Path, written_run: Callable[[int, float], RunPaths]) -> list[RunPaths]:
    """A detector of two seeds, and another one; all were judged by labels shuffled alike."""
    made = detector_runs(folder, written_run, 3)
    for fold in range(5):
        labels = read_table(made[0].predictions(fold), tables.PREDICTIONS)["control_label"]
        for run in made[1:]:
            table = read_table(run.predictions(fold), tables.PREDICTIONS)
            write_table(table.with_columns(labels), tables.PREDICTIONS, run.predictions(fold))
    return made


@pytest.fixture
def runs(tmp_path: Path, written_run: Callable[[int, float], RunPaths]) -> list[RunPaths]:
    return runs_in(tmp_path / "runs", written_run)


def members(found: comparison.Members) -> list[ensembles.Member]:
    return [ensembles.Member(each.run, each.config, each.predictions, place) for each, place in found]


def made_of(runs: list[RunPaths], folder: Path) -> tuple[RunPaths, EnsembleRecord, pl.DataFrame]:
    """What notebook 11 does."""
    found, made = comparison.read_members(runs), RunPaths(folder)
    of = members(found)
    config = found.runs[0].config.model_copy(update={"bootstrap_replicates": 100, "confidence": 0.95})
    predictions = ensembles.combined(of)
    _, _, record = ensembles.write_ensemble(made, of, found.names, predictions, config)
    return made, record, predictions


@dataclass(frozen=True)
class Ensemble:
    runs: list[RunPaths]
    folder: RunPaths
    record: EnsembleRecord
    predictions: pl.DataFrame


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory, written_run: Callable[[int, float], RunPaths]) -> Ensemble:
    """One for all tests, which leave it as it is."""
    runs = runs_in(tmp_path_factory.mktemp("ensemble"), written_run)
    return Ensemble(runs, *made_of(runs, runs[0].root.parent / "ensemble_mean_1"))


def test_seeds_are_averaged_first_and_then_the_detectors(ensemble):
    record, predictions = ensemble.record, ensemble.predictions
    found = comparison.read_members(ensemble.runs)
    scores = [each.predictions["score"].to_numpy() for each, _ in found]
    expected = (0.5 * (scores[0] + scores[1]) + scores[2]) / 2
    np.testing.assert_allclose(predictions["score"], expected, atol=1e-12)
    np.testing.assert_allclose(expit(predictions["logit"].to_numpy()), expected, atol=1e-12)
    assert record.detectors == ["frame_cnn", "r2plus1d_small"]
    assert [record.weight_of_member(place) for place in range(3)] == [0.25, 0.25, 0.5]
    controls = [each.predictions["control_score"].to_numpy() for each, _ in found]
    np.testing.assert_allclose(predictions["control_score"], ((controls[0] + controls[1]) / 2 + controls[2]) / 2)


def test_the_record_names_members_and_files_and_a_change_of_any_is_found(ensemble, tmp_path):
    record, above = ensemble.record, Path(shutil.copytree(ensemble.folder.root.parents[1], tmp_path / "copied"))
    folder = RunPaths(above / "demo" / "ensemble_mean_1")
    runs = [RunPaths(above / "demo" / run.run_id) for run in ensemble.runs]
    assert read_ensemble(folder.root) == record
    assert members_of(folder.root, record) == [run.root.resolve() for run in runs]
    assert {"kfold_results.feather", "tables/index.parquet", "tables/predictions_fold_0.parquet"} <= set(record.files)
    assert find_run_or_ensemble(above, "ensemble_mean").root == folder.root
    assert find_run_or_ensemble(above, "run_b0") == runs[2]
    with pytest.raises(UsageError, match="ensemble_mean_1"):
        find_run_or_ensemble(above, "ensemble_other")
    runs[1].root.rename(runs[1].root.with_name("elsewhere"))
    with pytest.raises(DataError, match="its member run_a1 is not at"):
        members_of(folder.root, record)
    table = folder.predictions(3)
    table.write_bytes(table.read_bytes() + b" ")
    with pytest.raises(DataError, match="predictions_fold_3"):
        read_ensemble(folder.root)
    (folder.root / ENSEMBLE_RECORD).write_text(
        (folder.root / ENSEMBLE_RECORD).read_text().replace('"mean"', '"median"')
    )
    with pytest.raises(DataError, match="damaged"):
        read_ensemble(folder.root)


def test_the_difference_from_the_best_member_is_paired_and_claims_no_more_than_controls_allow(ensemble):
    folder, found = ensemble.folder, comparison.read_members(ensemble.runs)
    headline = run_headline(folder)
    assert headline.model == "mean of frame_cnn + r2plus1d_small"
    above = replace(headline, verdict=replace(headline.verdict, standing="above control"))
    compared = comparison.against_members(folder, found, above, replicates=300)
    values = {name: interval.value for name, interval in compared.values.items()}
    assert next(iter(values)) == comparison.ENSEMBLE
    assert list(values.values())[1:] == sorted(list(values.values())[1:], reverse=True)
    best = compared.pairs[0]
    assert best.second == comparison.ENSEMBLE
    assert best.difference.value == pytest.approx(values[comparison.ENSEMBLE] - values[best.first])
    assert any(pair.is_shown for pair in compared.pairs)
    below = replace(headline, verdict=replace(headline.verdict, standing="not shown", sentence="Why not."))
    pairs = comparison.against_members(folder, found, below, replicates=300).pairs
    assert not any(pair.is_shown for pair in pairs if pair.difference.value > 0)
    assert any(pair.finding.endswith("That claims nothing of fakes: Why not.") for pair in pairs)


@pytest.mark.slow
def test_a_comparison_lists_an_ensemble_beside_its_runs_with_the_costs_of_all_its_networks(ensemble):
    above = ensemble.folder.root.parents[1]
    listed = comparison.runs_to_compare([], above)
    assert listed == [*ensemble.runs, ensemble.folder]
    found = detector_comparison.compare_detectors(
        *comparison.comparable_runs(listed),
        replicates=50,
        measure_costs=lambda parts: [{"num_parameters": 10 + len(part.model)} for part in parts],
    )
    assert found.left_out == ()
    whole = ensemble_text(ensemble.folder)
    assert list(found.runs) == ["frame_cnn", "r2plus1d_small", whole]
    assert [cost["num_parameters"] for cost in found.costs.values()] == [19, 24, 19 + 19 + 24]
    assert {part.model for part in found.runs[whole][0].parts} == {"frame_cnn", "r2plus1d_small"}
    stored = read_table(ensemble.folder.results, tables.RESULTS)
    value = stored.filter(source="model", scope="all", metric="roc_auc")["value"][0]
    assert found.metrics["roc_auc"].values[whole].value == pytest.approx(value)
    assert found.runs[whole][-1].name == "ensemble_mean_1"


@pytest.mark.slow
def test_a_control_that_one_member_lacks_is_missing_and_nothing_is_claimed(ensemble):
    first, second, third = members(comparison.read_members(ensemble.runs))
    none = {"control_score": pl.lit(None, pl.Float64), "control_label": pl.lit(None, pl.String)}
    lacking = [first, replace(second, predictions=second.predictions.with_columns(**none)), third]
    predictions = ensembles.combined(lacking)
    assert predictions["control_score"].null_count() == predictions.height
    measured = measured_scores(ensemble.folder)
    others = tuple(score for score in measured.scores if score.source != "shuffled_labels")
    verdict = run_verdict(ensemble.folder, replace(measured, scores=others))
    assert verdict.standing != "above control"
    assert "Missing: model on shuffled labels" in verdict.sentence
    assert "--resume RUN" in verdict.sentence, "each of its runs needs one, not the ensemble"


@pytest.mark.slow
def test_of_several_shuffles_the_one_that_scores_highest_is_the_control(ensemble):
    of = members(comparison.read_members(ensemble.runs))
    labels = np.array(["real", "fake"])[np.arange(of[2].predictions.height) // 4 % 2]  # the true ones
    telling = of[2].predictions.with_columns(
        control_label=pl.Series(labels), control_score=pl.Series((labels == "fake") * 0.8 + 0.1)
    )
    found = ensembles.combined([*of[:2], replace(of[2], predictions=telling)])
    assert found["control_score"].equals(telling["control_score"])
    assert found["control_label"].equals(telling["control_label"])


@pytest.mark.slow
def test_a_run_on_other_data_or_with_another_operating_point_is_refused(runs):
    asked = runs[1].params_yaml.read_text()
    write_text(runs[1].params_yaml, asked.replace("operating_point: best", "operating_point: fpr=0.1"))
    with pytest.raises(DataError, match=r"kfold best, kfold fpr=0\.1"):
        comparison.read_members(runs)
    alone = pl.when(pl.col("video_id") == f"{5:016x}").then(pl.lit("alone")).otherwise("group_id")
    change_predictions(runs[1], lambda frame: frame.with_columns(group_id=alone))
    with pytest.raises(DataError, match=r"run_a1.*1 video differ"):
        comparison.read_members(runs)


@pytest.mark.slow
def test_one_run_the_same_training_twice_or_an_ensemble_is_no_member(runs, ensemble):
    for few in (runs[:1], [runs[0], runs[0]]):
        with pytest.raises(UsageError, match="two or more"):
            comparison.read_members(few)
    with pytest.raises(DataError, match="run_b0: a newer run has its parameters and seed"):
        comparison.read_members([*runs, RunPaths(shutil.copytree(runs[2].root, runs[2].root.with_name("run_b9")))])
    with pytest.raises(UsageError, match="is an ensemble itself"):
        comparison.read_members([*runs, ensemble.folder])
