"""The environment variables by which an allocator is told how to behave: which FVC sets, and which are mistakes.

An allocator reads them once, when it first starts, so the runner gives them to a kernel before there is one. What torch
2.13 reads was looked up in its headers and tried on its CPU build: of several ``*_ALLOC_CONF`` the first in
``ALLOC_CONF_NAMES`` wins, a malformed one raises, and an unknown key passes without a word (by its source, a CUDA build
refuses that too: so the check comes before torch).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping

from fvc_lib.services.errors import did_you_mean

ALLOC_CONF_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MPS_HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
MPS_LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"

# c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13
_ALLOC_CONF_KEYS = frozenset(
    {
        "large_segment_size_mb", "max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold",
        "roundup_power2_divisions", "expandable_segments", "pinned_use_background_threads",
        "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "backend", "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register", "release_lock_on_hipmalloc", "pinned_use_hip_host_register",
        "graph_capture_record_stream_reuse", "pinned_reserve_segment_size_mb", "pinned_num_register_threads",
        "per_process_memory_fraction", "pinned_free_catch_all", "throw_on_cudamalloc_oom",
    }
)  # fmt: skip
_TORCH_NAMES = (
    *ALLOC_CONF_NAMES, "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING", MPS_HIGH, MPS_LOW,
    "PYTORCH_DEBUG_MPS_ALLOCATOR",
)  # fmt: skip
_GLIBC_NAMES = (
    "MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST", "MALLOC_CHECK_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_PERTURB_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip
_LIKE_TORCHS = re.compile(r"PYTORCH_.*(ALL?OC|WATERMARK|MEMORY|MAX_SPLIT|SEGMENTS).*|.*_ALLOC_CONF")

# Expandable segments: micro-batches change size after an out-of-memory, and blocks of the old size would lie about.
_EXPANDABLE = "expandable_segments:True"
# Of what Metal recommends for a process. torch's own 1.7 lets a Mac swap long before anything fails, and a failure is
# what the step can answer with a smaller micro-batch. Not measured: no Mac was at hand.
_MPS_HIGH_RATIO, _MPS_LOW_RATIO = 1.0, 0.9
_MPS_MOST = 2.0

# For the CPU nothing is set. glibc was tried on steps of r2plus1d, 16 clips of 6 x 112 x 112: MALLOC_ARENA_MAX 1 or 2
# left the peak where it was (480-530 MB), thresholds of 4 to 32 MiB too; MALLOC_MMAP_THRESHOLD_ or
# MALLOC_TRIM_THRESHOLD_ of 64 KiB to 1 MiB, or MALLOC_TOP_PAD_ of 64 MiB, lowered it to 430 MB, and a step took 2.3 to
# 2.8 times the processor time.


def allocator_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables to be added before torch starts. What the user has set stands, and ours keep out of its way.

    Those of all devices at once, since whoever starts a kernel does not know what it will find; each is read by its own
    device alone.

    Args:
        environ: what is set already; none: this process's environment.
    """
    environ = os.environ if environ is None else environ
    added = {} if any(environ.get(name) for name in ALLOC_CONF_NAMES) else {"PYTORCH_ALLOC_CONF": _EXPANDABLE}
    low, high = _number(environ.get(MPS_LOW)), _number(environ.get(MPS_HIGH))
    # torch refuses a low above the high one, its own defaults included: a user who lowers one alone gets the other.
    if MPS_HIGH not in environ:
        added[MPS_HIGH] = str(min(_MPS_MOST, max(_MPS_HIGH_RATIO, low or 0.0)))
    if MPS_LOW not in environ:
        added[MPS_LOW] = str(min(_MPS_LOW_RATIO, high or _MPS_LOW_RATIO))
    return added


def allocator_in_force(device: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables one kind of device (``cuda``, ``mps`` or ``cpu``) goes by: the user's, and ours beside them."""
    environ = os.environ if environ is None else environ
    names = {"cuda": ALLOC_CONF_NAMES, "mps": (MPS_HIGH, MPS_LOW), "cpu": _GLIBC_NAMES}[device]
    everything = {**allocator_environment(environ), **environ}
    found = {name: everything[name] for name in names if everything.get(name)}
    return dict(list(found.items())[:1]) if device == "cuda" else found


def check_allocator_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """One warning for each variable that looks like an allocator's setting and does nothing, or does harm."""
    environ = os.environ if environ is None else environ
    warnings = [warning for name in sorted(environ) for warning in _check_name(name)]
    for name in ALLOC_CONF_NAMES:
        warnings.extend(_check_keys(name, environ.get(name, "")))
    warnings.extend(_check_shadowed(environ))
    warnings.extend(_check_watermarks(environ))
    return warnings


def _check_name(name: str) -> Iterator[str]:
    upper = name.upper()
    if name not in _TORCH_NAMES and _LIKE_TORCHS.fullmatch(upper):
        close = difflib.get_close_matches(upper, _TORCH_NAMES, n=1, cutoff=0.85)
        meant = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(_TORCH_NAMES)}."
        yield f"{name}: torch reads no such variable, it does nothing. {meant}"
    elif name not in _GLIBC_NAMES:
        for known in _GLIBC_NAMES:  # other allocators read MALLOC_ variables too, so only the missing line counts
            if known.rstrip("_") == upper.rstrip("_"):
                yield f"{name}: glibc reads no such variable, it does nothing. Did you mean {known}?"


def _check_keys(name: str, settings: str) -> Iterator[str]:
    for part in re.sub(r"\[[^]]*]", "[]", settings).split(","):
        key, colon, value = (text.strip() for text in part.partition(":"))
        if not part.strip():
            continue
        if not colon or not value:
            yield f"{name}: got {part.strip()!r}, and torch stops at anything but key:value."
        elif key not in _ALLOC_CONF_KEYS:
            there = f" There are: {', '.join(sorted(_ALLOC_CONF_KEYS))}."
            yield f"{name}: torch knows no key {key!r}.{did_you_mean(key, _ALLOC_CONF_KEYS) or there}"


def _check_shadowed(environ: Mapping[str, str]) -> Iterator[str]:
    given = [name for name in ALLOC_CONF_NAMES if environ.get(name)]
    for name in given[1:]:
        if environ[name] != environ[given[0]]:
            yield f"{name}: torch reads {given[0]} instead, which is set too. Put everything into one of them."


def _check_watermarks(environ: Mapping[str, str]) -> Iterator[str]:
    ratios = {name: _number(environ[name]) for name in (MPS_HIGH, MPS_LOW) if name in environ}
    for name, ratio in ratios.items():
        if ratio is None or not 0 <= ratio <= _MPS_MOST:
            yield f"{name}: got {environ[name]!r}, and torch takes a number above 0 and up to {_MPS_MOST}."
    high, low = ratios.get(MPS_HIGH), ratios.get(MPS_LOW)
    if high == 0:
        yield (
            f"{MPS_HIGH}: 0.0 removes the limit, so a Mac runs out as a whole instead of a step that could be redone "
            f"with fewer clips. Leave it unset: FVC sets {_MPS_HIGH_RATIO}."
        )
    if low == 0:
        yield f"{MPS_LOW}: 0.0 keeps torch from freeing memory in time. Leave it unset: FVC sets {_MPS_LOW_RATIO}."
    if high and low and low > high:
        yield f"{MPS_LOW}: got {low}, above {MPS_HIGH} with {high}, which torch refuses. Lower it."


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
