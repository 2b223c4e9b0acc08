"""Row 28, with real weights: what a fork may do with the checkpoints of its ancestor."""

import json
import shutil

import polars as pl
import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan import begin_training_state
from fvc_lib.execution.run.status import RunStatus
from fvc_lib.execution.stages import Task, read_notebook, stage_named
from fvc_lib.services.checkpoint_files import CheckpointMismatchError
from fvc_lib.services.tables import FOLDS, PREDICTIONS, read_table, write_table
from tests.faults.conftest import STAGE, elsewhere, train


@pytest.mark.fault(28)
def test_a_fork_chooses_another_operating_point_of_the_trained_network_and_refuses_other_trainings(tiny):
    task, notebook = Task(stage_named(STAGE), 0), read_notebook(CHECKOUT / "notebooks" / f"{STAGE}.ipynb")
    begin_training_state(tiny.paths, task, notebook, tiny.config)
    train(tiny)
    before = {path: path.read_bytes() for path in tiny.paths.root.rglob("*") if path.is_file()}
    paths = elsewhere(tiny, tiny.paths.root.parent / "run_1")
    RunStatus(run_id=paths.run_id, started_utc="2026-01-01T00:00:00Z").write(paths)
    trained, log = paths.training_checkpoints(STAGE, 0), paths.metrics(STAGE, 0)
    shutil.copytree(tiny.paths.training_checkpoints(STAGE, 0), trained)
    (trained / "outcome.json").unlink()
    log.parent.mkdir(exist_ok=True)
    shutil.copyfile(tiny.paths.metrics(STAGE, 0), log)
    begin_training_state(paths, task, notebook, tiny.config)

    outcome = train(tiny.with_config(operating_point="cost=9:1"), paths, 2)
    assert outcome.training.selection.operating_point == "cost=9:1"
    assert [record.epoch for record in outcome.training.history] == [1, 2]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert {row["attempt"] for row in rows if (row["phase"], row["metric"]) == ("train", "loss")} == {1}
    first, second = (read_table(run.predictions(0), PREDICTIONS) for run in (tiny.paths, paths))
    assert first["score"].equals(second["score"])
    assert {path: path.read_bytes() for path in tiny.paths.root.rglob("*") if path.is_file()} == before

    (trained / "outcome.json").unlink()
    with pytest.raises(CheckpointMismatchError, match="epochs: 2 -> 3"):
        train(tiny.with_config(epochs=3), paths, 3)
    folds = read_table(paths.folds, FOLDS)
    write_table(folds.with_columns((pl.col("fold") + 1) % 3), FOLDS, paths.folds)
    with pytest.raises(CheckpointMismatchError, match="training data"):
        train(tiny, paths, 3)
