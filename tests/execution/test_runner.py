"""The runner with real kernels: what it skips, what it says when a notebook dies, and what survives a kill."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fvc_lib.execution import plan as finished
from fvc_lib.execution.plan import begin_training_state
from fvc_lib.execution.run.status import RunStatus, status_now
from fvc_lib.services import code_versions
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import read_document
from tests.execution.conftest import ONE, TWO


def states(status: RunStatus) -> list[str]:
    return [status.state, *(stage.state for stage in status.stages.values())]


def cell_states(record: Path) -> list[str]:
    cells = json.loads(record.read_text())["cells"]
    return [c["metadata"]["papermill"]["status"] for c in cells if c["metadata"].get("papermill", {}).get("status")]


def test_a_run_executes_its_stages_in_order_and_records_them(make_project):
    project = make_project(one=[ONE], two=[TWO])
    run = project.with_config(seed=7).begin()
    code, status, shown = project.with_config(seed=7).execute(run)
    assert code == 0
    assert (run.tables / "two.txt").read_text() == "seed 7!"
    assert states(status) == ["done", "done", "done"]
    assert (status.peak_rss_bytes or 0) > 20e6, status
    assert (run.executed_notebook("one").is_file(), run.partial_notebook("one").exists()) == (True, False)
    assert set(cell_states(run.executed_notebook("two"))) == {"completed"}
    assert "partial" not in run.executed_notebook("two").read_text()
    assert ("one" in shown, "\r" in shown) == (True, False)
    run.stage_checkpoint("one").unlink()  # as a notebook does where a user trains again
    assert states(status_now(run)) == ["interactive", "pending", "done"]


def test_finished_stages_are_skipped_until_something_they_depend_on_changes(finished):
    project, run = finished
    assert [(p.run, p.reason) for p in project.plan(run)] == [(False, "finished, nothing changed")] * 2

    (run.tables / "one.txt").write_text("tampered")
    assert [p.reason for p in project.plan(run)] == ["output missing or changed: tables/one.txt", "after one"]

    assert project.execute(run)[0] == 0
    assert (run.tables / "two.txt").read_text() == "seed 0!"
    changed = project.with_config(seed=3)
    assert changed.plan(run)[0].reason == "parameters changed: seed"


def test_a_changed_notebook_runs_again_and_a_changed_heading_does_not(finished):
    project, run = finished
    path = project.folder / "two.ipynb"
    path.write_text(path.read_text().replace("'!'", "'?'"))
    assert [p.reason for p in project.plan(run)] == ["finished, nothing changed", "the notebook's code changed"]
    project.execute(run)
    assert (run.tables / "two.txt").read_text() == "seed 0?"
    assert project.times_run(run, "one") == 1


@pytest.mark.slow
def test_the_straight_pass_writes_the_same_and_tracks_nothing(finished):
    project, tracked = finished
    straight = project.with_config(use_mlops_pipeline=False)
    run = straight.begin()
    assert straight.execute(run)[0] == 0
    assert (run.tables / "two.txt").read_text() == (tracked.tables / "two.txt").read_text()
    records = [json.loads(path.read_text()) for path in (run.root / "checkpoints").glob("stage_*")]
    assert records  # digests of what was written, and nothing by which a stage counts as finished
    assert all(record["fingerprint"] is None for record in records)
    assert [p.run for p in straight.plan(run)] == [True, True]


def test_a_notebook_that_dies_is_told_truthfully_and_goes_on_once_mended(make_project):
    source = "from fvc_lib.services.errors import DataError\nraise DataError('too few')"
    project = make_project(one=[ONE, source, "output('after', '')"], two=[TWO])
    run = project.begin()
    code, status, shown = project.execute(run)
    assert code == status.exit_code == 3
    assert "too few (cell In [5])" in shown
    assert str(run.partial_notebook("one")) in shown
    assert status.stages["one"].state == "failed"
    assert status.stages["two"].state == "pending"
    assert not run.executed_notebook("one").exists()
    assert cell_states(run.partial_notebook("one"))[-2:] == ["failed", "pending"]
    path = project.folder / "one.ipynb"
    document = json.loads(path.read_text())
    document["cells"] = [c for c in document["cells"] if "".join(c["source"]) != source]
    path.write_text(json.dumps(document))
    assert project.execute(run)[0] == 0


@pytest.mark.parametrize("option", ["start", "force"])
def test_a_redo_that_fails_leaves_no_old_result_standing(finished, option):
    project, run = finished
    path = project.folder / "one.ipynb"
    path.write_text(path.read_text().replace("output('one'", "1 / 0; output('one'"))
    one, _ = project.stages
    code, status, _ = project.execute(run, project.plan(run, **{option: one if option == "start" else [one]}))
    assert code == 1
    assert not (run.tables / "two.txt").exists()
    (old,) = (run.root / "superseded").glob("*/tables/two.txt")
    assert old.read_text() == "seed 0!"
    assert status.stages["two"].state == "pending"
    assert [p.run for p in project.plan(run)] == [True, True]


def test_a_fold_half_trained_goes_on_under_other_library_code_and_not_under_another_notebook(make_project, monkeypatch):
    project = make_project(per_fold=("folds",), folds=["output(f'folds_{fold}', str(fold))"])
    run, notebook = project.begin(), project.notebooks()["folds"]
    state = run.fold_checkpoints(1) / "latest_checkpoint.pt"
    begin_training_state(run, project.plan(run)[1].task, notebook, RunConfig())
    state.write_text("half trained")
    monkeypatch.setattr(code_versions, "functions_of_module", lambda module: {"step": f"of {module}"})
    begin_training_state(run, project.plan(run)[1].task, notebook, RunConfig())
    assert state.exists()
    assert len(read_document(state.parent / code_versions.NOTE)["versions"]) == 2
    begin_training_state(run, project.plan(run)[1].task, replace(notebook, cells=("1 + 1",)), RunConfig())
    assert not state.exists()
    assert (run.root / "superseded/1/checkpoints/fold_1/latest_checkpoint.pt").read_text() == "half trained"


@pytest.mark.slow
def test_code_that_changes_while_a_stage_runs_is_not_recorded_as_one_version(make_project, monkeypatch):
    project = make_project(one=[ONE])
    run = project.begin()
    hashes = iter(["before", "after", "after", "after"])
    monkeypatch.setattr(finished, "code_behind", lambda sources: {"fvc_lib": next(hashes, "after")})
    plan = [replace(planned, reason="test") for planned in project.plan(None)]
    code, _, shown = project.execute(run, plan)
    assert code == 0
    assert "changed while it ran" in shown
    assert project.plan(run)[0].reason == "not finished yet"
    now = status_now(run)
    assert (states(now), "changed while it ran" in str(now.stages["one"].reason)) == (["interrupted", "pending"], True)
