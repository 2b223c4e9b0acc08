"""What a video file is: counted and measured from its packets and its first frame, not believed from its header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fvc_lib.video.decode.frame_table import FrameTable, check_not_empty
from fvc_lib.video.decode.letterbox import Orientation
from fvc_lib.video.decode.packet_scan import read_frame_table
from fvc_lib.video.decode.readers import count_frames, first_frame
from fvc_lib.video.decode.source import CorruptVideo, VideoSource, check_size, open_video


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


def probe_video(path: Path) -> VideoProbe:
    """Read all packets of ``path`` and decode its first frame.

    Raises:
        VideoError: the file is unreadable, has no video, or yields no frame. A truncated file that still has frames
            is described by those it has; ``decode_clip`` says what is missing.
    """
    with open_video(path) as source:
        table = read_frame_table(source)
        check_not_empty(path, table)
        codec, container = source.codec_name, source.container_name
        has_audio = bool(source.container.streams.audio)
        nominal_rate = source.stream.average_rate
        span = _span_seconds(source, table)
    frame = first_frame(path, table)
    check_size(path, frame.width, frame.height)
    num_frames = table.num_shown if table.trusted else count_frames(path, table).num_frames
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
