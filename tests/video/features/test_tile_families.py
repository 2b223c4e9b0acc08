"""Families of tiles: against slow versions written from their definitions, and properties that all of them share."""

import itertools
import math
import warnings

import numpy as np
import pytest
import pywt
from hypothesis import given, settings, strategies as st
from scipy.fft import dctn, idctn

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.compression import measure_block_dct, measure_double_compression
from fvc_lib.video.features.detail import measure_spectrum
from fvc_lib.video.features.family import TILE
from fvc_lib.video.features.noise import measure as measure_noise

# Features of a flat tile that are known: how much of it is flat. All others are missing.
KNOWN_OF_FLAT = {
    "block_dct": {f"{band}{suffix}" for band in ("low", "middle", "high") for suffix in ("", "_zeros")},
    "double_compression": set(),
    "noise_residual": {"third", "square3", "square5", "zeros", "wavelet", "wavelet_coarse"},
    "sharpness": {"laplacian", "gradient", "edges"},
    "spectrum": set(),
}


def filtered(tile, kernel):
    """Each pixel's neighbourhood times the kernel, where it lies within the tile."""
    height, width = np.shape(kernel)
    return np.array(
        [
            [
                sum(
                    kernel[down][right] * tile[row + down, column + right]
                    for down in range(height)
                    for right in range(width)
                    if kernel[down][right]
                )
                for column in range(TILE - width + 1)
            ]
            for row in range(TILE - height + 1)
        ]
    )


SQUARE3 = [[-1, 2, -1], [2, -4, 2], [-1, 2, -1]]
SQUARE5 = [[-1, 2, -2, 2, -1], [2, -6, 8, -6, 2], [-2, 8, -12, 8, -2], [2, -6, 8, -6, 2], [-1, 2, -2, 2, -1]]


def noise_level(residual, kernel):
    return math.sqrt(math.pi / 2) * np.abs(residual).mean() / math.sqrt(np.square(kernel).sum())


def paired(residual, down, right):
    pairs = [
        (residual[row, column], residual[row + down, column + right])
        for row, column in itertools.product(range(62), range(62))
        if row + down < 62 and 0 <= column + right < 62
    ]
    one, other = np.transpose(pairs)
    return 2 * (one * other).sum() / (one @ one + other @ other)


def naive_noise_residual(tile):
    third = [[1, -3, 3, -1]]
    square3, square5 = filtered(tile, SQUARE3), filtered(tile, SQUARE5)
    details = [level[2] for level in pywt.wavedec2(tile, "db2", level=2)[:0:-1]]
    fine, coarse = (np.median(np.abs(each[2:-2, 2:-2])) / 0.67448975 for each in details)
    thirds = [noise_level(filtered(each, third), third) for each in (tile, tile.T)]
    return {
        "third": np.mean(thirds),
        "square3": noise_level(square3, SQUARE3),
        "square5": noise_level(square5, SQUARE5),
        "zeros": np.mean([abs(value) / 4 < 0.5 for value in square3.ravel()]),
        "tails": np.mean(square5**4) / np.mean(square5**2) ** 2,
        "neighbours": (paired(square3, 0, 1) + paired(square3, 1, 0)) / 2,
        "diagonal": (paired(square3, 1, 1) + paired(square3, 1, -1)) / 2,
        "wavelet": fine,
        "wavelet_coarse": coarse,
        "grain": math.log2(coarse / fine) if fine and coarse else math.nan,
    }


def blocks(tile, side):
    for top, left in itertools.product(range(0, TILE, side), range(0, TILE, side)):
        yield dctn(tile[top : top + side, left : left + side], norm="ortho")


def naive_block_dct(tile):
    bands = {"low": range(1, 4), "middle": range(4, 8), "high": range(8, 15)}
    values, scales = {}, {}
    for band, orders in bands.items():
        sizes = [abs(block[u, v]) for block in blocks(tile, 8) for u in range(8) for v in range(8) if u + v in orders]
        scales[band] = np.mean(sizes)
        values[band] = scales[band]
        values[f"{band}_zeros"] = np.mean([size < 0.5 for size in sizes])
        values[f"{band}_shape"] = scales[band] / math.sqrt(np.mean(np.square(sizes)))
    digits = [0] * 10
    for block in blocks(tile, 8):
        for size in np.abs(block).ravel()[1:]:
            if size >= 1:
                digits[int(f"{size:.12e}"[0])] += 1
    benford = [math.log10(1 + 1 / digit) for digit in range(1, 10)]
    shares = np.divide(digits[1:], sum(digits))
    distance = sum((share - law) ** 2 / law for share, law in zip(shares, benford, strict=True))
    return {**values, "decay": math.log2(scales["low"] / scales["high"]), "first_digits": distance}


def comb(sizes, step):
    """How far sizes lie at multiples of a step, each rounded to quarters of a grey level."""
    phases = [math.floor(4 * size + 0.54) / 4 / step for size in sizes if 4 * size + 0.54 < 512]
    counted = [phase for phase in phases if 0.5 < phase < 6.5]
    return sum(math.cos(2 * math.pi * phase) for phase in counted) / math.sqrt(max(1, len(counted)) / 2)


def naive_double_compression(tile):
    steps = [3 * 2 ** (number / 8) for number in range(33)]
    by_frequency = {(u, v): [] for u in range(5) for v in range(5) if 0 < u + v <= 4}
    for block in blocks(tile, 8):
        for (u, v), sizes in by_frequency.items():
            sizes.append(abs(block[u, v]))
    fine = [abs(block[u, v]) for block in blocks(tile, 4) for u in range(3) for v in range(3) if 0 < u + v <= 2]
    together = [comb([*itertools.chain(*by_frequency.values())], step) for step in steps]
    return {
        "same_step": max(together),
        "own_steps": np.mean([max(comb(sizes, step) for step in steps) for sizes in by_frequency.values()]),
        "fine_blocks": max(comb(fine, step) for step in steps),
        "step": steps[int(np.argmax(together))],
    }


def naive_spectrum(tile):
    window = [math.sin(math.pi * (number + 0.5) / TILE) ** 2 for number in range(TILE)]
    power = np.abs(np.fft.fft2((tile - tile.mean()) * np.outer(window, window))) ** 2
    frequency = [min(number, TILE - number) for number in range(TILE)]
    rings, chosen = [[] for _ in range(33)], {"peak": [], "corner": [], "around": [], "along": [], "across": []}
    radius = {}
    for row, column in itertools.product(range(TILE), range(TILE)):
        down, right = frequency[row], frequency[column]
        radius[row, column] = round(math.hypot(down, right))
        if radius[row, column] <= 32:
            rings[radius[row, column]].append(power[row, column])
    means = [np.mean(ring) for ring in rings]
    for row, column in itertools.product(range(TILE), range(TILE)):
        down, right, value = frequency[row], frequency[column], power[row, column]
        is_on_grid = any(number % 8 in (7, 0, 1) for number in (down, right))
        if not is_on_grid and 10 <= radius[row, column] <= 32:
            chosen["peak"].append(math.log2((value + 1e-3) / (means[radius[row, column]] + 1e-3)))
        for name, holds in {
            "corner": min(down, right) >= 31,
            "around": min(down, right) >= 26 and down + right <= 59,
            "along": right >= 12 and 3 * down < right,
            "across": down >= 12 and 3 * right < down,
        }.items():
            if holds:
                chosen[name].append(value)
    fitted = range(2, 25)
    slope, level = np.polyfit([math.log2(each) for each in fitted], [math.log2(means[each]) for each in fitted], 1)
    tail = [math.log2(means[each]) - slope * math.log2(each) - level for each in range(28, 33)]
    bands = {"low": (2, 8), "middle": (8, 16), "high": (16, 33)}
    shares = {band: math.log2(sum(means[first:end]) / sum(means[2:])) for band, (first, end) in bands.items()}
    along, across = np.mean(chosen["along"]), np.mean(chosen["across"])
    return {
        "slope": slope,
        "tail": np.mean(tail),
        **shares,
        "peak": max(chosen["peak"]),
        "corner": math.log2(np.mean(chosen["corner"]) / np.mean(chosen["around"])),
        "direction": abs(math.log2(along / across)),
        "periodic": (naive_period(tile) + naive_period(tile.T)) / 2,
    }


def naive_period(tile):
    bends = [np.mean([min(2, abs(2 * row[at] - row[at - 1] - row[at + 1])) for row in tile]) for at in range(4, 60)]
    sizes = []
    for number in range(4, 28):
        if number % 7:
            turns = [2 * math.pi * number * at / 56 for at in range(56)]
            sizes.append(math.hypot(np.dot(bends, np.cos(turns)), np.dot(bends, np.sin(turns))))
    return math.log2((max(sizes) + 1e-3) / (np.median(sizes) + 1e-3))


def naive_sharpness(luma):
    laplacians, gradients = [], []
    for row in range(1, TILE - 1):
        for column in range(1, TILE - 1):
            near = luma[row - 1 : row + 2, column - 1 : column + 2].astype(float)
            laplacians.append(near[0, 1] + near[2, 1] + near[1, 0] + near[1, 2] - 4 * near[1, 1])
            across = sum(weight * (near[at, 2] - near[at, 0]) for at, weight in enumerate((1, 2, 1))) / 8
            down = sum(weight * (near[2, at] - near[0, at]) for at, weight in enumerate((1, 2, 1))) / 8
            gradients.append(across**2 + down**2)
    variance, gradient = np.var(laplacians), np.mean(gradients)
    edges = np.mean([each > 64 for each in gradients])
    return {"laplacian": variance, "gradient": gradient, "fineness": variance / gradient, "edges": edges}


NAIVE = {
    "block_dct": naive_block_dct,
    "double_compression": naive_double_compression,
    "noise_residual": naive_noise_residual,
    "sharpness": naive_sharpness,
    "spectrum": naive_spectrum,
}


@pytest.mark.parametrize("name", NAIVE)
def test_each_feature_equals_its_definition_pixel_by_pixel(name):
    draw = np.random.default_rng(5)
    rows, columns = np.mgrid[:TILE, :TILE]
    scene = 90 + rows + 40 * (columns > 30) + draw.normal(0, 3, (TILE, TILE))
    tiles = np.rint(np.stack([draw.normal(128, 20, (TILE, TILE)), scene])).clip(0, 255).astype(np.float32)
    values, tolerance = FEATURES.get(name).measure(tiles), 0.01 if name == "double_compression" else 5e-3
    for number, tile in enumerate(tiles):
        wanted = NAIVE[name](tile.astype(float))
        assert wanted.keys() == values.keys()
        for feature, value in wanted.items():
            assert values[feature][number] == pytest.approx(value, rel=tolerance, abs=tolerance), (number, feature)


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


@pytest.mark.parametrize("name", NAIVE)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 60), st.integers(-60, 60))
def test_tiles_count_alone_and_neither_mirrors_nor_brightness_change_them(name, seed, noise, offset):
    luma = picture(seed, noise=noise, count=3)
    values = measured(name, luma)
    assert not any(np.isinf(value).any() for value in values.values())
    alone = measured(name, luma[1:2])
    assert_alike({key: value[1:2] for key, value in values.items()}, alone)
    plain = np.clip(picture(seed, contrast=0.5), 61, 194)
    values = measured(name, plain)
    # Coefficients of whole grey levels may lie at the limit of a bin, and rounding puts them on either side.
    tolerance = {"block_dct": 0.02, "double_compression": 0.1}.get(name, 2e-3)
    for mirrored in (plain[:, :, ::-1], plain[:, ::-1], plain.swapaxes(1, 2)):
        # The wavelet's filters are longer on one side.
        wavelet = {"wavelet", "wavelet_coarse", "grain"}
        assert_alike(values, measured(name, mirrored), except_for=wavelet, tolerance=tolerance)
    assert_alike(values, measured(name, plain + offset), tolerance=tolerance)


@pytest.mark.parametrize("name", NAIVE)
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
    left = places.astype(int)
    share = places - left
    plain, source = draw.normal(128, 1, (2, TILE, TILE))
    across = source[:, left] * (1 - share) + source[:, left + 1] * share
    scaled = across[left] * (1 - share)[:, None] + across[left + 1] * share[:, None]
    periodic = measure_spectrum(np.float32([plain, scaled]))["periodic"]
    assert periodic[1] > 3 > 2.5 > periodic[0]
