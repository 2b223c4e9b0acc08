"""Try the promises that a device must keep before a training on it can be trusted, with tiny trainings.

``make test-gpu`` prints one line per promise: pass, fail or skip, and figures. All clips are generated. Only torch,
numpy and the engine are imported.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fvc_lib.engine import device as devices
from fvc_lib.engine.device import ComputeDevice, resolve_device
from fvc_lib.engine.preflight import StepRequest, preflight
from fvc_lib.engine.ranks import ProcessRanks
from fvc_lib.engine.training_state import TrainingState
from fvc_lib.services import memory as memory_budget
from fvc_lib.services.checkpoint_files import weights_digest
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory import ALLOC_CONF_NAMES, MemoryBudget
from tests.gpu.trainings import Greedy, Lab, exact_products, weight_distance

# Relative differences of weights. Splitting a batch changes gradients by 1e-6 in float32, and AdamW's division by small
# second moments makes more of that within some steps.
SAME_WEIGHTS = 1e-3

Verdict = Literal["pass", "fail", "skip"]
PROMISES: dict[str, tuple[Callable[[Lab], str], tuple[str, ...]]] = {}


class BrokenPromiseError(Exception):
    """A promise was broken; the message says what was found instead."""


class NotTriedError(Exception):
    """A promise cannot be tried here; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one promise."""

    promise: str
    verdict: Verdict
    found: str  # in figures, or why not
    seconds: float

    def line(self) -> str:
        """Return the outcome as one line."""
        return f"{self.verdict:4}  {self.promise}: {self.found} ({self.seconds:.1f} s)"


def promise(name: str, *kinds: str) -> Callable[[Callable[[Lab], str]], Callable[[Lab], str]]:
    """Return a decorator that declares a promise for these kinds of devices (none: all).

    The decorated function returns figures as text, or raises.
    """

    def declare(function: Callable[[Lab], str]) -> Callable[[Lab], str]:
        PROMISES[name] = function, kinds or ("cuda", "mps", "cpu")
        return function

    return declare


def _need(kept: bool, found: str) -> str:
    if not kept:
        raise BrokenPromiseError(found)
    return found


def try_promises(device: str = "auto", only: str = "") -> Iterator[Outcome]:
    """Yield the outcome of every promise whose name contains ``only``, on ``device``. An error does not end the trials.

    Raises:
        UsageError: the device is not available.
    """
    compute, threads = resolve_device(device), torch.get_num_threads()
    torch.set_num_threads(1)  # the trainings are small, and the number of threads determines how sums are rounded
    logged = logging.root.manager.disable
    logging.disable(logging.WARNING)  # out-of-memory is provoked here
    try:
        for name, (function, kinds) in PROMISES.items():
            if only in name:
                yield _tried(name, function, kinds, compute)
    finally:
        logging.disable(logged)
        torch.set_num_threads(threads)


def _tried(name: str, function: Callable[[Lab], str], kinds: tuple[str, ...], compute: ComputeDevice) -> Outcome:
    if compute.device.type not in kinds:
        return Outcome(name, "skip", f"a promise about {' and '.join(kinds)}", 0.0)
    started = time.perf_counter()
    verdict: Verdict = "pass"
    with tempfile.TemporaryDirectory(prefix="fvc-promises-") as folder, exact_products():
        try:
            found = function(Lab(compute, Path(folder)))
        except NotTriedError as error:
            verdict, found = "skip", str(error)
        except Exception as error:  # noqa: BLE001 - any error breaks the promise; the next one is tried
            verdict = "fail"
            found = str(error) if isinstance(error, BrokenPromiseError) else f"{type(error).__name__}: {error}"
    devices.give_back_unused()
    devices.release_cached_memory(compute.device)
    return Outcome(name, verdict, " ".join(found.split()), time.perf_counter() - started)


@promise("mixed precision learns what float32 learns")
def mixed_precision(lab: Lab) -> str:
    """Compare bfloat16, and float16 with its scaler, with float32."""
    plain = lab.train("float32").best_loss
    found, kept = [f"validation loss float32 {plain:.4f}"], True
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        if lab.compute.device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            found.append(f"{name} is not supported")
            continue
        state = lab.train(name, compute=replace(lab.compute, amp_dtype=dtype))
        kept &= abs(state.best_loss - plain) < 0.02 + 0.05 * plain and state.nonfinite_steps == 0
        found.append(f"{name} {state.best_loss:.4f}")
    return _need(kept, ", ".join(found))


def _out_of_memory_in(place: str, lab: Lab) -> str:
    undisturbed, task = lab.train("undisturbed"), Greedy(place)
    # The hook runs after the weights were changed, so only a checkpoint has the old weights.
    hook = register_optimizer_step_post_hook(lambda *_: task.at("optimizer", lab.compute.device))
    try:
        state = lab.train("disturbed", task)
    finally:
        hook.remove()
    distance, schedule = weight_distance(state, undisturbed), [c.micro_batch for c in state.micro_batches.changes]
    happened = task.passes >= 2 and state.step == undisturbed.step
    return _need(
        happened and distance < SAME_WEIGHTS,
        f"micro-batches {schedule}, {state.step} steps, weights differ by {distance:.1e}",
    )


for _place in ("forward", "backward", "optimizer", "validation"):
    promise(f"out of memory in {_place} is survived with equal results")(partial(_out_of_memory_in, _place))


@promise("a training that does not fit into the device goes on in smaller pieces", "cuda")
def squeezed(lab: Lab) -> str:
    """Give the allocator less memory than the training needs; no allocation is made to fail."""
    device, task = lab.compute.device, lab.large
    states, peaks = [], []
    for micro_batch in (32, 8):
        torch.cuda.reset_peak_memory_stats(device)
        states.append(
            lab.train(f"free {micro_batch}", task, effective_batch_size=32, micro_batch=micro_batch, epochs=1)
        )
        peaks.append(torch.cuda.max_memory_allocated(device))
        devices.release_cached_memory(device)
    limit, total = sum(peaks) // 2, torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        state = lab.train("squeezed", task, effective_batch_size=32, micro_batch=32, epochs=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    distance = weight_distance(state, states[0])
    return _need(
        state.micro_batch < 32 and distance < SAME_WEIGHTS,
        f"{peaks[0] / 1e6:.0f} MB wanted, {limit / 1e6:.0f} MB allowed: micro-batch 32 -> {state.micro_batch}, weights "
        f"differ by {distance:.1e}",
    )


@promise("the predicted peak of memory is within 25 % of the measured one")
def predicted_peak(lab: Lab) -> str:
    """Compare both in a new process, whose peak is that of this training."""
    (answer,) = lab.in_child(predict_and_measure)
    _need(isinstance(answer, list), str(answer))
    predicted, measured, problem = answer
    found = f"predicted {predicted / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB, {predicted / measured - 1:+.0%}"
    return _need(abs(predicted / measured - 1) <= 0.25, f"{found} {problem}")


def predict_and_measure(lab: Lab, number: int) -> tuple[int, int, str]:
    """Return predicted peak, measured peak (bytes) and the problem; called in a child.

    The peaks are of the device's memory on CUDA, and of the process elsewhere.
    """
    device, task = lab.compute.device, lab.large
    cuda, sizes = device.type == "cuda", {"effective_batch_size": 16, "micro_batch": 8}
    probe = devices.device_memory_probe(device)
    budget = MemoryBudget(probe().total_bytes, "the device") if probe and cuda else memory_budget.memory_budget()
    report = preflight(
        StepRequest(task, sizes["micro_batch"], sizes["effective_batch_size"], lab.compute), budget=budget
    )
    if report.peak_bytes is None:
        raise BrokenPromiseError(report.message())
    free = torch.cuda.mem_get_info(device)[0] if cuda else 0
    memory_budget.reset_high_water()
    lab.train("predicted", task, lab.compute, **sizes)
    if cuda:  # the driver's context is in no allocator's statistics
        context = free - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        return report.peak_bytes, torch.cuda.max_memory_allocated(device) + max(0, context), report.problem
    of_driver = torch.mps.driver_allocated_memory() if device.type == "mps" else 0
    return report.peak_bytes, memory_budget.peak_rss_bytes() + of_driver, report.problem


@promise("a training that is stopped goes on to the same bits")
def stopped(lab: Lab) -> str:
    """Stop and resume a training with dropout; compare the weights with an undisturbed one to the bit."""
    whole, asked = lab.train("whole", compute=lab.compute), iter(range(1000))
    try:
        lab.engine("stopped", compute=lab.compute, stop=lambda: next(asked) >= 4).fit()
    except StoppedError:
        return _same_end(lab.train("stopped", compute=lab.compute), whole)
    raise BrokenPromiseError("it did not stop")


def _same_end(state: TrainingState, whole: TrainingState) -> str:
    equal = weights_digest(state.best_model) == weights_digest(whole.best_model)
    found = "weights equal to the bit" if equal else f"weights differ by {weight_distance(state, whole):.1e}"
    return _need(equal and state.history == whole.history, found)


@promise("two ranks train what one process trains")
def two_ranks(lab: Lab) -> str:
    """Train on two GPUs, or in two processes on the CPU, and compare with one process."""
    kind = lab.compute.device.type
    if kind == "mps":
        raise NotTriedError("a Mac has one GPU")
    if kind == "cuda" and torch.cuda.device_count() < 2:
        raise NotTriedError(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    digests = lab.in_child(one_rank, port, count=2)
    alone, path = (
        lab.train("alone", effective_batch_size=8, micro_batch=4),
        lab.folder / "ranks" / "latest_checkpoint.pt",
    )
    _need(path.is_file() and len(set(digests)) == 1, f"the ranks ended with {digests}")
    state = lab.train("ranks", micro_batch=4)  # the training has finished, so its result is loaded
    distance = weight_distance(state, alone)
    return _need(distance < SAME_WEIGHTS, f"weights of both ranks equal, and {distance:.1e} from one process's")


def one_rank(lab: Lab, rank: int, port: int) -> str:
    """Train as ``rank`` and return the digest of the best weights; called in a child."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    compute = lab.plain
    if compute.device.type == "cuda":
        torch.cuda.set_device(rank)
        compute = replace(compute, device=torch.device("cuda", rank))
    ranks = ProcessRanks(rank, 2, cuda=compute.device.type == "cuda")
    digest = weights_digest(lab.engine("ranks", compute=compute, ranks=ranks, micro_batch=4).fit().best_model)
    ranks.close()
    return digest


def machine(device: str = "auto") -> str:
    """Return a line that describes the machine on which the promises are tried."""
    compute = resolve_device(device)
    parts = [compute.describe(), f"torch {torch.__version__}", platform.platform(), f"{available_cores()} cores"]
    if compute.device.type == "cuda":
        total = torch.cuda.get_device_properties(compute.device).total_memory
        parts += [f"{total / 1e9:.0f} GB", f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]  # type: ignore[no-untyped-call]
        parts += [f"{name}={os.environ[name]}" for name in ALLOC_CONF_NAMES if os.environ.get(name)]
    return ", ".join(parts)
