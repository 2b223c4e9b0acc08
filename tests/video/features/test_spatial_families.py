"""What all families of tiles promise: each tile by itself, mirrored tiles alike, brightness without influence."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE
from fvc_lib.video.features.spatial import blockiness, double_compression, spectrum

NAMES = ("block_dct", "blockiness", "boundary", "double_compression", "noise_residual", "spectrum", "texture")
# Of a flat tile there is nothing to tell, except how much of it is flat.
KNOWN_OF_FLAT = {
    "block_dct": {f"{band}{what}" for band in ("low", "middle", "high") for what in ("", "_zeros")},
    "blockiness": set(),
    "boundary": set(),
    "double_compression": set(),
    "noise_residual": {"third", "square3", "square5", "zeros", "wavelet", "wavelet_coarse"},
    "spectrum": set(),
    "texture": {
        "spots", "corners", "edges", "irregular", "flat", "pattern_entropy", "contrast", "homogeneity", "energy",
        "correlation",
    },
}  # fmt: skip


def measured(name, luma):
    rgb = np.repeat(np.clip(luma, 0, 255).astype(np.uint8)[..., None], 3, axis=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = FEATURES.get(name).measure(luma.astype(np.float32), rgb)
    assert {(value.shape, value.dtype) for value in values.values()} == {((len(luma),), np.dtype(np.float32))}
    return values


def assert_alike(values, others, except_for=(), rtol=2e-3, atol=2e-3):
    for name, value in values.items():
        if name not in except_for:
            np.testing.assert_allclose(value, others[name], rtol=rtol, atol=atol, err_msg=name)


def picture(seed, contrast=1.0, noise=3.0, count=2):
    """Whole grey levels (count, 64, 64): slopes, an edge and noise, as far from 0 and 255 as contrast is small."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:TILE, :TILE]
    direction = draw.uniform(-1, 1, (2, count, 1, 1))
    luma = 128 + 40 * contrast * (direction[0] * (rows / 32 - 1) + direction[1] * (columns / 32 - 1))
    luma += 30 * contrast * (columns + direction[0] * rows > draw.uniform(10, 54, (count, 1, 1)))
    return np.clip(np.rint(luma + draw.normal(0, noise, luma.shape)), 0, 255)


seeds, strengths = st.integers(0, 2**32 - 1), st.floats(0, 2)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(seeds, strengths, st.floats(0, 60))
def test_values_are_numbers_or_missing_and_of_each_tile_alone(name, seed, contrast, noise):
    luma = picture(seed, contrast, noise, count=3)
    values = measured(name, luma)
    assert not any(np.isinf(value).any() for value in values.values())
    for number in range(3):
        alone = measured(name, luma[number : number + 1])
        assert_alike({key: value[number : number + 1] for key, value in values.items()}, alone)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(seeds, st.floats(0.2, 1))
def test_a_mirrored_tile_has_the_same_values(name, seed, contrast):
    luma = picture(seed, contrast)
    values = measured(name, luma)
    # The wavelet's filters are longer on one side.
    wavelet = {"wavelet", "wavelet_coarse", "grain"}
    for mirrored in (luma[:, :, ::-1], luma[:, ::-1], luma.swapaxes(1, 2)):
        others = measured(name, mirrored)
        assert_alike(values, others, except_for=wavelet)
        of_noise = {key: values[key] for key in values.keys() & wavelet - {"grain"}}
        assert_alike(of_noise, others, rtol=0.3, atol=0.3)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(seeds, st.integers(-60, 60))
def test_brightness_alone_changes_nothing(name, seed, offset):
    luma = np.clip(picture(seed, contrast=0.5), 61, 194)
    # Coefficients of whole grey levels may lie at the limit of a bin, and rounding puts them on either side.
    loose = 0.1 if name == "double_compression" else 2e-3
    assert_alike(measured(name, luma), measured(name, luma + offset), rtol=loose, atol=loose)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0, 16, 128, 255])
def test_of_a_flat_tile_is_missing_what_cannot_be_told(name, level):
    values = measured(name, np.full((1, TILE, TILE), level))
    assert {key for key, value in values.items() if np.isfinite(value[0])} == KNOWN_OF_FLAT[name]
    assert all(np.isnan(value[0]) or np.isfinite(value[0]) for value in values.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_tile_of_black_and_white_alone_has_all_values(name):
    luma = 255.0 * (np.random.default_rng(0).random((2, TILE, TILE)) > 0.5)
    assert all(np.isfinite(value).all() for value in measured(name, luma).values())


@pytest.mark.parametrize("name", NAMES)
def test_without_tiles_every_value_is_an_empty_array(name):
    values = measured(name, np.empty((0, TILE, TILE)))
    assert list(values) == [feature.name for feature in FEATURES.get(name).features]


def blocks_of(seed, side, step):
    """A picture (128, 128) of smooth blocks, whose coefficients are multiples of ``step``."""
    from scipy.fft import idctn

    draw = np.random.default_rng(seed)
    coefficients = np.zeros((128 // side, 128 // side, side, side))
    coefficients[..., :3, :3] = step * np.rint(draw.laplace(0, 12, (*coefficients.shape[:2], 3, 3)) / step)
    blocks = idctn(coefficients, axes=(2, 3), norm="ortho")
    return 128 + blocks.swapaxes(1, 2).reshape(128, 128)


def test_a_crop_by_whole_blocks_keeps_the_grid_and_any_other_loses_it():
    luma = np.rint(blocks_of(1, 8, 10) + np.random.default_rng(0).normal(0, 2, (128, 128)))
    crops = np.stack([luma[top : top + TILE, left : left + TILE] for top, left in ((0, 0), (8, 24), (2, 6), (3, 5))])
    grid8, shifted = (blockiness.measure(crops, None)[name] for name in ("grid8", "shifted"))
    assert grid8[:2].min() > 1 > 0.3 > grid8[2:].max()
    assert shifted[:2].max() < shifted[2:].min()
    values = measured("block_dct", np.stack([luma[:TILE, :TILE], np.roll(luma[:TILE, :TILE], (8, -16), (0, 1))]))
    assert_alike({key: value[:1] for key, value in values.items()}, {key: value[1:] for key, value in values.items()})


@pytest.mark.parametrize("step", [6, 12, 24])
def test_the_step_of_an_earlier_quantisation_is_found(step):
    quantised = np.rint(blocks_of(2, 8, step))[:TILE, :TILE]
    plain = np.rint(blocks_of(2, 8, 0.01))[:TILE, :TILE]
    found = double_compression.measure(np.stack([quantised, plain]), None)
    assert found["step"][0] == pytest.approx(step, rel=0.1)
    assert found["same_step"][0] > 15 > 5 > found["same_step"][1]
    fine = double_compression.measure(np.rint(blocks_of(2, 4, step))[None, :TILE, :TILE], None)
    assert fine["fine_blocks"][0] > 8 > found["fine_blocks"][1]


def test_a_period_is_found_off_the_grid_and_the_grid_itself_is_none():
    noise = np.random.default_rng(0).normal(128, 8, (TILE, TILE))
    waves = [np.sin(2 * np.pi * np.arange(TILE) * number / TILE) for number in (21, 24)]
    peaks = spectrum.measure(np.float32([noise, *(noise + 10 * np.outer(wave, wave) for wave in waves)]), None)["peak"]
    assert peaks[1] > peaks[0] + 1
    assert peaks[2] < peaks[0] + 0.2


def test_scaling_up_leaves_a_period_of_second_differences():
    places = np.arange(TILE) * 0.8
    left = places.astype(int)
    share = places - left
    draw = np.random.default_rng(0)
    plain, source = draw.normal(128, 1, (2, TILE, TILE))
    across = source[:, left] * (1 - share) + source[:, left + 1] * share
    scaled = across[left] * (1 - share)[:, None] + across[left + 1] * share[:, None]
    periodic = spectrum.measure(np.float32([plain, scaled]), None)["periodic"]
    assert periodic[1] > 3 > 2.5 > periodic[0]
