"""A folder with ``real/`` and ``fake/`` in it: each file below them is a video with that label."""

from __future__ import annotations

import os
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Entry, Listing, Refusal, Rejections
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS


def read_label_folders(folder: Path) -> Listing:
    """The listing of every video below the folders called ``real`` and ``fake``, in any case."""
    files, rejections, entries = CorpusFiles(folder), Rejections(), []
    for name in _label_folders(folder):
        for path, is_folder in listing.walk_files(files.root, name):
            text = path_to_text(path)
            refusal = listing.folder_link_refusal(files, path) if is_folder else _file_refusal(files, path)
            if refusal is not None:
                rejections.add_file(text, refusal, label=name.lower())
            else:
                entries.append(Entry(path=text, label=name.lower(), source_id=text))
    entries.sort(key=lambda entry: entry.path)
    return Listing(
        files.root, "folder", tuple(entries), rejections.frame(), listing.annotations_of_files(entries, "folder")
    )


def _label_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(name for name in os.listdir(folder) if name.lower() in LABELS and (folder / name).is_dir())  # noqa: PTH208


def _file_refusal(files: CorpusFiles, path: str) -> Refusal | None:
    if not listing.is_video_name(path):
        return Refusal("unknown_extension", f"{path!r} has no video extension. Rename it if it is a video.")
    return files.check(path)


def _lacks(path: Path) -> str:
    if not path.is_dir():
        return ""
    tables = sorted(inside.name for inside in path.iterdir() if inside.suffix.lower() in {".csv", ".parquet"})
    hint = f" Did you mean {str(path / tables[0])!r}?" if tables else ""
    return f"a folder without 'real' and 'fake'.{hint}"


CORPORA.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with 'real/' and 'fake/' in it",
        recognises=lambda path: bool(_label_folders(path)),
        read=read_label_folders,
        lacks=_lacks,
        rank=1,
    )
)
