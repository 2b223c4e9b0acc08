"""Before a fold trains: measure a step in a child process, predict the peak, lower a micro-batch that is too much.

Nothing here ends a run. A child that dies or hangs is a finding; where nothing can be predicted or nothing fits, the
report says so and the training goes on: it halves its micro-batch on its own when memory really ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from fvc_lib.learning.joint_loss import COMPARING
from fvc_lib.learning.preflight_child import ended_by_memory, measured_in_child, room_to_measure
from fvc_lib.learning.preflight_meter import give_back_unused
from fvc_lib.learning.preflight_plan import (
    Footprint,
    StepMeasurement,
    fitting_micro_batch,
    next_to_measure,
    predicted_peak,
    reserved_bytes,
)
from fvc_lib.learning.preflight_probe import StepRequest
from fvc_lib.learning.preflight_store import Decision, PreflightStore, circumstances
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import FvcError
from fvc_lib.services.memory_budget import MemoryBudget

TIME_LIMIT_SECONDS = 120.0
# Tables and figures after training: 29 to 47 MB above where the training ended, in four folds.
_AFTER_TRAINING_BYTES = 50_000_000
_REMEDY = "lower fixed_size or num_frames, turn gradient_checkpointing on, or give it more memory"
_REMEDY_OF_COMPARING = "lower effective_batch_size or embedding_size in a new run, or give it more memory"
_MEASURE = "fvc_lib.learning.preflight_probe:measure"
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
