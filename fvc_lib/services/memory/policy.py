"""Memory of a training: allocator, observers, garbage collector, and advice after an out-of-memory."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

# An allocator reads its environment variables once, when it first starts, so the runner gives them to a kernel before
# there is one. If several are set, torch 2.13 reads the first in this order.
ALLOC_CONF_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Ways to make a training faster, which may change how sums are rounded.
#   channels_last    convolutions' weights with their channels innermost, as tensor cores want them
#   fused_adamw      the optimizer's step in one kernel
#   cudnn_benchmark  cuDNN tries its algorithms and takes the fastest
Acceleration = Literal["channels_last", "fused_adamw", "cudnn_benchmark"]

# For the CPU nothing is set. glibc was tried on steps of r2plus1d, 16 clips of 6 x 112 x 112: MALLOC_ARENA_MAX 1 or 2
# left the peak where it was (480-530 MB), thresholds of 4 to 32 MiB too; MALLOC_MMAP_THRESHOLD_ or
# MALLOC_TRIM_THRESHOLD_ of 64 KiB to 1 MiB, or MALLOC_TOP_PAD_ of 64 MiB, lowered it to 430 MB, and a step took 2.3 to
# 2.8 times the processor time.


def allocator_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables to set before torch starts; empty if the user has set one.

    They make memory segments expandable. After an out-of-memory the batches change size, and blocks of the old size
    would otherwise stay.

    Args:
        environ: variables that are set; None: this process's environment.
    """
    environ = os.environ if environ is None else environ
    is_set = any(environ.get(name) for name in ALLOC_CONF_NAMES)
    return {} if is_set else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


PREFETCHED_BATCHES = 2  # effective batches that are loaded or wait ready per loader process


# The engine reports memory to this protocol and opens no file itself.

EventDetail = str | int | float | bool | None
PREFLIGHT = "preflight"  # the phase that measures a step, whose memory the training itself does not need


@dataclass(frozen=True)
class DeviceMemory:
    """An accelerator's memory at one moment."""

    allocated_bytes: int  # held by tensors
    reserved_bytes: int  # held by torch's allocator, cached blocks included
    max_allocated_bytes: int  # the most ``allocated_bytes`` has been
    total_bytes: int  # of the device, or what the process may use of it
    free_bytes: int  # what the driver could still give


class MemoryObserver(Protocol):
    """An observer that receives the phase and step of a training, so that memory can be attributed to them.

    ``MemorySampler`` is an example. ``prefix`` is put before the names of phases, such as ``control_``.
    """

    @property
    def prefix(self) -> str:
        """The prefix of phases: empty, except for a control (a training that checks for shortcuts)."""
        return ""

    def at(
        self, phase: str, *, epoch: int | None = None, batch_idx: int | None = None, global_step: int | None = None
    ) -> None:
        """Receive phase, epoch, batch and step of the training.

        The phases are setup, preflight, train, validation, test, and report after the training. A control's train,
        validation and test have its prefix.
        """
        return

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Record an event of this ``kind``; ``message`` is a sentence, ``details`` are values by name.

        Kinds: ``device``, ``measuring``, ``preflight``, ``out_of_memory``, ``micro_batch`` (it changed),
        ``step_restored``, ``near_limit``, ``nonfinite``, ``loader_restarted``, ``disk_full``.
        """
        return

    def watch_device(self, device: str, probe: Callable[[], DeviceMemory]) -> None:
        """Sample an accelerator as well; ``device`` is its name in the log, such as ``cuda:0``."""
        return


class NoObserver(MemoryObserver):
    """An observer that records nothing."""


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Within the block, exclude all objects that exist at its beginning from garbage collection.

    Garbage is collected completely before and after the block. Enter it after set-up: a full collection visits every
    object of every imported module, which takes 0.1 s. Newer objects are still collected, so a cycle that holds tensors
    is found. A nested block does nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


# What ran out of memory: a training step; one sample alone; a loss that compares all samples of an effective batch; the
# optimizer's step; loader processes; a step that the preflight measures; anything else.
RanOut = Literal["batch", "sample", "comparison", "optimizer_step", "loaders", "preflight", "elsewhere"]

_MORE = "more memory (mem_gb, MEMORY in slurm/site.conf, or a larger machine)"
_REMEDIES: dict[RanOut, str] = {
    "batch": "-p batch_size 1 or -p gradient_checkpointing true, which leave the result the same",
    "sample": "smaller samples (num_frames, fixed_size, image_size) in a new run, -p gradient_checkpointing true",
    "comparison": "a smaller effective_batch_size or embedding_size in a new run",
    "optimizer_step": "a smaller model in a new run",
    "loaders": "-p num_workers 0",
    "preflight": "-p memory_preflight false",
    "elsewhere": "fewer worker processes (-p workers 1, -p num_workers 0)",
}


def ran_out_in(phase: str) -> RanOut:
    """Return the key of ``memory_advice`` for an out-of-memory in ``phase``."""
    if phase.rpartition("_")[2] in ("train", "validation", "test"):
        return "batch"
    return "preflight" if phase == PREFLIGHT else "elsewhere"


def memory_advice(ran_out: RanOut) -> str:
    """Return a sentence that suggests what to change after an out-of-memory in ``ran_out``."""
    return f"Next, try {_REMEDIES[ran_out]}; or {_MORE}."
