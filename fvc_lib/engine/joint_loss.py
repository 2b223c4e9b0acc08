"""Losses that compare the samples of an effective batch with one another, without having them in memory at once.

First the compared outputs are computed, micro-batch by micro-batch, without their graph. Then the loss over all
ranks' outputs and its gradient with respect to each output are computed. Every rank computes the rows of its own
samples, some rows at a time, and the gradients are summed over the ranks. Then every micro-batch is computed again and
receives its part of that gradient. So the gradients are those of the whole batch for any split (L. Gao et al., "Scaling
deep contrastive learning batch size under memory limited setup", 2021). A rank holds the outputs of all ranks, some
rows of their comparison, and the activations of one micro-batch. If a rank's share of the batch is a single
micro-batch, it is computed only once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.engine.task import Batch, JointLoss, LossSum, Outputs

_CPU = torch.device("cpu")
# Pairs of samples that are compared at once: 17 MB for each number of a pair. The softmax loss of 4,096 samples of 128
# numbers, with its gradient, took 329 MB so and 560 MB all at once (0.9 and 1.5 s of one core); a rank of four 245 MB.
PAIRS_AT_ONCE = 1 << 22

COMPARING = "in comparing the samples of an effective batch"


class ComparedMemoryError(MemoryError):
    """Out of memory in comparing the samples of an effective batch, where smaller micro-batches do not help."""


@dataclass(frozen=True)
class Compared:
    """The inputs of a joint loss, in the order of the samples."""

    outputs: Outputs  # float32 by name, detached
    tensors: dict[str, Tensor]  # of the batch, by name

    def __len__(self) -> int:
        return len(next(iter(self.outputs.values()), ()))

    def to_document(self) -> dict[str, Any]:
        """Return ``outputs`` and ``tensors`` on the CPU, to be sent to other ranks."""
        return {
            "outputs": {name: tensor.cpu() for name, tensor in self.outputs.items()},
            "tensors": {name: tensor.cpu() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def joined(cls, documents: Sequence[Mapping[str, Any]], device: torch.device) -> Self:
        """Concatenate ``documents``, one per rank or micro-batch, on ``device``; some may have no samples."""
        filled = [document for document in documents if document["outputs"]]
        parts = {
            kind: {name: torch.cat([d[kind][name] for d in filled]).to(device) for name in filled[0][kind]}
            for kind in ("outputs", "tensors")
        }
        return cls(parts["outputs"], parts["tensors"])


@dataclass(frozen=True)
class FirstPass:
    """The outputs of one rank's share of an effective batch.

    Attributes:
        compared: the compared outputs and tensors, on the CPU.
        with_graph: outputs and loss with their graph, if the share is a single micro-batch; else None.
    """

    compared: Compared
    with_graph: tuple[Outputs, LossSum] | None


@dataclass(frozen=True)
class JointPart:
    """One rank's rows of a joint loss."""

    total: Tensor  # their share of the loss, scalar, detached
    gradients: Outputs  # of that share, by output; for all samples, until ``of_samples`` takes a part

    def of_samples(self, start: int, stop: int) -> Self:
        """Return a copy whose gradients are those of samples ``[start, stop)``."""
        return replace(self, gradients={name: rows[start:stop] for name, rows in self.gradients.items()})


def joint_part(task: object) -> JointLoss | None:
    """Return ``task`` if its loss compares samples, else None."""
    return task if isinstance(task, JointLoss) and task.joint_outputs else None


def compared_of(task: JointLoss, outputs: Outputs, batch: Batch) -> Compared:
    """Return the outputs, as float32, and the tensors of one micro-batch that ``task`` compares."""
    # In float32 also where autocast computes in half precision: a similarity is sharpened by a large factor.
    outputs = {name: outputs[name].detach().float() for name in task.joint_outputs}
    return Compared(outputs, {name: batch.tensors[name] for name in task.joint_tensors})


def first_pass(
    joint: JointLoss, forward: Callable[[int, Batch], tuple[Outputs, LossSum]], batch: Batch, micro_batch: int
) -> FirstPass:
    """Compute the compared outputs of ``batch``, which may be empty, in parts of ``micro_batch`` samples.

    ``forward`` is called with the index of a part's first sample and the part. It returns outputs and loss.
    """
    if len(batch) <= micro_batch:
        if not len(batch):
            return FirstPass(Compared({}, {}), None)
        outputs, loss = forward(0, batch)
        return FirstPass(Compared(**compared_of(joint, outputs, batch).to_document()), (outputs, loss))
    found = []
    for start in range(0, len(batch), micro_batch):
        part = batch.part(start, start + micro_batch)
        with torch.no_grad():
            found.append(compared_of(joint, forward(start, part)[0], part).to_document())
    return FirstPass(Compared.joined(found, _CPU), None)


def own_rows(num_samples: int, rank: int, num_ranks: int) -> range:
    """Return the indices of the samples of ``rank`` in the effective batch, as ``loading.share`` assigns them."""
    return range(num_samples * rank // num_ranks, num_samples * (rank + 1) // num_ranks)


def joint_gradients(
    joint: JointLoss, model: nn.Module, everyone: Compared, scale: Callable[[Tensor], Tensor], rows: range
) -> JointPart:
    """Return the joint loss summed over ``rows``, and the gradient of its scaled value for every output.

    Gradients of ``model``'s parameters that enter the loss (such as a temperature) are added to ``p.grad``. Every rank
    adds only the part of its own rows, so the sum over ranks counts each row once.
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
    """Run the backward pass of one micro-batch.

    It starts from the scaled loss ``own`` and from the joint loss's ``gradients`` of ``outputs``.
    """
    roots, given = ([own], [torch.ones_like(own)]) if own.requires_grad else ([], [])
    for name, gradient in gradients.items():
        if outputs[name].requires_grad:
            roots.append(outputs[name])
            given.append(gradient.to(outputs[name].dtype))
    if roots:
        torch.autograd.backward(roots, given)


def evaluated_joint_loss(joint: JointLoss, model: nn.Module, outputs: Outputs, batch: Batch) -> Tensor:
    """Return the joint loss of one evaluation batch, a scalar on the CPU; ``outputs`` cover the whole batch.

    Raises:
        ComparedMemoryError: out of memory.
    """
    device = next((parameter.device for parameter in model.parameters()), _CPU)
    try:
        with torch.inference_mode():
            everyone = Compared.joined([compared_of(joint, outputs, batch).to_document()], device)
            blocks = _blocks(range(len(batch)), len(batch))
            parts = [joint.joint_loss(model, everyone.outputs, everyone.tensors, block) for block in blocks]
            return torch.stack(parts).sum().cpu()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ComparedMemoryError(str(error)) from error


def _blocks(rows: range, num_samples: int) -> Iterator[range]:
    """Split ``rows`` so that a part compares at most ``PAIRS_AT_ONCE`` pairs of samples, but has at least one row."""
    step = max(1, PAIRS_AT_ONCE // max(1, num_samples))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
