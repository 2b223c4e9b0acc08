"""Names as MLflow takes them, and back: letters, digits, ``_ - . / `` and spaces, nothing that reads as a path.

A character that MLflow refuses becomes ``_xHEX_``, its code point in hexadecimal, after the escapes of ECMA-376
(``ST_Xstring``). A text that looks like such an escape has its first underscore escaped, so every name has exactly one
key and every key made here exactly one name.
"""

from __future__ import annotations

import re
from hashlib import sha256

# MLflow's own limits of version 3 (mlflow.utils.validation): characters of a key, a parameter, a run's tag, and a name.
MAX_KEY = 250
MAX_PARAM = 6_000
MAX_TAG = 8_000

# ':' is legal on a POSIX server and not on a Windows one; '/' separates the parts of a key.
_REFUSED = re.compile(r"[^\w.\- ]")
_LIKE_AN_ESCAPE = re.compile(r"_(?=x(?:[0-9A-F_]|[^\w.\- ]))")
_ESCAPE = re.compile(r"_x([0-9A-F]*)_")


def key_of(*parts: str) -> str:
    """The key of ``parts``, joined by ``/``; any text is a legal part, also an empty one."""
    return "/".join(map(_escaped, parts))


def parts_of(key: str) -> tuple[str, ...]:
    """What ``key_of`` was given."""
    return tuple(_ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", p) for p in key.split("/"))


def fitted(key: str) -> str:
    """``key`` where it is short enough, else its beginning and a digest of the whole: 250 characters at most."""
    if len(key) <= MAX_KEY:
        return key
    return f"{key[: MAX_KEY - 20].rstrip('/')}_{sha256(key.encode()).hexdigest()[:16]}"


def _escaped(part: str) -> str:
    text = _LIKE_AN_ESCAPE.sub("_x5F_", part)
    text = _REFUSED.sub(lambda match: f"_x{ord(match[0]):X}_", text)
    if text in ("", ".", ".."):  # would disappear from a path
        return "_x_" if not text else "_x2E_" + text[1:]
    return text
