"""DeeperForensics-1.0: faces of paid actors on the sequences of FaceForensics++.

``manipulated_videos/VARIANT/TTT_ACTOR.mp4`` are fake. Its reals are *FaceForensics++'s* originals at c23, which the
release does not bring (``source_videos`` are recordings of the actors, no reals of the same kind): it is run together
with them, as one of several corpora. ``lists/splits/{train,val,test}.txt`` are its official split. Source: Jiang et
al., "DeeperForensics-1.0: a large-scale dataset for real-world face forgery detection", CVPR 2020.
"""

import re
from pathlib import Path

from fvc_lib.corpus.listing import CorpusLoader, Listing, Refusal
from fvc_lib.corpus.sources.faces.faceforensics import sequence_groups, youtube_ids
from fvc_lib.corpus.sources.published import (
    Described,
    first_of,
    folders_in,
    read_lines,
    read_published,
    require,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.registry import CORPORA

_NAME = re.compile(r"(\d{3})_([MW]\d+)\.\w+")
_PARTS = {"train": "train", "val": "validation", "test": "test"}


def read_deeperforensics(folder: AnyPath) -> Listing:
    """The listing of ``manipulated_videos/``.

    Raises:
        DataError: one list of the official split is there without the others.
    """
    folder = Path(folder)
    require(folder, "DeeperForensics-1.0", fakes=("manipulated_videos",))
    split, youtube = _official_parts(folder), youtube_ids(folder)
    alone = "DeeperForensics brings fakes alone and cannot be run by itself; its reals are FaceForensics++'s originals"
    both = command_text("-p", "corpus", "FACEFORENSICS", "-p", "more_corpora", "DEEPERFORENSICS")
    notes = [f"{alone} at c23. Give both: {both}"]
    if not split:
        notes.append("lists/splits is not there, so there is no official split.")
    if (folder / "source_videos").is_dir():
        notes.append("source_videos are recordings of the actors for training of the generator and are passed over.")

    def described(path: str) -> Described | Refusal:
        found = _NAME.fullmatch(path.rsplit("/", 1)[-1])
        if found is None:
            return unknown_name(path, "target_actor such as 000_M101.mp4")
        groups = (*sequence_groups(found[1], youtube), f"deeperforensics actor {found[2]}")
        name = path.rsplit("/", 1)[-1]
        return Described("fake", groups, "DeeperForensics", None, split.get(name), {"variant": path.split("/")[1]})

    tops = [f"manipulated_videos/{name}" for name in folders_in(folder / "manipulated_videos")]
    return read_published(folder, "deeperforensics", tops, described, notes)


def _official_parts(folder: Path) -> dict[str, str]:
    """Part by file name; a line may have the variant's folder before it."""
    top = first_of(folder, "lists/splits", "splits")
    if top is None:
        return {}
    missing = [name for name in _PARTS if not (top / f"{name}.txt").is_file()]
    if missing:
        raise DataError(f"{str(top)!r}: {', '.join(f'{name}.txt' for name in missing)} is missing. Fetch all three.")
    return {
        line.rsplit("/", 1)[-1]: part
        for name, part in _PARTS.items()
        for line in read_lines(top / f"{name}.txt")
        if line
    }


_BIBTEX = """@inproceedings{jiang2020deeperforensics,
  author = {Jiang, Liming and Li, Ren and Wu, Wayne and Qian, Chen and Loy, Chen Change},
  title = {{DeeperForensics-1.0}: A Large-Scale Dataset for Real-World Face Forgery Detection},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2020}
}"""

CORPORA.register(
    CorpusLoader(
        name="deeperforensics",
        accepted="DeeperForensics-1.0: a folder with 'manipulated_videos/'",
        recognises=lambda path: (
            (path / "manipulated_videos").is_dir() or ((path / "source_videos").is_dir() and (path / "lists").is_dir())
        ),
        read=read_deeperforensics,
        title="DeeperForensics-1.0",
        corpus="DeeperForensics",
        expected={"fake": "in 'manipulated_videos/VARIANT'"},
        paper="Jiang et al., CVPR 2020, arXiv:2001.03024",
        licence="DeeperForensics terms: research only, on request",
        fetch="https://github.com/EndlessSora/DeeperForensics-1.0 (a form); the reals are FaceForensics++'s",
        bibtex=_BIBTEX,
    )
)
