"""Row 5: whole runs that are asked to stop at random moments, from their process's start to its end."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from fvc_lib.execution.run.lock import is_worked_on
from fvc_lib.execution.run.status import status_now
from fvc_lib.services.run_paths import list_runs
from tests.faults.small_runs import (
    NUM_FAULTS,
    QUICK,
    SEED,
    Place,
    assert_nothing_is_redone,
    assert_same_end,
    untruths,
    wait_for_no_orphans,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CODE = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
SHORT_SECONDS = 3.0  # loading libraries, beginning the run, starting the first kernel


def wait_until_it_listens(process: subprocess.Popen[str]) -> None:
    """Until it handles signals: before, Python itself has only just begun, and the system's own way of dying holds."""
    wanted = sum(1 << number - 1 for number in SIGNALS)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) & wanted == wanted:
            return
        time.sleep(0.002)


@pytest.mark.long
@pytest.mark.fault(5)
def test_a_run_stopped_at_random_moments_says_so_and_ends_as_if_nothing_had_been(whole_runs, tmp_path, tally):
    whole, chance = whole_runs(QUICK), random.Random(f"signals {SEED}")
    places = (Place(tmp_path / str(number), whole.corpus, whole.values) for number in itertools.count())
    place, finished, codes = next(places), {}, Counter()
    while tally.survived < NUM_FAULTS:
        process, sent = place.go_on(), []
        wait_until_it_listens(process)
        for number in chance.choices(SIGNALS, k=chance.choice((1, 1, 1, 2))):
            # Two within a second may be one wish that came twice.
            longest = chance.choice((SHORT_SECONDS, whole.seconds / 2))
            seconds = 1.1 + chance.random() if sent else chance.uniform(0, longest)
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(number)
                sent.append(number)
        shown, _ = process.communicate(timeout=600)
        assert "Traceback" not in shown
        wait_for_no_orphans()
        if process.returncode == 0:  # it came to its end first: another run for the signals left
            (run,) = list_runs(place.runs)
            assert_same_end(run, whole.run)
            place, finished = next(places), {}
            continue
        expected = {CODE[number] for number in sent}  # the second may come when the first has been obeyed
        if len(sent) == 2:
            expected.add(130 if signal.SIGINT in sent else 143)
        assert process.returncode in expected, f"{sent}, {process.returncode}: {shown}"
        codes[process.returncode] += 1
        for run in list_runs(place.runs):
            assert not is_worked_on(run)
            assert status_now(run).state in {"requeue", "interrupted", "done"}, shown
            assert list(untruths(run)) == []
            assert_nothing_is_redone(run, finished)
        tally.add(survived=1)
    run, _ = place.run(*(["--resume", "latest"] if list_runs(place.runs) else []))
    assert list_runs(place.runs) == [run]
    assert_nothing_is_redone(run, finished)
    assert_same_end(run, whole.run)
    print(f"FVC_FAULT_SEED={SEED}: {tally.survived} signals, exit codes {dict(codes)}")
