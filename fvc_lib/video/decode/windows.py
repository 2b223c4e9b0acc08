"""Clips at every place of a video, from one pass through it: the frames of each window as a clip of the run has them.

A window is a clip at another place. Where clips are neighbouring frames (``window:STRIDE``), each window is such a
clip, begun half a clip after the one before. Where a clip's frames are spread over the whole video (``uniform``), they
are spread over a stretch of it instead: about ``STRETCH_SECONDS``, at least as many frames as a clip has, and each
stretch begins in the middle of the one before. There are never more than so many windows: in a longer video uniform
stretches grow, and neighbours keep their distance, so that frames between two windows may be seen by none.

Frames are decoded once, in order (``plan.py``). Only those that a window shows are converted, and each of them once,
but where something is looked for in the picture of each window (``View.crop``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.services.clip_settings import View
from fvc_lib.video.decode import views
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.frame_table import IntArray, Seconds, read_frame_table
from fvc_lib.video.decode.pixels import Box, FrameConverter, Pixels
from fvc_lib.video.decode.plan import decode
from fvc_lib.video.decode.source import VideoSource, open_video

STRETCH_SECONDS = 0.5
MOST_WINDOWS = 200
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
    of_side = views.decoded_side(path, num_frames, side, view)
    kind = _Cropped if view.crop else _Windows

    def sink_of(opened: VideoSource, _: int, seconds: Seconds | None) -> _Windows:
        assert seconds is not None  # known before, in order
        return kind(opened, _planned(view, num_frames, side, seconds), view, side, of_side, store)

    with open_video(path) as opened:  # what is stored is stored again where a second attempt is needed
        return decode(opened, read_frame_table(opened), sink_of, in_order=True).sink.found


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
    return Windows(n, places, stored, len(clips), from_begin[places[:, 0]], ends, seconds, (0, 0, side, side))


class _Windows:
    """Takes each wanted frame once, in order.

    Attributes:
        found: what ``decode_windows`` returns.
        box: where the picture lies in the first frame that is wanted: a clip is cut by its first frame's.
    """

    def __init__(
        self, opened: VideoSource, found: Windows, view: View, side: int, decoded_side: int, store: StoreFrame
    ) -> None:
        self.found, self.box = found, Box(0, 0, 0, 0)
        self._places = np.unique(found.places)
        self.wanted = set(self._places.tolist())
        self._view, self._side, self._decoded_side, self._store = view, side, decoded_side, store
        self._opened, self._converter, self._has_begun = opened, FrameConverter(decoded_side, None), False
        self._pictures: dict[int, Pixels] = {}

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """As ``FrameSink.offer``."""
        self._converter.observe(frame)
        if place is None or place not in self.wanted:
            return
        self.wanted.discard(place)
        if not self._has_begun:  # only a decoded frame tells the aspect ratio where the container does not
            self._has_begun, self._converter.sample_aspect_ratio = True, self._opened.sample_aspect_ratio
            self.box = box = self._converter.content_box(frame)
            if not self._view.crop and self._view.fit == "letterbox":
                self.found = replace(self.found, content=(box.left, box.top, box.width, box.height))
        picture = np.empty((3, self._decoded_side, self._decoded_side), np.uint8)
        self._converter.convert(frame, picture)
        self._take(place, picture)

    def _take(self, place: int, picture: Pixels) -> None:
        """Fit the frame, uint8 (3, D, D), by itself and hand it on at once."""
        if self._view.fit != "letterbox":
            content, picture = self._without_bars(picture)[None], np.zeros((3, self._side, self._side), np.uint8)
            views.centre(content, np.array([0]), picture[None])
        self._store(int(np.searchsorted(self._places, place)), picture)

    def _without_bars(self, picture: Pixels) -> Pixels:
        box = self.box
        return picture[:, box.top : box.top + box.height, box.left : box.left + box.width]


class _Cropped(_Windows):
    """Holds the frames of windows that are not whole yet; of a whole one what is found in it is cut out."""

    def _take(self, place: int, picture: Pixels) -> None:
        pictures = {**self._pictures, place: self._without_bars(picture)}
        places = self.found.places
        for number in np.flatnonzero(places[:, -1] == place).tolist():
            self._cut(number, np.stack([pictures[each] for each in places[number].tolist()]))
        needed = set(places[places[:, -1] > place].ravel().tolist())
        self._pictures = {place: kept for place, kept in pictures.items() if place in needed}

    def _cut(self, number: int, pictures: Pixels) -> None:
        boxes = views.boxes_of(self._view, pictures, np.arange(len(pictures)))
        boxes = views.centre_boxes(len(pictures), *pictures.shape[2:]) if boxes is None else boxes
        for at, picture, part in zip(self.found.stored[number].tolist(), pictures, boxes, strict=True):
            self._store(at, views.cut_out(picture, part, self._side))
