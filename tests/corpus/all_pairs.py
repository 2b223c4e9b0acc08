"""Every pair of videos that shows the same footage, where the library finds as few as connect them."""

from collections.abc import Sequence

import numpy as np

from fvc_lib.corpus.copies import near_duplicates as library


def near_duplicate_pairs(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """All index pairs (i < j), ascending; arguments and errors as for ``near_duplicate_links``."""
    known, table, looks = library._known_hashes(hashes, max_bits)
    pairs: set[tuple[int, int]] = set()
    for found in library._candidates(table, np.arange(len(table)), max_bits):
        same = found.where(library._show_the_same(table, looks, found, max_bits))
        first, second = known[np.minimum(same.one, same.other)], known[np.maximum(same.one, same.other)]
        pairs.update(zip(first.tolist(), second.tolist(), strict=True))
    return sorted(pairs)
