"""Secrets of the environment never reach a file that a run leaves behind.

A run folder is copied, mailed and shown; a token that a cell printed, or a command that was typed with one, would go
with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Names whose values are secrets by custom. HOME, PATH and the like never match.
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH|COOKIE", re.IGNORECASE)
_HARMLESS_NAME = re.compile(r"^(SSH_AUTH_SOCK|XAUTHORITY)$")
# Shorter values ("1", "true", "root") stand in every text, and what hides them hides the text.
_SHORTEST = 6
REPLACEMENT = "[secret]"


class Redactor:
    """Replaces the values of secret environment variables.

    Args:
        environ: variables by name; none: this process's, as they are now.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        values = {
            value
            for name, value in environ.items()
            if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and not _HARMLESS_NAME.match(name)
        }
        # The longest first: one secret may begin with another.
        ordered = sorted(values, key=lambda value: (-len(value), value))
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """``text`` with each secret value replaced by ``[secret]``."""
        return text if self._pattern is None else self._pattern.sub(REPLACEMENT, text)
