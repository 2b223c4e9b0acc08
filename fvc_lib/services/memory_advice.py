"""What to change when memory runs out: the one place that maps what ran out to the next setting.

The engine, the preflight, the runner, the sampler and the reports know what ran out; they all say what is found here.
Only what stands under "in a new run" changes the result.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

# A training step with several samples at once; one sample alone, in training or in validation; the loss that compares
# all samples of an effective batch; the optimizer's step; anything else in a training (loading, a checkpoint's copy);
# loader processes that are killed; what has no batch in memory; measuring before the training.
RanOut = Literal[
    "batch", "sample", "validation_sample", "comparison", "optimizer_step", "elsewhere", "loaders", "preparation",
    "preflight", "batch_size_sweep",
]  # fmt: skip

MORE_MEMORY = "more memory for the job (mem_gb, or the limit of the job or machine)"
_SMALLER_SAMPLES = "smaller samples (fixed_size, num_frames, image_size) or a smaller model in a new run"
_SETTINGS: dict[RanOut, tuple[str, ...]] = {
    "batch": ("batch_size", "gradient_checkpointing", "num_workers", MORE_MEMORY),
    "sample": ("gradient_checkpointing", "num_workers", _SMALLER_SAMPLES, MORE_MEMORY),
    "validation_sample": ("num_workers", _SMALLER_SAMPLES, MORE_MEMORY),
    "comparison": ("a smaller effective_batch_size, then a smaller embedding_size, in a new run", MORE_MEMORY),
    "optimizer_step": (MORE_MEMORY, "a smaller model in a new run"),
    "elsewhere": ("num_workers", MORE_MEMORY),
    "loaders": ("num_workers", MORE_MEMORY),
    "preparation": ("probe_workers", MORE_MEMORY),
    "preflight": ("-p memory_preflight false",),
    "batch_size_sweep": ("-p batch_size_sweep false",),
}


def next_settings(
    ran_out: RanOut,
    *,
    batch_size: int | None = None,
    recomputes: bool = False,
    num_workers: int | None = None,
    probe_workers: int | None = None,
    reads: Collection[str] | None = None,
) -> tuple[str, ...]:
    """The settings that help, the cheapest first; never empty.

    Args:
        ran_out: what memory ran out in.
        batch_size: samples in memory at once then; None: not known.
        recomputes: whether ``gradient_checkpointing`` is on already.
        num_workers: loader processes then; None: not known.
        probe_workers: processes that read files then; None: not known.
        reads: the fields that the stage reads; None: all.
    """
    smaller = f"-p batch_size {batch_size // 2}" if batch_size and batch_size > 1 else ""
    ways = {
        "batch_size": smaller if batch_size is not None else "a smaller batch_size",
        "gradient_checkpointing": "" if recomputes else "-p gradient_checkpointing true",
        "num_workers": "-p num_workers 0" if num_workers is None or num_workers > 0 else "",
        "probe_workers": "-p probe_workers 1" if probe_workers != 1 else "",
    }
    found = []
    for setting in _SETTINGS[ran_out]:
        if setting not in ways:
            found.append(setting)
        elif ways[setting] and (reads is None or setting in reads):
            found.append(ways[setting])
    return tuple(found) or (MORE_MEMORY,)


def memory_advice(
    ran_out: RanOut,
    *,
    batch_size: int | None = None,
    recomputes: bool = False,
    num_workers: int | None = None,
) -> str:
    """``next_settings`` as one sentence."""
    settings = next_settings(ran_out, batch_size=batch_size, recomputes=recomputes, num_workers=num_workers)
    return f"Next, try {'; else '.join(settings)}."
