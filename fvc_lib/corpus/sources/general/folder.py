"""Read corpora whose folders ``real/`` and ``fake/`` hold the videos of that label.

These folders may be inside folders of parts, such as ``train/real/``. A video is a file, or a folder of pictures, which
are its frames.
"""

from pathlib import Path

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, joined
from fvc_lib.corpus.frame_names import LABEL_FOLDER, LAYOUT, is_picture, picture_folders
from fvc_lib.corpus.label_table import PART_NAMES, tables_in
from fvc_lib.corpus.listing import CorpusLoader, Listing, listing_of_files
from fvc_lib.corpus.sources.published import folders_in
from fvc_lib.services.atomic_files import AnyPath, path_from_text, path_to_text
from fvc_lib.services.registry import CORPORA


def read_label_folders(folder: AnyPath) -> Listing:
    """List every video below the folders called ``real`` and ``fake``, or with a number, such as ``0_real``.

    Case is ignored. If there are no such folders, they are searched in the folders ``train``, ``val`` and
    ``test``, which are the official parts.
    """
    folder = Path(folder)
    files, rejections, entries = CorpusFiles(folder), Rejections(), []
    for top, label, part in _label_folders(folder):
        paths = list(map(path_to_text, files.walk(top, rejections, label, pictures=True)))
        videos = [(path, [place], "") for place, path in enumerate(paths) if not is_picture(path)]
        with_videos = {path.rpartition("/")[0] for path, _, _ in videos}
        for path, places, problem in (*videos, *picture_folders(paths, [None] * len(paths))):
            refusal = files.check(str(path_from_text(path)))
            if path in with_videos:
                refusal = Refusal("unknown_extension", f"{path!r} holds videos: its pictures are no frames. {LAYOUT}.")
            elif problem:
                refusal = Refusal("unassigned_picture", f"{problem}. {LAYOUT}.")
            if refusal is None:
                entries.append(Entry(path=path, label=label, source_id=path, official_split=part))
                continue
            for place in places:
                rejections.add_file(paths[place], refusal, label)
    return listing_of_files(files, "folder", entries, rejections)


def _label_folders(folder: Path) -> list[tuple[str, str, str | None]]:
    """Return (path below ``folder``, label, official part or None) for each folder that is named like a label."""
    parts = [(name, PART_NAMES[name.lower()]) for name in folders_in(folder) if name.lower() in PART_NAMES]
    found = [
        (joined(top, name), match[1].lower(), part)
        for top, part in (("", None), *parts)
        for name in folders_in(folder / top)
        if (match := LABEL_FOLDER.fullmatch(name))
    ]
    return [each for each in found if each[2] is None] or found


def _lacks(path: Path) -> str:
    if not path.is_dir():
        return ""
    tables = tables_in(path)
    meant = path / tables[0] if tables else path / "*" / "*.tar" if any(path.glob("*/*.tar")) else None
    if any(top.split("/")[0] == path.name for top, *_ in _label_folders(path.parent)):
        meant = path.parent
    hint = f" Did you mean {str(meant)!r}?" if meant else ""
    if not meant and any(is_picture(each.name) for each in (*path.glob("*"), *path.glob("*/*"))):
        hint = f" It holds pictures. {LAYOUT}."
    return f"a folder without 'real' and 'fake'.{hint}"


CORPORA.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with 'real/' and 'fake/' in it, or with 'train/real/', 'train/fake/', 'test/real/' ...",
        recognises=lambda path: bool(_label_folders(path)),
        read=read_label_folders,
        lacks=_lacks,
        rank=1,
    )
)
