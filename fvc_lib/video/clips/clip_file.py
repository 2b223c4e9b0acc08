"""One clip as a file: NumPy's ``.npy`` header, uint8 pixels, and the SHA-256 of both.

NumPy reads such a file as any other: it ignores what follows the pixels.
"""

import hashlib
import io
import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fvc_lib.services.atomic_files import AnyPath, atomic_output

Pixels = npt.NDArray[np.uint8]
Shape = tuple[int, int, int, int]
DIGEST_BYTES = 32


@lru_cache(maxsize=32)
def clip_header(shape: Shape) -> bytes:
    """Return the ``.npy`` header of a clip of ``shape`` (T, 3, S, S): version 1.0, uint8, C order."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def clip_file_bytes(shape: Shape) -> int:
    """Return the bytes that header and pixels of a clip of ``shape`` take, without the digest behind them."""
    return len(clip_header(shape)) + int(np.prod(shape))


def write_clip_file(path: AnyPath, frames: Pixels) -> None:
    """Write a clip, uint8 (T, 3, S, S), to ``path`` atomically; an existing file is replaced."""
    with atomic_output(path) as temporary, temporary.open("wb") as stream:
        write_with_digest(stream, clip_header((len(frames), 3, *frames.shape[2:])), np.ascontiguousarray(frames).data)


def write_with_digest(stream: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write ``parts`` and then their SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        stream.write(part)
        digest.update(part)
    stream.write(digest.digest())


def check_digest(path: AnyPath) -> None:
    """Check that the last 32 bytes of a file are the SHA-256 of all bytes before them.

    Raises:
        OSError: the file cannot be read.
        ValueError: the digest differs, so the file is damaged.
    """
    content = memoryview(Path(path).read_bytes())
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise ValueError("the file is damaged: it is not what was written (SHA-256)")


def map_clip_file(path: AnyPath, shape: Shape) -> Pixels:
    """Return the clip as a read-only memory map, uint8 of ``shape``. Nothing is unpickled.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no clip of that shape.
    """
    path = Path(path)
    header = clip_header(shape)
    with path.open("rb") as stream:
        if stream.read(len(header)) != header:
            raise ValueError(f"the file is no clip of uint8 {shape}")
        return np.memmap(stream, np.uint8, "r", len(header), shape)


def load_clip_file(path: AnyPath, frames: Pixels, shape: Shape, first: int = 0) -> None:
    """Read t consecutive frames of a clip into ``frames``.

    This takes half the time of copying from the memory map.

    Args:
        path: the clip file.
        frames: uint8 (t, 3, S, S) in C order; filled.
        shape: (T, 3, S, S), of the whole clip.
        first: index of the first frame to read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no clip of that shape.
    """
    header = bytearray(len(clip_header(shape)))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        got = os.preadv(descriptor, [header, *([] if first else [frames.data])], 0)
        if first:
            got += os.preadv(descriptor, [frames.data], len(header) + first * frames[0].nbytes)
    finally:
        os.close(descriptor)
    if header != clip_header(shape) or got != len(header) + frames.nbytes:
        raise ValueError(f"the file is no clip of uint8 {shape}")


def check_pixels(frames: Pixels, shape: Shape) -> None:
    """Raise ``ValueError`` unless ``frames`` is uint8 of ``shape``."""
    if frames.dtype != np.uint8 or frames.shape != shape:
        raise ValueError(f"clip: got {frames.dtype} {frames.shape}, wanted uint8 {shape}")


def check_part(frames: Pixels, shape: Shape, first: int) -> None:
    """Raise ``ValueError`` unless a clip of ``shape`` has as many frames as ``frames`` holds, from ``first`` on."""
    fits = frames.ndim == 4 and first >= 0 and 0 < len(frames) <= shape[0] - first
    check_pixels(frames, (len(frames) if fits else shape[0], *shape[1:]))
