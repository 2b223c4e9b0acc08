"""Several jobs on one run, each with tasks of its own: who may run what, and a status true whoever wrote it last."""

from collections.abc import Callable

import pytest

from fvc_lib.execution.run.status import is_worked_on, leave_to_jobs, read_status, status_now, updated_status
from fvc_lib.services.errors import UsageError
from tests.execution.conftest import Project, holder, table_stage

FOLDS = frozenset({"folds_fold_0", "folds_fold_1"})


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    made = make_project(
        per_fold=("folds",),
        one=["output('one', '1')"],
        folds=["output(f'folds_{fold}', (folder / 'one.txt').read_text() + str(fold))"],
        last=["output('last', ''.join((folder / f'folds_{k}.txt').read_text() for k in (0, 1)))"],
    )
    one, folds, _ = made.stages
    last = table_stage("last", ("folds",))
    last = type(last)("last", ("folds",), lambda run, _: sorted(run.tables.glob("folds_?.txt")), last.outputs)
    return Project(made.folder, (one, folds, last), made.config)


@pytest.mark.slow
def test_jobs_one_after_the_other_finish_a_run_and_each_state_between_is_true(project):
    run = project.begin()
    with pytest.raises(UsageError, match=r"folds_fold_0 cannot run yet.*it needs one \(not finished yet\)"):
        project.plan(run, tasks=FOLDS)
    leave_to_jobs(run, [planned.task for planned in project.plan(run)])
    assert read_status(run).state == "waiting"
    code, status, _ = project.execute(run, only_tasks=frozenset({"one", "folds_fold_1"}))
    assert (code, status.state, status.exit_code) == (0, "waiting", None)
    assert {key: stage.state for key, stage in status.stages.items()} == {
        "one": "done", "folds_fold_0": "pending", "folds_fold_1": "done", "last": "pending",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"last cannot run yet, and nothing was begun: it needs folds_fold_0 \("):
        project.plan(run, tasks=frozenset({"last"}))
    assert [p.task.key for p in project.plan(run, tasks=FOLDS) if p.run] == ["folds_fold_0"]
    assert project.execute(run, only_tasks=frozenset({"folds_fold_0"}))[1].state == "waiting"
    code, status, _ = project.execute(run, only_tasks=frozenset({"last"}))
    assert (code, status.state, status.exit_code) == (0, "done", 0)
    assert (run.tables / "last.txt").read_text() == "1011"
    assert not is_worked_on(run.root)

    (run.tables / "folds_0.txt").write_text("spoilt")  # results that rest on a repeated task are taken away
    code, status, _ = project.execute(run, only_tasks=frozenset({"folds_fold_0"}))
    assert (code, status.state, status.stages["last"].state) == (0, "waiting", "pending")
    assert not (run.tables / "last.txt").exists()


@pytest.mark.fault(25)
def test_a_job_that_died_without_a_word_is_not_said_to_run_while_another_lives(project):
    run = project.begin()
    leave_to_jobs(run, [planned.task for planned in project.plan(run)])
    with updated_status(run) as status:
        for key in FOLDS:
            status.stage(key).state = "running"
    with holder(run, "folds_fold_0"):
        status = status_now(run)
        assert status.state == "running"
        assert {key: status.stages[key].state for key in FOLDS} == {
            "folds_fold_0": "running", "folds_fold_1": "interrupted",
        }  # fmt: skip
    assert status_now(run).state == "interrupted"
