"""Giving cached device memory back at a policy's interval."""

from __future__ import annotations

import torch

from fvc_lib.learning.device import release_cached_memory


class CacheClearing:
    """Counts batches of one kind and clears torch's caches after every ``every``-th; 0: never.

    On CUDA, where clearing costs a synchronisation and the next allocations, the policies say 0: an out-of-memory and
    the end of a stage clear by themselves. On MPS the cache otherwise grows into memory that other programs need.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self._device = device
        self._every = every
        self._batches = 0

    def after_batch(self) -> None:
        """A batch is done."""
        self._batches += 1
        if self._every and self._batches % self._every == 0:
            release_cached_memory(self._device)
