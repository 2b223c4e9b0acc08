"""Seed all random generators, and store and restore their states as tensors."""

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
    """Seed torch's generators on all devices, and those of NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # for tasks of users; the library's tasks do not use this generator
    random.seed(seed)


@contextmanager
def forked_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's generators with ``seed`` for the block; restore their states at its end."""
    before = capture_random_state(device)
    seed_generators(seed)
    try:
        yield
    finally:
        restore_random_state(before, device)


def capture_random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of all generators: ``torch``, ``numpy``, ``python`` and, for a GPU, ``device``.

    ``numpy`` and ``python`` are (627,) float64: 624 key words, the position in them, 1 if a second normal draw is
    stored (else 0), and that draw.
    """
    state = np.random.get_state(legacy=False)
    keys, position = state["state"]["key"].tolist(), state["state"]["pos"]
    _, words, normal = random.getstate()
    return {
        **torch_state(device),
        "numpy": torch.tensor([*keys, position, state["has_gauss"], state["gauss"]], dtype=torch.float64),
        "python": torch.tensor([*words, normal is not None, normal or 0.0], dtype=torch.float64),
    }


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that ``capture_random_state`` returned.

    The state of a GPU is skipped if ``device`` is a CPU.
    """
    restore_torch_state(states, device)
    *keys, position, has_normal, normal = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_normal), normal))
    *words, has_normal, normal = states["python"].tolist()
    random.setstate((3, tuple(int(word) for word in words), normal if has_normal else None))


def torch_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators: ``torch`` (CPU) and, if ``device`` is on CUDA or MPS, ``device``."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["device"] = torch.mps.get_rng_state()
    return states


def restore_torch_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that ``torch_state`` returned; NumPy's and Python's generators stay unchanged."""
    torch.set_rng_state(states["torch"])
    if "device" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)
    elif "device" in states and device.type == "mps":
        torch.mps.set_rng_state(states["device"])
