"""What the families measure: against naive loops, their invariances, and what cannot be measured."""

import math
import warnings
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.fft import idctn
from scipy.ndimage import map_coordinates

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.coding import (
    measure_codec_motion,
    measure_packets,
    measure_quantisers,
    measure_repeats,
    measure_timing,
)
from fvc_lib.video.features.compression import measure_block_dct, measure_double_compression
from fvc_lib.video.features.detail import measure_noise, measure_spectrum
from fvc_lib.video.features.family import TILE, Run, Stream

FAMILIES = ("codec_motion", "packets", "quantisers", "timing")


def stream_of(sizes, is_key=None, seconds=None, codec="h264", **told):
    """A ``Stream`` of packets of these sizes, with one keyframe, 25 a second, unless said otherwise."""
    count = len(sizes)
    is_key = np.arange(count) == 0 if is_key is None else np.array(is_key, bool)
    seconds = np.arange(count) / 25 if seconds is None else np.array(seconds, float)
    return Stream(codec, np.array(sizes, np.int64), is_key, seconds, **told)


def test_packets_are_compared_with_those_of_their_kind():
    is_key, place = np.arange(90) % 30 == 0, np.arange(90)
    for first in range(1, 88, 3):  # decoded as P B B, shown as B B P
        if not is_key[first : first + 3].any():
            place[first : first + 3] = first + 2, first, first + 1
    is_b = np.r_[False, place[1:] < np.maximum.accumulate(place)[:-1]]
    found = measure_packets(stream_of(np.where(is_key, 8000, np.where(is_b, 500, 2000)), is_key, place / 30))
    wanted = {"b_step": 2, "spread": 0, "largest": 0, "key_distance": 30, "odd_groups": 0, "tiny": 0, "key_step": 4}
    assert {name: found[name] for name in wanted} == wanted  # most frames except keyframes are B frames


def test_motion_vectors_are_counted_by_length_and_direction():
    found = measure_codec_motion(stream_of([9], motion=np.float32([[0, 0], [3, 4], [0, 5], [5, 0], [-5, 0]])))
    assert found == pytest.approx({"zero": 0.2, "length": 5, "disorder": 0, "directions": 2})


def test_frames_that_were_keyframes_before_show_their_period():
    draw = np.random.default_rng(1)
    sizes = 1000 * 2 ** draw.normal(0, 0.3, 200)
    plain = measure_packets(stream_of(sizes))
    sizes[7::11] *= 2
    again = measure_packets(stream_of(sizes))
    assert plain["periodicity"] < 4 < 8 < again["periodicity"]
    assert again["period"] == 11


def test_repeated_frames_are_tiny_and_of_layered_codecs_nothing_is_said():
    sizes = np.random.default_rng(2).integers(800, 1200, 80)
    sizes[[20, 41, 60, 77]] = 30
    assert measure_packets(stream_of(sizes))["tiny"] == pytest.approx(4 / 79)
    assert math.isnan(measure_packets(stream_of(sizes, codec="av1"))["tiny"])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_timing_is_that_of_intervals_one_by_one(steps):
    times = np.cumsum([0, *steps]) / 1000
    usual = median(steps)
    ratios = [each / usual for each in steps]
    got = measure_timing(stream_of(np.ones(len(times)), seconds=np.random.default_rng(0).permutation(times)))
    assert got["longest_gap"] == pytest.approx(max(ratios))
    assert got["jitter"] == pytest.approx(sum(min(1, abs(each - 1)) for each in ratios) / len(ratios))
    # Whether an interval is just 1.5 times as long depends on the last digit of its times.
    if not any(abs(each - limit) < 1e-6 for each in ratios for limit in (0.5, 1.5, *np.arange(2.5, 310))):
        assert got["gaps"] == pytest.approx(sum(each > 1.5 for each in ratios) / len(ratios))
        assert got["crowded"] == pytest.approx(sum(each < 0.5 for each in ratios) / len(ratios))
        assert got["missing"] == pytest.approx(sum(max(0, round(each) - 1) for each in ratios) / len(times))


def test_quantisers_are_those_of_frames_compared_with_their_own_type():
    told = np.array([[0.4, 0.01], [0.5, 0.03], [0.6, 0.05], [0.7, 0.07], [np.nan, np.nan]], np.float32)
    intra = np.array([np.nan, 0.1, 0.3, np.nan, np.nan], np.float32)
    got = measure_quantisers(stream_of([9] * 5, frame_types="IPPB?", qp=told, intra=intra))
    assert got == pytest.approx(
        {"level": 0.55, "within": 0.04, "between": 0.05, "key_step": 0.15, "intra": 0.2}, rel=1e-5
    )


def test_what_cannot_be_told_of_a_still_is_missing():
    for name in FAMILIES:
        found = FEATURES.get(name).pooled([FEATURES.get(name).measure(stream_of([500]))])
        assert all(math.isnan(each) for each in found.values())


def test_without_times_the_packets_are_still_compared_and_timing_is_missing():
    stream = stream_of(np.random.default_rng(3).integers(500, 900, 80), seconds=np.full(80, np.nan))
    assert all(math.isnan(each) for each in measure_timing(stream).values())
    told = measure_packets(stream)
    assert {name for name, value in told.items() if math.isnan(value)} == {"b_step", "key_distance", "odd_groups"}


def run_of(luma):
    """A ``Run`` of luma (L, N, 64, 64); small is every eighth pixel of the first tile."""
    luma = np.asarray(luma, np.float32)
    return Run(luma, luma[:, 0, ::8, ::8] if luma.shape[1] else np.zeros((len(luma), 8, 8), np.float32))


def test_pairs_are_compared_one_by_one():
    frames = np.random.default_rng(9).normal(120, 20, (5, 2, TILE, TILE)).astype(np.float32)
    frames[2] = frames[1]
    frames[4, 0] = frames[3, 0]
    got = measure_repeats(run_of(frames))
    assert got["equal"].tolist() == [0, 1, 0, 0]
    assert got["equal_tiles"].tolist() == [0, 1, 0, 0.5]
    differences = [np.abs(frames[n + 1].astype(float) - frames[n]).mean() for n in range(4)]
    np.testing.assert_allclose(got["difference"], differences, rtol=1e-5)
    logarithm = np.sort(np.log2(np.add(differences, 0.05)))
    assert got["dip"] == pytest.approx([np.median(logarithm[1:]) - logarithm[0]], rel=1e-5)
    assert got["jump"] == pytest.approx([logarithm[-1] - np.median(logarithm[:-1])], rel=1e-4)
    for changed in (frames + 30, frames[..., ::-1]):  # brighter, and mirrored
        for name, values in measure_repeats(run_of(changed)).items():
            np.testing.assert_allclose(values, got[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(("num_frames", "num_tiles", "missing"), [
    (2, 2, {"dip", "jump"}), (3, 2, set()), (3, 0, {"equal_tiles", "difference", "dip", "jump"}),
])  # fmt: skip
def test_values_without_frames_or_tiles_to_compare_are_missing(num_frames, num_tiles, missing):
    family = FEATURES.get("repeats")
    pooled = family.pooled(
        [measure_repeats(run_of(np.random.default_rng(2).normal(120, 20, (num_frames, num_tiles, 64, 64))))]
    )
    assert {each.name for each in family.features if np.isnan(pooled[f"repeats_{each.name}_mean"])} == missing


# Features of a flat tile that are known: how much of it is flat. All others are missing.
KNOWN_OF_FLAT = {
    "block_dct": {f"{band}{suffix}" for band in ("low", "middle", "high") for suffix in ("", "_zeros")},
    "double_compression": set(),
    "noise_residual": {"third", "square3", "square5", "zeros", "wavelet", "wavelet_coarse"},
    "sharpness": {"laplacian", "gradient", "edges"},
    "spectrum": set(),
}


def measured(name, luma):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = FEATURES.get(name).measure(luma.astype(np.float32))
    assert {(value.shape, value.dtype) for value in values.values()} == {((len(luma),), np.dtype(np.float32))}
    return values


def assert_alike(values, others, except_for=(), tolerance=2e-3):
    for name in values.keys() - except_for:
        np.testing.assert_allclose(values[name], others[name], rtol=tolerance, atol=tolerance, err_msg=name)


def picture(seed, contrast=1.0, noise=3.0, count=2):
    """Whole grey levels (count, 64, 64): slopes, an edge and noise, the farther from 0 and 255 the less contrast."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:TILE, :TILE]
    direction = draw.uniform(-1, 1, (2, count, 1, 1))
    luma = 128 + 40 * contrast * (direction[0] * (rows / 32 - 1) + direction[1] * (columns / 32 - 1))
    luma += 30 * contrast * (columns + direction[0] * rows > draw.uniform(10, 54, (count, 1, 1)))
    return np.clip(np.rint(luma + draw.normal(0, noise, luma.shape)), 0, 255)


@pytest.mark.parametrize("name", KNOWN_OF_FLAT)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 60), st.integers(-60, 60))
def test_tiles_count_alone_and_neither_mirrors_nor_brightness_change_them(name, seed, noise, offset):
    luma = picture(seed, noise=noise, count=3)
    values = measured(name, luma)
    assert not any(np.isinf(value).any() for value in values.values())
    assert_alike({key: value[1:2] for key, value in values.items()}, measured(name, luma[1:2]))
    plain = np.clip(picture(seed, contrast=0.5), 61, 194)
    values = measured(name, plain)
    # Coefficients of whole grey levels may lie at the limit of a bin, and rounding puts them on either side.
    tolerance = {"block_dct": 0.02, "double_compression": 0.1}.get(name, 2e-3)
    wavelet = {"wavelet", "wavelet_coarse", "grain"}  # its filters are longer on one side
    for mirrored in (plain[:, :, ::-1], plain[:, ::-1], plain.swapaxes(1, 2)):
        assert_alike(values, measured(name, mirrored), except_for=wavelet, tolerance=tolerance)
    assert_alike(values, measured(name, plain + offset), tolerance=tolerance)


@pytest.mark.parametrize("name", KNOWN_OF_FLAT)
def test_flat_tiles_lack_what_cannot_be_measured_and_black_and_white_ones_lack_nothing(name):
    values = measured(name, np.stack([np.full((TILE, TILE), level) for level in (0, 16, 255)]))
    for feature, value in values.items():
        assert np.isfinite(value).all() if feature in KNOWN_OF_FLAT[name] else np.isnan(value).all(), feature
    extremes = 255.0 * (np.random.default_rng(0).random((2, TILE, TILE)) > 0.5)
    assert all(np.isfinite(value).all() for value in measured(name, extremes).values())
    assert list(values) == [each.name for each in FEATURES.get(name).features]


def test_every_filter_finds_the_level_of_gaussian_noise():
    values = measure_noise(np.random.default_rng(0).normal(128, 7, (8, TILE, TILE)).astype(np.float32))
    for name in ("third", "square3", "square5", "wavelet", "wavelet_coarse"):
        assert values[name].mean() == pytest.approx(7, rel=0.05), name
    assert values["tails"].mean() == pytest.approx(3, rel=0.1)


def blocks_of(seed, side, step):
    """Return a picture (64, 64) of smooth blocks whose coefficients are multiples of ``step``."""
    draw, count = np.random.default_rng(seed), TILE // side
    coefficients = np.zeros((count, count, side, side))
    coefficients[..., :3, :3] = step * np.rint(draw.laplace(0, 12, (count, count, 3, 3)) / step)
    return 128 + idctn(coefficients, axes=(2, 3), norm="ortho").swapaxes(1, 2).reshape(TILE, TILE)


def test_a_shift_by_whole_blocks_changes_no_coefficient():
    luma = np.rint(blocks_of(1, 8, 10) + np.random.default_rng(0).normal(0, 2, (TILE, TILE))).astype(np.float32)
    values = measure_block_dct(np.stack([luma, np.roll(luma, (8, -16), (0, 1))]))
    assert_alike({key: value[:1] for key, value in values.items()}, {key: value[1:] for key, value in values.items()})


@pytest.mark.parametrize("step", [6, 12, 24])
def test_the_step_of_an_earlier_quantisation_is_found(step):
    quantised, plain = np.rint(blocks_of(2, 8, step)), np.rint(blocks_of(2, 8, 0.01))
    found = measure_double_compression(np.float32([quantised, plain]))
    assert found["step"][0] == pytest.approx(step, rel=0.1)
    assert found["same_step"][0] > 15 > 5 > found["same_step"][1]
    fine = measure_double_compression(np.rint(blocks_of(2, 4, step))[None].astype(np.float32))
    assert fine["fine_blocks"][0] > 8 > found["fine_blocks"][1]


def test_a_lattice_off_the_grid_is_a_peak_and_scaling_up_leaves_a_period():
    draw = np.random.default_rng(0)
    noise = draw.normal(128, 8, (TILE, TILE))
    waves = [np.sin(2 * np.pi * np.arange(TILE) * number / TILE) for number in (21, 24)]
    peaks = measure_spectrum(np.float32([noise, *(noise + 10 * np.outer(wave, wave) for wave in waves)]))["peak"]
    assert peaks[1] > peaks[0] + 1
    assert peaks[2] < peaks[0] + 0.2  # 24 cycles per tile lie on the grid of blocks
    places = np.arange(TILE) * 0.8
    plain, source = draw.normal(128, 1, (2, TILE, TILE))
    scaled = map_coordinates(source, np.meshgrid(places, places, indexing="ij"), order=1)
    periodic = measure_spectrum(np.float32([plain, scaled]))["periodic"]
    assert periodic[1] > 3 > 2.5 > periodic[0]
