"""Which task may begin next: the plan's order where it is free, the DAG's where it is not."""

import pytest
from hypothesis import given, strategies as st

from fvc_lib.execution.plan import PlannedTask, Schedule
from fvc_lib.execution.stages import Task, needed_tasks, task_keys, tasks_in_order
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.tasks import Stage

CONFIG = RunConfig(num_folds=3)
TASKS = tasks_in_order(CONFIG)


def plan_of(tasks: list[Task], *, without: frozenset[str] = frozenset()) -> list[PlannedTask]:
    return [PlannedTask(task, task.key not in without, "test") for task in tasks]


def test_folds_are_ready_together_when_all_they_need_is_done_and_what_is_not_to_run_counts_as_done():
    schedule = Schedule(plan_of(TASKS, without=frozenset({"01_data_index", "02_folds"})))
    before = [schedule.next() for _ in range(2)]
    assert ([task.key for task in before], schedule.next()) == (["03_augmentation", "03b_forensic_features"], None)
    for task in before:
        schedule.done(task)
    folds = [schedule.next() for _ in range(3)]
    assert ([task.fold for task in folds], schedule.next()) == ([0, 1, 2], None)
    for task in folds:
        schedule.done(task)
    assert schedule.next().key == "05_kfold_results"


def test_tasks_are_named_by_key_or_by_stage():
    folds = {f"04_fold_training_fold_{fold}" for fold in range(3)}
    assert task_keys(["04"], CONFIG) == folds
    assert task_keys(["04_fold_training_fold_1", "results"], CONFIG) == {"04_fold_training_fold_1", "05_kfold_results"}
    with pytest.raises(UsageError, match="10_image_recognition is a stage of task image"):
        task_keys(["04", "10"], CONFIG)


@st.composite
def dags(draw: st.DrawFn) -> list[Task]:
    """Stages that need any earlier ones, some of them with folds."""
    stages: list[Stage] = []
    for number in range(draw(st.integers(1, 6))):
        needs = tuple(stage.name for stage in stages if draw(st.booleans()))
        stages.append(Stage(f"s{number}", needs, lambda run, _: (), lambda run, _: (), draw(st.booleans())))
    return tasks_in_order(RunConfig(num_folds=2), stages)


@given(dags(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_order_of_ends_runs_each_task_once_after_its_needs(tasks, jobs, random):
    needed = needed_tasks(tasks)
    schedule, running, ended = Schedule(plan_of(tasks)), [], []
    while True:
        while len(running) < jobs and (task := schedule.next()):
            assert needed[task.key] <= set(ended)
            running.append(task)
        if not running:
            break
        done = running.pop(random.randrange(len(running)))
        schedule.done(done)
        ended.append(done.key)
    assert sorted(ended) == sorted(needed)
    assert schedule.is_finished
