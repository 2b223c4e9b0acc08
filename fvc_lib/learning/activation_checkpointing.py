"""Gradient checkpointing: a block's activations are not kept for the backward pass but computed again in it.

After Chen et al., "Training deep nets with sublinear memory cost" (2016), by way of ``torch.utils.checkpoint``. A model
says which of its parts are worth it with a method ``recomputable_blocks()``; results do not change by a bit on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fvc_lib.learning.lone_samples import rounded_as_before
from fvc_lib.services.errors import UsageError


@runtime_checkable
class Recomputable(Protocol):
    """A model that can trade time for memory."""

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Modules, none inside another, whose forward depends on inputs, weights and torch's random state only."""
        ...


def recompute_activations(model: nn.Module) -> None:
    """From now on keep only the inputs of ``model``'s blocks for the backward pass. Done twice it is done once.

    Parameter and buffer names stay, and the model can still be pickled and copied. Torch's random state is restored
    for the second forward pass, so dropout drops the same. A block in training mode that changes a buffer of its own
    (batch norm's running statistics) would change it twice and is refused.

    Raises:
        UsageError: the model names no blocks, or a block holds a batch norm.
    """
    name = type(model).__name__
    if not isinstance(model, Recomputable):
        raise UsageError(
            f"gradient_checkpointing: model {name!r} names no blocks to compute again (a method recomputable_blocks). "
            "Turn gradient_checkpointing off or take another model."
        )
    blocks = model.recomputable_blocks()
    for block in blocks:
        _refuse_batch_norm(name, block)
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), _RecomputedForward):
            # On the instance, where nn.Module.__call__ finds it first: wrapping the block would rename its parameters.
            block.__dict__["forward"] = _RecomputedForward(block)


class _RecomputedForward:
    """Stands in for a block's ``forward``; a class rather than a closure so that the model can be pickled."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __call__(self, *inputs: Any) -> Any:
        forward = type(self._block).forward
        if not torch.is_grad_enabled():
            return forward(self._block, *inputs)
        return checkpoint(
            forward, self._block, *inputs,
            use_reentrant=False, preserve_rng_state=True, context_fn=rounded_as_before,
        )  # fmt: skip


def _refuse_batch_norm(name: str, block: nn.Module) -> None:
    for module in block.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise UsageError(
                f"gradient_checkpointing: a block of {name!r} holds a {type(module).__name__}, whose running "
                "statistics would be updated twice a step. Use group norm or turn gradient_checkpointing off."
            )
