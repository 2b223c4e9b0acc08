"""Where the training runs, what precision that place is good at, and how much memory was used there."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fvc_lib.services.errors import UsageError


@dataclass(frozen=True)
class ComputeDevice:
    """A resolved device. ``amp_dtype`` is None where training runs in float32."""

    device: torch.device
    amp_dtype: torch.dtype | None
    name: str

    def describe(self) -> str:
        """One line for a notebook, like ``cpu (x86_64, 2 threads), float32``."""
        precision = "float32" if self.amp_dtype is None else f"mixed {str(self.amp_dtype).removeprefix('torch.')}"
        return f"{self.device.type} ({self.name}), {precision}"


def resolve_device(request: str = "auto", amp: str = "auto") -> ComputeDevice:
    """``auto`` is cuda, else mps, else cpu; ``amp="auto"`` is bfloat16 or float16 on cuda, float32 elsewhere.

    Raises:
        UsageError: the requested device is not there.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(name for name, there in present.items() if there) if request == "auto" else request
    if not present.get(kind, False):
        have = ", ".join(name for name, there in present.items() if there)
        raise UsageError(
            f"device: got {request!r}, which torch {torch.__version__} does not find; it has: {have}, auto."
        )
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return ComputeDevice(device, _amp_dtype(kind) if amp == "auto" else None, _device_name(device))


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Refuse operations that give different sums from run to run; on the CPU only, elsewhere some have no other."""
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(before[0] or device.type == "cpu")
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and changes no sum
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]


def release_cached_memory(device: torch.device) -> None:
    """Give torch's cached blocks back to the device: after an out-of-memory and between stages, never per batch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def peak_device_bytes(device: torch.device) -> int | None:
    """The most torch has had allocated on an accelerator; None on the CPU, whose measure is resident memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_rss_bytes() -> int:
    """This process's largest resident memory so far: VmHWM, or ``ru_maxrss`` where there is no /proc."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _amp_dtype(kind: str) -> torch.dtype | None:
    if kind != "cuda":
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads" if device.type == "cpu" else "Apple GPU"
