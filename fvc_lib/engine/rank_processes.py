"""Start the ranks (processes that train a model together), forward their reports, and explain how they ended.

On one machine ``torch.multiprocessing`` starts the ranks. On several nodes of a SLURM job ``srun`` does. Every rank
writes a file of JSON lines with its phases, its events and its end, which the starting process reads. Metrics are not
in this file: rank 0 writes them to the metric log itself, always before it saves a checkpoint. So a training that
resumes from the checkpoint has a metric log without gaps.
"""

import json
import math
import os
import re
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch.multiprocessing.spawn import start_processes

from fvc_lib import CHECKOUT
from fvc_lib.engine.ranks import RankEndedError, RankLostError, error_named
from fvc_lib.services.errors import FvcError, StoppedError, UsageError
from fvc_lib.services.memory import DeviceMemory, EventDetail, MemoryObserver
from fvc_lib.services.stage_logs import JsonLines, Report

LAUNCH_VARIABLE = "FVC_RANK_LAUNCH"
_WATCH_SECONDS = 0.2
_END_SECONDS = 30.0  # time that the other ranks have to end after one rank failed; then they are killed
_STOPPED = frozenset([StoppedError.exit_code, -signal.SIGTERM, -signal.SIGUSR1])
# Kinds of events that happen to a single rank. All other events happen to every rank, and only rank 0 reports them.
_OWN_EVENTS = frozenset({"out_of_memory", "loader_restarted"})


@dataclass(frozen=True)
class RankPlace:
    """The index of a process among all ranks (``rank``) and among the ranks of its machine (``local_rank``), from 0.

    ``size`` is the number of all ranks, and ``local_size`` the number of ranks on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_place(environ: Mapping[str, str] | None = None) -> RankPlace:
    """Return the index of this process among the ranks, read from environment variables.

    torchrun's variables are used if they are set, else srun's. srun's are used only in a task of a job step
    (``SLURM_STEP_ID`` is a number), not in a batch script. Without such variables, this process is the only rank.
    ``environ`` has the environment variables; None: those of this process.

    Raises:
        UsageError: the variables are incomplete, or are no numbers.
    """
    environ = os.environ if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        if "SLURM_PROCID" not in environ or not environ.get("SLURM_STEP_ID", "").isdecimal():
            return RankPlace()
    try:  # of ``4(x2),1``, the tasks of each node, the first number counts
        return RankPlace(*(int(re.split("[(,]", environ[name])[0]) for name in names))
    except (KeyError, ValueError) as error:
        raise UsageError(f"ranks: the environment must have {', '.join(names)} as numbers: {error!r}.") from error


@dataclass(frozen=True)
class Launch:
    """Options that the starting process passes to every rank, as JSON in the environment (``LAUNCH_VARIABLE``)."""

    config: str  # the run's parameters, as JSON
    log: str  # path for the ranks' output; their files of JSON lines are in the same folder
    attempt: int = 1  # number of the attempt at the training, for the metric log
    network: Mapping[str, str] | None = None  # network of the starting process; a rank refuses to train another one
    init_method: str = "env://"  # argument of ``torch.distributed.init_process_group``

    @classmethod
    def of_environment(cls) -> Self | None:
        """Return the options that the starting process passed to this rank, and remove them from the environment.

        The result is None if torchrun, srun or a user started this process directly.
        """
        text = os.environ.pop(LAUNCH_VARIABLE, "")  # this rank's children must not inherit it
        return cls(**json.loads(text)) if text else None


def rank_file(log: str | Path, rank: int) -> Path:
    """Return the path of the file of JSON lines that the rank with index ``rank`` writes, in the folder of ``log``."""
    return Path(log).with_name(f"{Path(log).stem}_{rank}.jsonl")


class RankFile:
    """Write the JSON lines of one rank: its phases, its progress, its events and its end.

    A rank uses it as its ``MemoryObserver``. Every method writes its call as a line. The starting process reads the
    line and repeats the call on its own observer. A line has ``kind`` (name of the method), ``arguments`` (positional)
    and ``named`` (keyword arguments). Rank 0 writes all calls. Other ranks write only their beginning, their end, and
    events that concern only them, such as an out-of-memory error. The lines are written to ``rank_file(log, rank)``.
    """

    def __init__(self, log: str, rank: int) -> None:
        self._rank = rank
        self._lines = JsonLines(rank_file(log, rank))
        self._write("begun", pid=os.getpid())

    def _write(self, kind: str, *arguments: Any, **named: Any) -> None:
        self._lines.append({"kind": kind, "arguments": arguments, "named": named})

    def at(self, phase: str, **position: int | None) -> None:
        """Write the phase, epoch, batch and step; on ranks other than 0, do nothing."""
        if not self._rank:
            self._write("at", phase, **position)

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Write an event (``MemoryObserver.event``) if this is rank 0, or if the event concerns only this rank."""
        if self._rank == 0 or kind in _OWN_EVENTS or details.get("what") == "evaluation":
            self._write("event", kind, f"rank {self._rank}: {message}" if self._rank else message, **details)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Do nothing: with several ranks the memory of GPUs is not sampled."""

    def progress(self, done: int, total: int, part: str = "", what: str = "") -> None:
        """Write the progress, as a ``stage_logs.Report`` receives it; only rank 0 calls this."""
        self._write("progress", done, total, part, what)

    def ended(self, error: BaseException) -> None:
        """Write the class and message of the error that ends this rank."""
        self._write("ended", type(error).__name__, str(error))


class _RankFiles:
    """Read the JSON lines that the ranks write, and report their content to the starting process.

    A line records a call of a ``RankFile`` method. Phases and events are passed to the observer ``memory``, and numbers
    of steps to ``progress``. ``ends`` has (class name, message) of the error that ended a rank, by the rank's index.
    """

    def __init__(self, log: Path, size: int, memory: MemoryObserver, progress: Report | None) -> None:
        self.ends: dict[int, tuple[str, str]] = {}
        self._calls: dict[str, Callable[..., None]] = {"at": memory.at, "event": memory.event}
        if progress is not None:
            self._calls["progress"] = progress
        self._read = dict.fromkeys([rank_file(log, rank) for rank in range(size)], 0)  # bytes
        for path in self._read:
            path.unlink(missing_ok=True)  # an earlier attempt's

    def take(self) -> None:
        for rank, (path, start) in enumerate(list(self._read.items())):
            with suppress(FileNotFoundError), path.open("rb") as stream:
                stream.seek(start)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] += len(line)
                    with suppress(ValueError):  # torn by a full disk
                        self._call(rank, json.loads(line))

    def _call(self, rank: int, row: dict[str, Any]) -> None:
        if row["kind"] == "ended":
            self.ends[rank] = tuple(row["arguments"])
        elif row["kind"] in self._calls:
            self._calls[row["kind"]](*row["arguments"], **row["named"])


def run_ranks(
    module: str,
    arguments: Sequence[str],
    size: int,
    launch: Launch,
    *,
    memory: MemoryObserver,
    stop: Callable[[], bool] | None = None,
    progress: Report | None = None,
) -> None:
    """Run ``python -m module arguments`` as ``size`` ranks and wait for their end.

    The ranks run on this machine or, in a SLURM job with several nodes, as a job step over its nodes. The threads of a
    machine are divided among its ranks, unless OMP_NUM_THREADS is set. If this process ends, the ranks end too.

    Args:
        module: dotted name of the ranks' program.
        arguments: command-line arguments of the program.
        size: number of ranks.
        launch: options that are passed to every rank.
        memory: receives the ranks' phases, steps and events.
        stop: called several times a second; if it returns True, the ranks save their state and end.
        progress: receives the progress of rank 0; None: nobody does.

    Raises:
        StoppedError: the ranks stopped on request; their state is saved.
        RankLostError: the ranks lost their connections.
        RankEndedError: a rank was killed, or ended without a reason.
        FvcError: a rank failed; its error is raised with the same class.
    """
    log = Path(launch.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    nodes = min(size, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    files = _RankFiles(log, size, memory, progress)
    is_stopping = False
    signal_at = 0.0
    failed_at = math.inf
    with TemporaryDirectory(prefix="fvc-ranks-") as folder:
        ranks = _started(module, arguments, size, nodes, launch, folder)
        try:
            while alive := [rank for rank in ranks if rank.exitcode is None]:
                wait_for_any([rank.sentinel for rank in alive], _WATCH_SECONDS)
                files.take()
                now = time.monotonic()
                if stop is not None and now >= signal_at and (is_stopping or stop()):
                    is_stopping, signal_at = True, now + 1  # repeated every second: srun may not have started tasks yet
                    for rank in alive:
                        with suppress(ProcessLookupError):
                            os.kill(rank.pid, signal.SIGUSR1)
                # A rank that stopped may have to wait for rank 0's checkpoint; after a failure nobody waits long.
                failed = any(name != StoppedError.__name__ for name, _ in files.ends.values())
                if failed or any(rank.exitcode not in {None, 0, StoppedError.exit_code} for rank in ranks):
                    failed_at = min(failed_at, now)
                if now - failed_at > _END_SECONDS:
                    break
        finally:
            codes = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode}
            _kill(ranks)
    files.take()
    if codes or files.ends:
        codes = {number: 128 - code if code > 128 else code for number, code in codes.items()}  # srun's 128 + signal
        raise _reason(files.ends, codes, log)


def _started(
    module: str, arguments: Sequence[str], size: int, nodes: int, launch: Launch, folder: str
) -> Sequence[Any]:
    """Start the ranks, and return their processes in the order of the ranks.

    With several ``nodes``, the result is only the process of srun, which starts the ranks. ``folder`` is a temporary
    folder for the file through which the ranks of one machine connect. The other arguments are those of ``run_ranks``.
    """
    per_node = -(-size // nodes)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // per_node))
    variables = {"OMP_NUM_THREADS": threads, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    if nodes == 1:
        variables[LAUNCH_VARIABLE] = json.dumps(asdict(launch) | {"init_method": f"file://{folder}/ranks"})
        begin: Callable[..., None] = _become_rank
        given: tuple[Any, ...] = (module, list(arguments), launch.log, variables)
    else:
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
        variables = {"OMP_NUM_THREADS": threads, "PYTHONPATH": path, "MASTER_PORT": str(port)}
        variables[LAUNCH_VARIABLE] = json.dumps(asdict(launch))
        # Ranks end together by themselves. With kill-on-bad-exit SLURM 22.05 repeats its order to a lost node that is
        # back, and ends the step of the same number of the job that was requeued meanwhile.
        step = [
            "srun", f"--nodes={nodes}", f"--ntasks={size}", f"--ntasks-per-node={per_node}", "--distribution=block",
            "--overlap", "--kill-on-bad-exit=0", "--quit-on-interrupt", "--input=none", "--mpi=none",
        ]  # fmt: skip
        command = [*step, sys.executable, "-m", module, *arguments]
        begin, given = _become_srun, (command, launch.log, variables)
    number = size if nodes == 1 else 1
    context = start_processes(begin, given, number, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
    return context.processes  # type: ignore[no-any-return]


def _become_rank(rank: int, module: str, arguments: list[str], log: str, variables: dict[str, str]) -> None:
    """Run ``python -m module arguments`` in this process, as the rank with index ``rank``.

    The process ends when its parent ends. ``variables`` are added to the environment. Standard output and standard
    error are appended to the file ``log``.
    """
    _write_to(log)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()  # torch would show it only in the starting process
        raise


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _become_srun(_: int, command: list[str], log: str, variables: dict[str, str]) -> None:
    """Replace this process by ``command``, which runs srun.

    Output is appended to the file ``log``; ``variables`` are added to the environment. If the parent process dies, the
    operating system interrupts srun (SIGINT), because ``torch.multiprocessing`` arranges this for its processes.
    """
    _write_to(log)
    os.execvpe(command[0], command, {**os.environ, **variables})


def _write_to(log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(target, stream)


def _kill(ranks: Sequence[Any]) -> None:
    """Kill the ranks that still run, with their child processes, and wait until all ranks have ended."""
    import psutil  # engine must load with torch and NumPy alone (tests/gpu)

    for rank in ranks:
        if rank.exitcode is None:
            with suppress(psutil.Error):
                process = psutil.Process(rank.pid)
                for member in [*process.children(recursive=True), process]:
                    member.kill()
        rank.join()


def _reason(ends: Mapping[int, tuple[str, str]], codes: Mapping[int, int], log: Path) -> FvcError | StoppedError:
    """Return the error to raise after the ranks ended: the one that explains the end best.

    An error of a rank is preferred to a stop, and a stop to a lost connection. A lost connection mostly is a
    consequence of another rank's end.

    Args:
        ends: (class name, message) of the error that ended a rank, by the rank's index.
        codes: exit codes other than 0, by the rank's index; a negative number is a signal.
        log: path of the ranks' output, for the message.
    """
    lost, stopped = RankLostError.__name__, StoppedError.__name__
    known = sorted((ends[rank] for rank in sorted(ends)), key=lambda end: (end[0] == lost, end[0] == stopped))
    if known and known[0][0] != lost:
        return error_named(*known[0])
    if _STOPPED & set(codes.values()):  # a signal ends a rank that has nothing to save yet
        return StoppedError("stopped as asked before the ranks had met; resume the run to go on.")
    killed = [f"rank {rank} was ended by {signal.strsignal(-code)}" for rank, code in codes.items() if code < 0]
    if known and not killed:
        return RankLostError(known[0][1])
    reason = ", ".join(killed) or f"the ranks ended with exit codes {dict(codes)}"
    return RankEndedError(
        f"{reason} (for want of memory, most often). The last checkpoint stands: give the job more memory or fewer "
        f"ranks, then resume. See {log}."
    )
