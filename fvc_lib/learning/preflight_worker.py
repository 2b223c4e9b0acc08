"""The child process of the preflight: it may die instead of the training and leaves what it has found so far."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from fvc_lib.learning.preflight_plan import Footprint, StepMeasurement, next_to_measure
from fvc_lib.learning.preflight_probe import StepProbe, StepRequest
from fvc_lib.services.atomic_files import write_json

_LEAST_ROOM_BYTES = 1 << 30


def measure(item: Mapping[str, Any]) -> None:
    """Measure what ``next_to_measure`` asks for, writing the findings to ``item["findings"]`` as they come.

    Args:
        item: ``request``, the path of a pickled StepRequest; ``findings``, the path of the JSON to write; ``footprint``
            of the training process; ``budget_bytes``; ``threads``; ``sys_path``, the training process's;
            ``device_free_bytes``, on CUDA, before this process started; ``known``, what was measured before.
    """
    _volunteer_to_be_killed()
    sys.path.extend(folder for folder in item["sys_path"] if folder not in sys.path)
    torch.set_num_threads(item["threads"])
    request: StepRequest = pickle.loads(Path(item["request"]).read_bytes())  # the training process wrote it just now
    footprint, budget_bytes = Footprint(**item["footprint"]), int(item["budget_bytes"])
    planned, findings = request.largest_micro_batch, Path(item["findings"])
    probe = StepProbe(request)
    found = probe.begin(StepMeasurement.from_document(item["known"]), item["device_free_bytes"])
    if request.compute.device.type != "cuda":
        beside = psutil.Process().memory_info().rss
        _limit_growth(max(_LEAST_ROOM_BYTES, budget_bytes - footprint.resident_bytes - beside))
    while (micro_batch := next_to_measure(found, footprint, planned, budget_bytes)) is not None:
        if micro_batch > 2 and not probe.has_room(found, footprint, micro_batch, budget_bytes):
            break  # it would fit alone, but not beside this process: the estimate stands
        write_json(findings, replace(found, attempting=micro_batch).to_document())
        found = probe.with_measured(found, micro_batch)
        write_json(findings, found.to_document())


def _volunteer_to_be_killed() -> None:
    """When memory ends, the system takes this process before any other."""
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_growth(room_bytes: int) -> None:
    """Allocations beyond ``room_bytes`` more fail here: a control group that runs over kills all that is in it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return
    import resource

    held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = held + room_bytes
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
