"""What Slurm's commands answered once (22.05.8, with slurmdbd), read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fvc_lib.execution.slurm.queue import (
    SubmittedJob,
    job_states,
    parse_queue,
    submitted_jobs,
)
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths

JOBS = (
    SubmittedJob(job_id="1", name="train", stages=("train",), folds=(0, 1)),
    SubmittedJob(job_id="2", name="a_to_b", stages=("a", "b")),
    SubmittedJob(job_id="3", name="later", stages=("later",), folds=(3, 4, 5)),
    SubmittedJob(job_id="4", name="last", stages=("last",)),
)
# squeue --noheader --array --states=all --format=%i|%T|%N|%r
QUEUE = """\
2|CANCELLED|n2|None
1_0|COMPLETED|n1|None
1_1|FAILED|n1|NonZeroExitCode
4|OUT_OF_MEMORY|n2|OutOfMemory
3_3|PENDING||Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
9|RUNNING|n1|None
"""


def test_the_queue_tells_where_each_job_is_and_why_it_waits():
    states = {state.job_id: state for state in parse_queue(QUEUE, JOBS)}
    assert set(states) == {"1_0", "1_1", "2", "3_3", "4"}
    assert (states["1_1"].task, states["1_1"].reason, states["1_1"].ended) == ("train_fold_1", "NonZeroExitCode", True)
    assert (states["2"].task, states["2"].nodes, states["2"].reason) == ("a,b", "n2", "")
    waiting = states["3_3"]
    assert (waiting.state, waiting.nodes, waiting.ended) == ("PENDING", "", False)
    assert waiting.reason.startswith("Nodes required for job are DOWN, DRAINED or reserved")
    assert str(states["1_1"]) == "job 1_1 (train): FAILED on n1 (NonZeroExitCode)"


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error\n", "|||\n", "1_0\n", "1_0|\n"])
def test_what_is_no_answer_tells_nothing(text):
    assert parse_queue(text, JOBS) == []


def test_a_run_that_was_never_submitted_has_no_jobs(tmp_path):
    run = RunPaths(tmp_path)
    assert (submitted_jobs(run), job_states(run)) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_slurm_commands_only_the_runs_own_files_tell(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunPaths(tmp_path)
    run.slurm.mkdir()
    document = {"jobs": [job.model_dump(mode="json") for job in JOBS]}
    (run.slurm / "submitted.json").write_text(json.dumps(document))
    assert submitted_jobs(run) == list(JOBS)
    assert job_states(run) == []


def test_a_damaged_list_of_jobs_is_named(tmp_path: Path):
    run = RunPaths(tmp_path)
    run.slurm.mkdir()
    (run.slurm / "submitted.json").write_text('{"jobs": [{')
    with pytest.raises(DataError, match=r"submitted\.json"):
        submitted_jobs(run)
