"""Encoding and decoding of planar yuv420p frames in memory, to the same bytes every time, at a chosen size.

Size is the point: manipulated footage compresses better or worse than camera footage, so at a fixed quality the bit
rate would give the label away. Every file is therefore encoded again until it has the size its profile asks for.
"""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import av
import numpy as np

from fvc_lib.corpus.samples.scenes import Planes, resize_plane
from fvc_lib.services.atomic_files import sha256_of_file, write_bytes, write_text
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
    suffix: str  # of the file name; chooses the container
    frames_per_second: int
    bits_per_pixel: float  # of every frame, container included

    def target_bytes(self, frames: Planes) -> int:
        """Return the wanted file size of ``frames`` (T, 3*H/2, W)."""
        pixels = frames.shape[0] * frames.shape[1] * 2 // 3 * frames.shape[2]
        return int(pixels * self.bits_per_pixel / 8)


def encode_to_size(frames: Planes, encoding: Encoding) -> bytes:
    """Encode (T, 3*H/2, W), adjusting the bit rate until the file is within 3% of its target or six tries are over.

    The rate of the next try comes from the secant through the last two tries in logarithms of rate and size.

    Returns the try that came closest.
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


# What a generated corpus remembers of its files, so that another call makes only what is missing or damaged.

_MAX_THREADS = 4  # each holds the frames of up to two clips, about 20 MB


@dataclass(frozen=True)
class PlannedFiles:
    """Files that are drawn together: their paths in the corpus folder, with '/', and what makes their contents."""

    paths: tuple[str, ...]
    make: Callable[[], Sequence[bytes]]


def generate(
    folder: Path,
    name: str,
    version: str,
    plan: Sequence[PlannedFiles],
    notice: str,
    manifest: str,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None = None,
) -> Path:
    """Write the missing files of a generated corpus to ``folder``, on a few threads.

    Files that an earlier call finished are recognised by their checksums; damaged, missing or foreign ones are
    written again, and files that the corpus does not name are left alone. The encoders leave the interpreter alone
    meanwhile, and files depend on nothing but their plan.

    Args:
        folder: created when missing.
        name: of the file of checksums, which also a call that is interrupted writes.
        version: of the generator; files of another one are made again.
        plan: what is drawn.
        notice: says what the corpus is, ``{version}`` in it is filled in.
        manifest: text of ``manifest.csv``.
        progress: called with (files done, files in all) after each part of the plan.
        stop: asked after each part.

    Returns:
        The path of ``manifest.csv``.

    Raises:
        StoppedError: ``stop`` returned true; a later call continues.
        OSError: as the file system gave it; a later call finishes what was begun.
    """
    record = folder / f"{name}.json"
    known = _read_checksums(record, version)
    checksums, total, done = dict(known), sum(len(files.paths) for files in plan), 0
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, _MAX_THREADS)) as makers:
        try:
            for some in makers.map(lambda files: _kept_or_made(folder, files, known), plan):
                done += len(some)
                if not some.items() <= checksums.items():
                    checksums.update(some)
                    document = {"version": version, "sha256": checksums}
                    write_if_other(record, json.dumps(document, indent=1, sort_keys=True) + "\n")
                if progress is not None:
                    progress(done, total)
                if stop is not None and stop():
                    raise StoppedError(f"stopped after {done} of {total} files of the sample corpus; run it again")
        except BaseException:
            makers.shutdown(cancel_futures=True)
            raise
    write_if_other(folder / "NOTICE.txt", notice.format(version=version))
    write_if_other(folder / "manifest.csv", manifest)
    return folder / "manifest.csv"


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows, the header first, as the text of a manifest."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read_checksums(record: Path, version: str) -> dict[str, str]:
    """Return the checksums by path of an earlier call of this version; empty if there is none."""
    try:
        document = json.loads(record.read_text(encoding="utf-8"))
        return dict(document["sha256"]) if document["version"] == version else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _kept_or_made(folder: Path, files: PlannedFiles, known: dict[str, str]) -> dict[str, str]:
    """Write the ``files`` that differ from ``known``; return the checksums of all."""

    def is_there(path: str) -> bool:
        return path in known and (folder / path).is_file() and sha256_of_file(folder / path) == known[path]

    missing = [path for path in files.paths if not is_there(path)]
    contents = dict(zip(files.paths, files.make(), strict=True)) if missing else {}
    for path in missing:
        write_bytes(folder / path, contents[path])
    made = {path: hashlib.sha256(contents[path]).hexdigest() for path in missing}
    return {path: made.get(path) or known[path] for path in files.paths}


def write_if_other(path: Path, text: str) -> None:
    """Replace ``path`` atomically unless it holds ``text``: an unchanged file keeps its time."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)
