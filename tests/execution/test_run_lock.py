"""One process at a time works on a run: real processes, kill -9, and a file system without locks."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from fvc_lib.execution.run import status
from fvc_lib.execution.run.status import is_task_worked_on, is_worked_on, run_lock
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from tests.execution.conftest import holder


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    root = tmp_path / "runs" / "e" / "run_20260101_000000_aaaaaaaa"
    root.mkdir(parents=True)
    return RunPaths(root)


@pytest.mark.fault(25, 26)
def test_a_second_process_is_refused_by_name_until_the_first_is_killed(run):
    with holder(run) as first:
        assert is_worked_on(run.root)
        with pytest.raises(UsageError, match=f"process {first.pid} on {socket.gethostname()}"), run_lock(run.root):
            pytest.fail("two at once")
    assert not is_worked_on(run.root)
    with run_lock(run.root), pytest.raises(UsageError, match=f"process {os.getpid()}"), run_lock(run.root):
        pytest.fail("two at once")


def test_a_job_waits_for_a_process_that_only_looks_at_the_lock(run):
    """As the jobs of an array, which begin together and all look at the lock of the whole run."""
    with holder(run):
        pass
    looking = FileLock(run.root / "run.lock", thread_local=False)
    looking.acquire()
    timer = threading.Timer(0.1, looking.release)
    timer.start()
    with run_lock(run.root, ["fold_0"]):
        assert not looking.is_locked
    timer.join()


@pytest.mark.fault(26)
def test_jobs_hold_their_tasks_against_each_other_and_against_the_whole_run(run):
    with holder(run, "fold_0") as first:
        assert is_worked_on(run.root)
        assert (is_task_worked_on(run.root, "fold_0"), is_task_worked_on(run.root, "fold_1")) == (True, False)
        for keys in (None, ["fold_0", "fold_1"]):
            with pytest.raises(UsageError, match=f"fold_0 of this run: process {first.pid}"), run_lock(run.root, keys):
                pytest.fail("two at once")
        with run_lock(run.root, ["fold_1"]):
            pass
    with holder(run), pytest.raises(UsageError, match="works on this run"), run_lock(run.root, ["fold_0"]):
        pytest.fail("two at once")


@pytest.mark.fault(26)
def test_of_a_runner_and_a_job_at_the_same_moment_never_both_begin(run):
    script = """
        import random, sys, time
        from pathlib import Path
        from fvc_lib.execution.run import status as lock
        from fvc_lib.services.errors import UsageError
        from fvc_lib.services.run_paths import RunPaths
        run = RunPaths(Path(sys.argv[1])); inside = run.root / "inside"; lock._PATIENCE_SECONDS = 0.01
        print("ready", flush=True)
        sys.stdin.readline()
        entered = 0
        while entered < 10:  # when the other has ended, nobody refuses any more
            try:
                with lock.run_lock(run.root, None if sys.argv[2] == "run" else ["one"]):
                    inside.mkdir()  # fails when the other is in
                    time.sleep(0.002)
                    inside.rmdir()
                entered += 1
            except UsageError:
                time.sleep(random.uniform(0, 0.006))
    """
    both = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(run.root), which],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for which in ("run", "task")
    ]  # fmt: skip
    for process in both:
        process.stdout.readline()
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    shown = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], shown


@pytest.mark.fault(25)
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_system_locks_a_dead_host_and_the_file_to_delete_are_named(run, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with run_lock(run.root), pytest.raises(UsageError, match=f"process {os.getpid()}"), run_lock(run.root):
        pytest.fail("two at once")
    assert not is_worked_on(run.root)
    (run.root / "run.lock").write_text("77\nfar-1\n")
    assert is_worked_on(run.root)
    with pytest.raises(UsageError, match=r"process 77 on far-1.* delete .*run\.lock"), run_lock(run.root):
        pytest.fail("two at once")


def test_a_lock_that_vanishes_while_it_is_looked_at_is_still_a_refusal(tmp_path, monkeypatch):
    """Of two processes that start together both may refuse, and the first to end deletes its lock."""
    monkeypatch.setattr(status, "is_held", lambda path, *patience: path.name == "run.lock")
    with pytest.raises(UsageError, match="process unknown"), run_lock(tmp_path, ["01_data_index"]):
        pass
