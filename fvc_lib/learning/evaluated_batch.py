"""One batch that is only looked at: whole, or done again in smaller pieces."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

from fvc_lib.learning.device import release_cached_memory
from fvc_lib.learning.joint_loss import ComparedMemoryError, evaluated_joint_loss, joint_part
from fvc_lib.learning.optimisation import Precision
from fvc_lib.learning.out_of_memory import is_out_of_memory, memory_state
from fvc_lib.learning.shortages import Shortage, sample_shapes
from fvc_lib.learning.task import Batch, LossSum, Outputs, Task
from fvc_lib.learning.transaction import MemoryExhaustedError, comparison_too_large, smaller_micro_batch


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
        MemoryExhaustedError: one sample alone does not fit, or the comparison of all of them does not.
    """
    again = True
    while True:
        try:
            return *_outputs_in_parts(task, model, batch, precision, device, micro_batch), micro_batch
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            comparing = isinstance(error, ComparedMemoryError)
            failure = memory_state(error, device, model.parameters())
        gc.collect()
        release_cached_memory(device)
        used = min(micro_batch, len(batch))
        following = used if again else None if comparing else used // 2 or None
        report(Shortage("validation", failure, used, following, sample_shapes(batch), len(batch)))
        if not again and comparing:
            raise MemoryExhaustedError(comparison_too_large(failure, len(batch)))
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
    joint = joint_part(task)
    if joint is not None:
        compared = evaluated_joint_loss(joint, model, joined, batch)
        losses.append(LossSum(compared, torch.zeros_like(losses[0].weight)))
    total = LossSum(torch.stack([x.total for x in losses]).sum(), torch.stack([x.weight for x in losses]).sum())
    return joined, total
