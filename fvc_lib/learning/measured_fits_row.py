"""The child process behind one row of the tables of fits: what a step of this size takes in memory and in time.

It trains as the engine does, and may die instead of the training.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
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
    """Measure steps with ``largest_micro_batch``, writing ``found`` and ``step_seconds`` to ``item["findings"]``.

    ``step_seconds`` is null until the last moment, and ``found["attempting"]`` set.

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
    step_seconds, fitted = timed_step(request)
    if fitted < micro_batch:
        found = found.with_failure(micro_batch, f"the third step came to micro-batch {fitted}")
    _write(findings, found, step_seconds)


def timed_step(request: StepRequest) -> tuple[float, int]:
    """Seconds of one training step on a full effective batch, and the micro-batch that fitted.

    Timed over two micro-batches at most, which stand for the others, and over the optimizer's step.
    """
    task, compute, micro_batch = request.task, request.compute, request.largest_micro_batch
    (window,) = load_batches(
        task.training_data, [list(range(min(request.window_size, 2 * micro_batch)))], num_workers=0
    )
    times: list[float] = []
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
            begun = _now(compute.device)
            result = transaction.gradients(window, micro_batch)
            computed = _now(compute.device)
            stepper.take(result, 1e-6)
            taken = _now(compute.device)
            fitted = min(fitted, result.micro_batch)
            times.append((computed - begun) * request.window_size / len(window) + (taken - computed))
    return statistics.median(times), fitted


def _now(device: torch.device) -> float:
    """Seconds, once what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def _write(findings: Path, found: StepMeasurement, step_seconds: float | None) -> None:
    write_json(findings, {"found": found.to_document(), "step_seconds": step_seconds})
