"""Every pair of videos that shows the same footage, where the library finds as few as connect them."""

import itertools
from collections.abc import Sequence

import numpy as np

from fvc_lib.corpus.copies import near_duplicates as library
from fvc_lib.corpus.copies.perceptual_hash import MIRROR_BITS, WINDOWS


def near_duplicate_pairs(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """All index pairs (i < j), ascending; arguments and errors as for ``near_duplicate_links``."""
    known, table, looks = library._known_hashes(hashes, max_bits)
    one, other = (each.ravel() for each in np.nonzero(~np.eye(len(table), dtype=np.bool_)))
    pairs: set[tuple[int, int]] = set()
    for window, mirror in itertools.product(range(len(WINDOWS)), (np.uint64(0), MIRROR_BITS)):
        every = library._Candidates(one, other, np.full(len(one), window), np.full(len(one), mirror, np.uint64))
        same = every.where(library._show_the_same(table, looks, every, max_bits))
        first, second = known[np.minimum(same.one, same.other)], known[np.maximum(same.one, same.other)]
        pairs.update(zip(first.tolist(), second.tolist(), strict=True))
    return sorted(pairs)
