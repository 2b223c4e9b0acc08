"""Reading how much memory a process holds and what its peak was, on the CPU and on accelerators."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Protocol

import psutil
import torch

from fvc_lib.learning.device import release_cached_memory
from fvc_lib.services.process_memory import peak_rss_bytes


class Meter(Protocol):
    """Memory of this process, in bytes."""

    def now(self) -> int:
        """Held at this moment."""
        ...

    def reset(self) -> None:
        """Forget the peak, after giving back what nothing uses."""
        ...

    def peak(self) -> int:
        """The most that was held since ``reset``."""
        ...


def meter_of(device: torch.device) -> Meter:
    """The meter of the memory that a training on ``device`` runs out of."""
    if device.type == "cuda":
        return _CudaMeter(device)
    return _MpsMeter() if device.type == "mps" else _ResidentMeter()


def give_back_unused() -> None:
    """Collect garbage and return the C library's free memory to the system: a training leaves hundreds of MB of it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


class _ResidentMeter:
    """Resident memory. Without Linux's /proc the peak is that of the process's whole life, ``ru_maxrss``."""

    def now(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def reset(self) -> None:
        give_back_unused()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now

    def peak(self) -> int:
        return peak_rss_bytes()


class _CudaMeter:
    """What torch has allocated on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset(self) -> None:
        gc.collect()
        release_cached_memory(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _MpsMeter(_ResidentMeter):
    """Apple's GPU shares main memory; its driver keeps what was ever needed, so what it holds is the peak."""

    def now(self) -> int:
        return super().now() + torch.mps.driver_allocated_memory()

    def reset(self) -> None:
        super().reset()
        torch.mps.empty_cache()

    def peak(self) -> int:
        return super().peak() + torch.mps.driver_allocated_memory()
