"""One memory policy per device: what the allocator, the precision and the caches are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fvc_lib.services.allocator_settings import allocator_in_force

DeviceKind = Literal["cuda", "mps", "cpu"]

# (training, validation): cached blocks are given back every so many batches. On CUDA that costs a synchronisation and
# gains nothing: the allocator frees its cache by itself before it fails. Metal shares the machine's memory.
_CLEAR_CACHE_BATCHES: dict[DeviceKind, tuple[int, int]] = {"cuda": (0, 0), "mps": (5, 3), "cpu": (0, 0)}


@dataclass(frozen=True)
class MemoryPolicy:
    """How a training on one kind of device treats memory. A value; nothing is done by holding one.

    Attributes:
        device: the kind it was resolved for.
        amp_dtype: ``bfloat16``, ``float16``, or None for float32.
        tf32: whether float32 products may be computed in TF32.
        pin_memory: whether batches are loaded into page-locked memory.
        clear_cache_training_batches: cached blocks are given back every so many; 0: after an OOM and between stages.
        clear_cache_validation_batches: the same in validation.
        allocator: the environment variables that set the allocator, read once when torch starts.
    """

    device: DeviceKind
    amp_dtype: Literal["bfloat16", "float16"] | None = None
    tf32: bool = False
    pin_memory: bool = False
    clear_cache_training_batches: int = 0
    clear_cache_validation_batches: int = 0
    allocator: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> list[str]:
        """Short lines for the start of a training."""
        precision = f"mixed, {self.amp_dtype} and float32" if self.amp_dtype else "float32"
        tf32 = f"; TF32 {'on' if self.tf32 else 'off'}" if self.device == "cuda" else ""
        allocator = ", ".join(f"{name}={value}" for name, value in self.allocator.items())
        lines = [
            f"memory policy: {self.device}",
            f"precision: {precision}{tf32}",
            f"allocator: {allocator or 'as it comes'}",
        ]
        if self.device != "cpu":
            lines.append(f"cached memory is given back: {self._clearing()}")
            lines.append(f"batches in page-locked memory: {'yes' if self.pin_memory else 'no'}")
        return lines

    def _clearing(self) -> str:
        named = {"training": self.clear_cache_training_batches, "validation": self.clear_cache_validation_batches}
        every = [f"every {batches} {part} batches" for part, batches in named.items() if batches]
        return ", ".join(["after an out-of-memory", "between stages", *every])


def resolve_memory_policy(
    device: DeviceKind,
    *,
    amp: Literal["auto", "off"] = "auto",
    bf16_supported: bool = True,
    clear_cache_training_batches: int | None = None,
    clear_cache_validation_batches: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> MemoryPolicy:
    """The policy for one kind of device.

    Args:
        device: what the training runs on.
        amp: ``auto`` is mixed precision and TF32 on CUDA; elsewhere float32, as with ``off``.
        bf16_supported: whether the CUDA device computes in bfloat16 itself; else it gets float16.
        clear_cache_training_batches: None: the device's default; 0: only after an out-of-memory and between stages.
        clear_cache_validation_batches: the same in validation.
        environ: where the allocator's variables are looked up; none: this process's environment.
    """
    training, validation = _CLEAR_CACHE_BATCHES[device]
    mixed = device == "cuda" and amp == "auto"
    return MemoryPolicy(
        device=device,
        amp_dtype=("bfloat16" if bf16_supported else "float16") if mixed else None,
        tf32=mixed,
        pin_memory=device == "cuda",
        clear_cache_training_batches=training if clear_cache_training_batches is None else clear_cache_training_batches,
        clear_cache_validation_batches=(
            validation if clear_cache_validation_batches is None else clear_cache_validation_batches
        ),
        allocator=allocator_in_force(device, environ),
    )
