"""Whether the data of a JPEG file are whole.

Pillow raises where a file ends too early, but passes over what libjpeg only warns of: a file whose tail is zeros (a
download into a reserved file) or whose middle is lost decodes without an error into a picture that is partly grey.
"""

from __future__ import annotations

import re

import av
import av.error

# Any marker but stuffed bytes (FF 00), fill bytes (FF FF) and restarts (FF D0 - FF D7); ITU-T T.81, B.1.1.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
_END_OF_IMAGE = b"\xd9"
_WITHOUT_LENGTH = (b"\xd8", b"\x01")
_NO_GUESSING = {"err_detect": "crccheck+buffer+explode"}


def reaches_its_end(content: bytes) -> bool:
    """Whether the image data of a JPEG file are closed by an end-of-image marker; what follows it does not matter.

    Segments are passed over by their lengths, so the marker of an embedded thumbnail is not taken for the image's own.
    """
    place = 2
    while (found := _MARKER.search(content, place)) is not None:
        if found[1] == _END_OF_IMAGE:
            return True
        place = found.end()
        if found[1] not in _WITHOUT_LENGTH:
            place += max(2, int.from_bytes(content[place : place + 2], "big"))
    return False


def damage_in_scan(content: bytes) -> str:
    """What ffmpeg's decoder finds wrong with the entropy-coded data, or the empty text.

    ffmpeg counts what it has decoded and what is left, and can be told not to guess, so it finds data that are missing.
    Changed bits it finds only where they lead out of step: of 60 files in each of which 20 bytes were changed Pillow
    decoded 51 without an error and ffmpeg none with fine textures, but most with smooth ones. A kind of JPEG ffmpeg
    does not know (arithmetic coding, 12 bits) is not judged.
    """
    context = av.CodecContext.create("mjpeg", "r")
    context.options = dict(_NO_GUESSING)
    context.thread_count = 1
    try:
        context.decode(av.Packet(content))
        context.decode(None)
    except av.error.InvalidDataError:
        return "its coded data are damaged or incomplete"
    except av.error.FFmpegError:
        return ""
    return ""
