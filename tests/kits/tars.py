"""Tars for tests, as WebDataset lays them out."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

Members = Mapping[str, Path | bytes | str | dict[str, object]]


def write_tar(path: Path, members: Members, *more: tuple[str, bytes]) -> Path:
    """Write a tar of ``members``: the content of a file, bytes, text, or a document as JSON, by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in (*members.items(), *more):
            source = content.read_bytes() if isinstance(content, Path) else content
            written = json.dumps(source) if isinstance(source, dict) else source
            data = written.encode() if isinstance(written, str) else written
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path
