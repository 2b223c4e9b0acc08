"""Rows 16 to 20: whole runs with a random amount of memory or addresses, from far too little to plenty."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import PREDICTIONS, read_table
from tests.faults.small_runs import (
    NUM_FAULTS,
    ROOT,
    SEED,
    SMALL,
    Place,
    assert_nothing_is_redone,
    untruths,
    wait_for_no_orphans,
)

Limit = tuple[Callable[[], None] | None, dict[str, str]]


@contextmanager
def addresses(num_bytes: int) -> Iterator[Limit]:
    """A limit on the addresses of each process, as ``ulimit -v`` sets it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    yield lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard)), {}


@contextmanager
def budget(num_bytes: int) -> Iterator[Limit]:
    """The limit that FVC itself keeps."""
    yield None, {"FVC_MEM_GB": f"{num_bytes / 1e9:.3f}"}


@contextmanager
def control_group(num_bytes: int) -> Iterator[Limit]:
    """A control group in which the system kills for memory; the test is skipped where none may be made."""
    top = Path("/sys/fs/cgroup")
    parent, name = (top / "memory", "memory.limit_in_bytes") if (top / "memory").is_dir() else (top, "memory.max")
    group = parent / f"fvc-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(num_bytes))
    except OSError as error:
        pytest.skip(f"may not make a control group: {error}")
    try:
        yield lambda: (group / "cgroup.procs").write_text("0") and None, {}
    finally:
        end = time.monotonic() + 60
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:  # who was killed is not gone yet
                assert time.monotonic() < end, f"{group} is not left by its processes"
                time.sleep(0.1)


# What is drawn, evenly on a logarithmic scale: bytes, from far too little to enough.
RANGES = {addresses: (5e7, 8e9), budget: (3e7, 4e9), control_group: (1e8, 4e9)}


@pytest.mark.fault(20)
def test_too_few_addresses_are_refused_before_a_library_hangs(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_notebooks.py"), "status"], cwd=tmp_path, capture_output=True, text=True,
        check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 29, hard)),
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: a process may have 1.50 GiB of addresses here (ulimit -v), wanted at least 4 GiB" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.fault(16, 17, 18, 20)
@pytest.mark.parametrize("limited", RANGES, ids=lambda limited: limited.__name__)
def test_a_run_with_any_amount_of_memory_ends_equal_or_says_what_helps(whole_runs, tmp_path, limited, tally):
    whole, chance = whole_runs(SMALL), random.Random(f"memory {SEED}")
    place, finished, codes = Place(tmp_path / "limited", whole.corpus, whole.values), {}, Counter()
    low, high = RANGES[limited]
    while tally.survived < NUM_FAULTS:
        num_bytes = int(low * (high / low) ** chance.random())
        with limited(num_bytes) as (limit, variables):
            process = place.go_on(limit=limit, variables=variables)
            shown, _ = process.communicate(timeout=600)
            wait_for_no_orphans()
        codes[process.returncode] += 1
        print(f"{num_bytes / 1e9:.3f} GB: {process.returncode}")
        assert "Traceback" not in shown
        for run in list_runs(place.runs):
            assert not is_worked_on(run)
            assert status_now(run).state in ({"done"} if process.returncode == 0 else {"failed", "interrupted", "done"})
            assert list(untruths(run)) == [], shown
            assert_nothing_is_redone(run, finished)
        if process.returncode == 0:
            assert_equal_but_for_rounding(list_runs(place.runs)[0], whole.run)
            place, finished = Place(tmp_path / f"limited {tally.survived}", whole.corpus, whole.values), {}
        elif limited is addresses:
            assert process.returncode == 2, shown
            assert "ulimit -v unlimited" in shown
        elif limited is budget:
            assert process.returncode == 2, shown
            assert "-p mem_gb none" in shown
        elif process.returncode != -9:  # it was the runner that the system killed: nobody is left to say so
            assert process.returncode == 137, shown
            assert "out of memory" in shown
            assert "  to go on: " in shown
        tally.add(survived=1)
    # A budget stays with a run until another is asked for.
    run, _ = place.run(*(["--resume", "latest", "-p", "mem_gb", "none"] if list_runs(place.runs) else []))
    assert_nothing_is_redone(run, finished)
    assert_equal_but_for_rounding(run, whole.run)
    print(f"FVC_FAULT_SEED={SEED}: {tally.survived} limits, exit codes {dict(codes)}")


def assert_equal_but_for_rounding(run: RunPaths, whole: RunPaths) -> None:
    """All done, and every score the undisturbed run's, as far as splitting a batch changes sums."""
    assert read_status(run).state == "done"
    for fold in range(2):
        found, wanted = (read_table(each.predictions(fold), PREDICTIONS) for each in (run, whole))
        assert found.drop("score", "logit", "control_score", "temperature", "threshold").equals(
            wanted.drop("score", "logit", "control_score", "temperature", "threshold")
        )
        # Where a ReLU or a maximum is at its kink, rounding becomes a jump: 2 of 120 gradients of this network moved
        # by 0.06 % and 4 % between one batch of 8 and eight of 1, and in float64 none by more than 1e-15.
        for name in ("score", "control_score"):
            assert found[name].to_list() == pytest.approx(wanted[name].to_list(), abs=5e-3)
