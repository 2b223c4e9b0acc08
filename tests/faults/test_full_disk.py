"""Row 11: a checkpoint on a real disk that has room for none of it, for some of it, and at last for all."""

from __future__ import annotations

import os
import shutil

import pytest

from fvc_lib.services.checkpoint_files import CheckpointWriteError
from tests.faults import checkpoint_lives as lives
from tests.faults.disks import SmallDisk, small_tmpfs

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
    assert tally.survived == num_pages >= 4
