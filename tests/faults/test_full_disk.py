"""Row 11: a checkpoint on a real disk that has room for none of it, for some of it, and at last for all."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from fvc_lib.services.checkpoint_files import CheckpointWriteError
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults import checkpoint_lives as lives
from tests.faults.conftest import STAGE, result_of
from tests.faults.disks import SmallDisk, small_tmpfs
from tests.kits.training import TinyTraining

PAGE = 4096


def leave(disk: SmallDisk, num_pages: int) -> None:
    """Fill the disk but for so many pages."""
    disk.fill()
    ballast = disk.folder / "ballast"
    os.truncate(ballast, ballast.stat().st_size - num_pages * PAGE)
    assert os.statvfs(disk.folder).f_bavail == num_pages


@pytest.mark.fault(11)
@pytest.mark.parametrize("act", [lives.save_in_mid_epoch, lives.save_a_better_epoch])
def test_with_any_number_of_free_pages_the_old_or_the_new_one_stands_and_the_disk_is_named(act, tmp_path, tally):
    lives.three_epochs(tmp_path / "before")
    with small_tmpfs(tmp_path / "disk", "512k") as disk:
        path = disk.folder / "fold_0"
        for num_pages in range(100):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(tmp_path / "before", path)
            leave(disk, num_pages)
            try:
                act(path)
                break
            except CheckpointWriteError as error:
                said = str(error)
            assert f"No space left on device; 0 MiB free on the disk of '{disk.folder}" in said
            assert "previous checkpoint is intact: make room" in said
            assert not list(path.glob(".*"))  # nothing half-written takes up room
            disk.make_room()
            checkpoint = lives.loaded(path)
            assert checkpoint.step in {30, 35, 40}
            act(path)
            assert lives.loaded(path).step in {35, 40}
            tally.add(survived=1)
    assert tally.survived == num_pages >= 5


@pytest.fixture
def tiny(tiny_training: TinyTraining) -> TinyTraining:
    return tiny_training.with_config(epochs=2, checkpoint_minutes=0)


class FillsAt:
    """A metric log after whose n-th line the checkpoints' disk has only so many pages left."""

    def __init__(self, log: MetricLog, disk: SmallDisk, line: int, num_pages: int) -> None:
        self._log, self._disk, self._left, self._num_pages = log, disk, line, num_pages

    def log(self, **line: object) -> None:
        self._log.log(**line)  # type: ignore[arg-type]
        self._left -= 1
        if self._left == 0:
            self._disk.fill()
            ballast = self._disk.folder / "ballast"
            os.truncate(ballast, ballast.stat().st_size - self._num_pages * PAGE)


def train(tiny: TinyTraining, disk: SmallDisk | None = None, line: int = 0, num_pages: int = 0) -> None:
    with MetricLog(tiny.paths.metrics(STAGE, 0), run_id=tiny.paths.run_id, fold=0) as log:
        train_fold(tiny.paths, tiny.config, 0, metric_log=FillsAt(log, disk, line, num_pages) if disk else log)


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "at", [((2, 0), (12, 50)), *(pytest.param(((n, 9 * n), (n, 0)), marks=pytest.mark.long) for n in range(1, 10))]
)
def test_a_training_ends_with_the_disk_s_name_and_goes_on_when_there_is_room(at, tiny, undisturbed, tmp_path, tally):
    with small_tmpfs(tiny.paths.root / "checkpoints", "4m") as disk:
        for line, num_pages in at:
            with pytest.raises(CheckpointWriteError, match=re.escape(f"free on the disk of '{disk.folder}")):
                train(tiny, disk, line, num_pages)
            assert not tiny.paths.predictions(0).exists()
            disk.make_room()
            tally.add(survived=1)
        train(tiny)
        assert result_of(tiny.paths) == undisturbed
