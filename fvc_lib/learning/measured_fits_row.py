"""The child process behind one row of the tables of fits: what a step of this size takes in memory and in time.

It trains as the engine does, and may die instead of the training.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fvc_lib.learning.activation_checkpointing import recompute_activations
from fvc_lib.learning.device import deterministic_algorithms
from fvc_lib.learning.loading import load_batches
from fvc_lib.learning.optimisation import Precision
from fvc_lib.learning.preflight_plan import Footprint, StepMeasurement
from fvc_lib.learning.preflight_probe import StepProbe, StepRequest, limit_to_budget, volunteer_to_be_killed
from fvc_lib.learning.stepping import Stepper
from fvc_lib.learning.transaction import WindowTransaction
from fvc_lib.services.atomic_files import write_json

_TIMED_SECONDS = 1.0
_MOST_TIMED_STEPS = 5


def measure(item: Mapping[str, Any]) -> None:
    """Measure steps with ``largest_micro_batch``, writing ``found`` and both times of a ``TimedStep`` to
    ``item["findings"]``.

    The times are null until the last moment, and ``found["attempting"]`` set.

    Args:
        item: ``request``, the path of a pickled StepRequest; ``findings``, the path of the JSON to write; ``footprint``
            of the training process; ``budget_bytes``; ``threads``; ``sys_path``; ``device_free_bytes``: as
            ``preflight_probe.measure`` takes them.
    """
    volunteer_to_be_killed()
    sys.path.extend(folder for folder in item["sys_path"] if folder not in sys.path)
    torch.set_num_threads(item["threads"])
    request: StepRequest = pickle.loads(Path(item["request"]).read_bytes())  # the parent wrote it just now
    findings, micro_batch = Path(item["findings"]), request.largest_micro_batch
    probe = StepProbe(request)
    found = replace(probe.begin(StepMeasurement(), item["device_free_bytes"]), attempting=micro_batch)
    _write(findings, found, None)
    if request.compute.device.type != "cuda":
        limit_to_budget(Footprint(**item["footprint"]), int(item["budget_bytes"]))
    found = probe.with_measured(found, micro_batch)
    if micro_batch in found.failures:
        _write(findings, found, None)
        return
    _write(findings, replace(found, attempting=micro_batch), None)
    timed = timed_step(request)
    if timed.fitted < micro_batch:
        found = found.with_failure(micro_batch, f"the third step came to micro-batch {timed.fitted}")
    _write(findings, found, timed)


@dataclass(frozen=True)
class TimedStep:
    """What one training step on a full effective batch takes.

    Attributes:
        seconds: of the quickest of several, which other processes disturbed least.
        own_seconds: what of them this process computed, on the CPU; elsewhere the same.
        fitted: the micro-batch that fitted.
    """

    seconds: float
    own_seconds: float
    fitted: int


def timed_step(request: StepRequest) -> TimedStep:
    """Timed over two micro-batches at most, which stand for the others, and over the optimizer's step."""
    task, compute, micro_batch = request.task, request.compute, request.largest_micro_batch
    (window,) = load_batches(
        task.training_data, [list(range(min(request.window_size, 2 * micro_batch)))], num_workers=0
    )
    times: list[float] = []
    own: list[float] = []
    with deterministic_algorithms(compute.device):
        model = task.build_model().to(compute.device).train()
        if request.gradient_checkpointing:
            recompute_activations(model)
        precision = Precision(compute)
        stepper = Stepper(
            model, precision, learning_rate=1e-6, weight_decay=0.0, max_gradient_norm=1.0, device=compute.device
        )
        transaction = WindowTransaction(task, model, precision, compute.device)
        fitted = micro_batch
        while len(times) < _MOST_TIMED_STEPS and sum(times) < _TIMED_SECONDS and fitted == micro_batch:
            begun, own_begun = _now(compute.device), _own_now(compute.device)
            result = transaction.gradients(window, micro_batch)
            computed, own_computed = _now(compute.device), _own_now(compute.device)
            stepper.take(result, 1e-6)
            taken, own_taken = _now(compute.device), _own_now(compute.device)
            fitted = min(fitted, result.micro_batch)
            times.append((computed - begun) * request.window_size / len(window) + (taken - computed))
            own.append((own_computed - own_begun) * request.window_size / len(window) + (own_taken - own_computed))
    return TimedStep(min(times), min(own), fitted)


def _now(device: torch.device) -> float:
    """Seconds, once what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def _own_now(device: torch.device) -> float:
    """Seconds that this process has computed with all of its threads at work; on an accelerator simply the time."""
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else _now(device)


def _write(findings: Path, found: StepMeasurement, timed: TimedStep | None) -> None:
    times = [timed.seconds, timed.own_seconds] if timed is not None else [None, None]
    write_json(findings, {"found": found.to_document(), "step_seconds": times[0], "own_step_seconds": times[1]})
