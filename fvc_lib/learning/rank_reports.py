"""What ranks tell the process that launched them: JSON lines over a pipe, so that each of the run's logs keeps one
writer, who also sees the memory of all ranks together.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from fvc_lib.learning.rank_launcher import LauncherSilentError
from fvc_lib.learning.watching import MetricSink
from fvc_lib.services.memory_observer import DeviceMemory, EventDetail, MemoryObserver

_logger = logging.getLogger(__name__)
_DEVICE_SECONDS = 1.0
_LOOK_SECONDS = 1.0
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
                if self._answers.wait_for(lambda: self._answered >= self._asked, _LOOK_SECONDS):
                    return
        raise LauncherSilentError(
            f"ranks: whoever launched them gave no answer for {_MOST_LOOKS * _LOOK_SECONDS:.0f} s, so that nobody may "
            "be writing the metric log. The last checkpoint stands: resume."
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
