"""One sample of several, computed alone, with the rounding of several.

Torch takes other kernels for a single sample: a convolution of one small picture on the CPU goes past oneDNN (in
ATen's ``use_mkldnn``: one sample of at most 20,480 numbers), and matrix products of few rows go another way. The sums
are as good, but a number next to zero may fall on the other side of a ReLU: gradients of 64 px pictures taken one by
one were off by 8e-5 of those of the batch, with the sample as one of two by 5e-7, what two by two are off by. At 224 px
all splits are 1e-6 from the batch, itself 3e-6 from float64: there the sums round more than the kernels differ.

It costs time where samples are taken one by one, and only there: a step took 2.5 times the CPU time with pictures of 32
px, 1.7 times with 64, 1.1 times with 224, and 1.4 times with clips of 6 x 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

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
