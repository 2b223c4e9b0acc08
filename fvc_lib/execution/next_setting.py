"""What to try next when a task has died, as options of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

from fvc_lib.services.config import RunConfig

# What batch_size 0 stands for (``learning.models.default_micro_batch``, which costs torch to import).
DEFAULT_BATCH = {"frame_cnn": 8, "r2plus1d": 4}
_LOOK_BYTES = 256_000
_MEANINGS = {
    "batch_size": "fewer clips in memory at once; the result stays the same",
    "gradient_checkpointing": "activations are computed again instead of kept; the result stays the same",
    "num_workers": "no loader processes and no shared memory; the result stays the same",
    "probe_workers": "one file after the other",
    "--mem": "every setting is the smallest already: give the job or machine more memory, or take fewer or smaller "
    "frames in a new run",
}


def after_memory_ended(config: RunConfig, reads: Collection[str], events: Path, limit_bytes: int) -> str:
    """The first of the settings that take less memory and keep the result, else more memory.

    Args:
        config: what the task ran with.
        reads: the parameters its notebook reads; others would change nothing.
        events: the stage's memory events, which tell how many clips were taken at once in the end.
        limit_bytes: what it may use now.

    Returns:
        Options for ``run_notebooks.py --resume``, or ``--mem=6G`` for ``sbatch``.
    """
    batch = batch_in_use(config, events)
    if "batch_size" in reads and batch > 1:
        return f"-p batch_size {batch // 2}"
    if "gradient_checkpointing" in reads and not config.gradient_checkpointing:
        return "-p gradient_checkpointing true"
    if "num_workers" in reads and config.num_workers > 0:
        return "-p num_workers 0"
    if "probe_workers" in reads and config.probe_workers != 1:
        return "-p probe_workers 1"
    return more_memory(limit_bytes)


def more_memory(limit_bytes: int) -> str:
    """Half as much again as ``limit_bytes``, as ``sbatch`` takes it, in GiB."""
    return f"--mem={-(-limit_bytes * 3 // (2 * 2**30))}G"


def after_another_death(config: RunConfig, reads: Collection[str]) -> str | None:
    """Where a kernel crashed: without loader processes and their shared memory; None where there were none."""
    return "-p num_workers 0" if "num_workers" in reads and config.num_workers > 0 else None


def meaning(options: str) -> str:
    """Why ``options`` are worth trying, in a clause."""
    for name, clause in _MEANINGS.items():
        if name in options:
            return clause
    return ""


def batch_in_use(config: RunConfig, events: Path) -> int:
    """How many clips were in memory at once: as the stage's events told last, else as configured."""
    configured = config.batch_size or DEFAULT_BATCH.get(config.model, 1)
    try:
        with events.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LOOK_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return configured
    for line in reversed(lines):
        try:
            told = json.loads(line)["details"]["micro_batch"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(told, int) and told > 0:
            return min(told, configured)
    return configured
