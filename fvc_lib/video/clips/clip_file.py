"""One clip as a file: numpy's plain ``.npy`` header, of which there is exactly one per shape; uint8 pixels; SHA-256.

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
    """The ``.npy`` header of a clip of ``shape`` (T, 3, S, S): version 1.0, uint8, C order."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def clip_file_bytes(shape: Shape) -> int:
    """The size of header and pixels of a clip of ``shape``."""
    return len(clip_header(shape)) + int(np.prod(shape))


def write_clip_file(path: AnyPath, frames: Pixels) -> None:
    """Replace ``path`` by a clip, uint8 (T, 3, S, S), atomically.

    Raises:
        OSError: as the file system gave it.
    """
    height, width = frames.shape[2:]
    with atomic_output(path) as temporary, temporary.open("wb") as stream:
        write_with_digest(stream, clip_header((frames.shape[0], 3, height, width)), np.ascontiguousarray(frames).data)


def write_with_digest(stream: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write ``parts`` and their SHA-256, as ``check_digest`` wants it."""
    digest = hashlib.sha256()
    for part in parts:
        stream.write(part)
        digest.update(part)
    stream.write(digest.digest())


def check_digest(path: AnyPath) -> None:
    """Check that a cached file ends with the SHA-256 of what comes before.

    Raises:
        OSError: as the file system gave it.
        ValueError: it does not.
    """
    content = memoryview(Path(path).read_bytes())
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise ValueError("the file is damaged: it is not what was written (SHA-256)")


def map_clip_file(path: AnyPath, shape: Shape) -> Pixels:
    """The clip as a read-only memory map, uint8 of ``shape``; nothing is parsed, so nothing in the file is executed.

    Raises:
        OSError: as the file system gave it.
        ValueError: the file is not such a clip.
    """
    path = Path(path)
    header = clip_header(shape)
    with path.open("rb") as stream:
        if stream.read(len(header)) != header:
            raise ValueError(f"the file is no clip of uint8 {shape}")
        return np.memmap(stream, np.uint8, "r", len(header), shape)


def load_clip_file(path: AnyPath, frames: Pixels, shape: Shape, first: int = 0) -> None:
    """Fill ``frames``, uint8 (t, 3, S, S) in C order, with those from number ``first`` on of a file of ``shape``.

    Takes half the time of copying the map page by page.

    Raises:
        OSError: as the file system gave it.
        ValueError: the file is not such a clip.
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
    """Refuse an array that a clip of ``shape`` is not, or cannot be read into.

    Raises:
        ValueError: names what was got.
    """
    if frames.dtype != np.uint8 or frames.shape != shape:
        raise ValueError(f"clip: got {frames.dtype} {frames.shape}, wanted uint8 {shape}")


def check_part(frames: Pixels, shape: Shape, first: int) -> None:
    """As ``check_pixels``, where ``frames`` shall hold those from number ``first`` on of a clip of ``shape``."""
    fits = frames.ndim == 4 and first >= 0 and 0 < len(frames) <= shape[0] - first
    check_pixels(frames, (len(frames) if fits else shape[0], *shape[1:]))
