"""A few frames of a video, chosen by their place in the presentation, as one uint8 array; and what a file is.

How the frames are found says ``plan.py``. Never are more of them held than the decoder itself needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode import source
from fvc_lib.video.decode.frame_table import FrameTable, Seconds, read_frame_table
from fvc_lib.video.decode.packets import PacketFacts, packet_facts
from fvc_lib.video.decode.pixels import Box, FirstFrame, FrameSink, Sinks
from fvc_lib.video.decode.plan import SinkOf, count_frames, decode, first_frame, plan_decoding
from fvc_lib.video.decode.source import CorruptVideo, VideoSource, open_video

MAX_FRAMES = 100_000
PlacesOf = Callable[[int], npt.NDArray[np.int64]]  # of the number of frames that a video has


@dataclass(frozen=True)
class Clip:
    """Frames of one video."""

    frames: npt.NDArray[np.uint8]  # uint8 (T, 3, H, W), RGB, upright
    pts_seconds: Seconds  # float64 (T,), as ``plan.Decoded.seconds``
    frame_indices: npt.NDArray[np.int64]  # int64 (T,), places in the presentation order, 0 to ``num_source_frames - 1``
    num_source_frames: int  # frames the video has
    content: Box  # where the picture lies in ``frames``; the rest is black


def decode_clip(path: AnyPath, num_frames: int, size: int | None = None) -> Clip:
    """Decode ``num_frames`` frames spread evenly over a video.

    Frame k of T is number round(k (n - 1) / (T - 1)) of the n frames in presentation order (the first for T = 1), and
    equals what decoding the whole video gives there.

    Args:
        path: a local file.
        num_frames: T, 1 to ``MAX_FRAMES``. Of a video with fewer frames some appear more than once.
        size: side in pixels of the square each frame is letterboxed to; none keeps the pixels as stored, upright.

    Raises:
        ValueError: an argument out of range.
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
    """
    if not 1 <= num_frames <= MAX_FRAMES:
        raise ValueError(f"num_frames: got {num_frames}, wanted 1 to {MAX_FRAMES:,}")
    if size is not None and not 1 <= size <= 8192:
        raise ValueError(f"size: got {size}, wanted 1 to 8192 pixels, or None to keep the pixels as stored")
    return decode_places(path, lambda count: uniform_places(count, num_frames), size)


def decode_places(path: AnyPath, places_of: PlacesOf, size: int | None) -> Clip:
    """As ``decode_clip``, of those ascending places that ``places_of`` chooses among so many frames."""
    with open_video(path) as opened:
        done = decode(opened, read_frame_table(opened), _sink_of(places_of, size))
    return _clip(done.sink, done.seconds)


def explain_clip(path: AnyPath, num_frames: int, size: int = 112) -> str:
    """How ``decode_clip`` gets its frames, in a few plain sentences, after trying it; errors as there."""
    with open_video(path) as opened:
        table = read_frame_table(opened)
        wanted = (
            set(uniform_places(table.num_shown, num_frames).tolist()) if table.num_shown else set(range(num_frames))
        )
        plan = plan_decoding(opened, table, wanted)
        route = decode(opened, table, _sink_of(lambda count: uniform_places(count, num_frames), size)).route
    return f"{plan}{'' if route is plan.routes[0] else f' It is not: its frames come by {route}.'}"


def _sink_of(places_of: PlacesOf, size: int | None) -> SinkOf[FrameSink]:
    return lambda opened, count, _: FrameSink(opened, size, places_of(count))


def _clip(sink: FrameSink, seconds: Seconds) -> Clip:
    return Clip(sink.frames, seconds[sink.places], sink.places, len(seconds), sink.content)


def uniform_places(num_source_frames: int, num_frames: int) -> npt.NDArray[np.int64]:
    """int64 (num_frames,): round(linspace(0, num_source_frames - 1, num_frames))."""
    return np.round(np.linspace(0, num_source_frames - 1, num_frames)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class VideoProbe(PacketFacts):
    """Facts about one video file, with those about its packets.

    Attributes:
        codec: compression format, e.g. ``h264``, ``av1``.
        container: ffmpeg's short name, e.g. ``mov`` (also MP4), ``matroska`` (also WebM).
        pixel_format: ffmpeg's name, e.g. ``yuv420p``.
        width, height: pixels as stored, before rotation.
        frames_per_second: average over the video; none where it has a single frame and states no rate, and of a folder
            of pictures.
        num_frames: counted, from the packets or, where they do not tell, by decoding.
        duration_seconds: from the first frame's start to the last one's end; none where unknown.
        rotation_degrees: clockwise turn in {0, 90, 180, 270} for display.
        has_audio: there is a sound track.
        size_bytes: of the file, or of all pictures in a folder.
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
    with open_video(path) as opened:
        table = read_frame_table(opened)
        stated = _stated(opened, table)
    first = FirstFrame.of(first_frame(path, table))
    source.check_size(path, first.width, first.height)
    return _probe(path, stated, first, count_frames(path, table).num_frames if table.doubt else table.num_shown)


def probe_and_decode(path: AnyPath, wanted: Sequence[tuple[PlacesOf, int | None]]) -> tuple[VideoProbe, list[Clip]]:
    """What ``probe_video``, and of each of ``wanted`` what ``decode_places`` says, from one pass where one is enough.

    Raises:
        VideoError: one of them raises, perhaps for another reason.
    """
    path = Path(path)

    def sink_of(opened: VideoSource, count: int, _: Seconds | None) -> Sinks:
        return Sinks([FrameSink(opened, size, places_of(count)) for places_of, size in wanted])

    with open_video(path) as opened:
        table = read_frame_table(opened)
        stated = _stated(opened, table)
        done = decode(opened, table, sink_of)
    first = done.sink.first
    assert first is not None  # it is wanted
    source.check_size(path, first.width, first.height)
    probe = _probe(path, stated, first, len(done.seconds) if table.doubt else table.num_shown)
    return probe, [_clip(sink, done.seconds) for sink in done.sink.clips]


def _stated(opened: VideoSource, table: FrameTable) -> dict[str, Any]:
    """Fields of ``VideoProbe`` that take no decoding, and ``rate`` and ``span`` of ``_probe``."""
    # The demuxers of pictures, one or many, make up a rate.
    states_rate = source.pictures_in(opened.path) is None and not opened.container_name.endswith(("_pipe", "image2"))
    return {
        "codec": opened.codec_name,
        "container": opened.container_name,
        "has_audio": bool(opened.container.streams.audio),
        "rate": opened.stream.average_rate if states_rate else None,
        "span": _span_seconds(opened, table) if states_rate else None,
        **asdict(packet_facts(table, opened.stream.time_base if states_rate else None)),
    }


def _probe(path: Path, stated: dict[str, Any], first: FirstFrame, num_frames: int) -> VideoProbe:
    if not num_frames:
        raise CorruptVideo(path, "it opens, but none of its packets is shown")
    if num_frames != (pictures := len(source.picture_names(path)) or num_frames):
        raise CorruptVideo(path, f"of its {pictures} pictures {num_frames} are decoded")
    nominal_rate, span = stated.pop("rate"), stated.pop("span")
    rate = (num_frames - 1) / span if span and num_frames > 1 else float(nominal_rate or 0) or None
    duration = num_frames / rate if rate else None
    size_bytes = source.size_of_video(path)
    return VideoProbe(
        **stated,
        pixel_format=first.pixel_format,
        width=first.width,
        height=first.height,
        frames_per_second=rate,
        num_frames=num_frames,
        duration_seconds=duration,
        rotation_degrees=first.orientation.rotation_degrees,
        size_bytes=size_bytes,
        bits_per_second=8 * size_bytes / duration if duration else None,
    )


def _span_seconds(opened: VideoSource, table: FrameTable) -> float | None:
    """From the first frame's time to the last one's; none where the packets do not tell."""
    if table.doubt:
        return None
    shown = table.pts[table.is_shown]
    return float(shown.max() - shown.min()) * float(opened.stream.time_base or 0) or None
