"""Files for what a cell printed or showed beyond what its record holds, and the links to them."""

from __future__ import annotations

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fvc_lib.execution.bounded_log import BoundedLog
from fvc_lib.services.redaction import Redactor

MAX_FILES = 100
MAX_BYTES = 256_000_000  # of all shown outputs together; printed text has the bounded log's limit for each stream
LINK_KEY = "fvc_overflow"  # in an output's metadata: the file's path from the run folder
# A drawing may hold scripts, and there is no way to forbid them in its file: it is kept to be read.
_SUFFIXES = {
    "text/html": ".html", "image/svg+xml": ".svg.txt", "image/png": ".png", "image/jpeg": ".jpg",
    "text/markdown": ".md", "text/latex": ".tex", "application/pdf": ".pdf", "text/plain": ".txt",
}  # fmt: skip


# First in a page that a cell made: a reader who opens it from the record runs no script of it and loads nothing.
_HARMLESS_PAGE = (
    '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:\">\n"
)


class OutputFiles:
    """The overflow of one task, in a folder that is made when the first file is needed.

    Args:
        folder: where the files go; those of an earlier attempt are replaced one by one.
        record: the notebook that links to them.
        root: the folder that contains both, the run's.
    """

    def __init__(self, folder: Path, record: Path, root: Path, redactor: Redactor) -> None:
        self._folder, self._record, self._root, self._redactor = folder, record, root, redactor
        self._sizes: dict[Path, int] = {}

    def log(self, name: str) -> BoundedLog:
        """A new file for printed text."""
        path = self._folder / re.sub(r"[^\w.-]", "_", name)  # a cell may call its stream what it likes
        path.unlink(missing_ok=True)
        return BoundedLog(path, self._redactor)

    def keep(self, stem: str, data: Mapping[str, Any]) -> list[Path]:
        """Write each representation of a shown output; none where files or space allowed for them are used up."""
        rich = {mime: value for mime, value in data.items() if mime != "text/plain"} or dict(data)
        written = []
        for mime, value in rich.items():
            content, path = _content(mime, value), self._folder / (stem + _SUFFIXES.get(mime, ".json"))
            others = {other: size for other, size in self._sizes.items() if other != path}
            if len(others) >= MAX_FILES or sum(others.values()) + len(content) > MAX_BYTES:
                break
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._sizes[path] = len(content)
            written.append(path)
        return written

    def link(self, path: Path) -> str:
        """An HTML link to ``path`` that works from the record's own folder."""
        target = os.path.relpath(path, self._record.parent)
        return f'<a href="{html.escape(target)}">{html.escape(self.name(path))}</a>'

    def name(self, path: Path) -> str:
        """``path`` as seen from the run folder."""
        return os.path.relpath(path, self._root)


def _content(mime: str, value: Any) -> bytes:
    if mime.startswith("image/") and mime != "image/svg+xml" and isinstance(value, str):
        try:
            return base64.b64decode(value, validate=False)
        except binascii.Error:
            pass
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if mime == "text/html":
        text = _HARMLESS_PAGE + text
    return text.encode("utf-8", "replace")
