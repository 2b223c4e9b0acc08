"""The process that measures for another: started where there is room for it, and what its end says."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fvc_lib.learning.preflight_plan import Footprint, StepMeasurement
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import Answer, run_isolated

# Of the measuring process alone, once it is ready for its first step: 251 MB with a task of videos (torch 2.13; 160 MB
# of it to load torch).
_MEASURING_BYTES = 260_000_000
# How a child ends when memory does: killed by the system, aborted by a library that cannot go on without, or reading
# what was never allocated (oneDNN, in 5 of 60 shortages).
_MEMORY_DEATHS = ("SIGKILL", "SIGABRT", "SIGBUS", "SIGSEGV")


def room_to_measure(request: StepRequest, footprint: Footprint, budget_bytes: int) -> bool:
    """Whether a process that measures may begin: the limit may be one that kills, so none that will not fit may."""
    return request.compute.device.type == "cuda" or footprint.resident_bytes + _MEASURING_BYTES <= budget_bytes


def measured_in_child(
    function: str,
    request: StepRequest,
    footprint: Footprint,
    budget_bytes: int,
    time_limit_seconds: float,
    known: StepMeasurement | None = None,
) -> tuple[Answer, Any]:
    """How a child process with ``function`` ended, ``module:name`` of one that takes what ``preflight_probe.measure``
    takes, and the JSON that it left as its findings; None where it left nothing.

    Raises:
        FvcError: the task cannot be sent to another process, or none can be started.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="fvc-preflight-") as folder:
            task_file, findings = Path(folder) / "request.pickle", Path(folder) / "findings.json"
            task_file.write_bytes(pickle.dumps(request))
            item = {
                "request": str(task_file),
                "findings": str(findings),
                "footprint": asdict(footprint),
                "budget_bytes": budget_bytes,
                "threads": torch.get_num_threads(),
                "sys_path": sys.path,
                "known": (known or StepMeasurement()).to_document(),
                "device_free_bytes": _device_free_bytes(request),
            }
            (answer,) = run_isolated(function, [item], workers=1, timeout_seconds=time_limit_seconds, memory_bytes=None)
            return answer, json.loads(findings.read_text()) if findings.exists() else None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise FvcError(f"the task cannot be sent to another process: {error}") from error
    except OSError as error:
        raise FvcError(str(error)) from error


def ended_by_memory(answer: Answer) -> bool:
    """Whether the child that measured died as processes do when memory ends."""
    return answer.failure == "crashed" and answer.detail.startswith(_MEMORY_DEATHS)


def _device_free_bytes(request: StepRequest) -> int | None:
    """Free memory of the GPU, this process's own context already there; None on other devices."""
    device = request.compute.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
