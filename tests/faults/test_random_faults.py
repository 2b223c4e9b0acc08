"""Rows 1, 3, 5, 11, 12, 20 and 42: whole runs meet one kind of fault again and again, at random.

They end as an undisturbed run does. ``make kills`` runs the kills, ``make faults`` all.
"""

import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from fvc_lib.execution.run.status import is_worked_on, read_status, status_now
from fvc_lib.services.run_paths import RunPaths, list_runs
from tests.faults.disks import small_tmpfs
from tests.faults.small_runs import (
    NUM_FAULTS,
    QUICK,
    ROOT,
    SEED,
    Place,
    Whole,
    assert_nothing_is_redone,
    assert_same_end,
    metrics_of,
    results_of,
    untruths,
    wait_for_no_orphans,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDED = {"done", "failed", "interrupted", "requeue"}
# A fault: a started or resumed run that met it, and the exit codes it allows besides 0.
End = tuple["subprocess.Popen[str]", set[int]]


def kill_runner(place: Place, whole: Whole, chance: random.Random) -> End:
    """Kill the runner alone; its kernels have to leave by themselves."""
    process = place.go_on()
    with suppress(subprocess.TimeoutExpired):
        process.wait(chance.uniform(0.2, whole.seconds))
    process.kill()
    return process, {-signal.SIGKILL}


def kill_kernel(place: Place, whole: Whole, chance: random.Random) -> End:
    process, killed = place.go_on(), False
    with suppress(subprocess.TimeoutExpired):
        process.wait(chance.uniform(0.2, whole.seconds))
    while process.poll() is None and not killed:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                # The runner started the server that forks kernels. Kernels lead a session, and their watchers do not.
                is_forked = child.ppid() != process.pid and os.getsid(child.pid) == child.pid
                is_kernel = is_forked or any("ipykernel" in part for part in child.cmdline())
                if not killed and is_kernel:
                    child.kill()
                    killed = True
        time.sleep(0.02)
    return process, {137}


def stop(place: Place, whole: Whole, chance: random.Random) -> End:
    """Send one signal or two."""
    process, sent = place.go_on(), list[signal.Signals]()
    wanted = sum(1 << number - 1 for number in SIGNALS)
    while process.poll() is None:  # until it handles signals; before, Python itself has only just begun
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
        if int(caught.split()[1], 16) & wanted == wanted:
            break
        time.sleep(0.002)
    for number in chance.choices(SIGNALS, k=chance.choice((1, 1, 1, 2))):
        # Two within a second may be one wish that came twice. The first three seconds load libraries.
        seconds = 1.1 + chance.random() if sent else chance.uniform(0, chance.choice((3.0, whole.seconds / 2)))
        try:
            process.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            sent.append(number)
    expected = {130 if number == signal.SIGINT else 75 for number in sent}
    if len(sent) == 2:
        expected.add(130 if signal.SIGINT in sent else 143)
    return process, expected


def fill_disk(place: Place, whole: Whole, chance: random.Random) -> End:
    """Leave bytes on a logarithmic scale: less than one file, some files, one of the report's pages, all of them."""
    remount(place.folder.parent, int(4e3 * 1e4 ** chance.random()))
    return place.go_on(), {1}


def remount(disk: Path, num_bytes: int) -> None:
    size = shutil.disk_usage(disk).used + num_bytes
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def assert_same_numbers(run: RunPaths, whole: RunPaths) -> None:
    """Check the run against the undisturbed one; its logs may lack lines, which the run says."""
    assert read_status(run).state == "done"
    assert run.report_html.read_text().rstrip().endswith("</html>")
    assert results_of(run) == results_of(whole)
    assert metrics_of(run).items() <= metrics_of(whole).items()


FAULTS = {kill_runner: (1, 3), kill_kernel: (1, 3), stop: (5,), fill_disk: (11, 12, 42)}


@pytest.mark.long
@pytest.mark.parametrize(
    "live", [pytest.param(live, marks=pytest.mark.fault(*rows), id=live.__name__) for live, rows in FAULTS.items()]
)
def test_a_run_that_meets_faults_at_random_ends_as_if_nothing_had_been(whole_runs, tmp_path, live, tally):
    whole, chance = whole_runs(QUICK), random.Random(f"{live.__name__} {SEED}")
    finished, codes, disk = dict[str, int](), Counter[int](), tmp_path / "disk"
    fills = live is fill_disk
    assert_end = assert_same_numbers if fills else assert_same_end
    with small_tmpfs(disk) if fills else nullcontext(disk.mkdir()):
        places = (Place(disk / str(number), whole.corpus, whole.values) for number in itertools.count())
        place = next(places)
        while tally.survived < NUM_FAULTS:
            process, allowed = live(place, whole, chance)
            shown, _ = process.communicate(timeout=600)
            code = process.returncode
            wait_for_no_orphans()
            codes[code] += 1
            assert "Traceback" not in shown
            assert code in {0, *allowed}, shown
            assert not fills or code == 0 or (str(disk) in shown and "No space left on device" in shown), shown
            for run in list_runs(place.runs):
                assert not is_worked_on(run.root)
                assert status_now(run).state in ENDED, shown
                assert list(untruths(run)) == [], shown
                assert_nothing_is_redone(run, finished)
            tally.add(survived=1)
            if code == 0:  # it came to its end: another run for the faults left
                assert_end(list_runs(place.runs)[0], whole.run)
                shutil.rmtree(place.folder)
                place, finished = next(places), {}
        if fills:
            remount(disk, 1 << 28)
        run, _ = place.run(*(["--resume", "latest"] if list_runs(place.runs) else []))
        assert list_runs(place.runs) == [run]
        assert_nothing_is_redone(run, finished)
        assert_end(run, whole.run)
    print(f"FVC_FAULT_SEED={SEED}: {tally.survived} faults, exit codes {dict(codes)}")


@pytest.mark.fault(20)
def test_too_few_addresses_are_refused_before_a_library_hangs(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_notebooks.py"), "status"], cwd=tmp_path, capture_output=True, text=True,
        check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 29, hard)),
    )  # fmt: skip
    assert done.returncode == 2
    assert "ulimit -v" in done.stderr
    assert "Traceback" not in done.stderr
