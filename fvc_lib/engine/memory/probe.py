"""The child process of the preflight: a little of the real training, to see what a step takes in memory and time.

It runs the engine's own transaction and optimizer step (``engine/step.py``) on the training's own samples. It may die
instead of the training, and leaves what it has found so far.
"""

import contextlib
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from fvc_lib.engine.device import Precision, deterministic_algorithms, peak_device_bytes, release_cached_memory
from fvc_lib.engine.distributed.ranks import OwnGradients, is_usable
from fvc_lib.engine.joint_loss import COMPARING
from fvc_lib.engine.loading import load_batches
from fvc_lib.engine.memory import preflight
from fvc_lib.engine.memory.preflight import Footprint, StepMeasurement, StepRequest
from fvc_lib.engine.oom_detection import OutOfMemory, is_out_of_memory
from fvc_lib.engine.step import BatchTransaction, StepLostError, Stepper, recompute_activations
from fvc_lib.engine.task import Batch
from fvc_lib.engine.training_state import copy_weights
from fvc_lib.services.atomic_files import write_json
from fvc_lib.services.checkpoint_files import copied_to_cpu
from fvc_lib.services.memory_budget import ProcessTree, own_bytes, peak_rss_bytes, reset_high_water

_LEAST_ROOM_BYTES = 1 << 30
_STEPS = 2  # the first allocates the optimizer's state, the second meets a heap with holes


def measure(item: Mapping[str, Any]) -> None:
    """Measure what ``next_to_measure`` asks for, writing the findings to ``item["findings"]`` as they come.

    Args:
        item: ``request``, the path of a pickled StepRequest; ``findings``, the path of the JSON to write; ``footprint``
            of the training process; ``budget_bytes``; ``threads``; ``sys_path``, the training process's;
            ``device_free_bytes``, on CUDA, before this process started; ``known``, what was measured before.
    """
    with contextlib.suppress(OSError):  # when memory ends, the system takes this process before any other; Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.path.extend(folder for folder in item["sys_path"] if folder not in sys.path)
    torch.set_num_threads(item["threads"])
    request: StepRequest = pickle.loads(Path(item["request"]).read_bytes())  # the training process wrote it just now
    footprint, budget_bytes = Footprint(**item["footprint"]), int(item["budget_bytes"])
    planned, findings = request.largest_micro_batch, Path(item["findings"])
    probe = StepProbe(request)
    found = probe.begin(StepMeasurement.from_document(item["known"]), item["device_free_bytes"])
    write_json(findings, asdict(found))
    if request.compute.device.type != "cuda":
        # Beyond what the budget leaves beside the training process, or a GiB, allocations fail here: a control group
        # that runs over kills all that is in it.
        _limit_growth(max(_LEAST_ROOM_BYTES, budget_bytes - footprint.resident_bytes - own_bytes()))
    while (micro_batch := preflight.next_to_measure(found, footprint, planned, budget_bytes)) is not None:
        if not probe.has_room(found, footprint, micro_batch, budget_bytes):
            break  # it would fit alone, but not beside this process: what was measured so far has to do
        write_json(findings, asdict(replace(found, attempting=micro_batch)))
        found = probe.with_measured(found, micro_batch)
        write_json(findings, asdict(found))


class StepProbe:
    """Trains a little with one micro-batch after another, and reads how much memory and time that takes."""

    def __init__(self, request: StepRequest) -> None:
        self._request = request
        self._compute = request.compute
        self._reference = self._own_bytes = 0

    def begin(self, known: StepMeasurement, device_free_bytes: int | None = None) -> StepMeasurement:
        """``known`` with what does not depend on the micro-batch, measured anew.

        Args:
            known: what was measured before under equal circumstances.
            device_free_bytes: free memory of the GPU before this process came; None elsewhere.
        """
        device = self._compute.device
        before = self._held()
        layer = nn.Linear(1, 1).to(device)  # one step of nothing, so that torch loads what every training loads
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(1, 1, device=device)).sum().backward()
        optimizer.step()
        self._reference = self._held()
        # On CUDA what is counted is the device's memory, and nothing in it is shared.
        self._own_bytes = self._reference if device.type == "cuda" else own_bytes()
        first_use = self._reference - before
        if device_free_bytes is not None:  # the GPU's context is no tensor: only the driver knows its size
            first_use = device_free_bytes - torch.cuda.mem_get_info(device)[0]
        batch = next(_batches(self._request, 1))
        batch_bytes = sum(tensor.nbytes for tensor in batch.tensors.values())
        worker_bytes = _worker_bytes(self._request) if self._request.num_workers else 0
        return replace(known, first_use_bytes=max(0, first_use), batch_bytes=batch_bytes, worker_bytes=worker_bytes)

    def has_room(self, found: StepMeasurement, footprint: Footprint, micro_batch: int, budget_bytes: int) -> bool:
        """Whether a step fits beside the training process, which holds memory of its own meanwhile.

        Of the first step nothing is known: it needs room for this process as it stands.
        """
        here = footprint.resident_bytes + self._own_bytes
        beside = replace(footprint, resident_bytes=here, trained_before=True, num_workers=0)
        peak = preflight.predicted_peak(found, beside, micro_batch)
        return (here if peak is None else peak) <= budget_bytes

    def with_measured(self, found: StepMeasurement, micro_batch: int) -> StepMeasurement:
        """``found`` with what ``micro_batch`` took, or with the reason why it does not fit."""
        device = self._compute.device
        preflight.give_back_unused()
        release_cached_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            reset_high_water()  # without Linux's /proc the peak is that of the process's whole life
        try:
            seconds = self._train_a_little(micro_batch)
        except (_DoesNotFitError, StepLostError) as error:
            failure = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0] or type(error).__name__
        else:
            peak = peak_device_bytes(device)
            peak = peak_rss_bytes() + self._driver_bytes() if peak is None else peak
            return found.with_step(micro_batch, max(0, peak - self._reference), seconds)
        return found.with_failure(micro_batch, failure)

    def _held(self) -> int:
        """Memory of this process that a training runs out of: resident memory, on CUDA what torch has allocated there.

        Apple's GPU shares main memory; its driver keeps what was ever needed, so that counts as well.
        """
        if self._compute.device.type == "cuda":
            return torch.cuda.memory_allocated(self._compute.device)
        return int(psutil.Process().memory_info().rss) + self._driver_bytes()

    def _driver_bytes(self) -> int:
        return torch.mps.driver_allocated_memory() if self._compute.device.type == "mps" else 0

    def _train_a_little(self, micro_batch: int) -> float:
        """Train as the engine does, with the best epoch's weights and a checkpoint's copy beside; returns the seconds
        per sample of the last step.

        Of an effective batch two micro-batches at most are computed: the second one meets the first one's gradients.
        """
        request, device = self._request, self._compute.device
        precision, seconds = Precision(self._compute), 0.0
        with deterministic_algorithms(device):
            model = request.task.build_model().to(device).train()
            if request.gradient_checkpointing:
                recompute_activations(model)
            stepper = Stepper(
                model, precision, learning_rate=1e-6, weight_decay=0.0, max_gradient_norm=1.0, device=device
            )
            transaction = BatchTransaction(
                request.task, model, precision, device, report=_refuse, shared=_AllRanksSamples(request)
            )
            beside: list[Any] = [copy_weights(model)]
            for batch in _batches(request, _STEPS):
                part = batch.part(0, 2 * micro_batch)
                started = _now(device)
                result = transaction.gradients(part, micro_batch, min(micro_batch, len(part)))
                computed = _now(device)
                if is_usable(result.loss):
                    stepper.take(result, 1e-6)
                seconds = (computed - started) / len(part) + (_now(device) - computed) / len(batch)
                beside[1:] = [copied_to_cpu([model.state_dict(), stepper.state_dict()])]
        return seconds


class _DoesNotFitError(Exception):
    """The transaction ran out of memory, and would go on with less."""


def _refuse(event: OutOfMemory) -> None:
    where = f"{COMPARING}: " if event.where == "joint_loss" else ""
    raise _DoesNotFitError(f"{where}{event.state.message}")


class _AllRanksSamples(OwnGradients):
    """Stands for the other ranks, and the rest of an effective batch, where samples are compared: with the outputs of
    the samples at hand, again and again, to as many as all ranks have.
    """

    def __init__(self, request: StepRequest) -> None:
        self.num_ranks = request.num_ranks
        self._num_samples = request.samples_per_step * request.num_ranks

    def everyones(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Own outputs, repeated."""
        num_own = max(1, len(next(iter(value["outputs"].values()), ())))
        return [value] * -(-self._num_samples // num_own)


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


def _batches(request: StepRequest, count: int, num_workers: int = 0) -> Iterator[Batch]:
    """So many effective batches of the training data, which begins again where it ends."""
    data, size = request.task.training_data, request.samples_per_step
    numbers = [[row % len(data) for row in range(start, start + size)] for start in range(0, count * size, size)]
    return load_batches(data, numbers, num_workers=num_workers)


def _worker_bytes(request: StepRequest) -> int:
    """What a loader process holds and does not share with its parent once its effective batches wait ready.

    That is its state while the training computes; those it makes meanwhile are counted as the ones that wait.
    """
    tree, idle = ProcessTree(), 0
    batches = _batches(request, 3, num_workers=1)
    for _ in range(3):  # the last one is taken: nothing is left to be made, and the process still there
        next(batches)
        memory = tree.measure()
        idle = memory.tree_bytes - memory.rss_bytes
    return max(0, idle)


def _now(device: torch.device) -> float:
    """Monotonic seconds, once the device has done what was begun."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
