"""One sample of several, computed alone, with the rounding of several.

Torch takes other kernels for a single sample: a convolution of one small picture on the CPU goes past oneDNN (in
ATen's ``use_mkldnn``: one sample of at most 20,480 numbers), and matrix products of few rows go another way. The sums
are as good, but a number next to zero may fall on the other side of a ReLU: gradients of 64 px pictures taken one by
one were off by 8e-5 of those of the batch, with the sample as one of two by 5e-7, what two by two are off by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MOST_NUMBERS = 20_480  # of an input that is padded; larger ones are computed alike anyway
_BATCHED_DIMENSIONS = {torch.conv1d: (3,), torch.conv2d: (4,), torch.conv3d: (5,), F.linear: (2, 3, 4)}


_active: ContextVar[bool] = ContextVar("as_one_of_two", default=False)


def rounded_as_several(num_samples: int, num_together: int, device: torch.device) -> AbstractContextManager[None]:
    """For the forward pass of ``num_samples`` of an effective batch of ``num_together``.

    Where that is one of several, on the CPU, convolutions and linear maps of small inputs are given a second sample of
    zeros and their results of it are left out: no gradient comes from it, and it draws no random number.
    """
    if num_samples != 1 or num_together < 2 or device.type != "cpu":
        return nullcontext()
    return _as_one_of_two()


def rounded_as_before() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint``: of a forward pass that is under way, and of its repetition in the backward pass.

    Torch calls no mode in a backward pass, not even one that is in force.
    """
    return nullcontext(), _as_one_of_two() if _active.get() else nullcontext()


@contextmanager
def _as_one_of_two() -> Iterator[None]:
    before = _active.set(True)
    try:
        with _AsOneOfTwo():
            yield
    finally:
        _active.reset(before)


class _AsOneOfTwo(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and _is_lone(func, args[0]):
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
