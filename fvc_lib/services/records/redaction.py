"""Secrets of the environment never reach a file that a run leaves behind.

A run folder is copied, mailed and shown; a token that a cell printed, or a command that was typed with one, would go
with it. What is known as a secret: the values of variables whose names say so, the password within any variable's URL,
and the user part of a URL in the text itself (``https://user:password@host``). Each is found as it is, quoted for a
URL, for JSON, for Python or for HTML, and in base64 at whatever offset. What is not found: a secret that a program
read from a file or a vault, one typed as an option's value, one that was encrypted, hashed, compressed or cut in
pieces, and values shorter than six characters, which stand in every text.
"""

import base64
import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

# Names whose values are secrets by custom. HOME, PATH and the like never match, nor does GIT_AUTHOR_NAME.
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|SSHPASS|_PASS$|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH(?!OR(?!IZ))|COOKIE"
    r"|CONNECTION_?STRING|_DSN$|_KEY$|_PWD$|_PAT$",
    re.IGNORECASE,
)
# These hold where something is, or what it is called.
_HARMLESS_NAME = re.compile(r"^(SSH_AUTH_SOCK|XAUTHORITY|PWD|OLDPWD)$|_(FILE|PATH|DIR|URL|URI)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
# In any text: the password of a URL, or a user part long enough to be a token (``git@host`` stands).
_URL_SECRET = re.compile(r"(?<=://)(?:([^/\s:@\"'<>]*):[^/\s@\"'<>]+|[^/\s:@\"'<>]{16,})(?=@)")
_OPEN_URL = re.compile(r":(?:/(?:/[^\s@/\"'<>]{0,512})?)?$")
_SHORTEST = 6
_SHORTEST_ENCODED = 10
REPLACEMENT = "[secret]"


class Redactor:
    """Replaces the values of secret environment variables.

    Args:
        environ: variables by name; none: this process's, as they are now.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        forms = {form for value in _secret_values(environ) for form in _forms(value)}
        # The longest first: one secret may begin with another.
        self._forms = sorted(forms, key=lambda form: (-len(form), form))

    def text(self, text: str) -> str:
        """``text`` with each secret replaced by ``[secret]``."""
        for form in self._forms:
            if form in text:
                text = text.replace(form, REPLACEMENT)
        if "://" in text and "@" in text:
            text = _URL_SECRET.sub(_without_password, text)
        return text

    def tree(self, value: Any) -> Any:
        """A copy of a JSON-like ``value`` with every text in it, keys included, redacted; other values as they are."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.tree(part) for part in value]
        if isinstance(value, dict):
            return {self.tree(key): self.tree(part) for key, part in value.items()}
        return value

    def held_back(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a secret that goes on elsewhere."""
        held = 0
        for form in self._forms:
            start = text.find(form[0], max(0, len(text) - len(form) + 1))
            while start >= 0:
                if form.startswith(text[start:]):
                    held = max(held, len(text) - start)
                    break
                start = text.find(form[0], start + 1)
        if match := _OPEN_URL.search(text, max(0, len(text) - 520)):
            held = max(held, len(text) - match.start())
        return held

    def border_outside_secrets(self, text: str, border: int) -> int:
        """The largest place up to ``border`` at which ``text`` can be cut without cutting a secret."""
        moved = True
        while moved:
            moved = False
            for form in self._forms:
                start = text.find(form, max(0, border - len(form) + 1), border + len(form) - 1)
                if 0 <= start < border:
                    border, moved = start, True
        return border


class StreamRedactor:
    """Redacts a text that comes in pieces: a secret cut in two by their border is found too.

    What may be a secret's beginning is kept until what follows shows that it is none.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""

    def feed(self, piece: str) -> str:
        """What of all that came so far may be shown now."""
        # Looked for before anything is replaced: what is one secret may be the beginning of another.
        text = self._held + piece
        held = self._redactor.held_back(text)
        border = self._redactor.border_outside_secrets(text, len(text) - held) if held else len(text)
        self._held = text[border:]
        return self._redactor.text(text[:border])

    def close(self) -> str:
        """What was kept back, now that nothing follows."""
        held_text, self._held = self._held, ""
        return self._redactor.text(held_text)


def _without_password(match: re.Match[str]) -> str:
    return REPLACEMENT if match[1] is None else f"{match[1]}:{REPLACEMENT}"


def _secret_values(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and not _HARMLESS_NAME.search(name) and not _is_count(value):
            yield value
            yield value.strip()
        for match in _URL_PASSWORD.finditer(value):
            yield match[1]


def _is_count(value: str) -> bool:
    """``MAX_TOKENS=100000`` is no secret, and hiding it would hide that number everywhere."""
    return value.isdecimal() and len(value) < 10


def _forms(value: str) -> Iterator[str]:
    """The ways in which a secret is written; none of a value too short to be told from other text."""
    if len(value) < _SHORTEST:
        return
    yield from (value, quote(value, safe=""), quote(value), quote_plus(value), html.escape(value))
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    raw = os.fsencode(value)
    for offset in range(3):  # what stands before it decides how its bytes fall into base64's groups of three
        padded = b"\0" * offset + raw
        first, end = (offset * 8 + 5) // 6, len(padded) * 8 // 6
        for encoded in (base64.b64encode(padded), base64.urlsafe_b64encode(padded)):
            if end - first >= _SHORTEST_ENCODED:
                yield encoded[first:end].decode()
