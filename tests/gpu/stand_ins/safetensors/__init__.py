"""The part of safetensors that the engine uses, in the same format, for a machine with only torch and numpy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class SafetensorError(Exception):
    """The file has another format."""


class safe_open:  # noqa: N801 - as the package calls it
    """The header of a file."""

    def __init__(self, path: Path, framework: str) -> None:
        content = Path(path).read_bytes()
        try:
            (size,) = struct.unpack("<Q", content[:8])
            self.header: dict[str, Any] = json.loads(content[8 : 8 + size])
        except (struct.error, ValueError) as error:
            raise SafetensorError(str(error)) from error
        self.data = content[8 + size :]

    def metadata(self) -> dict[str, str]:
        return self.header.get("__metadata__", {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
