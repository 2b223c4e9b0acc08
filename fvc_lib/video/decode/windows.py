"""Decode overlapping clips (windows) along a whole video, in one pass, to score every part of it.

Every window begins in the middle of the window before. If the clips of the view consist of neighbouring frames
(``window:STRIDE``), so do the windows. If they are spread over the video (``uniform``), the frames of a window are
spread over about ``STRETCH_SECONDS``. There are at most ``MOST_WINDOWS``. In a longer video uniform windows get longer;
windows of neighbouring frames leave gaps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.services.registry import View
from fvc_lib.video.decode import views
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.frame_table import IntArray, Seconds, read_frame_table
from fvc_lib.video.decode.pixels import Box, FrameConverter, Pixels
from fvc_lib.video.decode.plan import decode
from fvc_lib.video.decode.source import VideoSource, open_video

STRETCH_SECONDS = 0.5
MOST_WINDOWS = 200
MOST_BYTES = 512 << 20  # of all windows' frames together, on the disk

# Takes the number of a stored frame and its pixels, uint8 (3, S, S).
StoreFrame = Callable[[int, Pixels], None]


@dataclass(frozen=True)
class Windows:
    """The N clips of a video as the view takes them, then its windows: M rows of T frames in all.

    Attributes:
        num_source_frames: number of frames of the video.
        places: int64 (M, T), frame indices in presentation order.
        stored: int64 (M, T), indices of the stored frames, as ``StoreFrame`` receives them.
        num_clips: N.
        begins: float64 (M,), start of the first frame of every row, in seconds after the video's first frame.
        ends: float64 (M,), end of the last frame of every row, likewise.
        seconds: duration of the whole video.
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
    """Return int64 (W, T), the frame indices of the windows in presentation order.

    Args:
        view: decides between windows of neighbouring frames and spread ones.
        num_frames: T.
        num_source_frames: number of frames of the video.
        seconds: duration of the video.
        side: side of a stored frame in pixels; larger frames allow fewer windows (``MOST_BYTES``).
    """
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
    """Decode a whole video, and pass the frames of its clips and windows to ``store``, in any order.

    The pixels equal those of ``clip.decode_clip`` and ``views.decode_view`` for the same frame indices. If a first
    attempt at decoding fails, frames are passed again.

    Raises:
        VideoError: the file is unreadable, truncated or corrupt, or its frames are not decoded in presentation order.
        CropError: the crop fails.
    """
    of_side = views.decoded_side(path, num_frames, side, view)

    def sink_of(opened: VideoSource, _: int, seconds: Seconds | None) -> _WindowSink:
        assert seconds is not None  # known before, in order
        return _WindowSink(opened, _planned(view, num_frames, side, seconds), view, (of_side, side), store)

    with open_video(path) as opened:  # a second attempt stores all frames again
        return decode(opened, read_frame_table(opened), sink_of, in_order=True).sink.windows


def _planned(view: View, num_frames: int, side: int, times: Seconds) -> Windows:
    n = len(times)
    from_begin = times - times[0]
    frame_seconds = float(from_begin[-1]) / (n - 1) if n > 1 else 0.0
    seconds = float(from_begin[-1]) + frame_seconds
    clips = views.clip_places(view, num_frames, n)[0]
    places = np.concatenate([clips, window_places(view, num_frames, n, seconds, side)])
    # Windows share frames, but each is cropped by itself.
    stored = np.arange(places.size).reshape(places.shape) if view.crop else np.searchsorted(np.unique(places), places)
    ends = np.append(from_begin, seconds)[places[:, -1] + 1]
    return Windows(n, places, stored, len(clips), from_begin[places[:, 0]], ends, seconds, (0, 0, side, side))


class _WindowSink:
    """Receives wanted frames in presentation order and stores them.

    With a crop, frames are held until their window is complete, because the crop sees a whole window.

    Args:
        opened: the video.
        windows: the wanted frames.
        view: the view of the run.
        sides: side in pixels of frames as they are decoded, and as they are stored.
        store: is called with every finished frame.
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
        """Take a frame as ``plan.Sink`` describes."""
        self._converter.observe(frame)
        if place is None or place not in self.wanted:
            return
        self.wanted.discard(place)
        if not self._box.width:  # the container may not know the aspect ratio before
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
            picture = views.seen_part(self._view, self._box.cut(picture)[None], self._side)[0][0]
        self._store(int(np.searchsorted(self._places, place)), picture)

    def _crop_windows(self, place: int, picture: Pixels) -> None:
        """Store the windows that ``picture`` completes."""
        self._held[place] = picture
        places = self.windows.places
        for number in np.flatnonzero(places[:, -1] == place):
            pictures = np.stack([self._held[of_window] for of_window in places[number].tolist()])
            cut = views.seen_part(self._view, pictures, self._side)[0]
            for stored, frame in zip(self.windows.stored[number].tolist(), cut, strict=True):
                self._store(stored, frame)
        needed = set(places[places[:, -1] > place].ravel().tolist())
        self._held = {place: picture for place, picture in self._held.items() if place in needed}
