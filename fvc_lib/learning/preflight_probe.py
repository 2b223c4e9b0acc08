"""The child process of the preflight: a little real training, to see what a step takes.

It may die instead of the training, and leaves what it has found so far.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fvc_lib.learning.activation_checkpointing import recompute_activations
from fvc_lib.learning.device import ComputeDevice, deterministic_algorithms, resolve_device
from fvc_lib.learning.joint_loss import (
    COMPARING,
    Compared,
    ComparedMemoryError,
    carry_back,
    first_pass,
    joint_gradients,
    joint_part,
    own_rows,
    told_as_compared,
)
from fvc_lib.learning.loading import load_batches
from fvc_lib.learning.optimisation import Precision, build_optimizer, finish_gradients
from fvc_lib.learning.out_of_memory import is_out_of_memory
from fvc_lib.learning.preflight_meter import meter_of
from fvc_lib.learning.preflight_plan import Footprint, StepMeasurement, next_to_measure, predicted_peak
from fvc_lib.learning.task import Batch, Outputs, Task
from fvc_lib.learning.training_state import copy_weights
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.process_memory import ProcessTree, own_bytes

_LEAST_ROOM_BYTES = 1 << 30
_STEPS = 2  # the first allocates the optimizer's state, the second meets a heap with holes


@dataclass(frozen=True)
class StepRequest:
    """What a training is going to do in every step.

    Attributes:
        task: must be picklable to be measured.
        micro_batch: samples at once, as planned.
        effective_batch_size: samples per optimizer step; so many are loaded at once.
        device: ``cpu``, ``cuda``, ``cuda:0``, ``mps`` or ``auto``.
        amp: ``auto`` or ``off``, as ``resolve_device`` takes it.
        num_workers: loader processes.
        num_ranks: with so many samples each, where samples are compared: with those of all ranks.
    """

    task: Task
    micro_batch: int
    effective_batch_size: int
    device: str = "auto"
    amp: str = "auto"
    gradient_checkpointing: bool = False
    num_workers: int = 0
    num_ranks: int = 1

    @property
    def window_size(self) -> int:
        """Samples in a full effective batch: no more than there are."""
        return min(self.effective_batch_size, len(self.task.training_data))

    @property
    def largest_micro_batch(self) -> int:
        """What the planned micro-batch comes to: no more than an effective batch."""
        return max(1, min(self.micro_batch, self.window_size))

    @property
    def compute(self) -> ComputeDevice:
        """The resolved device.

        Raises:
            UsageError: it is not there.
        """
        return resolve_device(self.device.partition(":")[0], self.amp)


def measure(item: Mapping[str, Any]) -> None:
    """Measure what ``next_to_measure`` asks for, writing the findings to ``item["findings"]`` as they come.

    Args:
        item: ``request``, the path of a pickled StepRequest; ``findings``, the path of the JSON to write; ``footprint``
            of the training process; ``budget_bytes``; ``threads``; ``sys_path``, the training process's;
            ``device_free_bytes``, on CUDA, before this process started; ``known``, what was measured before.
    """
    volunteer_to_be_killed()
    sys.path.extend(folder for folder in item["sys_path"] if folder not in sys.path)
    torch.set_num_threads(item["threads"])
    request: StepRequest = pickle.loads(Path(item["request"]).read_bytes())  # the training process wrote it just now
    footprint, budget_bytes = Footprint(**item["footprint"]), int(item["budget_bytes"])
    planned, findings = request.largest_micro_batch, Path(item["findings"])
    probe = StepProbe(request)
    found = probe.begin(StepMeasurement.from_document(item["known"]), item["device_free_bytes"])
    write_json(findings, found.to_document())
    if request.compute.device.type != "cuda":
        limit_to_budget(footprint, budget_bytes)
    while (micro_batch := next_to_measure(found, footprint, planned, budget_bytes)) is not None:
        if not probe.has_room(found, footprint, micro_batch, budget_bytes):
            break  # it would fit alone, but not beside this process: what was measured so far has to do
        write_json(findings, replace(found, attempting=micro_batch).to_document())
        found = probe.with_measured(found, micro_batch)
        write_json(findings, found.to_document())


class StepProbe:
    """Trains a little with one micro-batch after another and reads the meter."""

    def __init__(self, request: StepRequest) -> None:
        self._request = request
        self._compute = request.compute
        self._meter = meter_of(self._compute.device)
        self._reference = self._own_bytes = 0

    def begin(self, known: StepMeasurement, device_free_bytes: int | None = None) -> StepMeasurement:
        """``known`` with what does not depend on the micro-batch, measured anew.

        Args:
            known: what was measured before under equal circumstances.
            device_free_bytes: free memory of the GPU before this process came; None elsewhere.
        """
        before = self._meter.now()
        _train_once(self._compute)
        self._reference = self._meter.now()
        # On CUDA what is counted is the device's memory, and nothing in it is shared.
        self._own_bytes = self._reference if self._compute.device.type == "cuda" else own_bytes()
        first_use = self._reference - before
        if device_free_bytes is not None:  # the GPU's context is no tensor: only the driver knows its size
            first_use = device_free_bytes - torch.cuda.mem_get_info(self._compute.device)[0]
        window = next(_windows(self._request, 1))
        window_bytes = sum(tensor.nbytes for tensor in window.tensors.values())
        worker_bytes = _worker_bytes(self._request) if self._request.num_workers else 0
        return replace(known, first_use_bytes=max(0, first_use), window_bytes=window_bytes, worker_bytes=worker_bytes)

    def has_room(self, found: StepMeasurement, footprint: Footprint, micro_batch: int, budget_bytes: int) -> bool:
        """Whether a step fits beside the training process, which holds memory of its own meanwhile.

        Of the first step nothing is known: it needs room for this process as it stands.
        """
        here = footprint.resident_bytes + self._own_bytes
        beside = replace(footprint, resident_bytes=here, trained_before=True, num_workers=0)
        peak = predicted_peak(found, beside, micro_batch)
        return (here if peak is None else peak) <= budget_bytes

    def with_measured(self, found: StepMeasurement, micro_batch: int) -> StepMeasurement:
        """``found`` with what ``micro_batch`` took, or with the news that memory ended."""
        self._meter.reset()
        try:
            self._train_a_little(micro_batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0] or type(error).__name__
            if isinstance(error, ComparedMemoryError):
                failure = f"{COMPARING}: {failure}"
        else:
            return found.with_step(micro_batch, max(0, self._meter.peak() - self._reference))
        return found.with_failure(micro_batch, failure)

    def _train_a_little(self, micro_batch: int) -> None:
        """With the best epoch's weights and a checkpoint's copy beside."""
        request, device = self._request, self._compute.device
        precision = Precision(self._compute)
        with deterministic_algorithms(device):
            model = request.task.build_model().to(device).train()
            if request.gradient_checkpointing:
                recompute_activations(model)
            optimizer = build_optimizer(model, learning_rate=1e-6, weight_decay=0.0)
            kept: list[Any] = [copy_weights(model)]
            for window in _windows(request, _STEPS):
                _step(request, model, optimizer, window, micro_batch, precision, device)
                kept[1:] = [_on_cpu([model.state_dict(), optimizer.state_dict()])]


def volunteer_to_be_killed() -> None:
    """When memory ends, the system takes this process before any other."""
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit_to_budget(footprint: Footprint, budget_bytes: int) -> None:
    """Allocations beyond what the budget leaves beside the training process fail in this one, or beyond a GiB: a
    control group that runs over kills all that is in it.
    """
    _limit_growth(max(_LEAST_ROOM_BYTES, budget_bytes - footprint.resident_bytes - own_bytes()))


def _limit_growth(room_bytes: int) -> None:
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


def _step(
    request: StepRequest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Batch,
    micro_batch: int,
    precision: Precision,
    device: torch.device,
) -> None:
    """As the engine's, but over two micro-batches at most: the second one meets the first one's gradients.

    Samples that are compared are compared with as many as in a whole effective batch of all ranks.
    """
    task = request.task
    starts = range(0, min(len(window), 2 * micro_batch), micro_batch)
    gradients = _joint_gradients(request, model, window, micro_batch, precision, device)
    for start in starts:
        part = window.part(start, start + micro_batch).to(device)
        with precision.autocast():
            outputs = task.forward(model, part)
            loss = task.loss(outputs, part)
        own = {name: rows[start : start + micro_batch] for name, rows in gradients.items()}
        carry_back(outputs, own, precision.scaler.scale(loss.total / len(window)))
        del outputs, loss
    precision.scaler.unscale_(optimizer)
    finish_gradients(model.parameters(), 1.0, 1.0)
    precision.scaler.step(optimizer)
    precision.scaler.update()
    model.zero_grad(set_to_none=True)


def _joint_gradients(
    request: StepRequest,
    model: nn.Module,
    window: Batch,
    micro_batch: int,
    precision: Precision,
    device: torch.device,
) -> Outputs:
    """Of the outputs that the task compares; of the first samples' outputs, again and again, for a whole window."""
    joint = joint_part(request.task)
    if joint is None:
        return {}
    seen = window.part(0, 2 * micro_batch)
    found = first_pass(request.task, joint, model, seen, micro_batch, precision=precision, device=device)
    times = -(-len(window) * request.num_ranks // len(seen))

    def scaled(total: Tensor) -> Tensor:
        return precision.scaler.scale(total / len(window))

    with told_as_compared():
        everyone = Compared.joined([found.compared.to_document()] * times, device)
        rows = own_rows(len(everyone), 0, request.num_ranks)
        return joint_gradients(joint, model, everyone, scaled, rows).gradients


def _train_once(compute: ComputeDevice) -> None:
    """One step of nothing, so that torch loads what every training loads."""
    model = nn.Linear(1, 1).to(compute.device)
    optimizer = build_optimizer(model, learning_rate=1e-6, weight_decay=0.0)
    model(torch.ones(1, 1, device=compute.device)).sum().backward()
    optimizer.step()


def _windows(request: StepRequest, num_windows: int, num_workers: int = 0) -> Iterator[Batch]:
    """So many effective batches of the training data, which begins again where it ends."""
    count, size = len(request.task.training_data), request.window_size
    batches = [[row % count for row in range(start, start + size)] for start in range(0, num_windows * size, size)]
    return load_batches(request.task.training_data, batches, num_workers=num_workers)


def _worker_bytes(request: StepRequest) -> int:
    """What a loader process holds and does not share with its parent once its effective batches wait ready.

    That is its state while the training computes; those it makes meanwhile are counted as the ones that wait.
    """
    tree, idle = ProcessTree(), 0
    windows = _windows(request, num_windows=3, num_workers=1)
    for _ in range(3):  # the last one is taken: nothing is left to be made, and the process still there
        next(windows)
        memory = tree.measure()
        idle = memory.tree_bytes - memory.rss_bytes
    return max(0, idle)


def _on_cpu(value: Any) -> Any:
    """A copy of nested dicts and lists with every tensor on the CPU, as a checkpoint's snapshot makes it."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    return [_on_cpu(entry) for entry in value] if isinstance(value, (list, tuple)) else value
