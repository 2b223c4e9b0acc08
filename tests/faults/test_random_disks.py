"""Rows 11, 12 and 42: whole runs on a disk that is full after a random number of bytes, again and again."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.services.run_paths import RunPaths, list_runs
from tests.faults.disks import small_tmpfs
from tests.faults.small_runs import (
    NUM_FAULTS,
    QUICK,
    SEED,
    Place,
    assert_nothing_is_redone,
    metrics_of,
    results_of,
    untruths,
    wait_for_no_orphans,
)

PLENTY = 1 << 28
# Bytes, evenly on a logarithmic scale: less than one file, some files, one of the report's pages, all of them.
LEAST, MOST = 4e3, 4e7


@pytest.mark.long
@pytest.mark.fault(11, 12, 42)
def test_a_run_whose_disk_is_full_after_any_number_of_bytes_says_so_and_goes_on(whole_runs, tmp_path, tally):
    whole, chance = whole_runs(QUICK), random.Random(f"disks {SEED}")
    finished, codes = {}, Counter()
    with small_tmpfs(tmp_path / "disk", "64k") as disk:
        place = Place(disk.folder / "work", whole.corpus, whole.values)
        while tally.survived < NUM_FAULTS:
            make_room(disk.folder, int(LEAST * (MOST / LEAST) ** chance.random()))
            process = place.go_on()
            shown, _ = process.communicate(timeout=600)
            wait_for_no_orphans()
            assert "Traceback" not in shown
            for run in list_runs(place.runs):
                assert not is_worked_on(run)
                assert list(untruths(run)) == [], shown
                assert_nothing_is_redone(run, finished)
            if process.returncode == 0:  # all of it found room: another run for the disks left
                assert_same_numbers(list_runs(place.runs)[0], whole.run)
                shutil.rmtree(place.folder)
                finished.clear()
                continue
            codes[process.returncode] += 1
            assert process.returncode == 1, shown
            assert "No space left on device" in shown
            assert str(disk.folder) in shown
            for run in list_runs(place.runs):
                assert status_now(run).state in {"failed", "interrupted", "done"}
            tally.add(survived=1)
        make_room(disk.folder, PLENTY)
        process = place.go_on()
        shown, _ = process.communicate(timeout=600)
        assert process.returncode == 0, shown
        (run,) = list_runs(place.runs)
        assert_nothing_is_redone(run, finished)
        assert_same_numbers(run, whole.run)
    print(f"FVC_FAULT_SEED={SEED}: {tally.survived} full disks, exit codes {dict(codes)}")


def make_room(disk: Path, num_bytes: int) -> None:
    """Let so much more be written."""
    size = shutil.disk_usage(disk).used + num_bytes
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def assert_same_numbers(run: RunPaths, whole: RunPaths) -> None:
    """As the undisturbed run's; of a log lines may be lost, which the run says."""
    assert read_status(run).state == "done"
    assert run.report_html.read_text().rstrip().endswith("</html>")
    assert results_of(run) == results_of(whole)
    assert metrics_of(run).items() <= metrics_of(whole).items()
