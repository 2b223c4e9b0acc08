"""What a file is that is named like a video and is none: told by its first bytes, with what to do about it."""

from __future__ import annotations

import re

# (how the file begins, what it is, what to do); the first that fits.
_KINDS = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what, remedy)
    for pattern, what, remedy in (
        (
            rb"version https://git-lfs\.github\.com/spec/",
            "a Git LFS pointer, not the video it stands for",
            "Fetch the video itself: git lfs pull.",
        ),
        (
            rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<(!doctype html|html|head|body|script)",
            "a web page saved under a video's name",
            "Download the video again and look at what the server answers.",
        ),
        (
            rb"\s*[{\[]\s*[\"{\]}]",
            "a JSON text, such as a server's error message",
            "Download the video again and look at what the server answers.",
        ),
        (
            rb"\s*(#EXTM3U|<\?xml.{0,400}<MPD|ffconcat)",
            "a playlist, which only names other files",
            "Download the video that it names.",
        ),
        (
            rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf\x27\x1c|Rar!|BZh\d|\xfd7zXZ",
            "a compressed archive",
            "Unpack it and list the videos inside.",
        ),
        (
            rb".{4}(styp|moof|sidx)",
            "a segment of an MP4 stream without the header it belongs to",
            "Join it behind its initialization segment: cat init.mp4 segment.m4s > video.mp4.",
        ),
        (
            rb"\x00{64}",
            "zeros at its beginning, as an unfinished download leaves them",
            "Fetch the file again.",
        ),
    )
)


def what_it_is(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins with ``head``, and the remedy; none for what is not known here."""
    return next(((what, remedy) for pattern, what, remedy in _KINDS if pattern.match(head)), None)
