"""Compute one training step: the gradients of an effective batch, then the optimizer's step.

The gradients are a transaction: they are computed completely, or the computation is undone and begins again.

An effective batch has the samples of one optimizer step. It is computed in micro-batches, parts that are in memory one
at a time. The loss of a micro-batch is a weighted sum over samples. The gradients of these sums are added, and divided
once by the total weight. So any split gives the gradients of the unsplit batch, up to a relative error of 1e-6 in
float32 and 1e-12 in float64. For parts of one sample the error is 1e-5 in float32, because torch computes them with
other kernels. (Gradient accumulation usually averages the mean losses of the micro-batches. If samples have different
weights, this gives relative errors of up to 1.5.)

When memory runs out, the model's buffers and the random state are restored, and the batch is computed again with half
the micro-batch. Several ranks (processes) may share a batch. If memory runs out on a rank, this rank alone repeats its
computation; the other ranks do not take part. The ranks exchange data only when all of them have their gradients.
(torch's DistributedDataParallel exchanges gradients within the backward pass. There, a rank that runs out of memory
would leave the other ranks waiting.)

The optimizer's step is no transaction: it changes weights in place. If memory runs out within it, some weights are old
and some new. Then a checkpoint must be restored (``StepLostError``).
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fvc_lib.engine import joint_loss
from fvc_lib.engine.device import Precision, release_cached_memory, resolve_device, training_batch_norms
from fvc_lib.engine.loading import share
from fvc_lib.engine.oom_detection import OutOfMemory, Place, first_line, is_out_of_memory
from fvc_lib.engine.optimizer import build_optimizer, finish_gradients, set_learning_rate
from fvc_lib.engine.random_state import (
    SampleDropout,
    Samples,
    capture_random_state,
    forked_random_state,
    restore_random_state,
    stable_seed,
)
from fvc_lib.engine.ranks import Agreement, GradientSum, Ranks
from fvc_lib.engine.task import Batch, JointLoss, LossMean, LossSum, Outputs, Task, stack_samples
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.memory import memory_advice

if TYPE_CHECKING:
    import polars as pl

    from fvc_lib.services.config import RunConfig  # whose packages a GPU's machine need not have

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class MemoryExhaustedError(FvcError):
    """The error for a lack of memory that smaller micro-batches cannot avoid.

    Memory ran out even with one sample at a time, or in a part of the computation that needs all samples at once.
    """


class BatchNormSplitError(FvcError):
    """The error for a batch that must be split into micro-batches although the model has a batch norm in training mode.

    The batch norm would normalise over each micro-batch instead of the whole batch, which changes the result.
    """


@dataclass(frozen=True)
class BatchGradients:
    """The loss and sizes of an effective batch (the samples of one optimizer step) whose gradients were computed.

    The gradients themselves are in ``p.grad`` of the model's parameters ``p``. They are the gradients of
    ``loss.total / num_samples``. In float16 they are also multiplied by the loss scale.

    Attributes:
        loss: the loss summed over the samples of all ranks, and the sum of their weights.
        num_samples: number of samples of the effective batch, over all ranks.
        micro_batch: number of samples in memory at once.
    """

    loss: LossMean
    num_samples: int
    micro_batch: int


@dataclass(frozen=True)
class _Work:
    """This rank's share of an effective batch (the samples of one optimizer step), and what a repetition must restore.

    Before the batch is computed again, the random states and the model's buffers are set back to these copies.
    """

    batch: Batch  # the samples of this rank; may be empty
    num_samples: int  # number of samples of the effective batch, over all ranks
    first_sample: int  # index of the first sample of ``batch`` in the effective batch
    draws: int  # seed of dropout, used with the samples' indices
    random_state: dict[str, Tensor]  # states of all random generators
    buffers: dict[str, Tensor]  # copies of the model's buffers
    compared: Outputs = field(default_factory=dict)  # inputs of the joint loss for the samples of all ranks

    def parts(self, micro_batch: int) -> list[tuple[int, Batch]]:
        """Return the parts of ``batch``, in order, as pairs (index of the first sample in ``batch``, samples).

        A part has ``micro_batch`` samples; the last may have fewer.
        """
        starts = range(0, len(self.batch), micro_batch)
        return [(start, self.batch.part(start, start + micro_batch)) for start in starts]


class BatchTransaction:
    """Compute the gradients of effective batches, and start again with smaller micro-batches if memory runs out.

    An effective batch has the samples of one optimizer step; a micro-batch is the part of it that is in memory at once.

    Args:
        task: supplies forward pass and loss.
        model: the model to train, on ``device``.
        precision: autocast and loss scaling.
        device: device of the computation.
        report: called with the description of every out-of-memory error, after memory was freed and before the next
            attempt.
        ranks: the ranks that share every effective batch; None: only this process.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        *,
        report: Callable[[OutOfMemory], None] = lambda event: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._task = task
        self._joint = joint_loss.joint_part(task)
        self._model = model
        self._precision = precision
        self._device = device
        self._report = report
        self._ranks = ranks or Ranks()
        self._shared = GradientSum(model, self._ranks)
        self._dropout = SampleDropout(model, device)
        self._where: Place = "forward"
        self._failure = ""  # message of the last out-of-memory error in ``loss`` or ``step``
        self._stepped: list[LossSum | None] = []  # the answer to the last part; the loss is None if memory ran out
        self._least_failed = False  # whether the last attempt failed although it used the least possible memory
        self._joint_gradients: Outputs = {}  # of the joint loss, with respect to the outputs of the present part
        self._carried: Tensor | float = 0.0  # scalar whose backward pass carries these gradients back

    def gradients(
        self, batch: Batch, micro_batch: int, num_samples: int | None = None, *, draws: int = 0
    ) -> BatchGradients:
        """Compute the gradients of the effective batch with the task's loss, and return its loss and sizes.

        The gradients are stored in ``p.grad`` of the model's parameters. ``micro_batch`` is the largest number of
        samples in memory at once, and ``draws`` the seed of the dropout masks. ``num_samples`` is the size of the
        effective batch over all ranks; None: the size of ``batch``. The errors are those of ``parts``.
        """
        for model, part in self.parts(batch, micro_batch, num_samples, draws=draws):
            self.step(self.loss(model, part))
        return self.result

    def parts(
        self, batch: Batch, micro_batch: int, num_samples: int | None = None, *, draws: int = 0
    ) -> Generator[tuple[nn.Module, Batch]]:
        """Yield a pair (model, micro-batch) for each micro-batch of the effective batch.

        The caller computes the loss of each micro-batch, and calls ``step`` with it. At the end ``p.grad`` of the
        model's parameters has the gradients, and ``result`` describes them. If memory runs out, the micro-batch is
        halved, and the first samples are yielded again. With several ranks, the gradients are summed over all ranks,
        and all ranks use the smallest micro-batch of any rank. If the task has a loss that compares all samples
        (``JointLoss``), the caller must compute the loss with the method ``loss``. Then ``step`` also adds the
        gradients of the joint loss.

        Args:
            batch: the samples; with several ranks, this rank's share, which may be empty.
            micro_batch: largest number of samples in memory at once.
            num_samples: size of the effective batch over all ranks; None: ``batch`` is the complete effective batch.
            draws: seed of the dropout masks. It must differ between steps and be equal on all ranks.

        Raises:
            UsageError: ``step`` was not called for a part.
            MemoryExhaustedError: memory ran out twice with a single sample, or twice in comparing all samples.
            BatchNormSplitError: the batch must be split and the model has a training batch norm.
            DropoutSplitError: the batch must be split and the model draws random numbers that depend on the split.
            FvcError: another rank failed; the error has the class and message of that rank's error.
        """
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        number = len(batch) if num_samples is None else num_samples
        first = share(range(number), self._ranks.rank, self._ranks.size).start
        work = self._work = _Work(batch, number, first, draws, capture_random_state(self._device), buffers)
        self._least_failed = False
        try:
            if self._joint is not None:
                work, micro_batch = self._compared(self._joint, work, micro_batch)
            while True:
                agreed = yield from self._sum_over_samples(work, micro_batch)
                if agreed.settled:
                    break
                self._roll_back(work)
                micro_batch = agreed.micro_batch
        finally:
            self._dropout.of(None)
        if agreed.loss.is_usable:
            self._shared.sum()
        self.result = BatchGradients(agreed.loss, number, agreed.micro_batch)

    def loss(self, model: nn.Module, part: Batch) -> LossSum:
        """Return the task's loss of the micro-batch ``part``, as a sum over its samples.

        If memory runs out, return NaN. The next call of ``step`` then adds no gradients, and ``parts`` begins again
        with smaller micro-batches.
        """
        found, failure = attempt(partial(self._loss, model, part))
        self._failure = self._failure or failure
        return found or LossSum(torch.tensor(math.nan), torch.tensor(math.nan))

    def _loss(self, model: nn.Module, part: Batch) -> LossSum:
        outputs = self._task.forward(model, part)
        for name, gradient in self._joint_gradients.items():
            self._carried = self._carried + (outputs[name] * gradient.to(outputs[name].dtype)).sum()
        return self._task.loss(outputs, part)

    def step(self, loss: LossSum | Tensor) -> None:
        """Add the gradients of a part's loss to those of the parts before it.

        ``loss`` is a weighted sum, or the mean over the samples of the part (a scalar tensor).
        """
        if isinstance(loss, Tensor):
            loss = LossSum(loss * self._size, torch.full_like(loss, self._size, requires_grad=False))
        done = None
        if not self._failure:
            self._where = "backward"
            with self._precision.autocast(enabled=False):
                _, self._failure = attempt((self._scaled(self._work, loss.total) + self._carried).backward)
            done = None if self._failure else LossSum(loss.total.detach(), loss.weight.detach())
            if self._failure:
                loss.total.detach_()  # else a variable of the caller would keep the activations in memory
        self._stepped = [done]
        self._carried = 0.0

    def _sum_over_samples(self, work: _Work, micro_batch: int) -> Generator[tuple[nn.Module, Batch], None, Agreement]:
        """Yield (model, micro-batch) until this rank has its gradients, and agree with the other ranks on the size.

        The size of micro-batches must be the smallest that any rank used. If this size would split this rank's samples
        further, the returned agreement has ``settled`` False, and the caller must compute again. If it changes only the
        gradients of other ranks, this rank waits for these ranks and does not compute again.

        ``work`` has the samples; ``micro_batch`` is the number of samples in memory at once in the first attempt.
        """
        while True:
            self._prepare(work, micro_batch)
            loss = yield from self._accumulate(work, micro_batch)
            if loss is not None:
                break
            micro_batch = self._smaller(self._failure, work, micro_batch)
        while True:
            agreed = self._shared.agree(micro_batch, loss)
            if agreed.settled or agreed.micro_batch < min(micro_batch, len(work.batch)):
                return agreed
            micro_batch = agreed.micro_batch

    def _accumulate(self, work: _Work, micro_batch: int) -> Generator[tuple[nn.Module, Batch], None, LossMean | None]:
        """Yield (model, micro-batch) once for each part of this rank's samples, and return the loss over all parts.

        The caller adds the gradients of each part (``step``). If memory runs out, the result is None, and ``_failure``
        has the message of the error.
        """
        losses = []
        gradients = Outputs()
        if self._joint is not None:
            found, self._failure = attempt(partial(self._joint_part, self._joint, work))
            if found is None:
                return None
            joint, gradients = found
            losses.append(joint)
        for start, part in work.parts(micro_batch):
            there, self._failure = attempt(partial(self._at, work, start, part))
            if there is None:
                return None
            self._size, self._stepped = len(part), []
            of_part = slice(start, start + len(part))
            self._joint_gradients = {name: rows[of_part] for name, rows in gradients.items()}
            with self._precision.autocast():
                yield self._model, there
            if not self._stepped:
                raise UsageError("the loop over batches: got no step(loss) for a batch, wanted one for each.")
            if (loss := self._stepped[0]) is None:
                return None
            losses.append(loss)
        self._where = "forward"
        _, self._failure = attempt(self._shared.complete)
        return None if self._failure else _mean_of(losses)

    def _compared(self, joint: JointLoss, work: _Work, micro_batch: int) -> tuple[_Work, int]:
        """Compute the inputs of the joint loss for this rank's samples, and exchange them with the other ranks.

        A joint loss compares all samples of the effective batch with one another. If memory runs out, the computation
        is repeated with half the micro-batch.

        Args:
            joint: the task.
            work: the samples.
            micro_batch: number of samples in memory at once in the first attempt.

        Returns:
            (work, micro-batch): ``work`` with the inputs of all ranks; and the number of samples in memory at once.
        """

        @torch.no_grad()
        def compute() -> Outputs:
            parts = work.parts(micro_batch)
            compared = (
                joint_loss.compared_of(joint, self._forward(work, start, part)[0], part) for start, part in parts
            )
            return joint_loss.joined(compared)

        while True:
            self._prepare(work, micro_batch)
            own, failure = attempt(compute)
            if own is not None:
                break
            micro_batch = self._smaller(failure, work, micro_batch)
        self._restore(work)
        return replace(work, compared=joint_loss.joined(self._ranks.everyone("compared", own))), micro_batch

    def _joint_part(self, joint: JointLoss, work: _Work) -> tuple[LossSum, Outputs]:
        """Return the joint loss, and its gradients with respect to the outputs of this rank's samples, by name.

        Every rank computes the loss of all samples. To count it only once, all ranks but rank 0 return 0 as the loss,
        and delete its gradients of the model's parameters.
        """
        self._where = "joint_loss"
        self._dropout.of(None)
        there = {name: rows.to(self._device) for name, rows in work.compared.items()}
        loss, gradients = joint_loss.joint_gradients(joint, self._model, there, partial(self._scaled, work))
        if self._ranks.rank:
            self._model.zero_grad(set_to_none=True)
            loss = torch.zeros_like(loss)
        own = slice(work.first_sample, work.first_sample + len(work.batch))
        return LossSum(loss, torch.zeros_like(loss)), {name: rows[own] for name, rows in gradients.items()}

    def _prepare(self, work: _Work, micro_batch: int) -> None:
        """Check that the model allows the split of ``work`` into micro-batches, and delete earlier gradients.

        If the effective batch must be split and the model has a batch norm in training mode, an error is raised.
        """
        largest = min(micro_batch, len(work.batch))
        if largest < work.num_samples:
            refuse_split_batch_norm(self._model, largest, work.num_samples)
        self._model.zero_grad(set_to_none=True)
        self._where = "forward"

    def _smaller(self, failure: str, work: _Work, micro_batch: int) -> int:
        """Undo an attempt that ran out of memory, and return the micro-batch of the next attempt.

        The result is half of ``micro_batch``, at least 1. The state before the batch is restored, and the error with
        the message ``failure`` is reported. If a single sample, or the comparison of all samples (joint loss), does not
        fit into memory, one more attempt is made.

        Raises:
            MemoryExhaustedError: a single sample or the comparison did not fit for the second time.
        """
        # A rank whose share is empty still takes part in the comparison of all samples.
        used = min(micro_batch, len(work.batch) or micro_batch)
        comparing = self._where == "joint_loss"
        self._roll_back(work)
        least = used == 1 or comparing
        smaller = None if least and self._least_failed else used // 2 or 1
        self._least_failed = least
        self._report(OutOfMemory(self._where, failure, used, smaller))
        if smaller is None and comparing:
            raise MemoryExhaustedError(
                f"out of memory in the loss that compares all {work.num_samples} samples of an effective batch with "
                f"one another: {failure}. A smaller batch_size does not help here. {memory_advice('comparison')}"
            )
        if smaller is None:
            raise sample_too_large(failure, work.batch)
        _logger.warning("out of memory (%s): micro-batch %d -> %d", failure, used, smaller)
        return smaller

    def _forward(self, work: _Work, start: int, part: Batch) -> tuple[Outputs, LossSum]:
        part = self._at(work, start, part)
        with self._precision.autocast():
            outputs = self._task.forward(self._model, part)
            return outputs, self._task.loss(outputs, part)

    def _at(self, work: _Work, start: int, part: Batch) -> Batch:
        """Move ``part`` to the device, and make dropout draw the masks of the samples in it.

        Each sample has its own dropout masks, however the batch is split. ``start`` is the position of the part's first
        sample in the batch ``work``.
        """
        self._where = "forward"
        is_split = len(part) < work.num_samples
        self._dropout.of(Samples(work.first_sample + start, len(part), work.draws, is_split))
        return part.to(self._device)

    def _scaled(self, work: _Work, total: Tensor) -> Tensor:
        """Return the loss ``total`` divided by the effective batch's size; in float16 also times the loss scale."""
        return self._precision.scaler.scale(total / work.num_samples)

    def _roll_back(self, work: _Work) -> None:
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        release_cached_memory(self._device)
        self._restore(work)

    def _restore(self, work: _Work) -> None:
        restore_random_state(work.random_state, self._device)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(work.buffers[name])


def attempt(compute: Callable[[], T]) -> tuple[T | None, str]:
    """Call ``compute``, and return (result, ""); if memory runs out, return (None, first line of the error's message).

    Other errors are raised. The function returns only after its ``except`` block, because inside of it the traceback
    would keep tensors in memory.
    """
    try:
        return compute(), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = first_line(error)
    return None, failure


def in_batches(number: int, size: int, device: torch.device, compute: Callable[[int, int], T]) -> Iterator[T]:
    """Yield the results of ``compute`` for consecutive batches of items; halve the batch size when memory runs out.

    Args:
        number: number of items.
        size: number of items in a batch; the last batch may have fewer.
        device: device of the computation, whose cached memory is released after memory ran out.
        compute: function of the index of a batch's first item, and of the size of batches.

    Raises:
        MemoryExhaustedError: a single item does not fit into memory.
    """
    done = 0
    while done < number:
        result, failure = attempt(partial(compute, done, size))
        if result is not None:
            yield result
            done += size
            continue
        release_cached_memory(device)
        if size == 1:
            raise MemoryExhaustedError(f"out of memory with a single clip: {failure}. {memory_advice('sample')}")
        size //= 2


def refuse_split_batch_norm(model: nn.Module, micro_batch: int, num_samples: int) -> None:
    """Raise ``BatchNormSplitError`` if ``model`` has a batch norm in training mode.

    Call this if an effective batch (the samples of one optimizer step) must be computed in parts. A batch norm would
    normalise over the parts instead of the batch, and change the result. ``micro_batch`` and ``num_samples`` are the
    sizes of the parts and of the effective batch; they are only used in the message.
    """
    for name in training_batch_norms(model):
        raise BatchNormSplitError(
            f"layer {name!r} is a batch norm in training mode and the effective batch of {num_samples} must be split "
            f"into parts of {micro_batch}: its statistics, and so the result, would change. Use group norm, freeze the "
            "layer (eval mode), or train on one rank with batch_size the effective batch size."
        )


def _mean_of(losses: Sequence[LossSum]) -> LossMean:
    mean = LossMean()
    for loss in losses:  # values are read only here, because every read waits for the device
        mean.update(loss)
    return mean


def sample_too_large(failure: str, batch: Batch) -> MemoryExhaustedError:
    """Return the error to raise if a single sample of ``batch`` does not fit into memory.

    ``failure`` is the message of the out-of-memory error.
    """
    shapes = [f"{name} {tuple(tensor.shape[1:])} {str(tensor.dtype)[6:]}" for name, tensor in batch.tensors.items()]
    return MemoryExhaustedError(
        f"out of memory with a single sample ({', '.join(shapes)}) in memory at once: {failure}. "
        f"{memory_advice('sample')}"
    )


class StepLostError(Exception):
    """The error for a lack of memory within the optimizer's step, after which the weights are undefined.

    The engine then restores a checkpoint.
    """


def take_together(
    stepper: Stepper, ranks: Ranks, result: BatchGradients, learning_rate: float, *, save_is_due: bool
) -> tuple[float, bool]:
    """Take the optimizer's step on every rank (process); raise on all ranks if one of them runs out of memory.

    No step is taken if the loss of ``result`` is not finite, or if the weights of its samples sum to 0.

    Args:
        stepper: the optimizer of this rank.
        ranks: all ranks.
        result: describes the gradients, which are in ``p.grad`` and equal on all ranks.
        learning_rate: learning rate of the step.
        save_is_due: whether this rank would save a checkpoint after the step.

    Returns:
        (norm, save): the joint L2 norm of the gradients before clipping, NaN if no step was taken; and whether all
        ranks save a checkpoint now, which is ``save_is_due`` of rank 0.

    Raises:
        StepLostError: a rank ran out of memory; its weights are undefined now.
    """
    norm, lost = math.nan, ""
    try:
        norm = stepper.take(result, learning_rate) if result.loss.is_usable else norm
    except StepLostError as error:
        lost = str(error)
    rows = ranks.meet("step", lost, save_is_due)
    for rank, (reason, _) in enumerate(rows):
        if reason:
            raise StepLostError(lost or f"out of memory on rank {rank}")
    return norm, bool(rows[0][1])


class Stepper:
    """Take optimizer steps for one model: AdamW with gradient clipping and, in float16, loss scaling.

    Attributes:
        learning_rate: learning rate of the last step; before the first step, the initial value.

    Args:
        model: the model to train; already on its device.
        precision: has the loss scaler.
        learning_rate: the initial value; ``take`` receives the learning rate of its step.
        weight_decay: weight decay of parameters with two or more dimensions; it is 0 for all others.
        max_gradient_norm: largest joint L2 norm of all gradients; larger gradients are scaled down to it.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        *,
        learning_rate: float,
        weight_decay: float,
        max_gradient_norm: float,
    ) -> None:
        self._model = model
        self._precision = precision
        self._max_gradient_norm = max_gradient_norm
        self._optimizer = build_optimizer(model, learning_rate, weight_decay)
        self.learning_rate = learning_rate

    def take(self, result: BatchGradients, learning_rate: float) -> float:
        """Take a step, and return the joint L2 norm of the gradients before clipping.

        If the norm is not finite, the weights stay unchanged. ``result`` describes the gradients, which are in
        ``p.grad``.

        Raises:
            StepLostError: memory ran out; the weights are undefined now.
        """
        norm, failure = attempt(partial(self._take, result, learning_rate))
        if norm is None:
            raise StepLostError(failure)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer (with its learning rate) and of the loss scaler, by name."""
        optimizer = {"state": self._optimizer.state_dict()["state"], "learning_rate": self.learning_rate}
        return {"optimizer": optimizer, "scaler": self._precision.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer and the loss scaler from ``state``, which ``state_dict`` returned."""
        saved = state["optimizer"]
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": saved["state"]})
        self.learning_rate = saved["learning_rate"]
        set_learning_rate(self._optimizer, self.learning_rate)
        self._precision.restore_scaler(state["scaler"])

    def _take(self, result: BatchGradients, learning_rate: float) -> float:
        scaler = self._precision.scaler
        scaler.unscale_(self._optimizer)
        factor = result.num_samples / result.loss.weight
        norm = float(finish_gradients(self._model.parameters(), factor, self._max_gradient_norm))
        self.learning_rate = learning_rate
        set_learning_rate(self._optimizer, learning_rate)
        if math.isfinite(norm) or self._precision.scales_losses:
            scaler.step(self._optimizer)
        scaler.update()
        return norm


@dataclass(frozen=True)
class FirstStep:
    """The results of ``first_step``: a forward and backward pass on a small batch, for display in a notebook.

    Attributes:
        batch: the samples, on the CPU.
        lines: two texts: a description of the device, and a sentence with the network's loss and gradient norm.
        network: one row per child module of the network, with the columns ``part`` (its name), ``class`` and
            ``parameters`` (number of trainable parameters). The last row has the network's own parameters.
        tensors: one row per input and output tensor, with the columns ``tensor`` (its name), ``shape`` and ``dtype``.
    """

    batch: Batch
    lines: tuple[str, ...]
    network: pl.DataFrame
    tensors: pl.DataFrame


def first_step(task: Task, config: RunConfig, *, num_samples: int = 4) -> FirstStep:
    """Build the task's network, run one forward and backward pass on a small batch, and return the results.

    The weights are not changed.

    Args:
        task: the task to train.
        config: gives device, precision and seed.
        num_samples: size of the batch, at most the number of training samples. The samples are spread evenly over the
            training data.

    Raises:
        DataError: there is no training sample.
        UsageError: the requested device is not available.
    """
    import polars as pl  # imported here, because the rest of the engine does not need it

    compute = resolve_device(config.device, config.amp)
    data = task.training_data
    if not len(data):
        raise DataError("training data: got no sample, wanted at least one. Look at the folds and the clip store.")
    number = min(num_samples, len(data))
    with forked_random_state(stable_seed("first step", config.seed), compute.device):
        model = task.build_model().to(compute.device).train()
        batch = stack_samples([data[place * len(data) // number] for place in range(number)])
        there = batch.to(compute.device)
        precision = Precision(compute)
        with torch.no_grad(), precision.autocast():
            outputs = task.forward(model, there)
        result = BatchTransaction(task, model, precision, compute.device).gradients(there, number)
        scale = float(precision.scaler.get_scale()) if precision.scales_losses else 1.0
        norm = finish_gradients(model.parameters(), result.num_samples / (result.loss.weight * scale), math.inf)
    parts = [(name, type(part).__name__, _num_trained(part.parameters())) for name, part in model.named_children()]
    parts.append(("own", "parameters", _num_trained(model.parameters(recurse=False))))
    tensors = {f"in: {name}": tensor for name, tensor in batch.tensors.items()}
    tensors.update({f"out: {name}": tensor for name, tensor in outputs.items()})
    rows = [
        (name, " × ".join(map(str, tensor.shape)), str(tensor.dtype)[len("torch.") :])
        for name, tensor in tensors.items()
    ]
    trained = _num_trained(model.parameters())
    sentence = (
        f"one step of {type(model).__name__} ({trained:,} parameters) on {number} samples: "
        f"loss {result.loss.mean():.3f}, gradient norm {float(norm):.3f}"
    )
    network = pl.DataFrame(parts, schema=["part", "class", "parameters"], orient="row")
    shown = pl.DataFrame(rows, schema=["tensor", "shape", "dtype"], orient="row")
    return FirstStep(batch, (compute.describe(), sentence), network, shown)


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
