"""Telling an out-of-memory from any other error, by type first, then by anchored message, then by cause; and telling
what memory held when it ended.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from fvc_lib.learning.device import device_memory_probe

# Anchored at the start: the substring "oom" also matches room, zoom and bloom.
_MESSAGES = re.compile(
    r"^(?:\[enforce fail at alloc_cpu\.cpp:\d+\].*)?DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    # oneDNN keeps the reason to itself: under a falling RLIMIT_AS one end in five came with this text. It also
    # stands for a primitive that oneDNN does not have: then no halving helps, and the text is told with the last error.
    r"|^could not (?:create a primitive|create a memory object|execute a primitive)$"
    r"|^MPS backend out of memory"
    r"|^CUDA out of memory"
    r"|^CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)"
    r"|^cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
    # What a convolution says on CUDA when its workspace does not fit.
    r"|^(?:GET|FIND) was unable to find an engine to execute this computation"
    r"|^Unable to find a valid cuDNN algorithm"
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|KB|MB|GB)?")
_UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_NUM_LISTED = 20


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


@dataclass(frozen=True)
class MemoryState:
    """What memory held when it ended.

    Attributes:
        message: the error's first line.
        asked_bytes: what was asked for; None where the message does not say.
        rss_bytes: resident memory of this process.
        device: of an accelerator, by ``DeviceMemory``'s names; empty on the CPU.
        largest_tensors: ``{shape, dtype, device, count, total_bytes}`` per kind that Python can see, largest first
            (what only the autograd graph holds is not among them).
    """

    message: str
    asked_bytes: int | None
    rss_bytes: int
    device: dict[str, int]
    largest_tensors: list[dict[str, Any]]


def memory_state(error: BaseException, device: torch.device, known: Iterable[Tensor] = ()) -> MemoryState:
    """Look around while ``error`` is being handled, that is while its traceback still holds the tensors.

    Args:
        error: the out-of-memory.
        device: where it happened.
        known: tensors to count besides those the garbage collector knows (frozen ones it does not list).
    """
    message = str(error).partition("\n")[0] or type(error).__name__
    probe = device_memory_probe(device)
    try:
        tensors = _largest_tensors(known)
    except MemoryError:  # there is not even enough to look
        tensors = []
    on_device = vars(probe()) if probe is not None else {}
    return MemoryState(message, asked_bytes(message), psutil.Process().memory_info().rss, on_device, tensors)


def asked_bytes(message: str) -> int | None:
    """The bytes an allocator's message says were asked for: ``Tried to allocate 2.00 GiB``, ``... 400 bytes``."""
    match = _ASKED.search(message)
    return int(float(match[1].rstrip(".")) * _UNITS[match[2] or ""]) if match else None


def _largest_tensors(known: Iterable[Tensor]) -> list[dict[str, Any]]:
    counts: Counter[tuple[tuple[int, ...], str, str, int]] = Counter()
    shown: dict[tuple[str, int], tuple[int, Tensor]] = {}  # of each storage the tensor that shows most of it
    for tensor in (*known, *(item for item in gc.get_objects() if issubclass(type(item), Tensor))):
        try:
            storage = tensor.untyped_storage()
            place = (str(tensor.device), storage.data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse, fake and other tensors without memory of their own
            continue
        part = tensor.nbytes if tensor.nbytes <= storage.nbytes() else 0  # an expanded view shows it many times over
        if place not in shown or part > shown[place][0]:
            shown[place] = part, tensor
    for (device, _), (_, tensor) in shown.items():
        counts[(tuple(tensor.shape), str(tensor.dtype), device, tensor.untyped_storage().nbytes())] += 1
    largest = sorted(counts.items(), key=lambda item: (-item[0][3] * item[1], item[0]))[:_NUM_LISTED]
    return [
        {"shape": list(shape), "dtype": dtype, "device": where, "count": count, "total_bytes": size * count}
        for (shape, dtype, where, size), count in largest
    ]
