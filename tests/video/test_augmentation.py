import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import AUGMENTATIONS
from fvc_lib.video.augmentations import (
    Affine,
    AugmentationPlan,
    AugmentationSettings,
    Blur,
    Color,
    Cutout,
    Downscale,
    Jpeg,
    Noise,
    Recompress,
    apply_augmentation,
    draw_augmentation,
)
from tests.video.conftest import plan_of
from tests.video.mutations import textured_frames

ALL = tuple(AUGMENTATIONS.names())
names = st.lists(st.sampled_from(ALL), unique=True).map(tuple)
settings = st.builds(AugmentationSettings, names)
video_ids = st.text("0123456789abcdef", min_size=16, max_size=16)
numbers = st.integers(1, 9)


def _clip(num_frames: int = 6, height: int = 20, width: int = 28) -> np.ndarray:
    clip = np.random.default_rng(5).integers(1, 255, (num_frames, 3, height, width)).astype(np.uint8)
    clip[:, :, :4] = 0  # letterbox bars
    clip[:, :, -4:] = 0
    return clip


@given(video_ids, numbers, settings, st.integers(1, 12))
def test_a_clip_is_the_same_whatever_was_drawn_before_it_and_keeps_shape_bars_and_source(
    video_id, number, chosen, num_frames
):
    clip = _clip(num_frames)
    plan = draw_augmentation(video_id, number, chosen, num_frames)
    out = apply_augmentation(clip, plan)
    draw_augmentation("another", number + 1, chosen, num_frames)
    same = AugmentationSettings(tuple(reversed(chosen.names)))
    assert draw_augmentation(video_id, number, same, num_frames) == plan
    np.testing.assert_array_equal(apply_augmentation(clip, plan), out)
    assert (out.dtype, out.shape) == (np.uint8, clip.shape)
    assert not out[:, :, [0, 1, 2, 3, -4, -3, -2, -1]].any()
    assert not np.shares_memory(out, clip)
    np.testing.assert_array_equal(clip, _clip(num_frames))
    entries = json.loads(plan.to_json())
    assert {entry["name"] for entry in entries} <= set(chosen.names)
    assert plan_of(plan.to_json()) == plan
    if set(chosen.names) - {"frame_drop", "frame_duplicate", "frame_reverse"}:
        assert entries


@given(video_ids, numbers, st.sampled_from(["frame_drop", "frame_duplicate"]), st.integers(2, 20))
def test_frames_are_dropped_and_duplicated_in_order_and_length_is_kept(video_id, number, name, num_frames):
    (operation,) = draw_augmentation(video_id, number, AugmentationSettings((name,)), num_frames).operations
    order = list(operation.order)
    assert len(order) == num_frames
    assert order == sorted(order)
    assert set(order) < set(range(num_frames))  # something is gone: dropped, or pushed over the end


@pytest.mark.parametrize(("number", "allowed"), [(0, ALL), (1, ())])
def test_the_original_and_no_operations_change_nothing(number, allowed):
    plan = draw_augmentation("ab" * 8, number, AugmentationSettings(allowed), 6)
    assert plan == AugmentationPlan()
    np.testing.assert_array_equal(apply_augmentation(_clip(), plan), _clip())


def test_different_videos_numbers_and_settings_get_different_plans():
    choices = [AugmentationSettings(names) for names in (ALL, ALL[::-1], ALL[:-1])]
    plans = {
        draw_augmentation(video_id, number, chosen, 6).to_json()
        for video_id in ("a" * 16, "b" * 16)
        for number in (1, 2, 3)
        for chosen in choices
    }
    assert len(plans) == 12  # the order of the names does not matter


def test_what_cannot_be_meant_is_named():
    with pytest.raises(UsageError, match="'flip'"):
        AugmentationSettings(("flipp",))
    with pytest.raises(ValueError, match="uint8"):
        apply_augmentation(np.zeros((2, 3, 4, 4)), AugmentationPlan())


@pytest.fixture
def pixels():
    return np.random.default_rng(0).uniform(0, 255, (3, 3, 12, 17)).astype(np.float32)


def test_an_affine_matches_a_naive_loop(pixels):
    got = Affine(7, 1.1, 0.03, -0.05).apply(pixels.copy())
    height, width = 12, 17
    rows, columns = np.mgrid[:height, :width]
    cosine, sine = math.cos(math.radians(7)) / 1.1, math.sin(math.radians(7)) / 1.1
    for y, x in ((0, 0), (5, 8), (11, 16), (3, 14)):
        u, v = x - 8 - 0.03 * width, y - 5.5 + 0.05 * height
        source_x, source_y = cosine * u + sine * v + 8, cosine * v - sine * u + 5.5
        weights = np.maximum(0, 1 - np.abs(source_x - columns)) * np.maximum(0, 1 - np.abs(source_y - rows))
        np.testing.assert_allclose(got[:, :, y, x], (weights * pixels).sum((2, 3)), atol=1e-2)


def test_colour_factors_do_what_they_are_called(pixels):
    assert Color(1.5, 1, 1).apply(pixels.copy()).mean() == pytest.approx(1.5 * pixels.mean(), rel=1e-4)
    flat = Color(1, 0.5, 1).apply(pixels.copy())
    assert flat.mean() == pytest.approx(pixels.mean(), rel=1e-4)
    assert flat.std() == pytest.approx(0.5 * pixels.std(), rel=1e-3)
    grey = Color(1, 1, 0).apply(pixels.copy())
    np.testing.assert_allclose(grey[:, 0], grey[:, 2], atol=1e-3)


def test_noise_has_its_strength_and_another_pattern_in_each_frame(pixels):
    grey = np.full((2, 3, 64, 64), 128, np.float32)
    noise = Noise(5.0, 7).apply(grey.copy()) - 128
    assert noise.std() == pytest.approx(5, rel=0.05)
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.05
    np.testing.assert_array_equal(noise, Noise(5.0, 7).apply(grey.copy()) - 128)


def test_blur_keeps_the_mean_and_matches_a_naive_sum():
    impulse = np.zeros((1, 3, 21, 21), np.float32)
    impulse[..., 10, 10] = 100
    got = Blur(1.2).apply(impulse.copy())
    weights = np.exp(-0.5 * (np.arange(-4, 5) / 1.2) ** 2)
    weights /= weights.sum()
    np.testing.assert_allclose(got[0, 0, 6:15, 6:15], 100 * np.outer(weights, weights), atol=1e-3)
    assert got.sum() == pytest.approx(impulse.sum(), rel=1e-4)


def test_a_cutout_hides_one_rectangle_in_all_frames_under_the_mean_colour(pixels):
    mean = pixels.mean(axis=(0, 2, 3))
    got = Cutout(0.25, 0.5, 0.5, 0.25).apply(pixels.copy())
    changed = (got != pixels).any(axis=(0, 1))
    assert changed[6:9, 4:13].all()
    assert changed.sum() == changed[6:9, 4:13].size
    np.testing.assert_allclose(got[:, :, 7, 7], np.broadcast_to(mean, (3, 3)), rtol=1e-4)


@pytest.mark.parametrize(
    ("weak", "strong"), [(Recompress(23), Recompress(40)), (Jpeg(90), Jpeg(40)), (Downscale(0.7), Downscale(0.25))]
)
def test_what_platforms_do_keeps_the_picture_and_takes_more_of_it_at_a_stronger_level(weak, strong):
    frames = np.stack(textured_frames(6, 64, 48))[:, :46, :63]  # an odd side
    clip = np.moveaxis(frames, -1, 1).astype(np.float32)
    light, heavy, again = (operation.apply(clip.copy()) for operation in (weak, strong, strong))
    assert 0 < np.abs(light - clip).mean() < np.abs(heavy - clip).mean() < 60
    np.testing.assert_array_equal(heavy, again)
    assert heavy.shape == clip.shape
    grey = np.full((2, 3, 15, 20), 77, np.float32)
    np.testing.assert_allclose(weak.apply(grey.copy()), grey, atol=1.5)  # no shift of light or colour
