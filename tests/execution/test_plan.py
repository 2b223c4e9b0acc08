"""What a plan repeats and why: force, code behind a notebook, tables that do not fit, files hashed again."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fvc_lib.execution import plan as fingerprint
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.stages import (
    needed_tasks,
    refuse_stage_of_another_task,
    stage_named,
    tasks_in_order,
)
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table
from fvc_lib.services.tasks import STAGES, TASKS, Stage
from tests.execution.conftest import ONE, TWO, Project

TABLE = """
import polars as pl
frame = pl.DataFrame({"video_id": ["a"], "group_id": ["g"], "label": ["real"], "fold": [fold_number]})
frame.write_parquet(folder / "table.parquet")
"""


def reasons(project: Project, run, **options) -> list[tuple[bool, str]]:
    return [(planned.run, planned.reason) for planned in project.plan(run, **options)]


@pytest.mark.slow
def test_a_forced_stage_counts_as_not_finished_and_what_depends_on_it_follows(finished):
    project, run = finished
    one, two = project.stages
    forced = (True, "asked for by --force")
    assert reasons(project, run, force=(one,)) == [forced, (True, "after one")]
    assert reasons(project, run, force=(one, two)) == [forced, forced]
    assert reasons(project, run, force=(two,)) == [(False, "finished, nothing changed"), forced]
    plan = project.plan(run, force=(two,))
    assert [planned.redo for planned in plan] == [False, True]
    project.execute(run, plan)
    assert [project.times_run(run, name) for name in ("one", "two")] == [1, 2]
    assert project.execute(run, project.plan(run, force=(one,)))[0] == 0
    assert [project.times_run(run, name) for name in ("one", "two")] == [2, 2]  # the first wrote the same
    assert read_status(run).stages["two"].state == "done"
    assert (run.root / "superseded" / "1" / "tables" / "two.txt").is_file()
    project.execute(run, project.plan(run, force=(two,)))
    copies = run.superseded.glob("*/tables/two.txt")
    assert sorted(path.relative_to(run.superseded).parts[0] for path in copies) == ["1", "3"]
    assert [read_status(run).stages[name].attempts for name in ("one", "two")] == [2, 3]


@pytest.mark.fault(49)
@pytest.mark.slow
def test_the_code_behind_a_notebook_repeats_it_and_other_code_does_not(make_project, monkeypatch):
    project = make_project(one=["from fvc_lib.services.errors import DataError", ONE], two=[TWO])
    run = project.begin()
    project.execute(run)
    real = fingerprint.code_behind

    def errors_changed(sources: list[str]) -> dict[str, str]:
        return {**real(sources), **{name: "other" for name in real(sources) if name == "fvc_lib.services.errors"}}

    monkeypatch.setattr(fingerprint, "code_behind", errors_changed)
    assert not any(planned.run for planned in project.plan(run))  # another file, the same syntax tree
    monkeypatch.setattr(fingerprint, "tree_hash", lambda module: "other")
    assert reasons(project, run) == [(True, "code changed: services.errors"), (True, "after one")]
    assert [planned.only_if_changed for planned in project.plan(run)] == [False, True]


def test_a_stage_whose_table_does_not_fit_has_failed_and_its_record_is_not_a_success(make_project):
    made = make_project(one=["fold_number = -1", TABLE])
    stage = Stage("one", (), lambda run, _: (), lambda run, _: (run.tables / "table.parquet",), schemas=("FOLDS",))
    project = Project(made.folder, (stage,), made.config)
    run = project.begin()
    code, status, shown = project.execute(run)
    assert (code, status.stages["one"].state, status.stages["one"].exit_code) == (3, "failed", 3)
    assert "does not fit the folds schema: column 'fold'" in status.stages["one"].error.message
    assert "got '-1'" in shown or "got -1" in shown
    assert "does not fit the folds schema" in json.loads(run.partial_notebook("one").read_text())["cells"][0]["source"]
    assert not run.executed_notebook("one").exists()
    assert not run.stage_checkpoint("one").exists()


def test_every_table_of_the_pipeline_has_its_schema():
    nowhere = RunPaths(Path("/nowhere/runs/e/run_x"))
    for stage in STAGES:
        outputs = stage.outputs(nowhere, 0 if stage.per_fold else None)
        assert len(stage.schemas) == len(outputs), stage.name
        for path, name in zip(outputs, stage.schemas, strict=True):
            with pytest.raises(DataError, match="no such table"):
                read_table(path, getattr(tables, name))


def test_a_run_has_the_stages_of_its_task_each_after_what_it_needs():
    tasks = {task: resolve_config({"task": task, "num_folds": 2}, environ={}) for task in TASKS}
    found = {task: [each.key for each in tasks_in_order(config)] for task, config in tasks.items()}
    assert found["image"] == ["10_image_recognition", "07_memory_report"]
    assert found["video_text"] == ["20_video_text", "07_memory_report"]
    assert found["video"][-3:] == ["05_kfold_results", "06_analysis_dashboard", "07_memory_report"]
    assert needed_tasks(tasks_in_order(tasks["image"]))["07_memory_report"] == {"10_image_recognition"}
    with pytest.raises(UsageError, match="05_kfold_results is a stage of task video, and this run's task is image"):
        refuse_stage_of_another_task(tasks["image"], stage_named("05"), None)


def test_a_run_has_the_stage_of_features_where_it_is_asked_for_or_its_model_sees_them():
    training, features = stage_named("04"), stage_named("03b")
    plain, asked = (RunConfig(num_folds=2, views="frames", forensic_features=asked) for asked in (False, True))
    assert features.name not in [each.key for each in tasks_in_order(plain)]
    with pytest.raises(UsageError, match=r"03b_forensic_features is no stage of this run.*-p forensic_features true"):
        refuse_stage_of_another_task(plain, features)
    keys = [each.key for each in tasks_in_order(asked)]
    assert keys[2:5] == ["03_augmentation", "03b_forensic_features", "04_fold_training_fold_0"]
    assert features.name in needed_tasks(tasks_in_order(asked))["04_fold_training_fold_0"]
    # It comes before a network's training, and is no reason to repeat it.
    assert features.name not in training.reads(asked)
    assert features.name in training.reads(SimpleNamespace(of_features="forensic", forensic_features=False))
