"""A training in a process that may not have more memory than it has, and a little."""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE

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
    _train_fold(root, config, attempt)
    # Nothing was trained where the life before had come to the end of training and died after it.
    report.write_text(json.dumps(_status_bytes("VmPeak") - begun[0] if begun else 0))


def _train_fold(root: Path, config: str, attempt: int) -> None:
    """Train fold 0, with SIGTERM handled as a notebook's kernel handles it."""
    paths, signals = RunPaths(root), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=attempt) as log:
            fields = RunConfig.model_validate_json(config)
            train_fold(paths, fields, 0, metric_log=log, attempt=attempt, stop=lambda: bool(signals))
    except (FvcError, StoppedError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _status_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
