import math

import numpy as np
import pytest

from fvc_lib.video.features.family import TILE
from fvc_lib.video.features.spatial import colour, sharpness


@pytest.fixture(scope="module")
def tiles():
    """Luma and RGB of three tiles: noise, a smooth slope, a flat one."""
    draw = np.random.default_rng(3)
    slope = np.broadcast_to(np.arange(TILE)[:, None, None] * [1, 2, 3], (TILE, TILE, 3))
    rgb = np.stack([draw.integers(0, 256, (TILE, TILE, 3)), slope, np.full((TILE, TILE, 3), 90)]).astype(np.uint8)
    return rgb.astype(np.float32) @ np.float32([0.299, 0.587, 0.114]), rgb


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
    return variance, gradient, variance / gradient if gradient else math.nan, edges


def test_sharpness_is_that_of_pixel_by_pixel_sums(tiles):
    luma, rgb = tiles
    got = sharpness.measure(luma, rgb)
    for number, tile in enumerate(luma):
        wanted = naive_sharpness(tile)
        np.testing.assert_allclose([each[number] for each in got.values()], wanted, rtol=1e-4, atol=1e-6)
    assert list(got) == ["laplacian", "gradient", "fineness", "edges"]


def naive_colour(rgb):
    pixels = rgb.astype(float).reshape(-1, 3)
    saturations = [(max(pixel) - min(pixel)) / max(*pixel, 1) for pixel in pixels]
    means = pixels.mean(0) + 1
    clipped = np.mean([max(pixel) > 254 or max(pixel) < 1 for pixel in pixels])
    details = np.diff(rgb.astype(float), axis=1).reshape(-1, 3)

    def together(one, other):
        scale = math.sqrt((details[:, one] ** 2).mean() * (details[:, other] ** 2).mean())
        return (details[:, one] * details[:, other]).mean() / scale if scale else math.nan

    return (
        np.mean(saturations), math.log2(means[0] / means[1]), math.log2(means[2] / means[1]), clipped,
        together(0, 1), together(2, 1),
    )  # fmt: skip


def test_colour_is_that_of_pixel_by_pixel_sums(tiles):
    got = colour.measure(*tiles)
    for number, tile in enumerate(tiles[1]):
        np.testing.assert_allclose([each[number] for each in got.values()], naive_colour(tile), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [sharpness, colour])
def test_mirrored_tiles_have_the_same_values(tiles, module):
    luma, rgb = tiles
    there, mirrored = module.measure(luma, rgb), module.measure(luma[:, :, ::-1], rgb[:, :, ::-1])
    for name in there:
        np.testing.assert_allclose(there[name], mirrored[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_sharpness_does_not_follow_brightness_and_fineness_not_contrast(tiles):
    luma, rgb = tiles
    there, brighter, stronger = (sharpness.measure(each, rgb) for each in (luma, luma + 16, 0.5 * luma))
    for name in there:
        np.testing.assert_allclose(there[name], brighter[name], rtol=1e-3, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(there["fineness"], stronger["fineness"], rtol=1e-4)
    np.testing.assert_allclose(0.25 * there["laplacian"], stronger["laplacian"], rtol=1e-4)
