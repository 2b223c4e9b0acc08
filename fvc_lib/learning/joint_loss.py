"""Losses that compare the samples of an effective batch with one another, without having them in memory at once.

First the outputs that are compared are computed, micro-batch by micro-batch, and kept without what led to them. Of all
of them together, over all ranks, the loss and its gradient with respect to each are computed. Then every micro-batch is
computed again and given its part of that gradient. So the gradients are those of the whole batch for any split (L. Gao
et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021), and a rank holds the outputs
of all ranks, but the activations of one micro-batch. A share that is one micro-batch is computed only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fvc_lib.learning.optimisation import Precision
from fvc_lib.learning.task import Batch, JointLoss, LossSum, Outputs, Task


@dataclass(frozen=True)
class Compared:
    """What a joint loss reads of samples, in their order.

    Attributes:
        outputs: float32 by name, detached.
        tensors: of the batch, by name.
    """

    outputs: Outputs
    tensors: dict[str, Tensor]

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
    """The outputs of one rank's share; ``kept`` is the whole share with its graph, where it was one micro-batch."""

    compared: Compared
    kept: tuple[Outputs, LossSum] | None


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
) -> FirstPass:
    """Compute what is compared of ``window``, which may be empty."""
    if len(window) <= micro_batch:
        if not len(window):
            return FirstPass(Compared({}, {}), None)
        part = window.to(device)
        with precision.autocast():
            outputs = task.forward(model, part)
            loss = task.loss(outputs, part)
        return FirstPass(compared_of(joint, outputs, part), (outputs, loss))
    found = []
    for start in range(0, len(window), micro_batch):
        part = window.part(start, start + micro_batch).to(device)
        with torch.no_grad(), precision.autocast():
            found.append(compared_of(joint, task.forward(model, part), part).to_document())
    return FirstPass(Compared.joined(found, device), None)


def joint_gradients(
    joint: JointLoss,
    model: nn.Module,
    everyone: Compared,
    scale: Callable[[Tensor], Tensor],
    *,
    leads: bool,
) -> tuple[Tensor, Outputs]:
    """The joint loss over all ranks' samples, detached, and the gradient of what ``scale`` makes of it.

    The gradients of ``model``'s own parameters in the loss (a temperature) are added to theirs where this rank leads:
    every rank computes the same ones, and they are to count once.

    Returns:
        The loss, and for each compared output its gradient, for all samples; zero where the loss does not read it.
    """
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in everyone.outputs.items()}
    total = joint.joint_loss(model, leaves, everyone.tensors)
    if leads:
        scale(total).backward()  # type: ignore[no-untyped-call]
        found = [leaf.grad for leaf in leaves.values()]
    else:
        found = [*torch.autograd.grad(scale(total), [*leaves.values()], allow_unused=True)]
    gradients = zip(leaves.items(), found, strict=True)
    return total.detach(), {n: torch.zeros_like(leaf) if grad is None else grad for (n, leaf), grad in gradients}


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
    """The joint loss of one batch that is only looked at, on the CPU; ``outputs`` are the whole batch's."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    compared = compared_of(joint, outputs, batch)
    values, tensors = (
        {name: t.to(device) for name, t in each.items()} for each in (compared.outputs, compared.tensors)
    )
    with torch.inference_mode():
        return joint.joint_loss(model, values, tensors).cpu()
