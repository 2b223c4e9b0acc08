"""A few frames of a video, chosen by their place in the presentation, as one uint8 array; and what a file is.

The container's index, or a pass over the packets, tells which frames there are; then each group of pictures that holds
a wanted frame is decoded from its keyframe, without the frames nobody refers to. Where that is not known to be exact
(no time stamps, damaged seeking, frames before the first keyframe) the whole video is decoded as a stream, a second
time where the first shows that the packets promised another number of frames. Never are more frames held than the
decoder itself needs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode import readers
from fvc_lib.video.decode.frame_table import FrameTable, Seconds, check_not_empty, read_frame_table, seconds_of
from fvc_lib.video.decode.readers import Box, FrameSink, OpenGroupError, Orientation
from fvc_lib.video.decode.source import (
    CorruptVideo,
    RefusedVideo,
    TruncatedVideo,
    VideoError,
    VideoSource,
    check_size,
    ffmpeg_errors,
    open_video,
)

MAX_FRAMES = 100_000
OnTruncated = Literal["raise", "resample"]


@dataclass(frozen=True)
class Clip:
    """Frames of one video.

    Attributes:
        frames: uint8 (T, 3, H, W), RGB, upright.
        pts_seconds: float64 (T,), presentation times on the container's own clock; from the nominal rate where the
            container has no usable times.
        frame_indices: int64 (T,), places in the presentation order, 0 to ``num_source_frames - 1``.
        num_source_frames: frames the video has (that exist, after ``on_truncated="resample"``).
        source_width, source_height: pixels as stored, before rotation and sample aspect ratio.
        rotation_degrees: clockwise turn in {0, 90, 180, 270} that was applied to the first frame.
        content: where the picture lies in ``frames``; the rest is black.
        repeated: the video, or the part asked for, has fewer frames than asked, so some appear more than once.
        resampled: frames were missing, and the frames are spread over those that exist.
    """

    frames: npt.NDArray[np.uint8]
    pts_seconds: Seconds
    frame_indices: npt.NDArray[np.int64]
    num_source_frames: int
    source_width: int
    source_height: int
    rotation_degrees: int
    content: Box
    repeated: bool
    resampled: bool


def decode_clip(
    path: AnyPath,
    num_frames: int,
    size: int | None = None,
    *,
    start_seconds: float | None = None,
    end_seconds: float | None = None,
    on_truncated: OnTruncated = "raise",
) -> Clip:
    """Decode ``num_frames`` frames spread evenly over a video, or over its part in [start_seconds, end_seconds).

    Frame k of T is number round(k (n - 1) / (T - 1)) of the n frames in presentation order (the first for T = 1), and
    equals what decoding the whole video gives there.

    Args:
        path: a local file.
        num_frames: T, 1 to ``MAX_FRAMES``. A video of fewer frames repeats some, and the clip says so.
        size: side in pixels of the square each frame is letterboxed to; none keeps the pixels as stored, upright.
        start_seconds: leave out frames before this time on the container's clock.
        end_seconds: leave out frames at or after this time.
        on_truncated: ``raise`` when frames that the file promises are missing, or ``resample`` those that exist.

    Raises:
        ValueError: an argument out of range, or no frame in the time asked for.
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused; see ``errors``.
    """
    _check_arguments(num_frames, size, start_seconds, end_seconds, on_truncated)
    path, window = Path(path), _Window(start_seconds, end_seconds)
    try:
        with open_video(path) as source:
            table = read_frame_table(source)
            check_not_empty(path, table)
            sparse = table.trusted and (table.damage is None or window.ends_before(source, table))
            clip = _decode_sparse(source, table, num_frames, size, window) if sparse else None
    except OpenGroupError:
        with open_video(path) as source:
            clip = _decode_sparse(source, replace(table, begins_anew=False), num_frames, size, window)
    if clip is not None:
        return clip
    if table.damage is not None and not sparse and on_truncated == "raise":
        raise TruncatedVideo(path, table.damage)
    return _decode_stream(path, table, num_frames, size, window, on_truncated)


@dataclass(frozen=True)
class _Window:
    start_seconds: float | None
    end_seconds: float | None

    def span(self, seconds: Seconds, path: Path) -> tuple[int, int]:
        """First place (of ascending times) in the half-open window, and the place behind its last."""
        first = 0 if self.start_seconds is None else int(np.searchsorted(seconds, self.start_seconds, "left"))
        stop = len(seconds) if self.end_seconds is None else int(np.searchsorted(seconds, self.end_seconds, "left"))
        if first >= stop:
            raise ValueError(
                f"{str(path)!r}: no frame in [{self.start_seconds}, {self.end_seconds}) seconds; its frames lie in "
                f"[{seconds.min():.3f}, {seconds.max():.3f}]. Choose a window inside."
            )
        return first, stop

    def ends_before(self, source: VideoSource, table: FrameTable) -> bool:
        """Whether a truncated file still has all frames of the window: none of them is decoded after the cut."""
        if self.end_seconds is None:
            return False
        return self.end_seconds <= float(seconds_of(table.dts, source.stream.time_base).max())


_WHOLE = _Window(None, None)


def uniform_places(num_source_frames: int, num_frames: int) -> npt.NDArray[np.int64]:
    """int64 (num_frames,): round(linspace(0, num_source_frames - 1, num_frames))."""
    return np.round(np.linspace(0, num_source_frames - 1, num_frames)).astype(np.int64)


def _decode_sparse(
    source: VideoSource, table: FrameTable, num_frames: int, size: int | None, window: _Window
) -> Clip | None:
    """The clip, or none when a frame did not turn up where the packets promised it.

    Raises:
        OpenGroupError: see ``read_by_pts``.
        RefusedVideo: a frame needs too much memory.
    """
    order, time_base = table.presentation_order(), source.stream.time_base
    first, stop = 0, len(order)
    if window != _WHOLE:  # the times of an hour's frames are not made for nothing
        first, stop = window.span(seconds_of(table.pts[order], time_base), source.path)
    chosen = first + uniform_places(stop - first, num_frames)
    sink = FrameSink(source, size, chosen)
    try:
        with ffmpeg_errors(source.path, CorruptVideo):
            complete = readers.read_by_pts(source, table, order, sink)
    except RefusedVideo:
        raise
    except VideoError:
        return None  # decoded from the beginning the same packets may be fine; if not, that says what is wrong
    pts_seconds = seconds_of(table.pts[order[sink.places]], time_base)
    return _clip(sink, pts_seconds, len(order), resampled=False) if complete else None


def _decode_stream(
    path: Path, table: FrameTable, num_frames: int, size: int | None, window: _Window, on_truncated: OnTruncated
) -> Clip:
    """The slow and sure way: every frame is decoded, and the places are those of the frames that came out."""
    if table.damage is None and table.num_shown and window == _WHOLE:
        clip = _decode_as_promised(path, table, num_frames, size)
        if clip is not None:
            return clip
    count = readers.count_frames(path, table)
    if not count.num_frames:
        raise CorruptVideo(path, count.missing or "it opens, but no frame can be decoded")
    if count.missing is not None and on_truncated == "raise":
        raise (CorruptVideo if count.decoder_failed else TruncatedVideo)(path, count.missing)
    first, stop = window.span(count.seconds, path)
    sink = readers.read_by_place(path, table, count.order, first + uniform_places(stop - first, num_frames), size)
    seconds = count.seconds
    return _clip(sink, seconds[sink.places], len(seconds), resampled=count.missing is not None)


def _decode_as_promised(path: Path, table: FrameTable, num_frames: int, size: int | None) -> Clip | None:
    try:
        found = readers.read_as_promised(path, table, uniform_places(table.num_shown, num_frames), size)
    except VideoError:
        return None  # counting will say what is wrong
    if found is None:
        return None
    sink, seconds = found
    return _clip(sink, seconds[sink.places], len(seconds), resampled=False)


def _clip(sink: FrameSink, pts_seconds: Seconds, num_source_frames: int, *, resampled: bool) -> Clip:
    return Clip(
        frames=sink.frames,
        pts_seconds=pts_seconds,
        frame_indices=sink.places,
        num_source_frames=num_source_frames,
        source_width=sink.source_width,
        source_height=sink.source_height,
        rotation_degrees=sink.rotation_degrees,
        content=sink.content,
        repeated=len(set(sink.places.tolist())) < len(sink.places),
        resampled=resampled,
    )


def _check_arguments(
    num_frames: int, size: int | None, start_seconds: float | None, end_seconds: float | None, on_truncated: str
) -> None:
    if not 1 <= num_frames <= MAX_FRAMES:
        raise ValueError(f"num_frames: got {num_frames}, wanted 1 to {MAX_FRAMES:,}")
    if size is not None and not 1 <= size <= 8192:
        raise ValueError(f"size: got {size}, wanted 1 to 8192 pixels, or None to keep the pixels as stored")
    if start_seconds is not None and end_seconds is not None and not start_seconds < end_seconds:
        raise ValueError(f"got the window [{start_seconds}, {end_seconds}), wanted start_seconds < end_seconds")
    if on_truncated not in ("raise", "resample"):
        raise ValueError(f"on_truncated: got {on_truncated!r}, wanted 'raise' or 'resample'")


@dataclass(frozen=True)
class VideoProbe:
    """Facts about one video file.

    Attributes:
        codec: compression format, e.g. ``h264``, ``av1``.
        container: ffmpeg's short name, e.g. ``mov`` (also MP4), ``matroska`` (also WebM).
        pixel_format: ffmpeg's name, e.g. ``yuv420p``.
        width, height: pixels as stored, before rotation.
        frames_per_second: average over the video; none where it has a single frame and states no rate.
        num_frames: counted, from the packets or, where they do not tell, by decoding.
        duration_seconds: from the first frame's start to the last one's end; none where unknown.
        rotation_degrees: clockwise turn in {0, 90, 180, 270} for display.
        has_audio: there is a sound track.
        size_bytes: of the file.
        bits_per_second: of the file over its duration; none where that is unknown.
    """

    codec: str
    container: str
    pixel_format: str | None
    width: int
    height: int
    frames_per_second: float | None
    num_frames: int
    duration_seconds: float | None
    rotation_degrees: int
    has_audio: bool
    size_bytes: int
    bits_per_second: float | None


def probe_video(path: AnyPath) -> VideoProbe:
    """Read all packets of ``path`` and decode its first frame.

    Raises:
        VideoError: the file is unreadable, has no video, or yields no frame. A truncated file that still has frames
            is described by those it has; ``decode_clip`` says what is missing.
    """
    path = Path(path)
    with open_video(path) as source:
        table = read_frame_table(source)
        check_not_empty(path, table)
        codec, container = source.codec_name, source.container_name
        has_audio = bool(source.container.streams.audio)
        nominal_rate = source.stream.average_rate
        span = _span_seconds(source, table)
    frame = readers.first_frame(path, table)
    check_size(path, frame.width, frame.height)
    num_frames = table.num_shown if table.trusted else readers.count_frames(path, table).num_frames
    if not num_frames:
        raise CorruptVideo(path, "it opens, but none of its packets is shown")
    rate = (num_frames - 1) / span if span and num_frames > 1 else float(nominal_rate or 0) or None
    duration = num_frames / rate if rate else None
    size_bytes = path.stat().st_size
    return VideoProbe(
        codec=codec,
        container=container,
        pixel_format=frame.format.name,
        width=frame.width,
        height=frame.height,
        frames_per_second=rate,
        num_frames=num_frames,
        duration_seconds=duration,
        rotation_degrees=(Orientation.tagged_on(frame) or Orientation()).rotation_degrees,
        has_audio=has_audio,
        size_bytes=size_bytes,
        bits_per_second=8 * size_bytes / duration if duration else None,
    )


def _span_seconds(source: VideoSource, table: FrameTable) -> float | None:
    """From the first frame's time to the last one's; none where the packets do not tell."""
    if not table.trusted:
        return None
    shown = table.pts[table.is_shown]
    return float(shown.max() - shown.min()) * float(source.stream.time_base or 0) or None
