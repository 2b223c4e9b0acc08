"""What features are measured on: runs of neighbouring frames spread over a video, cut into tiles as they were coded.

The frames are those that decoding the whole video gives at these places, found as ``decode.plan`` has it. Pixels are
read from the decoder's planes without scaling. A sample is a few megabytes, whatever the size of the video.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, VideoReformatter

from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.decode.clip import uniform_places
from fvc_lib.video.decode.frame_table import Seconds, read_frame_table
from fvc_lib.video.decode.pixels import SCALER
from fvc_lib.video.decode.plan import decode
from fvc_lib.video.decode.source import VideoSource, open_video
from fvc_lib.video.features.family import (
    SMALL_SIDE,
    TILE,
    Float32,
    IntArray,
    Pixels,
    Run,
    Stream,
    cut_tiles,
    tile_corners,
)
from fvc_lib.video.features.stream import FrameNotes, export, stream_of

Plane = npt.NDArray[Any]  # uint8 or uint16

RUNS, RUN_LENGTH = 6, 4  # of a video, and frames of a run; fewer where a video has fewer
# Red's and blue's part of luma by the number of the colour space (ITU-T H.273, table 4); others as BT.601.
_LUMA_PARTS = {1: (0.2126, 0.0722), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
_BT601 = (0.299, 0.114)


@dataclass(frozen=True)
class Sample:
    """The runs of a video, in order, and what its packets tell."""

    runs: tuple[Run, ...]
    stream: Stream


def run_places(num_frames: int) -> list[IntArray]:
    """Places in the presentation order of each run: spread from a video's first frame to its last, never overlapping.

    Of a video with too few frames there are fewer runs; a run is shorter only where it is the whole video.
    """
    length = min(RUN_LENGTH, num_frames)
    starts = uniform_places(num_frames - length + 1, max(1, min(RUNS, num_frames // RUN_LENGTH)))
    return [start + np.arange(length) for start in starts]


def sample_video(path: AnyPath) -> Sample:
    """Decode the runs of a video.

    Raises:
        VideoError: the file is unreadable, has no video, is truncated, corrupt or refused.
    """
    with open_video(path) as opened:
        table = read_frame_table(opened)
        stream = stream_of(opened, table)
        done = decode(opened, table, lambda opened, count, _: _TileSink(opened, run_places(count), stream))
    return done.sink.sample(done.seconds)


@dataclass(frozen=True)
class _Seen:
    """What is kept of a frame of height and width ``shape``: tiles, the whole made small, and perhaps colours."""

    shape: tuple[int, int]
    luma: Float32
    small: Float32
    rgb: Pixels | None


class _TileSink:
    """Keeps the tiles of wanted frames; the frames themselves are not kept."""

    def __init__(self, opened: VideoSource, runs: Sequence[IntArray], stream: Stream) -> None:
        export(opened)
        self.wanted = set(np.concatenate(runs).tolist())
        self._runs, self._stream, self._notes = runs, stream, FrameNotes()
        self._coloured = {int(places[0]) for places in runs}
        self._seen: dict[int, _Seen] = {}
        self._reformatter = VideoReformatter()

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Cut the tiles of a wanted frame."""
        if place is not None and place in self.wanted:
            self._seen[place] = _cut(frame, self._reformatter, place in self._coloured)
            self._notes.observe(frame)
            self.wanted.discard(place)

    def sample(self, seconds: Seconds) -> Sample:
        """The sample, with the times (n,) of all of the video's frames. A run ends where the size of frames changes."""
        made = []
        for places in self._runs:
            seen = [self._seen[place] for place in places.tolist()]
            first = seen[0]
            of = list(takewhile(lambda each, shape=first.shape: each.shape == shape, seen))  # type: ignore[misc]
            assert first.rgb is not None  # of the first frame of every run
            luma, small = np.stack([each.luma for each in of]), np.stack([each.small for each in of])
            made.append(Run(luma, first.rgb, seconds[places[: len(of)]].astype(np.float64), small))
        return Sample(tuple(made), self._notes.added_to(self._stream))


def _cut(frame: VideoFrame, reformatter: VideoReformatter, coloured: bool) -> _Seen:
    shape = frame.height, frame.width
    corners = tile_corners(*shape)
    kind, parts = frame.format, frame.format.components
    bits = parts[0].bits
    direct = kind.name.startswith(("yuv", "gray")) and kind.is_planar | (len(parts) == 1) and 8 <= bits <= 16
    direct = direct and not kind.is_big_endian and min(plane.line_size for plane in frame.planes) > 0
    if not direct or kind.name.startswith(("grayf", "yuvy", "yuvg")):
        planar = reformatter.reformat(frame, format="gbrp", interpolation=int(SCALER), threads=1)
        green, blue, red = (_plane(planar, number, 8) for number in range(3))
        rgb = np.stack([cut_tiles(each, corners) for each in (red, green, blue)], axis=-1)
        luma_of = np.array([_BT601[0], 1 - sum(_BT601), _BT601[1]], np.float32)
        whole = np.stack([_small(each) for each in (red, green, blue)], axis=-1)
        return _Seen(shape, rgb @ luma_of, whole @ luma_of, rgb)
    plane = _plane(frame, 0, bits)
    luma, small = cut_tiles(plane, corners, np.float32), _small(plane)
    if bits > 8:
        luma *= np.float32(2.0 ** (8 - bits))
        small *= np.float32(2.0 ** (8 - bits))
    if not coloured:
        return _Seen(shape, luma, small, None)
    if len(parts) < 3:  # grey, with or without transparency
        return _Seen(shape, luma, small, np.repeat(luma.astype(np.uint8)[..., None], 3, axis=-1))
    return _Seen(shape, luma, small, _colours(frame, luma, corners, bits))


def _plane(frame: VideoFrame, number: int, bits: int) -> Plane:
    """(H, W), uint8 or uint16, a view of the decoder's memory."""
    plane = frame.planes[number]
    pixels = np.frombuffer(memoryview(plane), np.uint8 if bits == 8 else np.dtype("<u2"))
    line = plane.line_size // pixels.itemsize
    return pixels[: len(pixels) // line * line].reshape(-1, line)[: plane.height, : plane.width]


def _colours(frame: VideoFrame, luma: Float32, corners: IntArray, bits: int) -> Pixels:
    """uint8 (N, 64, 64, 3), RGB of tiles; each chroma sample stands for the pixels it was coded for."""
    full = frame.color_range == ColorRange.JPEG or frame.format.name.startswith("yuvj")
    red, blue = _LUMA_PARTS.get(int(frame.colorspace), _BT601)
    chroma = []
    for number in (1, 2):
        plane = _plane(frame, number, bits)
        down, across = -(-frame.height // plane.shape[0]), -(-frame.width // plane.shape[1])  # pixels of a sample
        tiles = np.empty((len(corners), TILE // down, TILE // across), np.float32)
        for tile, (top, left) in zip(tiles, (corners // [down, across]).tolist(), strict=True):
            tile[...] = plane[top : top + TILE // down, left : left + TILE // across]
        tiles *= np.float32(2.0 ** (8 - bits))
        tiles -= 128
        chroma.append(tiles if full else tiles * np.float32(255 / 224))
    u, v = chroma
    green = 1 - red - blue
    added = (
        2 * (1 - red) * v,
        -(2 * blue * (1 - blue) / green) * u - (2 * red * (1 - red) / green) * v,
        2 * (1 - blue) * u,
    )
    light = luma if full else (luma - 16) * np.float32(255 / 219)
    light = light + np.float32(0.5)  # so that cutting off rounds
    rgb = np.empty((*luma.shape, 3), np.uint8)
    blocks = light.reshape(len(light), u.shape[1], down, u.shape[2], across)
    for channel, each in enumerate(added):
        sums = blocks + each.astype(np.float32)[:, :, None, :, None]
        np.clip(sums, 0, 255, out=sums)
        rgb[..., channel] = sums.reshape(luma.shape)
    return rgb


def _small(plane: Plane) -> Float32:
    """Float32 (h, w): means over areas of as many pixels each way as bring the longer side to at most 160."""
    height, width = plane.shape
    factor = -(-max(height, width) // SMALL_SIDE)
    down, across = min(factor, height), min(factor, width)
    h, w = height // down, width // across
    # Whole rows and columns are added up, which takes a fifth of the time of numpy's sum over short axes.
    rows = np.zeros((h, w * across), np.uint16 if plane.dtype == np.uint8 and down <= 256 else np.uint32)
    for row in range(down):
        np.add(rows, plane[row : h * down : down, : w * across], out=rows)
    sums = np.zeros((h, w), np.uint32)
    for column in range(across):
        sums += rows[:, column::across]
    means: Float32 = sums.astype(np.float32) / np.float32(down * across)
    return means
