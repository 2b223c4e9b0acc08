"""Families of forensic features: their declaration, their input, and the pooling of values per video.

A family is a group of features that one function measures; the modules of this folder register families. A family gets
pixels as they were coded, at native resolution, in square tiles. All tiles have the same area, and videos of any size
have about the same number of tiles. So values do not grow with the size of a video. A value that cannot be measured is
NaN, and null in the table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import FEATURES

TILE = 64  # pixels on a side
GRID = 8  # pixels; tiles begin at multiples of it, so that all have the same 8 x 8 grid of coded blocks
_ACROSS = 3  # largest number of tiles in a row, and of rows of tiles
SMALL_SIDE = 160  # largest number of pixels on the longer side of ``Run.small``

Float32 = npt.NDArray[np.float32]
Values = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """L consecutive frames of a video, with N tiles at the same positions in every frame.

    Attributes:
        luma: float32 (L, N, 64, 64), luma of the tiles from 0 to 255 as coded (10 bit divided by 4; RGB converted).
        small: float32 (L, h, w), luma of the whole frames, averaged down to at most 160 pixels on the longer side.
    """

    luma: Float32
    small: Float32


@dataclass(frozen=True)
class Stream:
    """The P packets of a video in decoding order, and data that the decoder exports for F decoded frames.

    Attributes:
        codec: compression format, such as ``h264``.
        sizes: int64 (P,), sizes of the packets in bytes.
        is_key: bool (P,), true for keyframes.
        pts_seconds: float64 (P,), presentation times; NaN where unknown.
        frame_types: text of F letters, ``I``, ``P``, ``B`` or ``?`` (unknown), one per decoded frame.
        qp: float32 (F, 2), mean and standard deviation of the quantiser over a frame's blocks, as shares of the codec's
            largest; NaN where it is not exported.
        intra: float32 (F,), share of a frame's area that is not predicted from another frame; NaN where unknown.
        motion: float32 (K, 2), motion vectors of all decoded frames, in pixels to the right and down.
    """

    codec: str
    sizes: IntArray
    is_key: npt.NDArray[np.bool_]
    pts_seconds: npt.NDArray[np.float64]
    frame_types: str = ""
    qp: Float32 = field(default_factory=lambda: np.empty((0, 2), np.float32))
    intra: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    motion: Float32 = field(default_factory=lambda: np.empty((0, 2), np.float32))


@dataclass(frozen=True)
class Feature:
    """The declaration of a feature.

    Attributes:
        name: name within its family.
        unit: unit of its values.
        meaning: one sentence that explains the feature.
        size_proxy: whether its values depend more on a video's original size, codec or length than on manipulations.
    """

    name: str
    unit: str
    meaning: str
    size_proxy: bool = False


@dataclass(frozen=True)
class FeatureFamily:
    """Features that are measured together.

    Attributes:
        name: prefix of the names of its columns.
        paper: publication that describes the method.
        features: its features, in the order of their columns.
        measure: function that returns a mapping from feature names to values. For ``tiles`` it takes the luma of a
            frame's tiles, float32 (N, 64, 64), and returns arrays (N,). For ``pairs`` it takes a ``Run`` of at least
            two frames and returns arrays of any shape. For ``stream`` it takes a ``Stream`` and returns numbers. N may
            be 0.
        of: kind of input of ``measure``: tiles of single frames, pairs of neighbouring frames, or the stream.
    """

    name: str
    paper: str
    features: tuple[Feature, ...]
    measure: Callable[..., Mapping[str, Any]]
    of: Literal["tiles", "pairs", "stream"]

    def columns(self) -> dict[str, Feature]:
        """Return the feature of every column, by name: ``FAMILY_FEATURE_POOL``, or for streams ``FAMILY_FEATURE``."""
        pools = ("",) if self.of == "stream" else tuple(f"_{pool}" for pool in POOLS)
        return {f"{self.name}_{each.name}{pool}": each for each in self.features for pool in pools}

    def main_columns(self) -> dict[str, Feature]:
        """Return one column per feature, as ``columns`` does: that of the mean, or for streams the only one."""
        return dict(zip(list(self.columns())[:: 1 if self.of == "stream" else len(POOLS)], self.features, strict=True))

    def pooled(self, measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return a video's value for every column, by name; NaN where nothing could be measured.

        Args:
            measured: the results of ``measure`` for all sampled frames or runs, or for the stream of the video.

        Raises:
            ValueError: ``measure`` returned other features than the family declares.
        """
        names = [feature.name for feature in self.features]
        for each in measured:
            if each.keys() != set(names):
                raise ValueError(f"feature family {self.name!r}: measured {sorted(each)}, declares {sorted(names)}")
        rows = [
            np.concatenate([np.ravel(np.asarray(each[name], np.float64)) for each in measured] or [np.empty(0)])
            for name in names
        ]
        if self.of != "stream":
            return dict(zip(self.columns(), pool(rows).ravel().tolist(), strict=True))
        values = [float(row[0]) if row.size and np.isfinite(row[0]) else float("nan") for row in rows]
        return dict(zip(self.columns(), values, strict=True))


# Statistics (pools) over all sampled tiles or pairs of a video, by the suffix of the column.
POOLS: Mapping[str, str] = {
    "mean": "the mean",
    "spread": "the standard deviation",
    "low": "the 10th percentile",
    "high": "the 90th percentile",
    "least": "the minimum",
    "most": "the maximum",
}
_QUANTILES = np.array([0.1, 0.9])


def pool(rows: Sequence[Values]) -> npt.NDArray[np.float64]:
    """Return the six statistics of ``POOLS`` over the finite values of F rows of any lengths, float64 (F, 6).

    A row without finite values gives NaN.
    """
    pooled = np.full((len(rows), len(POOLS)), np.nan)
    for number, row in enumerate(rows):
        values = np.sort(row[np.isfinite(row)].astype(np.float64))
        if values.size:
            places = _QUANTILES * (values.size - 1)
            below = places.astype(np.int64)
            above = np.minimum(below + 1, values.size - 1)
            quantiles = values[below] + (places - below) * (values[above] - values[below])
            pooled[number] = (values.mean(), values.std(), *quantiles, values[0], values[-1])
    return pooled


@lru_cache(maxsize=64)
def tile_corners(height: int, width: int) -> IntArray:
    """Return top and left of a frame's tiles in pixels, int64 (N, 2).

    There are at most 3 x 3 tiles, spread evenly, without overlap. All coordinates are multiples of 8. A frame smaller
    than a tile has no tiles. The array is cached and read-only.
    """
    rows, columns = (_spread(size, min(_ACROSS, size // TILE)) for size in (height, width))
    corners: IntArray = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
    corners.setflags(write=False)
    return corners


def _spread(size: int, count: int) -> IntArray:
    if count == 1:  # in the middle
        return np.array([(size - TILE) // 2 // GRID * GRID])
    return np.arange(count) * (size - TILE) // max(1, count - 1) // GRID * GRID


def families_named(names: str) -> tuple[FeatureFamily, ...]:
    """Return feature families, sorted by name; ``names`` are separated by commas, or ``all``.

    Raises:
        UsageError: a family is unknown or cannot be imported, or none is named.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UsageError(f"feature_families: got {names!r}, wanted names separated by commas, or all")
    chosen = FEATURES.names() if wanted == ["all"] else wanted
    if wanted == ["all"] and FEATURES.broken:
        name, reason = next(iter(FEATURES.broken.items()))
        raise UsageError(f"feature family {name} cannot be imported: {reason}. Mend it, or name families without it.")
    return tuple(FEATURES.get(name) for name in sorted(set(chosen)))
