"""FVC's own notebooks as jobs of a real Slurm, from the command line to the report; each fold on two ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.slurm import submitted_jobs
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import PREDICTIONS, read_table
from tests.faults.stage_moments import Point, watching
from tests.slurm.project import log_of

pytestmark = [pytest.mark.slurm, pytest.mark.long]
SMALL = {
    "model": "efficientnet_lite0", "num_folds": 2, "fixed_size": 32, "num_frames": 4, "epochs": 4,
    "early_stopping_epochs": 0,
    "augmentations_per_video": 0, "bootstrap_replicates": 100, "inner_validation_share": 0.34,
    "shuffled_label_control": False, "device": "cpu", "memory_preflight": False,
}  # fmt: skip


@pytest.fixture
def corpus(tmp_path, make_video) -> Path:
    folder = tmp_path / "some 'videos'"
    for seed in range(16):
        make_video(folder / ("real" if seed % 2 else "fake") / f"{seed}.mp4", seed)
    return folder


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """run_notebooks.py, from a folder of its own."""
    folder.mkdir(exist_ok=True)
    environ = {**os.environ, "FVC_RUNS_DIR": str(folder / "runs"), "FVC_CACHE_DIR": str(folder / "cache"), **variables}
    return subprocess.Popen(
        [sys.executable, str(CHECKOUT / "run_notebooks.py"), *arguments],
        cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def shown_by(process: subprocess.Popen[str]) -> str:
    """What it showed, once it has ended well."""
    shown, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, shown
    return shown


def parameters(corpus: Path, **values: object) -> list[str]:
    given = {**SMALL, "corpus": corpus, **values}
    return [word for name, value in given.items() for word in ("-p", name, str(value))]


def scores(run: RunPaths) -> pl.DataFrame:
    return pl.concat(read_table(run.predictions(fold), PREDICTIONS) for fold in range(2)).sort("video_id")


def test_a_run_from_the_command_line_scores_as_one_that_ran_here_although_a_fold_was_requeued_on_the_way(
    cluster, corpus, tmp_path
):
    site = tmp_path / "site.conf"
    site.write_text("CPUS=1\nTIME=00:20:00\nSIGNAL_SECONDS=60\nSHARD_TASKS=1\nMEMORY=2000\n")
    there, here = tmp_path / "there", tmp_path / "here"
    asked = [*parameters(corpus, num_ranks=2), "--executor", "slurm"]
    mark = tmp_path / "mark"
    point = Point("os.rename", r"/fold_1/best_model\.safetensors$")
    shown = shown_by(start(there, *asked, FVC_SITE=str(site), **watching(tmp_path, (point,), f"hold {mark}")))
    beside = start(here, *parameters(corpus))
    (run,) = list_runs(there / "runs")
    first, train, last = submitted_jobs(run.root)
    assert f"job {last.job_id} after {first.job_id}, {train.job_id}" in shown
    waiting = shown_by(start(there, "status", str(run.root)))
    assert re.search(rf"job {last.job_id} .*PENDING .*Dependency", waiting)
    cluster.wait_for(mark.exists, "fold 1 to train")
    cluster.run("scancel", "--signal=USR1", "--batch", f"{train.job_id}_1")
    cluster.wait_for(lambda: "save and leave" in log_of(run, f"{train.job_id}_1"), "the signal to arrive")
    mark.with_suffix(".go").touch()  # only now can the first epoch end
    ids = (first.job_id, f"{train.job_id}_0", f"{train.job_id}_1", last.job_id)

    def ended() -> bool:
        states = [cluster.state(job_id) for job_id in ids]
        assert not {"FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"} & set(states), "\n".join(
            [cluster.describe(), *(path.read_text() for path in sorted(run.slurm.glob("*.out")))]
        )
        return states == ["COMPLETED"] * 4

    cluster.wait_for(ended, "the run to end")
    assert ": done" in shown_by(start(there, "status", str(run.root))).splitlines()[0]
    assert run.report_html.is_file()
    for fold in (0, 1):
        assert json.loads(run.fold_outcome(fold).read_bytes())["num_ranks"] == 2
    attempts = {key: stage.attempts for key, stage in read_status(run).stages.items()}
    assert (attempts["04_fold_training_fold_0"], attempts["04_fold_training_fold_1"]) == (1, 2)
    shown_by(beside)
    (alone,) = list_runs(here / "runs")
    one, two = scores(alone), scores(run)
    assert one["video_id"].to_list() == two["video_id"].to_list()
    assert two["score"].to_list() == pytest.approx(one["score"].to_list(), abs=1e-4)
