"""``predict --executor slurm`` on a real Slurm of two nodes: the same answers as here, whatever befell its tasks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.slurm import submitted_jobs
from fvc_lib.services.records.digests import write_document
from tests.faults.stage_moments import Point, watching
from tests.kits.scored_run import trained_run, write_video
from tests.kits.training import draw_clip

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def shown_by(folder: Path, *arguments: object, **variables: str) -> str:
    """What run_notebooks.py showed, once it has ended well."""
    environ = {**os.environ, "FVC_RUNS_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "run_notebooks.py"), *map(str, arguments)],
        cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_predict_over_two_nodes_says_to_the_byte_what_it_says_here_although_a_task_was_lost(cluster, tmp_path):
    """Of 12 readable files and a bad one, by four tasks, of which one is requeued and lost."""
    folder, stage, written = tmp_path, "30_verdicts", ("verdicts.jsonl", "verdicts.csv", "answer.txt")
    run = trained_run(tmp_path)
    write_document(run.root / "run.json", {})
    (inbox := tmp_path / "my 'inbox'").mkdir()
    for number in range(12):
        write_video(inbox / f"{number}.mp4", draw_clip(f"new {number}", 0, number % 2 == 0))
    (inbox / "bad.mp4").write_bytes(b"no video")
    site, out, mark = folder / "site.conf", folder / "out", folder / "mark"
    site.write_text("CPUS=1\nTIME=00:20:00\nSIGNAL_SECONDS=60\nSHARD_TASKS=4\nMEMORY=2500\n")
    asked = ["predict", run.root, inbox, "--pages", "0", "--error-rate", "0.3", "-j", "1"]
    variables = watching(folder, (Point("os.rename", rf"/shards/{stage}/1_of_4\.json$"),), f"hold {mark}")
    shown = shown_by(folder, *asked, "--out", out, "--executor", "slurm", FVC_SITE=str(site), **variables)
    array, last = submitted_jobs(out)
    assert f"job {last.job_id} after {array.job_id}: {stage}" in shown
    assert (array.folds, last.after) == ((0, 1, 2, 3), (array.job_id,))
    others, lost = [f"{array.job_id}_{each}" for each in (0, 2, 3)], f"{array.job_id}_1"
    cluster.wait_for(lambda: {cluster.state(each) for each in others} == {"COMPLETED"}, "the other shards")
    cluster.wait_for(lambda: mark.exists() or cluster.state(lost) == "FAILED", "the shard to begin")
    assert mark.exists(), (out / "slurm" / f"{stage}_shards.{lost}.out").read_text()
    told = shown_by(folder, "status", out)
    assert re.search(rf"{stage} shards: 3 of 4 done; \d+ of \d+ files", told)
    assert f"job {last.job_id} ({stage}): PENDING" in told
    mark.unlink()
    cluster.run("scontrol", "requeue", lost)
    cluster.wait_for(mark.exists, "the shard to begin again")
    cluster.run("scancel", "--signal=KILL", "--full", lost)
    cluster.wait_for(lambda: cluster.state(last.job_id) in {"COMPLETED", "FAILED"}, "the last job")
    logs = "\n".join(path.read_text() for path in sorted((out / "slurm").glob("*.out")))
    assert [cluster.state(each) for each in (lost, last.job_id)] == ["CANCELLED", "COMPLETED"], logs
    assert cluster.jobs()[lost]["Restarts"] == "1"
    shown_by(folder, *asked, "--out", folder / "here")
    for name in written:
        assert (out / name).read_bytes() == (folder / "here" / name).read_bytes(), name
    assert len((out / written[0]).read_text().splitlines()) == 13
    assert shown_by(folder, "status", out).splitlines()[0] == f"{out}: done"
    assert not list(out.glob("findings.*_of_4.jsonl"))
    # What shards found is found: a call here with the same folder looks at no readable file again.
    rows = [json.loads(line)["path"] for line in (out / "findings.jsonl").read_text().splitlines()]
    readable = [path for path in rows if Path(path).stem != "bad"]
    assert len(readable) == len(set(readable)) == 12
