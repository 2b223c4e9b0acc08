"""What Slurm's commands answered once (22.05.8, with slurmdbd), read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fvc_lib.execution.slurm.queue import (
    SubmittedJob,
    job_states,
    parse_accounting,
    parse_queue,
    read_accounting,
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
# sacct --parsable2 --noheader --noconvert --format=JobID,State,MaxRSS,ElapsedRaw
ACCOUNTING = """\
2|CANCELLED by 0||9
2.batch|CANCELLED|3833856|10
2.0|COMPLETED|110592|2
4|OUT_OF_MEMORY||1
4.batch|OUT_OF_MEMORY|0|1
1_0|COMPLETED||4
1_0.batch|COMPLETED|216862720|4
1_1|FAILED||4
1_1.batch|FAILED|216870912|4
3_[3-5]|PENDING||0
"""
# squeue --noheader --array --states=all --format=%i|%T|%N|%r
QUEUE = """\
2|CANCELLED|n2|None
1_0|COMPLETED|n1|None
1_1|FAILED|n1|NonZeroExitCode
4|OUT_OF_MEMORY|n2|OutOfMemory
3_3|PENDING||Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
9|RUNNING|n1|None
"""


def test_the_accounting_tells_of_each_job_its_state_its_largest_step_and_how_long_it_took():
    jobs = {job.job_id: job for job in parse_accounting(ACCOUNTING, JOBS)}
    assert set(jobs) == {"1_0", "1_1", "2", "4"}
    assert vars(jobs["1_1"]) == {
        "job_id": "1_1", "task": "train_fold_1", "state": "FAILED", "max_rss_bytes": 216870912, "elapsed_seconds": 4.0
    }  # fmt: skip
    assert (jobs["2"].task, jobs["2"].state, jobs["2"].max_rss_bytes) == ("a,b", "CANCELLED", 3833856)


def test_a_job_that_was_never_sampled_has_no_peak():
    (job,) = (job for job in parse_accounting(ACCOUNTING, JOBS) if job.job_id == "4")
    assert (job.state, job.max_rss_bytes) == ("OUT_OF_MEMORY", None)


def test_sizes_with_letters_are_powers_of_1024():
    text = "4|COMPLETED||1\n4.batch|COMPLETED|211780K|1\n4.0|COMPLETED|1.50G|1\n4.extern|COMPLETED||1\n"
    (job,) = parse_accounting(text, JOBS)
    assert job.max_rss_bytes == 1610612736


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
    assert parse_accounting(text, JOBS) == []


def test_a_run_that_was_never_submitted_has_no_jobs(tmp_path):
    run = RunPaths(tmp_path)
    assert (submitted_jobs(run), job_states(run), read_accounting(run)) == ([], [], [])
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_slurm_commands_only_the_runs_own_files_tell(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunPaths(tmp_path)
    run.slurm.mkdir()
    document = {"jobs": [job.model_dump(mode="json") for job in JOBS]}
    (run.slurm / "submitted.json").write_text(json.dumps(document))
    assert submitted_jobs(run) == list(JOBS)
    assert (job_states(run), read_accounting(run)) == ([], [])


def test_a_damaged_list_of_jobs_is_named(tmp_path: Path):
    run = RunPaths(tmp_path)
    run.slurm.mkdir()
    (run.slurm / "submitted.json").write_text('{"jobs": [{')
    with pytest.raises(DataError, match=r"submitted\.json"):
        submitted_jobs(run)
