"""Random states that are local, derived from stable hashes, and can be stored without pickling anything."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def stable_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2**63) from ``parts``, the same on every machine and in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") >> 1


def seed_generators(seed: int) -> None:
    """Seed torch's generators of every device, NumPy's and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # a task may use it; ours do not
    random.seed(seed)


@contextmanager
def forked_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's, NumPy's and Python's generators as if freshly seeded; those of before come back afterwards."""
    before = capture_random_state(device)
    seed_generators(seed)
    try:
        yield
    finally:
        restore_random_state(before, device)


def capture_random_state(device: torch.device) -> dict[str, Tensor]:
    """Every generator's state as tensors: ``torch``, ``numpy``, ``python`` and, where used, ``device``."""
    return {**torch_state(device), "numpy": _numpy_state(), "python": _python_state()}


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Put back what ``capture_random_state`` gave; a device's part is skipped on another kind of device."""
    restore_torch_state(states, device)
    _restore_numpy(states["numpy"])
    _restore_python(states["python"])


def torch_state(device: torch.device) -> dict[str, Tensor]:
    """Torch's own part of ``capture_random_state``."""
    states, on_device = {"torch": torch.get_rng_state()}, _device_state(device)
    return states if on_device is None else {**states, "device": on_device}


def restore_torch_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Put back what ``torch_state`` gave, and nothing else."""
    torch.set_rng_state(states["torch"])
    _set_device_state(states.get("device"), device)


def _device_state(device: torch.device) -> Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _set_device_state(state: Tensor | None, device: torch.device) -> None:
    if state is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif state is not None and device.type == "mps":
        torch.mps.set_rng_state(state)


def _numpy_state() -> Tensor:
    """(627,) float64: 624 key words, position, whether a second normal draw waits, and that draw."""
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    words = [*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]]
    return torch.tensor(words, dtype=torch.float64)


def _restore_numpy(state: Tensor) -> None:
    *words, position, has_normal, normal = state.tolist()
    keys = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_normal), normal))


def _python_state() -> Tensor:
    """(627,) float64: 624 key words and the position, whether a second normal draw waits, and that draw."""
    _, words, normal = random.getstate()
    return torch.tensor([*words, normal is not None, normal or 0.0], dtype=torch.float64)


def _restore_python(state: Tensor) -> None:
    *words, has_normal, normal = state.tolist()
    random.setstate((3, tuple(int(word) for word in words), normal if has_normal else None))
