import numpy as np
import pytest
import torch
from scipy.ndimage import convolve

from fvc_lib.detectors.own.stems import NUM_CHANNELS, forensic_maps

LINE = np.array([[-1.0, 2.0, -1.0]])


def naive_maps(clip: np.ndarray, cell: int) -> np.ndarray:
    """Return the maps (8, T, h, w) of one clip (T, 3, H, W), by loops and SciPy's convolution."""
    num_frames, _, height, width = clip.shape
    luma = np.einsum("tchw,c->thw", clip.astype(np.float64), [0.299, 0.587, 0.114])
    result = np.zeros((NUM_CHANNELS, num_frames, height // cell, width // cell))

    def cells(image):
        return np.array(
            [
                [image[r * cell : (r + 1) * cell, c * cell : (c + 1) * cell].mean() for c in range(width // cell)]
                for r in range(height // cell)
            ]
        )

    def residual(image, kernel, limit):
        inner = np.zeros_like(image)
        rows, columns = kernel.shape[0] // 2, kernel.shape[1] // 2
        valid = (slice(rows, height - rows), slice(columns, width - columns))
        inner[valid] = convolve(image, kernel)[valid]
        return (np.log1p(cells(np.minimum(np.abs(inner), limit))) - 2.5) / 0.8

    for t in range(num_frames):
        result[:3, t] = [(cells(channel) - 115) / 120 for channel in clip[t].astype(np.float64)]
        result[3, t] = residual(luma[t], LINE, 24)
        result[4, t] = residual(luma[t], LINE.T, 24)
        result[5, t] = residual(luma[t], LINE.T @ LINE, 48)
        for channel, other in ((6, t - 1 if t else 1), (7, t + 1 if t + 1 < num_frames else t - 1)):
            result[channel, t] = (np.log1p(cells(np.minimum(np.abs(luma[other] - luma[t]), 40))) - 1.5) / 1.1
    return result


@pytest.mark.parametrize(("size", "cell"), [((24, 20), 4), ((21, 30), 4), ((16, 16), 8), ((9, 9), 3)])
def test_equal_to_loops_over_pixels(size, cell):
    generator = np.random.default_rng(0)
    clip = generator.integers(0, 256, (3, 3, *size), dtype=np.uint8)
    clip[:, :, : size[0] // 2] //= 16  # quiet, so that not all residuals are truncated
    got = forensic_maps(torch.from_numpy(clip)[None], cell)
    assert got.shape == (1, 8, 3, size[0] // cell, size[1] // cell)
    np.testing.assert_allclose(got[0].numpy(), naive_maps(clip, cell), atol=2e-5)


def test_a_still_clip_has_no_motion_and_a_single_frame_has_no_answer():
    frame = torch.randint(0, 256, (1, 1, 3, 16, 16), dtype=torch.uint8)
    motion = forensic_maps(frame.expand(1, 4, 3, 16, 16), 4)[:, 6:]
    torch.testing.assert_close(motion, torch.full_like(motion, -1.5 / 1.1))
    assert forensic_maps(frame, 4)[:, 6:].eq(0).all()  # unknown, which differs from no motion
