"""Families on neighbouring frames: against naive loops, what leaves them as they are, and what cannot be measured."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.ndimage import gaussian_filter
from scipy.signal import convolve2d

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Run
from fvc_lib.video.features.temporal import flicker, motion, noise_consistency, repeats

FAMILIES = ("flicker", "motion", "noise_consistency", "repeats")


def run_of(luma, small=None):
    """A ``Run`` of luma (L, N, 64, 64); small is the tiles of each frame in a row, every fourth pixel."""
    luma = np.asarray(luma, np.float32)
    small = luma[:, :, ::4, ::4].transpose(0, 2, 1, 3).reshape(len(luma), 16, -1) if small is None else small
    return Run(luma, np.zeros((*luma.shape, 3), np.uint8), np.arange(len(luma)) / 25, small)


def moving_picture(draw, num_frames=4, num_tiles=2, noise=2.0):
    """Textured tiles that move by a pixel or two and get other noise in each frame, float32 (L, N, 64, 64)."""
    canvas = 120 + 300 * gaussian_filter(draw.normal(size=(num_tiles, 96, 96)), (0, 3, 3))
    steps = draw.integers(-2, 3, (num_frames, 2)).cumsum(0) + 16
    frames = np.stack([canvas[:, y : y + TILE, x : x + TILE] for y, x in steps.clip(0, 32)])
    return (frames + noise * draw.normal(size=frames.shape)).astype(np.float32)


@pytest.fixture(scope="module")
def run():
    return run_of(moving_picture(np.random.default_rng(5)))


def naive_match(before, after, top, left):
    """The vector of the block at (top, left) and what it leaves, by loops over its three sizes."""
    vector = (0, 0)
    reach = 2
    for scale in (4, 2, 1):
        one, other = (each.reshape(TILE // scale, scale, TILE // scale, scale).mean((1, 3)) for each in (before, after))
        side, limit = 16 // scale, 8 // scale - reach
        block = one[top // scale : top // scale + side, left // scale : left // scale + side]
        centre = [max(-limit, min(limit, 2 * each)) for each in vector]
        best = None
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                y, x = top // scale + centre[0] + down, left // scale + centre[1] + right
                leaves = np.abs(other[y : y + side, x : x + side].astype(float) - block).mean()
                if best is None or leaves < best[0]:
                    best = leaves, (centre[0] + down, centre[1] + right)
        leaves, vector = best
    return vector, leaves


def test_motion_is_that_of_blocks_matched_one_by_one(run):
    got = motion.measure(run)
    for pair in range(3):
        for tile in range(2):
            before, after = run.luma[pair, tile], run.luma[pair + 1, tile]
            found = [naive_match(before, after, top, left) for top in (8, 24, 40) for left in (8, 24, 40)]
            vectors, leaves = np.array([each[0] for each in found]), np.array([each[1] for each in found])
            still = np.abs(after[8:-8, 8:-8] - before[8:-8, 8:-8]).mean()
            wanted = {
                "residual": leaves.mean(),
                "residual_spread": leaves.std(),
                "unexplained": leaves.mean() / still,
                "speed": np.hypot(*vectors.T).mean(),
                "disorder": np.hypot(*(vectors - vectors.mean(0)).T).mean(),
            }
            for name, value in wanted.items():
                assert got[name][pair, tile] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    one, other = got["residual"][:-1], got["residual"][1:]
    np.testing.assert_allclose(got["unsteady"], np.abs(other - one) / (one + other), rtol=1e-6)


@given(st.integers(-6, 6), st.integers(-6, 6), st.integers(0, 99))
def test_blocks_that_move_by_whole_pixels_are_found_but_for_one_in_nine(down, right, seed):
    canvas = 400 * gaussian_filter(np.random.default_rng(seed).normal(size=(80, 80)), 3)
    canvas = canvas.astype(np.float32)
    before, after = canvas[8:72, 8:72], canvas[8 - down : 72 - down, 8 - right : 72 - right]
    vectors, residuals = motion.match_blocks(before[None], after[None])
    found = (vectors == (down, right)).all(2)
    assert found.sum() >= 8
    assert (residuals[found] == 0).all()


def test_flicker_is_what_a_fitted_line_leaves(run):
    got = flicker.measure(run)
    place = np.arange(4)

    def off_line(values):
        return values - np.polyval(np.polyfit(place, values, 1), place)

    light = off_line(np.array([frame.astype(float).mean() for frame in run.small]))
    assert got["light"] == pytest.approx([light.std()], rel=1e-4)
    alternating = off_line((-1.0) ** place)
    share = (alternating @ light) ** 2 / (alternating @ alternating) / (light @ light)
    assert got["alternation"] == pytest.approx([share], rel=1e-4)
    for tile in range(2):
        pixels = run.luma[:, tile].astype(float)
        of_tile = off_line(pixels.mean((1, 2))) - light
        assert got["tile_light"][tile] == pytest.approx(of_tile.std(), rel=1e-4)
        contrast = off_line(np.log2(pixels.std((1, 2)) + 0.5))
        assert got["contrast"][tile] == pytest.approx(contrast.std(), rel=1e-3)


def test_steady_change_of_light_is_no_flicker_and_alternating_light_is():
    still = np.broadcast_to(moving_picture(np.random.default_rng(1), 1), (4, 2, TILE, TILE))
    steps = np.arange(4)[:, None, None, None]
    assert flicker.measure(run_of(still + 3.0 * steps))["light"] == pytest.approx([0], abs=1e-4)
    flickering = flicker.measure(run_of(still + 5.0 * (-1.0) ** steps))
    assert flickering["light"] > 4
    assert flickering["alternation"] == pytest.approx([1])
    assert flickering["tile_light"] == pytest.approx([0, 0], abs=1e-4)


def test_noise_consistency_is_that_of_convolved_tiles(run):
    got = noise_consistency.measure(run)
    across = np.array([1, -2, 1])
    residual = np.array(
        [[convolve2d(tile.astype(float), np.outer(across, across), "valid") for tile in frame] for frame in run.luma]
    )
    level = np.empty((4, 2))
    for frame in range(4):
        for tile in range(2):
            inner = np.abs(residual[frame, tile, 1:-1, 1:-1])
            blocks = sorted(inner[y : y + 6, x : x + 6].mean() for y in range(0, 60, 6) for x in range(0, 60, 6))
            level[frame, tile] = blocks[24] * np.sqrt(np.pi / 2) / 6
    np.testing.assert_allclose(got["level"], level, rtol=1e-4)
    logarithm = np.log2(level + 0.05)
    np.testing.assert_allclose(got["step"], np.abs(logarithm[1:] - logarithm[:-1]), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got["uneven"], logarithm.std(1), rtol=1e-3)
    for pair in range(3):
        for tile in range(2):
            one, other = residual[pair, tile], residual[pair + 1, tile]
            wanted = (one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())
            assert got["correlation"][pair, tile] == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_noise_level_follows_the_noise_and_not_the_light_or_a_slope():
    draw = np.random.default_rng(7)
    slope = np.add.outer(np.arange(TILE), 2.0 * np.arange(TILE))
    levels = [
        noise_consistency.measure(run_of([[slope + sigma * draw.normal(size=(TILE, TILE))]]))["level"].item()
        for sigma in (1, 2, 4)
    ]
    assert levels[0] == pytest.approx(0.9, abs=0.1)  # of the quieter blocks
    assert levels[1] / levels[0] == pytest.approx(2, rel=0.1)
    assert levels[2] / levels[0] == pytest.approx(4, rel=0.1)


def test_repeats_are_pairs_compared_one_by_one():
    frames = moving_picture(np.random.default_rng(9), 5)
    frames[2] = frames[1]
    frames[4, 0] = frames[3, 0]
    got = repeats.measure(run_of(frames))
    assert got["equal"].tolist() == [0, 1, 0, 0]
    assert got["equal_tiles"].tolist() == [0, 1, 0, 0.5]
    differences = [np.abs(frames[n + 1].astype(float) - frames[n]).mean() for n in range(4)]
    np.testing.assert_allclose(got["difference"], differences, rtol=1e-5)
    logarithm = np.sort(np.log2(np.add(differences, 0.05)))
    assert got["dip"] == pytest.approx([np.median(logarithm[1:]) - logarithm[0]], rel=1e-5)
    assert got["jump"] == pytest.approx([logarithm[-1] - np.median(logarithm[:-1])], rel=1e-4)


def measured(run):
    """Every value of every family, by family and feature; the same names as declared."""
    found = {}
    for name in FAMILIES:
        family = FEATURES.get(name)
        values = family.measure(run)
        family.pooled([values])  # refuses names that are not declared
        found |= {f"{name}_{each}": np.sort(np.ravel(value)) for each, value in values.items()}
    return found


@settings(max_examples=10)
@given(st.integers(0, 999), st.integers(1, 5), st.sampled_from([(-1,), (-2,), (-1, -2)]))
def test_a_mirrored_video_has_the_same_values(seed, num_frames, axes):
    luma = moving_picture(np.random.default_rng(seed), num_frames)
    small = luma[:, 0, ::2, ::2]
    plain, mirrored = measured(run_of(luma, small)), measured(run_of(np.flip(luma, axes), np.flip(small, axes)))
    for name, values in plain.items():
        np.testing.assert_allclose(mirrored[name], values, rtol=2e-3, atol=2e-3, err_msg=name)


@settings(max_examples=10)
@given(st.integers(0, 999), st.integers(1, 5), st.integers(-30, 30))
def test_a_brighter_video_has_the_same_values(seed, num_frames, added):
    luma = moving_picture(np.random.default_rng(seed), num_frames)
    brighter = measured(run_of(luma + np.float32(added)))
    for name, values in measured(run_of(luma)).items():
        np.testing.assert_allclose(brighter[name], values, rtol=2e-3, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("num_tiles", [0, 1, 3])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["flat", "black and white", "textured"])
def test_what_cannot_be_measured_is_missing_and_all_else_finite(num_frames, num_tiles, kind):
    luma = moving_picture(np.random.default_rng(2), num_frames, max(num_tiles, 1))
    luma = {"flat": np.full_like(luma, 16), "black and white": np.where(luma > 120, 255, 0)}.get(kind, luma)
    run = run_of(luma[:, :num_tiles], luma[:, 0, ::8, ::8])
    missing = {
        f"{name}_{feature.name}"
        for name in FAMILIES
        for feature in FEATURES.get(name).features
        for pooled in [FEATURES.get(name).pooled([FEATURES.get(name).measure(run)])]
        if not np.isfinite(pooled[f"{name}_{feature.name}_mean"])
    }
    assert missing == expected_missing(num_frames, num_tiles, kind)


def expected_missing(num_frames, num_tiles, kind):
    of = {name: {f"{name}_{each.name}" for each in FEATURES.get(name).features} for name in FAMILIES}
    missing = set()
    if num_frames < 2 or not num_tiles:
        missing |= of["motion"] | of["repeats"] - ({"repeats_equal"} if num_frames > 1 else set())
    if not num_tiles:
        missing |= of["noise_consistency"] | {"flicker_tile_light", "flicker_contrast"}
    if num_frames < 2:
        missing |= {"noise_consistency_correlation", "noise_consistency_step"}
    if num_frames < 3:
        missing |= of["flicker"] | {"motion_unsteady", "repeats_dip", "repeats_jump"}
    if num_frames < 4:
        missing |= {"flicker_alternation"}
    if num_tiles == 1:
        missing |= {"noise_consistency_uneven"}
    if kind == "flat":  # nothing moves, nothing is noisy, nothing flickers
        missing |= {"motion_unexplained", "motion_unsteady", "noise_consistency_correlation", "flicker_alternation"}
    return missing


def test_every_second_frame_without_noise_shows_in_the_steps_of_its_level():
    luma = moving_picture(np.random.default_rng(4), 4, 4)
    smooth = luma.copy()
    smooth[::2] = gaussian_filter(luma[::2], (0, 0, 0.8, 0.8))
    real, fake = (noise_consistency.measure(run_of(frames))["step"] for frames in (luma, smooth))
    assert fake.min() > 2 * real.max()
