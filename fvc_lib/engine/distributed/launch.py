"""Several ranks of one training on this machine, started by torch's elastic launcher, and what they report meanwhile.

Rank 0 writes the run's metric log itself, so no checkpoint counts a step that was not logged. Everything else that the
launching process wants to know (position, memory of the device, events, progress, why a rank ended) comes as one
datagram of JSON per report over a socket in a private folder.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Self

import psutil
import torch

from fvc_lib import CHECKOUT
from fvc_lib.engine.distributed.ranks import RankLostError, error_named
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.memory.policy import DeviceMemory, EventDetail, MemoryObserver

LAUNCH_VARIABLE = "FVC_RANK_LAUNCH"
Progress = Callable[[int, int], None]
_WATCH_SECONDS = 0.2
_DEVICE_SECONDS = 1.0
_LONGEST_FOLDER = 60  # characters; the name of a socket may have about a hundred
_MOST_BYTES = 1 << 16  # of one report
_MOST_CHARACTERS = 4096  # of one text in it: in JSON each may take six bytes, and a report has two texts at most
# What happens to one rank alone; everything else happens to all of them, and rank 0 reports it.
_OWN_EVENTS = frozenset({"out_of_memory", "loader_restarted"})
# A signal that asks for a stop ends a rank that has nothing to save yet, and has no handler for it.
_STOPPED = frozenset([StoppedError.exit_code, -signal.SIGTERM, -signal.SIGUSR1])
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What a rank is given by the process that launches it, in an environment variable."""

    config: str  # the run's parameters, as JSON
    reports: str  # path of the socket that reports go to
    log: str  # file that the rank's output is appended to
    attempt: int  # which try this is, for the metric log
    pid: int  # of the launching process
    network: Mapping[str, str] | None = None  # what that would train; a rank that would train another one refuses

    @classmethod
    def of_environment(cls) -> Self | None:
        """The launch of this process; None where it was started otherwise: by torchrun, by srun, alone."""
        text = os.environ.pop(LAUNCH_VARIABLE, "")  # not for this rank's own children
        return cls(**json.loads(text)) if text else None


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
    """Run ``python -m module arguments`` as ``config.num_ranks`` ranks on this machine, and wait for their end.

    Each computes with as many threads as leave each core one, unless OMP_NUM_THREADS says otherwise. When this process
    goes away, however that happens, the ranks end within a second (``end_with_parent``).

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
        RankLostError: a rank was killed, or ended without a reason.
        FvcError: what a rank gives as its reason, of the same class.
    """
    size, stopping, begun = config.num_ranks, False, False
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="fvc-ranks-", dir="/tmp" if len(gettempdir()) > _LONGEST_FOLDER else None) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports,
        ThreadPoolExecutor(1, "fvc-ranks") as pool,
    ):
        reports.bind(str(Path(folder) / "reports"))
        reports.settimeout(_WATCH_SECONDS)
        launch = Launch(config.model_dump_json(), reports.getsockname(), str(log), attempt, os.getpid(), network)
        reader = ReportReader(memory, progress)
        with _environment(_for_ranks(launch, size)):
            agent = pool.submit(_run_agent, size, folder, ["-m", module, *arguments])
            try:
                while not agent.done():
                    if not stopping and stop is not None and stop():
                        stopping, begun = True, len(reader.pids) == size
                        if not begun:  # they have nothing to save, and may be waiting for one that does not come
                            _kill_ranks(module, agent)
                        for pid in reader.pids.values():
                            with suppress(ProcessLookupError):
                                os.kill(pid, signal.SIGUSR1)
                    reader.take_from(reports)
            finally:
                _kill_ranks(module, agent)
            reports.settimeout(0)
            while reader.take_from(reports):
                pass
    if stopping and not begun:
        raise StoppedError("stopped as asked before the ranks had met; resume the run to go on.")
    codes = agent.result()
    if codes:
        raise _reason(reader.reasons, codes, log)


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


def _for_ranks(launch: Launch, size: int) -> dict[str, str]:
    """Environment variables of the ranks: this very package on the path, and their share of the threads."""
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // size))
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


def _reason(reasons: Mapping[int, tuple[str, str]], codes: Mapping[int, int], log: Path) -> FvcError:
    """The first reason that is one: a rank that only lost the others knows less than they."""
    known = [reason for _, reason in sorted(reasons.items()) if reason[0] != RankLostError.__name__]
    if known:
        return error_named(*min(known, key=lambda reason: reason[0] == StoppedError.__name__))
    if next(iter(codes.values())) in _STOPPED:
        return StoppedError("stopped as asked; resume the run to go on.")
    # With SIGTERM torch's agent ends the others.
    ended = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    killed = [f"rank {rank} was ended by {signal.Signals(number).name}" for rank, number in ended.items()]
    if killed:
        return RankLostError(
            f"{', '.join(killed)} (SIGKILL is most often the system's, for want of memory); the other ranks end with "
            f"it. The last checkpoint stands: give the job more memory or fewer ranks, then resume. See {log}."
        )
    return RankLostError(f"the ranks ended with exit codes {dict(codes)} and gave no reason; {log} says why.")


class ReportReader:
    """The launching process's side: passes on what the ranks report. One thread at a time."""

    def __init__(self, memory: MemoryObserver, progress: Progress | None) -> None:
        self.pids: dict[int, int] = {}  # of the ranks that take a signal for a wish to stop
        self.reasons: dict[int, tuple[str, str]] = {}  # why ranks ended: the error's class and text
        self._memory, self._progress = memory, progress
        self._devices: dict[str, DeviceMemory] = {}

    def take_from(self, reports: socket.socket) -> bool:
        """The next report, waited for as long as the socket's timeout says; whether there was one."""
        try:
            report = reports.recv(_MOST_BYTES)
        except (TimeoutError, BlockingIOError):
            return False
        rank, kind, value = json.loads(report)
        if kind == "ready":
            self.pids[rank] = int(value)
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
        return True


class RankReports(logging.Handler):
    """A rank's side: a memory observer, progress, warnings, and its reason when it ends.

    Rank 0 reports everything, another rank what only it knows, to the launching process's socket at ``address``.
    """

    prefix = ""  # as ``MemoryObserver`` has it

    def __init__(self, rank: int, address: str) -> None:
        super().__init__(logging.WARNING)
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
        self._socket.connect(address)
        self._devices: dict[str, Callable[[], DeviceMemory]] = {}
        self._probed_at = -_DEVICE_SECONDS

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
        """Report no more."""
        self._socket.close()
        super().close()

    def failed(self, error: BaseException) -> None:
        """Why this rank ends."""
        self._send("failed", [type(error).__name__, str(error)])

    def _send(self, kind: str, value: Any) -> None:
        with suppress(ConnectionError):  # the launching process is gone, and this one will be in a moment
            self._socket.send(json.dumps([self._rank, kind, _short(value)]).encode())


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
