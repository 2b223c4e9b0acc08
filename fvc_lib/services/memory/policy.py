"""One memory policy per device: allocator, precision and caches; and advice after an out-of-memory."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

# An allocator reads its environment variables once, when it first starts, so the runner gives them to a kernel before
# there is one. Of several *_ALLOC_CONF torch 2.13 reads the first in this order.
ALLOC_CONF_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MPS_HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
MPS_LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"

# What may make a training faster, and may change how sums are rounded.
#   channels_last    convolutions' weights with their channels innermost, as tensor cores want them
#   fused_adamw      the optimizer's step in one kernel
#   cudnn_benchmark  cuDNN tries its algorithms and takes the fastest
#   stem_pieces      the networks' stems take several clips at once, not one after the other
#   send_ahead       the next micro-batch of an effective batch is sent to the GPU while one is computed
#   compile          torch's compiler makes the kernels of the forward and backward pass
Acceleration = Literal["channels_last", "fused_adamw", "cudnn_benchmark", "stem_pieces", "send_ahead", "compile"]

_GLIBC_NAMES = (
    "MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST", "MALLOC_CHECK_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_PERTURB_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip
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
    (
        """Return the variables to add before torch starts; variables of the user are kept.

    They are of all devices, because the device of a kernel is not known before it starts.

    Args:
        environ: variables that are set; None: this process's environment.
    """
        ""
    )
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
    """Return the allocator variables in force on a kind of device: the user's and ours."""
    environ = os.environ if environ is None else environ
    names = {"cuda": ALLOC_CONF_NAMES, "mps": (MPS_HIGH, MPS_LOW), "cpu": _GLIBC_NAMES}[device]
    everything = {**allocator_environment(environ), **environ}
    found = {name: everything[name] for name in names if everything.get(name)}
    return dict(list(found.items())[:1]) if device == "cuda" else found


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


DeviceKind = Literal["cuda", "mps", "cpu"]
PREFETCHED_BATCHES = 2  # so many effective batches are loaded or wait ready per loader process

# (training, validation): cached blocks are given back every so many batches. On CUDA that costs a synchronisation and
# gains nothing: the allocator frees its cache by itself before it fails. Metal shares the machine's memory.
_CLEAR_CACHE_BATCHES: dict[DeviceKind, tuple[int, int]] = {"cuda": (0, 0), "mps": (5, 3), "cpu": (0, 0)}


@dataclass(frozen=True)
class MemoryPolicy:
    """The memory settings of a training on one kind of device."""

    device: DeviceKind  # the kind it was resolved for
    amp_dtype: Literal["bfloat16", "float16"] | None = None  # None: float32
    tf32: bool = False  # whether float32 products may be computed in TF32
    pin_memory: bool = False  # whether batches are loaded into page-locked memory
    # Cached blocks are given back every so many batches; 0: after an out-of-memory and between stages.
    clear_cache_training_batches: int = 0
    clear_cache_validation_batches: int = 0
    allocator: Mapping[str, str] = field(default_factory=dict)  # environment variables, read once when torch starts

    def describe(self) -> list[str]:
        """Return short lines for the start of a training."""
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
    environ: Mapping[str, str] | None = None,
) -> MemoryPolicy:
    """Return the policy for one kind of device.

    Args:
        device: the kind.
        amp: ``auto`` is mixed precision and TF32 on CUDA, float32 elsewhere; ``off`` is float32 everywhere.
        bf16_supported: whether the device computes in bfloat16; float16 takes its place otherwise.
        environ: environment with the user's allocator settings; None: this process's.
    """
    training, validation = _CLEAR_CACHE_BATCHES[device]
    mixed = device == "cuda" and amp == "auto"
    return MemoryPolicy(
        device=device,
        amp_dtype=("bfloat16" if bf16_supported else "float16") if mixed else None,
        tf32=mixed,
        pin_memory=device == "cuda",
        clear_cache_training_batches=training,
        clear_cache_validation_batches=validation,
        allocator=allocator_in_force(device, environ),
    )


# Whom a training tells about its memory: the engine knows this protocol and opens no file itself.

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
    """Hears at every step where a training stands, so that memory can be attributed; ``MemorySampler`` is one.

    ``prefix`` stands before the names of phases, such as ``control_``.
    """

    @property
    def prefix(self) -> str:
        """Empty but for a control's."""
        return ""

    def at(
        self, phase: str, *, epoch: int | None = None, batch_idx: int | None = None, global_step: int | None = None
    ) -> None:
        """Hear where the training stands.

        Phases: setup, preflight, train, validation and test, the last three also after a control's
        prefix, and report when training is over.
        """
        return

    def event(self, kind: str, message: str, **details: EventDetail) -> None:
        """Record an event, in one sentence and in numbers.

        Kinds: ``policy``, ``measuring``, ``preflight``, ``out_of_memory``, ``micro_batch`` (it changed),
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
    """Collect once, then let the collector look only at what is made from here on; at the end collect all.

    Entered after set-up: a full collection walks every object of every imported module, 0.1 s at a time. Collections of
    what is young go on, so a cycle that holds tensors is still found. Outermost wins: inside another nothing is done.
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
    """Return what runs out of memory in a stage's ``phase``."""
    if phase.rpartition("_")[2] in ("train", "validation", "test"):
        return "batch"
    return "preflight" if phase == PREFLIGHT else "elsewhere"


def memory_advice(ran_out: RanOut) -> str:
    """Return one sentence that says what to change after ``ran_out``."""
    return f"Next, try {_REMEDIES[ran_out]}; or {_MORE}."
