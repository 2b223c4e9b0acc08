"""Every tested video as a table, in a file and in the report, and the results as CSV."""

from collections.abc import Callable

import polars as pl
import pytest

from fvc_lib.analysis.read.queries import predictions_of_other_seeds
from fvc_lib.analysis.read.scores import score_table, write_results
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table, write_table
from tests.analysis.conftest import predictions_of

MakeRun = Callable[..., RunPaths]


@pytest.fixture
def scores(run: RunPaths) -> pl.DataFrame:
    return score_table(read_table(run.index, tables.INDEX), predictions_of(run))


def test_mistakes_come_first_and_the_surest_before_the_others(run: RunPaths, scores: pl.DataFrame) -> None:
    assert scores["is_right"].to_list() == sorted(scores["is_right"])
    assert 0 < scores["is_right"].sum() < scores.height == predictions_of(run).height
    for part in scores.partition_by("is_right"):
        far = (part["score"] - part["threshold"]).abs().to_list()
        assert far == sorted(far, reverse=True)
    assert (scores["num_seeds"].unique().to_list(), scores["score_std"].null_count()) == ([1], scores.height)
    write_table(scores, tables.SCORES, run.scores)
    again = read_table(run.scores, tables.SCORES)
    assert again["video_id"].equals(scores["video_id"])


def test_the_spread_is_over_runs_that_differ_in_the_seed_alone(make_run: MakeRun) -> None:
    run, same, other = (make_run(name=f"run_{name}") for name in "abc")
    for each, config in ((run, RunConfig()), (same, RunConfig(seed=1)), (other, RunConfig(seed=2, epochs=3))):
        write_text(each.params_yaml, config.to_yaml())
    (found,) = predictions_of_other_seeds(run)
    write_text(other.params_yaml, RunConfig(seed=1).to_yaml())
    assert len(predictions_of_other_seeds(run)) == 1, "a seed counts once"
    shifted = found.with_columns(score=(pl.col("score") - 0.1).clip(0, 1))
    table = score_table(read_table(run.index, tables.INDEX), predictions_of(run), [shifted])
    mid = table.filter(pl.col("score").is_between(0.1, 1))
    assert mid["num_seeds"].unique().to_list() == [2]
    assert mid["score_std"].to_list() == pytest.approx([0.1 / 2**0.5] * mid.height)


def test_what_a_trial_writes_for_other_programs_says_so(run: RunPaths, scores: pl.DataFrame) -> None:
    results, trial = read_table(run.results, tables.RESULTS), "trial on 20 groups"
    write_results(run.results_csv, results)
    assert scores["trial"].null_count() == scores.height
    assert pl.read_csv(run.results_csv)["trial"].null_count() == results.height
    write_results(run.results_csv, results, trial)
    of_trial = score_table(read_table(run.index, tables.INDEX), predictions_of(run), trial=trial)
    assert set(of_trial["trial"]) == set(pl.read_csv(run.results_csv)["trial"]) == {trial}
