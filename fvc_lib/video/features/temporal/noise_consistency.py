"""``noise_consistency``: whether noise is as strong, and as new, in each frame and in each tile as a camera's is.

The noise of a sensor is drawn anew in each frame and is about equal all over it; codecs keep some of it and repeat it.
Frames that were denoised or repeated, and pieces from elsewhere, break that. Noise is what the product of two second
differences leaves (J. Immerkaer, Fast noise variance estimation, CVIU 1996), which ignores light and straight edges; a
tile's level is that of its quieter blocks, so that detail counts little. Mirroring and brightness change nothing.
"""

import numpy as np

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Run

_BLOCK = 6  # pixels on a side, inside the edge that has no residual: the 62 pixels in between hold ten of them
_QUIET = 0.25  # of the blocks: the level is that of the quietest quarter's loudest
_SCALE = float(np.sqrt(np.pi / 2) / 6)  # from the mean absolute residual of normal noise to its standard deviation
_FLOOR = 0.05  # grey levels, added before a logarithm: below that levels are taken to be equal
_NO_NOISE = 1e-4  # grey levels squared: what has less is not correlated with anything


def measure(run: Run) -> dict[str, Float32]:
    """Values by feature: (L - 1, N) of pairs, (L, N) of ``level``, (L,) of ``uneven``."""
    num_frames, num_tiles = run.luma.shape[:2]
    if not num_tiles:
        return {each.name: np.empty(0, np.float32) for each in _FEATURES}
    residual = noise_residual(run.luma)
    level = noise_level(residual)
    logarithm = np.log2(level + _FLOOR)
    uneven = logarithm.std(1) if num_tiles > 1 else np.empty(0, np.float32)
    flat = residual.reshape(num_frames, num_tiles, -1)
    energy = np.einsum("lnk,lnk->ln", flat, flat) / flat.shape[2]
    product = np.einsum("lnk,lnk->ln", flat[:-1], flat[1:]) / flat.shape[2]
    noisy = (energy[:-1] > _NO_NOISE) & (energy[1:] > _NO_NOISE)
    scale = np.sqrt(np.where(noisy, energy[:-1] * energy[1:], 1))
    return {
        "correlation": np.where(noisy, product / scale, np.nan),
        "level": level,
        "step": np.abs(np.diff(logarithm, axis=0)),
        "uneven": uneven,
    }


def noise_residual(luma: Float32) -> Float32:
    """(..., H - 2, W - 2): second differences down of second differences across."""
    across = luma[..., :-2] + luma[..., 2:]
    across -= 2 * luma[..., 1:-1]
    down = across[..., :-2, :] + across[..., 2:, :]
    down -= 2 * across[..., 1:-1, :]
    return np.asarray(down)


def noise_level(residual: Float32) -> Float32:
    """(...,): standard deviation of the noise in grey levels, from residuals (..., 62, 62)."""
    inner = np.abs(residual[..., 1:-1, 1:-1])
    count = inner.shape[-1] // _BLOCK
    blocks = inner.reshape(*inner.shape[:-2], count, _BLOCK, count, _BLOCK).mean((-3, -1))
    blocks = blocks.reshape(*inner.shape[:-2], count**2)
    place = int(_QUIET * (count**2 - 1))
    return np.asarray(np.partition(blocks, place, axis=-1)[..., place] * _SCALE)


_FEATURES = (
    Feature("correlation", "correlation", "Of the noise in a tile and in the same tile of the next frame."),
    Feature("level", "grey levels", "Standard deviation of the noise in the quieter parts of a tile."),
    Feature(
        "step",
        "binary logarithm",
        "How much louder a tile's noise is than in the frame before, or quieter.",
        size_proxy=True,
    ),
    Feature("uneven", "binary logarithm", "Standard deviation of the noise level over the tiles of a frame."),
)

FEATURES.register(
    FeatureFamily(
        name="noise_consistency",
        paper="Hsu et al., Video forgery detection using correlation of noise residue, MMSP 2008",
        features=_FEATURES,
        measure=measure,
        of="pairs",
    )
)
