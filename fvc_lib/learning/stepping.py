"""The optimizer's step, which is no transaction: it changes weights in place, so where memory ends within it the
weights are neither old nor new, and only a checkpoint can say what they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fvc_lib.learning.optimisation import Precision, build_optimizer, finish_gradients, set_learning_rate
from fvc_lib.learning.out_of_memory import MemoryState, is_out_of_memory, memory_state
from fvc_lib.learning.ranks import Ranks
from fvc_lib.learning.transaction import WindowGradients
from fvc_lib.services.checkpoints import CheckpointMismatchError


class StepLostError(Exception):
    """Memory ended while the weights were being changed. Caught by the engine, which restores a checkpoint."""

    def __init__(self, memory: MemoryState) -> None:
        super().__init__(memory.message)
        self.memory = memory


def take_together(
    stepper: Stepper, ranks: Ranks, result: WindowGradients | None, learning_rate: float, *, save_is_due: bool
) -> tuple[float, bool]:
    """One step on every rank, or none: where memory ended in one rank's, the others' are lost with it.

    Args:
        stepper: of this rank's model.
        ranks: all of which are here.
        result: the gradients that all ranks have; None: no step is taken.
        learning_rate: of this step.
        save_is_due: what rank 0 says decides.

    Returns:
        The gradient's norm before clipping (NaN without a step), and whether a checkpoint is due.

    Raises:
        StepLostError: memory ended; the weights of one rank are undefined now.
    """
    norm, lost = math.nan, None
    try:
        norm = norm if result is None else stepper.take(result, learning_rate)
    except StepLostError as error:
        lost = error
    rows = ranks.meet("step", lost is not None, save_is_due)
    if lost is not None:
        raise lost
    for rank, (its_lost, _) in enumerate(rows):
        if its_lost:
            raise StepLostError(MemoryState(f"memory ended on rank {rank}", None, 0, {}, []))
    return norm, bool(rows[0][1])


class Stepper:
    """AdamW with clipping and loss scaling for one model.

    Args:
        model: whose parameters are stepped; already on its device.
        precision: scales losses where it is half.
        learning_rate: the peak; each step is given its own.
        weight_decay: of matrices.
        max_gradient_norm: L2.
        device: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        *,
        learning_rate: float,
        weight_decay: float,
        max_gradient_norm: float,
        device: torch.device,
    ) -> None:
        self._model = model
        self._precision = precision
        self._max_gradient_norm = max_gradient_norm
        self._device = device
        self._optimizer = build_optimizer(model, learning_rate, weight_decay)
        self._weight_decays = [group["weight_decay"] for group in self._optimizer.param_groups]
        self._one_by_one = False

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def take(self, result: WindowGradients, learning_rate: float) -> float:
        """Step on the gradients of ``result`` unless they are not finite; returns their norm before clipping.

        Raises:
            StepLostError: memory ended; the weights are undefined now.
        """
        try:
            return self._take(result, learning_rate)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            memory = memory_state(error, self._device, self._model.parameters())
        raise StepLostError(memory)  # from outside the handler, whose traceback holds tensors

    def save_memory(self) -> None:
        """From now on update one parameter after the other: slower, without temporaries for all of them at once."""
        self._one_by_one = True
        for group in self._optimizer.param_groups:
            group["foreach"] = False

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and scaler; not whether memory is being saved, which may be another machine's need."""
        optimizer = self._optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["foreach"] = None
        return {"optimizer": optimizer, "scaler": self._precision.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back ``state_dict``; decay stays as this stepper was made, which in a fork may differ.

        Raises:
            CheckpointMismatchError: the state is of other parameters.
        """
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointMismatchError(f"the checkpoint's optimizer is of another model: {error}.") from error
        for group, weight_decay in zip(self._optimizer.param_groups, self._weight_decays, strict=True):
            group["weight_decay"] = weight_decay
        self._precision.restore_scaler(state["scaler"])
        if self._one_by_one:
            self.save_memory()

    def _take(self, result: WindowGradients, learning_rate: float) -> float:
        scaler = self._precision.scaler
        scaler.unscale_(self._optimizer)
        factor = result.num_samples / result.loss.weight
        norm = float(finish_gradients(self._model.parameters(), factor, self._max_gradient_norm))
        set_learning_rate(self._optimizer, learning_rate)
        if math.isfinite(norm) or self._precision.scales_losses:
            scaler.step(self._optimizer)
        scaler.update()
        return norm
