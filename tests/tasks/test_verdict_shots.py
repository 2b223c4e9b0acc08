"""What a video consists of: cuts where they are and nowhere else, black frames, stills, slide shows, motion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.tasks.video.verdicts.shots import footage_of

SIDE = 48


def scene(seed: int, num_frames: int, speed: float = 1.0) -> np.ndarray:
    """uint8 (T, 3, S, S): blurred noise that moves to the right, ``speed`` pixels a frame."""
    values = np.random.default_rng(seed).uniform(30, 225, (3, 6, 6))
    wide = np.kron(values, np.ones((16, 16)))
    return np.stack([np.roll(wide, int(speed * t), axis=2)[:, :SIDE, :SIDE] for t in range(num_frames)]).astype(
        np.uint8
    )


def times(num_frames: int, rate: float = 5.0) -> np.ndarray:
    return np.arange(num_frames) / rate


@given(st.lists(st.integers(4, 12), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=25)
def test_cuts_are_found_where_they_are_and_nowhere_else(lengths, seed):
    frames = np.concatenate([scene(100 * seed + place, length) for place, length in enumerate(lengths)])
    found = footage_of(frames, times(len(frames)))
    np.testing.assert_allclose(found.cuts, np.cumsum(lengths)[:-1] / 5.0)
    assert (f"{len(lengths)} shots" in " ".join(found.sentences)) == (len(lengths) > 1)
    assert found.black_share == 0


def test_fast_motion_and_a_flicker_of_light_are_no_cuts():
    frames = scene(1, 30, speed=5.0)
    assert footage_of(frames, times(30)).cuts.size == 0
    light = np.where(np.arange(30) % 2, 1.0, 0.85)[:, None, None, None]
    assert footage_of((frames * light).astype(np.uint8), times(30)).cuts.size == 0


def test_a_still_with_coding_noise_and_a_slide_show_are_told_apart_from_a_shot():
    noise = np.random.default_rng(3).integers(-2, 3, (24, 3, SIDE, SIDE))
    still = np.clip(scene(1, 1).astype(int) + noise, 0, 255).astype(np.uint8)
    assert footage_of(still, times(24)).still_share == 1
    assert "A still" in footage_of(still, times(24)).sentences[0]
    slides = np.concatenate([np.repeat(scene(seed, 1), 8, axis=0) for seed in range(3)])
    assert "A slide show" in footage_of(slides, times(24)).sentences[0]
    assert footage_of(scene(1, 24), times(24)).sentences == ()


@pytest.mark.parametrize(("num_black", "said"), [(0, ""), (5, "25% of the frames"), (20, "nothing to judge")])
def test_black_frames_are_counted(num_black, said):
    frames = scene(2, 20)
    frames[:num_black] = 16
    found = footage_of(frames, times(20))
    assert found.black_share == num_black / 20
    assert said in " ".join(found.sentences)


def test_frames_too_far_apart_tell_nothing_about_cuts_and_say_so():
    frames = np.concatenate([scene(seed, 3) for seed in range(4)])
    found = footage_of(frames, times(12, rate=0.5))
    assert found.cuts.size == 0
    assert "too far to tell a cut from motion" in found.sentences[-1]


@pytest.mark.parametrize("shape", [(1, 3, SIDE, SIDE), (2, 3, 1, 1), (3, 3, 5, 7)])
def test_one_frame_and_tiny_frames_are_looked_at_too(shape):
    found = footage_of(np.full(shape, 128, np.uint8), times(shape[0]))
    assert (found.still_share, found.cuts.size) == (1.0, 0)
