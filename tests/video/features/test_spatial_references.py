"""Every feature of the families of tiles against a slow version, written from its definition, pixel by pixel."""

import itertools
import math

import numpy as np
import pytest
import pywt
from scipy.fft import dctn
from skimage.feature import graycomatrix, graycoprops
from skimage.restoration import estimate_sigma

from fvc_lib.video.features.family import TILE
from fvc_lib.video.features.spatial import (
    block_dct,
    blockiness,
    boundary,
    double_compression,
    noise_residual,
    spectrum,
    texture,
)


@pytest.fixture(scope="module")
def tiles():
    """Whole grey levels (3, 64, 64): noise, a picture with slopes and an edge, and one that is half flat."""
    draw = np.random.default_rng(5)
    rows, columns = np.mgrid[:TILE, :TILE]
    scene = 90 + rows + 40 * (columns > 30) + draw.normal(0, 3, (TILE, TILE))
    half = np.where(
        columns < 32, 60, 100 + 20 * np.sin(rows / 3) * np.cos(columns / 5) + draw.normal(0, 5, (TILE, TILE))
    )
    noise = draw.normal(128, 20, (TILE, TILE))
    return np.rint(np.stack([noise, scene, half])).clip(0, 255).astype(np.float32)


def compare(module, naive, tiles, rtol=1e-3, atol=1e-3):
    values = module.measure(tiles, None)
    for number, tile in enumerate(tiles):
        wanted = naive(tile.astype(float))
        assert wanted.keys() == values.keys()
        for name, value in wanted.items():
            assert values[name][number] == pytest.approx(value, rel=rtol, abs=atol), (number, name)


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


def test_noise_residuals_are_those_of_the_kernels(tiles):
    compare(noise_residual, naive_noise_residual, tiles[:2])


def test_every_filter_finds_the_level_of_gaussian_noise():
    luma = np.random.default_rng(0).normal(128, 7, (8, TILE, TILE)).astype(np.float32)
    values = noise_residual.measure(luma, None)
    for name in ("third", "square3", "square5", "wavelet", "wavelet_coarse"):
        assert values[name].mean() == pytest.approx(7, rel=0.05), name
    assert values["wavelet"].mean() == pytest.approx(np.mean([estimate_sigma(tile) for tile in luma]), rel=0.05)
    assert values["tails"].mean() == pytest.approx(3, rel=0.1)


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


def test_coefficients_of_blocks_are_scipys(tiles):
    compare(block_dct, naive_block_dct, tiles)


def naive_blockiness(tile):
    found = {"grid4": [], "grid8": [], "inside": [], "odd": [], "even": []}
    shifted = []
    for picture in (tile, tile.T):
        steps = {}
        for left in range(1, 62):
            sizes = []
            for row in picture:
                before, step, behind = np.diff(row[left - 1 : left + 3])
                sizes.append(abs(step - (before + behind) / 2))
            steps[left] = np.mean(sizes)
        phase = {number: np.mean([size for left, size in steps.items() if left % 8 == number]) for number in range(8)}
        found["grid4"].append(phase[3])
        found["grid8"].append(phase[7])
        inside = [phase[number] for number in (0, 1, 2, 4, 5, 6)]
        found["inside"].append(np.mean(inside))
        found["odd"].append(np.mean([steps[left] for left in (7, 23, 39, 55)]))
        found["even"].append(np.mean([steps[left] for left in (15, 31, 47)]))
        shifted.append(math.log2((max(inside) + 0.05) / (np.median(inside) + 0.05)))
    level = {name: np.mean(sizes) + 0.05 for name, sizes in found.items()}
    return {
        "grid4": math.log2(level["grid4"] / level["inside"]),
        "grid8": math.log2(level["grid8"] / level["inside"]),
        "grid16": abs(math.log2(level["odd"] / level["even"])),
        "shifted": np.mean(shifted),
    }


def test_steps_at_edges_of_blocks_are_those_of_each_row(tiles):
    compare(blockiness, naive_blockiness, tiles)


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


def test_combs_are_those_of_each_coefficient(tiles):
    compare(double_compression, naive_double_compression, tiles, rtol=0.01, atol=0.01)


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


def test_spectra_are_those_of_the_whole_transform(tiles):
    compare(spectrum, naive_spectrum, tiles, rtol=5e-3, atol=5e-3)


def naive_texture(tile):
    kinds = [0] * 10
    circle = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))
    for row, column in itertools.product(range(1, TILE - 1), range(1, TILE - 1)):
        bits = [tile[row + down, column + right] >= tile[row, column] for down, right in circle]
        changes = sum(bits[number] != bits[number - 1] for number in range(8))
        kinds[sum(bits) if changes <= 2 else 9] += 1
    shares = np.divide(kinds, sum(kinds))
    levels = np.clip(np.floor((tile - tile.mean()) / 8) + 8, 0, 15).astype(int)
    matrices = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        matrix = np.zeros((16, 16))
        for row, column in itertools.product(range(TILE), range(TILE)):
            if row + down < TILE and 0 <= column + right < TILE:
                one, other = levels[row, column], levels[row + down, column + right]
                matrix[one, other] += 1
                matrix[other, one] += 1
        matrices.append(matrix / matrix.sum())
    pairs = np.mean(matrices, axis=0)
    one, other = np.indices(pairs.shape)
    centre = (pairs * one).sum()
    variance = (pairs * (one - centre) ** 2).sum()
    return {
        "spots": shares[0] + shares[8],
        "corners": shares[1] + shares[2] + shares[6] + shares[7],
        "edges": shares[3] + shares[4] + shares[5],
        "irregular": shares[9],
        "flat": shares[8],
        "pattern_entropy": -sum(share * math.log2(share) for share in shares if share),
        "contrast": (pairs * (one - other) ** 2).sum(),
        "homogeneity": (pairs / (1 + (one - other) ** 2)).sum(),
        "energy": math.sqrt((pairs**2).sum()),
        "correlation": (pairs * (one - centre) * (other - centre)).sum() / variance,
    }


def test_textures_are_those_of_each_pixel(tiles):
    compare(texture, naive_texture, tiles)


def naive_boundary(tile):
    places = [(row, column) for row in range(2, 62) for column in range(2, 62)]
    noise, detail, bend = ({} for _ in range(3))
    for row, column in places:
        near = tile[row - 1 : row + 2, column - 1 : column + 2]
        cell = (row - 2) // 10, (column - 2) // 10
        four = [near[0, 1], near[1, 0], near[1, 2], near[2, 1]]
        noise.setdefault(cell, []).append(abs((near * SQUARE3).sum()) / 6)
        detail.setdefault(cell, []).append(np.mean([abs(near[1, 1] - each) for each in four]))
        bend.setdefault(cell, []).append(abs(np.mean(four) - near[1, 1]))
    cells = sorted(noise)
    noise, detail, bend = (
        np.array([math.log2(np.mean(each[cell]) + 0.25) for cell in cells]) for each in (noise, detail, bend)
    )
    unexplained = noise - np.polyval(np.polyfit(detail, noise, 1), detail)
    sharpness = bend - detail - (bend - detail).mean()

    def step(values):
        grid = values.reshape(6, 6)
        halves = [(each[:cut], each[cut:]) for each in (grid, grid.T) for cut in (2, 3, 4)]
        return max(abs(one.mean() - other.mean()) for one, other in halves)

    return {
        "noise_step": step(unexplained),
        "noise_spread": unexplained.std(),
        "least_noise": unexplained.min(),
        "most_noise": unexplained.max(),
        "coupling": np.corrcoef(noise, detail)[0, 1],
        "sharpness_step": step(sharpness),
        "sharpness_spread": sharpness.std(),
    }


def test_cells_are_compared_as_by_a_line_fitted_to_them(tiles):
    compare(boundary, naive_boundary, tiles)


def test_co_occurrence_of_one_angle_is_scikit_images(tiles):
    """The naive version counts as scikit-image does."""
    levels = np.clip(np.floor((tiles[1] - tiles[1].mean()) / 8) + 8, 0, 15).astype(np.uint8)
    angles = (0, math.pi / 4, math.pi / 2, 3 * math.pi / 4)
    each = graycomatrix(levels, (1,), angles, 16, symmetric=True, normed=True)
    wanted = graycoprops(each.mean((2, 3), keepdims=True), "contrast")[0, 0]
    assert naive_texture(tiles[1].astype(float))["contrast"] == pytest.approx(wanted)
