"""One budget for several kernels: no set that can run at once is promised more than there is."""

import os

import pytest

from fvc_lib.execution.plan.plan import PlannedTask
from fvc_lib.execution.plan.stage_memory import MemoryShares, PredictedPeak, share_memory
from fvc_lib.execution.plan.stages import tasks_in_order
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory.budget import SHARE_VARIABLE, MemoryBudget, MemoryShare, memory_budget

TASKS = tasks_in_order(RunConfig(num_folds=5))
BUDGET = MemoryBudget(8_000_000_000, "SLURM_MEM_PER_NODE")
RUNNER = 200_000_000


def shares(jobs: int, predicted: dict[str, PredictedPeak] | None = None) -> MemoryShares:
    return share_memory([PlannedTask(task, True, "test") for task in TASKS], jobs, BUDGET, RUNNER, predicted)


def given_to(shared: MemoryShares, key: str) -> MemoryBudget | None:
    (task,) = (task for task in TASKS if task.key == key)
    share = MemoryShare.of(shared.environment(task))
    return share.limit if share else None


def test_alone_a_task_has_the_whole_budget_and_folds_share_what_the_runner_leaves():
    shared = shares(4)
    assert given_to(shared, "01_data_index") is None
    assert given_to(shared, "05_kfold_results") is None
    assert given_to(shared, "02_folds").total_bytes == 3_900_000_000  # it may run beside 03
    fold = given_to(shared, "04_fold_training_fold_4")
    assert fold.total_bytes == 1_950_000_000
    assert fold.origin == "1/4 of 8.00 GB (SLURM_MEM_PER_NODE), shared by 4 tasks"
    assert shared.lines == ("up to 4 tasks at once share 7.80 GB of 8.00 GB (SLURM_MEM_PER_NODE): 1.95 GB each",)


def test_the_share_of_a_single_task_is_not_called_shared():
    alone = MemoryShare(7_800_000_000, 1, MemoryBudget(8_000_000_000, "SLURM_MEM_PER_NODE")).limit
    assert alone.origin == "what the runner leaves of 8.00 GB (SLURM_MEM_PER_NODE)"
    assert given_to(shares(9), "04_fold_training_fold_0").total_bytes == 7_800_000_000 // 5
    assert shares(1).lines == ()
    assert all(not shares(1).environment(task) for task in TASKS)


def test_of_a_stage_that_would_not_fit_fewer_run_and_it_is_said_with_the_numbers():
    shared = shares(4, {"04_fold_training": PredictedPeak(3_100_000_000, "measured in run_x")})
    assert shared.at_once["04_fold_training"] == 2
    assert shared.at_once["02_folds"] == 4
    assert given_to(shared, "04_fold_training_fold_0").total_bytes == 3_900_000_000
    assert shared.lines[0] == (
        "04_fold_training: 2 at once and not 4: each is expected to take 3.10 GB (measured in run_x), and 8.00 GB "
        "(SLURM_MEM_PER_NODE) leaves 7.80 GB beside the runner"
    )
    alone = shares(4, {"04_fold_training": PredictedPeak(30_000_000_000, "measured in run_x")})
    assert alone.at_once["04_fold_training"] == 1
    assert given_to(alone, "04_fold_training_fold_0") is None


def test_a_stage_that_fits_is_not_held_back():
    shared = shares(2, {"04_fold_training": PredictedPeak(3_900_000_000, "measured in run_x")})
    assert shared.at_once["04_fold_training"] == 2
    assert len(shared.lines) == 1


@pytest.mark.parametrize("text", ["", "12", "1 2 3", "a 2 3 origin", "-1 2 3 origin"])
def test_a_variable_that_is_no_share_of_ours_limits_nothing(text):
    assert MemoryShare.of({SHARE_VARIABLE: text}) is None
    assert memory_budget(environ={SHARE_VARIABLE: text}) == memory_budget(environ={})


def test_a_share_survives_the_environment_and_a_smaller_limit_still_counts():
    share = MemoryShare(500_000_000, 4, MemoryBudget(2_000_000_000, "mem_gb / FVC_MEM_GB"))
    environment = {SHARE_VARIABLE: os.fsdecode(os.fsencode(share.as_text()))}
    assert MemoryShare.of(environment) == share
    assert memory_budget(2.0, environ=environment) == share.limit == memory_budget(environ=environment)
    assert memory_budget(0.25, environ=environment).origin == "mem_gb / FVC_MEM_GB"
