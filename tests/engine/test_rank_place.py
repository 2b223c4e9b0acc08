import pytest
import torch

from fvc_lib.engine.distributed.ranks import ProcessRanks, RankPlace, first_host, rank_place
from fvc_lib.services.errors import UsageError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
}  # fmt: skip


def test_torchrun_s_variables_are_believed_also_inside_a_slurm_step():
    assert rank_place({**SRUN, **TORCHRUN}) == RankPlace(3, 4, 1, 2, "node1", 29500)


def test_srun_s_variables_name_rank_machine_and_port():
    place = rank_place(SRUN)
    assert place == RankPlace(4, 5, 0, 1, "gpu03", place.port)
    assert rank_place({**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}).local_size == 2


def test_ranks_of_one_machine_meet_on_it():
    """Its own name may not resolve there."""
    place = rank_place({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1"})
    assert (place.address, place.local_size) == ("127.0.0.1", 5)


def test_steps_and_neighbouring_jobs_have_ports_of_their_own():
    ports = [
        rank_place({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(100, 140)
        for step in range(8)
    ]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 32_000 for port in ports)
    assert rank_place({**SRUN, "SLURM_JOB_ID": "987654321"}).port < 32_000


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}])
def test_alone_and_in_a_batch_script_there_is_one_rank(environ):
    assert rank_place(environ) == RankPlace(0, 1, 0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {**TORCHRUN, "MASTER_PORT": "here"},
        {**TORCHRUN, "RANK": "4"},
        {**TORCHRUN, "LOCAL_RANK": "2"},
        {**SRUN, "SLURM_STEP_NODELIST": "[]"},
        {name: value for name, value in SRUN.items() if name != "SLURM_JOB_ID"},
    ],
)
def test_an_incomplete_environment_is_refused(environ):
    with pytest.raises(UsageError, match="ranks: "):
        rank_place(environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("gpu[03-05,09],cpu1", "gpu03"),
        ("gpu[9,11]", "gpu9"),
        ("a-[1-2]-x,b", "a-1-x"),
        ("rack1-[08-10].site.org", "rack1-08.site.org"),
    ],
)
def test_the_first_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_ranks_on_gpus_connect_with_their_device(monkeypatch):
    # The one thing that no CPU can run: with its device nccl connects at once, and says then what it lacks.
    asked = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **named: asked.update(named, by=given))
    ProcessRanks(0, 2, cuda=True)
    assert asked["by"] == ("cpu:gloo,cuda:nccl",)
    assert asked["device_id"] == torch.device("cuda", 1)
    ProcessRanks(0, 2)
    assert (asked["by"], asked["device_id"]) == (("gloo",), None)
