"""Sample a video for its features: a few runs of consecutive frames, of which tiles of pixels are cut out.

The frames equal those with the same indices when the whole video is decoded. Pixels are read from the
decoder's planes without scaling. A sample takes a few megabytes for a video of any size.

A sample also holds the packets of the video, and the quantisers, motion vectors and frame types that the decoder
exports. Not all decoders of ffmpeg export them. With PyAV 18.1, those of H.264, MPEG-1, MPEG-2, MPEG-4 and its
relatives export quantisers per macroblock and motion vectors. That of VP9 exports one quantiser per frame and no motion
vectors. Those of HEVC, AV1, VP8, ProRes and JPEG export neither. All export frame types. Decoding takes no longer with
the export.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
from av.codec.context import Flags2
from av.sidedata.encparams import VideoEncParams
from av.sidedata.motionvectors import MotionVectors
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import VideoReformatter

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.decoding import decode
from fvc_lib.video.decode.frame_table import FrameTable, read_frame_table, seconds_of
from fvc_lib.video.decode.pixels import SCALER, side_data_of
from fvc_lib.video.decode.source import VideoSource, open_video
from fvc_lib.video.features.family import SMALL_SIDE, TILE, Float32, IntArray, Run, Stream, tile_corners

Plane = npt.NDArray[Any]  # uint8 or uint16

RUNS, RUN_LENGTH = 6, 4  # number of runs of a video, and of frames of a run; less for a short video
_LUMA_OF_RGB = np.array([0.299, 0.587, 0.114], np.float32)  # BT.601


@dataclass(frozen=True)
class Sample:
    """The data from which a video's features are measured: its runs in order of time, and its stream."""

    runs: tuple[Run, ...]
    stream: Stream


def run_places(num_frames: int) -> list[IntArray]:
    """Return the frame indices of every run; runs are spread from a video's first frame to its last, without overlap.

    There are at most ``RUNS`` runs of ``RUN_LENGTH`` frames. A video with fewer frames than ``RUN_LENGTH`` is one run.
    """
    length = min(RUN_LENGTH, num_frames)
    starts = uniform_places(num_frames - length + 1, max(1, min(RUNS, num_frames // RUN_LENGTH)))
    return [start + np.arange(length) for start in starts]


def sample_video(path: AnyPath) -> Sample:
    """Decode the runs of a video, and return them with its stream.

    Raises:
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
    """
    with open_video(path) as opened:
        table = read_frame_table(opened)
        stream = stream_of(opened, table)
        done = decode(opened, table, lambda opened, count, _: _TileSink(opened, run_places(count), stream))
    return done.sink.sample()


@dataclass(frozen=True)
class _Cut:
    """The luma of one frame: its ``shape`` (H, W), its tiles (N, 64, 64), and the reduced frame (h, w)."""

    shape: tuple[int, int]
    tiles: Float32
    small: Float32


class _TileSink:
    """A sink that cuts tiles out of wanted frames, and does not hold the frames."""

    def __init__(self, opened: VideoSource, runs: Sequence[IntArray], stream: Stream) -> None:
        export(opened)
        self.wanted = set(np.concatenate(runs).tolist())
        self._runs, self._stream, self._notes = runs, stream, FrameNotes()
        self._cuts: dict[int, _Cut] = {}
        self._reformatter = VideoReformatter()

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Receive a frame, as ``decode.decoding.Sink`` describes; cut out its tiles if it is wanted."""
        if place is not None and place in self.wanted:
            self._cuts[place] = _cut(frame, self._reformatter)
            self._notes.observe(frame)
            self.wanted.discard(place)

    def sample(self) -> Sample:
        """Return the sample, after all wanted frames were received; a run ends early where the frame size changes."""
        runs = []
        for places in self._runs:
            cuts = [self._cuts[place] for place in places.tolist()]
            alike = list(takewhile(lambda each, shape=cuts[0].shape: each.shape == shape, cuts))  # type: ignore[misc]
            runs.append(Run(np.stack([each.tiles for each in alike]), np.stack([each.small for each in alike])))
        return Sample(tuple(runs), self._notes.added_to(self._stream))


def _cut(frame: VideoFrame, reformatter: VideoReformatter) -> _Cut:
    shape = frame.height, frame.width
    corners = tile_corners(*shape)
    kind, parts = frame.format, frame.format.components
    bits = parts[0].bits
    has_luma = kind.name.startswith(("yuv", "gray")) and not kind.name.startswith(("grayf", "yuvy", "yuvg"))
    is_planar = (kind.is_planar or len(parts) == 1) and 8 <= bits <= 16 and not kind.is_big_endian
    if has_luma and is_planar and min(plane.line_size for plane in frame.planes) > 0:
        plane, scale = _plane(frame, 0, bits), np.float32(2.0 ** (8 - bits))
        return _Cut(shape, _tiles(plane, corners) * scale, _small(plane) * scale)
    planar = reformatter.reformat(frame, format="gbrp", interpolation=int(SCALER), threads=1)
    green, blue, red = (_plane(planar, number, 8) for number in range(3))
    tiles, small = (
        np.stack([of(each) for each in (red, green, blue)], axis=-1) @ _LUMA_OF_RGB
        for of in (lambda plane: _tiles(plane, corners), _small)
    )
    return _Cut(shape, tiles, small)


def _plane(frame: VideoFrame, number: int, bits: int) -> Plane:
    """Return plane ``number`` of a frame, uint8 or uint16 (H, W), as a view of the decoder's memory."""
    plane = frame.planes[number]
    pixels = np.frombuffer(memoryview(plane), np.uint8 if bits == 8 else np.dtype("<u2"))
    line = plane.line_size // pixels.itemsize
    return pixels[: len(pixels) // line * line].reshape(-1, line)[: plane.height, : plane.width]


def _tiles(plane: Plane, corners: IntArray) -> Float32:
    """Return copies of the tiles of ``plane`` at ``corners`` (N, 2), float32 (N, 64, 64)."""
    tiles = np.empty((len(corners), TILE, TILE), np.float32)
    for tile, (top, left) in zip(tiles, corners.tolist(), strict=True):
        tile[...] = plane[top : top + TILE, left : left + TILE]
    return tiles


def _small(plane: Plane) -> Float32:
    """Return ``plane`` averaged over equal blocks, so that its longer side has at most 160 pixels, float32 (h, w)."""
    height, width = plane.shape
    factor = -(-max(height, width) // SMALL_SIDE)
    down, across = min(factor, height), min(factor, width)
    h, w = height // down, width // across
    # Adding whole rows and columns takes a fifth of the time of numpy's sum over short axes.
    rows = np.zeros((h, w * across), np.uint16 if plane.dtype == np.uint8 and down <= 256 else np.uint32)
    for row in range(down):
        np.add(rows, plane[row : h * down : down, : w * across], out=rows)
    sums = np.zeros((h, w), np.uint32)
    for column in range(across):
        sums += rows[:, column::across]
    means: Float32 = sums.astype(np.float32) / np.float32(down * across)
    return means


# --- Packets, and data that the decoder exports

_EXPORT = {"export_side_data": "venc_params"}
# Largest quantiser by codec. In H.264 with 10 bits the smallest is -12. For MPEG, ffmpeg exports twice the scale code,
# which is at most 31; on another scale of MPEG-2 values reach 112.
_LARGEST_QP = {"VP9": 255.0, "H264": 51.0, "MPEG2": 62.0}
_MACROBLOCK = 16
_MOST_VECTORS = 4096  # per frame; of more vectors every second, third ... is taken


def export(source: VideoSource) -> None:
    """Make the decoder of ``source`` export quantisers and motion vectors; call it before the first decode."""
    context = source.stream.codec_context
    context.options = {**context.options, **_EXPORT}
    context.flags2 = int(context.flags2) | int(Flags2.export_mvs)


def stream_of(source: VideoSource, table: FrameTable) -> Stream:
    """Return the packets of ``table`` as a ``Stream``; presentation times are NaN where they are not reliable."""
    seconds = np.full(table.num_packets, np.nan)
    if not table.doubt and source.stream.time_base:
        seconds[table.is_shown] = seconds_of(table.pts[table.is_shown], source.stream.time_base)
    return Stream(source.codec_name, table.num_bytes, table.is_key, seconds)


class FrameNotes:
    """Collects the quantisers, motion vectors and frame types that the decoder exports for chosen frames."""

    def __init__(self) -> None:
        self._types = ""
        self._qp: list[tuple[float, float]] = []
        self._intra: list[float] = []
        self._motion: list[Float32] = []

    def observe(self, frame: VideoFrame) -> None:
        """Add the exported data of a frame; ``export`` must have been called with its source before."""
        side_data = side_data_of(frame)
        letter = PictureType(frame.pict_type).name
        letter = letter if letter in {"I", "P", "B"} else "?"
        parameters, vectors = side_data.get("VIDEO_ENC_PARAMS"), side_data.get("MOTION_VECTORS")
        self._types += letter
        self._qp.append(_quantisers(parameters) if isinstance(parameters, VideoEncParams) else (np.nan, np.nan))
        self._intra.append(np.nan)
        if isinstance(vectors, MotionVectors):
            listed = vectors.to_ndarray()
            self._motion.append(_motion(listed))
            if letter == "P":
                self._intra[-1] = _intra_share(listed, frame.width, frame.height)

    def added_to(self, stream: Stream) -> Stream:
        """Return a copy of ``stream`` with the collected data."""
        return replace(
            stream,
            frame_types=self._types,
            qp=np.array(self._qp, np.float32).reshape(-1, 2),
            intra=np.array(self._intra, np.float32),
            motion=np.concatenate([np.empty((0, 2), np.float32), *self._motion]),
        )


def _quantisers(parameters: VideoEncParams) -> tuple[float, float]:
    """Return mean and standard deviation of the quantiser over a frame's blocks.

    Both are shares of the codec's largest quantiser. The deviation is NaN if only the frame's quantiser is exported.
    """
    largest = _LARGEST_QP.get(parameters.codec_type.name, np.nan)
    if not parameters.nb_blocks:
        return parameters.qp / largest, np.nan
    # Per block: x, y, width, height, and the difference of its quantiser from the frame's
    # (libavutil/video_enc_params.h). The stub does not declare the buffer.
    numbers = np.frombuffer(parameters, np.int32, offset=parameters.blocks_offset)  # type: ignore[call-overload]
    offsets = numbers.reshape(parameters.nb_blocks, -1)[:, 4]
    return float(parameters.qp + offsets.mean()) / largest, float(offsets.std()) / largest


def _motion(vectors: np.ndarray) -> Float32:
    """Return the motion of K blocks from the earlier to the later frame, in pixels right and down, float32 (K, 2)."""
    kept = vectors[:: -(-len(vectors) // _MOST_VECTORS) or 1]
    # A vector points from a block to its match in an earlier frame (source below 0) or a later frame.
    towards = np.sign(kept["source"]) / np.maximum(kept["motion_scale"], 1)
    return np.stack([kept["motion_x"] * towards, kept["motion_y"] * towards], axis=1).astype(np.float32)


def _intra_share(vectors: np.ndarray, width: int, height: int) -> float:
    """Return the share of a P frame's area that is not predicted from another frame."""
    area = -(-width // _MACROBLOCK) * -(-height // _MACROBLOCK) * _MACROBLOCK**2
    return float(max(0.0, 1 - (vectors["w"].astype(np.int64) * vectors["h"]).sum() / area))
