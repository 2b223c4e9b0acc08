"""What a training tells about its memory, and to whom: the engine knows this protocol and opens no file itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

EventDetail = str | int | float | bool | None
# The phases of measuring beforehand, a step or what fits: their memory is not what the work itself needs.
PREFLIGHT, FITS = "preflight", "fits"
MEASURING = (PREFLIGHT, FITS)


@dataclass(frozen=True)
class DeviceMemory:
    """An accelerator's memory at one moment.

    Attributes:
        allocated_bytes: held by tensors.
        reserved_bytes: held by torch's allocator, cached blocks included.
        max_allocated_bytes: the most ``allocated_bytes`` has been.
        total_bytes: of the device, or what the process may use of it.
        free_bytes: what the driver could still give.
    """

    allocated_bytes: int
    reserved_bytes: int
    max_allocated_bytes: int
    total_bytes: int
    free_bytes: int


class MemoryObserver(Protocol):
    """Told at every step where a training is, so that memory can be attributed; ``MemorySampler`` is one.

    ``prefix`` stands before the names of phases in what it writes: ``control_`` for the control's.
    """

    @property
    def prefix(self) -> str:
        """Empty but for the control's."""
        ...

    def at(
        self,
        phase: str,
        *,
        epoch: int | None = None,
        batch_idx: int | None = None,
        global_step: int | None = None,
    ) -> None:
        """Say where the training is.

        Phases: setup, fits, preflight, train, validation and test, the last three also after ``control_``, and report
        when training is over.
        """
        ...

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Record that something happened here, in one sentence and in numbers.

        Kinds: ``policy``, ``preflight``, ``out_of_memory``, ``micro_batch`` (it changed), ``step_restored``,
        ``near_limit``, ``nonfinite``, ``loader_restarted``, ``disk_full``, ``recording`` (``profile_memory`` wrote it).
        """
        ...

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """From now on sample an accelerator too; ``device`` is its name in the log, like ``cuda:0``."""
        ...


class NoObserver:
    """Hears everything and keeps nothing: for trainings nobody watches."""

    prefix = ""

    def at(
        self,
        phase: str,
        *,
        epoch: int | None = None,
        batch_idx: int | None = None,
        global_step: int | None = None,
    ) -> None:
        """Ignore."""

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Ignore."""

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Ignore."""
