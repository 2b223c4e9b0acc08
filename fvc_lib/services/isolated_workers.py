"""Run one function over many items in child processes that may crash or hang without taking the run down.

Meant for native code on files nobody vouches for: a crash, a hang or a memory limit costs the one item in hand. The
children are plain interpreters that import the function by name and speak JSON lines. They need nothing of the
parent's ``__main__``, so this works in a script without a main guard and in a notebook kernel, where
``multiprocessing`` would run the script again or not find the function.
"""

import contextlib
import importlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fvc_lib import CHECKOUT
from fvc_lib.services.atomic_files import read_json_object
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory.budget import memory_budget, resident_bytes
from fvc_lib.services.tasks import PREDICTIONS, VERDICTS

DEFAULT_MEMORY_BYTES = 4 << 30
# Peak resident memory of a process that decodes or measures 1080p videos: 85 to 140 MB (Linux, x86-64).
WORKER_BYTES = 150_000_000
_START_SECONDS = 120.0
_EXIT_SECONDS = 5.0
LOOK_SECONDS = 0.5
_READY = b"ready"


@dataclass(frozen=True)
class Answer:
    """What became of one item: ``value`` is the function's JSON result, unless ``failure`` says why there is none."""

    position: int
    value: Any
    failure: Literal["crashed", "timeout"] | None = None
    detail: str = ""


@dataclass
class Suspects:
    """Files at which whole processes ended before, by their path in an item: the item itself, or its ``source``.

    Attributes:
        alone: these are begun last, while no other item is in hand.
        given_up: these are not begun at all; why, by path. Their answer is ``crashed``.
        in_hand: told the paths of all that is in hand: before one more is begun, and when one was answered.
    """

    alone: set[str] = field(default_factory=set)
    given_up: dict[str, str] = field(default_factory=dict)
    in_hand: Callable[[list[str]], None] | None = None

    def read(self, records: Path, stage: str) -> None:
        """Take those that the shards of ``stage`` noted, a JSON file of each in the folder ``records``; these only."""
        self.alone.clear()
        self.given_up.clear()
        for path in sorted(records.glob("[!.]*.json")):
            record = read_json_object(path)
            self.alone.update(record.get("alone", ()))
            again = "" if stage in {PREDICTIONS, VERDICTS} else f" and add --force {stage.split('_')[0]}"
            remedy = f"to try it again, delete {path}{again}"
            self.given_up.update(
                dict.fromkeys(record.get("given_up", ()), f"it ended the whole process twice; {remedy}")
            )


SUSPECTS = Suspects()  # of this process


def _path_of(item: Any) -> str:
    return str(item.get("source", "")) if isinstance(item, dict) else str(item)


def available_cores() -> int:
    """Return how many cores this process may use, at least one: its affinity, its container's quota, SLURM's share.

    Not every cluster keeps a job to the processors that it asked for, so ``SLURM_CPUS_PER_TASK`` counts as well.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    of_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    cores = min(cores, max(1, int(of_task))) if of_task.isdecimal() else cores
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups, or "max"
        return cores


def threads_of_a_fold(num_folds: int, num_ranks: int = 1) -> int:
    """Threads that one process of a fold's training computes with: ``OMP_NUM_THREADS``, else its part of the cores.

    All folds of a run have as many, however many train at once: the last bits of a sum depend on them, and neither
    ``--jobs`` nor a resume may change a number. More threads than cores would wait for each other, spinning.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return max(1, available_cores() // (num_folds * num_ranks))


def run_isolated(
    function: str,
    items: Sequence[Any],
    *,
    workers: int = 0,
    timeout_seconds: float | Sequence[float] = 120.0,
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    worker_bytes: int = WORKER_BYTES,
    look: Callable[[], None] = lambda: None,
) -> Generator[Answer]:
    """Yield one answer per item, in the order they are finished; closing the iterator ends the children.

    There are as many children as cores, items and the memory budget allow, at least one. A child of several that is
    killed may have been killed for the others' memory: half as many work from then on, and its item is tried once
    more, last and alone.

    Args:
        function: ``module:name`` of an importable function from one JSON value to one JSON value. An exception in it
            counts as a crash, so expected failures belong into its result.
        items: JSON values.
        workers: at most so many child processes; 0: one per available core.
        timeout_seconds: for one item, after which its child is killed; or a number for each.
        memory_bytes: address space of a child; none: unlimited.
        worker_bytes: resident memory of a child.
        look: called at least every ``LOOK_SECONDS`` while children are waited for; what it raises ends them.

    Raises:
        FvcError: a child cannot even start; the message holds the last line it wrote.
    """
    alone = {each for each, item in enumerate(items) if _path_of(item) in SUSPECTS.alone}
    queue = deque(sorted(range(len(items)), key=alone.__contains__))
    for each in [each for each in queue if _path_of(items[each]) in SUSPECTS.given_up]:
        queue.remove(each)
        yield Answer(each, None, "crashed", SUSPECTS.given_up[_path_of(items[each])])
    seconds = timeout_seconds if isinstance(timeout_seconds, Sequence) else [timeout_seconds] * len(items)
    room = memory_budget().total_bytes - resident_bytes()
    most = max(1, min(workers or available_cores(), room // worker_bytes))
    pool = [_Worker(function, max(seconds), memory_bytes, look) for _ in range(min(most, len(queue)))]
    try:
        while queue or any(worker.position is not None for worker in pool):
            look()
            allowed = most if queue and queue[0] not in alone else 1
            busy = [worker for worker in pool if worker.position is not None]
            idle = [worker for worker in pool if worker.position is None]
            room = max(0, allowed - len(busy))
            for worker in idle[room:]:
                worker.end()  # what it holds is not to be had
            for worker in idle[:room]:
                if queue and (queue[0] not in alone or not busy):
                    position = queue.popleft()
                    _note_in_hand(items, pool, position)
                    worker.submit(position, items[position], seconds[position])
                    busy.append(worker)
            for answer in _collect(busy):
                _note_in_hand(items, pool)
                killed = answer.failure == "crashed" and answer.detail.startswith("SIGKILL")
                if killed and len(pool) > 1 and answer.position not in alone:
                    alone.add(answer.position)
                    most = max(1, min(most, len(busy) // 2))
                    queue.append(answer.position)
                else:
                    yield answer
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """One child process, started again after each death, and the item it has in hand."""

    def __init__(self, function: str, most_seconds: float, memory_bytes: int | None, look: Callable[[], None]) -> None:
        self._look = look
        self._arguments = [function, repr(most_seconds), str(memory_bytes or 0)]
        self._timeout_seconds = most_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._buffer = b""
        self.position: int | None = None
        self.deadline = 0.0

    def submit(self, position: int, item: Any, timeout_seconds: float) -> None:
        """Give the child an item; a child that died while idle is replaced first."""
        line = json.dumps(item, ensure_ascii=True).encode() + b"\n"
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._send(line)
        except BrokenPipeError:
            self._start()
            self._send(line)
        self.position, self._timeout_seconds = position, timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds

    def receive(self) -> Answer | None:
        """Return the answer if the output that is ready completes one."""
        block = os.read(self.pipes()[1], 1 << 16)
        self._buffer += block
        if not block:
            return self._fail("crashed", self._death())
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        position, self.position = self.position, None
        return None if position is None else Answer(position, json.loads(line))

    def expire(self) -> Answer | None:
        """Return the failure if the item's time is over."""
        if time.monotonic() < self.deadline:
            return None
        return self._fail("timeout", f"no answer within {self._timeout_seconds:g} s")

    def stop(self) -> None:
        """End the child for good and free everything."""
        self.end()
        self._errors.close()

    def _fail(self, failure: Literal["crashed", "timeout"], detail: str) -> Answer | None:
        self.end()
        position, self.position = self.position, None
        return None if position is None else Answer(position, None, failure, detail)

    def _start(self) -> None:
        self.end()
        self._errors.seek(0)
        self._errors.truncate()
        # -P: a file in the working directory must not stand in for a module of ours.
        code = "from fvc_lib.services.isolated_workers import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_child_environment(),
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
        )
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipes()[1], selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                self._look()
                if not selector.select(LOOK_SECONDS):
                    if time.monotonic() < deadline:
                        continue
                    self.end()
                    raise FvcError(f"worker process: not ready within {_START_SECONDS:g} s. Is the machine overloaded?")
                block = os.read(self.pipes()[1], 1 << 16)
                if not block:
                    death = self._death()
                    self.end()
                    raise FvcError(f"worker process: cannot start: {death}. Repair the installation, or raise memory.")
                self._buffer += block
        self._buffer = b""

    def pipes(self) -> tuple[int, int]:
        """File descriptors to write items to, and to wait for answers on."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker was not started")
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def _send(self, line: bytes) -> None:
        while line:
            line = line[os.write(self.pipes()[0], line) :]

    def _death(self) -> str:
        """How the child ended, with the last line it wrote to its standard error."""
        code = self._exit_code()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read()[-4096:].decode("utf-8", "replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return f"{how}, {last}" if last else how

    def _exit_code(self) -> int:
        if self._process is None:
            return 0
        try:
            return self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its output but lives on
            self._process.kill()
            return self._process.wait()

    def end(self) -> None:
        """End the child; the next item gets another one."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None
        self._buffer = b""


def _note_in_hand(items: Sequence[Any], pool: Sequence[_Worker], *begun: int) -> None:
    if SUSPECTS.in_hand is not None:
        positions = [worker.position for worker in pool if worker.position is not None]
        SUSPECTS.in_hand([_path_of(items[position]) for position in (*positions, *begun)])


def _collect(busy: Sequence[_Worker]) -> Iterator[Answer]:
    """Wait until a busy worker has answered, died or run out of time, or until it is time to look around."""
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.pipes()[1], selectors.EVENT_READ, worker)
        wait = min(worker.deadline for worker in busy) - time.monotonic()
        ready = [key.data for key, _ in selector.select(min(max(0.0, wait), LOOK_SECONDS))]
    for worker in busy:
        answer = worker.receive() if worker in ready else worker.expire()
        if answer is not None:
            yield answer


def serve() -> None:
    """Run the child's main loop: one JSON item per line in, one JSON result per line out, until the input ends."""
    function, timeout_text, memory_text = sys.argv[1:4]
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    _limit_memory(int(memory_text))
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    os.write(answers, _READY + b"\n")
    for line in sys.stdin.buffer:
        _arm_timer(2 * float(timeout_text) + 1)
        answer = json.dumps(call(json.loads(line)), ensure_ascii=True, allow_nan=False).encode() + b"\n"
        _arm_timer(0)
        while answer:
            answer = answer[os.write(answers, answer) :]


def _arm_timer(seconds: float) -> None:
    """Let the kernel end this process when its parent is gone and it hangs, even inside native code."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses limits below what it has mapped already
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _child_environment() -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
    # One child per core is the parallelism; threads inside each would only fight over the cores and reserve memory.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
