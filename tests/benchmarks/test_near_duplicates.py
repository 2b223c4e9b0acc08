"""The benchmark's cases are what their names say, told by the links found in small ones."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.near_duplicates import BITS, CASES, with_looks
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links

LINKS = {"strangers": 0, "with copies": 90, "near cluster": 29, "same cluster": 29, "one frame": 0, "black": 0}


@pytest.mark.parametrize("case", CASES)
def test_as_many_links_are_found_as_were_drawn(case: str) -> None:
    rng = np.random.default_rng(1)
    texts = with_looks(CASES[case](300, rng), rng)
    assert len(near_duplicate_links(texts, BITS)) == LINKS[case]
