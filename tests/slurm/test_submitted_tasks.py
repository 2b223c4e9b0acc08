"""The notebook of image recognition as a job of a real Slurm: on two nodes, of which one is lost, and requeued."""

import re
from pathlib import Path

import pytest

from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.slurm import plan_jobs, read_site, submit
from fvc_lib.execution.stages import Task, stage_named
from fvc_lib.services.parameters import resolve_config
from tests.faults.small_runs import VALUES, Place, metrics_of, results_of, small_corpus
from tests.faults.stage_moments import renamed, watching

STAGE = "10_image_recognition"
BAD = {"FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"}


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.fault(44)
def test_a_training_over_two_nodes_that_loses_one_is_requeued_and_ends_as_one_on_one_node(
    cluster, tmp_path, monkeypatch
):
    """Everything on the node is killed, SLURM's own processes as well; later it is back.

    Training goes on beside the thread that writes a checkpoint until the next is due: while that of the first epoch is
    held, through the second at most, and steps are left at which it can stop.
    """
    values = {**VALUES["image"], "epochs": 4, "num_ranks": 2}
    place = Place(tmp_path / "there", small_corpus("image", tmp_path / "some 'files'"), values)
    site_file, mark = tmp_path / "site.conf", tmp_path / "mark"
    site_file.write_text("CPUS=1\nTIME=00:20:00\nSIGNAL_SECONDS=60\nRANKS_PER_NODE=1\nMEMORY=2900\n")
    held = watching(tmp_path, (renamed("best_model.safetensors"), renamed("latest_checkpoint.pt")), f"hold {mark}")
    folders = {name: str(place.folder / name) for name in ("runs_dir", "cache_dir", "data_dir")}
    config, site = resolve_config({**values, **folders, "corpus": str(place.corpus)}, environ={}), read_site(site_file)
    run = begin_run(config, command="a test")
    with monkeypatch.context() as patch:
        for name, value in held.items():
            patch.setenv(name, value)
        (job,) = submit(plan_jobs([Task(stage_named(STAGE), None)], config, site), run.root, site)
    cluster.wait_for(mark.exists, "the second epoch's end")
    lost = cluster.processes_on(cluster.nodes[1])
    assert {"slurmd", "slurmstepd"} < {process.name()[:10] for process in lost}
    for process in lost:
        process.kill()
    Path(f"{mark}.go").touch()
    cluster.wait_for(lambda: read_status(run).stages[STAGE].state == "interrupted", "the loss to be noticed")
    stage = read_status(run).stages[STAGE]
    assert (stage.exit_code, stage.error.name) == (75, "RankLostError")
    assert read_status(run).state == "requeue"
    # SLURM would say so to the lost node again a minute later, and meet the restarted job's step of the same number.
    log = (cluster.folder / "log" / f"slurmd.{cluster.nodes[0]}.log").read_text()
    assert not re.search(rf"STEP {job.job_id}\.\d+ ON .* CANCELLED AT \S+ \*\*\*", log)
    cluster.boot(cluster.nodes[1])

    def ended() -> bool:
        state = cluster.state(job.job_id)
        logs = "\n".join(path.read_text() for path in sorted(run.slurm.glob("*.out")))
        assert state not in BAD, f"{state}\n{logs}\n{cluster.describe()}"
        return state == "COMPLETED"

    cluster.wait_for(ended, "the run to end")
    facts = cluster.jobs()[job.job_id]
    assert (read_status(run).stages[STAGE].attempts, facts["Restarts"], facts["NumNodes"]) == (2, "1", "2")
    here, _ = Place(tmp_path / "here", place.corpus, values).run(variables={"OMP_NUM_THREADS": "1"})
    found, wanted = results_of(run), results_of(here)
    assert found.keys() == wanted.keys()
    assert [name for name, content in wanted.items() if found[name] != content] == []
    assert metrics_of(run) == metrics_of(here)
