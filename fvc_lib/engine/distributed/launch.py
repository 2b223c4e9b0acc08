"""Between a rank and whoever launched it: what the rank is given, what it hears, and that it does not outlive them.

A closed input alone does not tell: what stands between may keep it open. Under SLURM the ranks are no children of srun
but of a daemon, which keeps them and their input when srun is killed.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from fvc_lib.engine.watching import MetricSink
from fvc_lib.services.atomic_files import this_host
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.memory_policy import DeviceMemory, EventDetail, MemoryObserver
from fvc_lib.services.redaction import Redactor

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 300.0  # for the first line: starting many ranks takes its time
_SAME_SECONDS = 2.0  # clocks are set while ranks start; a number is given to another process much later


class LauncherSilentError(FvcError):
    """Whoever launched this rank says nothing."""


@dataclass(frozen=True)
class Launch:
    """What a rank is given to begin with: the first line of its input.

    Attributes:
        config: the run's parameters.
        host: where the launching processes are; see ``this_host``.
        processes: their numbers, and when each was created in seconds since 1970. With any of them the ranks end.
    """

    config: RunConfig
    host: str
    processes: tuple[tuple[int, float], ...]

    def to_line(self) -> str:
        """As one line of text."""
        fields = {"config": self.config.model_dump_json(), "host": self.host, "processes": self.processes}
        return json.dumps(fields) + "\n"


def launch_from_here(config: RunConfig, others: Sequence[int] = ()) -> Launch:
    """Launched by this process, and by the ``others``, its children."""
    return Launch(config, this_host(), tuple((pid, _created(pid)) for pid in (os.getpid(), *others)))


def read_launch() -> Launch:
    """The first line of the process's input, and not a byte more.

    Raises:
        LauncherSilentError: it did not come, or ended early.
    """
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([0], [], [], _PATIENCE_SECONDS)
        byte = os.read(0, 1) if ready else b""
        if not byte:
            raise LauncherSilentError("ranks: whoever launched this one has ended before it said what to train.")
        line += byte
    fields = json.loads(line)
    processes = tuple((int(pid), float(created)) for pid, created in fields["processes"])
    return Launch(RunConfig.model_validate_json(fields["config"]), str(fields["host"]), processes)


def end_with(launch: Launch, hear: Callable[[str], None]) -> None:
    """End this process at once, with 1, when a launching process is gone: another may begin in its place.

    Their end shows on their own host, and everywhere by the end of the input where that is passed on. A rank on another
    host ends when it loses its connection to one that saw it. Where no rank is on the launcher's host, rank 0 ends when
    it waits for an answer in vain.

    Args:
        launch: the first line.
        hear: given every further line of the input, in a thread of its own.
    """
    _in_background("fvc-launcher-input", lambda: _listen(hear))
    if launch.host == this_host():
        _in_background("fvc-launcher", lambda: _watch(launch.processes))


def _listen(hear: Callable[[str], None]) -> None:
    with os.fdopen(os.dup(0), encoding="utf-8") as stream:
        for line in stream:
            hear(line)
    os._exit(1)


def _watch(processes: Sequence[tuple[int, float]]) -> None:
    while all(_lives(pid, created) for pid, created in processes):
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def _lives(pid: int, created: float) -> bool:
    """Whether the process is there; one that has ended and that nobody has waited for yet is not."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < _SAME_SECONDS and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _created(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0  # gone already, which whoever looks for it will find


def _in_background(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


# ----------------------------------------------------------------------------------------------------
# Which of how many ranks this process is: as torchrun says, or srun, or alone.


# Below the ports that Linux gives to outgoing connections (32768 on), above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


@dataclass(frozen=True)
class RankPlace:
    """One process among the ranks of a training.

    Attributes:
        rank: from 0.
        size: how many there are.
        local_rank: from 0 on this machine; which GPU it takes.
        local_size: how many share this machine's memory.
        address: where rank 0 is; empty when there is one rank.
        port: where it listens.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""
    port: int = 0


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace:
    """The place that torchrun's variables give, else srun's; without either, one rank.

    srun's count where this process is a task of one (``SLURM_STEP_ID`` is set); in a job's batch script it is not.

    Raises:
        UsageError: the variables contradict each other or are incomplete.
    """
    environ = os.environ if environ is None else environ
    try:
        if "RANK" in environ:
            return _checked(_of_torchrun(environ))
        if environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environ:
            return _checked(_of_srun(environ))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"ranks: the environment is incomplete ({error!r}). Start with torchrun or srun, which set all of RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or of SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, "
            "SLURM_STEP_NODELIST; or alone, with none of them."
        ) from error
    return RankPlace(0, 1, 0, 1)


def loopback() -> dict[str, str]:
    """What gloo must be told to meet on this machine's own device, where nobody else can reach it."""
    name = next((name for name in psutil.net_if_addrs() if name in ("lo", "lo0")), "")
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: ``gpu03`` of ``gpu[03-05,09],cpu1``, ``a-1-x`` of ``a-[1-2]-x``.

    Raises:
        ValueError: it names none.
    """
    text = re.split(r",(?![^\[]*\])", nodes.strip(), maxsplit=1)[0]
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", text)
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"no host in the node list {nodes!r}")
    return host


def _of_torchrun(environ: Mapping[str, str]) -> RankPlace:
    size = int(environ["WORLD_SIZE"])
    return RankPlace(
        int(environ["RANK"]),
        size,
        int(environ.get("LOCAL_RANK", environ["RANK"])),
        int(environ.get("LOCAL_WORLD_SIZE", size)),
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
    )


def _of_srun(environ: Mapping[str, str]) -> RankPlace:
    size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    # One that no other step has, as far as may be: jobs that share a node mostly have neighbouring numbers.
    port = _FIRST_PORT + (job * 17 + step) % _NUM_PORTS
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    node = int(environ.get("SLURM_NODEID", "0"))
    local_size = _tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node) or size
    # A node's name need not resolve on the node itself, and need not where there is no other.
    address = "127.0.0.1" if local_size == size else first_host(nodes)
    return RankPlace(
        int(environ["SLURM_PROCID"]),
        size,
        int(environ["SLURM_LOCALID"]),
        local_size,
        address,
        port,
    )


def _tasks_of_node(text: str, node: int) -> int:
    """Of ``2(x3),1``, which counts tasks node by node; 0 where it does not say."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, times = part.rstrip(")").partition("(x")
        counts.extend([int(count)] * int(times or 1))
    return counts[node] if node < len(counts) else 0


def _checked(place: RankPlace) -> RankPlace:
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise UsageError(f"ranks: {place} cannot be: ranks count from 0 to the size, on every machine as well.")
    return place


# ----------------------------------------------------------------------------------------------------
# The processes of one training, seen from the one that launched them.


_WATCH_SECONDS = 0.2
# After one rank has ended in error the others are told, or find its connection closed, and end by themselves.
_GRACE_SECONDS = 30.0
_SRUN_SECONDS = 10.0
_logger = logging.getLogger(__name__)


class RankProcesses:
    """The processes of one training, what they say, and how they end.

    Args:
        commands: with the environment of each; the processes are started.
        log: what they print to their error outputs is appended there.
        srun: there is one, srun, which has the ranks started where they run.
    """

    def __init__(
        self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path, *, srun: bool = False
    ) -> None:
        self._srun = srun
        self._failed_at: float | None = None
        self._ended_at: float | None = None
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a", encoding="utf-8", buffering=1)
        self._log_lock = threading.Lock()
        self._redactor = Redactor()
        self._processes = [_process(command, environment) for command, environment in commands]
        self._threads = [
            thread
            for number, process in enumerate(self._processes)
            for thread in (
                threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
                threading.Thread(target=self._keep, args=(process.stderr, number), daemon=True),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Of the processes started here: the ranks, or srun."""
        return [process.pid for process in self._processes]

    def tell(self, line: str) -> None:
        """Every rank."""
        for number in range(len(self._processes)):
            self._write(number, line)

    def answer(self, number: int) -> None:
        """Rank 0, which has asked; under srun all hear it."""
        self._write(0, f"{number}\n")

    def any_lives(self) -> bool:
        """Whether one runs, or has words on the way."""
        return any(process.poll() is None for process in self._processes) or any(t.is_alive() for t in self._threads)

    def heard(self) -> Iterator[str]:
        """What was said, waiting a little for the first of it."""
        wait: float | None = _WATCH_SECONDS
        while True:
            try:
                yield self.lines.get(timeout=wait) if wait else self.lines.get_nowait()
            except queue.Empty:
                return
            wait = None

    def ask_to_stop(self) -> None:
        """They save and end with 75. srun passes the signal on to its tasks."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)

    def end_stragglers(self) -> None:
        """When one has failed and others still run after the time of grace; and what was to end and has not."""
        if self._failed_at is None and any(process.poll() for process in self._processes):
            self._failed_at = time.monotonic()
        is_over = self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_SECONDS
        if is_over or self._ended_at is not None:
            self.kill()

    def kill(self) -> None:
        """All that still run. srun gets SIGTERM first, on which it kills its tasks; killed itself it would leave them.

        Repeated calls make sure of it.
        """
        now, first = time.monotonic(), self._ended_at is None
        self._ended_at = now if self._ended_at is None else self._ended_at
        for process in self._processes:
            if process.poll() is not None:
                continue
            if not self._srun or now - self._ended_at > _SRUN_SECONDS:
                process.kill()
            elif first:
                process.terminate()

    def codes(self) -> list[int]:
        """Exit codes, negative for a signal; of srun its one."""
        return [process.wait() for process in self._processes]

    def ended_by_signal(self) -> list[str]:
        """In words, of those that were."""
        ended = [(rank, signal.Signals(-code).name) for rank, code in enumerate(self.codes()) if code < 0]
        return [f"{'srun' if self._srun else f'rank {rank}'} was ended by {name}" for rank, name in ended]

    def close(self) -> None:
        """End what runs, and the log."""
        self.kill()
        while any(process.poll() is None for process in self._processes):
            time.sleep(_WATCH_SECONDS / 10)
            self.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    _close(stream)
        self._log.close()

    def _write(self, number: int, line: str) -> None:
        stream = self._processes[number].stdin
        if stream is None:
            raise RuntimeError("a rank was started without an input")
        try:
            stream.write(line)
            stream.flush()
        except BrokenPipeError:
            _logger.debug("a rank ended before it was told")  # its exit code is looked at like any other's

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.put(line)

    def _keep(self, stream: IO[str], number: int) -> None:
        label = f"[rank {number}] " if len(self._processes) > 1 else ""
        for line in stream:
            with self._log_lock:
                self._log.write(label + self._redactor.text(line))


def _process(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True, errors="replace")


def _close(stream: IO[str]) -> None:
    """Without what could not be written: that reader is gone."""
    try:
        stream.close()
    except BrokenPipeError:
        _logger.debug("a rank had ended before it was told")


# ----------------------------------------------------------------------------------------------------
# What ranks tell the process that launched them: JSON lines over a pipe, so that each of the run's logs keeps one
# writer, who also sees the memory of all ranks together.
#


_DEVICE_SECONDS = 1.0
_ANSWER_SECONDS = 1.0
_MOST_LOOKS = 300  # counted, not timed: a launcher that was suspended together with its ranks is not silent
# What happens to one rank alone; everything else happens to all of them, and rank 0 tells it.
_OWN_EVENTS = frozenset({"out_of_memory", "loader_restarted"})
Progress = Callable[[int, int], None]


class RankReports:
    """The rank's side: a metric sink, a memory observer, progress, and its reason when it ends.

    Rank 0 tells everything, another rank what only it knows.

    Args:
        rank: of this process.
        stream: where lines go; one write each.
    """

    prefix = ""  # as ``MemoryObserver`` has it

    def __init__(self, rank: int, stream: IO[str]) -> None:
        self._rank = rank
        self._stream = stream
        self._lock = threading.Lock()
        self._devices: dict[str, Callable[[], DeviceMemory]] = {}
        self._probed_at = -_DEVICE_SECONDS
        self._asked = self._answered = 0
        self._answers = threading.Condition()

    def ready(self) -> None:
        """From now on a signal only asks this rank to stop."""
        self._tell("ready", [])

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Metrics, from rank 0: all ranks have the same."""
        if self._rank == 0:
            self._tell("metrics", {"step": step, "epoch": epoch, "phase": phase, "metrics": dict(metrics)})

    def progress(self, done: int, planned: int) -> None:
        """Steps, from rank 0."""
        if self._rank == 0:
            self._tell("progress", [done, planned])

    def at(
        self,
        phase: str,
        *,
        epoch: int | None = None,
        batch_idx: int | None = None,
        global_step: int | None = None,
    ) -> None:
        """Where the training is, from rank 0, with the memory of its device about once a second."""
        if self._rank:
            return
        self._tell("at", {"phase": phase, "epoch": epoch, "batch_idx": batch_idx, "global_step": global_step})
        if self._devices and time.monotonic() - self._probed_at >= _DEVICE_SECONDS:
            self._probed_at = time.monotonic()
            for device, probe in self._devices.items():
                self._tell("device", {"device": device, "memory": vars(probe())})

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """What happened, from the rank it happened to."""
        own = kind in _OWN_EVENTS or (kind == "nonfinite" and details.get("what") == "evaluation")
        if self._rank == 0 or own:
            told = f"rank {self._rank}: {message}" if self._rank else message
            self._tell("event", {"kind": kind, "message": told, "details": details})

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Rank 0's accelerator."""
        self._devices[device] = probe

    def warning(self, message: str) -> None:
        """For the reader of the record, from rank 0: what it warns of, the others do as well."""
        if self._rank == 0:
            self._tell("warning", message)

    def failed(self, error: BaseException) -> None:
        """Why this rank ends."""
        self._tell("failed", [type(error).__name__, str(error)])

    def settle(self) -> None:
        """Wait until the launcher has passed on all that this rank told: before a file counts it.

        Raises:
            LauncherSilentError: no answer came for five minutes.
        """
        self._asked += 1
        self._tell("settle", self._asked)
        with self._answers:
            for _ in range(_MOST_LOOKS):
                if self._answers.wait_for(lambda: self._answered >= self._asked, _ANSWER_SECONDS):
                    return
        raise LauncherSilentError(
            f"ranks: whoever launched them gave no answer for {_MOST_LOOKS * _ANSWER_SECONDS:.0f} s, so that nobody "
            "may be writing the metric log. The last checkpoint stands: resume."
        )

    def hear(self, line: str) -> None:
        """The launcher's answer to ``settle``; from another thread."""
        with self._answers:
            self._answered = max(self._answered, int(line))
            self._answers.notify_all()

    def _tell(self, kind: str, value: Any) -> None:
        line = json.dumps({"rank": self._rank, kind: value}) + "\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()


class WarningsToReports(logging.Handler):
    """Sends a rank's warnings to its reports."""

    def __init__(self, reports: RankReports) -> None:
        super().__init__(logging.WARNING)
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        """One line of text."""
        self._reports.warning(record.getMessage())


class ReportReader:
    """The launching process's side: passes on what the ranks say. One thread at a time.

    Args:
        metrics, memory, progress: what is passed on goes there.
        answer: called with the number of a rank 0's question, once all that came before it was passed on.

    Attributes:
        ready: ranks that take a signal for a wish.
        reasons: why ranks ended: the error's class and text, by rank.
    """

    def __init__(
        self,
        metrics: MetricSink,
        memory: MemoryObserver,
        progress: Progress | None,
        *,
        answer: Callable[[int], None],
    ) -> None:
        self.ready: set[int] = set()
        self.reasons: dict[int, tuple[str, str]] = {}
        self._metrics = metrics
        self._memory = memory
        self._progress = progress
        self._answer = answer
        self._devices: dict[str, DeviceMemory] = {}

    def take(self, line: str) -> None:
        """One line; what is none of ours goes to the log."""
        try:
            told = json.loads(line)
            rank, (kind, value) = int(told.pop("rank")), next(iter(told.items()))
        except (ValueError, TypeError, AttributeError, KeyError, StopIteration):
            _logger.warning("a rank said: %s", line.rstrip())
            return
        if kind == "ready":
            self.ready.add(rank)
        elif kind == "failed":
            self.reasons[rank] = (str(value[0]), str(value[1]))
        elif kind == "settle":
            self._answer(int(value))
        else:
            self._pass_on(kind, value)

    def _pass_on(self, kind: str, value: Any) -> None:
        if kind == "metrics":
            self._metrics.log(**value)
        elif kind == "at":
            self._memory.at(value.pop("phase"), **value)
        elif kind == "event":
            self._memory.event(value["kind"], value["message"], **value["details"])
        elif kind == "device":
            self._hear_device(value["device"], DeviceMemory(**value["memory"]))
        elif kind == "warning":
            _logger.warning("%s", value)
        elif kind == "progress" and self._progress is not None:
            self._progress(*value)

    def _hear_device(self, device: str, memory: DeviceMemory) -> None:
        known = device in self._devices
        self._devices[device] = memory
        if not known:
            self._memory.watch_device(device, lambda: self._devices[device])


def take_over_stdout() -> IO[str]:
    """The process's output as a stream of ours alone: whatever else is printed goes to its error output."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return stream
