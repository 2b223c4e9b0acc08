"""Which packets no other picture refers to, read from their headers without decoding.

H.264: ITU-T H.264, 7.4.1 (``nal_ref_idc``). HEVC: ITU-T H.265, table 7-1 (sub-layer non-reference pictures).
"""

from __future__ import annotations

from collections.abc import Iterator

_H264_SLICES = frozenset({1, 2, 5})
_HEVC_LAST_SLICE_TYPE = 31
# Types 0, 2, ... 14 are the non-reference twins of the types above them.
_HEVC_LAST_NON_REFERENCE = 14


def nal_units(packet: bytes, length_bytes: int) -> Iterator[bytes]:
    """The NAL units of a packet.

    Args:
        packet: as it lies in the container.
        length_bytes: of the length before each unit (MP4, Matroska), or 0 where start codes divide them (MPEG-TS).
    """
    if not length_bytes:
        yield from (unit.rstrip(b"\0") for unit in packet.split(b"\0\0\1")[1:])
        return
    start = 0
    while start + length_bytes <= len(packet):
        size = int.from_bytes(packet[start : start + length_bytes], "big")
        yield packet[start + length_bytes : start + length_bytes + size]
        start += length_bytes + size


def nal_length_bytes(codec: str, extradata: bytes) -> int:
    """Bytes of the lengths before NAL units, from ``avcC`` or ``hvcC`` (ISO/IEC 14496-15); 0 for start codes."""
    position = {"h264": 4, "hevc": 21}[codec]
    if not extradata or extradata[0] != 1 or len(extradata) <= position:
        return 0
    return (extradata[position] & 3) + 1


def is_reference(codec: str, packet: bytes, length_bytes: int) -> bool:
    """Whether later pictures may refer to this one. True for formats whose decoders cannot leave pictures out."""
    if codec == "h264":
        return any(
            unit[0] & 0x1F in _H264_SLICES and unit[0] & 0x60 for unit in nal_units(packet, length_bytes) if unit
        )
    if codec == "hevc":
        types = [unit[0] >> 1 & 0x3F for unit in nal_units(packet, length_bytes) if unit]
        slices = [kind for kind in types if kind <= _HEVC_LAST_SLICE_TYPE]
        return any(kind > _HEVC_LAST_NON_REFERENCE or kind % 2 for kind in slices)
    return True
