"""A flipped bit in a finished stage's table is named with the stage, whoever reads it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fvc_lib.analysis.dashboard.panels import notes
from fvc_lib.analysis.mlflow import RunExport
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.headline import run_headline, runs_table
from fvc_lib.command_line.main import main
from fvc_lib.execution.plan import Fingerprint, record_finished
from fvc_lib.execution.stages import Task, tasks_in_order
from fvc_lib.services import tables
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.task_runs import write_image_run, write_video_text_run

FLIPS = 8
NOTHING = Fingerprint({}, {}, "", {}, "")


def finish(run: RunPaths) -> list[Task]:
    """The records that the runner leaves of finished stages."""
    tasks = tasks_in_order(run_config(run.params_yaml))
    for task in tasks:
        record_finished(task, NOTHING, run)
    return tasks


def flip(path: Path, generator: random.Random) -> bytes:
    """Turn one bit of the file round; returns what was there."""
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(damaged)
    return content


@pytest.fixture(params=["video", "image", "video_text"])
def any_run(request: pytest.FixtureRequest, tmp_path: Path) -> RunPaths:
    if request.param == "video":
        made: RunPaths = request.getfixturevalue("run")
        return made
    return (write_image_run if request.param == "image" else write_video_text_run)(tmp_path / "runs")


@pytest.mark.fault(40)
def test_no_flipped_bit_of_any_table_is_read_in_silence(any_run: RunPaths) -> None:
    generator, read = random.Random(0), 0
    for task in finish(any_run):
        for path, name in zip(task.stage.outputs(any_run, task.fold), task.stage.schemas, strict=False):
            if not path.is_file():
                continue
            for _ in range(FLIPS):
                content = flip(path, generator)
                with pytest.raises(DataError, match=f"{path.name}: is not what the run wrote.*--resume"):
                    tables.read_table(path, getattr(tables, name))
                path.write_bytes(content)
            tables.read_table(path, getattr(tables, name))
            read += 1
    assert read >= 4


def names_damage(text: object, path: Path) -> bool:
    return f"{path.name}: is not what the run wrote" in " ".join(str(text).split())


@pytest.mark.fault(40)
def test_every_query_and_the_dashboard_name_a_damaged_table(run: RunPaths) -> None:
    finish(run)
    asked = {
        "results": run.results,
        "slices": run.slices,
        "leakage_audit": run.leakage_audit,
        "predictions": run.predictions(2),
        "videos": run.index,
        "folds": run.folds,
        "clips": run.augmented_metadata,
    }
    for name, path in asked.items():
        assert not queries.SQL_TABLES[name]([run]).notes
        content = flip(path, random.Random(1))
        assert names_damage(queries.SQL_TABLES[name]([run]).notes, path), name
        if name == "results":
            assert names_damage(notes(queries.Selection((run,))).splitlines(), path)
        path.write_bytes(content)


@pytest.mark.fault(40)
def test_report_list_and_export_show_no_number_of_damaged_results(run: RunPaths) -> None:
    finish(run)
    flip(run.results, random.Random(1))

    told = CliRunner().invoke(main, ["report", str(run.root)])

    assert told.exit_code == 3
    assert names_damage(told.output, run.results)
    assert "ROC" not in told.output
    headline = run_headline(run)
    assert headline.verdict.standing == "no result"
    assert not headline.scores
    listed = runs_table(run.root.parents[1])
    assert listed.frame["score"].to_list() == [None]
    assert names_damage(listed.notes, run.results)
    export = RunExport(run, "")
    export.read()
    assert names_damage(export.tables["results"].notes, run.results)
    page = (run.root.parents[1] / "index.html").read_text()
    assert names_damage(page, run.results)
    flip(run.leakage_audit, random.Random(1))
    assert run_headline(run).verdict.standing in ("no result", "not above control")


@pytest.mark.fault(40)
def test_compare_refuses_a_run_with_a_damaged_table(make_run: Callable[..., RunPaths]) -> None:
    runs = [make_run(name=f"run_20250304_10150{number}_abcdef01", seed=0) for number in range(2)]
    for each in runs:
        finish(each)
    flip(runs[1].predictions(3), random.Random(1))
    told = CliRunner().invoke(main, ["compare", *(str(each.root) for each in runs)])
    assert told.exit_code == 3
    assert names_damage(told.output, runs[1].predictions(3))
