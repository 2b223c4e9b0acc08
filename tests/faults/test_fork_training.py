"""Row 28, with real weights: what a fork may do with the checkpoints of its ancestor."""

from __future__ import annotations

import json
import shutil

import polars as pl
import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan import begin_training_state
from fvc_lib.execution.run.status import RunStatus
from fvc_lib.execution.stages import Task, read_notebook, stage_named
from fvc_lib.services.checkpoint_files import CheckpointMismatchError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import FOLDS, PREDICTIONS, read_table, write_table
from fvc_lib.tasks.shared_training import TrainingOutcome
from fvc_lib.tasks.video.training import TrainingSummary, train_fold
from tests.faults.conftest import STAGE, elsewhere
from tests.kits.training import TinyTraining

TASK = Task(stage_named(STAGE), 0)
NOTEBOOK = read_notebook(CHECKOUT / "notebooks" / f"{STAGE}.ipynb")


@pytest.fixture
def ancestor(tiny: TinyTraining) -> TinyTraining:
    """Fold 0, finished after two epochs."""
    begin_training_state(tiny.paths, TASK, NOTEBOOK, tiny.config)
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
    shutil.copytree(ancestor.paths.training_checkpoints(STAGE, 0), paths.training_checkpoints(STAGE, 0))
    paths.training_checkpoints(STAGE, 0).joinpath("outcome.json").unlink()
    paths.metrics(STAGE, 0).parent.mkdir(exist_ok=True)
    shutil.copyfile(ancestor.paths.metrics(STAGE, 0), paths.metrics(STAGE, 0))
    begin_training_state(paths, TASK, NOTEBOOK, ancestor.config)
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
def test_another_operating_point_is_chosen_of_the_network_that_was_trained(ancestor):
    before = {path: path.read_bytes() for path in ancestor.paths.root.rglob("*") if path.is_file()}
    paths = fork(ancestor, "run_1")
    changed = ancestor.with_config(operating_point="cost=9:1")
    outcome = train(paths, changed, 2)
    assert outcome.training.selection.operating_point == "cost=9:1"
    assert [record.epoch for record in outcome.training.history] == [1, 2]
    assert set(steps_by_attempt(paths)) == {1}
    first, second = (read_table(run.predictions(0), PREDICTIONS) for run in (ancestor.paths, paths))
    assert first["score"].equals(second["score"])
    assert {path: path.read_bytes() for path in ancestor.paths.root.rglob("*") if path.is_file()} == before


@pytest.mark.fault(28)
def test_weights_that_were_trained_otherwise_or_have_seen_what_is_tested_now_are_refused(ancestor):
    paths = fork(ancestor, "run_2")
    with pytest.raises(CheckpointMismatchError, match="epochs: 2 -> 3"):
        train(paths, ancestor.with_config(epochs=3), 2)
    folds = read_table(paths.folds, FOLDS)
    write_table(folds.with_columns((pl.col("fold") + 1) % 3), FOLDS, paths.folds)
    with pytest.raises(CheckpointMismatchError, match="training data"):
        train(paths, ancestor, 2)
