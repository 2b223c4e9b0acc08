"""AdamW, its learning-rate schedule, gradient clipping and mixed precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fvc_lib.learning.device import ComputeDevice


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019); biases and norm scales, being vectors, are not decayed."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate)


def learning_rate_at(step: int, total_steps: int, peak: float, warmup_share: float) -> float:
    """The rate of step ``step`` (0-based): linear up to ``peak``, then a cosine to zero just after the last step.

    Being a function of the step alone, it has no state to save.
    """
    warmup_steps = round(total_steps * warmup_share)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` for every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class Precision:
    """Autocast and loss scaling as the device wants them; both do nothing in float32."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._device_type = compute.device.type
        self._amp_dtype = compute.amp_dtype
        self.scaler = self._new_scaler()

    def restore_scaler(self, state: dict[str, Any]) -> None:
        """A scaler in ``state``, and in no other: the one before may have been left in the middle of a step."""
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(state)

    def autocast(self) -> AbstractContextManager[None]:
        """For forward passes and losses."""
        if self._amp_dtype is None:  # entering a disabled one costs 50 microseconds
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._amp_dtype)

    @property
    def scales_losses(self) -> bool:
        """Whether infinite gradients are the scaler's business (it skips the step and lowers its scale)."""
        return bool(self.scaler.is_enabled())

    @property
    def overflow_is_normal(self) -> bool:
        """Whether an infinite gradient may be the scale's fault: at a scale below 1 it is the model's or the data's."""
        return self.scales_losses and float(self.scaler.get_scale()) >= 1

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device_type, enabled=self._amp_dtype is torch.float16)


def finish_gradients(parameters: Iterable[nn.Parameter], factor: float, max_norm: float) -> Tensor:
    """Multiply all gradients by ``factor``, then clip them to L2 norm ``max_norm``; returns the norm before that."""
    parameters = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    return nn.utils.clip_grad_norm_(parameters, max_norm)
