"""What a family of forensic features declares, what it is given to measure, and how its values are pooled per video.

A family is one file of ``spatial/`` (frames), ``temporal/`` (neighbouring frames) or ``coding/`` (packets), which
registers a ``FeatureFamily``. It sees pixels as they were coded, at native resolution, in square tiles: every tile has
the same area and videos of any size have about as many, so that a value does not grow with the size of the video. What
cannot be measured is NaN, and a null in the table; nothing is made up.
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
MOST_TILES = 9  # of a frame: 3 x 3
GRID = 8  # edges of tiles are multiples of it, so that the grid of 8 x 8 blocks lies alike in all
SMALL_SIDE = 160  # most pixels on the longer side of ``Run.small``

Float32 = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Consecutive frames of a video, L of them, of which N tiles are seen at the same places.

    Attributes:
        luma: float32 (L, N, 64, 64), 0 to 255, as coded: of 10 bit a quarter, whatever range the file says it has. Of
            grey and RGB sources what they are converted to.
        rgb: uint8 (N, 64, 64, 3), of the first frame alone.
        seconds: float64 (L,), presentation times; NaN where unknown.
        small: float32 (L, h, w), the luma of whole frames, averaged over areas to at most 160 pixels on the longer
            side: for light, flicker and motion of the whole picture.
    """

    luma: Float32
    rgb: Pixels
    seconds: npt.NDArray[np.float64]
    small: Float32


@dataclass(frozen=True)
class Stream:
    """What a video's packets tell, P of them in decoding order, without its pixels.

    Attributes:
        codec: compression format, such as ``h264``.
        sizes: int64 (P,), bytes.
        is_key: bool (P,).
        pts_seconds: float64 (P,), presentation times; NaN where unknown.
        frame_types: a letter of ``IPB?`` for each of F frames that were decoded; empty where none is known.
        qp: float32 (F, 2), of each of them mean and standard deviation of the quantiser over its blocks, as shares of
            the codec's largest; NaN where none was told.
        intra: float32 (F,), of each the share of its area that refers to no other frame; NaN where that is not known.
        motion: float32 (K, 2), the motion vectors of all, in pixels right and down; empty where none was told.
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
    """One feature: its name in the family, its unit and one sentence that says what it is.

    ``size_proxy``: it follows the video's original size, codec or length more than what was done to its pictures.
    """

    name: str
    unit: str
    meaning: str
    size_proxy: bool = False


@dataclass(frozen=True)
class FeatureFamily:
    """Features that are measured together.

    ``measure`` of ``tiles`` takes the tiles of one frame, luma float32 (N, 64, 64) and rgb uint8 (N, 64, 64, 3), the
    first frame of each run, and gives an array (N,) by the name of each feature. Of ``pairs`` it takes a ``Run`` and
    gives arrays of any shape, one value per pair of frames, or per pair and tile. Of ``stream`` it takes a ``Stream``
    and gives one number each. A value that cannot be told is NaN. N or L - 1 may be 0: then arrays are empty.

    Attributes:
        name: the beginning of its columns.
        paper: where it is described.
        features: what it measures, in the order of their columns.
        measure: as above.
        of: what it is measured on.
        version: raise it when values change and the family's own file does not.
    """

    name: str
    paper: str
    features: tuple[Feature, ...]
    measure: Callable[..., Mapping[str, Any]]
    of: Literal["tiles", "pairs", "stream"]
    version: int = 1

    def columns(self) -> dict[str, Feature]:
        """The features by the names of their columns, ``FAMILY_FEATURE_POOL``, of a stream's ``FAMILY_FEATURE``."""
        pools = ("",) if self.of == "stream" else tuple(f"_{pool}" for pool in POOLS)
        return {f"{self.name}_{each.name}{pool}": each for each in self.features for pool in pools}

    def main_columns(self) -> dict[str, Feature]:
        """Of ``columns`` one for each feature: its mean, or a stream's one value."""
        return dict(zip(list(self.columns())[:: 1 if self.of == "stream" else len(POOLS)], self.features, strict=True))

    def pooled(self, measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Columns and values of a video from what ``measure`` gave at its places.

        Raises:
            ValueError: it gave other features than it declares.
        """
        for each in measured:
            if each.keys() != (names := {feature.name for feature in self.features}):
                raise ValueError(f"feature family {self.name!r}: measured {sorted(each)}, declares {sorted(names)}")
        rows = [
            np.concatenate([np.ravel(np.asarray(each[feature.name], np.float64)) for each in measured] or [np.empty(0)])
            for feature in self.features
        ]
        if self.of != "stream":
            return dict(zip(self.columns(), pool(rows).ravel().tolist(), strict=True))
        values = [float(row[0]) if row.size and np.isfinite(row[0]) else float("nan") for row in rows]
        return dict(zip(self.columns(), values, strict=True))


# In words, after "of a feature's values": over all tiles, or pairs of frames, that were sampled of a video.
POOLS: Mapping[str, str] = {
    "mean": "the mean",
    "spread": "the standard deviation",
    "low": "the value that 10 of 100 are up to",
    "high": "the value that 90 of 100 are up to",
    "least": "the smallest",
    "most": "the largest",
}
_QUANTILES = np.array([0.1, 0.9])


def pool(rows: Sequence[Values]) -> npt.NDArray[np.float64]:
    """Float64 (F, 6): of each row (any length) what ``POOLS`` names, of its finite values; NaN where it has none."""
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
    """int64 (N, 2): top and left of a frame's tiles, row by row, at most 3 x 3, spread evenly and never overlapping.

    Multiples of 8 each. A frame that is smaller than a tile has none. The array is shared: nothing is written to it.
    """
    most = int(MOST_TILES**0.5)
    rows, columns = (_spread(size, min(most, size // TILE)) for size in (height, width))
    corners: IntArray = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
    corners.setflags(write=False)
    return corners


def _spread(size: int, count: int) -> IntArray:
    if count == 1:  # one stands in the middle
        return np.array([(size - TILE) // 2 // GRID * GRID])
    return np.arange(count) * (size - TILE) // max(1, count - 1) // GRID * GRID


def cut_tiles(plane: npt.NDArray[Any], corners: IntArray, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """(N, 64, 64, ...) of ``plane`` (H, W, ...), a copy; of another type where one is given."""
    tiles = np.empty((len(corners), TILE, TILE, *plane.shape[2:]), dtype or plane.dtype)
    for tile, (top, left) in zip(tiles, corners.tolist(), strict=True):
        tile[...] = plane[top : top + TILE, left : left + TILE]
    return tiles


def families_named(names: str) -> tuple[FeatureFamily, ...]:
    """The families of ``names``, separated by commas, or of ``all``; in the order of their names.

    Raises:
        UsageError: one is unknown, there is none, or a family could not be imported; it names the remedy.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UsageError(f"feature_families: got {names!r}, wanted names separated by commas, or all")
    chosen = FEATURES.names() if wanted == ["all"] else wanted
    if wanted == ["all"] and FEATURES.broken:
        name, reason = next(iter(FEATURES.broken.items()))
        raise UsageError(f"feature family {name} cannot be imported: {reason}. Mend it, or name families without it.")
    return tuple(FEATURES.load(name) for name in sorted(set(chosen)))
