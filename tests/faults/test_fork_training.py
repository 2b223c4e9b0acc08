"""Row 28, with real weights: a fork's fold goes on from its ancestor's checkpoint, or anew where the data differ."""

from __future__ import annotations

import json
import logging

import polars as pl
import pytest

from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.execution.plan.fingerprint import begin_training_state
from fvc_lib.execution.plan.stages import Task, stage_named
from fvc_lib.execution.run.status import RunStatus
from fvc_lib.execution.run.which_run import Inheritance, take_over
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import FOLDS, read_table, write_table
from fvc_lib.tasks.recipe import TrainingOutcome
from fvc_lib.tasks.video.training import TrainingSummary, train_fold, training_parameters
from tests.faults.conftest import STAGE, elsewhere
from tests.kits.training import TinyTraining

TASK = Task(stage_named(STAGE), 0)


@pytest.fixture
def ancestor(tiny: TinyTraining) -> TinyTraining:
    """Fold 0, finished after two epochs."""
    begin_training_state(tiny.paths, TASK, tiny.config)
    RunStatus(run_id=tiny.paths.run_id, started_utc="2026-01-01T00:00:00Z").write(tiny.paths)
    train(tiny.paths, tiny, 1)
    return tiny


def train(paths: RunPaths, tiny: TinyTraining, attempt: int) -> TrainingOutcome[TrainingSummary]:
    with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=attempt) as log:
        return train_fold(paths, tiny.config, 0, metric_log=log, attempt=attempt)


def fork(ancestor: TinyTraining, root: str) -> RunPaths:
    """A run folder with the ancestor's tables that carries its fold 0."""
    paths = elsewhere(ancestor, ancestor.paths.root.parent / root)
    RunStatus(run_id=paths.run_id, started_utc="2026-01-01T00:00:00Z").write(paths)
    taken = Inheritance(kept=(), carried=(TASK,), anew=())
    take_over(ancestor.paths, paths, taken, lambda task: training_parameters(ancestor.config, task.fold))
    begin_training_state(paths, TASK, ancestor.config)
    return paths


def steps_by_attempt(paths: RunPaths) -> dict[int, list[int]]:
    """The steps of the model's training that each attempt logged."""
    steps: dict[int, list[int]] = {}
    for line in paths.metrics(STAGE, 0).read_text().splitlines():
        row = json.loads(line)
        if (row["phase"], row["metric"]) == ("train", "loss"):
            steps.setdefault(row["attempt"], []).append(row["step"])
    return steps


@pytest.mark.fault(28)
def test_more_epochs_go_on_where_the_ancestor_ended_and_its_curves_stay_whole(ancestor):
    before = {path: path.read_bytes() for path in ancestor.paths.root.rglob("*") if path.is_file()}
    paths = fork(ancestor, "run_1")
    outcome = train(paths, ancestor.with_config(epochs=3), 2)
    assert [record.epoch for record in outcome.training.history] == [1, 2, 3]
    steps = steps_by_attempt(paths)
    assert steps[2][0] == steps[1][-1] + 1
    assert len(steps[2]) == len(steps[1]) // 2
    curve = learning_curves([paths], metrics=["loss"], phases=["train"]).frame["step"].to_list()
    assert curve == [*steps[1], *steps[2]]
    assert paths.predictions(0).is_file()
    assert {path: path.read_bytes() for path in ancestor.paths.root.rglob("*") if path.is_file()} == before


@pytest.mark.fault(28)
def test_weights_that_have_seen_what_is_tested_now_are_not_used_and_it_is_said(ancestor, caplog):
    paths = fork(ancestor, "run_2")
    folds = read_table(paths.folds, FOLDS)
    write_table(folds.with_columns((pl.col("fold") + 1) % 3), FOLDS, paths.folds)
    with caplog.at_level(logging.WARNING):
        train(paths, ancestor.with_config(epochs=1), 2)
    assert f"of {ancestor.paths.run_id} was trained on other videos: this training begins anew" in caplog.text
    steps = steps_by_attempt(paths)
    assert steps[2][0] == steps[1][0]
