"""The named manipulations that turn generated footage into the sample corpus's fakes.

Each takes decoded footage, as a forger has it, and gives footage of the same shape; footage is planar yuv420p, uint8
(T, 3*H/2, W). They are strong enough to be seen in six frames of 112 pixels: the corpus shows that a pipeline learns
and reports honestly, it does not measure how hard real forgeries are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.sample_encoding import split_planes
from fvc_lib.corpus.sample_scenes import Plane, Planes, resize_plane

Mask = npt.NDArray[np.bool_]


def manipulate(name: str, base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """Apply the manipulation ``name`` to ``base``.

    Args:
        name: one of ``MANIPULATIONS``.
        base: (T, 3*H/2, W), the footage that is changed; not written to.
        donor: footage of the same shape from another place and camera.
        rng: chooses where and when.

    Raises:
        ValueError: unknown name, or shapes that differ.
    """
    if name not in MANIPULATIONS:
        raise ValueError(f"manipulation: got {name!r}, wanted one of {', '.join(MANIPULATIONS)}")
    if base.shape != donor.shape:
        raise ValueError(f"base and donor differ in shape: got {base.shape} and {donor.shape}")
    return MANIPULATIONS[name](base, donor, rng)


def splice_region(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """A moving part of the view is replaced by the donor's, whose grain and texture are another camera's."""
    forged = base.copy()
    for t, mask in enumerate(_moving_region(base, rng)):
        _paste(forged[t], donor[t], mask)
    return forged


def resynthesise_region(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """A moving part of the view is generated anew at low resolution: no grain, but an upsampler's lattice."""
    del donor
    forged = base.copy()
    height, width = _luma_size(base)
    factor = max(4, 4 * round(min(height, width) / 72))
    lattice = _lattice(height, width, max(4, 2 * round(max(height, width) / 56)), rng.uniform(7, 12))
    for t, mask in enumerate(_moving_region(base, rng)):
        luma = split_planes(base[t])[0]
        coarse = resize_plane(luma, height // factor, width // factor)
        smooth = np.clip(np.rint(resize_plane(coarse, height, width) + lattice), 16, 235).astype(np.uint8)
        np.copyto(split_planes(forged[t])[0], smooth, where=mask)
    return forged


def duplicate_frames(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """One frame is repeated for about half of the clip: what happened meanwhile is hidden."""
    del donor
    length = round(len(base) * rng.uniform(0.45, 0.6))
    start = int(rng.integers(0, len(base) - length + 1))
    source = np.arange(len(base))
    source[start : start + length] = start
    return base[source]


def drop_frames(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """Most frames are dropped at several places, and the gaps filled by holding the last frame that is left."""
    del donor
    hold = max(2, round(len(base) * rng.uniform(0.28, 0.36)))
    source = np.arange(len(base))
    phase = int(rng.integers(0, hold))
    held = np.maximum(source - (source + phase) % hold, 0)
    return np.asarray(base[held])


def splice_time(base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """A stretch of a third to a half of the clip is replaced by other footage."""
    length = round(len(base) * rng.uniform(0.34, 0.5))
    start = int(rng.integers(len(base) // 6, len(base) - length + 1))
    forged = base.copy()
    forged[start : start + length] = donor[start : start + length]
    return forged


MANIPULATIONS: dict[str, Callable[[Planes, Planes, np.random.Generator], Planes]] = {
    "region_splice": splice_region,
    "local_resynthesis": resynthesise_region,
    "frame_duplication": duplicate_frames,
    "frame_drop": drop_frames,
    "temporal_splice": splice_time,
}
USES_DONOR = frozenset({"region_splice", "temporal_splice"})  # the others leave their donor unread


def _luma_size(frames: Planes) -> tuple[int, int]:
    return frames.shape[1] * 2 // 3, frames.shape[2]


def _moving_region(frames: Planes, rng: np.random.Generator) -> list[Mask]:
    """One mask (H, W) per frame: a blob of a fifth to a third of the view, wandering in a straight line."""
    height, width = _luma_size(frames)
    half_area = rng.uniform(0.20, 0.32) / np.pi
    stretch = rng.uniform(0.75, 1.35)
    half_height, half_width = np.sqrt(half_area) * stretch * height, np.sqrt(half_area) / stretch * width
    margin = 0.25
    begin, end = rng.uniform(margin, 1 - margin, (2, 2))
    rows, columns = np.arange(height)[:, None], np.arange(width)
    masks = []
    for share in np.linspace(0, 1, len(frames)):
        row, column = (begin + (end - begin) * share) * (height, width)
        distance = ((rows - row) / half_height) ** 2 + ((columns - column) / half_width) ** 2
        masks.append(distance <= 1)
    return masks


def _paste(target: Planes, source: Planes, mask: Mask) -> None:
    for to_plane, from_plane in zip(split_planes(target), split_planes(source), strict=True):
        step = mask.shape[0] // to_plane.shape[0]
        np.copyto(to_plane, from_plane, where=mask[::step, ::step])


def _lattice(height: int, width: int, period: int, amplitude: float) -> Plane:
    """A checkerboard (H, W) of +-amplitude with the given period in pixels."""
    rows = (np.arange(height) // (period // 2) % 2)[:, None]
    columns = np.arange(width) // (period // 2) % 2
    return np.where(rows == columns, np.float32(amplitude), np.float32(-amplitude))
