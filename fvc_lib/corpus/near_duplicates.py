"""Perceptual hashes of videos, and the pairs whose hashes say: the same footage.

Per frame and window the signs of the 64 lowest DCT coefficients of luma (Zauner 2010, "Implementation and Benchmarking
of Perceptual Image Hash Functions", with the sign in place of the median, so that mirroring flips a fixed set of bits).
Windows are the whole picture and nine of nine tenths its sides: a cropped copy looks like one of its source's windows.

Measured on the sample corpus, median bits of the best window: copies of one event at most 8 of 64, different events at
least 20. Without windows cropped copies are as far apart as strangers (25); with five windows up to 12.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Grid = npt.NDArray[np.float64]

_GRID_SIDE = 160  # every picture is first averaged onto this grid; windows are parts of it
_KEPT = 0.9  # share of the picture's sides that a window keeps
_SPANS = ((0.0, 1.0), (0.0, _KEPT), ((1 - _KEPT) / 2, (1 + _KEPT) / 2), (1 - _KEPT, 1.0))  # along one axis
_WINDOWS = ((0, 0), *((down, right) for down in (1, 2, 3) for right in (1, 2, 3)))  # spans along both; the whole first
_NOISE_AMPLITUDE = 0.25  # grey levels; a weaker coefficient has its sign by chance
_MIN_SIGNIFICANT = 32  # of 64 coefficients; flat, black and striped pictures have fewer and get no hash
_DARK_LEVEL = 24.0  # rows and columns never brighter on average are bars
_BLOCK_PAIRS = 1 << 16


def perceptual_hash(frames: npt.NDArray[np.uint8]) -> str:
    """The hash of a video by its sampled frames.

    Black bars are cut off first, so letterboxed frames hash as the picture does. Frames too plain to be told from
    others hash to zeros, which match nothing.

    Args:
        frames: uint8 (T, 3, H, W) RGB, at the same relative times for all videos that are to be compared.

    Returns:
        T frames joined by ``-``; each is 10 windows of 16 hex digits.

    Raises:
        ValueError: another shape or dtype, or no frame.
    """
    if frames.ndim != 4 or frames.shape[1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"frames: got {frames.dtype} {frames.shape}, wanted non-empty uint8 (T, 3, H, W)")
    grids = _luma_grids(frames)
    return "-".join("".join(f"{value:016x}" for value in frame) for frame in _sign_bits(_amplitudes(grids)).tolist())


def near_duplicate_pairs(hashes: Sequence[str | None], max_bits: int) -> list[tuple[int, int]]:
    """Index pairs (i < j), ascending, of videos that show the same footage.

    They do when, the right way round or mirrored, more than half of the frames of one differ in at most ``max_bits``
    of 64 bits from the frames at the same relative times in one and the same window of the other. Compared in blocks:
    memory grows with the number of videos and of pairs found, not with its square.

    Args:
        hashes: what ``perceptual_hash`` gave; ``None`` (no hash) matches nothing.
        max_bits: 0 to 64.

    Raises:
        ValueError: ``max_bits`` out of range, or a text that is no perceptual hash.
    """
    if not 0 <= max_bits <= 64:
        raise ValueError(f"max_bits: got {max_bits}, wanted 0 to 64")
    known = np.array([i for i, text in enumerate(hashes) if text is not None], np.int64)
    if len(known) < 2:
        return []
    table = parse_hashes([text for text in hashes if text is not None])
    # Where more than half of the frames agree, one of every second frame does: the others need no look at first.
    screen = _with_matchless_zeros(table)[:, ::2]
    pairs: list[tuple[int, int]] = []
    for first, last, start, stop in _blocks(len(known)):
        nearest = _nearest_bits(screen[first:last], screen[start:stop])
        left, right = (
            offset + place for offset, place in zip((first, start), np.nonzero(nearest <= max_bits), strict=True)
        )
        left, right = left[left < right], right[left < right]
        same = _show_the_same(table[left], table[right], max_bits)
        pairs.extend(zip(known[left[same]].tolist(), known[right[same]].tolist(), strict=True))
    return sorted(pairs)


def parse_hashes(texts: Sequence[str]) -> Hashes:
    """The texts as uint64 (N, T, 10); hashes of fewer frames repeat theirs at the nearest relative time.

    Raises:
        ValueError: a text that is no perceptual hash.
    """
    parsed = [_parse(text) for text in texts]
    num_frames = max(len(hashes) for hashes in parsed)
    share = (np.arange(num_frames) + 0.5) / num_frames
    return np.stack([hashes[(share * len(hashes)).astype(np.int64)] for hashes in parsed])


def _parse(text: str) -> Hashes:
    try:
        raw = [bytes.fromhex(frame) for frame in text.split("-")]
        return np.frombuffer(b"".join(raw), ">u8").reshape(len(raw), len(_WINDOWS)).astype(np.uint64)
    except ValueError as error:
        raise ValueError(
            f"perceptual hash: got {text[:60]!r}, wanted {16 * len(_WINDOWS)} hex digits per frame"
        ) from error


def _blocks(count: int) -> Iterator[tuple[int, int, int, int]]:
    side = int(_BLOCK_PAIRS**0.5)
    for first in range(0, count, side):
        for start in range(first, count, side):
            yield first, min(first + side, count), start, min(start + side, count)


def _with_matchless_zeros(table: Hashes) -> Hashes:
    """(N, T, 10) with numbers of no meaning for zeros, which must not come up as candidates by the million."""
    noise = np.random.default_rng(0).integers(1, 2**64, table.shape, np.uint64)
    return np.where(table == 0, noise, table)


def _nearest_bits(left: Hashes, right: Hashes) -> npt.NDArray[np.uint8]:
    """(N, M): bits in which the nearest of the frames of (N, T, 10) and (M, T, 10) differ, over windows and mirrors."""
    nearest = np.full((len(left), len(right)), 64, np.uint8)
    difference, bits = np.empty(nearest.shape, np.uint64), np.empty(nearest.shape, np.uint8)
    for frame, (one, other, mirror) in itertools.product(range(left.shape[1]), _VIEWS):
        np.bitwise_xor((left[:, frame, one] ^ mirror)[:, None], right[:, frame, other], out=difference)
        np.bitwise_count(difference, out=bits)
        np.minimum(nearest, bits, out=nearest)
    return nearest


def _show_the_same(left: Hashes, right: Hashes, max_bits: int) -> npt.NDArray[np.bool_]:
    """(K,): whether more than half of the frames of (K, T, 10) and (K, T, 10) agree in one and the same view."""
    same = np.zeros(len(left), np.bool_)
    for one, other, mirror in _VIEWS:
        a, b = left[:, :, one], right[:, :, other]
        agree = (np.bitwise_count(a ^ mirror ^ b) <= max_bits) & (a != 0) & (b != 0)
        same |= 2 * agree.sum(axis=1) > agree.shape[1]
    return same


def _luma_grids(frames: npt.NDArray[np.uint8]) -> Grid:
    """Luma of the picture without bars, averaged to (T, 160, 160), 0 to 255."""
    weights = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]
    row_levels, column_levels = np.zeros(frames.shape[2]), np.zeros(frames.shape[3])
    for frame in frames:
        luma = (frame * weights).sum(axis=0)
        row_levels = np.maximum(row_levels, luma.mean(axis=1))
        column_levels = np.maximum(column_levels, luma.mean(axis=0))
    rows, columns = _picture_span(row_levels), _picture_span(column_levels)
    return np.stack([_average((f[:, rows, columns] * weights).sum(axis=0), _GRID_SIDE) for f in frames])


def _picture_span(levels: npt.NDArray[np.float64]) -> slice:
    """The rows (or columns) between dark bars; all of them when less than a quarter would be left."""
    bright = np.flatnonzero(levels > _DARK_LEVEL)
    if len(bright) and 4 * (bright[-1] + 1 - bright[0]) >= len(levels):
        return slice(int(bright[0]), int(bright[-1]) + 1)
    return slice(0, len(levels))


def _average(picture: npt.NDArray[np.floating], side: int) -> Grid:
    """Area average of (..., H, W) onto (..., side, side), cell borders weighted by what they cut off."""
    averaged = picture.astype(np.float64)
    for _ in range(2):  # rows, then columns; each pass swaps the two
        averaged = np.swapaxes(_average_rows(averaged, side), -1, -2)
    return averaged


def _average_rows(picture: Grid, side: int) -> Grid:
    height = picture.shape[-2]
    total = np.concatenate([np.zeros_like(picture[..., :1, :]), np.cumsum(picture, axis=-2)], axis=-2)
    border = np.arange(side + 1) * (height / side)
    whole = np.minimum(border.astype(np.int64), height - 1)
    until = total[..., whole, :] + (border - whole)[:, None] * picture[..., whole, :]
    return np.asarray(np.diff(until, axis=-2) * (side / height))


def _lowest_frequencies() -> npt.NDArray[np.int64]:
    """The 64 (vertical, horizontal) frequencies nearest to zero, without zero itself, (64, 2)."""
    square = [(v, h) for v in range(12) for h in range(12) if v or h]
    return np.array(sorted(square, key=lambda f: (f[0] + f[1], f[0]))[:64])


def _cosines() -> Grid:
    """Per span the 12 lowest DCT-II frequencies, zero outside of it, scaled to give amplitudes, (4, 12, 160)."""
    position, frequency = (np.arange(_GRID_SIDE) + 0.5) / _GRID_SIDE, np.arange(12)[:, None]
    bases = []
    for begin, end in _SPANS:
        inside = (position > begin) & (position < end)
        wave = np.cos(np.pi * frequency * (position - begin) / (end - begin))
        bases.append(np.where(inside, wave, 0.0) * (2 / inside.sum()))
    return np.stack(bases)


_FREQUENCIES = _lowest_frequencies()
_COSINES = _cosines()
_BIT_VALUES = np.uint64(1) << np.arange(64, dtype=np.uint64)
# Mirroring left to right turns the sign of every odd horizontal frequency.
_MIRROR_BITS = np.uint64(_BIT_VALUES[_FREQUENCIES[:, 1] % 2 == 1].sum())

# The whole of one video against each window of the other, and the other way round, plain and mirrored.
_VIEWS = tuple(
    (one, other, mirror)
    for mirror in (np.uint64(0), _MIRROR_BITS)
    for one, other in [(0, 0), *((0, w) for w in range(1, len(_WINDOWS))), *((w, 0) for w in range(1, len(_WINDOWS)))]
)


def _amplitudes(grids: Grid) -> Grid:
    """Luma (T, 160, 160) -> amplitudes of the lowest frequencies in each window, in grey levels, (T, 10, 64)."""
    cosines = _COSINES.reshape(-1, _GRID_SIDE)
    spectra = (cosines @ grids @ cosines.T).reshape(len(grids), len(_SPANS), 12, len(_SPANS), 12)
    windows = [spectra[:, down, :, right] for down, right in _WINDOWS]
    return np.stack([window[:, _FREQUENCIES[:, 0], _FREQUENCIES[:, 1]] for window in windows], axis=1)


def _sign_bits(amplitudes: Grid) -> Hashes:
    """(..., 64) -> (...): bit k is set where amplitude k is positive; 0 where too few stand out of the noise."""
    # Rounded, so that a zero stays one whatever order a matrix product adds in.
    bits = np.where(amplitudes.round(6) > 0, _BIT_VALUES, np.uint64(0)).sum(axis=-1, dtype=np.uint64)
    significant = (np.abs(amplitudes) > _NOISE_AMPLITUDE).sum(axis=-1)
    return np.asarray(np.where(significant >= _MIN_SIGNIFICANT, bits, np.uint64(0)))
