"""The cosine transform of a tile's blocks, as JPEG and video codecs compute it."""

import numpy as np
import numpy.typing as npt
from scipy.fft import dct

from fvc_lib.video.features.family import Float32


def cosine_transform(luma: Float32, side: int) -> Float32:
    """(N, B, side, side): orthonormal coefficients of the B blocks of side x side pixels of each tile (N, 64, 64)."""
    matrix = _matrix(side)
    count, height, width = luma.shape
    rows = luma.reshape(count, height, width // side, side) @ matrix.T  # transformed along rows
    blocks = rows.reshape(count, height // side, side, width // side, side).swapaxes(2, 3)
    return (matrix @ blocks).reshape(count, height * width // side**2, side, side)


def _matrix(side: int) -> npt.NDArray[np.float32]:
    return np.asarray(dct(np.eye(side), axis=0, norm="ortho"), np.float32)
