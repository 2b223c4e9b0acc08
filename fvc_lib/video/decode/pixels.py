"""Convert decoded frames to upright planar RGB of a given size, without distortion, and collect them.

Frames are converted to planar ``gbrp``, because the packed ``rgb24`` output of swscale is 1.5 grey levels too dark.
"""

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

# swscale's bilinear filter is antialiased when it scales down. Accurate rounding avoids a bias.
SCALER = (
    Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
)
_GBRP_TO_RGB = (2, 0, 1)


def _unnamed_kind(cls: Any, value: object) -> Any:
    """Return a new enum member for a kind of side data that PyAV does not name, such as EXIF in PyAV 18.

    The enum of kinds (``Type``) calls this for a value without a member, where it would raise ValueError.
    """
    member = object.__new__(cls)
    member._name_, member._value_ = f"KIND_{value}", value
    return member


# Without this, a frame with an unnamed kind of side data raises ValueError whenever side data are read.
Type._missing_ = classmethod(_unnamed_kind)  # type: ignore[method-assign, assignment]


def side_data_of(frame: VideoFrame) -> SideDataContainer:
    """Return the side data that the decoder attached to ``frame``, such as motion vectors.

    The result is a mapping from the name of the kind, such as ``MOTION_VECTORS``, to the data.
    """
    # frame.side_data creates a reference cycle, which holds the decoder's buffer until garbage collection.
    return SideDataContainer(frame)  # type: ignore[call-arg]  # the stub lacks it


@dataclass(frozen=True)
class Orientation:
    """The change that turns stored pixels upright for display.

    If the attributes say so, pixels are first transposed, then mirrored in x (left to right) and in y (top to bottom).
    """

    transposed: bool = False
    mirrored_x: bool = False
    mirrored_y: bool = False

    @classmethod
    def from_display_matrix(cls, matrix: bytes) -> "Orientation":
        """Return the orientation that ffmpeg's display matrix (3 x 3, fixed point) states, rounded to quarter turns."""
        a, b, _, c, d = np.frombuffer(matrix, np.int32, count=5).astype(np.int64)
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, bool(a < 0), bool(d < 0))
        return cls(True, bool(c < 0), bool(b < 0))

    @classmethod
    def tagged_on(cls, frame: VideoFrame) -> "Orientation | None":
        """Return the orientation that the container or the bitstream states for ``frame``; None if neither does."""
        data = side_data_of(frame).get("DISPLAYMATRIX")
        return cls.from_display_matrix(bytes(data)) if isinstance(data, SideData) else None

    @property
    def rotation_degrees(self) -> int:
        """Return the clockwise turn for display in degrees: 0, 90, 180 or 270.

        A mirrored orientation is a mirroring left to right followed by this turn.
        """
        if self.transposed:
            return 90 if self.mirrored_x else 270
        return 180 if self.mirrored_y else 0

    def apply(self, pixels: Pixels) -> Pixels:
        """Return a view of ``pixels`` (..., H, W), turned for display: (..., H, W), or (..., W, H) if transposed."""
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

    def cut(self, pixels: Pixels) -> Pixels:
        """Return a view of the part of ``pixels`` (..., H, W) inside the box, (..., height, width)."""
        rows = slice(self.top, self.top + self.height)
        columns = slice(self.left, self.left + self.width)
        return pixels[..., rows, columns]


def fit(display_width: Fraction, display_height: Fraction, width: int, height: int) -> Box:
    """Return where a picture goes when it is letterboxed: the largest centred box with the picture's aspect ratio.

    The output has ``width`` x ``height`` pixels, and the box lies inside it. The aspect ratio of the picture is
    ``display_width`` to ``display_height``. The box has at least 1 x 1 pixels.
    """
    scale = min(width / display_width, height / display_height)
    content_width = min(width, max(1, round(display_width * scale)))
    content_height = min(height, max(1, round(display_height * scale)))
    return Box((width - content_width) // 2, (height - content_height) // 2, content_width, content_height)


class FrameConverter:
    """A converter of the frames of one video to upright RGB, uint8 (3, H, W), with the same scaler for all frames.

    Pass every decoded frame to ``observe``, also unwanted frames. The reason: a video may state its orientation only
    with keyframes, and it is then valid until the next keyframe (ITU-T H.264, D.2.27).

    Args:
        size: side of the square that every frame is letterboxed to, with black bars. None: the output has the size of
            the first frame, turned upright but not stretched where pixels are not square. Later frames of another size
            are fitted into that size.
        sample_aspect_ratio: width of a pixel divided by its height, as the container states it; None if unknown.
    """

    def __init__(self, size: int | None, sample_aspect_ratio: Fraction | None) -> None:
        self.sample_aspect_ratio = sample_aspect_ratio
        self.orientation = Orientation()
        self._size = size
        self._reformatter = VideoReformatter()
        self._shape: tuple[int, int] | None = None if size is None else (size, size)
        self._boxes: dict[tuple[object, ...], Box] = {}

    def observe(self, frame: VideoFrame) -> None:
        """Record the orientation that a frame states; call it for every decoded frame, in presentation order."""
        tagged = Orientation.tagged_on(frame)
        if tagged is not None:
            self.orientation = tagged
        elif frame.key_frame:
            self.orientation = Orientation()

    def output_shape(self, frame: VideoFrame) -> tuple[int, int]:
        """Return (H, W) of the output, which is the same for all frames.

        If the converter has a ``size``, the output is (``size``, ``size``). Otherwise it is the upright size of the
        ``frame`` in the first call.
        """
        if self._shape is None:
            self._shape = (frame.width, frame.height) if self.orientation.transposed else (frame.height, frame.width)
        return self._shape

    def content_box(self, frame: VideoFrame) -> Box:
        """Return the rectangle of the output that holds the picture of ``frame``; the rest is black."""
        key = (frame.width, frame.height, self.orientation, self.sample_aspect_ratio)
        if key not in self._boxes:  # cached, because computing with fractions takes as long as decoding a small frame
            height, width = self.output_shape(frame)
            aspect = (self.sample_aspect_ratio if self._size is not None else None) or Fraction(1)
            sides = (frame.width * aspect, Fraction(frame.height))
            self._boxes[key] = fit(*(sides[::-1] if self.orientation.transposed else sides), width, height)
        return self._boxes[key]

    def convert(self, frame: VideoFrame, out: Pixels) -> None:
        """Convert ``frame`` to upright RGB, scaled to fit, and write it into ``out``, uint8 (3, H, W).

        The rest of ``out`` becomes black. Pass the frame to ``observe`` before.
        """
        orientation, box = self.orientation, self.content_box(frame)
        stored = (box.height, box.width) if orientation.transposed else (box.width, box.height)
        planar = self._reformatter.reformat(frame, stored[0], stored[1], "gbrp", interpolation=int(SCALER), threads=1)
        out[...] = 0
        content = box.cut(out)
        for channel, plane_index in enumerate(_GBRP_TO_RGB):
            plane = planar.planes[plane_index]
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            content[channel] = orientation.apply(rows[: planar.height, : planar.width])


class FrameSink:
    """A sink (receiver of decoded frames) that collects the pixels of wanted frames, which may arrive in any order.

    Args:
        source: the open video that is decoded.
        size: side in pixels of the square that frames are letterboxed to; None: all frames get the upright
            size of the first frame (``FrameConverter``).
        places: int64 (T,), ascending indices of the wanted frames in presentation order; may repeat.

    Attributes:
        frames: uint8 (T, 3, H, W).
        content: the rectangle of ``frames[0]`` that holds the picture; the rest is black.
    """

    def __init__(self, source: VideoSource, size: int | None, places: IntArray) -> None:
        self.places = places
        self.wanted = set(places.tolist())
        self.frames: Pixels = np.empty((0, 3, 0, 0), np.uint8)
        self.content = Box(0, 0, 0, 0)
        self._source = source
        self._converter = FrameConverter(size, None)

    def offer(self, place: int | None, frame: VideoFrame) -> None:
        """Convert a decoded frame, and store its pixels at all positions where ``places`` equals ``place``.

        Unwanted frames only update the orientation.
        """
        converter = self._converter
        converter.observe(frame)
        if place is None or place not in self.wanted:
            return
        if not self.frames.size:  # the aspect ratio may be unknown before the first frame
            converter.sample_aspect_ratio = self._source.sample_aspect_ratio
            self.frames = np.empty((len(self.places), 3, *converter.output_shape(frame)), np.uint8)
        if place == self.places[0]:
            self.content = converter.content_box(frame)
        slots = np.flatnonzero(self.places == place)
        converter.convert(frame, self.frames[slots[0]])
        self.frames[slots[1:]] = self.frames[slots[0]]
        self.wanted.discard(place)
