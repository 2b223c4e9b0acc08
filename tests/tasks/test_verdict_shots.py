"""What a video consists of: cuts where they are and nowhere else, black frames, stills, slide shows, motion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.tasks.video.verdicts.shots import footage_of, is_black, is_frozen, length_sentences
from fvc_lib.video.decode.clip import decode_clip

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


@pytest.mark.parametrize("height", [SIDE, SIDE // 4])
def test_what_moves_in_one_place_or_slowly_is_no_still(height):
    """Of a mean over all cells little is left: a mouth that moves, black bars around, a slow change of everything."""
    talking = np.repeat(scene(1, 1), 40, axis=0)
    talking[:, :, 20:26, 20:26] = (100 + 40 * np.sin(np.arange(40)))[:, None, None, None]
    drifting = np.stack([scene(1, 1)[0] // 2 + step // 2 for step in range(40)])
    for frames in (talking, drifting):
        frames[:, :, : (SIDE - height) // 2], frames[:, :, (SIDE + height) // 2 :] = 0, 0
        found = footage_of(frames, times(40))
        assert found.sentences == ()
        assert found.still_share < 0.5


def test_the_time_in_which_nothing_moves_is_that_of_long_stretches():
    frames = np.concatenate([np.repeat(scene(1, 1), 30, axis=0), scene(1, 10, speed=2.0)])
    found = footage_of(frames, times(40))
    assert found.still_share == pytest.approx(29 / 39, abs=0.03)
    frames = np.concatenate([scene(1, 4, speed=2.0), np.repeat(scene(2, 1), 36, axis=0)])
    assert "90% of the time nothing moves" in footage_of(frames, times(40)).sentences[0]


@pytest.mark.parametrize("side", [112, 224])
@pytest.mark.parametrize(
    ("name", "is_still"),
    [
        ("labelled/fake/SadTalker__53716f_still1.mp4", False),
        ("clips/real/lipnet__2122707c.mpg", False),
        ("clips/fake/wav2lip__e2c7b96d.avi", False),
        ("decode/ExoPlayer__1361bd_pixel-motion-photo-2-hevc-tracks.mp4", False),
        ("decode/ExoPlayer__d26a05_sample.mp4", False),
        ("decode/ExoPlayer__2a4b1e_sample_with_av1c.mp4", True),
        ("decode/ExoPlayer__83eecc_sample_h263.ts", True),
    ],
)
def test_of_real_files_those_in_which_nothing_moves_are_stills(name, is_still, side):
    path = Path(__file__).resolve().parents[3] / "shared" / "media" / name
    if not path.is_file():
        pytest.skip("needs the media files beside the repository")
    clip = decode_clip(path, 60, side)
    box = clip.content
    picture = clip.frames[..., box.top : box.top + box.height, box.left : box.left + box.width]
    found = footage_of(picture, clip.pts_seconds)
    assert (found.still_share == 1.0) == is_still
    assert bool(found.sentences) == is_still


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


def test_what_is_black_or_frozen_is_told_from_a_dark_and_from_a_slow_picture():
    dark, bright = np.full((2, 3, 3, SIDE, SIDE), 9, np.uint8), np.full((2, 3, 3, SIDE, SIDE), 120, np.uint8)
    noisy = bright + np.random.default_rng(0).integers(0, 3, bright.shape, np.uint8)
    moving = scene(3, 6, speed=1.0).reshape(2, 3, 3, SIDE, SIDE)
    assert [is_black(clips) for clips in (dark, bright, moving, moving // 4)] == [True, False, False, False]
    assert [is_frozen(clips) for clips in (dark, bright, noisy, moving)] == [True, True, True, False]
    apart = bright.copy()
    apart[1] += 4  # each clip is still, and the second shows something else
    assert not is_frozen(apart)


@pytest.mark.parametrize(
    ("num_frames", "seconds", "stated", "told"),
    [
        (100, 4.0, (100, 4.0), ""),
        (98, 3.92, (100, 4.0), ""),  # a frame or two are lost in many files
        (100, 4.0, (None, None), ""),
        (60, 2.4, (100, 4.0), "states 100 frames, of which 60 could be decoded, and 4.0 seconds, of which 2.4 could"),
        (60, 2.4, (None, 4.0), "states 4.0 seconds, of which 2.4 could be decoded: the file was cut off"),
        (4, 1.2, (4, 1.2), "It has 4 frames and the networks look at 8"),
        (12, 0.48, (12, 0.48), "Very short: 12 frames, 0.48 seconds."),
    ],
)
def test_a_length_is_remarked_on_where_it_is_short_or_not_what_the_container_states(num_frames, seconds, stated, told):
    found = " ".join(length_sentences(num_frames, seconds, 8, *stated))
    assert told in found
    assert bool(told) == bool(found)
