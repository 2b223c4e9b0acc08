"""Clips at every place of a video, from one pass through it.

A window is a clip at another place. Each begins in the middle of the one before. Clips of neighbouring frames
(``window:STRIDE``) give windows of neighbouring frames. Clips that are spread over the video (``uniform``) give windows
that are spread over about ``STRETCH_SECONDS`` of it. There are at most ``MOST_WINDOWS``: in a longer video, uniform
windows get longer, and frames between two windows of neighbours are seen by none.
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
MOST_BYTES = 512 << 20  # of all windows' frames together, on the disk

# Takes the number of a stored frame and its pixels, uint8 (3, S, S).
StoreFrame = Callable[[int, Pixels], None]


@dataclass(frozen=True)
class Windows:
    """The windows of a video, M with its own N clips before them, of T frames each.

    Attributes:
        num_source_frames: of the video.
        places: int64 (M, T), places in the presentation order.
        stored: int64 (M, T), numbers of the stored frames.
        num_clips: N.
        begins, ends: float64 (M,), seconds from the video's first frame to the first frame of each, and to the end of
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
    """Return int64 (W, T), places in the presentation order, of the windows of a video of ``seconds``."""
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

    The frames equal those of ``clip.decode_clip`` and ``views.decode_view`` at the same places.

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
    """Takes each wanted frame once, in order; with a crop it holds the frames of incomplete windows.

    Args:
        opened: the video.
        windows: what is wanted.
        view: of the run.
        sides: of frames as they are decoded, and as they are stored.
        store: takes the frames.
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
