"""Families of tiles: properties that all of them share, and what each finds."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.fft import idctn
from scipy.ndimage import map_coordinates

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.compression import measure_block_dct, measure_double_compression
from fvc_lib.video.features.detail import measure_noise, measure_spectrum
from fvc_lib.video.features.family import TILE

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
    assert list(measured(name, np.empty((0, TILE, TILE)))) == [each.name for each in FEATURES.get(name).features]


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
