"""Decide whether two pictures show one photograph, or two videos one footage, after their hashes were found near.

Pictures: a hash of 64 bits is too little to recognise a single picture. So the thumbnail of one picture is fitted by a
window of the other's thumbnail. Brightness and contrast may differ. Small shifts and scales may differ, too; they are
fitted by the slopes of the thumbnail (one step of B. D. Lucas and T. Kanade, "An iterative image registration
technique", IJCAI 1981). If both pictures are coloured, their colours must vary in the same way: tables seen from above
may have equal luma and cloths of different colours.

Measured with near_duplicate_bits 10 and 20 kinds of edits of 120 drawn dishes (JPEG quality 30 to 90, half to twice the
size, brightness, contrast, saturation, grey, blur, crops of 2 to 10%, mirrors, a caption, a turn by a degree): 98.4% of
the copies are found, and of 258,120 pairs of different dishes none is joined. Of 88 stills from 132 real clips 88.4%
are found; 5.7% are too plain to have a hash, and dark ones that are brightened or cropped more are missed (crops of 5%
83%, captions 55%). All joined stills of different clips show one scene.
"""

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fvc_lib.corpus.copies import perceptual_hash
from fvc_lib.corpus.copies.perceptual_hash import Codes, Grid, Looks

Places = npt.NDArray[np.int64]
_Patches = npt.NDArray[np.float32]  # (K, side, side)

THUMBNAIL_SIDE, COLOUR_SIDE = 24, 8
_PATCH_SIDE, _COLOUR_PATCH_SIDE = 20, 6
_LEAST_EXPLAINED = 0.94  # share of the variance of one luma that the other explains
_LEAST_COLOUR_EXPLAINED = 0.5
_LEAST_VARIANCE = 1.0  # grey levels squared; with less a picture is too plain to be compared
_LEAST_COLOUR_VARIANCE = 16.0  # with less, as in a grey picture, colours are not compared
_AT_ONCE = 1 << 11
_DOWN = np.array([down for down, _ in perceptual_hash.WINDOWS])
_RIGHT = np.array([right for _, right in perceptual_hash.WINDOWS])


def thumbnail_text(grid: Grid, picture: npt.NDArray[np.uint8]) -> str:
    """Return the thumbnail of a picture as Base64 text.

    Args:
        grid: the picture's luma on a grid, (160, 160) (``perceptual_hash.luma_grids``).
        picture: RGB, uint8 (3, H, W).
    """
    # Matrix products: ten times as fast as grid_average, and exact enough here.
    down, right = (_shares(np.linspace(0, side, COLOUR_SIDE + 1), side) for side in picture.shape[1:])
    rgb = down @ picture.astype(np.float32) @ right.T
    colour = 128 + (rgb[[2, 0]] - perceptual_hash.grid_average(grid, COLOUR_SIDE)) / 2
    small = [
        values.round().clip(0, 255).astype(np.uint8)
        for values in (perceptual_hash.grid_average(grid, THUMBNAIL_SIDE), colour)
    ]
    return base64.b64encode(b"".join(values.tobytes() for values in small)).decode("ascii")


class SamePictures:
    """Decide for ``near_duplicate_links`` whether pairs of pictures show one photograph, by their thumbnails.

    Args:
        thumbnails: N texts of ``thumbnail_text``.

    Raises:
        ValueError: a text is no thumbnail.
    """

    def __init__(self, thumbnails: Sequence[str]) -> None:
        self.looks = thumbnails  # pictures with equal ones are judged equally
        size = THUMBNAIL_SIDE**2
        values = np.empty((len(thumbnails), size + 2 * COLOUR_SIDE**2), np.uint8)
        for place, text in enumerate(thumbnails):
            values[place] = np.frombuffer(base64.b64decode(text), np.uint8)
        self._luma = values[:, :size].reshape(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE)
        # Blue and red less luma, halved, 128 for none.
        self._colour = values[:, size:].reshape(-1, 2, COLOUR_SIDE, COLOUR_SIDE)

    def __call__(self, one: Places, other: Places, window: Places, mirror: Codes) -> npt.NDArray[np.bool_]:
        """Return whether picture ``one`` shows a window of picture ``other``, for K pairs, bool (K,).

        If the window is the whole picture, the pair is also compared in the other order, and one match suffices.

        Args:
            one: (K,), numbers of pictures.
            other: (K,), numbers of pictures.
            window: (K,), numbers of windows of ``other`` (``perceptual_hash.WINDOWS``).
            mirror: (K,), ``MIRROR_BITS`` where ``one`` is to be mirrored, else 0.
        """
        same = np.zeros(len(one), np.bool_)
        turned = mirror == perceptual_hash.MIRROR_BITS
        for start in range(0, len(one), _AT_ONCE):
            some = np.arange(start, min(start + _AT_ONCE, len(one)))
            same[some] = self._like(one[some], other[some], window[some], turned[some])
            back = some[~same[some] & (window[some] == 0)]
            same[back] = self._like(other[back], one[back], window[back], turned[back])
        return same

    def _like(self, one: Places, other: Places, window: Places, turned: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        whole, part = patches(self._luma[one], _AVERAGES), patches(self._luma[other], _AVERAGES, window)
        same = _explained(mirrored_where(whole, turned), part) >= _LEAST_EXPLAINED
        near = np.flatnonzero(same)
        whole = patches(self._colour[one[near]], _COLOUR_AVERAGES)
        part = patches(self._colour[other[near]], _COLOUR_AVERAGES, window[near])
        same[near] = _colours_agree(mirrored_where(whole, turned[near]), part)
        return same


def _shares(borders: npt.NDArray[np.float64], num_cells: int) -> npt.NDArray[np.float32]:
    """Return a matrix (spans, num_cells) that averages cells over the spans between ``borders``.

    Borders are in cells; each row sums to 1.
    """
    cells = np.arange(num_cells)
    overlap = (np.minimum(borders[1:, None], cells + 1) - np.maximum(borders[:-1, None], cells)).clip(0)
    shares: npt.NDArray[np.float32] = (overlap / overlap.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def span_averages(side: int, patch_side: int) -> npt.NDArray[np.float32]:
    """Return matrices that cut each of the 10 spans out of ``side`` cells and average it to ``patch_side`` cells.

    The result is (10, patch_side, side).
    """
    borders = [
        side / perceptual_hash.STEPS * np.linspace(begin, end, patch_side + 1) for begin, end in perceptual_hash.SPANS
    ]
    return np.stack([_shares(border, side) for border in borders])


_AVERAGES = span_averages(THUMBNAIL_SIDE, _PATCH_SIDE)
_COLOUR_AVERAGES = span_averages(COLOUR_SIDE, _COLOUR_PATCH_SIDE)


def patches(
    thumbnails: npt.NDArray[np.uint8], averages: npt.NDArray[np.float32], window: Places | None = None
) -> _Patches:
    """Return a window of each thumbnail, averaged to a patch.

    Args:
        thumbnails: (K, side, side) or (K, channels, side, side).
        averages: result of ``span_averages``; decides the side of the patches.
        window: (K,), numbers of windows; None: the whole thumbnails.
    """
    window = np.zeros(len(thumbnails), np.int64) if window is None else window
    down, right = averages[_DOWN[window]], averages[_RIGHT[window]].transpose(0, 2, 1)
    if thumbnails.ndim == 4:
        down, right = down[:, None], right[:, None]
    cut: _Patches = down @ thumbnails.astype(np.float32) @ right
    return cut


def mirrored_where(pictures: _Patches, is_mirrored: npt.NDArray[np.bool_]) -> _Patches:
    """Return ``pictures`` (K, ..., side, side), mirrored left to right where ``is_mirrored`` (K,) is true."""
    is_mirrored = is_mirrored.reshape(-1, *[1] * (pictures.ndim - 1))
    return np.where(is_mirrored, pictures[..., ::-1], pictures)


def _colours_agree(one: _Patches, other: _Patches) -> npt.NDArray[np.bool_]:
    """Return whether the colours (K, 2, 6, 6) of two pictures vary in the same way over the picture, bool (K,).

    White balance and saturation may differ. A grey picture agrees with every picture.
    """
    first, second = (values - values.mean(axis=(2, 3), keepdims=True) for values in (one, other))
    common = (first * second).mean(axis=(1, 2, 3))
    first, second = (np.square(values).mean(axis=(1, 2, 3)) for values in (first, second))
    alike = (common > 0) & (common**2 >= _LEAST_COLOUR_EXPLAINED * first * second)
    is_grey = np.minimum(first, second) < _LEAST_COLOUR_VARIANCE
    return np.asarray(alike | is_grey)


def _explained(one: _Patches, other: _Patches) -> npt.NDArray[np.float64]:
    """Return how much of ``one`` a shifted and scaled ``other`` of other contrast explains, as share of variance, (K,).

    The share is 0 if the best fit inverts the contrast, or if ``one`` is too plain.
    """
    count = len(one)
    down, right = np.gradient(other, axis=1), np.gradient(other, axis=2)
    place = np.linspace(-1, 1, _PATCH_SIDE, dtype=np.float32)
    known = np.stack([other, down, right, down * place[:, None], right * place], axis=1).reshape(
        count, 5, _PATCH_SIDE**2
    )
    known -= known.mean(axis=2, keepdims=True)
    asked = one.reshape(count, _PATCH_SIDE**2, 1) - one.mean(axis=(1, 2))[:, None, None]
    products = (known @ known.transpose(0, 2, 1)).astype(np.float64)
    # A little is added to the diagonal, so that flat pictures have a solution, too.
    products += np.eye(5) * (1e-5 * np.trace(products, axis1=1, axis2=2)[:, None, None] + 1e-6)
    share = np.linalg.solve(products, (known @ asked).astype(np.float64))
    left = asked - known.transpose(0, 2, 1) @ share.astype(np.float32)
    variance = np.square(asked[:, :, 0], dtype=np.float64).mean(axis=1)
    explained = 1 - np.square(left[:, :, 0], dtype=np.float64).mean(axis=1) / np.maximum(variance, 1e-9)
    return np.where((share[:, 0, 0] > 0) & (variance >= _LEAST_VARIANCE), explained, 0.0)


# --- Videos. Hashes are signs of luma. So in the frames whose hashes agree, luma, hue (as deviation from the frame's
# median: a white balance changes nothing) and the change from frame to frame must agree too; plain pictures have
# stricter limits. Measured with near_duplicate_bits 10: 99.8% and 99.4% of the edited copies of 40 sample events and 28
# real clips stay linked; of 2,626 linked pairs of different drawn clips 79 do. A pair takes 0.1 ms.

_Flags = npt.NDArray[np.bool_]
TimeView = tuple[tuple[int, int], ...]  # pairs of frames that are compared: one video's, the other's
_Values = npt.NDArray[np.float64]  # (K,)
_Frames = npt.NDArray[np.float32]  # (K, T, channels, side, side)

_LEAST_HUE_ALIKE = 0.7  # mean cosine between the colours of both
_LEAST_LUMA_ALIKE = 0.6  # correlation within the frames
_LEAST_MOTION_ALIKE = 0.45  # correlation of the changes from frame to frame
_LEAST_MOTION = 3.0  # grey levels squared; less is noise
_LEAST_CHROMA = 6.0  # levels; a colour nearer to the frame's median has none
_LEAST_COLOURED = 100.0  # levels squared over a whole frame; with less it counts as colourless
_PLAIN_SHARE = 0.35  # a picture is plain if less than this share is off its median
_PLAIN_LEVELS = 8.0
_PLAIN_HUE_ALIKE, _PLAIN_LUMA_ALIKE, _PLAIN_MOTION_ALIKE = 0.97, 0.97, 0.93
_PLAIN_SATURATION_ALIKE = 0.55
_PLAIN_MOST_GAIN = 1.8  # ratio of the two contrasts
_PAIRS_AT_ONCE = 1 << 10
_LUMA_AVERAGES = span_averages(perceptual_hash.LOOK_LUMA_SIDE, 10)
_COLOUR_PLACES = span_averages(perceptual_hash.LOOK_COLOUR_SIDE, 5)


class SameFootage:
    """Decide whether pairs of videos show one footage, by the looks (tiny pictures) of their frames.

    Args:
        looks: looks of N videos, uint8 (N, T, 216); a video without looks (zeros) agrees with every video.
    """

    def __init__(self, looks: Looks) -> None:
        luma_bytes = perceptual_hash.LOOK_LUMA_SIDE**2
        self._is_known: _Flags = np.asarray(looks.any(axis=(1, 2)))
        self._luma = looks[..., :luma_bytes].reshape(
            *looks.shape[:2], 1, perceptual_hash.LOOK_LUMA_SIDE, perceptual_hash.LOOK_LUMA_SIDE
        )
        self._colour = looks[..., luma_bytes:].reshape(
            *looks.shape[:2], 2, perceptual_hash.LOOK_COLOUR_SIDE, perceptual_hash.LOOK_COLOUR_SIDE
        )

    def agree(
        self, one: Places, other: Places, window: Places, mirror: Codes, view: TimeView, is_near: _Flags
    ) -> _Flags:
        """Return whether video ``one`` shows a window of video ``other``, for K pairs, bool (K,).

        Args:
            one: (K,), numbers of videos.
            other: (K,), numbers of videos.
            window: (K,), numbers of windows of ``other`` (``perceptual_hash.WINDOWS``).
            mirror: (K,), ``MIRROR_BITS`` where ``one`` is to be mirrored, else 0.
            view: the T pairs of frame indices to compare.
            is_near: (K, T), true for pairs of frames whose hashes agree. Only these are compared; every row has one.
        """
        same = np.ones(len(one), np.bool_)
        asked = np.flatnonzero(self._is_known[one] & self._is_known[other])
        for start in range(0, len(asked), _PAIRS_AT_ONCE):
            some = asked[start : start + _PAIRS_AT_ONCE]
            is_mirrored = mirror[some] == perceptual_hash.MIRROR_BITS
            same[some] = self._agree(one[some], other[some], window[some], is_mirrored, view, is_near[some])
        return same

    def _agree(
        self, one: Places, other: Places, window: Places, is_mirrored: _Flags, view: TimeView, is_near: _Flags
    ) -> _Flags:
        ones, others = ([pair[side] for pair in view] for side in (0, 1))

        def both(table: npt.NDArray[np.uint8], averages: npt.NDArray[np.float32]) -> tuple[_Frames, _Frames]:
            flat = table.reshape(len(table), -1, *table.shape[-2:])
            whole = mirrored_where(patches(flat[one], averages), is_mirrored)
            part = patches(flat[other], averages, window)
            shape = (len(one), *table.shape[1:3], *part.shape[-2:])
            return whole.reshape(shape)[:, ones], part.reshape(shape)[:, others]

        luma = both(self._luma, _LUMA_AVERAGES)
        colour = both(self._colour, _COLOUR_PLACES)
        used = is_near[:, :, None, None, None].astype(np.float32)
        is_plain = np.minimum(*(_share_off_median(values, is_near) for values in luma)) < _PLAIN_SHARE
        first, second = (values - values.mean(axis=(3, 4), keepdims=True) for values in luma)
        # Stored values are halved.
        colours = [2 * (values - np.median(values, axis=(3, 4), keepdims=True)) for values in colour]
        hue, saturation = _colours(colours[0], colours[1], used)
        energy = [_total(values**2 * used) for values in (first, second)]
        luma_alike = _ratio(_total(first * second * used), np.sqrt(energy[0] * energy[1]))
        motion = _motion_alike((first, second), (colours[0], colours[1]), used)
        gain = np.sqrt(_ratio(np.maximum(*energy), np.minimum(*energy)))
        alike = (hue >= _LEAST_HUE_ALIKE) & (luma_alike >= _LEAST_LUMA_ALIKE) & (motion >= _LEAST_MOTION_ALIKE)
        plain_alike = (hue >= _PLAIN_HUE_ALIKE) & (luma_alike >= _PLAIN_LUMA_ALIKE) & (motion >= _PLAIN_MOTION_ALIKE)
        plain_alike &= (saturation >= _PLAIN_SATURATION_ALIKE) & (gain <= _PLAIN_MOST_GAIN) & ~is_mirrored
        return np.asarray(np.where(is_plain, plain_alike, alike))


def _total(values: _Frames) -> _Values:
    return np.asarray(values.sum(axis=(1, 2, 3, 4), dtype=np.float64))


def _ratio(part: _Values, whole: _Values) -> _Values:
    """Return ``part / whole``, (K,), or 1 where ``whole`` is nearly 0.

    It is rounded, so that the order in which sums were added does not matter.
    """
    return np.asarray(np.where(whole > 1e-6, part / np.maximum(whole, 1e-6), 1.0).round(6))


def _share_off_median(luma: _Frames, is_near: _Flags) -> _Values:
    """Return the share of a frame's cells that differ from the frame's median luma, (K,).

    It is the mean over the frames that ``is_near`` marks.
    """
    off = np.abs(luma - np.median(luma, axis=(3, 4), keepdims=True)) > _PLAIN_LEVELS
    return np.asarray((off.mean(axis=(2, 3, 4)) * is_near).sum(axis=1) / is_near.sum(axis=1))


def _colours(first: _Frames, second: _Frames, used: _Frames) -> tuple[_Values, _Values]:
    """Return (hue, saturation): how similar the colours of two videos are, both (K,).

    ``hue`` is the mean cosine between the colours of both, weighted by their strength; 1 if either is colourless.
    ``saturation`` is near 1 for equal hue and equal strength, and lower the more the strengths differ.
    """
    num_used = _total(used)
    shrunk = []
    for values in (first, second):
        size = np.sqrt(np.square(values).sum(axis=2, keepdims=True))
        shrunk.append(values * (np.maximum(size - _LEAST_CHROMA, 0) / np.maximum(size, 1e-9)))
    sizes = [np.sqrt(np.square(values).sum(axis=2, keepdims=True)) for values in shrunk]
    common = _total(sizes[0] * sizes[1] * used)
    hue = _ratio(_total(shrunk[0] * shrunk[1] * used), common)
    hue = np.where(common >= _LEAST_COLOURED * num_used, hue, 1.0)
    energy = [_total(values**2 * used) for values in (first, second)]
    little = 10 * _LEAST_COLOURED * num_used
    saturation = _ratio(_total(first * second * used) + little, np.maximum(*energy) + little)
    return hue, saturation


def _motion_alike(luma: tuple[_Frames, _Frames], colour: tuple[_Frames, _Frames], used: _Frames) -> _Values:
    """Return how similarly two videos change over time, (K,), in luma and colour.

    It is the correlation of the frames' deviations from the mean frame; 1 if neither video moves.
    """
    num_used = used.sum(axis=1, keepdims=True)
    together = np.zeros(len(used))
    energy = [np.zeros(len(used)), np.zeros(len(used))]
    for pair in (luma, colour):
        moved = [(values - (values * used).sum(axis=1, keepdims=True) / num_used) * used for values in pair]
        count = moved[0][0, 0, 0].size * num_used[:, 0, 0, 0, 0]
        together += _total(moved[0] * moved[1]) / count
        for place, values in enumerate(moved):
            energy[place] += _total(values**2) / count
    least = _LEAST_MOTION / 10  # a still video is not like a moving one
    alike = _ratio(together, np.sqrt(np.maximum(energy[0], least) * np.maximum(energy[1], least)))
    return np.asarray(np.where(np.maximum(*energy) >= _LEAST_MOTION, alike, 1.0))
