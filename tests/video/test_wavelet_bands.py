"""A fake takes over wavelet bands of its real: against the transform itself, written here as a matrix."""

import numpy as np
import pytest

from fvc_lib.video.wavelet_bands import BandSwap, with_bands_of


def _haar(side: int) -> np.ndarray:
    """Return the orthonormal matrix of a Haar transform with three levels; the first side / 8 rows are the lowest."""
    matrix, low = np.empty((0, side)), np.eye(side)
    for _ in range(3):
        pairs = low.reshape(-1, 2, side)
        matrix = np.concatenate([(pairs[:, 0] - pairs[:, 1]) / 2**0.5, matrix])
        low = pairs.sum(1) / 2**0.5
    return np.concatenate([low, matrix])


@pytest.mark.parametrize("lowest", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_the_named_bands_are_the_reals_and_all_others_stay_the_fakes(lowest, lower):
    generator = np.random.default_rng(0)
    fake, real = generator.integers(100, 150, (2, 2, 3, 19, 40), np.uint8)
    found = with_bands_of(fake, real, BandSwap(lowest, lower))
    down, across = _haar(16), _haar(40)
    bands_of_fake, bands_of_real = (down @ clip[:, :, :16].astype(float) @ across.T for clip in (fake, real))
    is_low = np.arange(16)[:, None] < 2, np.arange(40)[None] < 5
    taken = (is_low[0] & is_low[1] & lowest) | ((is_low[0] ^ is_low[1]) & lower)
    wanted = down.T @ np.where(taken, bands_of_real, bands_of_fake) @ across
    np.testing.assert_allclose(found[:, :, :16], wanted, atol=0.5 + 1e-3)  # pixels are whole numbers
    np.testing.assert_array_equal(found[:, :, 16:], fake[:, :, 16:])  # not a whole block of rows
    assert taken.any() == (lowest or lower)
