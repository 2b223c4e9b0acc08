"""Bundles as somebody who means ill would hand them on."""

import json
from pathlib import Path

from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.records.digests import write_document


def sealed(folder: Path) -> Path:
    """With digests that fit what is there: what somebody who means ill would hand on."""
    files = [file for file in folder.rglob("*") if file.is_file() and file != folder / "digests.json"]
    digests = {file.relative_to(folder).as_posix(): sha256_of_file(file) for file in files}
    write_document(folder / "digests.json", {"files": digests})
    return folder


def edited(folder: Path, **changes: object) -> Path:
    document = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps({**document, **changes}))
    return sealed(folder)


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)
