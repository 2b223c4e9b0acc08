"""Occlusion maps: how much each part of a clip raises the networks' logit of fake.

A tile is deleted by replacing it with the local mean of its frame; the drop of the logit is the tile's value (Zeiler
and Fergus, "Visualizing and understanding convolutional networks", ECCV 2014). This works for any network.

A map can look convincing and mean nothing. So it is shown only if it passes a deletion check: deleting what it marks
must lower the logit more than deleting the same shape elsewhere in the clip (after Petsiuk et al., "RISE", BMVC 2018).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from fvc_lib.services.progress import Tell, silent
from fvc_lib.tasks.video.verdicts.scoring import Networks
from fvc_lib.video.clips.clip_file import Pixels

Floats = npt.NDArray[np.floating]
Masks = Sequence[npt.NDArray[np.bool_]]

TILES = 8  # per side
BLOCKS = 2  # of frames; a tile is deleted in one block at a time
PLACEMENTS = 19  # of the same shape elsewhere, so the smallest possible p is 1 / 20
MAX_P = 0.05
LIMIT = (
    "The map shows what moved the networks' score in this clip, not what was forged. They may react to a trace that "
    "honest editing leaves as well, use only a part of what was changed, and find changes in time in no one place."
)
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.55)  # of the clip that is deleted
_MARKED, _OVERLAP, _TRIES = 0.2, 0.5, 1000
_TIMED_BATCHES = 3


@dataclass(frozen=True)
class DeletionCurve:
    """The logit while a growing share of the clip is deleted.

    Attributes:
        shares: float64 (P,), the deleted share of the clip, from 0 to 1.
        logits: float64 (P,), when the tiles with the highest values go first.
        others: float64 (R, P), when the same shape elsewhere goes first: the map shifted around and mirrored.
    """

    shares: Floats
    logits: Floats
    others: Floats

    @property
    def p_value(self) -> float:
        """One-sided, by rank: how often another place gives a curve with at most this area. Ties count against."""
        area, others = (np.trapezoid(each, self.shares) for each in (self.logits, self.others))
        return (1 + int((others <= area).sum())) / (1 + len(self.others))


@dataclass(frozen=True)
class OcclusionMap:
    """Where a clip looks fake.

    Attributes:
        clip: uint8 (T, 3, S, S).
        values: float32 (T, S, S) in [0, 1], constant within a tile; 0 where nothing speaks for fake.
        top: the drop of the logit that 1 stands for.
        deletion: the check; None where there was nothing to check.
        why_hidden: why the map must not be shown; empty: it passed.
    """

    clip: Pixels
    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    top: float = 0.0
    deletion: DeletionCurve | None = None
    why_hidden: str = ""


def occlusion_map(
    networks: Networks,
    folds: Sequence[int],
    clips: Pixels,
    *,
    max_minutes: float = np.inf,
    tiles: int = TILES,
    blocks: int = BLOCKS,
    tell: Tell = silent,
) -> OcclusionMap:
    """Map the one of ``clips`` with the highest mean logit; deterministic.

    Memory is that of the networks' own micro-batch.

    Args:
        networks: of a run or bundle.
        folds: whose networks' mean logit is explained.
        clips: uint8 (N, T, 3, S, S), as the networks see them.
        max_minutes: no map is made where a timed batch shows that it would take longer.
        tiles: per side of the picture; black bars belong to the tiles next to them.
        blocks: of frames.
        tell: receives the number of forward passes done and their total.

    Raises:
        FvcError: as ``Networks.logits``.
    """
    whole = np.mean([networks.raw_logits(networks.network(fold), clips) for fold in folds], axis=0)
    clip = clips[int(whole.argmax())]
    cell_of_pixel, shape = _cells(clip, tiles, blocks)
    num_cells = int(np.prod(shape))
    num_passes = len(folds) * (1 + num_cells + 2 + (1 + PLACEMENTS) * len(_SHARES))
    minutes = _seconds_per_pass(networks, folds[0], clip) * num_passes / 60
    if minutes > max_minutes:
        return OcclusionMap(
            clip, why_hidden=f"it would take about {np.ceil(minutes):,.0f} minutes on this machine, and "
            f"{max_minutes:.2g} are allowed (--map-minutes)",
        )  # fmt: skip
    empty, done = without_detail(clip), 0

    def mean_logits(deleted: Masks) -> Floats:
        nonlocal done
        found, size = np.zeros(len(deleted)), networks.batch_size
        for fold in folds:
            for first in range(0, len(deleted), size):
                gone = [cells[cell_of_pixel][:, None] for cells in deleted[first : first + size]]
                batch = np.stack([np.where(each, empty, clip) for each in gone])
                found[first : first + len(gone)] += networks.raw_logits(networks.network(fold), batch)
                done += len(gone)
                tell("mapping where it looks fake", done, num_passes)
        return found / len(folds)

    before, *after = mean_logits([np.zeros(num_cells, bool), *np.eye(num_cells, dtype=bool)])
    drops = np.reshape(before - np.array(after), shape)
    if not drops.max() > 0:
        return OcclusionMap(clip, why_hidden="deleting a tile lowers the score nowhere in the clip")
    deletion = _deletion_curve(mean_logits, drops)
    why_hidden = ""
    if deletion.p_value > MAX_P:
        why_hidden = (
            f"deleting what it marks lowers the score no more than deleting as much elsewhere (p = "
            f"{deletion.p_value:.2f}, at most {MAX_P:g} is allowed)"
        )
    return OcclusionMap(
        clip=clip,
        values=np.clip(drops.ravel()[cell_of_pixel] / drops.max(), 0, None).astype(np.float32),
        top=float(drops.max()),
        deletion=deletion,
        why_hidden=why_hidden,
    )


def _seconds_per_pass(networks: Networks, fold: int, clip: Pixels) -> float:
    batch, seconds = np.repeat(clip[None], networks.batch_size, axis=0), []
    for _ in range(_TIMED_BATCHES):
        begin = time.perf_counter()
        networks.raw_logits(networks.network(fold), batch)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / len(batch)


def _deletion_curve(mean_logits: Any, drops: Floats) -> DeletionCurve:
    counts = sorted({round(share * drops.size) for share in (0, *_SHARES, 1)})
    masks = [np.zeros(drops.size, bool), np.ones(drops.size, bool)]
    for order in (np.argsort(-each.ravel(), kind="stable") for each in (drops, *_elsewhere(drops))):
        for count in counts[1:-1]:
            masks.append(np.zeros(drops.size, bool))
            masks[-1][order[:count]] = True
    begin, end, *inner = mean_logits(masks)
    rows = np.reshape(inner, (1 + PLACEMENTS, -1))
    rows = np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (begin, end)))
    return DeletionCurve(np.array(counts) / drops.size, rows[0], rows[1:])


def _elsewhere(drops: Floats) -> Iterator[Floats]:
    """Yield ``drops`` in ``PLACEMENTS`` other places: rolled along each axis, perhaps mirrored.

    At most half of the fifth that ``drops`` marks most is marked again, as far as ``_TRIES`` draws find such places.
    """
    generator, size = np.random.default_rng(0), min(round(_MARKED * drops.size), int((drops > 0).sum()))
    marked = np.argsort(-drops.ravel(), kind="stable")[:size]
    for _ in range(PLACEMENTS):
        for _ in range(_TRIES):
            shift = tuple(int(generator.integers(side)) for side in drops.shape)
            axes = tuple(axis for axis in (1, 2) if generator.integers(2))
            moved = np.flip(np.roll(drops, shift, (0, 1, 2)), axes)
            again = np.argsort(-moved.ravel(), kind="stable")[:size]
            if np.intersect1d(marked, again).size <= _OVERLAP * size:
                break
        yield moved


def _cells(clip: Pixels, tiles: int, blocks: int) -> tuple[npt.NDArray[np.int64], tuple[int, int, int]]:
    """Return the cell of every pixel, int64 (T, S, S), and the number of blocks, rows and columns of cells."""
    num_frames, _, height, width = clip.shape
    block = _parts(slice(0, num_frames), blocks, num_frames)
    row, column = (_parts(part, tiles, side) for part, side in zip(picture_of(clip), (height, width), strict=True))
    shape = (int(block[-1]) + 1, int(row[-1]) + 1, int(column[-1]) + 1)
    return (block[:, None, None] * shape[1] + row[:, None]) * shape[2] + column, shape


def _parts(part: slice, number: int, side: int) -> npt.NDArray[np.int64]:
    """Return for each of ``side`` places the nearest of at most ``number`` equal parts of ``part``."""
    length = part.stop - part.start
    places = np.clip(np.arange(side) - part.start, 0, length - 1)
    return np.asarray(places * min(number, length) // length)


def picture_of(clip: Pixels) -> tuple[slice, slice]:
    """Return rows and columns of the picture in a clip, uint8 (T, 3, S, S), without the black bars of letterboxing."""
    brightest = clip.max((0, 1))
    found = [np.flatnonzero(brightest.max(axis)) for axis in (1, 0)]
    rows, columns = (
        slice(int(each[0]), int(each[-1]) + 1) if each.size else slice(0, side)
        for each, side in zip(found, brightest.shape, strict=True)
    )
    return rows, columns


def without_detail(clip: Pixels) -> Pixels:
    """Return the clip with each frame averaged over an eighth of its side, to fill deleted parts."""
    empty, (rows, columns) = clip.copy(), picture_of(clip)
    side = max(1, clip.shape[-1] // 8) // 2 * 2 + 1
    picture = torch.from_numpy(clip[..., rows, columns]).float()
    means = F.avg_pool2d(picture, side, 1, side // 2, count_include_pad=False)
    empty[..., rows, columns] = means.round().byte().numpy()
    return empty
