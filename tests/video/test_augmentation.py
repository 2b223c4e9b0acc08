import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import AUGMENTATIONS
from fvc_lib.video.augmentations import AugmentationPlan, AugmentationSettings, apply_augmentation, draw_augmentation
from tests.video.conftest import plan_of

ALL = tuple(AUGMENTATIONS.names())
names = st.lists(st.sampled_from(ALL), unique=True).map(tuple)
settings = st.builds(AugmentationSettings, names, st.floats(0, 3))
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
    same = AugmentationSettings(tuple(reversed(chosen.names)), chosen.strength)
    assert draw_augmentation(video_id, number, same, num_frames) == plan
    np.testing.assert_array_equal(apply_augmentation(clip, plan), out)
    assert (out.dtype, out.shape) == (np.uint8, clip.shape)
    assert not out[:, :, [0, 1, 2, 3, -4, -3, -2, -1]].any()
    assert not np.shares_memory(out, clip)
    np.testing.assert_array_equal(clip, _clip(num_frames))
    entries = json.loads(plan.to_json())
    assert {entry["name"] for entry in entries} <= set(chosen.names)
    assert plan_of(plan.to_json()) == plan
    if chosen.strength and set(chosen.names) - {"frame_drop", "frame_duplicate", "frame_reverse"}:
        assert entries


@given(video_ids, numbers, st.sampled_from(["frame_drop", "frame_duplicate"]), st.integers(2, 20), st.floats(0.1, 3))
def test_frames_are_dropped_and_duplicated_in_order_and_length_is_kept(video_id, number, name, num_frames, strength):
    (operation,) = draw_augmentation(video_id, number, AugmentationSettings((name,), strength), num_frames).operations
    order = list(operation.order)
    assert len(order) == num_frames
    assert order == sorted(order)
    assert set(order) < set(range(num_frames))  # something is gone: dropped, or pushed over the end


@pytest.mark.parametrize(("number", "strength", "allowed"), [(0, 1.0, ALL), (1, 0.0, ALL), (1, 1.0, ())])
def test_the_original_zero_strength_and_no_operations_change_nothing(number, strength, allowed):
    plan = draw_augmentation("ab" * 8, number, AugmentationSettings(allowed, strength), 6)
    assert plan == AugmentationPlan()
    np.testing.assert_array_equal(apply_augmentation(_clip(), plan), _clip())


def test_different_videos_numbers_and_settings_get_different_plans():
    plans = {
        draw_augmentation(video_id, number, AugmentationSettings(ALL, strength), 6).to_json()
        for video_id in ("a" * 16, "b" * 16)
        for number in (1, 2, 3)
        for strength in (1.0, 1.5)
    }
    assert len(plans) == 12


def test_settings_hash_ignores_order_and_feels_everything_else():
    same = {
        AugmentationSettings(("flip", "noise"), 1.0).settings_hash,
        AugmentationSettings(("noise", "flip"), 1).settings_hash,
    }
    others = {
        AugmentationSettings(("flip",), 1.0).settings_hash,
        AugmentationSettings(("flip", "noise"), 1.1).settings_hash,
    }
    assert (len(same), len(same | others)) == (1, 3)


def test_what_cannot_be_meant_is_named():
    with pytest.raises(UsageError, match="'flip'"):
        AugmentationSettings(("flipp",))
    with pytest.raises(UsageError, match="strength"):
        AugmentationSettings(("flip",), float("nan"))
    with pytest.raises(ValueError, match="uint8"):
        apply_augmentation(np.zeros((2, 3, 4, 4)), AugmentationPlan())
