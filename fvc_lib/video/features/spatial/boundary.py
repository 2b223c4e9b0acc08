"""``boundary``: whether one part of a tile has other noise or sharpness than the rest, as after an insertion.

A tile is seen as 6 x 6 cells of 10 pixels. Noise grows with detail in any picture; what counts is the noise that
detail does not explain, its step between two parts, and single cells far below or above the others, as along a seam
that was blended or drawn.
"""

import numpy as np
import numpy.typing as npt

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import Feature, FeatureFamily, Float32, Pixels

_CELLS, _CELL = 6, 10
_LEAST = 0.25  # grey levels, added to noise and detail: below it both are rounding errors


def _splits() -> npt.NDArray[np.float32]:
    """(S, 36): mean of the cells on one side of a straight cut minus that on the other, both of two lines and more."""
    place = np.arange(_CELLS)
    masks = [place < cut for cut in range(2, _CELLS - 1)]
    sides = [np.broadcast_to(mask, (_CELLS, _CELLS)).ravel() for mask in masks]
    sides += [np.repeat(mask, _CELLS) for mask in masks]
    return np.array([side / side.sum() - ~side / (~side).sum() for side in sides], np.float32)


_SPLITS = _splits()


def measure(luma: Float32, _rgb: Pixels) -> dict[str, Float32]:
    """Values (N,) by feature."""
    along = luma[:, :, :-2] + luma[:, :, 2:] - 2 * luma[:, :, 1:-1]
    residual = along[:, :-2] + along[:, 2:] - 2 * along[:, 1:-1]  # (N, 62, 62), noise and little else
    inner = luma[:, 1:-1, 1:-1]
    slopes = np.abs(inner - luma[:, 1:-1, 2:]) + np.abs(inner - luma[:, 2:, 1:-1])
    slopes += np.abs(inner - luma[:, 1:-1, :-2]) + np.abs(inner - luma[:, :-2, 1:-1])
    bends = np.abs(luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] + luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] - 4 * inner)
    noise, detail, bend = (_of_cells(each) for each in (np.abs(residual) / 6, slopes / 4, bends / 4))
    is_flat = (noise < np.log2(2 * _LEAST)).all(1)
    unexplained, coupling = _unexplained(noise, detail)
    sharpness = bend - detail
    sharpness -= sharpness.mean(1, keepdims=True)
    values = {
        "noise_step": np.abs(unexplained @ _SPLITS.T).max(1),
        "noise_spread": unexplained.std(1),
        "least_noise": unexplained.min(1),
        "most_noise": unexplained.max(1),
        "coupling": coupling,
        "sharpness_step": np.abs(sharpness @ _SPLITS.T).max(1),
        "sharpness_spread": sharpness.std(1),
    }
    return {name: np.where(is_flat, np.nan, value).astype(np.float32) for name, value in values.items()}


def _of_cells(values: Float32) -> Float32:
    """(N, 36): binary logarithm of the cells' means of (N, 62, 62), whose outermost pixels are left out."""
    inner = values[:, 1:-1, 1:-1].reshape(len(values), _CELLS, _CELL, _CELLS, _CELL)
    return np.asarray(np.log2(inner.mean((2, 4)).reshape(len(values), _CELLS**2) + np.float32(_LEAST)))


def _unexplained(noise: Float32, detail: Float32) -> tuple[Float32, Float32]:
    """(N, 36), the noise that a straight line through detail leaves, and (N,), their correlation, 0 of even ones."""
    noise = noise - noise.mean(1, keepdims=True)
    detail = detail - detail.mean(1, keepdims=True)
    product, of_detail, of_noise = (
        np.einsum("nc,nc->n", one, other) for one, other in ((noise, detail), (detail, detail), (noise, noise))
    )
    tiny = np.float32(1e-6)
    left = noise - (product / (of_detail + tiny))[:, None] * detail
    return left, product / np.sqrt((of_detail + tiny) * (of_noise + tiny))


_UNIT = "binary logarithm"
FEATURES.register(
    FeatureFamily(
        name="boundary",
        paper="Mahdian and Saic, Using noise inconsistencies for blind image forensics, Image and Vision Computing "
        "2009; Li et al., Face X-ray for more general face forgery detection, CVPR 2020",
        features=(
            Feature(
                "noise_step", _UNIT, "Largest step of the noise that detail does not explain, across a straight cut."
            ),
            Feature(
                "noise_spread",
                _UNIT,
                "How much the noise that detail does not explain differs between cells.",
                size_proxy=True,
            ),
            Feature(
                "least_noise",
                _UNIT,
                "That noise of the cell that has least, as where edges were blended.",
                size_proxy=True,
            ),
            Feature("most_noise", _UNIT, "That noise of the cell that has most, as where edges were drawn."),
            Feature("coupling", "correlation", "How far noise follows detail between cells."),
            Feature(
                "sharpness_step",
                _UNIT,
                "Largest step of the fineness of detail across a straight cut.",
                size_proxy=True,
            ),
            Feature(
                "sharpness_spread", _UNIT, "How much the fineness of detail differs between cells.", size_proxy=True
            ),
        ),
        measure=measure,
        of="tiles",
    )
)
