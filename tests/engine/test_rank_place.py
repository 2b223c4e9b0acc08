"""A rank reads its place from the variables of torchrun or srun."""

import pytest

from fvc_lib.engine.rank_processes import RankPlace, rank_place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_STEP_ID": "2", "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (SRUN, RankPlace(4, 5, 0, 2)),
        ({**SRUN, **TORCHRUN}, RankPlace(3, 4, 1, 2)),
    ],
)
def test_a_rank_s_place_is_torchrun_s_else_srun_s(environ, place):
    assert rank_place(environ) == place


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {**TORCHRUN, "WORLD_SIZE": "many"},
        {name: value for name, value in SRUN.items() if name != "SLURM_NTASKS"},
    ],
)
def test_an_incomplete_environment_is_refused(environ):
    with pytest.raises((KeyError, ValueError)):
        rank_place(environ)
