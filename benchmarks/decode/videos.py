"""The generated videos of the benchmark: a camera panning over a noisy scene, encoded once and kept in a folder.

Each frame carries its number as a strip of black and white blocks along its upper edge, so that it can be told from a
decoded and scaled picture which frame it is. Long videos repeat the packets of a short one with shifted time stamps.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

from fvc_lib.services.atomic_files import atomic_output, sha256_of_json

Pixels = npt.NDArray[np.uint8]

FRAMES_PER_SECOND = 25
# Counted up when the same parameters give other pictures: kept files are then made anew.
_GENERATOR_VERSION = 1
_NUMBER_BITS = 16
_CONTAINER_OF = {".mp4": "mp4", ".mkv": "matroska", ".webm": "webm"}


@dataclass(frozen=True)
class Encoding:
    """One stretch of video as it is encoded; the first frame is a keyframe, and no picture refers beyond the last."""

    codec: str
    width: int
    height: int
    num_frames: int
    keyframe_interval: int
    kilobits_per_second: int
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Video:
    """One file: an encoding, repeated ``repeats`` times in a container that is known by its ``suffix``."""

    name: str
    encoding: Encoding
    suffix: str = ".mp4"
    repeats: int = 1

    @property
    def num_frames(self) -> int:
        """Frames in the file."""
        return self.encoding.num_frames * self.repeats

    @property
    def file_name(self) -> str:
        """Readable, and different for all that makes a difference to the content."""
        encoding = self.encoding
        facts = [_GENERATOR_VERSION, FRAMES_PER_SECOND, dataclasses.asdict(encoding), self.suffix, self.repeats]
        readable = f"{encoding.codec}-{encoding.width}x{encoding.height}-{self.num_frames}"
        return f"{readable}-{sha256_of_json(facts)[:10]}{self.suffix}"


def make_video(video: Video, folder: Path) -> Path:
    """The file of ``video`` in ``folder``, made if it is not there yet."""
    path = folder / video.file_name
    if path.exists():
        return path
    if video.repeats > 1:
        # Matroska keeps no decoding times, so its packets could not be shifted.
        kept_in = video.suffix if video.suffix == ".webm" else ".mp4"
        once = make_video(dataclasses.replace(video, repeats=1, suffix=kept_in), folder)
        with atomic_output(path) as temporary:
            _repeat_packets(once, temporary, video)
        return path
    print(f"encoding {video.name}", file=sys.stderr, flush=True)
    with atomic_output(path) as temporary:
        _encode(video, temporary)
    return path


def _encode(video: Video, path: Path) -> None:
    encoding = video.encoding
    with av.open(str(path), "w", format=_CONTAINER_OF[video.suffix]) as container:
        added = container.add_stream(encoding.codec, rate=Fraction(FRAMES_PER_SECOND), options=dict(encoding.options))
        stream = cast(VideoStream, added)
        stream.width, stream.height, stream.pix_fmt = encoding.width, encoding.height, "yuv420p"
        stream.bit_rate = encoding.kilobits_per_second * 1000
        stream.codec_context.gop_size = encoding.keyframe_interval
        scene = Scene(encoding.width, encoding.height)
        for number in range(encoding.num_frames):
            frame = av.VideoFrame.from_ndarray(scene.picture(number), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _repeat_packets(once: Path, path: Path, video: Video) -> None:
    with av.open(str(path), "w", format=_CONTAINER_OF[video.suffix]) as output, av.open(str(once)) as first:
        added = output.add_stream_from_template(first.streams.video[0], opaque=True)
        step_seconds = Fraction(video.encoding.num_frames, FRAMES_PER_SECOND)
        for repeat in range(video.repeats):
            with av.open(str(once)) as source:
                stream = source.streams.video[0]
                shift = int(repeat * step_seconds / cast(Fraction, stream.time_base))
                for packet in source.demux(stream):
                    if packet.size:
                        packet.pts, packet.dts = cast(int, packet.pts) + shift, cast(int, packet.dts) + shift
                        packet.stream = added
                        output.mux(packet)


class Scene:
    """What the camera sees; equal arguments give equal pictures."""

    def __init__(self, width: int, height: int) -> None:
        generator = np.random.default_rng(0)
        # Pale colours: the peers assume different colour matrices where a file names none, and that is not the subject.
        coarse = generator.integers(40, 200, (height // 8, width // 8, 1)) + generator.integers(0, 12, 3)
        self._scene = np.kron(coarse, np.ones((16, 16, 1))).astype(np.uint8)
        self._noise = generator.integers(0, 12, (2 * height, 2 * width, 1)).astype(np.uint8)
        self._width, self._height = width, height

    def picture(self, number: int) -> Pixels:
        """uint8 (height, width, 3): a swaying view, a box that crosses it, sensor noise and the number on top."""
        width, height = self._width, self._height
        left = round((1 + np.sin(number / 90)) / 2 * (self._scene.shape[1] - width))
        top = round((1 + np.cos(number / 130)) / 2 * (self._scene.shape[0] - height))
        picture = self._scene[top : top + height, left : left + width].copy()
        box_left = number * 11 % (width - width // 5)
        picture[height // 3 : height // 2, box_left : box_left + width // 5] = number * 37 % 200
        dy, dx = np.random.default_rng(number).integers(0, (height, width))
        picture += self._noise[dy : dy + height, dx : dx + width]
        picture[: height // 8] = number_strip(number, width)[None, :, None]
        return picture


def number_strip(number: int, width: int) -> Pixels:
    """uint8 (width,): the lowest bits of ``number`` as blocks of 30 and 220, the lowest bit at the left."""
    bit_of_column = np.arange(width) * _NUMBER_BITS // width
    return np.where(number >> bit_of_column & 1, 220, 30).astype(np.uint8)


def read_numbers(frames: Pixels) -> list[int]:
    """The numbers on pictures (T, 3, h, w) at least 48 pixels wide and 32 high, whatever they were scaled from."""
    width = frames.shape[3]
    centres = ((np.arange(_NUMBER_BITS) + 0.5) * width / _NUMBER_BITS).astype(int)
    row = max(1, frames.shape[2] // 20)
    bits = frames[:, :, row, :].mean(axis=1)[:, centres] > 125
    return [int(value) for value in bits @ (1 << np.arange(_NUMBER_BITS))]
