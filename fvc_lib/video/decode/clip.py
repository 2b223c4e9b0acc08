"""A few frames of a video, chosen by their place in the presentation, as one uint8 array; and what a file is.

A pass over the packets tells which frames there are; then each group of pictures that holds a wanted frame is decoded
from its keyframe, without the frames nobody refers to. Where that is not known to be exact (no time stamps, damaged
seeking, frames before the first keyframe) the whole video is decoded as a stream, a second time where the first shows
that the packets promised another number of frames. Never are more frames held than the decoder itself needs.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode import readers, source
from fvc_lib.video.decode.frame_table import FrameTable, Seconds, check_not_empty, read_frame_table, seconds_of
from fvc_lib.video.decode.packets import PacketFacts, packet_facts
from fvc_lib.video.decode.readers import Box, FirstFrame, FrameSink, Sinks
from fvc_lib.video.decode.source import CorruptVideo, TruncatedVideo, VideoError, VideoSource, open_video

MAX_FRAMES = 100_000
PlacesOf = Callable[[int], npt.NDArray[np.int64]]  # of the number of frames that a video has


@dataclass(frozen=True)
class Clip:
    """Frames of one video."""

    frames: npt.NDArray[np.uint8]  # uint8 (T, 3, H, W), RGB, upright
    # Float64 (T,), presentation times on the container's own clock; from the nominal rate where the container has no
    # usable times.
    pts_seconds: Seconds
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
    path = Path(path)
    with open_video(path) as opened:
        table = read_frame_table(opened)
        check_not_empty(path, table)
        found = _decode_sparse(opened, table, [(places_of, size)])
    return (found or _decode_stream(path, table, [(places_of, size)]))[0][0]


def uniform_places(num_source_frames: int, num_frames: int) -> npt.NDArray[np.int64]:
    """int64 (num_frames,): round(linspace(0, num_source_frames - 1, num_frames))."""
    return np.round(np.linspace(0, num_source_frames - 1, num_frames)).astype(np.int64)


_Wanted = tuple[PlacesOf, int | None]  # of one clip: ``places_of`` and ``size`` of ``decode_places``


def _decode_sparse(
    opened: VideoSource, table: FrameTable, wanted: Sequence[_Wanted], first: FirstFrame | None = None
) -> tuple[list[Clip], int] | None:
    """The clips and how many frames the video has; none when a frame is not known to be where the packets promise it.

    Raises:
        RefusedVideo: a frame needs too much memory.
    """
    if not table.trusted or table.damage is not None:
        return None
    order = table.presentation_order()
    sinks = [FrameSink(opened, size, places_of(len(order))) for places_of, size in wanted]
    try:
        with source.ffmpeg_errors(opened.path, CorruptVideo):
            complete = readers.read_by_pts(opened, table, order, Sinks(sinks, first))
    except source.RefusedVideo:
        raise
    except VideoError:
        return None  # decoded from the beginning the same packets may be fine; if not, that says what is wrong
    seconds = [seconds_of(table.pts[order[sink.places]], opened.stream.time_base) for sink in sinks]
    return (_clips(sinks, seconds, len(order)), len(order)) if complete else None


def _decode_stream(
    path: Path, table: FrameTable, wanted: Sequence[_Wanted], first: FirstFrame | None = None
) -> tuple[list[Clip], int]:
    """The slow and sure way: every frame is decoded, and the places are those of the frames that came out."""
    if table.damage is not None:
        raise TruncatedVideo(path, table.damage)
    found = None
    if table.num_shown:
        places = [(places_of(table.num_shown), size) for places_of, size in wanted]
        with suppress(VideoError):  # counting will say what is wrong
            found = readers.read_as_promised(path, table, places, first)
    if found is not None:
        sinks, seconds = found
    else:
        count = readers.count_frames(path, table)
        if not count.num_frames:
            raise CorruptVideo(path, count.missing or "it opens, but no frame can be decoded")
        if count.missing is not None:
            raise (CorruptVideo if count.decoder_failed else TruncatedVideo)(path, count.missing)
        seconds = count.seconds
        places = [(places_of(len(seconds)), size) for places_of, size in wanted]
        sinks = readers.read_by_place(path, table, count.order, places)
    return _clips(sinks, [seconds[sink.places] for sink in sinks], len(seconds)), len(seconds)


def _clips(sinks: Sequence[FrameSink], seconds: Sequence[Seconds], num_source_frames: int) -> list[Clip]:
    return [
        Clip(sink.frames, times, sink.places, num_source_frames, sink.content)
        for sink, times in zip(sinks, seconds, strict=True)
    ]


@dataclass(frozen=True)
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
        check_not_empty(path, table)
        stated = _stated(opened, table)
    first = FirstFrame()
    first.offer(0, readers.first_frame(path, table))
    source.check_size(path, first.width, first.height)
    num_frames = table.num_shown if table.trusted else readers.count_frames(path, table).num_frames
    return _probe(path, stated, first, num_frames)


def probe_and_decode(path: AnyPath, wanted: Sequence[_Wanted]) -> tuple[VideoProbe, list[Clip]]:
    """What ``probe_video`` and ``decode_places`` say of each of ``wanted``, from one pass where one is enough.

    Raises:
        VideoError: one of them raises, perhaps for another reason.
    """
    path, first = Path(path), FirstFrame()
    with open_video(path) as opened:
        table = read_frame_table(opened)
        check_not_empty(path, table)
        stated = _stated(opened, table)
        found = _decode_sparse(opened, table, wanted, first)
    if found is None:
        first = FirstFrame()
        found = _decode_stream(path, table, wanted, first)
    if not first.width:
        first.offer(0, readers.first_frame(path, table))
    source.check_size(path, first.width, first.height)
    return _probe(path, stated, first, table.num_shown if table.trusted else found[1]), found[0]


def _stated(opened: VideoSource, table: FrameTable) -> dict[str, Any]:
    """Fields of ``VideoProbe`` that take no decoding, and ``rate`` and ``span`` of ``_probe``."""
    states_rate = not opened.path.is_dir()  # else the demuxer makes one up
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
    if num_frames != (pictures := source.num_pictures(path) or num_frames):
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
    if not table.trusted:
        return None
    shown = table.pts[table.is_shown]
    return float(shown.max() - shown.min()) * float(opened.stream.time_base or 0) or None
