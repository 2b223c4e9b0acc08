"""What people do to a video before they put it up again: edits of decoded frames, written by another encoder."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

Frames = npt.NDArray[np.uint8]  # (T, H, W, 3), RGB

LOW_RATE = {
    "libx264": {"preset": "ultrafast", "crf": "38"},
    "mpeg4": {"qmin": "18", "qmax": "18"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "52", "b": "0"},
}


def read_frames(path: Path) -> tuple[Frames, Fraction]:
    """All frames and the frame rate."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate or Fraction(25)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]), rate


def write_frames(
    path: Path, frames: Frames, rate: Fraction, codec: str, options: Mapping[str, str] | None = None
) -> None:
    """A file of even sides; without ``options`` at a low rate."""
    height, width = (side // 2 * 2 for side in frames.shape[1:3])
    with av.open(str(path), "w") as container:
        stream = cast(
            VideoStream,
            container.add_stream(codec, rate=rate, options={**(options or LOW_RATE[codec]), "threads": "1"}),
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in frames:
            picture = np.ascontiguousarray(picture[:height, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def scaled(frames: Frames, factor: float) -> Frames:
    height, width = (round(side * factor / 2) * 2 for side in frames.shape[1:3])
    pictures = (av.VideoFrame.from_ndarray(picture, format="rgb24") for picture in frames)
    return np.stack([picture.reformat(width=width, height=height).to_ndarray() for picture in pictures])


def cropped(frames: Frames, kept: float, down: float, right: float) -> Frames:
    height, width = (round(side * kept) for side in frames.shape[1:3])
    top, left = round((frames.shape[1] - height) * down), round((frames.shape[2] - width) * right)
    return frames[:, top : top + height, left : left + width]


def captioned(frames: Frames) -> Frames:
    """White letters, or what is as bright and as ragged, on a darkened band."""
    copy = frames.copy()
    height, width = frames.shape[1:3]
    band = np.s_[:, int(height * 0.84) : int(height * 0.94), int(width * 0.12) : int(width * 0.88)]
    copy[band] = copy[band] // 2
    rows, columns = copy[band].shape[1:3]
    letters = np.random.default_rng(0).random((5, 40)) < 0.5
    ink = letters[np.arange(rows) * 5 // rows][:, np.arange(columns) * 40 // columns]
    copy[band][:, ink] = 255
    return copy


def with_logo(frames: Frames) -> Frames:
    copy = frames.copy()
    side = min(frames.shape[1:3]) // 6
    copy[:, 4 : 4 + side, -4 - side : -4] = (200, 30, 30)
    return copy


def framed(frames: Frames, rows: float, columns: float, level: int) -> Frames:
    high, wide = round(frames.shape[1] * rows), round(frames.shape[2] * columns)
    return np.pad(frames, ((0, 0), (high, high), (wide, wide), (0, 0)), constant_values=level)


def contrasted(frames: Frames) -> Frames:
    return np.clip((frames.astype(np.float32) - 128) * 1.4 + 138, 0, 255).astype(np.uint8)


def cut(frames: Frames, start: float, end: float) -> Frames:
    return frames[round(len(frames) * start) : len(frames) - round(len(frames) * end)]


EDITS: dict[str, Callable[[Frames], Frames]] = {
    "encoded again": lambda frames: frames,
    "half the size": lambda frames: scaled(frames, 0.5),
    "one and a half times the size": lambda frames: scaled(frames, 1.5),
    "cropped to the middle": lambda frames: cropped(frames, 0.85, 0.5, 0.5),
    "cropped to a corner": lambda frames: cropped(frames, 0.85, 1, 1),
    "cropped off centre": lambda frames: cropped(frames, 0.88, 0.3, 0.7),
    "mirrored": lambda frames: frames[:, :, ::-1],
    "mirrored and cropped": lambda frames: cropped(frames, 0.9, 0.2, 0.6)[:, :, ::-1],
    "captioned": captioned,
    "with a logo": with_logo,
    "with a white border": lambda frames: framed(frames, 0.05, 0.05, 255),
    "letterboxed": lambda frames: framed(frames, 0.17, 0, 0),
    "darker": lambda frames: (frames * 0.6).astype(np.uint8),
    "of more contrast": contrasted,
    "of half the frame rate": lambda frames: frames[::2],
    "cut at the start": lambda frames: cut(frames, 0.25, 0),
    "cut at the end": lambda frames: cut(frames, 0, 0.25),
    "cut at both ends": lambda frames: cut(frames, 0.1, 0.15),
    "cut, cropped and mirrored": lambda frames: cropped(cut(frames, 0.2, 0), 0.9, 0, 0.5)[:, :, ::-1],
}


def write_edited(original: Path, edit: str, copy: Path, codec: str) -> None:
    """``original`` after one of ``EDITS``; with half its frames it also runs at half its rate."""
    frames, rate = read_frames(original)
    edited = EDITS[edit](frames)
    write_frames(copy, edited, rate / 2 if edit == "of half the frame rate" else rate, codec)
