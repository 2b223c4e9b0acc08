"""Clips side by side in one image: a row per clip, a column per frame."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def contact_sheet(clips: Sequence[Pixels], *, gap: int = 4, background: int = 255) -> Pixels:
    """Lay out clips as rows and their frames as columns.

    Args:
        clips: each uint8 (T, 3, H, W); T and the sizes may differ.
        gap: pixels between frames.
        background: grey level of gaps and of what is left over.

    Returns:
        uint8 (rows, columns, 3).
    """
    if not clips:
        raise ValueError("clips: got none, wanted at least one")
    height = sum(clip.shape[2] for clip in clips) + gap * (len(clips) - 1)
    width = max(clip.shape[0] * (clip.shape[3] + gap) - gap for clip in clips)
    sheet = np.full((height, width, 3), background, np.uint8)
    top = 0
    for clip in clips:
        for number, frame in enumerate(clip):
            left = number * (clip.shape[3] + gap)
            sheet[top : top + clip.shape[2], left : left + clip.shape[3]] = frame.transpose(1, 2, 0)
        top += clip.shape[2] + gap
    return sheet


def png_bytes(image: Pixels) -> bytes:
    """Encode a uint8 (H, W, 3) RGB image as PNG (W3C PNG specification; filter 0, zlib level 6)."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"image: got {image.dtype} {image.shape}, wanted uint8 (H, W, 3)")
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row starts with its filter's number
    rows[:, 1:] = image.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
