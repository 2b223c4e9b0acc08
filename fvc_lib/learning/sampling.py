"""The order of samples as a pure function of epoch and seed, so that any position in it can be resumed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fvc_lib.learning.random_state import stable_seed

IntArray = npt.NDArray[np.int64]


def epoch_order(num_samples: int, epoch: int, seed: int, classes: Sequence[int] | None = None) -> IntArray:
    """(num_samples,) int64 sample indices for one epoch.

    Without ``classes`` a permutation. With ``classes`` (num_samples,) every class gets an equal share of the places
    (they differ by at most one): a rare class's samples come several times, each as often as the others of its class
    but for one; a common class's are thinned out, without repetition.
    """
    generator = np.random.default_rng(stable_seed("epoch order", seed, epoch))
    if classes is None:
        return generator.permutation(num_samples)
    labels = np.asarray(classes)
    kinds = np.unique(labels)
    shares = np.full(kinds.size, num_samples // kinds.size)
    shares[generator.permutation(kinds.size)[: num_samples % kinds.size]] += 1
    drawn = [
        _repeated(np.flatnonzero(labels == kind), share, generator) for kind, share in zip(kinds, shares, strict=True)
    ]
    return generator.permutation(np.concatenate(drawn))


def windows(order: IntArray, size: int, first: int = 0) -> list[list[int]]:
    """``order`` cut into effective batches of ``size`` (the last may be smaller), from window ``first`` on."""
    return [order[start : start + size].tolist() for start in range(first * size, order.size, size)]


def window_size(num_samples: int, size: int, window: int) -> int:
    """How many samples effective batch ``window`` (0-based) of an epoch has."""
    return max(0, min(size, num_samples - window * size))


def share(indices: list[int], rank: int, num_ranks: int) -> list[int]:
    """The part of one effective batch that ``rank`` computes: neighbours, as evenly as can be; empty for some of many.

    The ranks' shares one after the other are the batch.
    """
    return indices[len(indices) * rank // num_ranks : len(indices) * (rank + 1) // num_ranks]


def num_windows(num_samples: int, size: int) -> int:
    """How many effective batches an epoch has."""
    return -(-num_samples // size)


def _repeated(members: IntArray, count: int, generator: np.random.Generator) -> IntArray:
    rounds = -(-count // members.size)
    return np.concatenate([generator.permutation(members) for _ in range(rounds)])[:count]
