"""Start the ranks (processes that train a model together), forward their reports, and explain how they ended.

On one machine torch's launcher ``torchrun`` starts the ranks. On several nodes of a SLURM job ``srun`` does. Every rank
writes a file of JSON lines with its phases, its events and its end, which the starting process reads. Metrics are not
in this file: rank 0 writes them to the metric log itself, always before it saves a checkpoint. So a training that
resumes from the checkpoint has a metric log without gaps.
"""

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fvc_lib import CHECKOUT
from fvc_lib.engine.ranks import RankEndedError, RankLostError, described, error_named
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.memory import DeviceMemory, EventDetail, MemoryObserver
from fvc_lib.services.stage_logs import JsonLines, Report, not_reported

LAUNCH_VARIABLE = "FVC_RANK_LAUNCH"
_WATCH_SECONDS = 0.2
_END_SECONDS = 60.0  # time that the other ranks have to end after one rank failed; torchrun gives them half of it
# Kinds of events that happen to a single rank. All other events happen to every rank, and only rank 0 reports them.
_OWN_EVENTS = frozenset({"out_of_memory"})


@dataclass(frozen=True)
class RankPlace:
    """The index of a process among all ranks (``rank``) and among the ranks of its machine (``local_rank``), from 0.

    ``size`` is the number of all ranks, and ``local_size`` the number of ranks on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def rank_place(environ: Mapping[str, str] = os.environ) -> RankPlace:
    """Return the index of this process among the ranks, read from environment variables.

    torchrun's variables are used if they are set, else srun's.

    Raises:
        KeyError, ValueError: a variable is missing or no number.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    # Of ``4(x2),1``, the tasks of each node, the first number counts.
    return RankPlace(*(int(re.split("[(,]", environ[name])[0]) for name in names))


@dataclass(frozen=True)
class Launch:
    """Options that the starting process passes to every rank, as JSON in the environment (``LAUNCH_VARIABLE``)."""

    config: str  # the run's parameters, as JSON
    log: str  # path for the ranks' output; their files of JSON lines are in the same folder
    attempt: int = 1  # number of the attempt at the training, for the metric log
    network: Mapping[str, str] | None = None  # network of the starting process; a rank refuses to train another one

    @classmethod
    def of_environment(cls) -> Self | None:
        """Return the options that the starting process passed to this rank, and remove them from the environment.

        From then on this rank ends when the starting process ends. The result is None if torchrun, srun or a user
        started this process directly.
        """
        text = os.environ.pop(LAUNCH_VARIABLE, "")  # this rank's children must not inherit it
        if not text:
            return None
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
        return cls(**json.loads(text))

    @property
    def stop(self) -> Path:
        """Path of a file; when the starting process creates it, the ranks save their state and end."""
        return Path(self.log).with_suffix(".stop")


def _end_with_standard_input() -> None:
    os.read(0, 1)  # returns when the starting process has closed its end of the pipe, or is gone
    os._exit(1)


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
        """Write the phase of the training and the position in it (epoch, batch, step); only rank 0 writes them."""
        if not self._rank:
            self._write("at", phase, **position)

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Write an event, such as an out-of-memory error, if this is rank 0 or if the event concerns only this rank.

        ``kind`` is a word for the kind of event, ``message`` a sentence, and ``details`` are further values by name.
        """
        if self._rank == 0 or kind in _OWN_EVENTS or details.get("what") == "evaluation":
            self._write("event", kind, f"rank {self._rank}: {message}" if self._rank else message, **details)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Do nothing: with several ranks the memory of GPUs is not sampled."""

    def progress(self, done: int, total: int, part: str = "", what: str = "") -> None:
        """Write that ``done`` of ``total`` units of work are finished; only rank 0 calls this.

        ``part`` describes the next unit, and ``what`` names the units.
        """
        self._write("progress", done, total, part, what)

    def ended(self, error: BaseException | None) -> None:
        """Write the end of this rank: class and message of ``error``; None: the rank has finished its work."""
        self._write("ended", *([] if error is None else described(error)))


def run_ranks(
    module: str,
    arguments: Sequence[str],
    size: int,
    launch: Launch,
    *,
    memory: MemoryObserver,
    stop: Callable[[], bool] | None = None,
    progress: Report = not_reported,
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
        progress: receives the progress of rank 0.

    Raises:
        StoppedError: the ranks stopped on request; their state is saved.
        RankLostError: the ranks lost their connections.
        RankEndedError: a rank was killed, or ended without a reason.
        FvcError: a rank failed; its error is raised with the same class.
    """
    log = Path(launch.log)
    ends = dict[int, list[str] | None]()
    failed_at = math.inf
    log.parent.mkdir(parents=True, exist_ok=True)
    read = dict.fromkeys([rank_file(log, rank) for rank in range(size)], 0)  # bytes
    for path in (launch.stop, *read):
        path.unlink(missing_ok=True)  # an earlier attempt's
    calls: dict[str, Callable[..., None]] = {"at": memory.at, "event": memory.event, "progress": progress}

    def take() -> None:
        for rank, (path, start) in enumerate(list(read.items())):
            with suppress(FileNotFoundError), path.open("rb") as stream:
                stream.seek(start)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    read[path] += len(line)
                    with suppress(ValueError):  # torn by a full disk
                        row = json.loads(line)
                        if row["kind"] in ("begun", "ended"):
                            ends[rank] = row["arguments"] if row["kind"] == "ended" else None
                        elif row["kind"] in calls:
                            calls[row["kind"]](*row["arguments"], **row["named"])

    command, variables = _command(size, launch)
    with (
        log.open("ab") as output,
        # A rank ends when its standard input does, so none outlives this process. Signals to this process's group are
        # not for the launcher: it would give the ranks thirty seconds.
        subprocess.Popen(
            [*command, "-m", module, *arguments], env={**os.environ, **variables}, stdin=subprocess.PIPE,
            stdout=output, stderr=output, start_new_session=True,
        ) as launcher,
    ):  # fmt: skip
        while launcher.poll() is None:
            time.sleep(_WATCH_SECONDS)
            take()
            if stop is not None and stop():
                launch.stop.touch()
            if any(ends.values()):
                failed_at = min(failed_at, time.monotonic())
            if time.monotonic() - failed_at > _END_SECONDS:
                launcher.kill()  # a rank hangs, or srun waits for a lost node
    take()
    asked = launch.stop.exists()
    launch.stop.unlink(missing_ok=True)
    if list(ends.values()) != [[]] * size:
        # With srun the rank may have lost its node instead; srun ends with 128 + the signal that killed a rank.
        was_killed = command[0] != "srun" or launcher.returncode > 128
        raise _reason(ends, launch.log, asked=asked, was_killed=was_killed)


def _command(size: int, launch: Launch) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ``size`` ranks, without their program, and its environment variables."""
    nodes = min(size, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    per_node = -(-size // nodes)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // per_node))
    python_path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    variables = {
        LAUNCH_VARIABLE: json.dumps(asdict(launch)),
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": python_path,
    }
    if nodes == 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={size}"]
        return [sys.executable, *torchrun], variables
    with socket.create_server(("", 0)) as server:
        variables["MASTER_PORT"] = str(server.getsockname()[1])
    # Ranks end together by themselves. With kill-on-bad-exit SLURM 22.05 repeats its order to a lost node that is
    # back, and ends the step of the same number of the job that was requeued meanwhile.
    step = [
        "srun", f"--nodes={nodes}", f"--ntasks={size}", f"--ntasks-per-node={per_node}", "--distribution=block",
        "--overlap", "--kill-on-bad-exit=0", "--quit-on-interrupt", "--mpi=none",
    ]  # fmt: skip
    return [*step, sys.executable], variables


def _reason(
    ends: Mapping[int, list[str] | None], log: str, *, asked: bool, was_killed: bool
) -> FvcError | StoppedError:
    """Return the error that explains best why the ranks ended; the caller raises it.

    An error of a rank is preferred to a stop on request, and a stop to a lost connection. A lost connection mostly is a
    consequence of another rank's end.

    Args:
        ends: [class, message] of the error that ended a rank, by the rank's index. It is empty if the rank has finished
            its work, and None if the rank recorded no end.
        log: path of the ranks' output, for the message.
        asked: whether the ranks were asked to stop.
        was_killed: whether a rank that recorded no end was certainly killed.
    """
    errors = [error_named(*end) for _, end in sorted(ends.items()) if end]
    errors.sort(key=lambda error: (isinstance(error, RankLostError), isinstance(error, StoppedError)))
    silent = ", ".join(f"rank {rank} was killed" for rank, end in sorted(ends.items()) if end is None)
    if errors and not (silent and was_killed):
        return errors[0]
    if asked and not errors:
        return StoppedError("stopped as asked before the ranks had met; resume the run to go on.")
    return RankEndedError(
        f"{silent or 'the ranks ended before they began'} (for want of memory, most often). The last checkpoint "
        f"stands: give the job more memory or fewer ranks, then resume. See {log}."
    )
