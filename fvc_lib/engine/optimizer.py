"""Build the optimizer, schedule the learning rate, and scale and clip gradients."""

import inspect
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class EagerAdamW(torch.optim.AdamW):
    """A ``torch.optim.AdamW`` that does not import torch's compiler. Its results equal those of AdamW to the bit.

    torch's class imports the compiler only to exclude the methods below from it. That costs 800 modules, 1.3 s of CPU
    time and 75 MB in every process that trains.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> EagerAdamW:
    """Return an AdamW optimizer (Loshchilov and Hutter, 2019) for the trainable parameters of ``model``.

    ``weight_decay`` is not applied to parameters with fewer than two dimensions, such as biases and scales of norms.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay}
    others = {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0}
    return EagerAdamW([matrices, others], lr=learning_rate)


def learning_rate_at(step: int, total_steps: int, peak: float, warmup_share: float) -> float:
    """Return the learning rate of ``step`` (0-based): linear warm-up to ``peak``, then cosine decay towards zero.

    The warm-up takes the share ``warmup_share`` of ``total_steps``. The rate is still above zero in the last step, and
    would be zero in the next one.
    """
    warmup_steps = round(total_steps * warmup_share)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set ``learning_rate`` in every parameter group of ``optimizer``."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def finish_gradients(parameters: Iterable[nn.Parameter], factor: float, max_norm: float) -> Tensor:
    """Multiply all gradients by ``factor``, then scale them down if their joint L2 norm exceeds ``max_norm``.

    ``p.grad`` is changed in place; parameters without a gradient are skipped.

    Returns:
        The joint L2 norm after the multiplication and before clipping, a scalar tensor.
    """
    parameters = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    return nn.utils.clip_grad_norm_(parameters, max_norm)
