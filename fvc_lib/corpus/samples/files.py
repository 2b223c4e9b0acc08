"""Encode clips of the sample corpora to a chosen file size, with the same bytes every time, and write the corpora.

Manipulated footage compresses better or worse than camera footage. At a fixed quality, the bit rate would therefore
reveal the label. So every clip is encoded repeatedly, until its file has the size that its ``Encoding`` states.
"""

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import av
import numpy as np

from fvc_lib.corpus.samples.scenes import Planes, resize_plane
from fvc_lib.services.atomic_files import write_bytes, write_text
from fvc_lib.services.errors import StoppedError

SIZE_TOLERANCE = 0.03
MAX_ENCODINGS = 6

# One thread, fixed speed and no version strings where the format can do without: the bytes depend on nothing else.
_CODEC_OPTIONS = {
    "libx264": {"preset": "superfast", "threads": "1", "flags": "+bitexact", "g": "30"},
    # A small tolerance: else the first frames of a short clip take more than their share, however low the rate.
    "mpeg4": {"threads": "1", "flags": "+bitexact", "g": "15", "qmin": "1", "lmin": "1", "bt": "20000"},
    "libvpx-vp9": {
        "deadline": "realtime", "cpu-used": "8", "threads": "1", "row-mt": "0", "lag-in-frames": "0",
        "flags": "+bitexact", "g": "60",
    },
}  # fmt: skip
_SUFFIX_FORMATS = {"mp4": "mp4", "mkv": "matroska", "webm": "webm", "avi": "avi", "mov": "mov"}


@dataclass(frozen=True)
class Encoding:
    """Encoding of one file."""

    codec: str  # encoder name
    suffix: str  # extension of the file name; decides the container
    frames_per_second: int
    bits_per_pixel: float  # file size in bits, divided by the pixels of all frames

    def target_bytes(self, frames: Planes) -> int:
        """Return the wanted file size of ``frames`` (T, 3*H/2, W), in bytes."""
        pixels = frames.shape[0] * frames.shape[1] * 2 // 3 * frames.shape[2]
        return int(pixels * self.bits_per_pixel / 8)


def encode_to_size(frames: Planes, encoding: Encoding) -> bytes:
    """Encode frames (T, 3*H/2, W) to a file of the wanted size, and return its bytes.

    The bit rate is adjusted until the size is within 3% of ``encoding.target_bytes``, six times at most. The next rate
    follows from the line through the last two tries, in logarithms of rate and size (secant method). The file nearest
    to the wanted size is returned.
    """
    target = encoding.target_bytes(frames)
    log_rate, slope = math.log(target * 8 * encoding.frames_per_second / len(frames)), 1.0
    last_rate = last_miss = 0.0
    best, best_miss = b"", math.inf
    for attempt in range(MAX_ENCODINGS):
        content = encode_frames(frames, encoding, round(math.exp(log_rate)))
        miss = math.log(len(content) / target)
        if abs(miss) < abs(best_miss):
            best, best_miss = content, miss
        if abs(miss) <= SIZE_TOLERANCE:
            break
        if attempt and log_rate != last_rate:
            slope = min(max((miss - last_miss) / (log_rate - last_rate), 0.4), 1.5)
        last_rate, last_miss = log_rate, miss
        log_rate -= min(max(miss / slope, -1.0), 1.0)
    return best


def encode_frames(frames: Planes, encoding: Encoding, bits_per_second: int) -> bytes:
    """Encode uint8 (T, 3*H/2, W) planar yuv420p once, at about ``bits_per_second``."""
    buffer = io.BytesIO()
    container = _SUFFIX_FORMATS[encoding.suffix]
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as output:
        stream = cast(av.VideoStream, output.add_stream(encoding.codec, rate=encoding.frames_per_second))
        stream.width, stream.height = frames.shape[2], frames.shape[1] * 2 // 3
        stream.pix_fmt, stream.bit_rate = "yuv420p", bits_per_second
        stream.codec_context.thread_count = 1
        stream.options = dict(_CODEC_OPTIONS[encoding.codec])
        for planes in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def decode_frames(content: bytes) -> Planes:
    """Decode all frames of a file as uint8 (T, 3*H/2, W) planar yuv420p."""
    with av.open(io.BytesIO(content), "r") as source:
        source.streams.video[0].codec_context.thread_count = 1
        return np.stack([frame.to_ndarray() for frame in source.decode(video=0)]).astype(np.uint8, copy=False)


def rescale_frames(frames: Planes, height: int, width: int) -> Planes:
    """Resize (T, 3*H/2, W) bilinearly to the given luma size (multiples of 4)."""
    scaled = np.empty((frames.shape[0], height * 3 // 2, width), np.uint8)
    for source, target in zip(frames, scaled, strict=True):
        for from_plane, to_plane in zip(split_planes(source), split_planes(target), strict=True):
            to_plane[:] = np.rint(resize_plane(from_plane, *to_plane.shape)).astype(np.uint8)
    return scaled


def crop_frames(frames: Planes, top: int, left: int, height: int, width: int) -> Planes:
    """Crop (T, 3*H/2, W) at even ``top`` and ``left`` to the given luma size (multiples of 4)."""
    cropped = np.empty((frames.shape[0], height * 3 // 2, width), np.uint8)
    for source, target in zip(frames, cropped, strict=True):
        for from_plane, to_plane, scale in zip(split_planes(source), split_planes(target), (1, 2, 2), strict=True):
            h, w = to_plane.shape
            to_plane[:] = from_plane[top // scale : top // scale + h, left // scale : left // scale + w]
    return cropped


def split_planes(planes: Planes) -> tuple[Planes, Planes, Planes]:
    """Return views of luma (H, W) and both chroma planes (H/2, W/2) of a packed frame (3*H/2, W)."""
    height, width = planes.shape[0] * 2 // 3, planes.shape[1]
    chroma = planes[height:].reshape(2, height // 2, width // 2)
    return planes[:height], chroma[0], chroma[1]


_MAX_THREADS = 4  # each holds the frames of up to two clips, about 20 MB


def generate(
    folder: Path,
    notice: str,
    plan: Mapping[Any, Callable[[], Sequence[bytes]]],
    manifest: str,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Path:
    """Write the missing files of a generated corpus to ``folder``, on a few threads.

    If ``NOTICE.txt`` in the folder names another version of the corpus, all its files are made again. Files that do not
    belong to the corpus are left alone.

    Args:
        folder: created when missing.
        notice: text of ``NOTICE.txt``, with the version of the generator.
        plan: maps a tuple of paths (relative to the folder, with '/') to a function that returns the contents of these
            files, in the same order.
        manifest: text of ``manifest.csv``.
        progress: called with (files done, files in all) after each item of ``plan``.
        stop: called after each item of ``plan``; true stops.

    Returns:
        The path of ``manifest.csv``.

    Raises:
        StoppedError: ``stop`` returned true; a later call continues.
        OSError: from the file system; a later call continues.
    """
    total, done = sum(map(len, plan)), 0
    version = folder / "NOTICE.txt"
    if not version.is_file() or version.read_bytes() != notice.encode():
        for path in (path for paths in plan for path in paths):
            (folder / path).unlink(missing_ok=True)
        write_text(version, notice)

    def make(paths: tuple[str, ...]) -> int:
        if not all((folder / path).is_file() for path in paths):
            for path, content in zip(paths, plan[paths](), strict=True):
                write_bytes(folder / path, content)
        return len(paths)

    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, _MAX_THREADS)) as makers:
        try:
            for num_made in makers.map(make, plan):
                done += num_made
                if progress is not None:
                    progress(done, total)
                if stop is not None and stop():
                    raise StoppedError(f"stopped after {done} of {total} files of the sample corpus; run it again")
        except BaseException:
            makers.shutdown(cancel_futures=True)
            raise
    write_if_other(folder / "manifest.csv", manifest)
    return folder / "manifest.csv"


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return ``rows``, of which the first is the header, as CSV text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_if_other(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, unless the file has this content already.

    So an unchanged file keeps its modification time.
    """
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)
