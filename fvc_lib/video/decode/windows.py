"""Clips at every place of a video, from one pass through it: the frames of each window as a clip of the run has them.

A window is a clip at another place. Where clips are neighbouring frames (``window:STRIDE``), each window is such a
clip, begun half a clip after the one before. Where a clip's frames are spread over the whole video (``uniform``), they
are spread over a stretch of it instead: about ``STRETCH_SECONDS``, at least as many frames as a clip has, and each
stretch begins in the middle of the one before. There are never more than so many windows: in a longer video uniform
stretches grow, and neighbours keep their distance, so that frames between two windows may be seen by none.

Every frame is decoded once, in order. Only those that a window shows are converted, and each of them once, but where
something is looked for in the picture of each window (``View.crop``).
"""

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.services.clip_settings import View
from fvc_lib.video.decode import views
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.frame_table import IntArray, Seconds
from fvc_lib.video.decode.readers import Box, FrameConverter, MissingFrames, Pixels, all_frames

STRETCH_SECONDS = 0.5
MOST_WINDOWS = 200
MIDDLE_SIDE = 256  # pixels of a frame's middle each way, at most
MOST_BYTES = 512 << 20  # of all windows' frames together; they lie on a disk

# A frame as the detector sees it, uint8 (3, S, S); given its number among those that are stored.
StoreFrame = Callable[[int, Pixels], None]


@dataclass(frozen=True)
class Windows:
    """What one pass found.

    Attributes:
        num_source_frames: of the video.
        places: int64 (M, T), of the video's own N clips and then of the windows, in the presentation order.
        stored: int64 (M, T), which of the stored frames each is.
        num_clips: N.
        begins, ends: float64 (M,), seconds from the video's first frame: to the first frame of each, and to the end of
            its last.
        seconds: of the whole video.
        content: left, top, width and height in pixels of the picture in a stored frame; around it are black bars.
        middle: uint8 (h, w), of the frame in the middle of the video what ``middle_luma`` gives.
    """

    num_source_frames: int
    places: IntArray
    stored: IntArray
    num_clips: int
    begins: Seconds
    ends: Seconds
    seconds: float
    content: tuple[int, int, int, int]
    middle: Pixels


def window_places(view: View, num_frames: int, num_source_frames: int, seconds: float, side: int) -> IntArray:
    """int64 (W, T): places in the presentation order of every window of a video of ``seconds``, in their order."""
    n, half = num_source_frames, max(1, num_frames // 2)
    most = max(1, min(MOST_WINDOWS, MOST_BYTES // (3 * side * side * num_frames)))
    if view.stride:
        stride = views.clip_places(replace(view, clips=1), num_frames, n)[1]
        begins = max(0, n - 1 - (num_frames - 1) * stride)
        return views.clip_places(replace(view, clips=min(most, -(-begins // (half * stride)) + 1)), num_frames, n)[0]
    rate = n / seconds if seconds > 0 else 0.0
    gap = max(1.0, rate * STRETCH_SECONDS / num_frames)  # frames from one to the next
    wanted = round(((n - 1) / gap - (num_frames - 1)) / half) + 1
    number = max(1, min(most, wanted, (n - num_frames) // half + 1))
    grid = uniform_places(n, (number - 1) * half + num_frames)
    return np.asarray(grid[half * np.arange(number)[:, None] + np.arange(num_frames)])


def decode_windows(path: Path, num_frames: int, side: int, view: View, store: StoreFrame) -> Windows:
    """Decode a whole video and give ``store`` the frames of its own clips and of every window, in any order.

    The frames equal those that ``clip.decode_clip`` and ``views.decode_view`` give for the same places. At most the
    frames of the clips that are not yet whole are held, and those only with ``View.crop``.

    Raises:
        VideoError: the file is unreadable, truncated or corrupt, or its frames come in another order.
        CropError: what is asked for the crop fails.
    """
    try:
        return _decode(path, num_frames, side, view, store, counted=False)
    except MissingFrames:  # what is stored is stored again
        return _decode(path, num_frames, side, view, store, counted=True)


def _decode(path: Path, num_frames: int, side: int, view: View, store: StoreFrame, *, counted: bool) -> Windows:
    decoded_side = views._decoded_side(path, num_frames, side, view)
    found: Windows | None = None
    sink: _Fitted | _Cropped
    for seen in all_frames(path, counted=counted):
        if found is None:
            found = _planned(view, num_frames, side, seen.times)
            kind = _Cropped if view.crop else _Fitted
            sink = kind(found, view, side, store)
            converter, wanted = _Converter(decoded_side, None), set(np.unique(found.places).tolist())
        converter.observe(seen.frame)
        if seen.number == found.num_source_frames // 2:
            found = replace(found, middle=middle_luma(seen.frame))
        if seen.number not in wanted:
            continue
        if sink.box is None:  # only a decoded frame tells the aspect ratio where the container does not
            converter.sample_aspect_ratio = seen.source.sample_aspect_ratio
            sink.box = box = converter.content_box(seen.frame)
            if not view.crop and view.fit == "letterbox":
                found = replace(found, content=(box.left, box.top, box.width, box.height))
        picture = np.empty((3, decoded_side, decoded_side), np.uint8)
        converter.convert(seen.frame, picture)
        sink.take(seen.number, picture)
    assert found is not None  # a video without a frame was refused
    return found


def _planned(view: View, num_frames: int, side: int, times: Seconds) -> Windows:
    n = len(times)
    from_begin = times - times[0]
    frame_seconds = float(from_begin[-1]) / (n - 1) if n > 1 else 0.0
    seconds = float(from_begin[-1]) + frame_seconds
    clips = views.clip_places(view, num_frames, n)[0]
    places = np.concatenate([clips, window_places(view, num_frames, n, seconds, side)])
    shared = np.searchsorted(np.unique(places), places)
    # Each window is cropped by what is found in it.
    stored = np.arange(places.size).reshape(places.shape) if view.crop else shared
    ends = np.append(from_begin, seconds)[places[:, -1] + 1]
    return Windows(n, places, stored, len(clips), from_begin[places[:, 0]], ends, seconds, (0, 0, side, side), _NONE)


_NONE = np.empty((0, 0), np.uint8)


def middle_luma(frame: VideoFrame) -> Pixels:
    """uint8 (h, w): the luma in the middle of a frame at native resolution, at most 256 pixels each way.

    As coded, neither turned nor its levels changed, where it is of 8 bit and in a plane of its own; of other formats
    what they are converted to. It begins at multiples of 16 pixels, where coding blocks do, and ends at one of 8.
    """
    kind = frame.format
    as_coded = kind.name.startswith(("yuv", "gray")) and kind.is_planar | (len(kind.components) == 1)
    as_coded = as_coded and kind.components[0].bits == 8 and frame.planes[0].line_size > 0
    plane = (frame if as_coded else frame.reformat(format="gray")).planes[0]
    pixels = np.frombuffer(memoryview(plane), np.uint8)
    rows = pixels[: len(pixels) // plane.line_size * plane.line_size].reshape(-1, plane.line_size)
    height, width = (min(MIDDLE_SIDE, side // 8 * 8) for side in (frame.height, frame.width))
    top, left = ((side - part) // 32 * 16 for side, part in ((frame.height, height), (frame.width, width)))
    return rows[top : top + height, left : left + width].copy()


def packed(pixels: Pixels) -> list[Any]:
    """``pixels``, uint8 (h, w), as JSON."""
    return [*pixels.shape, base64.b64encode(pixels.tobytes()).decode()]


def unpacked(said: list[Any]) -> Pixels:
    """What ``packed`` was given."""
    return np.frombuffer(base64.b64decode(said[2]), np.uint8).reshape(said[:2])


class _Converter(FrameConverter):
    """Reckons only once where frames of one size lie: of small ones that takes as long as decoding them."""

    def __init__(self, size: int | None, sample_aspect_ratio: Fraction | None) -> None:
        super().__init__(size, sample_aspect_ratio)
        self._boxes: dict[tuple[object, ...], Box] = {}

    def content_box(self, frame: VideoFrame) -> Box:
        key = (frame.width, frame.height, self.orientation, self.sample_aspect_ratio)
        if key not in self._boxes:
            self._boxes[key] = super().content_box(frame)
        return self._boxes[key]


class _Fitted:
    """Fits each frame by itself and hands it on at once.

    Attributes:
        box: where the picture lies in the first frame that is wanted: a clip is cut by its first frame's.
    """

    def __init__(self, plan: Windows, view: View, side: int, store: StoreFrame) -> None:
        self._number = {int(place): number for number, place in enumerate(np.unique(plan.places))}
        self._view, self._side, self._store = view, side, store
        self.box: Box | None = None

    def take(self, place: int, picture: Pixels) -> None:
        """A frame that is wanted, uint8 (3, D, D)."""
        box = self.box
        if self._view.fit != "letterbox" and box is not None:
            content = picture[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
            picture = np.zeros((3, self._side, self._side), np.uint8)
            views._centre(content, np.array([0]), picture[None])
        self._store(self._number[place], picture)


class _Cropped:
    """Holds the frames of windows that are not whole yet; of a whole one what is found in it is cut out.

    What finds and cuts is ``views``'s own, private there: making it public would change the code's hash, and with it
    the name under which every run's clips are stored.
    """

    def __init__(self, plan: Windows, view: View, side: int, store: StoreFrame) -> None:
        self._plan, self._view, self._side, self._store = plan, view, side, store
        self._waiting = list(range(len(plan.places)))
        self._pictures: dict[int, Pixels] = {}
        self.box: Box | None = None

    def take(self, place: int, picture: Pixels) -> None:
        """As ``_Fitted`` has it."""
        box = self.box
        assert box is not None
        self._pictures[place] = picture[:, box.top : box.top + box.height, box.left : box.left + box.width]
        whole = [number for number in self._waiting if self._plan.places[number, -1] == place]
        self._waiting = [number for number in self._waiting if number not in whole]
        for number in whole:
            self._cut(number)
        needed = set(self._plan.places[self._waiting].ravel().tolist())
        self._pictures = {place: kept for place, kept in self._pictures.items() if place in needed}

    def _cut(self, number: int) -> None:
        pictures = np.stack([self._pictures[place] for place in self._plan.places[number].tolist()])
        own = np.arange(len(pictures))
        boxes = views._boxes(self._view, pictures, own)
        boxes = views.centre_boxes(len(own), *pictures.shape[2:]) if boxes is None else boxes
        for at, picture, part in zip(self._plan.stored[number].tolist(), pictures, boxes, strict=True):
            self._store(at, views._cut_out(picture, part, self._side))
