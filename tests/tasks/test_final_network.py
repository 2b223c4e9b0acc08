"""The network of all groups: what trains and chooses it, that it says of files what it says, and what it is worth."""

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.command_line.models import load_detector
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import FINAL_VALIDATION, INDEX, PREDICTIONS, read_table, write_table
from fvc_lib.services.tasks import FINAL_TRAINING
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.predicting import Standing, predictor_of
from fvc_lib.tasks.video.controls import rows_to_train_on
from fvc_lib.tasks.video.predicting import held_back, write_features
from fvc_lib.tasks.video.training import read_fold, train_fold
from fvc_lib.tasks.video.verdicts.evidence import NO_NETWORK, file_evidence
from fvc_lib.tasks.video.verdicts.judging import judge_files
from fvc_lib.tasks.video.verdicts.rule import TAKEN_OVER, WORTH, rule_of
from tests.kits.scored_run import NUM_VIDEOS, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])


def train(run: RunPaths, config: RunConfig):
    with MetricLog(run.metrics(FINAL_TRAINING), run_id="run", fold=None, attempt=1) as log:
        return train_fold(run, config, metric_log=log)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("final")


@pytest.fixture(scope="module")
def without(scored_run, home) -> RunPaths:
    """A run that has its folds alone; not to be used after ``run``."""
    run = RunPaths(shutil.copytree(scored_run.root, home / "runs" / scored_run.run_id))
    with pytest.raises(UsageError, match=r"the network of all groups is not finished.*train_final true"):
        load_detector(run.root, final=True)
    return run


@pytest.fixture(scope="module")
def run(without) -> RunPaths:
    train(without, run_config(without.params_yaml))
    write_features(without, final=True)
    return without


@pytest.fixture(scope="module")
def bundle(run, home) -> Path:
    write_bundle(predictor_of(run, STANDING, final=True), home / "bundle", "---\n---\n")
    return home / "bundle"


def test_all_groups_train_it_or_choose_for_it_and_nothing_tests_it(run):
    config = run_config(run.params_yaml)
    outcome = train(run, config)
    assert outcome.train_anew  # a finished one is not trained again
    with_control = config.model_copy(update={"shuffled_label_control": True})
    assert [len(read_fold(run, with_control, fold)[1]) for fold in (0, None)] == [2, 1]
    assert outcome.num_train + outcome.num_validation == NUM_VIDEOS
    assert (outcome.num_test, outcome.control, outcome.sources) == (0, None, None)
    chose = read_table(run.final_validation, FINAL_VALIDATION)
    assert chose.height == outcome.num_validation
    assert set(chose["label"]) == {"real", "fake"}
    assert chose["temperature"].unique().to_list() == [outcome.training.temperature]
    assert (run.root / "checkpoints" / "04b_final_training" / "best_model.safetensors").is_file()
    for fold in (0, 1):  # and no fold's number has changed its meaning
        assert read_table(run.predictions(fold), PREDICTIONS)["fold"].unique().to_list() == [fold]


def test_videos_of_any_training_of_a_protocol_take_part(run):
    parts = [("a", 0, "train"), ("a", 1, "left_out"), ("b", 0, "test"), ("b", 1, "train"), ("c", 0, "left_out")]
    rows = [(f"video{v}{'x' * 8}", v, "real" if v == "a" else "fake", fold, part) for v, fold, part in parts]
    table = pl.DataFrame(rows, schema=["video_id", "group_id", "label", "fold", "part"], orient="row")
    rows = rows_to_train_on(table, run_config(run.params_yaml).model_copy(update={"protocol": "official"}), None)
    assert rows.folds["group_id"].to_list() == ["a", "b"]


def test_run_and_bundle_judge_new_files_by_it_alone_and_its_own_videos_by_their_stored_scores(
    run, bundle, scored_run, tmp_path
):
    new = tmp_path / "new.mp4"
    write_video(new, draw_clip("unknown", 0, fake=True))
    own = read_table(run.index, INDEX).row(3, named=True)
    asked = [new, scored_run.root.parents[2] / "corpus" / own["path"]]
    by_folds, by_run, by_bundle = (load_detector(each, final=each is not bundle and final) for each, final in
                                   ((run.root, False), (run.root, True), (bundle, True)))  # fmt: skip
    rule, detectors = rule_of(0.3, prior=0.01), {"run": by_run, "bundle": by_bundle, "folds": by_folds}
    judged = {name: judge_files(each, asked, rule, tmp_path / name, workers=1) for name, each in detectors.items()}
    same = ["path", "sha256", "score", "score_low", "probability", "verdict", "model_id"]
    assert judged["run"].table.select(same).equals(judged["bundle"].table.select(same))
    assert judged["run"].table["score_low"].to_list() == [None, None]
    scores = {name: judged[name].table["score"] for name in ("run", "folds")}
    assert scores["run"][0] != scores["folds"][0]
    assert scores["run"][1] == scores["folds"][1]
    assert {Path(found.path) for found in by_run.findings(asked, workers=1) if found.is_known} == {asked[1]}
    assert judged["run"].limits == judged["bundle"].limits
    assert [{WORTH, TAKEN_OVER} & set(judged[name].limits) for name in ("run", "folds")] == [{WORTH, TAKEN_OVER}, set()]
    # Of a run's own video the network that had not seen it is asked for evidence; a bundle has it no more.
    row = judged["run"].table.row(1, named=True)
    shown = [file_evidence(each.networks, each.known, row) for each in (by_run, by_bundle)]
    assert shown[0].windows is not None
    assert (shown[1].windows, shown[1].note) == (None, NO_NETWORK)


def test_its_log_odds_are_never_larger_in_the_median_than_the_out_of_fold_ones_of_the_same_videos(run, tmp_path):
    chose = read_table(run.final_validation, FINAL_VALIDATION)
    stored = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in (0, 1)])
    theirs = chose.join(stored, on="video_id", suffix="_fold")
    size = (theirs["logit_fold"] / theirs["temperature_fold"]).abs().median()
    other = RunPaths(tmp_path)
    shutil.copytree(run.tables, other.tables)
    for factor, wanted in ((3.0, 3.0), (0.5, 1.0)):
        logits = np.where(chose["label"] == "fake", 1, -1) * size * factor
        table = chose.with_columns(logit=pl.Series(logits), temperature=pl.lit(1.0))
        write_table(table, FINAL_VALIDATION, other.final_validation)
        assert held_back(other, (0, 1)) == pytest.approx(wanted)
    strange = chose.with_columns(video_id=pl.format("other_{}", "video_id"))
    write_table(strange, FINAL_VALIDATION, other.final_validation)
    with pytest.raises(UsageError, match=r"none of the videos that chose the epoch .* is tested by a fold"):
        held_back(other, (0, 1))


def test_a_bundle_of_folds_cannot_be_asked_for_it(run, tmp_path):
    write_bundle(predictor_of(run, STANDING), tmp_path / "bundle", "---\n---\n")
    with pytest.raises(UsageError, match="no network of all groups"):
        load_detector(tmp_path / "bundle", final=True)
