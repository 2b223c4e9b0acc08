"""What Slurm's commands answered once (22.05.8, with slurmdbd), read back."""

from pathlib import Path

import pytest

from fvc_lib.execution.slurm import job_states, submitted_jobs
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.errors import DataError

# squeue --noheader --array --states=all --format=%i|%j|%T|%N|%r
QUEUE = """\
1_1|train|FAILED|n1|NonZeroExitCode
3_3|later|PENDING||Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
"""


def test_the_queue_tells_where_each_job_is_and_why_it_waits(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    write_json(tmp_path / "slurm/submitted.json", {"jobs": [{"job_id": "1", "name": "train", "stages": ["train"]}]})
    squeue.write_text(f"#!/bin/sh\ncat <<'EOF'\n{QUEUE}EOF\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    failed, waiting = job_states(tmp_path)
    assert (failed.job_id, failed.name, failed.nodes, failed.reason) == ("1_1", "train", "n1", "NonZeroExitCode")
    assert (failed.ended, waiting.ended, waiting.state) == (True, False, "PENDING")
    assert waiting.reason.startswith("Nodes required for job are DOWN, DRAINED or reserved")


def test_a_damaged_list_of_jobs_is_named(tmp_path: Path):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/submitted.json").write_text('{"jobs": [{')
    with pytest.raises(DataError, match=r"submitted\.json"):
        submitted_jobs(tmp_path)
