"""One memory policy per device: what the allocator, the precision and the caches are told, and what was found active."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DeviceKind = Literal["cuda", "mps", "cpu"]


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
