"""DeeperForensics-1.0: faces of paid actors on the sequences of FaceForensics++.

``manipulated_videos/VARIANT/TTT_ACTOR.mp4`` are fake. Its reals are *FaceForensics++'s* originals at c23, which the
release does not bring (``source_videos`` are recordings of the actors, no reals of the same kind): it is run together
with them, as one of several corpora. ``lists/splits/{train,val,test}.txt`` are its official split. Source: Jiang et
al., "DeeperForensics-1.0: a large-scale dataset for real-world face forgery detection", CVPR 2020.
"""

import re
from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.faces.faceforensics import sequence_groups, youtube_ids
from fvc_lib.corpus.sources.published import (
    Described,
    folders_in,
    read_lines,
    read_published,
    split_lists,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import command_text
from fvc_lib.services.registry import CORPORA

_NAME = re.compile(r"(\d{3})_([MW]\d+)\.\w+")


def read_deeperforensics(folder: AnyPath) -> Listing:
    """List ``manipulated_videos/``.

    Raises:
        DataError: one list of the official split is there without the others.
    """
    folder = Path(folder)
    youtube, lists = youtube_ids(folder), split_lists(folder, "lists/splits/{}.txt", "splits/{}.txt")
    # A line may begin with the variant's folder.
    split = {line.rsplit("/", 1)[-1]: part for part, path in lists.items() for line in read_lines(path) if line}
    both = command_text("-p", "corpus", "FACEFORENSICS", "-p", "more_corpora", "DEEPERFORENSICS")
    notes = [f"DeeperForensics has fakes only. Its reals are FaceForensics++'s originals at c23. Give both: {both}"]
    if not split:
        notes.append("lists/splits is not there, so there is no official split.")

    def described(path: str) -> Described | Refusal:
        _, variant, *_, name = path.split("/")
        found = _NAME.fullmatch(name)
        if found is None:
            return unknown_name(path, "target_actor such as 000_M101.mp4")
        groups = (*sequence_groups(found[1], youtube), f"deeperforensics actor {found[2]}")
        return Described("fake", groups, "DeeperForensics", None, split.get(name), {"variant": variant})

    tops = [f"manipulated_videos/{name}" for name in folders_in(folder / "manipulated_videos")]
    return read_published(folder, "deeperforensics", tops, described, notes)


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
