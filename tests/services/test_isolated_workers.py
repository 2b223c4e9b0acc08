import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fvc_lib.services import isolated_workers
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.services.memory import MemoryBudget

MODULE = """
import ctypes, fcntl, os, time

def work(item):
    kind, value = item
    if kind == "segfault":
        ctypes.string_at(0)
    elif kind == "exit":
        os._exit(7)
    elif kind == "raise":
        raise ValueError("not this one")
    elif kind == "hang":
        time.sleep(1000)
    elif kind == "memory":
        bytearray(value)
    elif kind == "print":
        print("noise", flush=True)
        os.write(1, b"native noise\\n")
    elif kind == "pid":
        return os.getpid()
    elif kind == "killed":  # only the first process is killed, as by the system for memory
        try:
            os.close(os.open(value, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return value
        os.kill(os.getpid(), 9)
    elif kind == "alone":  # killed while another child lives, as if memory sufficed for one
        import psutil
        try:
            others = [each.cmdline() for each in psutil.Process(os.getppid()).children() if each.pid != os.getpid()]
        except psutil.Error:  # one of them ended just now
            others = ["isolated_workers"]
        if "isolated_workers" in str(others):
            os.kill(os.getpid(), 9)
        return value
    elif kind == "large":
        held = b"x" * value
        time.sleep(0.2)
        return [os.getpid(), time.monotonic() - 0.2, time.monotonic()]
    elif kind == "hold":
        lock = open(value, "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("held")
        lock.flush()
        time.sleep(60)
        lock.write(" until it was done")
    return value
"""


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "worked.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    return "worked:work"


def by_position(answers: list[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda answer: answer.position)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_is_answered_once(function: str, workers: int) -> None:
    items = [["echo", f"naïve \udcff\n{number}"] for number in range(20)]
    answers = by_position(list(run_isolated(function, items, workers=workers)))
    assert [(a.position, a.value, a.failure) for a in answers] == [(n, item[1], None) for n, item in enumerate(items)]


def test_a_crash_costs_one_item(function: str) -> None:
    items = [["echo", 0], ["segfault", 1], ["echo", 2], ["exit", 3], ["raise", 4], ["print", 5], ["echo", 6]]
    answers = by_position(list(run_isolated(function, items, workers=1)))
    assert [a.failure for a in answers] == [None, "crashed", None, "crashed", "crashed", None, None]
    assert [a.value for a in answers] == [0, None, 2, None, None, 5, 6]
    assert "SIGSEGV" in answers[1].detail
    assert "exit code 7" in answers[3].detail
    assert "ValueError: not this one" in answers[4].detail


def test_a_hang_costs_its_time_limit_only(function: str) -> None:
    items = [["hang", 0], ["echo", 1], ["hang", 2], ["echo", 3]]
    answers = by_position(list(run_isolated(function, items, workers=2, timeout_seconds=[0.3, 60.0, 0.2, 60.0])))
    assert [a.failure for a in answers] == ["timeout", None, "timeout", None]
    assert [a.detail for a in answers if a.failure] == ["no answer within 0.3 s", "no answer within 0.2 s"]


def test_memory_is_limited(function: str) -> None:
    items = [["memory", 2 << 30], ["memory", 1 << 20]]
    answers = by_position(list(run_isolated(function, items, workers=1, memory_bytes=1 << 30)))
    assert answers[0].failure == "crashed"
    assert "MemoryError" in answers[0].detail
    assert answers[1].failure is None


def test_a_worker_that_cannot_start_is_no_answer() -> None:
    with pytest.raises(FvcError, match=r"cannot start.*no_such_module"):
        list(run_isolated("no_such_module:f", [1]))


def test_what_a_look_around_raises_ends_the_children_that_are_waited_for(function: str) -> None:
    answered: list[int] = []

    def look() -> None:
        if answered:
            raise KeyError("enough")

    answers = run_isolated(function, [["pid", 0], ["hang", 1]], workers=1, look=look)
    answered.append(next(answers).value)
    with pytest.raises(KeyError):
        next(answers)
    with pytest.raises(ProcessLookupError):
        os.kill(answered[0], 0)


def test_a_hanging_child_does_not_outlive_a_killed_parent(function: str, tmp_path: Path) -> None:
    held = tmp_path / "held"
    code = (
        "from fvc_lib.services.isolated_workers import run_isolated\n"
        f"list(run_isolated({function!r}, [['hold', {str(held)!r}]], workers=1, timeout_seconds=0.1))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (held.exists() and held.read_text() == "held"):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
    with held.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait for the child's end
        assert lock.read() == "held"


def test_no_more_workers_than_memory_holds(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_workers, "resident_bytes", lambda: 10**9)
    monkeypatch.setattr(isolated_workers, "memory_budget", lambda: MemoryBudget(10**9 + 250 * 10**6, "test"))
    answers = list(run_isolated(function, [["large", 1]] * 4, workers=3, worker_bytes=10**8))
    pids = {answer.value[0] for answer in answers}
    assert len(pids) <= 2
    begun = [answer.value[1:] for answer in answers]
    assert all(sum(start <= at < end for start, end in begun) <= 2 for at, _ in begun)


def test_a_worker_killed_beside_others_costs_no_item(function: str, tmp_path: Path) -> None:
    died = str(tmp_path / "died")
    answers = by_position(list(run_isolated(function, [["killed", died]] * 4, workers=2)))
    assert [(answer.value, answer.failure) for answer in answers] == [(died, None)] * 4
    answers = by_position(list(run_isolated(function, [["alone", number] for number in range(3)], workers=3)))
    assert [answer.value for answer in answers] == [0, 1, 2]
    (tmp_path / "died").unlink()
    (alone, *_) = by_position(list(run_isolated(function, [["killed", died]] * 2, workers=1)))
    assert alone.failure == "crashed"
