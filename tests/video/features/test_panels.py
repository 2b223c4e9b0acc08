"""Panels of a frame: the frame that both ways of decoding give, and what planted patterns look like in them."""

import numpy as np
import pytest

from fvc_lib.services.clip_settings import View
from fvc_lib.video.decode.windows import decode_windows, packed, unpacked
from fvc_lib.video.features.panels import FramePanels, middle_of, panels_of

# Whole groups of pictures and single frames, 8 and 10 bit, packets with times and without.
REAL = (
    "decode/ExoPlayer__c88bea_sample_edit_list.mp4",
    "decode/jcodec__9ab13f_10frames.webm",
    "decode/jcodec__5370a0_test_cat2.h264",
)


def shown(luma: np.ndarray) -> FramePanels:
    found = panels_of(luma.round().clip(0, 255).astype(np.uint8))
    assert found is not None
    return found


def noisy(side: int = 256) -> np.ndarray:
    return 128 + np.random.default_rng(0).normal(0, 4, (side, side))


@pytest.mark.parametrize("name", REAL)
def test_one_frame_alone_is_that_of_the_pass_through_the_whole_video(shared_media, name):
    path = shared_media / name
    whole = decode_windows(path, 4, 16, View(), lambda _number, _frame: None).middle
    assert min(whole.shape) >= 32
    assert max(whole.shape) <= 256
    np.testing.assert_array_equal(middle_of(path), whole)
    np.testing.assert_array_equal(unpacked(packed(whole)), whole)


def test_noise_has_its_level_and_what_is_smooth_leaves_none():
    assert shown(np.add.outer(np.arange(64), np.arange(96))).residual.any() == np.False_
    flat = shown(noisy())
    assert flat.residual.shape == (128, 128)
    assert flat.residual.std() == pytest.approx(4 * np.sqrt(596) / 12, rel=0.05)  # the filter's own norm
    assert flat.power.mean() == pytest.approx(20 * np.log10(4), abs=3)


def test_a_coding_grid_stands_out_at_its_place_and_an_earlier_one_at_another():
    blocks = np.random.default_rng(1).normal(0, 12, (32, 32)).repeat(8, 0).repeat(8, 1)
    for shift, wanted in ((0, {7, 15}), (4, {3, 11})):
        steps = shown(noisy() + np.roll(blocks, shift, (0, 1))).steps
        assert set(np.argsort(steps)[-2:].tolist()) == wanted


def test_a_lattice_of_scaling_is_peaks_off_the_middle_and_blur_empties_high_frequencies():
    rows = np.arange(256)
    lattice = shown(noisy() + 8 * np.cos(2 * np.pi * rows / 4)[:, None]).power
    assert np.unravel_index(lattice.argmax(), lattice.shape) in {(32, 64), (96, 64)}
    smooth = shown(np.mean([np.roll(noisy(), (y, x), (0, 1)) for y in range(3) for x in range(3)], axis=0))
    assert smooth.blocks[6:, 6:].mean() < shown(noisy()).blocks[6:, 6:].mean() / 2
    assert smooth.blocks[:2, :2].mean() > smooth.blocks[6:, 6:].mean()


def test_a_small_picture_has_small_panels_and_a_tiny_one_none():
    assert panels_of(np.zeros((24, 200), np.uint8)) is None
    small = shown(noisy(40))
    assert small.residual.shape == (36, 36)
    assert small.power.shape == (40, 40)
    assert np.isfinite(small.steps).all()
