"""The notebook of image recognition as a job of a real Slurm: requeued, and on two ranks of which one is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fvc_lib.corpus.images import index_images
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import StageStatus, read_status
from fvc_lib.execution.slurm import SlurmJob, plan_jobs, read_site, submit as slurm_submit
from fvc_lib.execution.stages import Task, stage_named
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.services.tables import (
    IMAGE_TARGETS,
    IMAGES,
    LEAKAGE_AUDIT,
    REJECTED,
    write_table,
)
from fvc_lib.services.tasks import TASK_OF_STAGE
from fvc_lib.tasks.image.training import train_images
from fvc_lib.tasks.leakage_audit import split_audit
from tests.faults.small_runs import VALUES, Place, metrics_of, results_of, small_corpus
from tests.faults.stage_moments import renamed, watching
from tests.kits.image_kit import image_results_of
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.long
STAGE_OF_TASK = {task: stage for stage, task in TASK_OF_STAGE.items()}
BAD = {"FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"}


@pytest.fixture
def place(tmp_path: Path, task: str) -> Place:
    """Where a small run of ``task`` is submitted from.

    Training goes on beside the thread that writes a checkpoint until the next is due: while that of the first epoch is
    held, through the second at most, and steps are left at which it can stop.
    """
    return Place(tmp_path / "there", small_corpus(task, tmp_path / "some 'files'"), {**VALUES[task], "epochs": 4})


def site_file(place: Place, **settings: object) -> Path:
    """One processor a process."""
    path = place.folder.parent / "site.conf"
    values = {"cpus": 1, "time": "00:20:00", "signal_seconds": 60, "memory": 2500, **settings}
    path.write_text("".join(f"{name.upper()}={value}\n" for name, value in values.items()))
    return path


def end_well(cluster: Cluster, run: RunPaths, jobs: Sequence[SlurmJob]) -> None:
    """Wait until all ``jobs`` have, and say everything when one has not."""

    def ended() -> bool:
        states = [cluster.state(job.job_id) for job in jobs]
        logs = "\n".join(path.read_text() for path in sorted(run.slurm.glob("*.out")))
        assert not BAD & set(states), f"{states}\n{logs}\n{cluster.describe()}"
        return set(states) == {"COMPLETED"}

    cluster.wait_for(ended, "the run to end", seconds=600)


def stage_of(run: RunPaths, task: str) -> StageStatus:
    return read_status(run).stages[STAGE_OF_TASK[task]]


def alone(run: RunPaths, task: str, folder: Path) -> RunPaths:
    """The stage's work for a run of the same parameters, in this process."""
    config, paths = run_config(run.params_yaml), RunPaths(folder / "alone" / run.run_id)
    with MetricLog(paths.metrics(STAGE_OF_TASK[task]), run_id=paths.run_id, fold=None) as log:
        images = index_images(config)
        write_table(images.images, IMAGES, paths.images)
        write_table(images.targets, IMAGE_TARGETS, paths.image_targets)
        write_table(images.rejected, REJECTED, paths.rejected)
        audit = split_audit(images.images, images.root, config)
        write_table(audit, LEAKAGE_AUDIT, paths.leakage_audit)
        train_images(paths, config, metric_log=log)
        image_results_of(paths, config)
    return paths


def assert_same(run: RunPaths, here: RunPaths) -> None:
    """To the byte, and every metric to the bit."""
    found, wanted = results_of(run), results_of(here)
    assert found.keys() == wanted.keys()
    assert [name for name, content in wanted.items() if found[name] != content] == []
    assert metrics_of(run) == metrics_of(here)


@pytest.mark.slurm
@pytest.mark.parametrize("task", ["image"])
@pytest.mark.fault(44)
def test_a_training_over_two_nodes_that_loses_one_is_requeued_and_ends_as_one_on_one_node(
    cluster, place, task, tmp_path, monkeypatch
):
    """Everything on the node is killed, SLURM's own processes as well; later it is back."""
    mark = tmp_path / "mark"
    held = watching(tmp_path, (renamed("best_model.safetensors"), renamed("latest_checkpoint.pt")), f"hold {mark}")
    folders = {name: str(place.folder / name) for name in ("runs_dir", "cache_dir", "data_dir")}
    values = {**place.values, **folders, "corpus": str(place.corpus), "num_ranks": 2}
    config, site = resolve_config(values, environ={}), read_site(site_file(place, ranks_per_node=1, memory=2900))
    run = begin_run(config, command="a test")
    with monkeypatch.context() as patch:
        for name, value in held.items():
            patch.setenv(name, value)
        jobs = plan_jobs([Task(stage_named(STAGE_OF_TASK[task]), None)], config, site)
        (job,) = slurm_submit(jobs, run, site)
    cluster.wait_for(mark.exists, "the second epoch's end", seconds=600)
    lost = cluster.processes_on(cluster.nodes[1])
    assert {"slurmd", "slurmstepd"} < {process.name()[:10] for process in lost}
    for process in lost:
        process.kill()
    Path(f"{mark}.go").touch()
    cluster.wait_for(lambda: stage_of(run, task).state == "interrupted", "the loss to be noticed")
    stage = stage_of(run, task)
    assert (stage.exit_code, stage.error.name) == (75, "RankLostError")
    assert read_status(run).state == "requeue"
    # SLURM would say so to the lost node again a minute later, and meet the restarted job's step of the same number.
    log = (cluster.folder / "log" / f"slurmd.{cluster.nodes[0]}.log").read_text()
    assert not re.search(rf"STEP {job.job_id}\.\d+ ON .* CANCELLED AT \S+ \*\*\*", log)
    cluster.boot(cluster.nodes[1])
    end_well(cluster, run, [job])
    facts = cluster.jobs()[job.job_id]
    assert (stage_of(run, task).attempts, facts["Restarts"], facts["NumNodes"]) == (2, "1", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert_same(run, alone(run, task, tmp_path))
