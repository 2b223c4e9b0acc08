"""Encode clips of the sample corpora to a chosen file size, with the same bytes every time, and write the corpora.

Manipulated footage compresses better or worse than camera footage. At a fixed quality, the bit rate would therefore
reveal the label. So every clip is encoded repeatedly, until its file has the size that its ``Encoding`` demands.

Frames are planar yuv420p, uint8 (T, 3*H/2, W): T frames of height H and width W (see ``scenes``).
"""

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import polars as pl

from fvc_lib.corpus.samples.scenes import Planes
from fvc_lib.services.atomic_files import write_bytes, write_text

SIZE_TOLERANCE = 0.03
MAX_ENCODINGS = 6

# One thread, fixed speed and, where the format allows it, no version strings: so the bytes depend on the frames only.
_CODEC_OPTIONS = {
    "libx264": {"preset": "superfast", "threads": "1", "flags": "+bitexact", "g": "30"},
    # A small tolerance (bt): else the first frames of a short clip take too many bits, however low the rate.
    "mpeg4": {"threads": "1", "flags": "+bitexact", "g": "15", "qmin": "1", "lmin": "1", "bt": "20000"},
    "libvpx-vp9": {
        "deadline": "realtime", "cpu-used": "8", "threads": "1", "row-mt": "0", "lag-in-frames": "0",
        "flags": "+bitexact", "g": "60",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Encoding:
    """Codec, container, frame rate and wanted size of a file."""

    codec: str  # encoder name
    suffix: str  # extension of the file name; decides the container
    frames_per_second: int
    bits_per_pixel: float  # file size in bits, divided by the pixels of all frames

    def target_bytes(self, frames: Planes) -> int:
        """Return the wanted file size of ``frames`` (T, 3*H/2, W), in bytes."""
        return int(frames.size * 2 // 3 * self.bits_per_pixel / 8)

    def bits_per_second(self, frames: Planes) -> int:
        """Return the bit rate at which ``frames`` (T, 3*H/2, W) take about the wanted file size."""
        return self.target_bytes(frames) * 8 * self.frames_per_second // len(frames)


def encode_to_size(frames: Planes, encoding: Encoding) -> bytes:
    """Encode frames (T, 3*H/2, W) to a file of the wanted size, and return the bytes of the file.

    The clip is encoded up to six times, until the size is within 3% of ``encoding.target_bytes``. The next bit rate
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
    """Encode frames (T, 3*H/2, W) once, at about ``bits_per_second``; return the bytes of the file."""
    buffer = io.BytesIO()
    container = {"mkv": "matroska"}.get(encoding.suffix, encoding.suffix)
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
    """Return all frames of the video file with the bytes ``content``, uint8 (T, 3*H/2, W)."""
    with av.open(io.BytesIO(content), "r") as source:
        source.streams.video[0].codec_context.thread_count = 1
        return np.stack([frame.to_ndarray() for frame in source.decode(video=0)]).astype(np.uint8, copy=False)


_MAX_THREADS = 4  # a thread holds the frames of up to two clips, about 20 MB


def generate(
    folder: Path,
    notice: str,
    plan: Mapping[Any, Callable[[], Sequence[bytes]]],
    manifest: pl.DataFrame,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the missing files of a generated corpus to ``folder``, on a few threads.

    If ``NOTICE.txt`` in the folder names another version of the corpus, all its files are made again. Files that do not
    belong to the corpus are left alone.

    Args:
        folder: folder of the corpus; it is made if it is missing.
        notice: text of ``NOTICE.txt``; it states the version of the generator.
        plan: maps a tuple of paths (relative to the folder, with '/') to a function that returns the contents of these
            files, in the same order.
        manifest: the table to write to ``manifest.csv``.
        progress: called with (files done, files in all) after each item of ``plan``.

    Returns:
        The path of ``manifest.csv``.

    Raises:
        OSError: a file cannot be written. A later call continues with the missing files.
    """
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
            for done in accumulate(makers.map(make, plan)):
                if progress is not None:
                    progress(done, sum(map(len, plan)))
        except BaseException:
            makers.shutdown(cancel_futures=True)
            raise
    path, text = folder / "manifest.csv", manifest.write_csv()
    if not path.is_file() or path.read_bytes() != text.encode():  # an unchanged file keeps its modification time
        write_text(path, text)
    return path
