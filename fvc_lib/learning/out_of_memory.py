"""Telling an out-of-memory from any other error: by type first, then by anchored message, then by cause."""

from __future__ import annotations

import re

import torch

# Anchored at the start: the substring "oom" also matches room, zoom and bloom.
_MESSAGES = re.compile(
    r"^(?:\[enforce fail at alloc_cpu\.cpp:\d+\].*)?DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    r"|^MPS backend out of memory"
    r"|^CUDA out of memory"
    r"|^CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)"
    r"|^cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or what it was raised from, says that memory ended."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _MESSAGES.match(str(error)):
            return True
        error = error.__cause__
    return False
