"""What the bits of a training depend on besides its configuration, and whether a resumed one may still claim them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fvc_lib.learning.device import ComputeDevice


def numerics(compute: ComputeDevice, num_ranks: int = 1) -> dict[str, str]:
    """Versions, threads, instructions and ranks that decide how sums are rounded."""
    return {
        "torch": str(torch.__version__),  # its own class would be refused on loading
        "threads": str(torch.get_num_threads()),
        "device": compute.device.type if compute.device.type == "cpu" else compute.name,
        "precision": str(compute.amp_dtype or torch.float32),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "ranks": str(num_ranks),
    }


def changed_numerics(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One clause like ``threads 2 -> 4`` for everything that differs."""
    names = sorted({*before, *now})
    return [f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]
