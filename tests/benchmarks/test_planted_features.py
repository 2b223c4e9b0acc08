"""Generated manipulations of which metadata tells nothing, and the families that are there to find them."""

import functools

import numpy as np
import pytest

from benchmarks import planted_features
from fvc_lib.services.registry import FEATURES


@pytest.fixture(scope="module")
def rows():
    shots = [functools.partial(planted_features.generated, number) for number in range(12)]
    return planted_features.measure_all(shots, 0.25, {planted.name for planted in planted_features.PLANTED})


@pytest.mark.long
@pytest.mark.parametrize("planted", planted_features.PLANTED, ids=lambda planted: planted.name)
def test_a_family_finds_its_manipulation_and_metadata_does_not(rows, planted):
    assert planted_features.compare(rows, planted, "metadata").value == 0.5
    found = planted_features.compare(rows, planted, planted.family).value
    assert found > 0.9


def test_every_family_of_tiles_has_a_manipulation():
    assert {planted.family for planted in planted_features.PLANTED} == set(planted_features.FAMILIES)
    assert {FEATURES.get(name).of for name in planted_features.FAMILIES} == {"tiles"}


@pytest.mark.parametrize("planted", planted_features.PLANTED[:3], ids=lambda planted: planted.name)
def test_a_manipulation_changes_pixels_of_a_copy(planted):
    draw = np.random.default_rng(0)
    shape = (1, planted_features.HEIGHT * 3 // 2, planted_features.WIDTH)
    planes, donor = (draw.integers(60, 190, shape, dtype=np.uint8) for _ in range(2))
    before = planes.copy()
    changed = planted.apply(planes, donor, draw)
    assert (planes == before).all()
    assert (changed != planes).mean() > 0.02
    assert (changed.shape, changed.dtype) == (planes.shape, np.uint8)
