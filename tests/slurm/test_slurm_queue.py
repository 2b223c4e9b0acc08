"""What Slurm's commands answered once (22.05.8, with slurmdbd), read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fvc_lib.execution.slurm import (
    SlurmJob,
    job_states,
    parse_queue,
    submitted_jobs,
)
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths

JOBS = (
    SlurmJob(job_id="1", name="train", stages=("train",), folds=(0, 1)),
    SlurmJob(job_id="2", name="a_to_b", stages=("a", "b")),
    SlurmJob(job_id="3", name="later", stages=("later",), folds=(3, 4, 5)),
    SlurmJob(job_id="4", name="last", stages=("last",)),
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


def test_a_run_that_was_never_submitted_has_no_jobs(tmp_path):
    run = RunPaths(tmp_path)
    assert (submitted_jobs(run), job_states(run)) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_list_of_jobs_is_named(tmp_path: Path):
    run = RunPaths(tmp_path)
    run.slurm.mkdir()
    (run.slurm / "submitted.json").write_text('{"jobs": [{')
    with pytest.raises(DataError, match=r"submitted\.json"):
        submitted_jobs(run)
