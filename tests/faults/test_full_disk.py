"""Rows 11, 12 and 13: a checkpoint or a log on a full disk, and a run folder that cannot be written."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from fvc_lib.command_line.main import main
from fvc_lib.execution.run.record import begin_run
from fvc_lib.services.checkpoint_files import CheckpointWriteError
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults import checkpoint_lives as lives
from tests.faults.conftest import result_of
from tests.faults.disks import read_only, small_tmpfs

PAGE = 4096


@pytest.mark.fault(11)
@pytest.mark.parametrize("save", lives.SAVES)
def test_with_any_number_of_free_pages_the_old_or_the_new_one_stands_and_the_disk_is_named(save, tmp_path, tally):
    act, step = lives.SAVES[save]
    lives.three_epochs(tmp_path / "before")
    with small_tmpfs(tmp_path / "disk", "512k") as disk:
        path, ballast = disk.folder / "fold_0", disk.folder / "ballast"
        for num_pages in range(100):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(tmp_path / "before", path)
            disk.fill()
            os.truncate(ballast, ballast.stat().st_size - num_pages * PAGE)
            assert os.statvfs(disk.folder).f_bavail == num_pages
            try:
                act(path)
                break
            except CheckpointWriteError as error:
                said = str(error)
            assert f"No space left on device; 0 MiB free on the disk of '{disk.folder}" in said
            assert "previous checkpoint is intact: make room" in said
            assert not list(path.glob(".*"))  # nothing half-written takes up room
            disk.make_room()
            assert lives.loaded(path).step in {30, step}
            act(path)
            assert lives.loaded(path).step == step
            tally.add(survived=1)
    assert tally.survived == num_pages >= 4


@pytest.mark.fault(12)
def test_training_goes_on_while_the_log_s_disk_is_full_and_says_what_it_lost(tiny, undisturbed, tmp_path, caplog):
    with small_tmpfs(tmp_path / "logs", "256k") as disk:
        with MetricLog(disk.folder / "m.jsonl", run_id="r", fold=0) as log:
            inner, calls = log.log, iter(range(10_000))

            def log_on_a_moody_disk(**line: object) -> None:
                {5: disk.fill, 25: disk.make_room}.get(next(calls), lambda: None)()
                inner(**line)

            log.log = log_on_a_moody_disk  # type: ignore[method-assign]
            train_fold(tiny.paths, tiny.config, 0, metric_log=log)
        assert f"{log.lines_lost:,} lines are lost" in caplog.text
    assert log.lines_lost > 0
    assert replace(result_of(tiny.paths), metrics=undisturbed.metrics) == undisturbed


@pytest.mark.fault(13)
def test_a_run_folder_that_cannot_be_written_ends_the_fold_before_its_first_step(tiny, list_log):
    log, forwards = list_log(), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: forwards.append(module))
    try:
        with read_only(tiny.paths.root), pytest.raises((OSError, FvcError), match=r"(?i)read-only|permission denied"):
            train_fold(tiny.paths, tiny.config, 0, metric_log=log)
        assert log.lines == forwards == []
        train_fold(tiny.paths, tiny.config, 0, metric_log=log)  # and once it can be written, it runs
        assert forwards
    finally:
        hook.remove()


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_command_on_what_cannot_be_written_says_so_and_runs_nothing(tmp_path, monkeypatch):
    runs_dir = tmp_path / "runs"
    run = begin_run(RunConfig(runs_dir=str(runs_dir)), command="test")
    monkeypatch.setenv("FVC_RUNS_DIR", str(runs_dir))
    with read_only(runs_dir):
        for arguments in (["--resume", "latest"], []):
            done = CliRunner().invoke(main, [*arguments, "--jobs", "1"])  # so no step is tried out
            assert done.exit_code == 1
            assert f"error: {runs_dir}" in done.stderr
            assert "May it be written?" in done.stderr
    assert list_runs(runs_dir) == [run]
    assert not run.notebooks.exists()
