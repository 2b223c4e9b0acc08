import fcntl
from pathlib import Path

import pytest

from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.runs import GONE, run_status
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.run_paths import RunPaths

TRAINING = {
    "history": [{"epoch": 1}, {"epoch": 2}], "best_epoch": 2, "threshold": 0.4, "temperature": 1.5, "steps": 12,
    "nonfinite_steps": 0, "micro_batch": 4, "seconds": 3.25,
}  # fmt: skip
OUTCOME = {
    "model": "frame_cnn", "device": "cpu", "num_train": 30, "num_validation": 10, "num_test": 10,
    "peak_rss_bytes": 5 * 10**9, "peak_device_bytes": None, "training": TRAINING, "control": None,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "e" / "run_x")


def test_a_row_says_what_the_record_says_for_the_model_and_its_control(run: RunPaths) -> None:
    write_json(run.fold_outcome(10), OUTCOME)
    write_json(run.fold_outcome(2), {**OUTCOME, "control": {**TRAINING, "best_epoch": 1}})
    run.fold_checkpoints(3).mkdir()  # not finished
    answer = queries.training_summary([run])
    assert answer.notes == ()
    assert answer.frame.select("fold", "trained", "best_epoch").rows() == [
        (2, "model", 2),
        (2, "control", 1),
        (10, "model", 2),
    ]
    row = answer.frame.row(2, named=True)
    assert {name: row[name] for name in TRAINING if name != "history"} == {
        name: value for name, value in TRAINING.items() if name != "history"
    }
    assert (row["epochs"], row["model"], row["peak_rss_bytes"], row["peak_device_bytes"]) == (
        2,
        "frame_cnn",
        5 * 10**9,
        None,
    )


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"training": []}'])
def test_a_torn_record_is_noted_and_the_others_are_read(run: RunPaths, content: bytes) -> None:
    write_json(run.fold_outcome(0), OUTCOME)
    run.fold_checkpoints(1).mkdir()
    run.fold_outcome(1).write_bytes(content)
    answer = queries.training_summary([run])
    assert answer.frame["fold"].to_list() == [0]
    assert "fold_1" in answer.notes[0]
    assert "holds no finished training" in answer.notes[0]


def say(run: RunPaths, state: str, **stages: str) -> None:
    told = {key: {"state": each, "attempts": 1} for key, each in stages.items()}
    write_json(run.status_json, {"state": state, "stages": told})


def states(run: RunPaths) -> dict[str, object]:
    status = run_status(run)
    return {"run": status.get("state"), **{key: stage["state"] for key, stage in status["stages"].items()}}


def test_a_job_that_holds_one_tasks_lock_keeps_the_run_going(run):
    say(run, "running", a="running", b="running")
    lock = run.task_lock("b")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert states(run) == {"run": "running", "a": GONE, "b": "running"}
    assert states(run)["run"] == GONE
