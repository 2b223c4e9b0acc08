"""Compute joint losses: losses that compare the samples of an effective batch with one another.

A contrastive loss is a joint loss. An effective batch has the samples of one optimizer step. It is computed in
micro-batches (parts that fit into memory), and may be shared by several ranks (processes). The activations of all
samples are never in memory at once:

1. The compared outputs are computed without gradients, micro-batch by micro-batch, and exchanged between the ranks.
2. Every rank computes the loss of all samples, and its gradients with respect to the outputs.
3. Every micro-batch is computed again with gradients, and its part of the gradient from 2 is propagated back.

So the gradients are those of the complete batch for any split (L. Gao et al., "Scaling deep contrastive learning batch
size under memory limited setup", 2021). A rank holds the outputs of all ranks, the matrix of all pairs of samples, and
the activations of one micro-batch.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fvc_lib.engine.task import Batch, JointLoss, Outputs

COMPARING = "in comparing the samples of an effective batch"


def joint_part(task: object) -> JointLoss | None:
    """Return ``task`` if it has a joint loss (one that compares samples), else None."""
    return task if isinstance(task, JointLoss) and task.joint_outputs else None


def compared_of(task: JointLoss, outputs: Outputs, batch: Batch) -> Outputs:
    """Return the inputs of ``task``'s joint loss for one micro-batch, as CPU tensors by name.

    The inputs are selected from the model's ``outputs`` and from the tensors of ``batch``. Outputs are converted to
    float32 even under autocast, because a joint loss multiplies similarities by a large factor.
    """
    compared = {name: outputs[name].detach().float().cpu() for name in task.joint_outputs}
    return compared | {name: batch.tensors[name].cpu() for name in task.joint_tensors}


def joined(parts: Iterable[Outputs]) -> Outputs:
    """Return one tensor per name: the tensors of this name in all ``parts``, concatenated along the first dimension.

    The first dimension is the samples. There is one part per rank or micro-batch; empty parts are skipped. If there is
    no part, the result is empty.
    """
    filled = list(filter(None, parts))
    return {name: torch.cat([part[name] for part in filled]) for name in (filled[0] if filled else ())}


def joint_gradients(
    joint: JointLoss, model: nn.Module, compared: Outputs, scale: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Outputs]:
    """Compute the joint loss of an effective batch, and its gradients with respect to the outputs that it compares.

    Gradients of ``model``'s parameters that enter the loss (such as a temperature) are added to ``p.grad``.

    Args:
        joint: the task.
        model: the model.
        compared: the inputs of the loss for all N samples of the effective batch, on the device of ``model``.
        scale: function that returns a loss scaled for the backward pass; the gradients have this scale.

    Returns:
        (loss, gradients): the unscaled loss summed over the N samples, a detached scalar; and the gradients (N, ...) of
        the scaled loss with respect to the outputs, by name.
    """
    leaves = {name: compared[name].clone().requires_grad_() for name in joint.joint_outputs}
    loss = joint.joint_loss(model, leaves, compared)
    scale(loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def evaluated_joint_loss(
    joint: JointLoss, model: nn.Module, outputs: Outputs, batch: Batch, device: torch.device
) -> Tensor:
    """Return the joint loss summed over one evaluation batch, a scalar on the CPU. No gradient is computed.

    ``outputs`` are the model's outputs for all samples of ``batch``, and ``device`` is that of the model.
    """
    compared = {name: rows.to(device) for name, rows in compared_of(joint, outputs, batch).items()}
    with torch.inference_mode():
        return joint.joint_loss(model, compared, compared).cpu()
