"""Apply one function to many items in child processes, so that a crash or hang in the function does not end the run.

This is meant for native code that reads untrusted files. If it crashes, hangs or exceeds the memory limit, only the
current item fails. The children are plain interpreters that import the function by name and exchange JSON lines. They
do not import the parent's ``__main__``, so this works in a script without a main guard and in a notebook kernel.
``multiprocessing`` would run such a script again, and would not find a function of a notebook.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from fvc_lib import CHECKOUT
from fvc_lib.services.atomic_files import read_json_object
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory import memory_budget, resident_bytes

DEFAULT_MEMORY_BYTES = 4 << 30
# Peak resident memory of a process that decodes or measures 1080p videos: 85 to 140 MB (Linux, x86-64).
WORKER_BYTES = 150_000_000
_START_SECONDS = 120.0
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Answer:
    """The result, or the failure, of calling a function on one item in a child process (``run_isolated``).

    Attributes:
        position: index of the item in the argument ``items``.
        value: the function's JSON result; None if ``failure`` is set.
        failure: ``crashed`` or ``timeout``; None for a success.
        detail: explanation of the failure.
    """

    position: int
    value: Any
    failure: Literal["crashed", "timeout"] | None = None
    detail: str = ""


@dataclass
class Suspects:
    """Files that were being processed when an earlier parent process died, and so may have killed it.

    ``run_isolated`` handles these files alone, or not at all. It knows the file of an item by its path: the item itself
    is a path, or it is a dict with a path under ``source``.

    Attributes:
        alone: paths of files that are processed last, one at a time.
        given_up: reasons, by path, for files that are not processed any more. Their answer is ``crashed``.
        in_hand: called with the paths of all items in progress, whenever an item begins or ends; None: not called.
    """

    alone: set[str] = field(default_factory=set)
    given_up: dict[str, str] = field(default_factory=dict)
    in_hand: Callable[[list[str]], None] | None = None

    def read(self, records: Path) -> None:
        """Read the suspects that earlier processes recorded, and replace ``alone`` and ``given_up`` by them.

        ``records`` is a folder with JSON files. Each of them lists the suspects of one shard (a job that does a part of
        a stage's work). A missing folder or an unreadable file adds nothing.
        """
        self.alone.clear()
        self.given_up.clear()
        for path in sorted(records.glob("[!.]*.json")):
            record = read_json_object(path)
            reason = f"it ended the whole process twice; to try it again, delete {path}; a stage also needs --force"
            self.alone.update(record.get("alone", ()))
            self.given_up.update(dict.fromkeys(record.get("given_up", ()), reason))


SUSPECTS = Suspects()  # the suspects that ``run_isolated`` uses in this process


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    It is the smallest of three limits: the CPU affinity, the container's quota and ``SLURM_CPUS_PER_TASK``. SLURM's
    variable is read because some clusters do not confine a job to the cores that it requested.
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
    """Return the number of threads for one training process: ``OMP_NUM_THREADS`` if set, else its share of the cores.

    The cores are divided equally among ``num_folds`` trainings of ``num_ranks`` processes each; the result is at least
    1. All folds of a run get the same number, because the last bits of a sum depend on it.
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
    """Call ``function`` on every item in child processes, and yield one answer per item as soon as it is finished.

    The number of children is limited by the cores, the items and the memory budget, and is at least one. If one of
    several children is killed, the others may have used up the memory. So half as many children work from then on, and
    the item of the killed child is tried once more at the end, alone. Closing the iterator kills the children.

    Args:
        function: ``module:name`` of an importable function that maps one JSON value to one JSON value. An exception in
            it counts as a crash, so return expected failures as a result.
        items: JSON values, the arguments of ``function``.
        workers: at most this many child processes; 0: one per available core.
        timeout_seconds: time limit of one item, after which its child is killed; or a sequence with one limit per item.
        memory_bytes: limit of a child's address space; None: unlimited.
        worker_bytes: expected resident memory of a child, from which the number of children is computed.
        look: called at least every ``LOOK_SECONDS`` while the children work, for example to check for a stop request.
            If it raises, the children are killed.

    Raises:
        FvcError: a child cannot start; the message has the last line that the child wrote.
    """
    paths = [str(item.get("source", "")) if isinstance(item, dict) else str(item) for item in items]
    alone: set[int] = set()
    queue: deque[int] = deque()
    for position, path in enumerate(paths):
        if path in SUSPECTS.given_up:
            yield Answer(position, None, "crashed", SUSPECTS.given_up[path])
        elif path not in SUSPECTS.alone:
            queue.append(position)
        else:
            alone.add(position)
    queue.extend(sorted(alone))
    if not queue:
        return
    seconds = timeout_seconds if isinstance(timeout_seconds, Sequence) else [timeout_seconds] * len(items)
    room = memory_budget().total_bytes - resident_bytes()
    most = at_first = max(1, min(workers or available_cores(), room // worker_bytes, len(queue)))
    arguments = [function, str(memory_bytes or 0)]
    busy: list[_Child] = []
    idle: list[_Child] = []

    def note_in_hand() -> None:
        if SUSPECTS.in_hand is not None:
            SUSPECTS.in_hand([paths[child.position] for child in busy])

    try:
        while queue or busy:
            look()
            while queue and len(busy) < (1 if queue[0] in alone else most):
                child = idle.pop() if idle else _early.pop(tuple(arguments), None) or _Child(arguments)
                child.position = queue.popleft()
                busy.append(child)
                note_in_hand()
                child.begin(items[child.position], seconds[child.position])
            while idle:
                idle.pop().end()  # its memory is for the others
            ready = wait([child.answers.fileno() for child in busy], LOOK_SECONDS)
            for child in tuple(busy):
                answer = child.answer(is_readable=child.answers.fileno() in ready)
                if answer is None:
                    continue
                busy.remove(child)
                note_in_hand()
                if answer.failure is None:
                    idle.append(child)
                else:
                    child.end()
                killed = answer.failure == "crashed" and answer.detail.startswith("SIGKILL")
                if killed and at_first > 1 and answer.position not in alone:
                    alone.add(answer.position)
                    most = max(1, min(most, (len(busy) + 1) // 2))
                    queue.append(answer.position)
                else:
                    yield answer
    finally:
        for child in (*busy, *idle):
            child.end()


_early: dict[tuple[str, ...], Any] = {}  # children that no call of ``run_isolated`` has used yet, by arguments


def start_early(function: str) -> Callable[[], None]:
    """Start a child process before ``run_isolated`` needs it, to save time.

    The child imports its modules while this process does other work. The first call of ``run_isolated`` for the same
    function and the default memory limit uses the child.

    Args:
        function: ``module:name`` of the function that ``run_isolated`` will call.

    Returns:
        A function that ends the child if it was not used.
    """
    arguments = function, str(DEFAULT_MEMORY_BYTES)
    _early[arguments] = _Child(arguments)

    def end() -> None:
        if arguments in _early:
            _early.pop(arguments).end()

    return end


class _Child:
    """A child process of ``run_isolated``, which computes one item at a time.

    ``arguments`` are the command-line arguments of ``serve``: the function's name and the memory limit in bytes.
    ``position`` is the index of the current item.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.position = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        code_folders = (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))
        path = os.pathsep.join(folder for folder in code_folders if folder)
        program = "from fvc_lib.services.isolated_workers import serve; serve()"
        # There is one child per core, so further threads in a child would only compete for cores.
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process: Any = subprocess.Popen(
            # -P: a file in the working directory must not stand in for a module of ours.
            [sys.executable, "-P", "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path, **one_thread},
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
        )
        self._process, self._items, self.answers = process, process.stdin, process.stdout
        self._received = b""
        self._is_ready = False
        self._deadline = time.monotonic() + _START_SECONDS

    def begin(self, item: Any, seconds: float) -> None:
        """Send ``item`` to the child now, or when it has started; ``seconds`` is the time limit of the answer."""
        self._item = json.dumps([seconds, item], ensure_ascii=True).encode() + b"\n"
        self._seconds = seconds
        if self._is_ready:
            self._send()

    def _send(self) -> None:
        self._deadline = time.monotonic() + self._seconds
        with contextlib.suppress(BrokenPipeError):  # it has died, which ``answer`` reports
            self._items.write(self._item)
            self._items.flush()

    def answer(self, *, is_readable: bool) -> Answer | None:
        """Return the child's answer to the current item, or None if it is not complete yet.

        If the child has died or the time limit has passed, the answer describes this failure.

        Args:
            is_readable: whether the child's output has data to read, or has been closed.

        Raises:
            FvcError: the child cannot start.
        """
        if not is_readable:
            if time.monotonic() < self._deadline:
                return None
            if not self._is_ready:
                raise FvcError(f"worker process: not ready in {_START_SECONDS:g} s. Is the machine overloaded?")
            return Answer(self.position, None, "timeout", f"no answer within {self._seconds:g} s")
        block = os.read(self.answers.fileno(), 1 << 16)
        if not block and not self._is_ready:
            raise FvcError(f"worker process: cannot start: {self._death()}. Repair the installation, or raise memory.")
        if not block:
            return Answer(self.position, None, "crashed", self._death())
        self._received += block
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        if self._is_ready:
            return Answer(self.position, json.loads(line))
        self._is_ready = True
        self._send()
        return None

    def _death(self) -> str:
        """Return a text with the child's signal or exit code and the last line of its standard error.

        A child that still runs is killed.
        """
        self._process.kill()  # it closed its output, but may live on
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read()[-4096:].decode("utf-8", "replace").split("\n")
        last_line = [line.strip() for line in lines if line.strip()][-1:]
        return ", ".join([how, *last_line])

    def end(self) -> None:
        """Kill the child, wait for its end and close all files."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # an item that was not read
            self._items.close()
        self.answers.close()
        self._errors.close()


def serve() -> None:
    """Run the main loop of a child process, until its standard input ends.

    It reads a time limit in seconds and an item per line as JSON, calls the function, and writes one result per line as
    JSON to standard output. The command line has the function's name, and the memory limit in bytes (0: none).
    """
    function, memory_text = sys.argv[1:3]
    answers = os.dup(1)
    os.dup2(2, 1)  # prints of libraries must not mix with the answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit := int(memory_text):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses limits below the memory that is mapped already
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    os.write(answers, b"ready\n")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        # The kernel ends this process when its parent is gone and it hangs, even inside native code.
        seconds, item = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        answer = json.dumps(call(item), ensure_ascii=True, allow_nan=False).encode() + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        while answer:
            answer = answer[os.write(answers, answer) :]
