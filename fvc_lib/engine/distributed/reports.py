"""What ranks report to the process that launched them, over a connection of each rank's own.

Position, memory of the device, events, progress and why a rank ended come as one message of JSON per report; the
connection's end also says that the other side is gone. Where the ranks are on several nodes it carries a beat as well:
a machine that went away closes no connection. There a rank says hello before it imports anything large, so that its end
is noticed in the seconds that this takes, too. Nothing here needs torch.
"""

import hmac
import json
import logging
import os
import platform
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait as wait_for_any
from typing import Any, Self

from fvc_lib.services.memory.policy import DeviceMemory, EventDetail, MemoryObserver

LAUNCH_VARIABLE = "FVC_RANK_LAUNCH"
Progress = Callable[[int, int], None]
WATCH_SECONDS = 0.2
_DEVICE_SECONDS = 1.0
# Together with the launcher's wait for srun less than a minute: within that a node that is lost ends the step.
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # then who is on another machine counts as gone
# And who has not said hello, since the first one did, or is silent before it is ready: until then Python starts and
# imports torch, which may hold everything up in that process where it is read from a slow file system.
START_SECONDS = 40.0
_GRACE_SECONDS = 5.0  # in which an end without a word may be followed by everyone's
STOP = b"stop"
_MOST_BYTES = 1 << 16  # of one report
_MOST_CHARACTERS = 4096  # of one text in it: in JSON each may take six bytes, and a report has two texts at most
# What happens to one rank alone; everything else happens to all of them, and rank 0 reports it.
_OWN_EVENTS = frozenset({"out_of_memory", "loader_restarted"})
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
        return cls.of_text(text) if text else None

    @classmethod
    def of_text(cls, text: str) -> Self:
        """What stands in the variable."""
        return cls(**json.loads(text))

    @property
    def address(self) -> str:
        """Of the launching process, for a rank."""
        return os.environ["SLURM_LAUNCH_NODE_IPADDR"] if self.several_nodes else "127.0.0.1"


class ReportReader:
    """The launching process's side: passes on what the ranks report. One thread at a time, but for ``beat``.

    ``server`` is where all ``size`` connect; who does not begin with ``token`` is none of them. ``start_seconds`` are
    given to each rank to say hello, once the first one has, and to be heard again while it imports.
    """

    def __init__(
        self,
        server: socket.socket,
        token: str,
        size: int,
        memory: MemoryObserver,
        progress: Progress | None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.ready: set[int] = set()  # ranks that take a signal for a wish to stop
        self.reasons: dict[int, tuple[str, str]] = {}  # why ranks ended: the error's class and text
        self.nodes: dict[int, str] = {}  # of the ranks
        self.gone: dict[int, float] = {}  # ranks whose connections ended without a word, and when
        self._server, self._token, self._size = server, token, size
        self._memory, self._progress, self._start_seconds = memory, progress, start_seconds
        self._devices: dict[str, DeviceMemory] = {}
        self._connections: dict[Connection, int | None] = {}  # and whose they are; None before that was said
        # In seconds that this process has seen pass: one that was suspended must not find that all were silent.
        self._now, self._looked = 0.0, time.monotonic()
        self._heard: dict[int, float] = {}  # when, by rank, without those that said that they end
        self._first_came: float | None = None

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

    def silent(self) -> list[int]:
        """Ranks that are silent, without a word: if their machine lived, it would have closed their connections."""
        starting = max(_SILENT_SECONDS, self._start_seconds)
        limits = {rank: _SILENT_SECONDS if rank in self.ready else starting for rank in self._heard}
        return [rank for rank, at in self._heard.items() if self._now - at > limits[rank]]

    def ended(self) -> list[int]:
        """Ranks that have ended without a word, and those that never came."""
        gone = [rank for rank, at in self.gone.items() if self._now - at > _GRACE_SECONDS]
        if self._first_came is None or self._now - self._first_came <= self._start_seconds:
            return gone
        return gone + [rank for rank in range(self._size) if rank not in self.nodes]

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
                self._first_came = self._now if self._first_came is None else self._first_came
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
                if self._connection.recv_bytes() == STOP:
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


_begun: RankReports | None = None


def begin_rank() -> None:
    """Report from now on, as the rank of this task of srun; then be ``python -m`` of this process's arguments."""
    global _begun
    _begun = RankReports(int(os.environ["SLURM_PROCID"]), Launch.of_text(os.environ[LAUNCH_VARIABLE]))
    _begun.obey()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def reports_of(rank: int, launch: Launch) -> RankReports:
    """This process's, who obeys; they began before it did anything else, or begin now."""
    if _begun is not None:
        return _begun
    reports = RankReports(rank, launch)
    reports.obey()
    return reports


def end_with_parent(parent: int) -> None:
    """From now on end this process at once, with 1, when it is no more a child of process ``parent``."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="fvc-parent", daemon=True).start()
