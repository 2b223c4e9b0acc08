"""Decode clips of a video according to a view, the rule that selects the frames and the part of the picture.

A view may take clips of neighbouring frames, several clips per video, and crops. ``clip.decode_clip`` decodes the plain
view: whole pictures, spread over the video.

``decode_windows`` also decodes windows: overlapping clips along a whole video, so that every part of it gets a score.
Every window begins in the middle of the window before. If the view's clips consist of neighbouring frames
(``window:STRIDE`` or ``rate:R``), so do the windows. If the view's clips are spread over the video (``uniform``), the
frames of a window are spread over about ``STRETCH_SECONDS``. There are at most ``MOST_WINDOWS`` windows. In longer
videos, uniform windows get longer, and windows of neighbouring frames leave gaps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import FvcError
from fvc_lib.services.registry import CROPS, View
from fvc_lib.video.decode.clip import Clip, PlacesOf, decode_places, uniform_places
from fvc_lib.video.decode.decoding import decode
from fvc_lib.video.decode.frame_table import IntArray, Seconds, read_frame_table
from fvc_lib.video.decode.pixels import Box, FrameConverter, Pixels
from fvc_lib.video.decode.source import VideoSource, open_video

Boxes = npt.NDArray[np.floating]  # (T, 4): left, top, width and height in pixels

NOT_FOUND = "nothing found to crop to: the middle of the picture"
_MOST_ASPECT = 4  # longest side over shortest; a longer picture gets black bars, to limit the square it is decoded into
# Limits of the frames in which a crop is searched: side in pixels, and bytes of all frames together.
_CROP_SIDE, _CROP_BYTES = 1280, 256 << 20


class CropError(FvcError):
    """The error for a crop function (which finds the part of the picture to show) that fails or returns a wrong box."""


@dataclass(frozen=True)
class SeenClip:
    """The record of the frames and the part of the picture that one clip of a video shows.

    Attributes:
        clip: index of the clip in its video, from 0.
        first_frame, middle_frame, last_frame: frame indices in presentation order.
        stride: distance in frames from one frame of the clip to the next, rounded; 0: frames are spread over the video.
        left, top, width, height: the visible part of the middle frame, as shares of the upright picture's sides.
        note: how the clip differs from the requested view; empty if it does not.
    """

    clip: int
    first_frame: int
    middle_frame: int
    last_frame: int
    stride: int
    left: float
    top: float
    width: float
    height: float
    note: str = ""


def decode_view(path: AnyPath, num_frames: int, side: int, view: View) -> tuple[Pixels, list[SeenClip]]:
    """Decode the clips of a video that ``view`` (the rule that selects frames and part of the picture) selects.

    Args:
        path: a local file.
        num_frames: T, number of frames of one clip.
        side: S, side of the square frames in pixels.
        view: selects the frames, the number of clips (N), and the part of the picture.

    Returns:
        The frames of all clips, concatenated, uint8 (N T, 3, S, S), and one ``SeenClip`` per clip.

    Raises:
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
        CropError: the crop fails.
    """
    view = at_rate_of(Path(path), view)
    decoded = decode_places(Path(path), *wanted_of(Path(path), num_frames, side, view))
    return seen_of(decoded, num_frames, side, view)


def at_rate_of(path: Path, view: View) -> View:
    """Return ``view`` with its frames per second replaced by the equivalent stride in frames of the video ``path``.

    The sampling ``rate:R`` (R frames per second) becomes ``window:STRIDE`` (every STRIDE-th frame). STRIDE is the
    video's frame rate divided by R, but at least 1; it need not be an integer. It is 1 if the file states no frame
    rate. Views with another sampling are returned unchanged.

    Raises:
        VideoError: the file cannot be opened.
    """
    if not view.rate:
        return view
    with open_video(path, thorough=True) as opened:
        stated = float(opened.stream.average_rate or view.rate)
    return replace(view, sampling=f"window:{max(1.0, stated / view.rate):.6f}")


def wanted_of(path: Path, num_frames: int, side: int, view: View) -> tuple[PlacesOf, int]:
    """Return the frames of a video that its clips need, and the size at which to decode these frames.

    Afterwards ``decode_places`` decodes the frames, and ``seen_of`` makes the clips from them. Arguments and errors are
    those of ``decode_view``, but ``view`` must be a result of ``at_rate_of``.

    Returns:
        A tuple: a function from the video's number of frames to the wanted frame indices, and the side in pixels of
        the square that frames are letterboxed to.
    """
    side_of_all = decoded_side(path, num_frames, side, view)
    return (lambda count: np.unique(clip_places(view, num_frames, count)[0])), side_of_all


def seen_of(decoded: Clip, num_frames: int, side: int, view: View) -> tuple[Pixels, list[SeenClip]]:
    """Put the N clips of a video together from its decoded frames, and cut out the wanted part of the picture.

    Args:
        decoded: the frames, decoded with the arguments that ``wanted_of`` returns.
        num_frames: T, number of frames of one clip.
        side: S, side of the square frames in pixels.
        view: the rule that selects the frames, the number of clips (N), and the part of the picture; a result of
            ``at_rate_of``.

    Returns:
        The frames of all clips, concatenated, uint8 (N T, 3, S, S), and one ``SeenClip`` per clip.

    Raises:
        CropError: the crop fails.
    """
    places, stride = clip_places(view, num_frames, decoded.num_source_frames)
    box = decoded.content
    frames = np.empty((*places.shape, 3, side, side), np.uint8)
    seen = []
    for number, own in enumerate(np.searchsorted(decoded.frame_indices, places)):
        wanted_span = int(view.stride * (num_frames - 1))
        is_short = view.stride and places[number, -1] - places[number, 0] < wanted_span
        note = f"the video is too short for stride {view.stride:.4g}" if is_short else ""
        if view.crop or view.fit != "letterbox":
            frames[number], boxes, found = seen_part(view, box.cut(decoded.frames[own]), side)
            note = note if found else "; ".join(filter(None, (note, NOT_FOUND)))
            part = boxes[num_frames // 2]
        else:
            frames[number] = decoded.frames[own]
            part = np.array([0, 0, box.width, box.height], float)
        left, top, width, height = (part / [box.width, box.height, box.width, box.height]).tolist()
        first, middle, last = (int(places[number][place]) for place in (0, num_frames // 2, -1))
        seen.append(SeenClip(number, first, middle, last, round(stride), left, top, width, height, note))
    return frames.reshape(-1, 3, side, side), seen


def clip_places(view: View, num_frames: int, num_source_frames: int) -> tuple[IntArray, float]:
    """Return the frame indices of the N clips of a video, and their stride.

    If the view has a stride, the clips are spread evenly from the video's first frame to its last; a single clip is in
    the middle. If the video is too short, the stride is reduced. If it still has too few frames, its last frame is
    repeated.

    If the view has no stride, N T frames are spread evenly over the video, and a clip takes every N-th of these frames.
    The first clip begins with the first of these frames, the second clip with the second, and so on.

    Args:
        view: determines the number of clips (N) and the wanted stride.
        num_frames: T, number of frames of one clip.
        num_source_frames: number of frames of the video.

    Returns:
        A tuple: frame indices in presentation order, int64 (N, T), and the stride in frames. The stride is the distance
        from one frame of a clip to the next; it is 0 for clips spread over the video.
    """
    n = num_source_frames
    if not view.stride:
        return uniform_places(n, view.clips * num_frames).reshape(num_frames, view.clips).T, 0
    stride = min(view.stride, max(1, (n - 1) // (num_frames - 1))) if num_frames > 1 else view.stride
    steps = np.rint(stride * np.arange(num_frames)).astype(np.int64)
    last_start = max(0, n - 1 - int(steps[-1]))
    starts = np.array([last_start // 2]) if view.clips == 1 else uniform_places(last_start + 1, view.clips)
    return np.minimum(starts[:, None] + steps, n - 1), stride


def decoded_side(path: Path, num_frames: int, side: int, view: View) -> int:
    """Return the side in pixels of the square that frames are letterboxed to when they are decoded.

    If the view shows whole pictures (no crop, fit ``letterbox``), the result is ``side``. For other views the square is
    larger, because the visible part is cut out of it later. Arguments are those of ``decode_view``.
    """
    if not view.crop and view.fit == "letterbox":
        return side
    with open_video(path, thorough=True) as opened:
        context = opened.stream.codec_context
        sides = (context.width * (opened.sample_aspect_ratio or Fraction(1)), Fraction(context.height))
    shorter = max(Fraction(1), min(sides))
    longer = max(Fraction(1), *sides)
    if view.crop:
        bounded = math.isqrt(_CROP_BYTES // (3 * num_frames * view.clips))
        return max(side, min(_CROP_SIDE, bounded, round(longer)))
    return round(view.resized(side) * min(longer / shorter, Fraction(_MOST_ASPECT)))


def seen_part(view: View, pictures: Pixels, side: int) -> tuple[Pixels, Boxes, bool]:
    """Cut the part that ``view`` selects out of a clip's pictures, and return it resized to square frames.

    Args:
        view: a view with a crop, or with a fit other than letterbox.
        pictures: uint8 (T, 3, H, W), without black bars, decoded at the size that ``decoded_side`` returns.
        side: S, side of the result in pixels.

    Returns:
        A tuple of three elements. The frames, uint8 (T, 3, S, S). The boxes that were cut out, float (T, 4): left, top,
        width and height in pixels. Whether the crop found something; if False, the frames show the picture's middle.

    Raises:
        CropError: the crop fails.
    """
    height, width = pictures.shape[2:]
    if view.crop:
        found = boxes_of(view, pictures)
        middle = min(height, width)  # side of the largest square in the middle
        centre = np.array([(width - middle) / 2, (height - middle) / 2, middle, middle])
        boxes = np.tile(centre, (len(pictures), 1)) if found is None else found
        cut = [cut_out(picture, box, side) for picture, box in zip(pictures, boxes, strict=True)]
        return np.stack(cut), boxes, found is not None
    if view.fit.startswith("squash"):
        across, down = (view.share, 1.0) if width > height else (1.0, view.share)
        box = np.array([(1 - across) / 2 * width, (1 - down) / 2 * height, across * width, down * height])
        squashed = np.stack([cut_out(picture, box, side) for picture in pictures])
        return squashed, np.tile(box, (len(pictures), 1)), True
    top = round((height - side) / 2)
    left = round((width - side) / 2)
    above, before = max(0, -top), max(0, -left)
    padded = np.pad(pictures, ((0, 0), (0, 0), (above, side), (before, side)))
    top, left = max(0, top), max(0, left)
    # Contiguous, because a window is written to its file as one block of memory.
    frames = np.ascontiguousarray(padded[:, :, top : top + side, left : left + side])
    box = np.array([left, top, min(side, width), min(side, height)], float)
    return frames, np.tile(box, (len(pictures), 1)), True


def boxes_of(view: View, pictures: Pixels) -> Boxes | None:
    """Return the squares that the crop function of ``view`` finds in T pictures; None if it finds nothing.

    The squares are float (T, 4): left, top, width and height in pixels. They are enlarged by the view's margin.

    Args:
        view: a view with a crop.
        pictures: uint8 (T, 3, H, W).

    Raises:
        CropError: the crop's function raises an error, or returns an invalid box.
    """
    try:
        found: Any = CROPS.get(view.crop).find(np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)))
        if found is None:
            return None
        boxes = np.broadcast_to(np.asarray(found, float), (len(pictures), 4))
    except Exception as error:
        raise CropError(f"crop {view.crop!r} fails: {type(error).__name__}: {error}") from error
    if not np.isfinite(boxes).all() or (boxes[:, 2:] <= 0).any():
        raise CropError(
            f"crop {view.crop!r}: got {found!r}, wanted finite left, top, width > 0 and height > 0, or None"
        )
    return square_boxes(boxes, view.margin, *pictures.shape[2:])


def square_boxes(boxes: Boxes, margin: float, height: int, width: int) -> Boxes:
    """Return one square per box, float (T, 4): left, top, width and height in pixels.

    A square has the centre of its box; its side is ``1 + margin`` times the longer side of the box. All squares lie
    inside the picture: larger squares are shrunk, and squares that reach beyond its border are moved.

    Args:
        boxes: (T, 4), left, top, width and height in pixels.
        margin: share of the longer side that is added.
        height: height of the picture in pixels.
        width: width of the picture in pixels.
    """
    longer_sides = boxes[:, 2:].max(1)
    sides = np.minimum(longer_sides * (1 + margin), min(height, width))
    middle_x = boxes[:, 0] + boxes[:, 2] / 2
    middle_y = boxes[:, 1] + boxes[:, 3] / 2
    left = np.clip(middle_x - sides / 2, 0, width - sides)
    top = np.clip(middle_y - sides / 2, 0, height - sides)
    return np.stack([left, top, sides, sides], axis=1)


def cut_out(picture: Pixels, box: Boxes, side: int) -> Pixels:
    """Return the part of a picture inside a box, resized to uint8 (3, S, S) with antialiasing.

    Args:
        picture: uint8 (3, H, W).
        box: float (4,), left, top, width and height in pixels.
        side: S, side of the result in pixels.
    """
    from PIL import Image

    left, top, width, height = box.tolist()
    image = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)))
    inside = (left, top, min(left + width, image.width), min(top + height, image.height))
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=inside)).transpose(2, 0, 1)


# --- Windows

STRETCH_SECONDS = 0.5
MOST_WINDOWS = 200
MOST_BYTES = 512 << 20  # largest size of the frames of all windows together, on the disk

# Function that stores a frame; it takes the index of the stored frame and its pixels, uint8 (3, S, S).
StoreFrame = Callable[[int, Pixels], None]


@dataclass(frozen=True)
class Windows:
    """The frames to decode for one video, for its clips and its windows (overlapping clips along the whole video).

    There are M rows of T frames. Each of the first N rows is a clip of the view, and each of the other rows a window.

    Attributes:
        num_source_frames: number of frames of the video.
        places: int64 (M, T), frame indices in presentation order.
        stored: int64 (M, T), position of every frame in the storage, the first argument of ``StoreFrame``. A frame
            that several rows use is stored once. With a crop it is stored once per row: each row is cropped apart.
        num_clips: N, number of rows that are clips of the view.
        begins: float64 (M,), start of the first frame of every row, in seconds after the video's first frame.
        ends: float64 (M,), end of the last frame of every row, in seconds after the video's first frame.
        seconds: duration of the whole video in seconds.
        content: left, top, width and height in pixels of the picture in a stored frame; the rest is black.
    """

    num_source_frames: int
    places: IntArray
    stored: IntArray
    num_clips: int
    begins: Seconds
    ends: Seconds
    seconds: float
    content: tuple[int, int, int, int]


def window_places(view: View, num_frames: int, num_source_frames: int, seconds: float, side: int) -> IntArray:
    """Return the frame indices of a video's W windows (overlapping clips along the whole video), int64 (W, T).

    Indices count frames in presentation order. A window begins in the middle of the window before.

    Args:
        view: if it has a stride, windows have frames at this distance. Otherwise the frames of a window are spread over
            about ``STRETCH_SECONDS``.
        num_frames: T, number of frames of a window.
        num_source_frames: number of frames of the video.
        seconds: duration of the video in seconds.
        side: side of a stored frame in pixels; larger frames allow fewer windows (``MOST_BYTES``).
    """
    n, half = num_source_frames, max(1, num_frames // 2)
    most = max(1, min(MOST_WINDOWS, MOST_BYTES // (3 * side * side * num_frames)))
    if view.stride:
        stride = clip_places(replace(view, clips=1), num_frames, n)[1]
        begins = max(0, n - 1 - (num_frames - 1) * stride)
        enough = math.ceil(begins / (half * stride)) + 1
        return clip_places(replace(view, clips=min(most, enough)), num_frames, n)[0]
    rate = n / seconds if seconds > 0 else 0.0
    gap = max(1.0, rate * STRETCH_SECONDS / num_frames)  # frames of the video from one frame of a window to the next
    wanted = round(((n - 1) / gap - (num_frames - 1)) / half) + 1
    number = max(1, min(most, wanted, (n - num_frames) // half + 1))
    grid = uniform_places(n, (number - 1) * half + num_frames)
    return np.asarray(grid[half * np.arange(number)[:, None] + np.arange(num_frames)])


def decode_windows(path: Path, num_frames: int, side: int, view: View, store: StoreFrame) -> Windows:
    """Decode a whole video, and pass the frames of its clips and windows to ``store``, in any order.

    Windows are overlapping clips along the whole video. The pixels of a frame equal those that ``clip.decode_clip`` and
    ``decode_view`` return for its index.

    Args:
        path: a local file.
        num_frames: T, number of frames of a clip or window.
        side: S, side of the square frames in pixels.
        view: determines the clips, and the stride and crop of windows.
        store: called with (index, pixels) for every frame to store. If a first attempt at decoding fails, it is called
            again for all frames.

    Returns:
        The ``Windows``, which state the stored frames of every clip and window.

    Raises:
        VideoError: the file is unreadable, truncated or corrupt, or its frames are not decoded in presentation order.
        CropError: the crop fails.
    """
    view = at_rate_of(path, view)
    of_side = decoded_side(path, num_frames, side, view)

    def sink_of(opened: VideoSource, _: int, seconds: Seconds | None) -> _WindowSink:
        assert seconds is not None  # ``decode`` passes the times if ``in_order``
        return _WindowSink(opened, _planned(view, num_frames, side, seconds), view, (of_side, side), store)

    with open_video(path) as opened:  # a second attempt stores all frames again
        return decode(opened, read_frame_table(opened), sink_of, in_order=True).sink.windows


def _planned(view: View, num_frames: int, side: int, times: Seconds) -> Windows:
    n = len(times)
    from_begin = times - times[0]
    frame_seconds = float(from_begin[-1]) / (n - 1) if n > 1 else 0.0
    seconds = float(from_begin[-1]) + frame_seconds
    clips = clip_places(view, num_frames, n)[0]
    places = np.concatenate([clips, window_places(view, num_frames, n, seconds, side)])
    # Windows share frames; but with a crop every window has its own, since crops differ.
    stored = np.arange(places.size).reshape(places.shape) if view.crop else np.searchsorted(np.unique(places), places)
    ends = np.append(from_begin, seconds)[places[:, -1] + 1]
    return Windows(n, places, stored, len(clips), from_begin[places[:, 0]], ends, seconds, (0, 0, side, side))


class _WindowSink:
    """A sink (receiver of decoded frames) that converts wanted frames, cuts out the selected part, and stores them.

    Frames must arrive in presentation order. With a crop, frames stay in memory until their window is complete, because
    a crop is computed from all frames of a window.

    Args:
        opened: the video.
        windows: the wanted frames.
        view: the rule that selects the part of the picture.
        sides: a tuple: side of decoded frames, side of stored frames, both in pixels.
        store: called with (index, pixels) for every frame to store.
    """

    def __init__(
        self, opened: VideoSource, windows: Windows, view: View, sides: tuple[int, int], store: StoreFrame
    ) -> None:
        self.windows, self.wanted = windows, set(windows.places.ravel().tolist())
        self._places = np.unique(windows.places)
        self._opened, self._view, self._store = opened, view, store
        self._decoded_side, self._side = sides
        self._converter, self._box = FrameConverter(self._decoded_side, None), Box(0, 0, 0, 0)
        self._held: dict[int, Pixels] = {}

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Convert a wanted frame to RGB and store it; with a crop, hold it until its windows are complete.

        Args:
            place: index of the frame in presentation order; None for a frame that is not wanted.
            frame: the decoded frame.
        """
        self._converter.observe(frame)
        if place is None or place not in self.wanted:
            return
        self.wanted.discard(place)
        if not self._box.width:  # the aspect ratio may be unknown before the first frame
            self._converter.sample_aspect_ratio = self._opened.sample_aspect_ratio
            self._box = box = self._converter.content_box(frame)
            if not self._view.crop and self._view.fit == "letterbox":
                self.windows = replace(self.windows, content=(box.left, box.top, box.width, box.height))
        picture = np.empty((3, self._decoded_side, self._decoded_side), np.uint8)
        self._converter.convert(frame, picture)
        if self._view.crop:
            self._crop_windows(place, self._box.cut(picture))
            return
        if self._view.fit != "letterbox":
            picture = seen_part(self._view, self._box.cut(picture)[None], self._side)[0][0]
        self._store(int(np.searchsorted(self._places, place)), picture)

    def _crop_windows(self, place: int, picture: Pixels) -> None:
        """Crop and store all windows that end at frame ``place``, and free the frames that no later window needs.

        ``picture`` holds the pixels of this frame, uint8 (3, H, W).
        """
        self._held[place] = picture
        places = self.windows.places
        for number in np.flatnonzero(places[:, -1] == place):
            pictures = np.stack([self._held[of_window] for of_window in places[number].tolist()])
            cut = seen_part(self._view, pictures, self._side)[0]
            for stored, frame in zip(self.windows.stored[number].tolist(), cut, strict=True):
                self._store(stored, frame)
        of_later_windows = places[places[:, -1] > place]
        needed = set(of_later_windows.ravel().tolist())
        self._held = {place: picture for place, picture in self._held.items() if place in needed}
