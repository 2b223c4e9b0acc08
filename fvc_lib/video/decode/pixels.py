"""From a decoded frame to upright planar RGB of a given size, without distortion; and what collects frames.

swscale's packed ``rgb24`` output is 1.5 grey levels too dark; planar ``gbrp`` is not, so frames go through the latter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import SideData, SideDataContainer, Type
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from fvc_lib.video.decode.frame_table import IntArray
from fvc_lib.video.decode.source import VideoSource

Pixels = npt.NDArray[np.uint8]

# Bilinear widens its support when it scales down, so it does not alias; accurate rounding keeps it free of bias.
SCALER = (
    Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
)
_GBRP_TO_RGB = (2, 0, 1)


def _unnamed_kind(cls: Any, value: object) -> Any:
    """Make a member for a kind of side data that PyAV does not name, such as EXIF in PyAV 18."""
    member = object.__new__(cls)
    member._name_, member._value_ = f"KIND_{value}", value
    return member


# Without this, one unnamed kind would end decoding with a ValueError, also where another kind is asked for.
Type._missing_ = classmethod(_unnamed_kind)  # type: ignore[method-assign, assignment]


def side_data_of(frame: VideoFrame) -> SideDataContainer:
    """What the decoder tells with ``frame``, by the kind's name."""
    # frame.side_data would keep the container in the frame and so both, with a decoder's buffer, until the garbage
    # collector comes by.
    return SideDataContainer(frame)  # type: ignore[call-arg]  # the stub lacks it


@dataclass(frozen=True)
class Orientation:
    """How stored pixels are turned for display: transposed first, then mirrored along either axis."""

    transposed: bool = False
    mirrored_x: bool = False
    mirrored_y: bool = False

    @classmethod
    def from_display_matrix(cls, matrix: bytes) -> "Orientation":
        """From ffmpeg's 3 x 3 fixed-point matrix; any angle is rounded to a quarter turn, nonsense to none."""
        a, b, _, c, d = np.frombuffer(matrix, np.int32, count=5).astype(np.int64)
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, bool(a < 0), bool(d < 0))
        return cls(True, bool(c < 0), bool(b < 0))

    @classmethod
    def tagged_on(cls, frame: VideoFrame) -> "Orientation | None":
        """As the container or the bitstream tells with ``frame``, or none where it tells nothing."""
        data = side_data_of(frame).get("DISPLAYMATRIX")
        return cls.from_display_matrix(bytes(data)) if isinstance(data, SideData) else None

    @property
    def rotation_degrees(self) -> int:
        """Clockwise turn in {0, 90, 180, 270} that display applies, after mirroring left to right where it mirrors."""
        if self.transposed:
            return 90 if self.mirrored_x else 270
        return 180 if self.mirrored_y else 0

    def apply(self, pixels: Pixels) -> Pixels:
        """A view of ``pixels`` (..., H, W) as displayed."""
        if self.transposed:
            pixels = pixels.swapaxes(-1, -2)
        if self.mirrored_x:
            pixels = pixels[..., ::-1]
        return pixels[..., ::-1, :] if self.mirrored_y else pixels


@dataclass(frozen=True)
class Box:
    """A half-open rectangle in pixels: columns ``left`` to ``left + width``, rows ``top`` to ``top + height``."""

    left: int
    top: int
    width: int
    height: int


def fit(display_width: Fraction, display_height: Fraction, width: int, height: int) -> Box:
    """The largest centred box of that aspect ratio in ``width`` x ``height`` pixels, at least one pixel each way."""
    scale = min(width / display_width, height / display_height)
    content_width = min(width, max(1, round(display_width * scale)))
    content_height = min(height, max(1, round(display_height * scale)))
    return Box((width - content_width) // 2, (height - content_height) // 2, content_width, content_height)


class FrameConverter:
    """Writes frames of one video into a uint8 array (3, H, W), upright; one scaler is reused for all of them.

    A bitstream may tell the orientation with its keyframes only (ITU-T H.264, D.2.27): it holds until the next. So the
    frames between must be shown too, with ``observe``.

    Args:
        size: side of the square each frame is letterboxed to with black bars; none keeps the pixels of the first
            frame as stored (turned upright, not stretched where pixels are not square), and fits later frames of
            another size into that.
        sample_aspect_ratio: width of a pixel over its height as the container states it, or none.
    """

    def __init__(self, size: int | None, sample_aspect_ratio: Fraction | None) -> None:
        self.sample_aspect_ratio = sample_aspect_ratio
        self.orientation = Orientation()
        self._size = size
        self._reformatter = VideoReformatter()
        self._shape: tuple[int, int] | None = None if size is None else (size, size)
        self._boxes: dict[tuple[object, ...], Box] = {}

    def observe(self, frame: VideoFrame) -> None:
        """Take note of what a frame tells about the orientation; every decoded frame, in presentation order."""
        tagged = Orientation.tagged_on(frame)
        if tagged is not None:
            self.orientation = tagged
        elif frame.key_frame:
            self.orientation = Orientation()

    def output_shape(self, frame: VideoFrame) -> tuple[int, int]:
        """(H, W) of every output; without a given size the first frame that is asked about decides it."""
        if self._shape is None:
            self._shape = (frame.width, frame.height) if self.orientation.transposed else (frame.height, frame.width)
        return self._shape

    def content_box(self, frame: VideoFrame) -> Box:
        """Where the picture lies in the output; the rest is black."""
        key = (frame.width, frame.height, self.orientation, self.sample_aspect_ratio)
        if key not in self._boxes:  # of small frames reckoning takes as long as decoding
            self._boxes[key] = self._content_box(frame)
        return self._boxes[key]

    def _content_box(self, frame: VideoFrame) -> Box:
        height, width = self.output_shape(frame)
        aspect = (self.sample_aspect_ratio if self._size is not None else None) or Fraction(1)
        sides = (frame.width * aspect, Fraction(frame.height))
        display_width, display_height = sides[::-1] if self.orientation.transposed else sides
        return fit(display_width, display_height, width, height)

    def convert(self, frame: VideoFrame, out: Pixels) -> None:
        """Fill ``out`` (3, H, W) uint8 with the frame, which was observed last, as RGB."""
        orientation, box = self.orientation, self.content_box(frame)
        stored = (box.height, box.width) if orientation.transposed else (box.width, box.height)
        planar = self._reformatter.reformat(frame, stored[0], stored[1], "gbrp", interpolation=int(SCALER), threads=1)
        out[...] = 0
        content = out[:, box.top : box.top + box.height, box.left : box.left + box.width]
        for channel, plane_index in enumerate(_GBRP_TO_RGB):
            plane = planar.planes[plane_index]
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            content[channel] = orientation.apply(rows[: planar.height, : planar.width])


# Where wanted frames go: one array of pixels, and what the first of them tells about the video.


class FrameSink:
    """Collects the wanted frames of one video as pixels, in any order of arrival.

    Args:
        source: the open video the frames come from.
        size: see ``FrameConverter``.
        places: int64 (T,), ascending places in the presentation order; a place may stand more than once.
    """

    def __init__(self, source: VideoSource, size: int | None, places: IntArray) -> None:
        self.places = places
        self.wanted = set(places.tolist())
        self.frames: Pixels = np.empty((0, 3, 0, 0), np.uint8)
        self.content = Box(0, 0, 0, 0)
        self._source = source
        self._converter = FrameConverter(size, None)

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Convert a decoded frame into every slot that wants ``place``; the frame itself is not kept.

        Args:
            place: of the frame, or none where it is known not to be wanted.
            frame: every frame the decoder puts out, in presentation order.
        """
        converter = self._converter
        converter.observe(frame)
        if place is None or place not in self.wanted:
            return
        if not self.frames.size:  # only a decoded frame tells the aspect ratio where the container does not
            converter.sample_aspect_ratio = self._source.sample_aspect_ratio
            self.frames = np.empty((len(self.places), 3, *converter.output_shape(frame)), np.uint8)
        if place == self.places[0]:
            self.content = converter.content_box(frame)
        slots = np.flatnonzero(self.places == place)
        converter.convert(frame, self.frames[slots[0]])
        self.frames[slots[1:]] = self.frames[slots[0]]
        self.wanted.discard(place)


@dataclass(frozen=True)
class FirstFrame:
    """What the first frame of a video tells about it."""

    pixel_format: str
    width: int
    height: int
    orientation: Orientation

    @classmethod
    def of(cls, frame: VideoFrame) -> "FirstFrame":
        """What ``frame`` tells."""
        return cls(frame.format.name, frame.width, frame.height, Orientation.tagged_on(frame) or Orientation())


class Sinks:
    """Several clips of one video, and its first frame, from one decoding.

    Attributes:
        wanted: places in the presentation order that some clip, or ``first``, still wants.
        first: none as long as the frame was not offered.
    """

    def __init__(self, clips: Sequence[FrameSink]) -> None:
        self.clips = clips
        self.wanted = {0}.union(*(clip.wanted for clip in clips))
        self.first: FirstFrame | None = None

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """As ``FrameSink.offer``."""
        for clip in self.clips:
            clip.offer(place, frame)
        if place == 0:
            self.first = FirstFrame.of(frame)
        if place is not None:
            self.wanted.discard(place)
