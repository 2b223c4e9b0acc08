"""From a path the user gives to the list of labelled files: folder, manifest or FVC-2018."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fvc_lib.corpus.listing import (
    CorpusFiles,
    Entry,
    Listing,
    Refusal,
    Rejections,
    annotations_of_files,
    is_hidden,
    is_video_name,
)
from fvc_lib.corpus.sources.general.fvc2018 import DUPLICATE_TABLE, SEED_TABLE, read_fvc2018
from fvc_lib.corpus.sources.general.manifest import read_manifest
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.tables import LABELS

ACCEPTED = (
    "A corpus is (a) a folder with 'real/' and 'fake/' in it, (b) a CSV or Parquet manifest with the columns 'path' "
    f"and 'label' (real, fake), or (c) a folder with FVC-2018's {SEED_TABLE}, {DUPLICATE_TABLE} and 'videos/'."
)


def read_corpus(corpus: Path) -> Listing:
    """List what a corpus holds, without opening a video.

    Args:
        corpus: a folder with ``real/`` and ``fake/``, a CSV/Parquet manifest, or an FVC-2018 folder.

    Raises:
        UsageError: ``corpus`` is none of these; the message tells the accepted shapes.
        DataError: a manifest without one usable label.
    """
    if corpus.is_dir():
        return _read_folder(corpus)
    if not corpus.exists():
        raise UsageError(f"corpus {str(corpus)!r}: no such file or folder. {ACCEPTED}")
    if corpus.suffix.lower() not in {".csv", ".parquet"}:
        raise UsageError(f"corpus {str(corpus)!r}: a file that is neither .csv nor .parquet. {ACCEPTED}")
    return read_manifest(corpus)


def _read_folder(folder: Path) -> Listing:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError as error:
        raise UsageError(f"corpus {str(folder)!r}: {error.strerror}. {ACCEPTED}") from error
    tables = {SEED_TABLE, DUPLICATE_TABLE} & set(names)
    if len(tables) == 2:
        return read_fvc2018(folder)
    label_folders = [name for name in names if name.lower() in LABELS and (folder / name).is_dir()]
    if label_folders:
        return _read_label_folders(folder, label_folders)
    if tables:
        missing = ({SEED_TABLE, DUPLICATE_TABLE} - tables).pop()
        raise UsageError(f"corpus {str(folder)!r}: has {tables.pop()} but not {missing}. {ACCEPTED}")
    manifests = [name for name in names if Path(name).suffix.lower() in {".csv", ".parquet"}]
    hint = f" Did you mean {str(folder / manifests[0])!r}?" if manifests else ""
    raise UsageError(f"corpus {str(folder)!r}: a folder without 'real' and 'fake'.{hint} {ACCEPTED}")


def _read_label_folders(folder: Path, label_folders: list[str]) -> Listing:
    files = CorpusFiles(folder)
    rejections = Rejections()
    entries = []
    for name in label_folders:
        for path, is_folder in walk_files(files.root, name):
            text = path_to_text(path)
            refusal = folder_link_refusal(files, path) if is_folder else _file_refusal(files, path)
            if refusal is not None:
                rejections.add_file(text, refusal, label=name.lower())
            else:
                entries.append(Entry(path=text, label=name.lower(), source_id=text))
    entries.sort(key=lambda entry: entry.path)
    return Listing(files.root, "folder", tuple(entries), rejections.frame(), annotations_of_files(entries, "folder"))


def walk_files(root: Path, top: str) -> Iterator[tuple[str, bool]]:
    """Yield (path below ``root``, whether it is a linked folder) of files and linked folders that are not hidden."""
    if (root / top).is_symlink():
        yield top, True
        return
    for folder, folders, names in os.walk(root / top):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        below = os.path.relpath(folder, root)
        for name in folders:
            if Path(folder, name).is_symlink():
                yield str(Path(below, name)), True
        for name in sorted(names):
            if not is_hidden(name):
                yield str(Path(below, name)), False


def _file_refusal(files: CorpusFiles, path: str) -> Refusal | None:
    if not is_video_name(path):
        return Refusal("unknown_extension", f"{path!r} has no video extension. Rename it if it is a video.")
    return files.check(path)


def folder_link_refusal(files: CorpusFiles, path: str) -> Refusal:
    """Linked folders are not walked: a link may lead out of the corpus, or in a circle."""
    refusal = files.check(path)
    if refusal is not None and refusal.reason == "outside_corpus":
        return refusal
    return Refusal(
        "linked_folder", f"{path!r} is a symbolic link to a folder. Move the folder here, or use a manifest."
    )
