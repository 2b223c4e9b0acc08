"""``flicker``: light that changes from frame to frame beyond a steady trend, in the whole picture and by tile.

What is drawn frame by frame has each frame's own light and contrast. Lamps flicker too, all over the picture and in
time with the camera. Adding a brightness to all frames, or mirroring them, changes nothing.
"""

import numpy as np
import numpy.typing as npt

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Feature, FeatureFamily, Run

Values = npt.NDArray[np.floating]

_FEWEST = 3  # frames: two are always on a line
_FLAT = 0.5  # grey levels, added to a contrast, so that what is all but flat does not seem to flicker
_STILL = 1e-3  # grey levels: light that changes by less does not alternate


def measure(run: Run) -> dict[str, Values]:
    """One value per run by feature, (1,), or one per tile, (N,); empty below 3 frames, of ``alternation`` below 4."""
    num_frames, num_tiles = run.luma.shape[:2]
    if num_frames < _FEWEST:
        return {each.name: np.empty(0) for each in _FEATURES}
    light = off_trend(run.small.mean((1, 2), dtype=np.float64)[:, None])  # (L, 1)
    tiles = run.luma.reshape(num_frames, num_tiles, TILE**2)
    of_tiles = off_trend(tiles.mean(2, dtype=np.float64))
    contrast = off_trend(np.log2(tiles.std(2).astype(np.float64) + _FLAT))
    return {
        "light": light.std(0),
        "tile_light": (of_tiles - light).std(0),
        "contrast": contrast.std(0),
        "alternation": _alternation(light),
    }


def off_trend(values: Values) -> Values:
    """(L, N): ``values`` without the straight line through each column by least squares."""
    place = np.arange(len(values)) - (len(values) - 1) / 2
    slope = place @ values / (place @ place)
    return np.asarray(values - values.mean(0) - place[:, None] * slope)


def _alternation(light: Values) -> Values:
    """(1,): the share of the square of ``light`` (L, 1), off its trend, that goes up and down with each frame."""
    if len(light) == _FEWEST:
        return np.empty(0)  # three frames off their line always alternate
    pattern = off_trend((-1.0) ** np.arange(len(light))[:, None])
    squared = (light**2).sum(0)
    along = (pattern * light).sum(0) ** 2 / (pattern**2).sum(0)
    return np.where(squared > len(light) * _STILL**2, along / np.where(squared > 0, squared, 1), np.nan)


_FEATURES = (
    Feature("light", "grey levels", "Standard deviation of the picture's mean over a run, off its linear trend."),
    Feature("tile_light", "grey levels", "The same of a tile, less what the whole picture does."),
    Feature(
        "contrast",
        "binary logarithm",
        "Standard deviation of a tile's contrast over a run, off its linear trend.",
        size_proxy=True,
    ),
    Feature("alternation", "share", "How much of the picture's flicker goes up and down with each frame."),
)

FEATURES.register(
    FeatureFamily(
        name="flicker",
        paper="Gu et al., Spatiotemporal inconsistency learning for deepfake video detection, ACM Multimedia 2021",
        features=_FEATURES,
        measure=measure,
        of="pairs",
    )
)
