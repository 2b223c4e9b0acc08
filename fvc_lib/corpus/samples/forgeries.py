"""Manipulate clips to make the fakes of the sample corpus.

Footage is planar yuv420p, uint8 (T, 3*H/2, W). The manipulations are strong enough to be seen in six frames of 112
pixels: the corpus shows that a pipeline learns, not how hard real forgeries are. A manipulation first draws a
``Change``: where and when the clip is changed. Then it returns a changed copy of the base footage. Some manipulations
copy from donor footage, which has the same shape but another place and camera.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.samples import scenes
from fvc_lib.corpus.samples.files import split_planes
from fvc_lib.corpus.samples.scenes import Plane, Planes

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Region:
    """An ellipse that moves in a straight line through the clip; all numbers are shares of the frame's sides."""

    begin: tuple[float, float]  # centre (row, column) in the clip's first frame
    end: tuple[float, float]  # centre (row, column) in the last frame
    half_height: float
    half_width: float

    def masks(self, num_frames: int, height: int, width: int) -> list[Mask]:
        """Return one mask (height, width) per frame, True inside."""
        half_height, half_width = self.half_height * height, self.half_width * width
        begin, end = np.array(self.begin), np.array(self.end)
        rows, columns = np.arange(height)[:, None], np.arange(width)
        masks = []
        for share in np.linspace(0, 1, num_frames):
            row, column = (begin + (end - begin) * share) * (height, width)
            distance = ((rows - row) / half_height) ** 2 + ((columns - column) / half_width) ** 2
            masks.append(distance <= 1)
        return masks


@dataclass(frozen=True)
class Change:
    """Where and when a clip was changed."""

    first_frame: int
    end_frame: int  # index of the first frame after the change
    region: Region | None  # None: the whole frame


@dataclass(frozen=True)
class Manipulation:
    """One way of making a fake."""

    generator: str  # the stated tool
    draw: Callable[[int, np.random.Generator], Change]  # (number of frames, generator)
    apply: Callable[[Planes, Planes, Change, np.random.Generator], Planes]  # (base, donor, change, the same generator)
    uses_donor: bool = False


def _draw_region(num_frames: int, rng: np.random.Generator) -> Change:
    """Draw a change of all frames, in a moving region that covers a fifth to a third of the frame."""
    half_area = rng.uniform(0.20, 0.32) / np.pi
    stretch = rng.uniform(0.75, 1.35)
    half_height, half_width = np.sqrt(half_area) * stretch, np.sqrt(half_area) / stretch
    margin = 0.25
    begin, end = rng.uniform(margin, 1 - margin, (2, 2)).tolist()
    return Change(0, num_frames, Region(tuple(begin), tuple(end), float(half_height), float(half_width)))


def splice_region(base: Planes, donor: Planes, change: Change, _rng: np.random.Generator) -> Planes:
    """Return ``base`` with a moving region replaced by that of ``donor``, which has other grain and texture."""
    forged = base.copy()
    for target, source, mask in zip(forged, donor, _masks(base, change), strict=True):
        for to_plane, from_plane, step in zip(split_planes(target), split_planes(source), (1, 2, 2), strict=True):
            np.copyto(to_plane, from_plane, where=mask[::step, ::step])
    return forged


def resynthesise_region(base: Planes, _donor: Planes, change: Change, rng: np.random.Generator) -> Planes:
    """Return ``base`` with the luma of a moving region enlarged from a low resolution.

    The region has no camera grain, but a lattice such as upsampling networks leave.
    """
    forged = base.copy()
    height, width = base.shape[1] * 2 // 3, base.shape[2]
    factor = max(4, 4 * round(min(height, width) / 72))
    lattice = _lattice(height, width, max(4, 2 * round(max(height, width) / 56)), rng.uniform(7, 12))
    for t, mask in enumerate(_masks(base, change)):
        luma = split_planes(base[t])[0]
        coarse = scenes.resize_plane(luma, height // factor, width // factor)
        smooth = np.clip(np.rint(scenes.resize_plane(coarse, height, width) + lattice), 16, 235).astype(np.uint8)
        np.copyto(split_planes(forged[t])[0], smooth, where=mask)
    return forged


def _draw_stretch(num_frames: int, rng: np.random.Generator) -> Change:
    """Draw a change of the whole frame for about half of the clip."""
    length = round(num_frames * rng.uniform(0.45, 0.6))
    start = int(rng.integers(0, num_frames - length + 1))
    return Change(start, start + length, None)


def duplicate_frames(base: Planes, _donor: Planes, change: Change, _rng: np.random.Generator) -> Planes:
    """Return ``base`` with the frames of the change replaced by its first frame: the clip freezes."""
    source = np.arange(len(base))
    source[change.first_frame : change.end_frame] = change.first_frame
    return base[source]


def _draw_whole(num_frames: int, _rng: np.random.Generator) -> Change:
    return Change(0, num_frames, None)


def drop_frames(base: Planes, _donor: Planes, _change: Change, rng: np.random.Generator) -> Planes:
    """Return ``base`` with only a few of its frames, each repeated until the next one; the others are dropped."""
    hold = max(2, round(len(base) * rng.uniform(0.28, 0.36)))
    source = np.arange(len(base))
    phase = int(rng.integers(0, hold))
    held = np.maximum(source - (source + phase) % hold, 0)
    return np.asarray(base[held])


def _draw_splice(num_frames: int, rng: np.random.Generator) -> Change:
    """Draw a change of the whole frame for a third to a half of the clip, not at its beginning."""
    length = round(num_frames * rng.uniform(0.34, 0.5))
    start = int(rng.integers(num_frames // 6, num_frames - length + 1))
    return Change(start, start + length, None)


def splice_time(base: Planes, donor: Planes, change: Change, _rng: np.random.Generator) -> Planes:
    """Return ``base`` with the frames of the change replaced by those of ``donor``."""
    forged = base.copy()
    forged[change.first_frame : change.end_frame] = donor[change.first_frame : change.end_frame]
    return forged


MANIPULATIONS = {
    "region_splice": Manipulation("collage", _draw_region, splice_region, uses_donor=True),
    "local_resynthesis": Manipulation("resynth", _draw_region, resynthesise_region),
    "frame_duplication": Manipulation("retimer", _draw_stretch, duplicate_frames),
    "frame_drop": Manipulation("retimer", _draw_whole, drop_frames),
    "temporal_splice": Manipulation("collage", _draw_splice, splice_time, uses_donor=True),
}


def forge(name: str, base: Planes, donor: Planes, rng: np.random.Generator) -> Planes:
    """Return ``base`` (T, 3*H/2, W) changed by the manipulation called ``name``; ``rng`` decides where and when."""
    manipulation = MANIPULATIONS[name]
    return manipulation.apply(base, donor, manipulation.draw(len(base), rng), rng)


def _masks(frames: Planes, change: Change) -> list[Mask]:
    assert change.region is not None
    return change.region.masks(len(frames), frames.shape[1] * 2 // 3, frames.shape[2])


def _lattice(height: int, width: int, period: int, amplitude: float) -> Plane:
    """Return a checkerboard of +amplitude and -amplitude, (H, W), with the given period in pixels."""
    rows = (np.arange(height) // (period // 2) % 2)[:, None]
    columns = np.arange(width) // (period // 2) % 2
    return np.where(rows == columns, np.float32(amplitude), np.float32(-amplitude))
