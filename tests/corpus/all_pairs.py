"""Every pair of videos that shows the same footage, where the library finds as few as connect them."""

from collections.abc import Sequence

import numpy as np

from fvc_lib.corpus.copies.near_duplicates import Judge
from fvc_lib.corpus.copies.perceptual_hash import WINDOWS


def near_duplicate_pairs(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """All index pairs (i < j), ascending; arguments and errors as for ``near_duplicate_links``."""
    judge = Judge(hashes, max_bits)
    count = len(judge.known)
    candidates = np.indices((count, count, len(WINDOWS), 2)).reshape(4, -1)
    near = candidates[:, candidates[0] != candidates[1]]
    near = near[:, judge.hashes_agree(near)]
    return sorted({tuple(sorted(pair)) for pair in judge.known[near[:2, judge.agree(near)]].T.tolist()})
