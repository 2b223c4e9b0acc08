"""One process at a time on a run folder: real processes, kill -9, and claims of hosts that nobody can look into."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fvc_lib.execution.run import lock as run_lock_module
from fvc_lib.execution.run.lock import is_worked_on, read_claim, run_lock
from fvc_lib.services.atomic_files import this_host
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths

INTERVAL = 0.1
PATIENCE_SECONDS = 60.0
HOLD = """
    import sys, time
    from pathlib import Path
    from fvc_lib.execution.run.lock import run_lock
    from fvc_lib.services.run_paths import RunPaths
    with run_lock(RunPaths(Path(sys.argv[1])), interval_seconds=0.1):
        print("held", flush=True)
        time.sleep(600)
"""
# Beats without the system's lock, as a process on a machine whose locks do not reach here.
BEAT = """
    import json, os, sys, time
    file = os.open(sys.argv[1] + "/run.lock", os.O_WRONLY | os.O_CREAT)
    claim = {"pid": 77, "host": "far-1", "started_utc": "2026-01-01T00:00:00Z", "interval_seconds": 0.1}
    for beat in range(6000):
        os.pwrite(file, json.dumps({**claim, "beat": beat}).ljust(512).encode(), 0)
        if beat == 0:
            print("beating", flush=True)
        time.sleep(0.1)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    root = tmp_path / "runs" / "e" / "run_20260101_000000_aaaaaaaa"
    root.mkdir(parents=True)
    return RunPaths(root)


@contextmanager
def process(code: str, run: RunPaths) -> Iterator[subprocess.Popen[str]]:
    """A process that has said its first word."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(run.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def claim(run: RunPaths, *, seconds_old: float = 0.0, **values: object) -> None:
    """A holder's claim as it lies in the file, written ``seconds_old`` ago."""
    holder = {
        "pid": 77, "host": "far-1", "started_utc": "2026-01-01T00:00:00Z", "interval_seconds": INTERVAL, "beat": 3,
    }  # fmt: skip
    path = run.root / "run.lock"
    path.write_text(json.dumps({**holder, **values}))
    written = time.time() - seconds_old
    os.utime(path, (written, written))


def until_it_beats(run: RunPaths) -> Callable[[float], None]:
    """A ``time.sleep`` that wakes when the claim is another, however long a busy machine lets its holder wait."""
    sleep = time.sleep

    def wait(seconds: float) -> None:
        before, end = (run.root / "run.lock").read_bytes(), time.monotonic() + PATIENCE_SECONDS
        sleep(seconds)
        while (run.root / "run.lock").read_bytes() == before and time.monotonic() < end:
            sleep(0.02)

    return wait


def take(run: RunPaths) -> list[str]:
    """Take the lock and give it back; returns what was said."""
    said: list[str] = []
    with run_lock(run, interval_seconds=INTERVAL, say=said.append):
        assert is_worked_on(run)
    return said


def test_a_clean_exit_clears_the_claim_also_after_an_error(run):
    with run_lock(run, interval_seconds=INTERVAL):
        values = json.loads((run.root / "run.lock").read_text())
        assert (values["pid"], values["host"]) == (os.getpid(), this_host())
    assert (run.root / "run.lock").read_text() == ""
    with pytest.raises(ZeroDivisionError), run_lock(run):
        raise ZeroDivisionError
    assert (run.root / "run.lock").read_text() == ""
    assert not is_worked_on(run)
    assert take(run) == []


@pytest.mark.fault(26)
def test_the_second_process_is_refused_and_told_who_the_first_is(run):
    with process(HOLD, run) as holder:
        assert is_worked_on(run)
        with pytest.raises(UsageError, match=f"process {holder.pid} on {this_host()}, since 20"), run_lock(run):
            pytest.fail("two at once")
        assert is_worked_on(run)
    assert not is_worked_on(run)


@pytest.mark.fault(26)
def test_the_second_thread_of_one_process_is_refused_as_well(run):
    with run_lock(run), pytest.raises(UsageError, match=f"process {os.getpid()}"), run_lock(run):
        pytest.fail("two at once")


@pytest.mark.fault(25)
def test_the_lock_of_a_killed_process_expires_at_once(run, monkeypatch):
    with process(HOLD, run) as holder:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert json.loads((run.root / "run.lock").read_text())["pid"] == holder.pid
        assert not is_worked_on(run)
        monkeypatch.setattr(run_lock_module, "_seen_alive", lambda *_: pytest.fail("it waits"))
        (said,) = take(run)
        assert f"process {holder.pid} on {this_host()}" in said
        assert "was killed" in said


@pytest.mark.fault(25)
def test_the_lock_of_a_dead_host_expires_after_three_silent_intervals(run):
    claim(run, seconds_old=3600)
    assert not is_worked_on(run)
    watching, expired = take(run)
    assert "process 77 on far-1" in watching
    assert "was killed" in expired
    assert (run.root / "run.lock").read_text() == ""


@pytest.mark.fault(25)
def test_a_claim_of_a_moment_ago_from_another_host_is_believed_and_watched(run):
    claim(run, seconds_old=1)
    assert is_worked_on(run)
    assert len(take(run)) == 2


@pytest.mark.fault(26)
def test_a_holder_that_beats_on_another_host_is_refused_though_the_file_is_not_locked(run, monkeypatch):
    monkeypatch.setattr(time, "sleep", until_it_beats(run))
    with process(BEAT, run):
        assert is_worked_on(run)
        said: list[str] = []
        with pytest.raises(UsageError, match="process 77 on far-1"), run_lock(run, say=said.append):
            pytest.fail("two at once")
        assert len(said) == 1
        assert json.loads((run.root / "run.lock").read_text())["pid"] == 77


@pytest.mark.fault(26)
def test_a_beating_host_whose_clock_is_an_hour_off_is_seen_all_the_same(run, monkeypatch):
    with process(BEAT, run):
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        monkeypatch.setattr(time, "sleep", until_it_beats(run))
        assert is_worked_on(run)


def test_a_number_that_another_process_has_by_now_does_not_make_a_holder(run):
    claim(run, pid=os.getpid(), host=this_host())
    assert not is_worked_on(run)  # it would hold the system's lock
    assert len(take(run)) == 2


@pytest.mark.parametrize("content", [b"", b"process 12 on old", b"\0" * 512, b"[1]", b'{"pid": -1}'])
def test_a_file_that_names_nobody_holds_nothing(run, content):
    (run.root / "run.lock").write_bytes(content)
    assert not is_worked_on(run)
    assert take(run) == []


@pytest.mark.parametrize(("written", "seconds"), [("1e9", 60), ("Infinity", 60), ("NaN", 60), ("-5", 0.01)])
def test_a_damaged_interval_is_not_waited_for_for_ever(run, written, seconds):
    text = '{"pid": 77, "host": "far-1", "started_utc": "x", "interval_seconds": %s, "beat": 0}'
    (run.root / "run.lock").write_text(text % written)
    holder, _ = read_claim(run.root / "run.lock")
    assert holder is not None
    assert holder.interval_seconds == seconds


def test_the_beat_goes_on_and_every_reading_of_it_is_whole(run):
    beats, end = [], time.monotonic() + PATIENCE_SECONDS
    with process(HOLD, run):
        while len(set(beats)) < 3 or beats[-1] != beats[-2] + 1:  # one may be missed where this process was not let run
            assert time.monotonic() < end, beats
            beat = json.loads((run.root / "run.lock").read_text())["beat"]
            beats += [beat] if beat not in beats[-1:] else []
    assert beats == sorted(beats)


def test_a_process_that_was_thought_dead_learns_that_it_was_replaced_and_leaves_the_claim_alone(run):
    told: list[str] = []
    with run_lock(run, interval_seconds=INTERVAL, on_lost=told.append):
        claim(run)
        end = time.monotonic() + PATIENCE_SECONDS
        while not told:
            assert time.monotonic() < end
            if json.loads((run.root / "run.lock").read_text() or "{}").get("pid") == os.getpid():
                claim(run)  # a beat that had looked before the first claim came has overwritten it
            time.sleep(0.01)
    assert "taken over by process 77 on far-1" in told[0]
    assert json.loads((run.root / "run.lock").read_text())["pid"] == 77


def test_looking_writes_nothing_and_needs_no_file(run):
    assert not is_worked_on(run)
    assert list(run.root.iterdir()) == []
