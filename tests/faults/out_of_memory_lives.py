"""A training in a process that may not have more memory than it has, and a little."""

from __future__ import annotations

import ctypes
import json
import resource
from pathlib import Path

import torch
from torch import nn

from tests.faults.fold_lives import train_folds

_M_ARENA_MAX = -8  # of glibc's malloc.h


def train_in_little_memory(root: Path, config: str, attempt: int, spare_bytes: int | None, report: Path) -> None:
    """Train fold 0; from the first forward pass on with no more than ``spare_bytes`` beyond what is in use then.

    ``report`` gets the address space that the training took beyond that, in bytes, once it is done.
    """
    # Else every thread reserves 64 MiB of addresses for allocations to come, and does without where there are none.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    begun: list[int] = []

    def limit(module: nn.Module, *_: object) -> None:
        if not begun and module.training:
            begun.append(_status_bytes("VmSize"))
            if spare_bytes is not None:
                most = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (begun[0] + spare_bytes, most))

    torch.nn.modules.module.register_module_forward_pre_hook(limit)
    train_folds(root, config, (0,), attempt)
    # Nothing was trained where the life before had come to the end of training and died after it.
    report.write_text(json.dumps(_status_bytes("VmPeak") - begun[0] if begun else 0))


def _status_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
