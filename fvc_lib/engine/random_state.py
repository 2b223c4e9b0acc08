"""Seed all random generators, store and restore their states as tensors, and draw dropout masks per sample.

Dropout masks are drawn separately for every sample of an effective batch (the samples of one optimizer step). So
splitting the batch into micro-batches (parts that fit into memory), or sharing it among ranks (processes), changes no
result.

The mask of a sample has a seed made of two numbers: the sample's index in the effective batch, and a number that the
dropout layer draws from torch's random state in every call. That state is set to the same value before every part of
an effective batch. Gradient checkpointing restores it for its second forward pass. A resumed training draws the same
masks.

This covers ``nn.Dropout``, ``Dropout1d``, ``Dropout2d`` and ``Dropout3d``. Other random draws in a forward pass are
made for a whole micro-batch at once. If an effective batch must be split, a network with such draws is refused.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fvc_lib.services.errors import FvcError

# Number of dimensions of a layer's input with a batch dimension; 0: any. Without it, the first dimension is channels.
_LAYERS = {nn.Dropout: 0, nn.Dropout1d: 3, nn.Dropout2d: 0, nn.Dropout3d: 5}
_FORWARDS = {layer.forward: (layer, dimensions) for layer, dimensions in _LAYERS.items()}
_REMEDY = (
    "Set this dropout to 0 or put its part into evaluation mode (module.eval() in the network's own train method), or "
    "train on one rank with batch_size the effective batch size."
)


def stable_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2**63) that is a hash of ``parts``; it is the same on every machine and in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") >> 1


def seed_generators(seed: int) -> None:
    """Seed torch's global generators on all devices, and the global generators of NumPy and Python, with ``seed``."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # for tasks of users; the library's tasks do not use this generator
    random.seed(seed)


@contextmanager
def forked_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's global generators with ``seed``, and restore their states after the block.

    If ``device`` is a GPU, the state of its generator is restored, too.
    """
    before = capture_random_state(device)
    seed_generators(seed)
    try:
        yield
    finally:
        restore_random_state(before, device)


def capture_random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of all global random generators as tensors, which a checkpoint can store.

    The names are ``torch`` (CPU), ``device`` (only for a GPU), ``numpy`` and ``python``. The last two are (627,)
    float64: the 624 words of the generator, the position in them, 1 if a second normal draw is stored (else 0), and
    this draw.
    """
    state = np.random.get_state(legacy=False)
    keys, position = state["state"]["key"].tolist(), state["state"]["pos"]
    of_numpy = [*keys, position, state["has_gauss"], state["gauss"]]
    _, words, normal = random.getstate()
    of_python = [*words, normal is not None, normal or 0.0]
    return {
        **torch_state(device),
        "numpy": torch.tensor(of_numpy, dtype=torch.float64),
        "python": torch.tensor(of_python, dtype=torch.float64),
    }


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Set all global random generators to ``states``, which ``capture_random_state`` returned.

    The state of a GPU is ignored if ``device`` is the CPU.
    """
    restore_torch_state(states, device)
    *keys, position, has_normal, normal = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_normal), normal))
    *words, has_normal, normal = states["python"].tolist()
    random.setstate((3, tuple(int(word) for word in words), normal if has_normal else None))


def torch_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators as tensors.

    The names are ``torch`` (CPU) and, if ``device`` is a GPU, ``device``.
    """
    states = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def restore_torch_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's generators to ``states``, which ``torch_state`` returned; other generators stay unchanged."""
    torch.set_rng_state(states["torch"])
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"])


# --- Dropout masks per sample


class DropoutSplitError(FvcError):
    """The error for a batch that must be split although the network's random draws would depend on the split."""


@dataclass(frozen=True)
class Samples:
    """The indices of a forward pass's samples in the effective batch, and the seed of their dropout masks."""

    first: int  # index of the first sample in the effective batch
    count: int  # number of samples in the forward pass
    draws: int  # seed of the masks, together with the samples' indices; differs from step to step
    split: bool  # whether the effective batch has samples that are not in this forward pass


class SampleDropout:
    """Make the dropout layers of ``model`` draw a separate mask for every sample.

    The attribute ``samples`` has the samples of the present forward pass. While it is None, the layers behave as in
    torch. The constructor replaces the forward methods of the layers and registers forward hooks on the model. Names of
    parameters and buffers stay the same. ``device`` is the model's device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.samples: Samples | None = None
        self._model, self._device = model, device
        self._names = {module: name for name, module in model.named_modules() if type(module).forward in _FORWARDS}
        self._num_passes = self._num_draws = 0
        for layer in self._names:  # on the instance, where nn.Module.__call__ finds it first
            layer.__dict__["forward"] = partial(self._dropped, layer)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    @property
    def _active(self) -> bool:
        return any(layer.training and layer.p for layer in self._names)

    def of(self, samples: Samples | None) -> None:
        """Make dropout draw the masks of ``samples`` in the next forward and backward passes; None: as in torch."""
        self.samples, self._num_passes = samples, 0

    def _begin(self, model: nn.Module, _: Any) -> None:
        samples = self.samples
        if samples is None:
            return
        self._outer = torch_state(self._device)
        if self._active:
            torch.manual_seed(stable_seed("dropout", samples.draws, self._num_passes))
        self._num_passes, self._num_draws = self._num_passes + 1, 0
        self._inner = capture_random_state(self._device) if samples.split else None

    def _end(self, model: nn.Module, *_: Any) -> None:
        if self.samples is None:
            return
        if self._inner is not None:
            self._refuse_other_draws(self._inner)
        if self._active:
            restore_torch_state(self._outer, self._device)

    def _dropped(self, layer: Any, values: Tensor) -> Tensor:
        samples = self.samples
        if samples is None or not layer.training or not layer.p:
            untouched: Tensor = type(layer).forward(layer, values)
            return untouched
        rows, count = len(values), samples.count
        # A sequence (T, B, features): its rows are the times of all samples.
        is_time_first = values.dim() == 3 and values.shape[1] == count != rows
        if samples.split and (rows % count or is_time_first):
            raise DropoutSplitError(
                f"the effective batch must be split, and the input {tuple(values.shape)} of dropout layer "
                f"{self._names[layer]!r} does not hold one sample after the other in its first dimension. "
                f"Put the batch first (batch_first=True). {_REMEDY}"
            )
        if rows % count:
            count = 1  # the effective batch is not split, so one mask for all samples will do
        self._num_draws += 1
        call, generator = _call_number(), torch.Generator(values.device)
        dropped = torch.empty(_mask_shape(layer, values), dtype=torch.bool, device=values.device)
        for number, its_rows in enumerate(dropped.view(count, -1)):
            generator.manual_seed(stable_seed("dropout", call, samples.first + number))
            its_rows.bernoulli_(layer.p, generator=generator)
        return (values / (1 - layer.p) if layer.p < 1 else values).masked_fill(dropped, 0.0)

    def _refuse_other_draws(self, before: dict[str, Tensor]) -> None:
        """Raise ``DropoutSplitError`` if a forward pass drew random numbers for anything else than dropout masks.

        Such draws are made for a whole micro-batch at once, so they depend on the split. ``before`` has the states of
        all random generators at the beginning of the forward pass.
        """
        expected = torch.Generator()
        expected.set_state(before["torch"])
        for _ in range(self._num_draws):
            _call_number(expected)
        before = {**before, "torch": expected.get_state()}
        after = capture_random_state(self._device)
        if all(state.equal(after[name]) for name, state in before.items()):
            return
        raise DropoutSplitError(
            f"{type(self._model).__name__} draws random numbers that are not those of an nn.Dropout layer (dropout of "
            f"attention, of a recurrent layer or as a function, drop-path and the like). The effective batch "
            f"must be split, and they would be drawn again for every part, which changes the result. {_REMEDY}"
        )


def _mask_shape(layer: nn.Module, values: Tensor) -> tuple[int, ...]:
    """Return the shape of the dropout mask for the input ``values`` of ``layer``.

    It is the shape of ``values`` for ``nn.Dropout``. The other layers drop whole channels: all dimensions after the
    channels have size 1.
    """
    kind, batched = _FORWARDS[type(layer).forward]
    if kind is nn.Dropout:
        return tuple(values.shape)
    leading = 2 if not batched or values.dim() == batched else 1
    return *values.shape[:leading], *(1 for _ in values.shape[leading:])


def _call_number(generator: torch.Generator | None = None) -> int:
    return int(torch.randint(1 << 62, (), generator=generator))
