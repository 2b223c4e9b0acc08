"""The gradients of one effective batch as a transaction: whole, or done again in smaller pieces.

The loss of every micro-batch is a sum with its weight; the gradients of the sums are added and divided once by the
total weight, so any split gives the full batch's gradients (6e-7 relative in float32 with group norm; the usual mean
over equal pieces is off by up to 1.5 under a weighted loss). For the same reason several ranks may each take a share of
the batch: they compute, back off and begin again alone, and meet only when every one of them has its gradients. torch's
DistributedDataParallel sums inside the backward pass, where a rank that runs out of memory leaves the others waiting.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fvc_lib.learning.accumulators import LossMean
from fvc_lib.learning.device import release_cached_memory
from fvc_lib.learning.optimisation import Precision
from fvc_lib.learning.out_of_memory import MemoryState, is_out_of_memory, memory_state
from fvc_lib.learning.random_state import RawRandomState, put_back_random_state, take_random_state
from fvc_lib.learning.shared_gradients import Agreement, OwnGradients, SharedGradients, is_usable
from fvc_lib.learning.shortages import Place, Shortage, sample_shapes
from fvc_lib.learning.task import Batch, LossSum, Outputs, Task
from fvc_lib.services.errors import FvcError

_logger = logging.getLogger(__name__)


class MemoryExhaustedError(FvcError):
    """Memory ended even with one sample at a time."""


class BatchNormSplitError(FvcError):
    """A batch norm in training mode would see micro-batches instead of the batch, and change the result."""


@dataclass(frozen=True)
class WindowGradients:
    """What a finished transaction left: ``p.grad`` is the gradient of ``loss.total / num_samples`` (scaled in fp16)."""

    loss: LossMean
    num_samples: int
    micro_batch: int

    @property
    def is_finite(self) -> bool:
        """Whether the summed loss is a number one may step on."""
        return math.isfinite(self.loss.total)


@dataclass(frozen=True)
class _Snapshot:
    random_state: RawRandomState
    buffers: dict[str, Tensor]


class WindowTransaction:
    """Computes the gradients of effective batches for one task and model.

    Args:
        report: told of every shortage, after the memory is free again and before the next attempt.
        before_retry: called after a shortage, to free what others hold; a checkpoint being written, for one.
        shared: the model's gradients over all ranks; None: there is one.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        *,
        report: Callable[[Shortage], None] = lambda shortage: None,
        before_retry: Callable[[], None] = lambda: None,
        shared: SharedGradients | None = None,
    ) -> None:
        self._task = task
        self._model = model
        self._precision = precision
        self._device = device
        self._report = report
        self._before_retry = before_retry
        self._shared = shared or OwnGradients()
        self._where: Place = "forward"

    def gradients(self, window: Batch, micro_batch: int, num_samples: int | None = None) -> WindowGradients:
        """Accumulate over ``window`` in pieces of at most ``micro_batch``; halve and start again when memory ends.

        With several ranks ``window`` is this rank's share, maybe empty, and what is left is the sum over all of them,
        computed everywhere with one micro-batch, the smallest that any of them came to: so that one number a step says
        how to repeat it.

        Args:
            window: the samples.
            micro_batch: at most so many of them in memory at once.
            num_samples: of the effective batch, over all ranks; None: ``window`` is all of it.

        Raises:
            MemoryExhaustedError: one sample alone does not fit.
            BatchNormSplitError: the window must be split and the model has a training batch norm.
            FvcError: another rank cannot go on.
        """
        num_samples = len(window) if num_samples is None else num_samples
        snapshot = self._snapshot()
        while True:
            loss, micro_batch = self._own_gradients(window, micro_batch, num_samples, snapshot)
            agreed = self._agree(micro_batch, len(window), loss)
            if agreed.settled:
                break
            self._roll_back(snapshot)
            micro_batch = agreed.micro_batch
        if is_usable(agreed.loss):
            self._shared.sum()
        return WindowGradients(agreed.loss, num_samples, agreed.micro_batch)

    def _own_gradients(
        self, window: Batch, micro_batch: int, num_samples: int, snapshot: _Snapshot
    ) -> tuple[LossMean, int]:
        """This rank's loss, and the micro-batch that fitted."""
        while True:
            if min(micro_batch, len(window)) < num_samples:
                self._refuse_batch_norm(min(micro_batch, len(window)), num_samples)
            self._model.zero_grad(set_to_none=True)
            loss, failure = self._attempt(window, micro_batch, num_samples)
            if failure is None:
                return loss, micro_batch
            used = min(micro_batch, len(window))
            self._roll_back(snapshot)
            self._report(Shortage(self._where, failure, used, used // 2 or None, sample_shapes(window), len(window)))
            micro_batch = smaller_micro_batch(failure, used, window)

    def _agree(self, micro_batch: int, num_own: int, loss: LossMean) -> Agreement:
        """Meet until all have the same micro-batch, or this rank must compute again for it.

        A smaller one that still holds all of this rank's share at once changes nothing here.
        """
        while True:
            agreed = self._shared.agree(micro_batch, loss)
            if agreed.settled or agreed.micro_batch < min(micro_batch, num_own):
                return agreed
            micro_batch = agreed.micro_batch

    def _attempt(self, window: Batch, micro_batch: int, num_samples: int) -> tuple[LossMean, MemoryState | None]:
        """The loss, or what ended. Returns from outside ``except``: inside, the traceback holds the tensors."""
        try:
            return self._accumulate(window, micro_batch, num_samples), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = memory_state(error, self._device, self._model.parameters())
        return LossMean(), failure

    def _accumulate(self, window: Batch, micro_batch: int, num_samples: int) -> LossMean:
        losses = []
        for start in range(0, len(window), micro_batch):
            self._where = "forward"
            part = window.part(start, start + micro_batch).to(self._device)
            with self._precision.autocast():
                loss = self._task.loss(self._task.forward(self._model, part), part)
            self._where = "backward"
            # Divided by the sample count, known beforehand, to keep half-precision gradients in range.
            self._precision.scaler.scale(loss.total / num_samples).backward()  # type: ignore[no-untyped-call]
            losses.append(LossSum(loss.total.detach(), loss.weight.detach()))
        self._shared.complete()
        mean = LossMean()
        for loss in losses:  # read only now: each read waits for the device
            mean.update(loss)
        return mean

    def _snapshot(self) -> _Snapshot:
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        return _Snapshot(take_random_state(self._device), buffers)

    def _roll_back(self, snapshot: _Snapshot) -> None:
        self._model.zero_grad(set_to_none=True)
        self._before_retry()
        gc.collect()
        release_cached_memory(self._device)
        put_back_random_state(snapshot.random_state, self._device)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(snapshot.buffers[name])

    def _refuse_batch_norm(self, micro_batch: int, num_samples: int) -> None:
        for name, module in self._model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                raise BatchNormSplitError(
                    f"layer {name!r} is a batch norm in training mode and the effective batch of {num_samples} must be "
                    f"split into parts of {micro_batch}: its statistics, and so the result, would change. Use group "
                    "norm, freeze the layer (eval mode), or train on one rank with batch_size the effective batch size."
                )


def smaller_micro_batch(failure: MemoryState, micro_batch: int, batch: Batch) -> int:
    """Half of ``micro_batch``, said in the log.

    Raises:
        MemoryExhaustedError: there is no half of one; names the sizes and what to try.
    """
    if micro_batch <= 1:
        shapes = ", ".join(f"{name} {shape}" for name, shape in sample_shapes(batch).items())
        raise MemoryExhaustedError(
            f"out of memory with a single sample ({shapes}) and {failure.rss_bytes / 1e6:.0f} MB resident: "
            f"{failure.message}. Next, try -p gradient_checkpointing true; then a smaller fixed_size, num_frames or "
            "model in a new run, or give the job more memory."
        )
    _logger.warning("out of memory (%s): micro-batch %d -> %d", failure.message, micro_batch, micro_batch // 2)
    return micro_batch // 2


def evaluate_batch(
    task: Task,
    model: nn.Module,
    batch: Batch,
    precision: Precision,
    device: torch.device,
    micro_batch: int,
    report: Callable[[Shortage], None] = lambda shortage: None,
) -> tuple[Outputs, LossSum, int]:
    """Outputs and loss of one batch on the CPU, without gradient; when memory ends, again with caches emptied, then
    in halves.

    Nothing is handed on before the whole batch is done, so nothing is counted twice. The first repetition keeps the
    micro-batch, because splitting otherwise rounds otherwise.

    Returns:
        Outputs by name (B, ...), the loss sum, and the micro-batch that fitted.

    Raises:
        MemoryExhaustedError: one sample alone does not fit.
    """
    again = True
    while True:
        try:
            return *_outputs_in_parts(task, model, batch, precision, device, micro_batch), micro_batch
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = memory_state(error, device, model.parameters())
        gc.collect()
        release_cached_memory(device)
        used = min(micro_batch, len(batch))
        following = used if again else used // 2 or None
        report(Shortage("validation", failure, used, following, sample_shapes(batch), len(batch)))
        if not again:
            micro_batch = smaller_micro_batch(failure, used, batch)
        again = False


def _outputs_in_parts(
    task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device, micro_batch: int
) -> tuple[Outputs, LossSum]:
    outputs: list[Outputs] = []
    losses: list[LossSum] = []
    for start in range(0, len(batch), micro_batch):
        part = batch.part(start, start + micro_batch).to(device)
        with torch.inference_mode(), precision.autocast():
            result = task.forward(model, part)
            loss = task.loss(result, part)
        outputs.append({name: values.float().cpu() for name, values in result.items()})
        losses.append(LossSum(loss.total.cpu(), loss.weight.cpu()))
    joined = {name: torch.cat([part[name] for part in outputs]) for name in outputs[0]}
    total = LossSum(torch.stack([x.total for x in losses]).sum(), torch.stack([x.weight for x in losses]).sum())
    return joined, total
