"""The benchmark's cases are what their names say, told by the links found in small ones."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.near_duplicates import BITS, CASES
from fvc_lib.corpus.near_duplicates import near_duplicate_links
from fvc_lib.corpus.perceptual_hash import hash_text

LINKS = {"strangers": 0, "with copies": 90, "near cluster": 29, "same cluster": 29, "one frame": 0, "black": 0}


@pytest.mark.parametrize("case", CASES)
def test_as_many_links_are_found_as_were_drawn(case: str) -> None:
    table = CASES[case](300, np.random.default_rng(1))
    assert len(near_duplicate_links([hash_text(codes) for codes in table], BITS)) == LINKS[case]
