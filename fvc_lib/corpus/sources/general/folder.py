"""A folder with ``real/`` and ``fake/`` in it: each file below them is a video with that label."""

import os
from pathlib import Path

from fvc_lib.corpus.label_table import tables_in
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Entry, Listing, Rejections, listing_of_files
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.tables import LABELS


def read_label_folders(folder: AnyPath) -> Listing:
    """The listing of every video below the folders called ``real`` and ``fake``, in any case."""
    folder = Path(folder)
    files, rejections, entries = CorpusFiles(folder), Rejections(), []
    for name in _label_folders(folder):
        for path in files.walk(name, rejections, name.lower()):
            text, refusal = path_to_text(path), files.check(path)
            if refusal is not None:
                rejections.add_file(text, refusal, name.lower())
            else:
                entries.append(Entry(path=text, label=name.lower(), source_id=text))
    return listing_of_files(files, "folder", entries, rejections)


def _label_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(name for name in os.listdir(folder) if name.lower() in LABELS and (folder / name).is_dir())  # noqa: PTH208


def _lacks(path: Path) -> str:
    if not path.is_dir():
        return ""
    tables = tables_in(path)
    meant = path / tables[0] if tables else path / "*" / "*.tar" if any(path.glob("*/*.tar")) else None
    hint = f" Did you mean {str(meant)!r}?" if meant else ""
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
