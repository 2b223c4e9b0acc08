"""Losses that compare the samples of an effective batch with one another, without having them in memory at once.

First the outputs that are compared are computed, micro-batch by micro-batch, and kept without what led to them. Of all
of them together, over all ranks, the loss and its gradient with respect to each are computed, some samples' share at a
time and each rank its own; the ranks' gradients are added up. Then every micro-batch is computed again and given its
part of that gradient. So the gradients are those of the whole batch for any split (L. Gao et al., "Scaling deep
contrastive learning batch size under memory limited setup", 2021), and a rank holds the outputs of all ranks, a stripe
of their comparison, and the activations of one micro-batch. A share that is one micro-batch is computed only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fvc_lib.engine.device import Precision
from fvc_lib.engine.oom import is_out_of_memory
from fvc_lib.engine.task import Batch, JointLoss, LossSum, Outputs, Task

# ----------------------------------------------------------------------------------------------------
# One sample of several, computed alone, with the rounding of several.
#
# Torch takes other kernels for a single sample: a convolution of one small picture on the CPU goes past oneDNN (in
# ATen's ``use_mkldnn``: one sample of at most 20,480 numbers), and matrix products of few rows go another way. The sums
# are as good, but a number next to zero may fall on the other side of a ReLU: gradients of 64 px pictures taken one by
# one were off by 8e-5 of those of the batch, with the sample as one of two by 5e-7, what two by two are off by. At
# 224 px
# all splits are 1e-6 from the batch, itself 3e-6 from float64: there the sums round more than the kernels differ.
#
# It costs time where samples are taken one by one, and only there: a step took 2.5 times the CPU time with pictures
# of 32
# px, 1.7 times with 64, 1.1 times with 224, and 1.4 times with clips of 6 x 64 x 64.
#


_MOST_NUMBERS = 20_480  # of an input that is padded; larger ones are computed alike anyway
_BATCHED_DIMENSIONS = {torch.conv1d: (3,), torch.conv2d: (4,), torch.conv3d: (5,), F.linear: (2, 3, 4)}


def rounded_as_several(num_samples: int, num_together: int, device: torch.device) -> AbstractContextManager[Any]:
    """For the forward pass of ``num_samples`` of an effective batch of ``num_together``.

    Where that is one of several, on the CPU, convolutions and linear maps of small inputs are given a second sample of
    zeros and their results of it are left out: no gradient comes from it, and it draws no random number. Not so what a
    model itself has ``torch.utils.checkpoint`` compute again: in a backward pass, where torch calls no mode, it would
    find other shapes than it had.
    """
    if num_samples != 1 or num_together < 2 or device.type != "cpu":
        return nullcontext()
    return _AsOneOfTwo()


def rounded_as_before() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For ``torch.utils.checkpoint``: of a forward pass that is under way, and of its repetition in the backward pass.

    Torch calls no mode in a backward pass, not even one that is in force.
    """
    if not any(isinstance(mode, _AsOneOfTwo) for mode in _get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        return nullcontext(), nullcontext()
    return _AsOneOfTwo(), _AsOneOfTwo()


class _AsOneOfTwo(TorchFunctionMode):
    """May be entered again after it was left."""

    def __enter__(self) -> _AsOneOfTwo:
        self._hooks = _saved_tensors_hooks()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and _is_lone(func, args[0]) and self._hooks == _saved_tensors_hooks():
            return func(torch.cat([args[0], torch.zeros_like(args[0])]), *args[1:], **kwargs)[:1]
        return func(*args, **kwargs)


def _is_lone(func: Callable[..., Any], value: Any) -> bool:
    dimensions = _BATCHED_DIMENSIONS.get(func)
    return (
        dimensions is not None
        and isinstance(value, Tensor)
        and value.ndim in dimensions
        and value.shape[0] == 1
        and value.numel() <= _MOST_NUMBERS
    )


def _saved_tensors_hooks() -> Any:
    """Those in force, by which ``torch.utils.checkpoint`` notes the shapes that it wants to find again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


_CPU = torch.device("cpu")
# Pairs of samples that are compared at once: 17 MB for each number of a pair. The softmax loss of 4,096 samples of 128
# numbers, with its gradient, took 329 MB so and 560 MB all at once (0.9 and 1.5 s of one core); a rank of four 245 MB.
PAIRS_AT_ONCE = 1 << 22

COMPARING = "in comparing the samples of an effective batch"


class ComparedMemoryError(MemoryError):
    """Memory ended in comparing the samples of an effective batch, where smaller micro-batches are of no use."""


@dataclass(frozen=True)
class Compared:
    """What a joint loss reads of samples, in their order.

    Attributes:
        outputs: float32 by name, detached.
        tensors: of the batch, by name.
    """

    outputs: Outputs
    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.outputs.values()), ()))

    def to_document(self) -> dict[str, Any]:
        """On the CPU, for another rank."""
        return {
            "outputs": {name: tensor.cpu() for name, tensor in self.outputs.items()},
            "tensors": {name: tensor.cpu() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def joined(cls, documents: Sequence[Mapping[str, Any]], device: torch.device) -> Compared:
        """All samples of ``documents``, those of a rank without any left out, on ``device``."""
        filled = [document for document in documents if document["outputs"]]
        parts = {
            kind: {name: torch.cat([d[kind][name] for d in filled]).to(device) for name in filled[0][kind]}
            for kind in ("outputs", "tensors")
        }
        return cls(parts["outputs"], parts["tensors"])


@dataclass(frozen=True)
class FirstPass:
    """The outputs of one rank's share, on the CPU; ``kept`` is all of the share with its graph, if one micro-batch."""

    compared: Compared
    kept: tuple[Outputs, LossSum] | None


@dataclass(frozen=True)
class JointPart:
    """One rank's rows of a joint loss.

    Attributes:
        total: their share of the loss, scalar, detached.
        gradients: of that share, by output; for all samples, as far as nobody took a part of them.
    """

    total: Tensor
    gradients: Outputs

    def of_samples(self, start: int, stop: int) -> JointPart:
        """With the gradients of samples ``[start, stop)``."""
        return JointPart(self.total, {name: rows[start:stop] for name, rows in self.gradients.items()})


def joint_part(task: object) -> JointLoss | None:
    """``task`` where it compares samples."""
    return task if isinstance(task, JointLoss) and task.joint_outputs else None


def compared_of(task: JointLoss, outputs: Outputs, batch: Batch) -> Compared:
    """What ``task`` compares of one micro-batch."""
    # In float32 also where autocast computes in half precision: a similarity is sharpened by a large factor.
    kept = {name: outputs[name].detach().float() for name in task.joint_outputs}
    return Compared(kept, {name: batch.tensors[name] for name in task.joint_tensors})


def first_pass(
    task: Task,
    joint: JointLoss,
    model: nn.Module,
    window: Batch,
    micro_batch: int,
    *,
    precision: Precision,
    device: torch.device,
    num_together: int = 0,
) -> FirstPass:
    """Compute what is compared of ``window``, which may be empty, of an effective batch of ``num_together``."""
    if len(window) <= micro_batch:
        if not len(window):
            return FirstPass(Compared({}, {}), None)
        part = window.to(device)
        with precision.autocast(), rounded_as_several(len(part), num_together, device):
            outputs = task.forward(model, part)
            loss = task.loss(outputs, part)
        return FirstPass(_on_cpu(compared_of(joint, outputs, part)), (outputs, loss))
    found = []
    for start in range(0, len(window), micro_batch):
        part = window.part(start, start + micro_batch).to(device)
        with torch.no_grad(), precision.autocast(), rounded_as_several(len(part), num_together, device):
            found.append(compared_of(joint, task.forward(model, part), part).to_document())
    return FirstPass(Compared.joined(found, _CPU), None)


def own_rows(num_samples: int, rank: int, num_ranks: int) -> range:
    """The samples of an effective batch whose share of the joint loss ``rank`` computes: those that it trains on
    (``sampling.share``).
    """
    return range(num_samples * rank // num_ranks, num_samples * (rank + 1) // num_ranks)


def joint_gradients(
    joint: JointLoss, model: nn.Module, everyone: Compared, scale: Callable[[Tensor], Tensor], rows: range
) -> JointPart:
    """The share of ``rows`` in the joint loss of ``everyone``, and the gradient of what ``scale`` makes of it.

    The gradients of ``model``'s own parameters in the loss (a temperature) are added to theirs: of all ranks together
    they count once, as each computes other rows.
    """
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in everyone.outputs.items()}
    parts = [torch.zeros((), device=leaf.device) for leaf in leaves.values()][:1]
    for block in _blocks(rows, len(everyone)):
        part = joint.joint_loss(model, leaves, everyone.tensors, block)
        scale(part).backward()  # type: ignore[no-untyped-call]
        parts.append(part.detach())
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return JointPart(sum(parts[1:], parts[0]), {name: gradient.contiguous() for name, gradient in gradients.items()})


def carry_back(outputs: Outputs, gradients: Mapping[str, Tensor], own: Tensor) -> None:
    """Backward through one micro-batch: ``own``, its scaled additive loss, and the joint loss's ``gradients`` of it."""
    roots, given = ([own], [torch.ones_like(own)]) if own.requires_grad else ([], [])
    for name, gradient in gradients.items():
        if outputs[name].requires_grad:
            roots.append(outputs[name])
            given.append(gradient.to(outputs[name].dtype))
    if roots:
        torch.autograd.backward(roots, given)


def evaluated_joint_loss(joint: JointLoss, model: nn.Module, outputs: Outputs, batch: Batch) -> Tensor:
    """The joint loss of one batch that is only looked at, on the CPU; ``outputs`` are the whole batch's.

    Raises:
        ComparedMemoryError: memory ended.
    """
    device = next((parameter.device for parameter in model.parameters()), _CPU)
    with told_as_compared(), torch.inference_mode():
        everyone = Compared.joined([compared_of(joint, outputs, batch).to_document()], device)
        blocks = _blocks(range(len(batch)), len(batch))
        parts = [joint.joint_loss(model, everyone.outputs, everyone.tensors, block) for block in blocks]
        return torch.stack(parts).sum().cpu()


@contextmanager
def told_as_compared() -> Iterator[None]:
    """An out-of-memory in here leaves as ``ComparedMemoryError``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ComparedMemoryError(str(error)) from error


def _blocks(rows: range, num_samples: int) -> Iterator[range]:
    """``rows`` in parts of about ``PAIRS_AT_ONCE`` pairs with all samples."""
    step = max(1, PAIRS_AT_ONCE // max(1, num_samples))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def _on_cpu(compared: Compared) -> Compared:
    return Compared(**compared.to_document())
