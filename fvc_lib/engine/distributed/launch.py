"""Several ranks of one training, started by torch's elastic launcher or over nodes by srun, and what they report.

Rank 0 writes the run's metric log itself, so no checkpoint counts a step that was not logged. Everything else that the
launching process wants to know (position, memory of the device, events, progress, why a rank ended) comes as one
message of JSON per report over a connection of each rank's own, whose end also says that the other side is gone. Where
the ranks are on several nodes it also carries a beat: a machine that went away closes no connection.
"""

import hmac
import json
import logging
import os
import platform
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait as wait_for_any
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil
import torch

from fvc_lib import CHECKOUT
from fvc_lib.engine.distributed.ranks import RankEndedError, RankLostError, error_named
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError, UsageError
from fvc_lib.services.memory.policy import DeviceMemory, EventDetail, MemoryObserver

LAUNCH_VARIABLE = "FVC_RANK_LAUNCH"
Progress = Callable[[int, int], None]
_WATCH_SECONDS = 0.2
_DEVICE_SECONDS = 1.0
# Together less than a minute: within that a node that is lost ends the step.
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # then who is on another machine counts as gone
_GRACE_SECONDS = 5.0  # in which an end without a word may be followed by everyone's
_END_SECONDS = 15.0  # for srun, which has seen the end of every rank whose node lives
# For srun as well: a rank that ends before the others have met it leaves them waiting, while one that stopped first may
# have to wait for rank 0's checkpoint.
_ALONE_SECONDS = 300
_STOP = b"stop"
_MOST_BYTES = 1 << 16  # of one report, and of the log's end that is looked at
_MOST_CHARACTERS = 4096  # of one text in it: in JSON each may take six bytes, and a report has two texts at most
# What happens to one rank alone; everything else happens to all of them, and rank 0 reports it.
_OWN_EVENTS = frozenset({"out_of_memory", "loader_restarted"})
# A signal that asks for a stop ends a rank that has nothing to save yet, and has no handler for it.
_STOPPED = frozenset([StoppedError.exit_code, -signal.SIGTERM, -signal.SIGUSR1])
_SIGNALS = frozenset(signal.Signals)  # those that have names
_OUT_OF_MEMORY = 253  # srun's code where SLURM killed a rank for memory: SIG_OOM in slurm.h
# Of torch's ProcessGroupNCCL, before it aborts; its name alone stands in harmless warnings too.
_WATCHDOG = re.compile(rb"[Ww]atchdog (thread terminated with exception|caught collective operation timeout)")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What a rank is given by the process that launches it, in an environment variable."""

    config: str  # the run's parameters, as JSON
    port: int  # that reports go to
    token: str  # which they begin with
    log: str  # file that the rank's output is appended to; empty: srun brings it there
    attempt: int  # which try this is, for the metric log
    pid: int  # of the launching process
    network: Mapping[str, str] | None = None  # what that would train; a rank that would train another one refuses
    several_nodes: bool = False  # over which the ranks are spread
    at_first_node: bool = True  # whether rank 0 is beside the launching process

    @classmethod
    def of_environment(cls) -> Self | None:
        """The launch of this process; None where it was started otherwise: by torchrun, by srun, alone."""
        text = os.environ.pop(LAUNCH_VARIABLE, "")  # not for this rank's own children
        return cls(**json.loads(text)) if text else None

    @property
    def address(self) -> str:
        """Of the launching process, for a rank."""
        return os.environ["SLURM_LAUNCH_NODE_IPADDR"] if self.several_nodes else "127.0.0.1"


def run_ranks(
    module: str,
    arguments: Sequence[str],
    config: RunConfig,
    log: Path,
    *,
    attempt: int = 1,
    network: Mapping[str, str] | None = None,
    memory: MemoryObserver,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> None:
    """Run ``python -m module arguments`` as ``config.num_ranks`` ranks, and wait for their end.

    They are on this machine or, in a SLURM job that has several nodes, spread over these as a step of the job. Each
    computes with as many threads as leave each core one, unless OMP_NUM_THREADS says otherwise. When this process goes
    away, however that happens, the ranks end within a second, and within a minute where its machine went away.

    Args:
        module: dotted name of the ranks' program.
        arguments: its arguments.
        config: the run's parameters, handed to the ranks.
        log: what the ranks print is appended there.
        attempt: which try this is.
        network: name, file and digest of the code of what this process would train; handed to the ranks.
        memory: hears what the ranks report.
        stop: called again and again; True makes the ranks save and end.
        progress: called with (steps done, steps planned).

    Raises:
        StoppedError: ``stop`` said so, or a rank was asked; everything is saved.
        RankLostError: the node of a rank was lost, or ranks lost each other.
        RankEndedError: a rank was killed, or ended without a reason.
        FvcError: what a rank gives as its reason, of the same class.
    """
    size, stopping, begun = config.num_ranks, False, False
    nodes = min(size, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    lost: list[int] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    said_before = log.stat().st_size if log.is_file() else 0  # by earlier attempts
    with (
        TemporaryDirectory(prefix="fvc-ranks-") as folder,
        socket.create_server(("" if nodes > 1 else "127.0.0.1", 0), backlog=size) as server,
        ThreadPoolExecutor(2, "fvc-ranks") as pool,
    ):
        launch = Launch(
            config=config.model_dump_json(),
            port=server.getsockname()[1],
            token=secrets.token_hex(),
            log="" if nodes > 1 else str(log),
            attempt=attempt,
            pid=os.getpid(),
            network=network,
            several_nodes=nodes > 1,
            # As a batch script is, and salloc's shell is not.
            at_first_node=nodes == 1 or "SLURMD_NODENAME" in os.environ,
        )
        begin = partial(_run_step, nodes, size, log) if nodes > 1 else partial(_run_agent, size, folder)
        reader = ReportReader(server, launch.token, memory, progress)
        with _environment(_for_ranks(launch, -(-size // nodes))):
            agent, over = pool.submit(begin, ["-m", module, *arguments]), threading.Event()
            try:
                if nodes > 1:
                    pool.submit(reader.beat, over)
                while not agent.done():
                    if not stopping and stop is not None and stop():
                        stopping, begun = True, len(reader.ready) == size
                        if not begun:  # they have nothing to save, and may be waiting for one that does not come
                            _kill_ranks(module, agent)
                        reader.send(_STOP)
                    reader.take(_WATCH_SECONDS)
                    if nodes > 1 and (lost := reader.lost()):
                        reader.close()  # by which all ranks end that live
                        if reader.gone and wait_for([agent], timeout=_END_SECONDS).done:
                            lost = []
                        break
            finally:
                over.set()
                _kill_ranks(module, agent)
            while reader.take(0):
                pass
            reader.close()
    if lost:
        where = ", ".join(f"rank {rank} on {reader.nodes[rank]}" for rank in lost)
        raise RankLostError(
            f"{where}: gone without a word, and SLURM does not say how; the node is lost, it seems. The other "
            f"ranks were ended. The last checkpoint stands: resume, as a job does by itself. See {log}."
        )
    if stopping and not begun:
        raise StoppedError("stopped as asked before the ranks had met; resume the run to go on.")
    codes = agent.result()
    if codes and nodes > 1 and reader.gone:
        codes = {next(iter(reader.gone)): codes[0]}
    if codes:
        raise _reason(reader.reasons, codes, log, said_before)


def _run_step(nodes: int, size: int, log: Path, command: list[str]) -> dict[int, int]:
    """As ``_run_agent`` for ranks on several nodes of this job; which rank it was, srun's exit code does not say."""
    step = [
        "srun", f"--nodes={nodes}", f"--ntasks={size}", f"--ntasks-per-node={-(-size // nodes)}",
        "--distribution=block", "--overlap", "--kill-on-bad-exit=0", f"--wait={_ALONE_SECONDS}", "--input=none",
        "--mpi=none",
    ]  # fmt: skip
    with log.open("ab") as stream:
        try:
            done = subprocess.run([*step, sys.executable, *command], stdout=stream, stderr=stream, check=False)
        except FileNotFoundError as error:
            raise UsageError(f"ranks on {nodes} nodes are started by srun, which is not found here.") from error
    code = done.returncode
    if code == _OUT_OF_MEMORY:
        return {0: -signal.SIGKILL}
    return {0: 128 - code if code - 128 in _SIGNALS else code} if code else {}


def _run_agent(size: int, folder: str, command: list[str]) -> dict[int, int]:
    """Exit codes by rank where any rank failed, those that failed first before the others; empty where none did."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # a quarter of a second to import
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it logs of failures and signals stands in the reason, in plain words.
    its_logger = logging.getLogger("torch.distributed.elastic")
    its_logger.addHandler(logging.NullHandler())
    its_logger.propagate = False
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _for_ranks(launch: Launch, beside: int) -> dict[str, str]:
    """Environment variables of the ranks: this very package on the path, and their share of a machine's threads."""
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // beside))
    return {LAUNCH_VARIABLE: json.dumps(asdict(launch)), "PYTHONPATH": path, "OMP_NUM_THREADS": threads}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _kill_ranks(module: str, agent: Future[Any]) -> None:
    """Kill what still runs of the ranks, until their agent has seen all of them end."""
    while not agent.done():
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if module in child.cmdline():
                    child.kill()
        wait_for([agent], timeout=_WATCH_SECONDS)


def _reason(
    reasons: Mapping[int, tuple[str, str]], codes: Mapping[int, int], log: Path, said_before: int = 0
) -> FvcError:
    """The first reason that is one: a rank that only lost the others knows less than they.

    The first ``said_before`` bytes of ``log`` are not these ranks'.
    """
    known = [reason for _, reason in sorted(reasons.items()) if reason[0] != RankLostError.__name__]
    if known:
        return error_named(*min(known, key=lambda reason: reason[0] == StoppedError.__name__))
    if next(iter(codes.values())) in _STOPPED:
        return StoppedError("stopped as asked; resume the run to go on.")
    # With SIGTERM torch's agent ends the others.
    ended = {rank: -code for rank, code in codes.items() if -code in _SIGNALS - {signal.SIGTERM}}
    said = log.read_bytes()[said_before:][-_MOST_BYTES:] if signal.SIGABRT in ended.values() and log.is_file() else b""
    if _WATCHDOG.search(said):
        return RankLostError(f"nccl gave up an exchange between GPUs. The last checkpoint stands: resume. See {log}.")
    killed = [f"rank {rank} was ended by {signal.Signals(number).name}" for rank, number in ended.items()]
    if killed:
        return RankEndedError(
            f"{', '.join(killed)} (SIGKILL is most often the system's, for want of memory); the other ranks end with "
            f"it. The last checkpoint stands: give the job more memory or fewer ranks, then resume. See {log}."
        )
    if reasons:  # nobody ended, and they have lost each other
        return RankLostError(next(iter(reasons.values()))[1])
    return RankEndedError(f"the ranks ended with exit codes {dict(codes)} and gave no reason; {log} says why.")


class ReportReader:
    """The launching process's side: passes on what the ranks report. One thread at a time, but for ``beat``.

    ``server`` is where they connect; who does not begin with ``token`` is none of them.
    """

    def __init__(self, server: socket.socket, token: str, memory: MemoryObserver, progress: Progress | None) -> None:
        self.ready: set[int] = set()  # ranks that take a signal for a wish to stop
        self.reasons: dict[int, tuple[str, str]] = {}  # why ranks ended: the error's class and text
        self.nodes: dict[int, str] = {}  # of the ranks
        self.gone: dict[int, float] = {}  # ranks whose connections ended without a word, and when
        self._server, self._token = server, token
        self._memory, self._progress = memory, progress
        self._devices: dict[str, DeviceMemory] = {}
        self._connections: dict[Connection, int | None] = {}  # and whose they are; None before that was said
        # In seconds that this process has seen pass: one that was suspended must not find that all were silent.
        self._now, self._looked = 0.0, time.monotonic()
        self._heard: dict[int, float] = {}  # when, by rank, without those that said that they end

    def take(self, seconds: float) -> bool:
        """Pass on what comes within so many seconds, at the latest when something did; whether anything came."""
        came = wait_for_any([self._server, *self._connections], seconds)
        before, self._looked = self._looked, time.monotonic()
        self._now += min(self._looked - before, 1.0)
        for each in came:
            if each is self._server:
                self._welcome()
            elif isinstance(each, Connection):
                self._hear(each)
        return bool(came)

    def send(self, message: bytes) -> None:
        """To every rank."""
        for each in list(self._connections):
            with suppress(OSError):  # that one is gone
                each.send_bytes(message)

    def beat(self, over: threading.Event) -> None:
        """Tell the ranks that this process lives, and have them answer, until ``over``."""
        while not over.wait(_BEAT_SECONDS):
            self.send(b"")

    def lost(self) -> list[int]:
        """Ranks that are silent or have ended, without a word."""
        silent = [rank for rank, at in self._heard.items() if self._now - at > _SILENT_SECONDS]
        return silent + [rank for rank, at in self.gone.items() if self._now - at > _GRACE_SECONDS]

    def close(self) -> None:
        """End all connections."""
        for each in self._connections:
            each.close()
        self._connections = {}

    def _welcome(self) -> None:
        link, _ = self._server.accept()
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # nobody keeps this process waiting
            link.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", int(_BEAT_SECONDS), 0))
        self._connections[Connection(link.detach())] = None

    def _hear(self, connection: Connection) -> None:
        known = self._connections[connection]
        try:
            rank, kind, value = json.loads(connection.recv_bytes(_MOST_BYTES))
            if known is None:
                token, node = value
                if kind != "hello" or not hmac.compare_digest(token, self._token):
                    raise ConnectionError("none of the ranks")
                self.nodes[rank] = node
        except (EOFError, OSError, ValueError, TypeError, RecursionError):
            connection.close()
            del self._connections[connection]
            if known in self._heard:
                del self._heard[known]
                self.gone[known] = self._now
            return
        self._connections[connection], self._heard[rank] = rank, self._now
        if kind in {"failed", "done"}:
            del self._heard[rank]
        self._pass_on(rank, kind, value)

    def _pass_on(self, rank: int, kind: str, value: Any) -> None:
        if kind == "ready":
            self.ready.add(rank)
        elif kind == "failed":
            self.reasons[rank] = (str(value[0]), str(value[1]))
        elif kind == "at":
            self._memory.at(value.pop("phase"), **value)
        elif kind == "event":
            self._memory.event(value["kind"], value["message"], **value["details"])
        elif kind == "device":
            device, is_new = value["device"], value["device"] not in self._devices
            self._devices[device] = DeviceMemory(**value["memory"])
            if is_new:
                self._memory.watch_device(device, lambda: self._devices[device])
        elif kind == "warning":
            _logger.warning("%s", value)
        elif kind == "progress" and self._progress is not None:
            self._progress(*value)


class RankReports(logging.Handler):
    """A rank's side: a memory observer, progress, warnings, and its reason when it ends.

    Rank 0 reports everything, another rank what only it knows.
    """

    prefix = ""  # as ``MemoryObserver`` has it

    def __init__(self, rank: int, launch: Launch) -> None:
        super().__init__(logging.WARNING)
        self._rank, self._over = rank, False
        self._several_nodes = launch.several_nodes
        self._connection = Connection(socket.create_connection((launch.address, launch.port)).detach())
        self._sending = threading.Lock()
        self._send("hello", [launch.token, os.environ.get("SLURMD_NODENAME") or platform.node()])
        self._devices: dict[str, Callable[[], DeviceMemory]] = {}
        self._probed_at = -_DEVICE_SECONDS

    def obey(self) -> None:
        """From now on stop when the launching process says so, and end at once, with 1, when it is gone."""
        threading.Thread(target=self._obey, name="fvc-reports", daemon=True).start()

    def _obey(self) -> None:
        silent_seconds = 0.0  # in short waits: a process that was suspended sees one of them pass
        with suppress(EOFError, OSError):
            while silent_seconds < _SILENT_SECONDS:
                if not self._connection.poll(_BEAT_SECONDS if self._several_nodes else None):
                    silent_seconds += _BEAT_SECONDS
                    continue
                silent_seconds = 0.0
                if self._connection.recv_bytes() == _STOP:
                    os.kill(os.getpid(), signal.SIGUSR1)
                elif not self._over:
                    self._send("alive", None)
        if not self._over:
            os._exit(1)

    def ready(self) -> None:
        """From now on a signal only asks this rank to stop."""
        self._send("ready", os.getpid())

    def progress(self, done: int, planned: int) -> None:
        """Steps, from rank 0."""
        if self._rank == 0:
            self._send("progress", [done, planned])

    def at(self, phase: str, **position: int | None) -> None:
        """Where the training is, from rank 0, with the memory of its device about once a second."""
        if self._rank:
            return
        self._send("at", {"phase": phase, **position})
        if self._devices and time.monotonic() - self._probed_at >= _DEVICE_SECONDS:
            self._probed_at = time.monotonic()
            for device, probe in self._devices.items():
                self._send("device", {"device": device, "memory": vars(probe())})

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """What happened, from the rank it happened to."""
        own = kind in _OWN_EVENTS or (kind == "nonfinite" and details.get("what") == "evaluation")
        if self._rank == 0 or own:
            said = f"rank {self._rank}: {message}" if self._rank else message
            self._send("event", {"kind": kind, "message": said, "details": details})

    def disk_full(self, message: str) -> None:
        """What rank 0's metric log says of a disk that takes no more."""
        self.event("disk_full", message)

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Rank 0's accelerator."""
        self._devices[device] = probe

    def emit(self, record: logging.LogRecord) -> None:
        """A warning, from rank 0: what it warns of, the others do as well."""
        if self._rank == 0:
            self._send("warning", record.getMessage())

    def close(self) -> None:
        """Report no more; the connection ends with this process."""
        if not self._over:
            self._send("done", None)
        self._over = True
        super().close()

    def failed(self, error: BaseException) -> None:
        """Why this rank ends."""
        self._send("failed", [type(error).__name__, str(error)])

    def _send(self, kind: str, value: Any) -> None:
        with suppress(OSError), self._sending:  # the launching process is gone, and this one will be in a moment
            self._connection.send_bytes(json.dumps([self._rank, kind, _short(value)]).encode())


def _short(value: Any) -> Any:
    """JSON ``value`` without texts that would not go into one report."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    is_long = isinstance(value, str) and len(value) > _MOST_CHARACTERS
    return f"{value[: _MOST_CHARACTERS - 3]}..." if is_long else value


def end_with_parent(parent: int) -> None:
    """From now on end this process at once, with 1, when it is no more a child of process ``parent``."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="fvc-parent", daemon=True).start()
