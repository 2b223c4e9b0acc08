"""Whether a file is shorter than its container says: how a cut AVI or Matroska file differs from a short video."""

from __future__ import annotations

from pathlib import Path

# Writers round chunk sizes up; a difference this small is no lost frame.
_SLACK_BYTES = 16
_EBML_HEADER = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


def missing_bytes(path: Path) -> int:
    """How many bytes the outermost element states and the file lacks; 0 where it states nothing.

    Known are RIFF (AVI) and EBML (Matroska, WebM, RFC 8794). A recording that was never finished states no size.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(4096)
        num_bytes = file.seek(0, 2)
    stated = _riff_bytes(head) if head.startswith(b"RIFF") else _ebml_bytes(head)
    return stated - num_bytes if stated > num_bytes + _SLACK_BYTES else 0


def _riff_bytes(head: bytes) -> int:
    size = int.from_bytes(head[4:8], "little")
    return 0 if size == 0xFFFFFFFF else size + 8


def _ebml_bytes(head: bytes) -> int:
    """End of the segment, which follows the header."""
    if not head.startswith(_EBML_HEADER):
        return 0
    header_bytes, start = _variable_int(head, len(_EBML_HEADER))
    if header_bytes is None or head[start + header_bytes :][: len(_SEGMENT)] != _SEGMENT:
        return 0
    segment_bytes, start = _variable_int(head, start + header_bytes + len(_SEGMENT))
    return 0 if segment_bytes is None else start + segment_bytes


def _variable_int(data: bytes, start: int) -> tuple[int | None, int]:
    """An EBML data size and the place behind it; none for the size "unknown" or where there is none."""
    first = data[start] if start < len(data) else 0
    if not first:
        return None, start
    length = 9 - first.bit_length()
    bits = 7 * length
    value = int.from_bytes(data[start : start + length], "big") & ((1 << bits) - 1)
    return (None if value == (1 << bits) - 1 else value), start + length
