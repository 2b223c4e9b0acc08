"""Before a training: measure its real step in a child process, predict the peak, lower a micro-batch that is too much.

The child trains a little with 1, 2, 4 ... samples at once as far as the budget allows, with the engine's own
transaction and optimizer step, and may die of it instead of the training. From what it found follow the peak of the
training and the largest micro-batch that fits. Measurements and decisions are kept in a file, so that the next fold, or
a resumed training, decides the same.

Nothing here ends a run. A child that dies or hangs is a finding; where nothing can be predicted or nothing fits, the
report says so and the training goes on: it halves its micro-batch on its own when memory really runs out.
"""

from __future__ import annotations

import base64
import os
import pickle
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice
from fvc_lib.engine.distributed.ranks import OwnGradients, is_usable
from fvc_lib.engine.joint_loss import COMPARING, joint_part
from fvc_lib.engine.loading import load_batches
from fvc_lib.engine.oom_detection import OutOfMemory, is_out_of_memory
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.step import BatchTransaction, StepLostError, Stepper
from fvc_lib.engine.task import Batch, Task
from fvc_lib.engine.training_state import copy_weights
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoint_files import copied_to_cpu
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.isolated_workers import run_isolated
from fvc_lib.services.memory import budget as memory_budget
from fvc_lib.services.memory.budget import MEASURING_BYTES, MemoryBudget
from fvc_lib.services.memory.measured_steps import Decision, MeasuredStep, StepMeasurement, keep_steps, read_steps
from fvc_lib.services.memory.policy import PREFETCHED_BATCHES, memory_advice

TIME_LIMIT_SECONDS = 120.0
_COMPILING = 5  # times as long where each size that is measured is compiled first
_MORE_ROOM = 1.1  # what ran out of memory is measured again where there is so much as much room
_AFTER_TRAINING_BYTES = 50_000_000  # tables and figures after training: 29 to 47 MB in four folds
_LEAST_ROOM_BYTES = 1 << 30
_STEPS = 2  # the first allocates the optimizer's state, the second meets a heap with holes
# How a child ends when memory does: killed by the system, aborted by a library that cannot go on without, or reading
# what was never allocated (oneDNN, in 5 of 60 tries).
_MEMORY_DEATHS = ("SIGKILL", "SIGABRT", "SIGBUS", "SIGSEGV")


@dataclass(frozen=True)
class StepRequest:
    """What a training is going to do in every step."""

    task: Task  # must be picklable to be measured
    micro_batch: int  # samples at once, as planned
    effective_batch_size: int  # samples per optimizer step; so many are loaded at once
    compute: ComputeDevice
    gradient_checkpointing: bool = False
    num_workers: int = 0  # loader processes
    num_ranks: int = 1  # with so many samples each, where samples are compared: with those of all ranks
    averages: bool = False  # whether a moving average of the weights stands beside them

    @property
    def samples_per_step(self) -> int:
        """Samples in a full effective batch: no more than there are."""
        return min(self.effective_batch_size, len(self.task.training_data))

    @property
    def largest_micro_batch(self) -> int:
        """What the planned micro-batch comes to: no more than an effective batch."""
        return max(1, min(self.micro_batch, self.samples_per_step))


# --- From a few measured steps to the peak of a training and to the micro-batch that fits.


@dataclass(frozen=True)
class Footprint:
    """The training process before it trains."""

    resident_bytes: int  # its memory now (on CUDA: what it holds on the device)
    trained_before: bool  # whether the libraries of a first training are loaded already, and so counted in it
    num_workers: int  # loader processes
    after_training_bytes: int = 0  # what the process will add when training is over: room that the training must leave


@dataclass(frozen=True)
class Prediction:
    """What was measured, before a training that is planned so and within a budget."""

    found: StepMeasurement
    footprint: Footprint
    micro_batch_planned: int  # no more than an effective batch
    budget: MemoryBudget

    def peak_bytes(self, micro_batch: int) -> int | None:
        """At the peak of a training, with what its loader processes do not share; None where no step was measured."""
        step = estimate(self.found.step_bytes, micro_batch)
        if step is None:
            return None
        return self.footprint.resident_bytes + self._first_use_bytes + step + self.num_workers * self.found.worker_bytes

    @property
    def _first_use_bytes(self) -> int:
        return 0 if self.footprint.trained_before else self.found.first_use_bytes

    @property
    def num_workers(self) -> int:
        """Loader processes: no more than the budget holds beside a step of one sample, and no more than planned."""
        step, each = estimate(self.found.step_bytes, 1), self.found.worker_bytes
        if step is None or not each:
            return self.footprint.num_workers
        room = self.room_bytes - self._first_use_bytes - step
        waiting = PREFETCHED_BATCHES * self.found.batch_bytes
        fitting = min(room // (each + waiting), (room - self.footprint.after_training_bytes) // each)
        return max(0, min(self.footprint.num_workers, fitting))

    @property
    def room_bytes(self) -> int:
        """Of the budget, beside the training process as it stands."""
        return self.budget.total_bytes - self.footprint.resident_bytes

    @property
    def reserved_bytes(self) -> int:
        """Room that the budget must have beside the peak: while it trains for the effective batches that wait in shared
        memory, which a control group counts and no process's resident memory; later for what comes after training.
        """
        waiting = self.num_workers * PREFETCHED_BATCHES * self.found.batch_bytes
        return max(waiting, self.footprint.after_training_bytes)

    def has_room(self, peak_bytes: int | None) -> bool:
        """Whether that, where it is known, leaves the reserved room."""
        return peak_bytes is not None and peak_bytes + self.reserved_bytes <= self.budget.total_bytes

    def fitting_micro_batch(self, *, estimated: bool = False) -> int | None:
        """Return the largest up to the planned one that ran, or was only ``estimated``, and has room; or None."""
        sizes = _sizes(self.micro_batch_planned) if estimated else self.found.step_bytes
        fitting = [size for size in sizes if self.has_room(self.peak_bytes(size))]
        return max((size for size in fitting if size <= self.micro_batch_planned), default=None)

    def next_to_measure(self) -> int | None:
        """1, 2, 4 and so on up to the planned one, as long as what was measured says that it will fit; None: that is
        all. Never more than twice the largest that ran: from 1 and 2 alone the peak at 8 was once put 40 % too low.
        """
        planned, ran = self.micro_batch_planned, self.found.step_bytes
        smallest_failure = min(self.found.failures, default=planned + 1)
        due = next((size for size in _sizes(planned) if size not in ran and size < smallest_failure), None)
        if due is None or (planned in ran and self.fitting_micro_batch() == planned):
            return None
        peak = self.peak_bytes(1 if len(ran) < 2 else due)
        return due if peak is None or self.has_room(peak) else None

    def decision(self, problem: str) -> Decision:
        """``problem``: why no more was measured. Where that was not for want of memory, no batch is to blame."""
        if problem and not self.found.failures:
            fitting = self.fitting_micro_batch(estimated=True) if self.found.step_bytes else self.micro_batch_planned
        else:
            fitting = self.fitting_micro_batch()
        if not (problem or fitting or self.found.step_bytes or self.found.failures):
            # There is little room for steps, and the least gives the same result.
            budget = _size(self.budget.total_bytes)
            problem = f"the budget of {budget} has no room for a process that measures beside this one"
        return fitting or 1, problem


@dataclass(frozen=True)
class PreflightReport(Prediction):
    """What was predicted and decided."""

    micro_batch: int  # to begin with
    problem: str = ""  # why something could not be measured; empty when all went well
    reused: bool = False  # nothing was measured for this report; an earlier measurement served

    @property
    def predicted_peak_bytes(self) -> int | None:
        """With ``micro_batch``; None when nothing could be measured."""
        return self.peak_bytes(self.micro_batch)

    @property
    def fits(self) -> bool:
        """Whether the training is predicted to leave the reserved room within the budget."""
        return self.has_room(self.predicted_peak_bytes)

    def message(self) -> str:
        """One sentence for the log and the notebook."""
        chosen, planned = f"micro-batch {self.micro_batch}", self.micro_batch_planned
        lowered = self.micro_batch < planned
        same = " The effective batch stays the same." if lowered else ""
        if self.predicted_peak_bytes is None:
            return (
                f"memory preflight: could not be measured ({self.problem}): going on with {chosen} and without a "
                f"prediction.{same}"
            )
        budget = f"the budget of {_size(self.budget.total_bytes)} ({self.budget.origin})"
        peak = f"predicted peak {_size(self.predicted_peak_bytes)}"
        peak += "" if self.micro_batch in self.found.step_bytes else ", estimated,"
        aside = f" Not all was measured: {self.problem}." if self.problem else ""
        if self.num_workers < self.footprint.num_workers:
            aside += f" The budget holds {self.num_workers} of {self.footprint.num_workers} loader processes."
        if self.fits and not lowered:
            return f"memory preflight: {peak} with {chosen}, within {budget}.{aside}"
        if self.reserved_bytes:
            reserved = _size(self.reserved_bytes)
            budget += f", of which {reserved} are kept for waiting batches or what comes after training"
        if not self.fits:
            held, before, advice = self.footprint.resident_bytes, "", memory_advice("sample")
            if not self.has_room(held):  # no batch is to blame
                before, advice = f" ({_size(held)} before any batch)", memory_advice("elsewhere")
            return (
                f"memory preflight: {peak}{before} even with {chosen} is over {budget}; the training tries all the "
                f"same. If it runs out of memory: {advice}{aside}"
            )
        objection, too_much = "ran out of memory when it was measured", self.peak_bytes(planned)
        if too_much is not None and not self.has_room(too_much):
            estimated = "" if planned in self.found.step_bytes else ", estimated"
            objection = f"(predicted peak {_size(too_much)}{estimated}) does not fit {budget}"
        return (
            f"memory preflight: micro-batch {planned} {objection}; lowered to {self.micro_batch}, {peak}.{same}{aside}"
        )


def estimate(measured: Mapping[int, int], micro_batch: int) -> int | None:
    """``measured`` at ``micro_batch``: as measured, else on the line through the two largest that were (from one alone
    as proportional, which is more than will be needed), and never less than a smaller one was measured to take.
    """
    if micro_batch in measured or not measured:
        return measured.get(micro_batch)
    if len(measured) == 1:
        ((size, taken),) = measured.items()
        return taken * max(1, -(-micro_batch // size))
    low, high = sorted(measured)[-2:]
    line = measured[low] + (measured[high] - measured[low]) / (high - low) * (micro_batch - low)
    return max([0, round(line), *(taken for size, taken in measured.items() if size < micro_batch)])


def _sizes(planned: int) -> list[int]:
    return [*(1 << power for power in range((planned - 1).bit_length())), planned]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


# --- In the process that is going to train.


def preflight(
    request: StepRequest,
    *,
    budget: MemoryBudget,
    baseline_bytes: int,
    store: Path | None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[int], None] = lambda _size: None,
) -> PreflightReport:
    """Predict the peak memory of the training that ``request`` describes and choose its micro-batch.

    Call it in the process that is going to train, before it does. Equal circumstances and an equal budget get the same
    micro-batch again.

    Args:
        request: the step as planned.
        budget: on CUDA the device's memory, elsewhere main memory.
        baseline_bytes: resident memory of this process now; on CUDA the device is asked instead.
        store: JSON file that keeps measurements and decisions; None: measure and keep nothing.
        time_limit_seconds: for each micro-batch.
        stop: asked while it measures.
        tell: called with each micro-batch before it is measured.

    Raises:
        StoppedError: ``stop`` said so.
    """
    planned, reused = request.largest_micro_batch, False
    prediction = Prediction(StepMeasurement(), footprint_of(request, baseline_bytes), planned, budget)
    decision: Decision | None
    try:
        described = circumstances(request)
    except FvcError as error:  # a sample that cannot be read: the training meets it too, and says what to do
        decision = planned, str(error)
    else:
        key, stored = sha256_of_json(described), read_steps(store)
        decision_key = sha256_of_json([key, planned, budget.total_bytes, request.num_workers])
        known, decision = stored.measurements.get(key), stored.decisions.get(decision_key)
        if known is not None:
            prediction = replace(prediction, found=known.found)
            if prediction.room_bytes > _MORE_ROOM * known.found.room_bytes:  # what ran out of memory may have room now
                prediction = replace(prediction, found=replace(known.found, failures={}))
            reused = decision is not None or prediction.next_to_measure() is None
        if known is None or decision is None:
            problem = ""
            if not reused:
                afresh = replace(prediction, found=StepMeasurement())
                measured, problem = _measured(request, afresh, time_limit_seconds, stop, tell)
                # One that was cut short does not replace one that came further.
                found = max(measured, prediction.found, key=lambda each: max(each.step_bytes, default=0))
                prediction = replace(prediction, found=found)
            decision = prediction.decision(problem)
            keep_steps(
                store, {key: MeasuredStep(circumstances=described, found=prediction.found)}, {decision_key: decision}
            )
    micro_batch, problem = decision
    return PreflightReport(**vars(prediction), micro_batch=micro_batch, problem=problem, reused=reused)


def footprint_of(request: StepRequest, baseline_bytes: int) -> Footprint:
    """This process before it trains, as far as the training that ``request`` describes adds to it."""
    device = request.compute.device
    if device.type == "cuda":
        return Footprint(torch.cuda.memory_allocated(device), trained_before=False, num_workers=0)
    devices.give_back_unused()  # what an earlier training left free the next one uses again: not to be counted twice
    return Footprint(
        resident_bytes=min(baseline_bytes, memory_budget.resident_bytes()),
        trained_before=devices.EagerAdamW.has_stepped,
        num_workers=request.num_workers,
        after_training_bytes=_AFTER_TRAINING_BYTES,
    )


def _measured(
    request: StepRequest,
    prediction: Prediction,
    time_limit_seconds: float,
    stop: Callable[[], bool],
    tell: Callable[[int], None],
) -> tuple[StepMeasurement, str]:
    """What a child process found, and why it found no more (empty when it was done, or had no room)."""

    def look() -> None:
        if stop():
            raise StoppedError("stopped as asked while memory was measured; resume the run to go on.")

    device, found, problem = request.compute.device, prediction.found, ""
    found.room_bytes = prediction.room_bytes
    held_bytes = prediction.footprint.resident_bytes
    if device.type != "cuda" and prediction.room_bytes < MEASURING_BYTES:
        return found, ""  # the budget may be a limit that kills, so what will not fit is not started
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    try:
        job = pickle.dumps((request, torch.get_num_threads(), prediction.room_bytes, free_bytes))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return found, f"the task cannot be sent to another process: {error}"
    if "compile" in request.compute.accelerations:
        time_limit_seconds *= _COMPILING
    sizes, first = _sizes(prediction.micro_batch_planned), (sys.path, base64.b64encode(job).decode())
    answers = run_isolated(
        f"{__name__}:measure", [first, *sizes], workers=1, timeout_seconds=time_limit_seconds, memory_bytes=None,
        look=look,
    )  # fmt: skip
    beside = prediction
    try:
        for size, answer in zip((0, *sizes), answers, strict=False):
            if answer.failure:
                problem = answer.detail
                if size and answer.failure == "crashed" and problem.startswith(_MEMORY_DEATHS):
                    found.failures[size] = problem
                    problem = f"the measuring process died with micro-batch {size}: {problem}"
                break
            if not size:
                found.first_use_bytes, found.batch_bytes, found.worker_bytes, own_bytes = answer.value
                beside = replace(prediction, footprint=Footprint(held_bytes + own_bytes, True, 0))
            elif isinstance(answer.value, str):
                found.failures[size] = answer.value
            else:
                found.step_bytes[size], found.seconds_per_sample[size] = answer.value
            following = prediction.next_to_measure()
            # A step may fit alone and not beside the measuring process, whose first needs room for it as it stands.
            its_peak = beside.peak_bytes(following or 1) or beside.footprint.resident_bytes
            if not following or not beside.has_room(its_peak):
                break
            tell(following)
    except (FvcError, OSError) as error:  # the process cannot even be started
        problem = str(error)
    finally:
        answers.close()
    if 1 in found.failures:
        comparing = found.failures[1].startswith(COMPARING)
        what = "memory ran out" if comparing else "one sample alone ran out of memory:"
        advice = memory_advice("comparison" if comparing else "sample", recomputes=request.gradient_checkpointing)
        problem = f"{what} {found.failures[1]}; if the training does too: {advice.removesuffix('.')}"
    return found, problem


# --- The child process: a little of the real training. It may die.

_probe: StepProbe  # in the child, from the first item on


def measure(item: int | tuple[list[str], str]) -> tuple[float, ...] | str:
    """In the child: of the first item (search path, pickled job) what does not depend on the micro-batch; of others,
    micro-batches, what a step takes.
    """
    global _probe
    if isinstance(item, int):
        return _probe.step(item)
    with suppress(OSError):  # when memory ends, the system takes this process before any other; Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    folders, job = item
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    request, threads, room_bytes, free_bytes = pickle.loads(base64.b64decode(job))
    torch.set_num_threads(threads)
    _probe = StepProbe(request)
    begun = _probe.begin(free_bytes)
    if request.compute.device.type != "cuda":
        # Beyond what the budget leaves beside the training process, or a GiB, allocations fail here: a control group
        # that runs over kills all that is in it.
        _limit_growth(max(_LEAST_ROOM_BYTES, room_bytes - memory_budget.own_bytes()))
    return begun


class StepProbe:
    """Trains a little with one micro-batch after another, and reads how much memory and time that takes."""

    def __init__(self, request: StepRequest) -> None:
        self._request = request
        self._compute = request.compute
        self._reference = 0

    def begin(self, device_free_bytes: int | None = None) -> tuple[int, int, int, int]:
        """What does not depend on the micro-batch: the first three fields of ``StepMeasurement``, and what this process
        holds. ``device_free_bytes``: of the GPU, before this process came.
        """
        device = self._compute.device
        before = self._held()
        layer = torch.nn.Linear(1, 1).to(device)  # one step of nothing, so that torch loads what every training loads
        optimizer = devices.EagerAdamW(layer.parameters())
        layer(torch.ones(1, 1, device=device)).sum().backward()
        optimizer.step()
        self._reference = self._held()
        # On CUDA what is counted is the device's memory, and nothing in it is shared.
        own_bytes = self._reference if device.type == "cuda" else memory_budget.own_bytes()
        first_use = self._reference - before
        if device_free_bytes is not None:  # the GPU's context is no tensor: only the driver knows its size
            first_use = device_free_bytes - torch.cuda.mem_get_info(device)[0]
        batch = next(_batches(self._request, 1))
        batch_bytes = sum(tensor.nbytes for tensor in batch.tensors.values())
        worker_bytes = _worker_bytes(self._request) if self._request.num_workers else 0
        return max(0, first_use), batch_bytes, worker_bytes, own_bytes

    def step(self, micro_batch: int) -> tuple[int, float] | str:
        """The peak in bytes above ``begin`` and the seconds per sample of training steps, or why they do not fit."""
        device = self._compute.device
        devices.give_back_unused()
        devices.release_cached_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            memory_budget.reset_high_water()  # without Linux's /proc the peak is that of the process's whole life
        try:
            seconds = self._train_a_little(micro_batch)
        except (RuntimeError, MemoryError, StepLostError) as error:
            if not (isinstance(error, StepLostError) or is_out_of_memory(error)):
                raise
            return str(error).partition("\n")[0] or type(error).__name__
        return max(0, self._held(peak=True) - self._reference), seconds

    def _held(self, *, peak: bool = False) -> int:
        """Memory of this process that a training runs out of: resident memory, on CUDA what torch has allocated there;
        what the driver of Apple's GPU keeps is main memory, too.
        """
        device = self._compute.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
        of_driver = torch.mps.driver_allocated_memory() if device.type == "mps" else 0
        return of_driver + (memory_budget.peak_rss_bytes() if peak else memory_budget.resident_bytes())

    def _train_a_little(self, micro_batch: int) -> float:
        """Train as the engine does, with the best epoch's weights and a checkpoint's copy beside, two micro-batches at
        most of an effective batch: the second meets the first one's gradients. The seconds per sample of the last step.
        """
        request, device = self._request, self._compute.device
        precision, seconds = devices.Precision(self._compute), 0.0
        policy = devices.resolve_policy(self._compute, amp="auto" if self._compute.amp_dtype else "off")
        search = devices.cudnn_search(self._compute)
        # TF32 or not decides which kernels convolutions take, and so their workspace.
        with devices.apply_policy(policy), devices.deterministic_algorithms(device), search:
            model = devices.accelerated(request.task.build_model(), self._compute).train()
            if request.gradient_checkpointing:
                devices.recompute_activations(model)
            stepper = Stepper(
                model, precision, learning_rate=1e-6, weight_decay=0.0, max_gradient_norm=1.0, device=device,
                ema_decay=0.5 * request.averages, fused="fused_adamw" in self._compute.accelerations,
            )  # fmt: skip
            transaction = BatchTransaction(
                request.task, model, precision, device, report=_refuse, shared=_AllRanksSamples(request),
                send_ahead="send_ahead" in self._compute.accelerations,
            )  # fmt: skip
            beside: list[Any] = [copy_weights(model)]
            for batch in _batches(request, _STEPS):
                part = batch.part(0, 2 * micro_batch)
                started = devices.finished_at(device)
                result = transaction.gradients(part, micro_batch, min(micro_batch, len(part)))
                computed = devices.finished_at(device)
                if is_usable(result.loss):
                    stepper.take(result, 1e-6)
                seconds = (computed - started) / len(part) + (devices.finished_at(device) - computed) / len(batch)
                beside[1:] = [copied_to_cpu([model.state_dict(), stepper.state_dict()])]
        return seconds


def _refuse(event: OutOfMemory) -> None:
    """The transaction would go on with less."""
    where = f"{COMPARING}: " if event.where == "joint_loss" else ""
    raise MemoryError(f"{where}{event.state.message}")


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
    if sys.platform == "linux":
        # What is limited: text, data and stack, the sixth number.
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit, hard = data_pages * resource.getpagesize() + room_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _batches(request: StepRequest, count: int, num_workers: int = 0) -> Iterator[Batch]:
    """So many effective batches of the training data, which begins again where it ends."""
    data, size = request.task.training_data, request.samples_per_step
    numbers = [[row % len(data) for row in range(start, start + size)] for start in range(0, count * size, size)]
    return load_batches(data, numbers, num_workers=num_workers)


def _worker_bytes(request: StepRequest) -> int:
    """What a loader process holds and does not share with its parent once its effective batches wait ready."""
    batches = _batches(request, 3, num_workers=1)
    for _ in range(3):  # the last one is taken: nothing is left to be made, and the process still there
        next(batches)
    memory = memory_budget.ProcessTree().measure()
    return max(0, memory.tree_bytes - memory.rss_bytes)


def circumstances(request: StepRequest) -> dict[str, Any]:
    """Everything that decides what a step takes, as JSON values; an FvcError where the first sample cannot be read."""
    sample = request.task.training_data[0]
    allocator = {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "PYTORCH_"))}
    with forked_random_state(0, torch.device("cpu")):
        try:
            with devices.without_memory():  # where the model can be made so
                model = request.task.build_model()
        except (RuntimeError, NotImplementedError):  # its set-up computes with values
            model = request.task.build_model()
    compares = joint_part(request.task) is not None and request.num_ranks > 1
    return {
        **({"ranks": request.num_ranks} if compares else {}),
        **({"averages": True} if request.averages else {}),
        "task": f"{type(request.task).__module__}.{type(request.task).__qualname__}",
        "model": sha256_of_json([[name, list(tensor.shape)] for name, tensor in model.state_dict().items()]),
        "sample": {name: [list(t.shape), str(t.dtype)] for name, t in sample.tensors.items()},
        "effective_batch": request.samples_per_step,
        "device": request.compute.describe(),
        "gradient_checkpointing": request.gradient_checkpointing,
        "loader_processes": request.num_workers > 0,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "allocator": allocator,
    }
