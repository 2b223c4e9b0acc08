"""Before a fold trains: measure a step in a child process, predict the peak, lower a micro-batch that is too much.

Nothing here ends a run. A child that dies or hangs is a finding; where nothing can be predicted or nothing fits, the
report says so and the training goes on: it halves its micro-batch on its own when memory really ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor, nn

from fvc_lib.engine.checkpoint import copy_weights
from fvc_lib.engine.device import (
    ComputeDevice,
    Precision,
    build_optimizer,
    deterministic_algorithms,
    finish_gradients,
    release_cached_memory,
    resolve_device,
)
from fvc_lib.engine.joint_loss import (
    COMPARING,
    Compared,
    ComparedMemoryError,
    carry_back,
    compared_errors,
    first_pass,
    joint_gradients,
    joint_part,
    own_rows,
)
from fvc_lib.engine.loading import load_batches
from fvc_lib.engine.oom import is_out_of_memory
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.step import recompute_activations
from fvc_lib.engine.task import Batch, Outputs, Task
from fvc_lib.services.atomic_files import sha256_of_json, write_json
from fvc_lib.services.errors import FvcError
from fvc_lib.services.isolated_workers import Answer, run_isolated
from fvc_lib.services.memory_budget import MemoryBudget, ProcessTree, own_bytes, peak_rss_bytes

# ----------------------------------------------------------------------------------------------------
# Reading how much memory a process holds and what its peak was, on the CPU and on accelerators.


class Meter(Protocol):
    """Memory of this process, in bytes."""

    def now(self) -> int:
        """Held at this moment."""
        ...

    def reset(self) -> None:
        """Forget the peak, after giving back what nothing uses."""
        ...

    def peak(self) -> int:
        """The most that was held since ``reset``."""
        ...


def meter_of(device: torch.device) -> Meter:
    """The meter of the memory that a training on ``device`` runs out of."""
    if device.type == "cuda":
        return _CudaMeter(device)
    return _MpsMeter() if device.type == "mps" else _ResidentMeter()


def give_back_unused() -> None:
    """Collect garbage and return the C library's free memory to the system: a training leaves hundreds of MB of it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


class _ResidentMeter:
    """Resident memory. Without Linux's /proc the peak is that of the process's whole life, ``ru_maxrss``."""

    def now(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def reset(self) -> None:
        give_back_unused()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now

    def peak(self) -> int:
        return peak_rss_bytes()


class _CudaMeter:
    """What torch has allocated on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset(self) -> None:
        gc.collect()
        release_cached_memory(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _MpsMeter(_ResidentMeter):
    """Apple's GPU shares main memory; its driver keeps what was ever needed, so what it holds is the peak."""

    def now(self) -> int:
        return super().now() + torch.mps.driver_allocated_memory()

    def reset(self) -> None:
        super().reset()
        torch.mps.empty_cache()

    def peak(self) -> int:
        return super().peak() + torch.mps.driver_allocated_memory()


# ----------------------------------------------------------------------------------------------------
# From a few measured steps to the peak of a training and to the micro-batch that fits: arithmetic, nothing else.


# Of a kernel with all that notebook 04 imports, before its first step: 448.8 to 449.6 MB in five folds (Linux, x86-64,
# torch 2.13 for CPU, one thread).
KERNEL_BYTES = 450_000_000
PREFETCHED_WINDOWS = 2  # torch's loader keeps so many effective batches ready per process


@dataclass(frozen=True)
class StepMeasurement:
    """What a child process found, all in bytes; on CUDA of the device's memory, elsewhere resident in main memory.

    Attributes:
        first_use_bytes: what the first training of any process loads and keeps (libraries; on CUDA the context).
        step_bytes: by micro-batch, the peak of training steps above that.
        window_bytes: one effective batch as the loader hands it over.
        worker_bytes: of one loader process, what it does not share with its parent.
        failures: by micro-batch, why it could not run: memory ended.
        attempting: the micro-batch in hand; left standing when the child dies of it.
    """

    first_use_bytes: int = 0
    window_bytes: int = 0
    worker_bytes: int = 0
    step_bytes: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    attempting: int | None = None

    def with_step(self, micro_batch: int, step_bytes: int) -> StepMeasurement:
        """The same with one more micro-batch that ran."""
        return replace(self, step_bytes={**self.step_bytes, micro_batch: step_bytes}, attempting=None)

    def with_failure(self, micro_batch: int, reason: str) -> StepMeasurement:
        """The same with one more micro-batch that did not fit."""
        return replace(self, failures={**self.failures, micro_batch: reason}, attempting=None)

    def to_document(self) -> dict[str, Any]:
        """JSON values."""
        tables = {
            name: {str(micro_batch): value for micro_batch, value in getattr(self, name).items()}
            for name in ("step_bytes", "failures")
        }
        return {**asdict(self), **tables}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StepMeasurement:
        """What ``to_document`` described.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is no such document.
        """
        values = dict(document)
        values["step_bytes"] = {int(key): int(value) for key, value in values["step_bytes"].items()}
        values["failures"] = {int(key): str(value) for key, value in values["failures"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Footprint:
    """The training process before it trains.

    Attributes:
        resident_bytes: its memory now (on CUDA: what it holds on the device).
        trained_before: whether the libraries of a first training are loaded already, and so counted in it.
        num_workers: loader processes.
        after_training_bytes: what the process will add when training is over: room that the training must leave.
    """

    resident_bytes: int
    trained_before: bool
    num_workers: int
    after_training_bytes: int = 0


def predicted_peak(found: StepMeasurement, footprint: Footprint, micro_batch: int) -> int | None:
    """Bytes at the peak of a training with its loader processes, as the sampler counts them: each with what it does not
    share. None where no step could be measured.
    """
    step = estimate(found.step_bytes, micro_batch)
    if step is None:
        return None
    first_use = 0 if footprint.trained_before else found.first_use_bytes
    return footprint.resident_bytes + first_use + step + footprint.num_workers * found.worker_bytes


def reserved_bytes(found: StepMeasurement, footprint: Footprint) -> int:
    """Room that the budget must have beside the predicted peak.

    While it trains for the effective batches that wait in shared memory: they are in no process's resident memory until
    they are used, but a control group counts them. When the loader processes are gone, for what comes after training.
    """
    waiting = footprint.num_workers * PREFETCHED_WINDOWS * found.window_bytes
    return max(waiting, footprint.after_training_bytes)


def estimate(measured: Mapping[int, int], micro_batch: int) -> int | None:
    """``measured`` at ``micro_batch``: as measured, else on the line through its neighbours on both sides, else through
    the two nearest on one.

    From one measurement alone it is taken as proportional, which is more than will be needed. Never less than a
    smaller micro-batch was measured to take.
    """
    if micro_batch in measured:
        return measured[micro_batch]
    if not measured:
        return None
    below, above = sorted(n for n in measured if n < micro_batch), sorted(n for n in measured if n > micro_batch)
    points = [below[-1], above[0]] if below and above else below[-2:] or above[:2]
    if len(points) == 1:
        return measured[points[0]] * max(1, -(-micro_batch // points[0]))
    low, high = points
    slope = (measured[high] - measured[low]) / (high - low)
    line = round(measured[low] + slope * (micro_batch - low))
    return max([0, line, *(measured[n] for n in below)])


def halvings(micro_batch: int) -> list[int]:
    """``micro_batch``, its half, ... down to 1: what the engine would come to after each out-of-memory."""
    steps = [micro_batch]
    while steps[-1] > 1:
        steps.append(steps[-1] // 2)
    return steps


def fitting_micro_batch(found: StepMeasurement, footprint: Footprint, planned: int, budget_bytes: int) -> int | None:
    """The largest of ``halvings(planned)`` whose predicted peak is within the budget, with room for ``reserved_bytes``,
    and that did not fail; or None.
    """
    smallest_failure = min(found.failures, default=planned + 1)
    budget_bytes -= reserved_bytes(found, footprint)
    for micro_batch in halvings(planned):
        peak = predicted_peak(found, footprint, micro_batch)
        if micro_batch < smallest_failure and peak is not None and peak <= budget_bytes:
            return micro_batch
    return None


def next_to_measure(found: StepMeasurement, footprint: Footprint, planned: int, budget_bytes: int) -> int | None:
    """1, 2, 4 and so on, as long as what was measured says that it will fit, up to the micro-batch that is then chosen.

    Never more than twice the largest that ran: from 1 and 2 alone the peak at 8 was once put 40 % too low. None: that
    is all.
    """
    tried = {*found.step_bytes, *found.failures}
    if planned in found.step_bytes and fitting_micro_batch(found, footprint, planned, budget_bytes) == planned:
        return None
    if 1 not in tried:
        return 1
    if fitting_micro_batch(found, footprint, 1, budget_bytes) is None:
        return None
    if planned > 1 and 2 not in tried:
        return 2
    chosen = fitting_micro_batch(found, footprint, planned, budget_bytes)
    if chosen is None or chosen in tried:
        return None
    return min([chosen, *(n for n in (2 * max(found.step_bytes),) if n not in tried)])


# ----------------------------------------------------------------------------------------------------
# The child process of the preflight: a little real training, to see what a step takes.
#
# It may die instead of the training, and leaves what it has found so far.
#


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

    with compared_errors():
        everyone = Compared.joined([found.compared.to_document()] * times, device)
        rows = own_rows(len(everyone), 0, request.num_ranks)
        return joint_gradients(joint, model, everyone, scaled, rows).gradients


def _train_once(compute: ComputeDevice) -> None:
    """One step of nothing, so that torch loads what every training loads."""
    model = nn.Linear(1, 1).to(compute.device)
    optimizer = build_optimizer(model, learning_rate=1e-6, weight_decay=0.0)
    model(torch.ones(1, 1, device=compute.device)).sum().backward()
    optimizer.step()


def _windows(request: StepRequest, num_batches: int, num_workers: int = 0) -> Iterator[Batch]:
    """So many effective batches of the training data, which begins again where it ends."""
    count, size = len(request.task.training_data), request.window_size
    batches = [[row % count for row in range(start, start + size)] for start in range(0, num_batches * size, size)]
    return load_batches(request.task.training_data, batches, num_workers=num_workers)


def _worker_bytes(request: StepRequest) -> int:
    """What a loader process holds and does not share with its parent once its effective batches wait ready.

    That is its state while the training computes; those it makes meanwhile are counted as the ones that wait.
    """
    tree, idle = ProcessTree(), 0
    windows = _windows(request, num_batches=3, num_workers=1)
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


# ----------------------------------------------------------------------------------------------------
# The process that measures for another: started where there is room for it, and what its end says.


# Of the measuring process alone, once it is ready for its first step: 251 MB with a task of videos (torch 2.13; 160 MB
# of it to load torch).
_MEASURING_BYTES = 260_000_000
# How a child ends when memory does: killed by the system, aborted by a library that cannot go on without, or reading
# what was never allocated (oneDNN, in 5 of 60 tries).
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


# ----------------------------------------------------------------------------------------------------
# What the preflight measured and decided, kept in one JSON file so that it decides the same when asked again.


_logger = logging.getLogger(__name__)
_FORMAT = 1


def circumstances(request: StepRequest) -> dict[str, Any]:
    """Everything that decides what a step takes, as JSON values; equal ones need no second measurement.

    Raises:
        FvcError: the first training sample cannot be read.
    """
    compute = request.compute
    sample = request.task.training_data[0]
    allocator = {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "PYTORCH_"))}
    compared = {"ranks": request.num_ranks} if joint_part(request.task) is not None and request.num_ranks > 1 else {}
    return {
        **compared,
        "task": f"{type(request.task).__module__}.{type(request.task).__qualname__}",
        "model": sha256_of_json([[name, list(shape)] for name, shape in _model_shapes(request.task)]),
        "sample": {name: [list(t.shape), str(t.dtype)] for name, t in sample.tensors.items()},
        "effective_batch": request.window_size,
        "device": compute.describe(),
        "gradient_checkpointing": request.gradient_checkpointing,
        "loader_processes": request.num_workers > 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "allocator": allocator,
    }


@dataclass(frozen=True)
class Decision:
    """The micro-batch that was chosen, and why something could not be measured (empty when all went well)."""

    micro_batch: int
    problem: str


class PreflightStore:
    """Measurements by the hash of their circumstances, decisions by that and the budget.

    A file that cannot be read or written costs a measurement, never the run; the log names it.

    Args:
        path: written atomically; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def measurement(self, key: str) -> StepMeasurement | None:
        """What was found under these circumstances."""
        entry = self._read()["measurements"].get(key)
        try:
            return None if entry is None else StepMeasurement.from_document(entry["found"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            _logger.warning("%s: entry %s is not understood (%r) and measured again", self._path, key[:12], error)
            return None

    def decision(self, key: str) -> Decision | None:
        """What was decided."""
        entry = self._read()["decisions"].get(key)
        try:
            return None if entry is None else Decision(int(entry["micro_batch"]), str(entry["problem"]))
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("%s: decision %s is not understood (%r) and made again", self._path, key[:12], error)
            return None

    def keep_measurement(self, key: str, circumstances: dict[str, Any], found: StepMeasurement) -> None:
        """Remember ``found``; the circumstances stand beside it for a reader's eyes."""
        self._keep("measurements", key, {"circumstances": circumstances, "found": found.to_document()})

    def keep_decision(self, key: str, decision: Decision) -> None:
        """Remember what was decided."""
        self._keep("decisions", key, asdict(decision))

    def _keep(self, table: str, key: str, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        document = self._read()  # again: another fold may have written meanwhile
        document[table][key] = entry
        try:
            write_json(self._path, document)
        except OSError as error:
            _logger.warning("%s: not written (%s); the next fold measures again", self._path, error.strerror or error)

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"format": _FORMAT, "measurements": {}, "decisions": {}}
        if self._path is None or not self._path.exists():
            return empty
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            _logger.warning("%s: not readable (%s); measuring again", self._path, error)
            return empty
        tables = ("measurements", "decisions")
        if (
            not isinstance(document, dict)
            or document.get("format") != _FORMAT
            or not all(isinstance(document.get(table), dict) for table in tables)
        ):
            _logger.warning("%s: not a preflight file of format %d; measuring again", self._path, _FORMAT)
            return empty
        return document


def _model_shapes(task: Task) -> list[tuple[str, torch.Size]]:
    """Names and shapes of the model's state, made without memory where the model can be."""
    with forked_random_state(0, torch.device("cpu")):
        try:
            with torch.device("meta"):
                model = task.build_model()
        except (RuntimeError, NotImplementedError):  # its set-up computes with values
            model = task.build_model()
    return [(name, tensor.shape) for name, tensor in model.state_dict().items()]


TIME_LIMIT_SECONDS = 120.0
# Tables and figures after training: 29 to 47 MB above where the training ended, in four folds.
_AFTER_TRAINING_BYTES = 50_000_000
_REMEDY = "lower fixed_size or num_frames, turn gradient_checkpointing on, or give it more memory"
_REMEDY_OF_COMPARING = "lower effective_batch_size or embedding_size in a new run, or give it more memory"
_MEASURE = "fvc_lib.engine.memory.preflight:measure"
# torch loads this with its first optimizer, and it is by far the largest part of what a first training loads.
_LOADED_BY_TRAINING = "torch._dynamo"


@dataclass(frozen=True)
class PreflightReport:
    """What was predicted and decided.

    Attributes:
        micro_batch_planned: no more than an effective batch.
        micro_batch: to begin with.
        predicted_peak_bytes: with ``micro_batch``; None when nothing could be measured.
        planned_peak_bytes: the same with ``micro_batch_planned``.
        budget_bytes: the budget, and
        budget_origin: who set it.
        baseline_bytes: the training process before, without memory that it holds and nothing uses.
        reserved_bytes: room that the budget must have beside the peak.
        step_bytes_by_micro_batch: measured, above what any training keeps.
        reused: nothing was measured for this report; an earlier measurement served.
        seconds: it took.
        problem: why something could not be measured; empty when all went well.
    """

    micro_batch_planned: int
    micro_batch: int
    predicted_peak_bytes: int | None
    planned_peak_bytes: int | None
    budget_bytes: int
    budget_origin: str
    baseline_bytes: int
    reserved_bytes: int
    step_bytes_by_micro_batch: Mapping[int, int]
    reused: bool
    seconds: float
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether the training is predicted to stay within the budget, and to leave the room that is reserved."""
        return self._has_room(self.predicted_peak_bytes)

    def message(self) -> str:
        """One sentence for the log and the notebook."""
        budget = f"the budget of {_size(self.budget_bytes)} ({self.budget_origin})"
        if self.predicted_peak_bytes is None:
            same = " The effective batch stays the same." if self.micro_batch < self.micro_batch_planned else ""
            return (
                f"memory preflight: could not be measured ({self.problem}): going on with micro-batch "
                f"{self.micro_batch} and without a prediction.{same}"
            )
        peak = f"predicted peak {_size(self.predicted_peak_bytes)}{self._estimated(self.micro_batch)}"
        kept = f", of which {_size(self.reserved_bytes)} are kept for waiting batches or what comes after training"
        tight = budget + (kept if self.reserved_bytes else "")
        if not self.fits:
            return (
                f"memory preflight: {peak} even with micro-batch {self.micro_batch} is over {tight}; the training "
                f"tries all the same. If it runs out of memory, {_REMEDY}." + self._aside()
            )
        if self.micro_batch < self.micro_batch_planned:
            return (
                f"memory preflight: micro-batch {self.micro_batch_planned} {self._objection(tight)}; lowered to "
                f"{self.micro_batch}, {peak}. The effective batch stays the same." + self._aside()
            )
        return f"memory preflight: {peak} with micro-batch {self.micro_batch}, within {budget}." + self._aside()

    def _objection(self, budget: str) -> str:
        if self.planned_peak_bytes is None or self._has_room(self.planned_peak_bytes):
            return "ran out of memory when it was measured"
        peak = f"predicted peak {_size(self.planned_peak_bytes)}{self._estimated(self.micro_batch_planned)}"
        return f"({peak}) does not fit {budget}"

    def _has_room(self, peak_bytes: int | None) -> bool:
        return peak_bytes is not None and peak_bytes + self.reserved_bytes <= self.budget_bytes

    def _estimated(self, micro_batch: int) -> str:
        if micro_batch in self.step_bytes_by_micro_batch:
            return ""
        return f", estimated from micro-batch {' and '.join(map(str, sorted(self.step_bytes_by_micro_batch)))}"

    def _aside(self) -> str:
        return f" Not all was measured: {self.problem}." if self.problem else ""


def preflight(
    request: StepRequest,
    *,
    budget: MemoryBudget,
    baseline_bytes: int,
    store: Path | None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> PreflightReport:
    """Predict the peak memory of the training that ``request`` describes and choose its micro-batch.

    Call it in the process that is going to train, before it does. Takes seconds, or nothing when ``store`` knows the
    answer: equal circumstances and an equal budget get the same micro-batch again, whatever was measured since.

    Args:
        request: the step as planned.
        budget: on CUDA the device's memory, elsewhere main memory.
        baseline_bytes: resident memory of this process now; on CUDA the device is asked instead.
        store: JSON file that keeps measurements and decisions; None: measure and keep nothing.
        time_limit_seconds: for the child process.

    Raises:
        UsageError: the requested device is not there.
    """
    started = time.monotonic()
    planned, footprint = request.largest_micro_batch, footprint_of(request, baseline_bytes)
    try:
        found, decision, reused = _looked_up_or_measured(
            request, footprint, budget.total_bytes, PreflightStore(store), time_limit_seconds
        )
    except FvcError as error:  # a sample that cannot be read: the training meets it too, and says what to do
        found, decision, reused = StepMeasurement(), Decision(planned, str(error)), False
    return PreflightReport(
        micro_batch_planned=planned,
        micro_batch=decision.micro_batch,
        predicted_peak_bytes=predicted_peak(found, footprint, decision.micro_batch),
        planned_peak_bytes=predicted_peak(found, footprint, planned),
        budget_bytes=budget.total_bytes,
        budget_origin=budget.origin,
        baseline_bytes=footprint.resident_bytes,
        reserved_bytes=reserved_bytes(found, footprint),
        step_bytes_by_micro_batch=dict(found.step_bytes),
        reused=reused,
        seconds=time.monotonic() - started,
        problem=decision.problem,
    )


def _looked_up_or_measured(
    request: StepRequest, footprint: Footprint, budget_bytes: int, store: PreflightStore, time_limit_seconds: float
) -> tuple[StepMeasurement, Decision, bool]:
    """What is known about the step, the micro-batch, and whether both were known before."""
    planned, described = request.largest_micro_batch, circumstances(request)
    key = sha256_of_json(described)
    decision_key = sha256_of_json([key, planned, budget_bytes, request.num_workers])
    found, decision = store.measurement(key), store.decision(decision_key)
    reused, problem = True, ""
    undecided = found is not None and decision is None
    if found is None or (undecided and next_to_measure(found, footprint, planned, budget_bytes) is not None):
        known = found or StepMeasurement()
        found, problem = _measured(request, known, footprint, budget_bytes, time_limit_seconds)
        store.keep_measurement(key, described, found)
        reused = False
    if decision is None:
        decision = _decided(found, footprint, planned, budget_bytes, problem)
        store.keep_decision(decision_key, decision)
    return found, decision, reused


def _decided(found: StepMeasurement, footprint: Footprint, planned: int, budget_bytes: int, problem: str) -> Decision:
    fitting = fitting_micro_batch(found, footprint, planned, budget_bytes)
    if fitting is not None:
        return Decision(fitting, problem)
    if found.step_bytes or found.failures:
        return Decision(1, problem)
    if problem:  # nothing is known, and not for want of memory
        return Decision(planned, problem)
    # Where not even the measuring fits there is little room for steps, and the least gives the same result.
    return Decision(1, f"the budget of {_size(budget_bytes)} has no room for a process that measures beside this one")


def _measured(
    request: StepRequest, known: StepMeasurement, footprint: Footprint, budget_bytes: int, time_limit_seconds: float
) -> tuple[StepMeasurement, str]:
    """``known`` and what the child process found, and why it found no more (empty when it was done, or had no room)."""
    if not room_to_measure(request, footprint, budget_bytes):
        return known, ""
    try:
        answer, document = measured_in_child(_MEASURE, request, footprint, budget_bytes, time_limit_seconds, known)
    except FvcError as error:
        return known, str(error)
    found = known if document is None else StepMeasurement.from_document(document)
    died = ended_by_memory(answer)
    problem = answer.detail
    if died and found.attempting:
        problem = f"the measuring process died with micro-batch {found.attempting}: {answer.detail}"
        found = found.with_failure(found.attempting, answer.detail)
    if 1 in found.failures:
        comparing = found.failures[1].startswith(COMPARING)
        what = "memory ran out" if comparing else "one sample alone ran out of memory:"
        remedy = _REMEDY_OF_COMPARING if comparing else _REMEDY
        problem = f"{what} {found.failures[1]}; if the training does too, {remedy}"
    return replace(found, attempting=None), problem


def footprint_of(request: StepRequest, baseline_bytes: int) -> Footprint:
    """This process before it trains, as far as the training that ``request`` describes adds to it."""
    device = request.compute.device
    if device.type == "cuda":
        return Footprint(torch.cuda.memory_allocated(device), trained_before=False, num_workers=0)
    give_back_unused()  # what an earlier training left free the next one uses again: not to be counted twice
    windows = -(-len(request.task.training_data) // request.effective_batch_size)
    return Footprint(
        resident_bytes=min(baseline_bytes, int(psutil.Process().memory_info().rss)),
        trained_before=_LOADED_BY_TRAINING in sys.modules,
        num_workers=min(request.num_workers, windows),
        after_training_bytes=_AFTER_TRAINING_BYTES,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
