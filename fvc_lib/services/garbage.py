"""Python's garbage collector, kept out of a training's way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Collect once, then let the collector look only at what is made from here on; at the end collect all.

    Entered after set-up: a full collection walks every object of every imported module, 0.1 s at a time. Collections of
    what is young go on, so a cycle that holds tensors is still found. Outermost wins: inside another nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
