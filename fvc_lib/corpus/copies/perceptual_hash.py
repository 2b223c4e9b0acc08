"""Perceptual hashes of videos: near each other for copies of one footage, far apart for different footage.

A hash has 30 codes per sampled frame, a code for each window. A window is the whole picture, or a part of it with 95,
90 or 85% of its height and width and borders at multiples of 5%. So a copy cropped by up to 15% resembles a window of
its source: the borders of the nearest window are at most 2.5% of a side away.

A code is 64 bits: the signs of the 64 lowest DCT coefficients of luma in a window (after Zauner 2010, "Implementation
and Benchmarking of Perceptual Image Hash Functions", who compares with the median instead). Because signs are used,
mirroring a picture flips a fixed set of bits.

A frame may also have a look: a tiny picture of 12 x 12 luma and two times 6 x 6 colour values. Looks tell different
frames with equal codes apart.

All three sizes of windows are needed. Measured on 40 generated videos and 41 real clips with 46 edited copies of each:
with windows of 90% only, 8% fewer copies are found, and hardly any copy that is cropped by 15% in a corner.
"""

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint64]
Hashes = npt.NDArray[np.uint64]  # (..., T, 30): codes of T frames with 30 windows each
Grid = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

GRID_SIDE = 160  # every picture is first averaged onto this grid; windows are parts of it
STEPS = 20  # borders of windows are multiples of a 20th of a side
# (begin, end) of each span in steps along one axis. The first span is the whole side. At most 3 steps are cut off.
SPANS = tuple((begin, begin + STEPS - cut) for cut in range(4) for begin in range(cut + 1))
# A window is a pair of spans, (down, right), as indices into ``SPANS``; the first window is the whole picture. Height
# and width are cut by the same share.
WINDOWS = tuple(
    (down, right)
    for down, (top, bottom) in enumerate(SPANS)
    for right, (left, end) in enumerate(SPANS)
    if bottom - top == end - left
)
LOOK_LUMA_SIDE, LOOK_COLOUR_SIDE = 12, 6
LOOK_BYTES = LOOK_LUMA_SIDE**2 + 2 * LOOK_COLOUR_SIDE**2
_FRAME_BYTES = 8 * len(WINDOWS)
_LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]


def perceptual_hash(frames: Pixels) -> str:
    """Return the hash of a video from its sampled frames.

    Black bars are cut off first, so they do not change the hash. Codes of windows that are too plain to be compared are
    0, which matches nothing.

    Args:
        frames: T RGB frames, uint8 (T, 3, H, W), sampled at the same relative times in all videos that are compared.

    Returns:
        T texts joined by ``-``, one per frame: the Base64 of 30 big-endian codes of 64 bits, followed by the look.
    """
    frames = without_bars(frames)
    grids = luma_grids(frames)
    return hash_text(codes_of(grids), _looks(frames, grids))


def hash_text(codes: Hashes, looks: Pixels | None = None) -> str:
    """Return the hash of a video as text: the codes and looks of each frame in Base64, frames joined by ``-``.

    ``parse_hashes`` reads such texts.

    Args:
        codes: codes of T frames with 30 windows each, uint64 (T, 30).
        looks: looks of the frames, uint8 (T, 216); None: the hash has no looks.
    """
    table = codes.astype(">u8").view(np.uint8)
    if looks is not None:
        table = np.concatenate([table, looks], axis=1)
    return "-".join(base64.b64encode(frame.tobytes()).decode("ascii") for frame in table)


def parse_hashes(texts: Sequence[str]) -> tuple[Hashes, Pixels]:
    """Parse N texts of ``perceptual_hash``; return (codes, looks), uint64 (N, T, 30) and uint8 (N, T, 216).

    Each text holds T frames. A frame has 30 codes of 64 bits and a look (a tiny picture). If the hashes have no looks,
    the shape of the looks is (N, T, 0).

    Raises:
        ValueError: a text is no perceptual hash, or differs from the first in its number of frames.
    """
    num_frames, num_bytes = 1, _FRAME_BYTES
    for text in texts[:1]:
        num_frames = text.count("-") + 1
        if len(text) > num_frames * (4 * _FRAME_BYTES // 3 + 1):
            num_bytes += LOOK_BYTES
    codes = np.empty((len(texts), num_frames, len(WINDOWS)), np.uint64)
    looks = np.empty((len(texts), num_frames, num_bytes - _FRAME_BYTES), np.uint8)
    for place, text in enumerate(texts):
        try:
            content = b"".join(base64.b64decode(frame, validate=True) for frame in text.split("-"))
            frames = np.frombuffer(content, np.uint8).reshape(num_frames, num_bytes)
        except ValueError as error:
            wanted = f"{num_frames} frames of {num_bytes} bytes in Base64"
            raise ValueError(f"perceptual hash: got {text[:60]!r}, wanted {wanted}. Index again.") from error
        codes[place] = np.ascontiguousarray(frames[:, :_FRAME_BYTES]).view(">u8")
        looks[place] = frames[:, _FRAME_BYTES:]
    return codes, looks


def _looks(frames: Pixels, grids: Grid) -> Pixels:
    """Return the looks (tiny pictures) of T frames, uint8 (T, 216).

    A look consists of 12 x 12 values of luma, then 6 x 6 (blue - luma) / 2 + 128 and 6 x 6 (red - luma) / 2 + 128.

    Args:
        frames: RGB, uint8 (T, 3, H, W).
        grids: result of ``luma_grids`` for the frames, (T, 160, 160).
    """
    luma = grid_average(grids, LOOK_LUMA_SIDE)
    rgb = np.stack([grid_average(frame, LOOK_COLOUR_SIDE) for frame in frames])
    coarse_luma = grid_average(grids, LOOK_COLOUR_SIDE)
    colour = 128 + (rgb[:, [2, 0]] - coarse_luma[:, None]) / 2
    rows = [part.reshape(len(frames), -1) for part in (luma, colour)]
    values = np.concatenate(rows, axis=1)
    return np.asarray(values.round().clip(0, 255).astype(np.uint8))


def without_bars(frames: Pixels) -> Pixels:
    """Return RGB frames, uint8 (T, 3, H, W), without the borders (rows and columns) that are black in all frames."""
    row_levels = np.zeros(frames.shape[2])
    column_levels = np.zeros(frames.shape[3])
    for frame in frames:
        luma = (frame * _LUMA_WEIGHTS).sum(axis=0)
        row_levels = np.maximum(row_levels, luma.mean(axis=1))
        column_levels = np.maximum(column_levels, luma.mean(axis=0))
    return frames[:, :, _picture_span(row_levels), _picture_span(column_levels)]


def luma_grids(frames: Pixels) -> Grid:
    """Return the luma of RGB frames, uint8 (T, 3, H, W), averaged by area to (T, 160, 160), 0 to 255."""
    lumas = ((frame * _LUMA_WEIGHTS).sum(axis=0) for frame in frames)
    return np.stack([grid_average(luma, GRID_SIDE) for luma in lumas])


def _picture_span(levels: Grid) -> slice:
    """Return the slice of the rows (or columns) of a picture between the dark bars at both ends.

    If less than a quarter of the rows would remain, the slice holds all rows.

    Args:
        levels: for each row (or column) the mean luma, 0 to 255, in the frame where it is largest. A row with at most
            24 is dark.
    """
    bright = np.flatnonzero(levels > 24.0)
    if len(bright) and 4 * (bright[-1] + 1 - bright[0]) >= len(levels):
        return slice(int(bright[0]), int(bright[-1]) + 1)
    return slice(0, len(levels))


def grid_average(picture: Grid | Floats | Pixels, side: int) -> Grid:
    """Return ``picture`` (..., H, W), averaged by area to (..., side, side); smaller pictures are enlarged."""
    averaged = picture.astype(np.float64)
    for _ in range(2):  # rows, then columns; each pass swaps the two
        averaged = _average_along_rows(np.swapaxes(averaged, -1, -2), side)
    return averaged


def _average_along_rows(picture: Grid, side: int) -> Grid:
    """Return ``picture`` (..., H, W), with every row averaged to ``side`` values, (..., H, side)."""
    width = picture.shape[-1]
    picture = np.ascontiguousarray(picture)  # sums along contiguous memory are five times as fast
    total = np.zeros((*picture.shape[:-1], width + 1))
    np.cumsum(picture, axis=-1, out=total[..., 1:])
    border = np.arange(side + 1) * (width / side)
    whole = np.minimum(border.astype(np.int64), width - 1)
    cut_off = (border - whole) * picture[..., whole]  # of the cell that a border cuts
    until = total[..., whole] + cut_off
    return np.asarray(np.diff(until, axis=-1) * (side / width))


def _cosines() -> Grid:
    """Return the 12 DCT-II basis functions of lowest frequency on each of the 10 spans, (10, 12, 160).

    A span is the whole side of a picture or a part of it (``SPANS``). The axes of the result are span, frequency and
    position along the side. A function is zero outside its span. The product of a picture with these functions gives
    amplitudes in grey levels.
    """
    position = (np.arange(GRID_SIDE) + 0.5) / GRID_SIDE
    frequency = np.arange(12)[:, None]
    bases = []
    shares = ((first / STEPS, last / STEPS) for first, last in SPANS)
    for begin, end in shares:
        inside = (position > begin) & (position < end)
        angle = np.pi * frequency * (position - begin) / (end - begin)
        wave = np.where(inside, np.cos(angle), 0.0)
        bases.append(wave * (2 / inside.sum()))
    return np.stack(bases)


# (64, 2): the (vertical, horizontal) frequencies with the lowest sums, without (0, 0).
_FREQUENCIES: Places = np.array(sorted(np.ndindex(12, 12), key=lambda pair: (sum(pair), pair))[1:65])
_COSINES = _cosines()
_DOWN = np.array([down for down, _ in WINDOWS])
_RIGHT = np.array([right for _, right in WINDOWS])
_BIT_VALUES = np.uint64(1) << np.arange(64, dtype=np.uint64)
# Mirroring left to right inverts the sign of the amplitude of every odd horizontal frequency.
MIRROR_BITS = np.uint64(_BIT_VALUES[_FREQUENCIES[:, 1] % 2 == 1].sum())


def codes_of(grids: Grid) -> Hashes:
    """Return the codes of T frames, one for each of 30 windows, uint64 (T, 30).

    Bit k of a code is set if DCT amplitude k of the window is positive. A code is 0 if more than half of its amplitudes
    are so small that they may be noise. ``grids`` is the result of ``luma_grids``, (T, 160, 160).
    """
    cosines = _COSINES.reshape(-1, GRID_SIDE)
    products = cosines @ grids @ cosines.T
    spectra = products.reshape(len(grids), len(SPANS), 12, len(SPANS), 12)
    windows = [spectra[:, down, :, right] for down, right in WINDOWS]
    down, right = _FREQUENCIES.T
    amplitudes = np.stack([window[:, down, right] for window in windows], axis=1)
    # Rounded, so that a zero stays zero in whatever order a matrix product adds.
    is_positive = amplitudes.round(6) > 0
    bits = np.where(is_positive, _BIT_VALUES, np.uint64(0)).sum(axis=-1, dtype=np.uint64)
    # The sign of less than 0.25 grey levels is chance. Flat, black and striped pictures get no hash.
    significant = (np.abs(amplitudes) > 0.25).sum(axis=-1)
    return np.asarray(np.where(significant >= 32, bits, np.uint64(0)))


# --- Windows of tiny pictures.


def _shares(borders: Grid, num_cells: int) -> Floats:
    """Return the matrix (S, num_cells) that averages ``num_cells`` values over S neighbouring spans.

    A cell is one of these values, such as a pixel in a row. Span i lies between ``borders[i]`` and ``borders[i + 1]``.
    ``borders`` (S + 1,) are ascending and in units of cells. Every row of the matrix sums to 1.
    """
    cells = np.arange(num_cells)
    ends = np.minimum(borders[1:, None], cells + 1)
    begins = np.maximum(borders[:-1, None], cells)
    overlap = (ends - begins).clip(0)
    shares: Floats = (overlap / overlap.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def span_averages(side: int, patch_side: int) -> Floats:
    """Return a matrix for each of the 10 spans (parts of a side, ``SPANS``), float32 (10, patch_side, side).

    Multiplied with ``side`` cells, a matrix cuts out its span and averages it to ``patch_side`` cells.
    """
    borders = [side / STEPS * np.linspace(begin, end, patch_side + 1) for begin, end in SPANS]
    return np.stack([_shares(border, side) for border in borders])


def patches(pictures: Pixels, averages: Floats, window: Places | None = None) -> Floats:
    """Cut a window out of each of K tiny pictures, and average it to a patch.

    The result is float32 (K, channels, patch_side, patch_side).

    Args:
        pictures: (K, channels, side, side).
        averages: result of ``span_averages``; decides the side of the patches.
        window: (K,), windows as indices into ``WINDOWS``; None: the whole pictures.
    """
    window = np.zeros(len(pictures), np.int64) if window is None else window
    down = averages[_DOWN[window]]
    right = averages[_RIGHT[window]].transpose(0, 2, 1)
    cut: Floats = down[:, None] @ pictures.astype(np.float32) @ right[:, None]
    return cut


def mirrored_where(pictures: Floats, is_mirrored: Flags) -> Floats:
    """Mirror some of K pictures left to right; return all pictures, (K, ..., side, side).

    Picture k is mirrored if ``is_mirrored[k]`` is true, and else unchanged.
    """
    is_mirrored = is_mirrored.reshape(-1, *[1] * (pictures.ndim - 1))
    return np.where(is_mirrored, pictures[..., ::-1], pictures)


# --- Videos. Hashes are signs of luma. So in the frames whose hashes agree, luma, hue (as deviation from the frame's
# median: a white balance changes nothing) and the change from frame to frame must agree too; plain pictures have
# stricter limits. Measured with near_duplicate_bits 10: 99.8% of the edited copies of 40 generated videos and 99.4% of
# those of 28 real clips stay linked. Of 2,626 pairs of different drawn clips that hashes link, 79 stay linked. A pair
# takes 0.1 ms.
# The luma of single pictures must be more alike. Of 15 kinds of edits of 120 drawn dishes 97.9% are found, and no two
# dishes are joined. Of 11 kinds of edits of stills from 137 real clips 94.8% are found.

TimeView = tuple[tuple[int, int], ...]  # pairs of frame indices to compare: (of the first video, of the second)

# Least values of two videos that agree: the mean cosine between their colours, the correlation of their luma within
# frames, and the correlation of their changes over time. _PLAIN_ALIKE is for plain pictures.
_LEAST_ALIKE = np.array([[0.7], [0.6], [0.45]])
_PLAIN_ALIKE = np.array([[0.97], [0.97], [0.93]])
_PICTURE_ALIKE = np.array([[0.7], [0.96], [0.45]])  # for single pictures, which have less to compare
_LEAST_MOTION = 3.0  # variance over time in grey levels squared; less is noise
_LEAST_CHROMA = 6.0  # levels; a colour nearer to the frame's median counts as grey
_LEAST_COLOURED = 100.0  # levels squared over a whole frame; a frame with less counts as colourless
_PLAIN_SHARE = 0.35  # a picture is plain if less than this share of its cells differs from its median
_PLAIN_LEVELS = 8.0  # grey levels by which such a cell differs
_PLAIN_SATURATION_ALIKE = 0.55
_PLAIN_MOST_GAIN = 1.8  # largest ratio of the contrasts of two plain videos that agree
_LUMA_AVERAGES = span_averages(LOOK_LUMA_SIDE, 10)
_COLOUR_PLACES = span_averages(LOOK_COLOUR_SIDE, 5)


class SameFootage:
    """A test whether two videos show the same footage, by the looks (tiny pictures) of their frames.

    Args:
        looks: looks of N videos with T frames each, uint8 (N, T, 216).
    """

    def __init__(self, looks: Pixels) -> None:
        luma_bytes = LOOK_LUMA_SIDE**2
        self._luma = looks[..., :luma_bytes].reshape(*looks.shape[:2], 1, LOOK_LUMA_SIDE, LOOK_LUMA_SIDE)
        self._colour = looks[..., luma_bytes:].reshape(*looks.shape[:2], 2, LOOK_COLOUR_SIDE, LOOK_COLOUR_SIDE)

    def agree(self, candidates: Places, view: TimeView, is_near: Flags) -> Flags:
        """Return for each of K pairs of videos whether the first video shows a window of the second, bool (K,).

        A window is the whole picture, or a part of it as a crop leaves it. Luma, hue and the change from frame to frame
        must all be similar.

        Args:
            candidates: (4, K), with four rows: the index in ``looks`` of the first video, the index of the second
                video, the window of the second video as index into ``WINDOWS``, and 1 if the first video is mirrored
                before the comparison, else 0.
            view: the T pairs of frame indices to compare.
            is_near: (K, T), true for pairs of frames whose hashes agree. Only such frames are compared; every row needs
                at least one.
        """
        one, other, window, is_mirrored = candidates
        ones, others = map(list, zip(*view, strict=True))

        def both(table: Pixels, averages: Floats) -> tuple[Floats, Floats]:
            flat = table.reshape(len(table), -1, *table.shape[-2:])
            whole = mirrored_where(patches(flat[one], averages), is_mirrored == 1)
            part = patches(flat[other], averages, window)
            shape = (len(one), *table.shape[1:3], *part.shape[-2:])
            return whole.reshape(shape)[:, ones], part.reshape(shape)[:, others]

        luma = both(self._luma, _LUMA_AVERAGES)
        colour = both(self._colour, _COLOUR_PLACES)
        used = is_near[:, :, None, None, None].astype(np.float32)
        shares = [_share_off_median(values, is_near) for values in luma]
        is_plain = np.minimum(*shares) < _PLAIN_SHARE
        first, second = (values - values.mean(axis=(3, 4), keepdims=True) for values in luma)
        # Stored colour values are halved (see ``_looks``).
        blue_red = [2 * (values - np.median(values, axis=(3, 4), keepdims=True)) for values in colour]
        hue, saturation = _colours(blue_red, used)
        energy = [_total(values**2 * used) for values in (first, second)]
        common = _total(first * second * used)
        luma_alike = _ratio(common, np.sqrt(energy[0] * energy[1]))
        motion = _motion_alike([(first, second), blue_red], used)
        gain = np.sqrt(_ratio(np.maximum(*energy), np.minimum(*energy)))
        values = np.stack([hue, luma_alike, motion])
        least = _LEAST_ALIKE if len(view) > 1 else _PICTURE_ALIKE
        alike = (values >= least).all(axis=0)
        plain_alike = (values >= _PLAIN_ALIKE).all(axis=0) & (is_mirrored == 0)
        plain_alike &= (saturation >= _PLAIN_SATURATION_ALIKE) & (gain <= _PLAIN_MOST_GAIN)
        return np.asarray(np.where(is_plain, plain_alike, alike))


def _total(values: Floats) -> Grid:
    return np.asarray(values.sum(axis=(1, 2, 3, 4), dtype=np.float64))


def _ratio(part: Grid, whole: Grid) -> Grid:
    """Return ``part / whole``, both (K,), or 1 where ``whole`` is nearly 0.

    The ratio is rounded to 6 digits, so that the rounding errors of sums do not matter.
    """
    ratio = part / np.maximum(whole, 1e-6)
    return np.asarray(np.where(whole > 1e-6, ratio, 1.0).round(6))


def _share_off_median(luma: Floats, is_near: Flags) -> Grid:
    """Return for each of K videos the share of the picture that is not plain, 0 (one flat area) to 1, (K,).

    The value is the share of cells (pixels of a tiny picture) that differ from the median luma of their frame by more
    than 8 grey levels, as a mean over frames. Plain videos must agree more closely (``SameFootage.agree``).

    Args:
        luma: luma of K videos with T frames each, (K, T, 1, side, side).
        is_near: (K, T), true for the frames over which the mean is taken.
    """
    median = np.median(luma, axis=(3, 4), keepdims=True)
    is_off = np.abs(luma - median) > _PLAIN_LEVELS
    share_of_frame = is_off.mean(axis=(2, 3, 4))
    return np.asarray((share_of_frame * is_near).sum(axis=1) / is_near.sum(axis=1))


def _colours(colours: Sequence[Floats], used: Floats) -> tuple[Grid, Grid]:
    """Return (hue, saturation): how similar the colours are in each of K pairs of videos, both (K,), at most 1.

    A colour is a vector of two values, (blue, red). Its length is its strength. ``hue`` is the mean cosine between the
    colours of both videos, weighted by strength; 1 if either video is colourless. ``saturation`` also compares the
    strengths: it is 1 for equal colours, and about s if the colours of one video are s < 1 times those of the other.

    Args:
        colours: two arrays (K, T, 2, side, side), the colours of the first and of the second videos, for T frames.
        used: 1 for frames that are compared, else 0, (K, T, 1, 1, 1).
    """
    num_used = _total(used)
    shrunk, sizes = [], []
    for values in colours:
        size = _strength(values)
        share_kept = np.maximum(size - _LEAST_CHROMA, 0) / np.maximum(size, 1e-9)
        values = values * share_kept
        shrunk.append(values)
        sizes.append(_strength(values))
    common = _total(sizes[0] * sizes[1] * used)
    hue = _ratio(_total(shrunk[0] * shrunk[1] * used), common)
    hue = np.where(common >= _LEAST_COLOURED * num_used, hue, 1.0)
    energy = [_total(values**2 * used) for values in colours]
    little = 10 * _LEAST_COLOURED * num_used
    product = _total(colours[0] * colours[1] * used)
    saturation = _ratio(product + little, np.maximum(*energy) + little)
    return hue, saturation


def _strength(colours: Floats) -> Floats:
    return np.asarray(np.sqrt(np.square(colours).sum(axis=2, keepdims=True)))


def _motion_alike(pairs: Sequence[Sequence[Floats]], used: Floats) -> Grid:
    """Return for each of K pairs of videos how similarly the two change over time in luma and colour, (K,).

    The mean over time is subtracted from the frames of each video. The result is the correlation of what remains, -1 to
    1. It is 1 if neither video moves.

    Args:
        pairs: two pairs of arrays: the luma of the first and of the second videos, and the colours of the first and of
            the second videos. All arrays are (K, T, channels, side, side), for T frames.
        used: 1 for frames that are compared, else 0, (K, T, 1, 1, 1).
    """
    num_used = used.sum(axis=1, keepdims=True)
    together = np.zeros(len(used))
    energy = np.zeros((2, len(used)))
    for pair in pairs:
        means = [(values * used).sum(axis=1, keepdims=True) / num_used for values in pair]
        moved = [(values - mean) * used for values, mean in zip(pair, means, strict=True)]
        count = moved[0][0, 0, 0].size * num_used[:, 0, 0, 0, 0]
        together += _total(moved[0] * moved[1]) / count
        energy += [_total(values**2) / count for values in moved]
    first, second = np.maximum(energy, _LEAST_MOTION / 10)  # a still video is not like a moving one
    alike = _ratio(together, np.sqrt(first * second))
    is_moving = energy.max(axis=0) >= _LEAST_MOTION
    return np.asarray(np.where(is_moving, alike, 1.0))
