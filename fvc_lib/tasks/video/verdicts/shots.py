"""What a video consists of, as far as its frames show it: several shots, black frames, stills, slide shows.

A detector judges a video as one thing. Where it is none, a reader has to know. Cuts are found where two frames that
follow closely differ far more than their neighbours do (as in Boreczky and Rowe, 1996, by pixel differences with a
local threshold): hard cuts, and no fades.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NOTHING_ODD = "One shot with motion: no cut, black frame or still was found."
_GRID = 16  # frames are compared as so many by so many means
_BLACK = 20.0  # grey levels of 255: darker on average, and
_FLAT = 8.0  # no cell further from that average
_CUT = 18.0  # grey levels between two frames, at least, and
_CUT_TIMES = 4.0  # so many times the median of the changes around
_AROUND = 4  # changes to each side
# Grey levels in any cell between any two frames. A coder's noise on a still seldom reaches it; a talking head in front
# of a still wall does by far, although the mean over all cells hardly changes from one frame to the next.
_FROZEN = 2.0
_STILL_SECONDS = 1.0  # between two frames that follow closely slow motion does not show
_SHORT_SECONDS = 1.0
_MISSING = 0.05  # share of what a container states
_CLOSE_SECONDS = 0.6  # frames further apart tell nothing about cuts
_MOSTLY = 0.8


@dataclass(frozen=True)
class Footage:
    """What the frames of a video show.

    Attributes:
        cuts: float64 (C,), seconds at which a new shot begins.
        black_share: the share of its frames that are black.
        still_share: the share of its time in stretches of a second or more in which nothing moves.
        sentences: what a reader has to know, if anything.
    """

    cuts: npt.NDArray[np.float64]
    black_share: float
    still_share: float
    sentences: tuple[str, ...]


def footage_of(frames: npt.NDArray[np.uint8], seconds: npt.NDArray[np.floating]) -> Footage:
    """Look at frames of a video in the order of their time.

    Args:
        frames: uint8 (N, 3, H, W), N >= 1; padding is black and does not matter.
        seconds: (N,), ascending.
    """
    cells = np.stack([_cells(frame) for frame in frames])
    black = _black(cells)
    if len(cells) == 1:
        told = ("Its one frame is black.",) if black[0] else ()
        return Footage(np.empty(0), float(black[0]), 1.0, told)
    gaps = np.diff(seconds)
    changes = np.abs(np.diff(cells, axis=0)).mean((1, 2))
    still, close = _still(cells, seconds), gaps <= _CLOSE_SECONDS
    is_cut = (changes >= _CUT) & close & (changes >= _CUT_TIMES * _typical(changes))
    black_share, still_share = float(black.mean()), float(gaps[still].sum() / gaps.sum())
    cuts = np.asarray(seconds[1:][is_cut], np.float64)
    return Footage(cuts, black_share, still_share, tuple(_sentences(cuts, black, still, gaps, changes, close)))


def length_sentences(
    num_frames: int, seconds: float, num_sampled: int, stated_frames: int | None, stated_seconds: float | None
) -> Iterator[str]:
    """What a reader has to know of a video's length; what its container states is None where it states nothing.

    Args:
        num_frames: that were decoded.
        seconds: likewise.
        num_sampled: frames of a clip as the networks see it.
        stated_frames: by the container.
        stated_seconds: likewise.
    """
    if num_frames < num_sampled:
        yield too_few(num_frames, num_sampled)
    if seconds < _SHORT_SECONDS and num_frames > 1:
        yield f"Very short: {num_frames} frames, {seconds:.2f} seconds."
    told = []
    if stated_frames is not None and num_frames < stated_frames * (1 - _MISSING):
        told.append(f"{stated_frames:,} frames, of which {num_frames:,} could be decoded")
    if stated_seconds is not None and seconds < stated_seconds * (1 - _MISSING) - 2 * seconds / num_frames:
        told.append(f"{stated_seconds:.1f} seconds, of which {seconds:.1f} could be decoded")
    if told:
        yield f"Its container states {', and '.join(told)}: the file was cut off, or its container trims it."


def too_few(num_frames: int, num_sampled: int) -> str:
    """A sentence where a video has fewer frames than a network looks at."""
    return (
        f"It has {num_frames} frame{'s' * (num_frames != 1)} and the networks look at {num_sampled}, so some are shown "
        "to them more than once."
    )


def is_black(clips: npt.NDArray[np.uint8]) -> bool:
    """Whether all frames of ``clips``, uint8 (N, T, 3, H, W), are black."""
    return all(_black(_cells(frame)[None])[0] for frame in clips.reshape(-1, *clips.shape[2:]))


def is_frozen(clips: npt.NDArray[np.uint8]) -> bool:
    """Whether nothing moves in ``clips``, uint8 (N, T, 3, H, W): all frames are one, but for a coder's noise."""
    lowest = highest = None
    for frame in clips.reshape(-1, *clips.shape[2:]):
        cells = _cells(frame)
        lowest = cells if lowest is None else np.minimum(lowest, cells)
        highest = cells if highest is None else np.maximum(highest, cells)
        if (highest - lowest).max() >= _FROZEN:  # mostly so at the second frame
            return False
    return True


def _black(cells: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Of frames (N, G, G), bool (N,)."""
    mean = cells.mean((1, 2), keepdims=True)
    return np.asarray((mean.ravel() < _BLACK) & (np.abs(cells - mean).max((1, 2)) < _FLAT))


def _still(cells: npt.NDArray[np.float64], seconds: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """Of the times between frames (N, G, G), bool (N - 1,): those in a stretch, long enough, that no cell changes in.

    A stretch is long enough from a second on, or where it is the whole video.
    """
    still, begin, lowest, highest = np.zeros(len(cells) - 1, bool), 0, cells[0], cells[0]
    for end, frame in enumerate(cells[1:], 1):
        lowest, highest = np.minimum(lowest, frame), np.maximum(highest, frame)
        if (highest - lowest).max() >= _FROZEN:
            begin, lowest, highest = end, frame, frame
        elif seconds[end] - seconds[begin] >= min(_STILL_SECONDS, seconds[-1] - seconds[0]):
            still[begin:end] = True
    return still


def _cells(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Means of luma (BT.601) over a grid, float64 (G, G) in grey levels; smaller where the frame is."""
    luma = np.tensordot(np.array([0.299, 0.587, 0.114]), frame, 1)
    rows, columns = (min(_GRID, side) for side in luma.shape)
    parts = [np.array_split(np.arange(side), number) for side, number in zip(luma.shape, (rows, columns), strict=True)]
    above = np.stack([luma[part].mean(0) for part in parts[0]])
    return np.asarray(np.stack([above[:, part].mean(1) for part in parts[1]], axis=1))


def _typical(changes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Median of the changes around each, itself left out; 0 where there are none."""
    typical = np.zeros(len(changes))
    for place in range(len(changes)):
        around = np.r_[changes[max(0, place - _AROUND) : place], changes[place + 1 : place + 1 + _AROUND]]
        if around.size:
            typical[place] = np.median(around)
    return typical


def _sentences(
    cuts: npt.NDArray[np.float64],
    black: npt.NDArray[np.bool_],
    still: npt.NDArray[np.bool_],
    gaps: npt.NDArray[np.floating],
    changes: npt.NDArray[np.float64],
    close: npt.NDArray[np.bool_],
) -> list[str]:
    told = []
    still_share = gaps[still].sum() / gaps.sum()
    if black.all():
        return ["All frames that were looked at are black: there is nothing to judge."]
    if black.any():
        told.append(f"{black.mean():.0%} of the frames that were looked at are black.")
    if still.all():
        told.append("A still: nothing moves in it, so networks that look at motion have nothing to look at.")
    elif still_share >= _MOSTLY and (changes[~still] >= _CUT).mean() > 0.5:
        told.append(
            f"A slide show: for {still_share:.0%} of the time nothing moves, and then the picture changes at once."
        )
    elif still_share >= _MOSTLY:
        told.append(f"For {still_share:.0%} of the time nothing moves.")
    elif len(cuts):
        times = ", ".join(f"{each:.1f}" for each in cuts[:5]) + (" and more" if len(cuts) > 5 else "")
        told.append(
            f"{len(cuts) + 1} shots: cuts at {times} s. The score is of all of them together; one may be real and "
            "another not."
        )
    if not close.any():
        told.append(f"Frames were looked at {np.median(gaps):.1f} s apart, which is too far to tell a cut from motion.")
    return told
