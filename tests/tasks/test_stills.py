"""A video is called a still only where nothing moves in it, however little of the picture moves."""

from __future__ import annotations

import numpy as np
import pytest

from fvc_lib.tasks.video.verdicts.unfamiliar import is_frozen


def clips_of(frames):
    return np.asarray(frames, np.uint8)[None]


@pytest.mark.parametrize("size", [4, 20])
def test_what_moves_in_one_place_is_no_still(size):
    """As in a talking head: a mouth of some pixels in a picture with bars, the rest of which stays as it is."""
    frames = np.full((8, 3, 112, 112), 90, np.uint8)
    frames[..., :30, :] = frames[..., 82:, :] = 0  # bars of a letterboxed picture
    assert is_frozen(clips_of(frames))
    for number in range(0, 8, 2):
        frames[number, :, 60 : 60 + size, 50 : 50 + size] = 180
    assert not is_frozen(clips_of(frames))


def test_slow_motion_is_no_still_and_noise_of_an_encoder_is_none():
    generator = np.random.default_rng(0)
    noisy = 90 + generator.integers(-2, 3, (8, 3, 112, 112))
    assert is_frozen(clips_of(noisy))
    slow = 90 + np.arange(8)[:, None, None, None] * np.ones((8, 3, 112, 112))
    assert not is_frozen(clips_of(slow))
