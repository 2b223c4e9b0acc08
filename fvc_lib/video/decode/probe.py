"""Measure facts about a video file: format, size, number of frames, rate, and statistics of its packets."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from av.video.frame import VideoFrame

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode.clip import Clip, PlacesOf
from fvc_lib.video.decode.decoding import Sink, decode
from fvc_lib.video.decode.file_parts import picture_names
from fvc_lib.video.decode.frame_table import NO_PTS, FrameTable, Seconds, read_frame_table, seconds_of
from fvc_lib.video.decode.pixels import FrameSink, Orientation
from fvc_lib.video.decode.source import CorruptVideo, VideoSource, check_size, open_video

_MAX_SECONDS = 1_000_000  # eleven days: a file that claims more has damaged times


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketFacts:
    """Statistics of a video's packets, which show how it was encoded. A value is None where it cannot be computed.

    Attributes:
        packet_bytes_mean, packet_bytes_std: mean and standard deviation of the packets' sizes in bytes.
        packet_bytes_p10, packet_bytes_median, packet_bytes_p90: 10th percentile, median and 90th percentile of the
            sizes in bytes.
        key_bytes_ratio: mean size of keyframes divided by the mean size of other frames.
        key_distance_mean, key_distance_max: mean and maximum number of packets from one keyframe to the next; None
            with a single keyframe.
        reordered_share: share of packets that are shown before the packet decoded just before them (B-frames).
        bits_per_second_std, bits_per_second_max: standard deviation and maximum of the bits shown in each full second;
            None for fewer than two full seconds.
    """

    packet_bytes_mean: float | None = None
    packet_bytes_std: float | None = None
    packet_bytes_p10: float | None = None
    packet_bytes_median: float | None = None
    packet_bytes_p90: float | None = None
    key_bytes_ratio: float | None = None
    key_distance_mean: float | None = None
    key_distance_max: float | None = None
    reordered_share: float | None = None
    bits_per_second_std: float | None = None
    bits_per_second_max: float | None = None


def packet_facts(table: FrameTable, time_base: Fraction | None) -> PacketFacts:
    """Return statistics of the packets of a video.

    Args:
        table: the packets, at least one.
        time_base: seconds per unit of the packets' times; None if the times are not meaningful, as for pictures.
    """
    low, median, high = np.percentile(table.num_bytes, (10, 50, 90)).tolist()
    of_keys = table.num_bytes[table.is_key]
    of_others = table.num_bytes[~table.is_key]
    distances = np.diff(np.flatnonzero(table.is_key))
    has_times = table.stores_pts and not (table.pts == NO_PTS).any()
    rates = _bits_of_whole_seconds(table, time_base)
    key_bytes_ratio = float(of_keys.mean() / of_others.mean()) if of_keys.size and of_others.size else None
    reordered_share = float((np.diff(table.pts) < 0).sum() / len(table.pts)) if has_times else None
    return PacketFacts(
        packet_bytes_mean=float(table.num_bytes.mean()),
        packet_bytes_std=float(table.num_bytes.std()),
        packet_bytes_p10=low,
        packet_bytes_median=median,
        packet_bytes_p90=high,
        key_bytes_ratio=key_bytes_ratio,
        key_distance_mean=float(distances.mean()) if distances.size else None,
        key_distance_max=float(distances.max()) if distances.size else None,
        reordered_share=reordered_share,
        bits_per_second_std=float(rates.std()) if rates.size > 1 else None,
        bits_per_second_max=float(rates.max()) if rates.size > 1 else None,
    )


def _bits_of_whole_seconds(table: FrameTable, time_base: Fraction | None) -> Seconds:
    """Return the number of bits shown in every full second, float64 (seconds,); empty without usable times.

    The last second is left out, because it is seldom full.
    """
    if table.doubt or time_base is None:
        return np.empty(0)
    seconds = seconds_of(table.pts - table.pts.min(), time_base).astype(np.int64)
    if seconds.max() > _MAX_SECONDS:
        return np.empty(0)
    return 8.0 * np.bincount(seconds, weights=table.num_bytes)[:-1]


@dataclass(frozen=True, slots=True)
class VideoProbe(PacketFacts):
    """Facts about one video file, in addition to the statistics of its packets.

    Attributes:
        codec: compression format, e.g. ``h264``, ``av1``.
        container: ffmpeg's short name, e.g. ``mov`` (also MP4), ``matroska`` (also WebM).
        pixel_format: ffmpeg's name, e.g. ``yuv420p``.
        width, height: pixels as stored, before rotation.
        frames_per_second: average over the video; None for a single frame without a stated rate, and for pictures.
        num_frames: counted from the packets, or by decoding if packets do not identify the frames.
        duration_seconds: from the start of the first frame to the end of the last frame; None where unknown.
        rotation_degrees: clockwise turn in {0, 90, 180, 270} for display.
        has_audio: whether there is a sound track.
        size_bytes: size of the file, or of all pictures in a folder.
        bits_per_second: size of the file in bits divided by the duration; None where the duration is unknown.
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
    """Return facts about a video, such as codec, size and number of frames.

    Usually they come from the packets and the first frame. All frames are decoded if the packets do not determine the
    number and order of the frames.

    Raises:
        VideoError: as ``clip.decode_clip``.
    """
    return probe_and_decode(path, [])[0]


def probe_and_decode(
    path: AnyPath,
    wanted: Sequence[tuple[PlacesOf, int | None]],
    sink_besides: Callable[[VideoSource, FrameTable, int], Sink] | None = None,
) -> tuple[VideoProbe, list[Clip]]:
    """Return facts about a video, such as codec and number of frames, and clips that are decoded in the same pass.

    Args:
        path: a local file.
        wanted: one tuple (``places_of``, ``size``) per clip. ``places_of`` is a function from the number of frames of
            the video to the frame indices of the clip. ``size`` is the side of its square frames in pixels, or None for
            frames as stored.
        sink_besides: function that returns one more sink (receiver of decoded frames). It takes the open video, its
            packets and its number of frames, and is called for every attempt at decoding. None: no further sink.

    Returns:
        A tuple: the facts, and a list with one clip per entry of ``wanted``.

    Raises:
        VideoError: as ``clip.decode_clip``.
    """

    def sink_of(source: VideoSource, count: int, _: Seconds | None) -> _ProbeSink:
        clips = [FrameSink(source, size, places_of(count)) for places_of, size in wanted]
        return _ProbeSink(clips, [sink_besides(source, table, count)] if sink_besides else [])

    path = Path(path)
    with open_video(path) as opened:
        table = read_frame_table(opened)
        container = opened.container_name
        codec = opened.codec_name
        size_bytes = opened.size_bytes
        has_audio = bool(opened.container.streams.audio)
        num_pictures = len(picture_names(path))
        is_timed = not num_pictures and not container.endswith(("_pipe", "image2"))  # their demuxers invent a rate
        time_base = opened.stream.time_base if is_timed else None
        rate = float(opened.stream.average_rate or 0) if is_timed else 0.0
        done = decode(opened, table, sink_of)
        sink = done.sink
        seconds = done.seconds
    num_frames = len(seconds)
    if num_pictures and num_frames != num_pictures:
        raise CorruptVideo(path, f"of its {num_pictures} pictures {num_frames} are decoded")
    check_size(path, sink.width, sink.height)
    shown = table.pts[table.is_shown]
    span = float(shown.max() - shown.min()) * float(time_base or 0) if not table.doubt else 0.0
    rate = (num_frames - 1) / span if span and num_frames > 1 else rate
    duration = num_frames / rate if rate else None
    bits_per_second = 8 * size_bytes / duration if duration else None
    of_packets = packet_facts(table, time_base)
    probe = VideoProbe(
        codec,
        container,
        sink.pixel_format,
        sink.width,
        sink.height,
        rate or None,
        num_frames,
        duration,
        sink.orientation.rotation_degrees,
        has_audio,
        size_bytes,
        bits_per_second,
        **asdict(of_packets),
    )
    return probe, [Clip.of(clip, seconds) for clip in sink.clips]


class _ProbeSink:
    """A sink (receiver of decoded frames) that passes frames to other sinks, and records facts of the first frame."""

    def __init__(self, clips: Sequence[FrameSink], others: Sequence[Sink]) -> None:
        self.clips, self._sinks = clips, [*clips, *others]
        self.wanted = {0}.union(*(sink.wanted for sink in self._sinks))
        self.pixel_format, self.width, self.height, self.orientation = "", 0, 0, Orientation()

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Pass a decoded frame to all sinks; for the first frame, also record its size, pixel format and orientation.

        ``place`` is the index of the frame in presentation order; None for a frame that is not wanted.
        """
        for sink in self._sinks:
            sink.offer(place, frame)
        if place == 0:
            self.pixel_format, self.width, self.height = frame.format.name, frame.width, frame.height
            self.orientation = Orientation.tagged_on(frame) or Orientation()
        if place is not None:
            self.wanted.discard(place)
