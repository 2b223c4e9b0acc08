"""Between a rank and whoever launched it: what the rank is given, what it hears, and that it does not outlive them.

A closed input alone does not tell: what stands between may keep it open. Under SLURM the ranks are no children of srun
but of a daemon, which keeps them and their input when srun is killed.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.process_identity import this_host

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
