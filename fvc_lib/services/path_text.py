r"""File names as table text and back: the one pair of functions that spells this encoding.

A POSIX file name is bytes, table text is UTF-8. Bytes that are not UTF-8 become ``\xNN`` and a literal backslash
becomes ``\\``, so every name has exactly one text, every text made here has exactly one name, and ordinary names
(spaces, quotes, newlines, emoji) stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from fvc_lib.services.errors import DataError

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(\\))")


def escape_text(text: str) -> str:
    r"""``text`` as valid UTF-8: surrogate-escaped bytes become ``\xNN``, a backslash ``\\``. Injective."""
    if text.isascii() and "\\" not in text:  # nearly every name
        return text
    return os.fsencode(text.replace("\\", "\\\\")).decode("utf-8", "backslashreplace")


def message_text(text: str) -> str:
    """``text`` as valid UTF-8 for people to read; unlike ``escape_text`` it cannot be turned back."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def path_to_text(path: PurePath | str) -> str:
    """The table text of a path, with ``/`` between folders. ``path_from_text`` is its inverse."""
    return escape_text(PurePath(path).as_posix())


def path_from_text(text: str) -> Path:
    """The path a table text names.

    Raises:
        DataError: ``text`` holds a backslash that ``path_to_text`` cannot have written.
    """
    if text.isascii() and "\\" not in text:
        return Path(text)
    raw = text.encode("utf-8")
    if _ESCAPE.sub(b"", raw).count(b"\\"):
        raise DataError(
            f"path text {text!r}: got a lone backslash, wanted '\\\\' or '\\xNN' as path_to_text writes them. "
            "Write the table again with the stage that made it."
        )
    return Path(os.fsdecode(_ESCAPE.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else b"\\", raw)))
