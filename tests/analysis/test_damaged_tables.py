"""A flipped bit in a finished stage's table is named with the stage, whoever reads it."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from fvc_lib.analysis.dashboard.panels import Selection, notes
from fvc_lib.analysis.mlflow.export import run_content
from fvc_lib.analysis.pages.report import summary_lines
from fvc_lib.analysis.pages.runs_index import write_runs_index
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.headline import run_headline, runs_table
from fvc_lib.command_line.main import main
from fvc_lib.execution.plan.fingerprint import Fingerprint, reason_to_run, record_finished
from fvc_lib.execution.plan.stages import Task, tasks_in_order
from fvc_lib.services import tables
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import damage_of
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.conftest import notebook
from tests.analysis.task_runs import write_image_run, write_video_text_run
from tests.faults.disks import small_tmpfs

FLIPS = 30
NOTHING = Fingerprint({}, {}, "", {}, "")


def finish(run: RunPaths) -> list[Task]:
    """The records that the runner leaves of finished stages."""
    tasks = tasks_in_order(run_config(run))
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
def test_the_list_of_runs_names_damage_that_came_after_its_row_was_kept(run: RunPaths) -> None:
    log = run.metrics("04_fold_training", 1)
    finish(run)

    def listed() -> str:
        return write_runs_index(run.root.parents[1]).read_text()

    assert "damaged" not in listed()
    before = log.stat()
    flip(log, random.Random(1))
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert re.search(f"{log.name}: is not what stage .* wrote: damaged", listed())


@pytest.mark.fault(40)
def test_no_flipped_bit_of_any_table_is_read_in_silence(any_run: RunPaths) -> None:
    generator, read = random.Random(0), 0
    for task in finish(any_run):
        for path, name in zip(task.stage.outputs(any_run, task.fold), task.stage.schemas, strict=False):
            if not path.is_file():
                continue
            for _ in range(FLIPS):
                content = flip(path, generator)
                with pytest.raises(DataError, match=f"not what stage {task.key} wrote.*run_notebooks.py --resume"):
                    tables.read_table(path, getattr(tables, name))
                path.write_bytes(content)
            tables.read_table(path, getattr(tables, name))
            read += 1
    assert read >= 4


def names_damage(text: object, stage: str) -> bool:
    return f"not what stage {stage} wrote" in " ".join(str(text).split())


@pytest.mark.fault(40)
def test_every_query_and_the_dashboard_name_a_damaged_table(run: RunPaths) -> None:
    finish(run)
    asked = {
        "results": (run.results, "05_kfold_results"),
        "slices": (run.slices, "05_kfold_results"),
        "leakage_audit": (run.leakage_audit, "05_kfold_results"),
        "predictions": (run.predictions(2), "04_fold_training_fold_2"),
        "videos": (run.index, "01_data_index"),
        "folds": (run.folds, "02_folds"),
        "clips": (run.augmented_metadata, "03_augmentation"),
    }
    for name, (path, stage) in asked.items():
        assert not queries.SQL_TABLES[name]([run]).notes
        content = flip(path, random.Random(1))
        assert names_damage(queries.SQL_TABLES[name]([run]).notes, stage), name
        assert names_damage(notes(Selection((run,))).splitlines(), stage), name
        path.write_bytes(content)


@pytest.mark.fault(40)
def test_report_list_and_export_show_no_number_of_damaged_results(run: RunPaths) -> None:
    finish(run)
    flip(run.results, random.Random(1))

    told = CliRunner().invoke(main, ["report", str(run.root)])

    assert told.exit_code == 3
    assert names_damage(told.output, "05_kfold_results")
    assert "ROC" not in told.output
    headline = run_headline(run)
    assert headline.verdict.standing == "no result"
    assert not headline.scores
    listed = runs_table(run.root.parents[1])
    assert listed.frame["score"].to_list() == [None]
    assert names_damage(listed.notes, "05_kfold_results")
    assert names_damage(run_content(run).notes, "05_kfold_results")
    page = (run.root.parents[1] / "index.html").read_text()
    assert names_damage(page, "05_kfold_results")


@pytest.mark.fault(40)
def test_a_damaged_audit_leaves_no_number_standing(run: RunPaths) -> None:
    finish(run)
    flip(run.leakage_audit, random.Random(1))

    assert run_headline(run).verdict.standing == "not above control"
    assert CliRunner().invoke(main, ["report", str(run.root)]).exit_code == 3


@pytest.mark.fault(40)
@pytest.mark.parametrize("table", ["folds", "predictions"])
def test_compare_refuses_a_run_with_a_damaged_table(make_run: Callable[..., RunPaths], table: str) -> None:
    runs = [make_run(name=f"run_20250304_10150{number}_abcdef01", seed=0) for number in range(2)]
    for each in runs:
        finish(each)
    flip(runs[1].folds if table == "folds" else runs[1].predictions(3), random.Random(1))

    told = CliRunner().invoke(main, ["compare", *(str(each.root) for each in runs)])

    assert told.exit_code == 3
    assert names_damage(told.output, "02_folds" if table == "folds" else "04_fold_training_fold_3")


def test_a_table_written_interactively_is_read_and_repeated_on_resume(run: RunPaths) -> None:
    run.protocol.write_bytes(b"a table")
    task = next(task for task in finish(run) if task.key == "02_folds")
    folds = tables.read_table(run.folds, tables.FOLDS)

    tables.write_table(folds, tables.FOLDS, run.folds)
    assert reason_to_run(task, NOTHING, run) is None  # the same again: the stage is still finished
    tables.write_table(folds.reverse(), tables.FOLDS, run.folds)

    assert tables.read_table(run.folds, tables.FOLDS).equals(folds.reverse())
    assert reason_to_run(task, NOTHING, run) == "output missing or changed: tables/folds.parquet"
    run.folds.unlink()
    assert reason_to_run(task, NOTHING, run) is not None


@pytest.mark.fault(40)
def test_a_table_for_readers_alone_is_named_when_damaged_and_repeats_no_stage_when_rewritten(run: RunPaths) -> None:
    strips = pl.DataFrame({"video_id": ["a", "b"], "group_id": ["g", "h"], "jpeg_base64": ["/9j/4AAQ", "/9j/4BBQ"]})
    tables.write_table(strips, tables.VIDEO_FRAMES, run.video_frames)
    task = next(task for task in finish(run) if task.key == "05_kfold_results")
    generator = random.Random(5)
    for _ in range(FLIPS):
        content = flip(run.video_frames, generator)
        with pytest.raises(DataError, match="05_kfold_results"):
            tables.read_table(run.video_frames, tables.VIDEO_FRAMES)
        run.video_frames.write_bytes(content)

    tables.write_table(strips.reverse(), tables.VIDEO_FRAMES, run.video_frames)
    assert tables.read_table(run.video_frames, tables.VIDEO_FRAMES).equals(strips.reverse())
    assert reason_to_run(task, NOTHING, run) is None
    run.video_frames.unlink()
    assert reason_to_run(task, NOTHING, run) is None


def test_of_a_folds_damaged_log_the_command_is_said_to_repeat_all_folds(run: RunPaths) -> None:
    finish(run)
    log = run.metrics("04_fold_training", 1)
    flip(log, random.Random(0))
    assert "repeat 04_fold_training, with all its folds: " in damage_of(log)
    assert damage_of(log).endswith("--only 04_fold_training")


def test_a_copied_and_a_recordless_run_are_read_as_before(run: RunPaths, tmp_path: Path) -> None:
    flip_free = tables.read_table(run.results, tables.RESULTS)  # a straight pass leaves no records
    finish(run)
    copied = RunPaths(shutil.copytree(run.root, tmp_path / "elsewhere" / "[copy] of *" / run.run_id))
    assert tables.read_table(copied.results, tables.RESULTS).equals(flip_free)
    flip(copied.results, random.Random(1))
    with pytest.raises(DataError, match="--only 05_kfold_results"):
        tables.read_table(copied.results, tables.RESULTS)
    for torn in ("{", "[]", json.dumps({"files": []}), json.dumps({"files": {"kfold_results.feather": None}})):
        run.stage_checkpoint("05_kfold_results").write_text(torn)
        assert tables.read_table(run.results, tables.RESULTS).equals(flip_free)


def set_status(run: RunPaths, state: str, of_results: dict[str, object]) -> None:
    status = json.loads(run.status_json.read_text())
    status["state"] = state
    status["stages"]["05_kfold_results"] = of_results
    run.status_json.write_text(json.dumps(status))


def test_numbers_of_an_earlier_attempt_are_told_as_such(run: RunPaths) -> None:
    done = {"state": "done", "attempts": 1, "finished_utc": "2025-03-04T10:15:00Z"}
    set_status(run, "done", done)
    assert "  ROC-AUC with interval\n" in "\n".join(summary_lines(run))
    set_status(run, "failed", done)
    told = "\n".join(summary_lines(run))
    assert "ROC-AUC with interval, of attempt 1 of 05_kfold_results, which ended 2025-03-04 10:15 UTC\n" in told
    set_status(run, "failed", {"state": "pending", "attempts": 1})
    os.utime(run.results, (1_741_083_300, 1_741_083_300))
    told = "\n".join(summary_lines(run))
    assert "of an earlier attempt, written 2025-03-04 10:15 UTC: 05_kfold_results is pending\n" in told


def test_a_report_that_a_full_disk_has_no_room_for_is_an_error_that_names_no_old_file(
    run: RunPaths, tmp_path: Path
) -> None:
    with small_tmpfs(tmp_path / "disk", "64m") as disk:
        there = RunPaths(shutil.copytree(run.root, disk.folder / "runs" / "demo" / run.run_id))
        notebook(there.executed_notebook("05_kfold_results"), [])
        there.report_html.write_text("old")
        disk.fill()
        told = CliRunner().invoke(main, ["report", str(there.root)])
        assert told.exit_code == 1
        assert "error: the report was not written" in told.output
        assert "  report        " not in told.output
        assert there.report_html.read_text() == "old"
