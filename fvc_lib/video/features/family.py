"""Families of forensic features: their declaration, the samples that they measure, and the pooling of values per video.

A family is a group of features that one function measures. The modules of this folder register the families. A family
gets pixels as they were coded, at native resolution, in square tiles (cut-outs of 64 x 64 pixels). Videos of any size
have about the same number of tiles, so values do not grow with the size of a video. A value that cannot be measured is
NaN, and null in the table.

``sample_video`` decodes a few runs of consecutive frames, and cuts tiles out of the decoder's planes, without scaling.
The frames equal those with the same indices when the whole video is decoded. A sample takes a few megabytes for a
video of any size. It also holds the packets of the video, and the quantisers, motion vectors and frame types that the
decoder exports. With PyAV 18.1, the decoders of H.264, MPEG-1, MPEG-2, MPEG-4 and its relatives export quantisers per
macroblock and motion vectors. The decoder of VP9 exports one quantiser per frame and no motion vectors. The decoders of
HEVC, AV1, VP8, ProRes and JPEG export neither. All export frame types. Decoding takes no longer with the export.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from av.codec.context import Flags2
from av.sidedata.encparams import VideoEncParams
from av.sidedata.motionvectors import MotionVectors
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import VideoReformatter

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.decoding import decode
from fvc_lib.video.decode.frame_table import FrameTable, read_frame_table, seconds_of
from fvc_lib.video.decode.pixels import SCALER, side_data_of
from fvc_lib.video.decode.source import VideoSource, open_video

TILE = 64  # pixels on a side
GRID = 8  # pixels; tiles begin at multiples of it, so that all have the same 8 x 8 grid of coded blocks
_ACROSS = 3  # largest number of tiles in a row, and of rows of tiles
SMALL_SIDE = 160  # largest number of pixels on the longer side of ``Run.small``

Float32 = npt.NDArray[np.float32]
Values = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """The luma of L consecutive frames of a video, with N tiles (cut-outs) at the same positions in every frame.

    Attributes:
        luma: float32 (L, N, 64, 64), luma of the tiles from 0 to 255 as coded (10 bit divided by 4; RGB converted).
        small: float32 (L, h, w), luma of the whole frames, averaged down to at most 160 pixels on the longer side.
    """

    luma: Float32
    small: Float32


@dataclass(frozen=True)
class Stream:
    """The P packets of a video in decoding order, and data that the decoder exports for F decoded frames.

    Attributes:
        codec: compression format, such as ``h264``.
        sizes: int64 (P,), sizes of the packets in bytes.
        is_key: bool (P,), true for keyframes.
        pts_seconds: float64 (P,), presentation times in seconds; NaN where unknown.
        frame_types: text of F letters, ``I``, ``P``, ``B`` or ``?`` (unknown), one per decoded frame.
        qp: float32 (F, 2), mean and standard deviation of the quantiser over a frame's blocks, as shares of the codec's
            largest; NaN where it is not exported.
        intra: float32 (F,), share of a frame's area that is not predicted from another frame; NaN where unknown.
        motion: float32 (K, 2), motion vectors of all decoded frames, in pixels to the right and down.
    """

    codec: str
    sizes: IntArray
    is_key: npt.NDArray[np.bool_]
    pts_seconds: npt.NDArray[np.float64]
    frame_types: str = ""
    qp: Float32 = field(default_factory=lambda: np.empty((0, 2), np.float32))
    intra: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    motion: Float32 = field(default_factory=lambda: np.empty((0, 2), np.float32))


@dataclass(frozen=True)
class Feature:
    """The declaration of one forensic feature, a number that is measured in videos.

    Attributes:
        name: name within its family.
        unit: unit of its values.
        meaning: one sentence that explains the feature.
        size_proxy: whether its values depend mainly on the video's original size, codec or length, not on
            manipulations.
    """

    name: str
    unit: str
    meaning: str
    size_proxy: bool = False


@dataclass(frozen=True)
class FeatureFamily:
    """A group of forensic features that one function measures together.

    Attributes:
        name: name of the family, the prefix of its columns' names.
        paper: publication that describes the method.
        features: its features, in the order of their columns.
        measure: function that returns a mapping from feature names to values. For ``tiles`` it takes the luma of a
            frame's tiles, float32 (N, 64, 64), N > 0, and returns arrays (N,). For ``pairs`` it takes a ``Run`` of two
            or more frames, maybe without tiles, and returns arrays of any shape. For ``stream`` it takes a ``Stream``
            and returns numbers.
        of: kind of input of ``measure``: tiles of single frames, pairs of neighbouring frames, or the stream.
    """

    name: str
    paper: str
    features: tuple[Feature, ...]
    measure: Callable[..., Mapping[str, Any]]
    of: Literal["tiles", "pairs", "stream"]

    def columns(self) -> dict[str, Feature]:
        """Return a mapping from the names of the family's columns in the table of features to their features.

        A name is ``FAMILY_FEATURE_POOL``, such as ``sharpness_edges_mean``, where POOL is a statistic of ``POOLS``.
        In a family of kind ``stream``, a feature has one value per video, and the name is ``FAMILY_FEATURE``.
        """
        pools = ("",) if self.of == "stream" else tuple(f"_{pool}" for pool in POOLS)
        return {f"{self.name}_{each.name}{pool}": each for each in self.features for pool in pools}

    def pooled(self, measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return a mapping from all column names to a video's values; NaN where nothing could be measured.

        In a family of kind ``tiles`` or ``pairs``, statistics are computed over the values of all sampled tiles or
        pairs of frames. In a family of kind ``stream``, a feature has one value, which is returned unchanged.

        Args:
            measured: the results of ``measure``: one per sampled frame (``tiles``), one per ``Run`` of consecutive
                frames (``pairs``), or a single one for the whole video (``stream``).

        Raises:
            KeyError: ``measure`` did not return a feature that the family declares.
        """
        rows = []
        for feature in self.features:
            values = [np.ravel(np.asarray(each[feature.name], np.float64)) for each in measured]
            rows.append(np.concatenate(values or [np.empty(0)]))
        pooled = pool(rows)
        if self.of == "stream":  # a single value, which is its own maximum
            pooled = pooled[:, -1:]
        return dict(zip(self.columns(), pooled.ravel().tolist(), strict=True))


# Statistics (pools) over all sampled tiles or pairs of a video, by the suffix of the column.
POOLS: Mapping[str, str] = {
    "mean": "the mean",
    "spread": "the standard deviation",
    "low": "the 10th percentile",
    "high": "the 90th percentile",
    "least": "the minimum",
    "most": "the maximum",
}


def pool(rows: Sequence[Values]) -> npt.NDArray[np.float64]:
    """Return the six statistics of ``POOLS``, such as the mean, for each of F features, float64 (F, 6).

    ``rows`` holds one 1-D array per feature, of any length: its values in one video. Values that are not finite are
    ignored. A feature without finite values gives NaN.
    """
    pooled = np.full((len(rows), len(POOLS)), np.nan)
    for number, row in enumerate(rows):
        values = np.sort(row[np.isfinite(row)].astype(np.float64))
        if values.size:
            quantiles = np.quantile(values, (0.1, 0.9))
            pooled[number] = (values.mean(), values.std(), *quantiles, values[0], values[-1])
    return pooled


def ratio(numerator: Values, denominator: Values, is_known: npt.NDArray[np.bool_]) -> Float32:
    """Divide ``numerator`` by ``denominator`` elementwise, and return float32; NaN where ``is_known`` is false."""
    return np.where(is_known, numerator / np.where(is_known, denominator, 1), np.nan).astype(np.float32)


def tile_corners(height: int, width: int) -> IntArray:
    """Return the positions of the N tiles (square cut-outs) of a frame, int64 (N, 2): top and left in pixels.

    There are at most 3 x 3 square tiles of side ``TILE``, spread evenly, without overlap. All coordinates are multiples
    of 8. A frame smaller than a tile has no tiles.
    """
    rows, columns = (_spread(size, min(_ACROSS, size // TILE)) for size in (height, width))
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def _spread(size: int, count: int) -> IntArray:
    if count == 1:  # in the middle
        return np.array([(size - TILE) // 2 // GRID * GRID])
    return np.arange(count) * (size - TILE) // max(1, count - 1) // GRID * GRID


def families_named(names: str) -> tuple[FeatureFamily, ...]:
    """Return the feature families with the given names, without repeats, sorted by name.

    ``names`` is a text of names separated by commas, or ``all``.

    Raises:
        UsageError: a family is unknown or cannot be imported, or none is named.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UsageError(f"feature_families: got {names!r}, wanted names separated by commas, or all")
    chosen = [*FEATURES.names(), *FEATURES.broken] if wanted == ["all"] else wanted
    return tuple(FEATURES.get(name) for name in sorted(set(chosen)))


# --- Samples of a video

RUNS, RUN_LENGTH = 6, 4  # number of runs of a video, and of frames of a run; less for a short video
_LUMA_OF_RGB = np.array([0.299, 0.587, 0.114], np.float32)  # BT.601


@dataclass(frozen=True)
class Sample:
    """The sampled data of one video from which its forensic features are measured.

    Attributes:
        runs: short series of consecutive frames, in order of time.
        stream: packets of the video, and data that the decoder exports.
    """

    runs: tuple[Run, ...]
    stream: Stream


def run_places(num_frames: int) -> list[IntArray]:
    """Return the indices of the frames to sample from a video: one int64 array per run of consecutive frames.

    Runs are spread from a video's first frame to its last, without overlap. There are at most ``RUNS`` runs of
    ``RUN_LENGTH`` frames. A video with fewer frames than ``RUN_LENGTH`` is one run.
    """
    length = min(RUN_LENGTH, num_frames)
    starts = uniform_places(num_frames - length + 1, max(1, min(RUNS, num_frames // RUN_LENGTH)))
    return [start + np.arange(length) for start in starts]


def sample_video(path: AnyPath) -> Sample:
    """Decode a few runs of consecutive frames of a video, and return the sample from which features are measured.

    The sample holds tiles of the frames, the packets of the video, and data that the decoder exports, such as motion
    vectors.

    Raises:
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
    """
    with open_video(path) as opened:
        table = read_frame_table(opened)
        return decode(opened, table, lambda opened, count, _: SampleSink(opened, table, count)).sink.sample()


@dataclass(frozen=True)
class _Seen:
    """The parts and coding data of one decoded frame that features are measured from.

    Attributes:
        shape: (H, W) in pixels.
        tiles: float32 (N, 64, 64), luma of the tiles.
        small: float32 (h, w), luma of the whole frame, averaged down.
        letter: frame type: ``I``, ``P``, ``B`` or ``?``.
        qp: mean and standard deviation of the quantiser, as in ``Stream``.
        intra: share of the area that is not predicted from another frame; NaN where unknown.
        motion: float32 (K, 2), motion vectors in pixels to the right and down.
    """

    shape: tuple[int, int]
    tiles: Float32
    small: Float32
    letter: str
    qp: tuple[float, float]
    intra: float
    motion: Float32


class SampleSink:
    """A sink (receiver of decoded frames) that collects the sample from which a video's features are measured.

    For every wanted frame it stores tiles, a reduced picture and coding data (``_Seen``).

    Args:
        opened: the video, before it is decoded.
        table: the packets of the video.
        count: number of frames of the video.
    """

    def __init__(self, opened: VideoSource, table: FrameTable, count: int) -> None:
        context = opened.stream.codec_context
        context.options = {**context.options, "export_side_data": "venc_params"}
        context.flags2 = int(context.flags2) | int(Flags2.export_mvs)
        self._runs, self._reformatter = run_places(count), VideoReformatter()
        self.wanted = set(np.concatenate(self._runs).tolist())
        self._seen: dict[int, _Seen] = {}
        self._stream = stream_of(opened, table)

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Store tiles, a reduced picture and coding data of a decoded frame; ignore a frame that is not wanted.

        Args:
            place: index of the frame in presentation order, or None.
            frame: the decoded frame.
        """
        if place is not None and place in self.wanted:
            tiles, small = _luma(frame, self._reformatter)
            self._seen[place] = _Seen((frame.height, frame.width), tiles, small, *_exported(frame))
            self.wanted.discard(place)

    def sample(self) -> Sample:
        """Return the collected data as a ``Sample``, after all wanted frames were received.

        If the frame size changes within a run, the run is cut off there.
        """
        frames, runs = self._seen.values(), []
        for places in self._runs:
            first, *others = (self._seen[place] for place in places.tolist())
            alike = [first, *takewhile(lambda other, shape=first.shape: other.shape == shape, others)]  # type: ignore[misc]
            tiles = np.stack([frame.tiles for frame in alike])
            small = np.stack([frame.small for frame in alike])
            runs.append(Run(tiles, small))
        stream = replace(
            self._stream,
            frame_types="".join(frame.letter for frame in frames),
            qp=np.array([frame.qp for frame in frames], np.float32),
            intra=np.array([frame.intra for frame in frames], np.float32),
            motion=np.concatenate([frame.motion for frame in frames]),
        )
        return Sample(tuple(runs), stream)


def _luma(frame: VideoFrame, reformatter: VideoReformatter) -> tuple[Float32, Float32]:
    """Return the luma of a frame, 0 to 255, as a tuple ``(tiles, small)``.

    ``tiles`` are N squares cut out of the frame, float32 (N, 64, 64). ``small`` is the whole frame, float32 (h, w),
    reduced by averaging blocks of pixels.
    """
    corners = tile_corners(frame.height, frame.width)
    name = frame.format.name
    bits = frame.format.components[0].bits
    is_planar = frame.format.is_planar or len(frame.format.components) == 1
    has_luma = name.startswith(("yuv", "gray")) and not name.startswith(("grayf", "yuvy", "yuvg")) and is_planar
    if has_luma and 8 <= bits <= 16 and not frame.format.is_big_endian and frame.planes[0].line_size > 0:
        plane = _plane(frame, 0, bits)
        scale = np.float32(2.0 ** (8 - bits))
        return _tiles(plane, corners) * scale, _small(plane) * scale
    planar = reformatter.reformat(frame, format="gbrp", interpolation=int(SCALER), threads=1)
    planes = [_plane(planar, number, 8) for number in (2, 0, 1)]  # red, green, blue
    tiles = np.stack([_tiles(plane, corners) for plane in planes], axis=-1) @ _LUMA_OF_RGB
    small = np.stack([_small(plane) for plane in planes], axis=-1) @ _LUMA_OF_RGB
    return tiles, small


def _plane(frame: VideoFrame, number: int, bits: int) -> npt.NDArray[Any]:
    """Return plane ``number`` of a frame, uint8 or uint16 (H, W), as a view of the decoder's memory."""
    plane = frame.planes[number]
    pixels = np.frombuffer(memoryview(plane), np.uint8 if bits == 8 else np.dtype("<u2"))
    line = plane.line_size // pixels.itemsize
    lines = pixels[: len(pixels) // line * line].reshape(-1, line)
    return lines[: plane.height, : plane.width]


def _tiles(plane: npt.NDArray[Any], corners: IntArray) -> Float32:
    """Return copies of N tiles (square cut-outs) of ``plane``, float32 (N, 64, 64).

    ``plane`` is one channel of a frame, (H, W). ``corners`` is int64 (N, 2): top and left of every tile in pixels.
    """
    tiles = np.empty((len(corners), TILE, TILE), np.float32)
    for tile, (top, left) in zip(tiles, corners.tolist(), strict=True):
        tile[...] = plane[top : top + TILE, left : left + TILE]
    return tiles


def _small(plane: npt.NDArray[Any]) -> Float32:
    """Return ``plane`` averaged over equal blocks, so that its longer side has at most 160 pixels, float32 (h, w)."""
    height, width = plane.shape
    factor = -(-max(height, width) // SMALL_SIDE)
    down, across = min(factor, height), min(factor, width)
    h, w = height // down, width // across
    # Adding whole rows first takes a fifth of the time of a sum over both short axes.
    rows = plane[: h * down, : w * across].reshape(h, down, -1).sum(1, dtype=np.uint32)
    sums = rows.reshape(h, w, across).sum(2, dtype=np.uint32)
    return np.asarray(sums.astype(np.float32) / np.float32(down * across))


# Largest quantiser by codec. In H.264 with 10 bits the smallest is -12. For MPEG, ffmpeg exports twice the scale code,
# which is at most 31; on another scale of MPEG-2 values reach 112.
_LARGEST_QP = {"VP9": 255.0, "H264": 51.0, "MPEG2": 62.0}
_MACROBLOCK = 16
_MOST_VECTORS = 4096  # per frame; of more vectors every second, third ... is taken


def stream_of(source: VideoSource, table: FrameTable) -> Stream:
    """Return a ``Stream`` with the codec of ``source`` and the sizes, keyframes and times of the packets in ``table``.

    Presentation times are NaN where they are not reliable. The data of decoded frames are still empty.
    """
    seconds = np.full(len(table.pts), np.nan)
    if not table.doubt and source.stream.time_base:
        seconds[table.is_shown] = seconds_of(table.pts[table.is_shown], source.stream.time_base)
    return Stream(source.codec_name, table.num_bytes, table.is_key, seconds)


def _exported(frame: VideoFrame) -> tuple[str, tuple[float, float], float, Float32]:
    """Return the data about the coding of a frame that its decoder exports, such as motion vectors.

    Returns:
        A tuple of the frame type (``I``, ``P``, ``B`` or ``?``), the mean and standard deviation of the quantiser, the
        share of a P frame's area that is not predicted from another frame, and float32 (K, 2) motion vectors. They are
        the fields ``letter qp intra motion`` of ``_Seen``. Unknown numbers are NaN, and unknown vectors are empty.
    """
    side_data = side_data_of(frame)
    parameters, vectors = side_data.get("VIDEO_ENC_PARAMS"), side_data.get("MOTION_VECTORS")
    letter = PictureType(frame.pict_type).name
    letter = letter if letter in {"I", "P", "B"} else "?"
    qp = _quantisers(parameters) if isinstance(parameters, VideoEncParams) else (np.nan, np.nan)
    if not isinstance(vectors, MotionVectors):
        return letter, qp, np.nan, np.empty((0, 2), np.float32)
    listed = vectors.to_ndarray()
    intra = np.nan
    if letter == "P":  # the share of the area that is not predicted from another frame
        num_blocks = -(-frame.width // _MACROBLOCK) * -(-frame.height // _MACROBLOCK)
        area = num_blocks * _MACROBLOCK**2
        predicted = (listed["w"].astype(np.int64) * listed["h"]).sum()
        intra = float(max(0.0, 1 - predicted / area))
    return letter, qp, intra, _motion(listed)


def _quantisers(parameters: VideoEncParams) -> tuple[float, float]:
    """Return the mean and the standard deviation of the quantiser (step of the compression) over a frame's blocks.

    Both are shares of the codec's largest quantiser. The deviation is NaN if the decoder exports a single quantiser for
    the frame.
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
    """Return the motion of K blocks from the earlier to the later frame, in pixels right and down, float32 (K, 2).

    ``vectors`` is the array of motion vectors of one frame that PyAV exports. If there are more than 4096 vectors, only
    every second, third or n-th vector is used.
    """
    chosen = vectors[:: -(-len(vectors) // _MOST_VECTORS) or 1]
    # A vector points from a block to its match in an earlier frame (source below 0) or a later frame.
    towards = np.sign(chosen["source"]) / np.maximum(chosen["motion_scale"], 1)
    return np.stack([chosen["motion_x"] * towards, chosen["motion_y"] * towards], axis=1).astype(np.float32)
