"""Compute joint losses, which compare the samples of an effective batch, without all samples in memory at once.

An effective batch has the samples of one optimizer step. It is computed in micro-batches (parts that fit into memory),
and may be shared by several ranks (processes). A contrastive loss is a joint loss.

1. The compared outputs are computed without gradients, micro-batch by micro-batch.
2. Every rank computes the loss of its samples against the outputs of all ranks, some rows at a time. The gradients with
   respect to the outputs are summed over the ranks.
3. Every micro-batch is computed again with gradients, and its part of the gradient from 2 is propagated back.

So the gradients are those of the complete batch for any split (L. Gao et al., "Scaling deep contrastive learning batch
size under memory limited setup", 2021). A rank holds the outputs of all ranks, some rows of the matrix of pairs, and
the activations of one micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fvc_lib.engine.oom_detection import is_out_of_memory
from fvc_lib.engine.task import Batch, JointLoss, LossSum, Outputs

# Number of pairs of samples that are compared at once; a float32 tensor of all pairs has 17 MB. The softmax loss of
# 4,096 samples with 128 features, with its gradient, took 329 MB and 0.9 s of one core. All pairs at once took 560 MB
# and 1.5 s. With four ranks, one rank took 245 MB.
PAIRS_AT_ONCE = 1 << 22

COMPARING = "in comparing the samples of an effective batch"

# The inputs of a joint loss: float32 outputs and the batch's tensors by name, under "outputs" and "tensors".
Compared = dict[str, dict[str, Tensor]]


def joint_part(task: object) -> JointLoss | None:
    """Return ``task`` if it has a joint loss (one that compares samples), else None."""
    return task if isinstance(task, JointLoss) and task.joint_outputs else None


def num_compared(compared: Compared) -> int:
    """Return the number of samples whose outputs are in ``compared``."""
    return len(next(iter(compared["outputs"].values()), ()))


def compared_of(task: JointLoss, outputs: Outputs, batch: Batch) -> Compared:
    """Return the inputs of ``task``'s joint loss for one micro-batch, on the CPU.

    They are selected from the model's ``outputs`` and from the tensors of ``batch``. Outputs are converted to float32
    even under autocast, because a joint loss multiplies similarities by a large factor.
    """
    return {
        "outputs": {name: outputs[name].detach().float().cpu() for name in task.joint_outputs},
        "tensors": {name: batch.tensors[name].cpu() for name in task.joint_tensors},
    }


def joined(parts: Sequence[Compared], device: torch.device | str = "cpu") -> Compared:
    """Return ``parts`` concatenated along the first dimension (the samples), on ``device``.

    There is one part per rank or micro-batch. At least one part must have samples.
    """
    filled = [part for part in parts if part["outputs"]]
    return {
        kind: {name: torch.cat([part[kind][name] for part in filled]).to(device) for name in filled[0][kind]}
        for kind in ("outputs", "tensors")
    }


def compared_outputs(
    joint: JointLoss, forward: Callable[[int, Batch], tuple[Outputs, LossSum]], batch: Batch, micro_batch: int
) -> Compared:
    """Compute the inputs of the joint loss for ``batch`` without gradients, and return them on the CPU.

    Args:
        joint: the task.
        forward: function of (index of a part's first sample in ``batch``, part); returns (outputs, loss of the part).
        batch: the samples; may be empty.
        micro_batch: number of samples in a part, which are in memory at once.
    """
    if not len(batch):
        return {"outputs": {}, "tensors": {}}
    found = []
    for start in range(0, len(batch), micro_batch):
        part = batch.part(start, start + micro_batch)
        with torch.no_grad():
            found.append(compared_of(joint, forward(start, part)[0], part))
    return joined(found)


def joint_gradients(
    joint: JointLoss, model: nn.Module, everyone: Compared, scale: Callable[[Tensor], Tensor], rows: range
) -> tuple[Tensor, Outputs]:
    """Compute the joint loss of the samples in ``rows``, and its gradient with respect to the outputs of all samples.

    Gradients of ``model``'s parameters that enter the loss (such as a temperature) are added to ``p.grad``.

    Args:
        joint: the task.
        model: the model.
        everyone: the compared outputs and tensors of all N samples of the effective batch, from all ranks.
        scale: function that returns a loss scaled for the backward pass; the gradients have this scale.
        rows: indices of this rank's samples among the N. The loss is a sum over samples, and only their terms are
            computed.

    Returns:
        (loss, gradients): the unscaled loss summed over ``rows``, a detached scalar; and the gradients (N, ...) of the
        scaled loss with respect to the outputs, by name.
    """
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in everyone["outputs"].items()}
    total = torch.zeros((), device=next(iter(leaves.values())).device)
    for block in _blocks(rows, num_compared(everyone)):
        part = joint.joint_loss(model, leaves, everyone["tensors"], block)
        scale(part).backward()  # type: ignore[no-untyped-call]
        total = total + part.detach()
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return total, {name: gradient.contiguous() for name, gradient in gradients.items()}


def carry_back(outputs: Outputs, gradients: Outputs, loss: Tensor) -> None:
    """Run the backward pass of one micro-batch, from its own loss and from the gradients of the joint loss.

    Args:
        outputs: outputs of the micro-batch, by name.
        gradients: gradients of the joint loss with respect to ``outputs``, by name.
        loss: the scaled loss of the micro-batch without the joint loss, a scalar.
    """
    pairs = [(loss, torch.ones_like(loss)), *((outputs[name], gradient) for name, gradient in gradients.items())]
    pairs = [(root, gradient.to(root.dtype)) for root, gradient in pairs if root.requires_grad]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])


def evaluated_joint_loss(joint: JointLoss, model: nn.Module, outputs: Outputs, batch: Batch) -> Tensor:
    """Return the joint loss summed over one evaluation batch, a scalar on the CPU. No gradient is computed.

    ``outputs`` are the model's outputs for all samples of ``batch``.

    Raises:
        MemoryError: memory ran out; the message begins with ``COMPARING``.
    """
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    try:
        with torch.inference_mode():
            everyone = joined([compared_of(joint, outputs, batch)], device)
            blocks = _blocks(range(len(batch)), len(batch))
            parts = [joint.joint_loss(model, everyone["outputs"], everyone["tensors"], block) for block in blocks]
            return torch.stack(parts).sum().cpu()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"{COMPARING}: {error}") from error


def _blocks(rows: range, num_samples: int) -> Iterator[range]:
    """Yield consecutive parts of ``rows`` that are small enough to compare with all ``num_samples`` samples at once.

    A part has at most ``PAIRS_AT_ONCE`` pairs of samples, but at least one row.
    """
    step = max(1, PAIRS_AT_ONCE // max(1, num_samples))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
