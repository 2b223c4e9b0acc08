"""Celeb-DF v2 (and v1) and Celeb-DF++: celebrities swapped among each other.

``Celeb-real/idA_N.mp4`` and ``YouTube-real/N.mp4`` are real, ``Celeb-synthesis/idA_idB_N.mp4`` is idA_N with the face
of idB. ``List_of_testing_videos.txt`` has a line for each of 518 test videos, ``1 YouTube-real/00170.mp4``, where 1 is
*real*; its first line counts. All else is the training part, which has the people of the test part in it: the
official split is not one of people. Source: Li et al., "Celeb-DF: a large-scale challenging dataset for DeepFake
forensics", CVPR 2020.

Celeb-DF++ has the same reals, and fakes of 22 methods: ``Celeb-synthesis/FaceSwap/METHOD/idA_idB_N.mp4``, likewise in
``FaceReenact``, and ``TalkingFace/METHOD/idA_N_test_REF.mp4``, which names no second person. Its folders are those of
its own page; the names in them are those that public readers of the release expect. Source: Li et al., "Celeb-DF++: a
large-scale challenging video DeepFake benchmark for generalizable forensics", arXiv:2507.18015.
"""

import re
from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import (
    Described,
    first_of,
    listed_but_absent,
    read_lines,
    read_published,
    require,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

TEST_LIST = "List_of_testing_videos.txt"
_FOLDERS = {"Celeb-real": "real", "YouTube-real": "real", "Celeb-synthesis": "fake"}
_SCENARIOS = ("FaceSwap", "FaceReenact", "TalkingFace")  # folders of Celeb-DF++
_OF_VERSION_2 = ("Celeb-DF", "Celeb-DF-v2")  # folders in FaceSwap with the fakes of Celeb-DF
_LINE = re.compile(r"([01])\s+(\S.*)")
_FAKE = re.compile(r"(id\d+)_(?:(id\d+)_\d+|\d+_test_\w+)")


def read_celeb_df(folder: AnyPath) -> Listing:
    """List the three folders, with the official test part if its list is there.

    Raises:
        DataError: the list has a malformed line or a label that contradicts the folders.
    """
    folder = Path(folder)
    require(folder, "Celeb-DF", "Celeb-real")
    is_plus = first_of(folder, *(f"Celeb-synthesis/{name}" for name in _SCENARIOS)) is not None
    tested = _test_list(folder / TEST_LIST, is_plus=is_plus)
    notes = listed_but_absent(folder, TEST_LIST, tested) if tested else []
    if not tested:
        notes.append(f"{TEST_LIST} is not there, so there is no official split.")
    if not (folder / "YouTube-real").is_dir():
        notes.append("YouTube-real is not there: 300 reals and a part of the official test are missing.")
    known = {path_to_text(name) for name in tested}

    def described(path: str) -> Described | Refusal:
        found = _described(path, known)
        return replace(found, corpus="Celeb-DF++") if is_plus and isinstance(found, Described) else found

    return read_published(folder, "celeb_df", _FOLDERS, described, notes)


def _described(path: str, tested: set[str]) -> Described | Refusal:
    folder, *below, name = path.split("/")
    split = ("test" if path in tested else "train") if tested else None
    stem = name.rsplit(".", 1)[0]
    if folder == "YouTube-real" and re.fullmatch(r"\d+", stem):
        return Described("real", (f"celeb-df youtube {stem}",), None, "youtube", split)
    if folder == "Celeb-real" and (found := re.fullmatch(r"(id\d+)_\d+", stem)):
        return Described("real", (f"celeb-df {found[1]}",), None, "celebrities", split)
    if folder == "Celeb-synthesis" and (found := _FAKE.fullmatch(stem)):
        people = tuple(f"celeb-df {person}" for person in found.groups() if person)
        method = below[1] if len(below) > 1 and below[0] in _SCENARIOS else ""
        maker = "celeb-df synthesis" if method in ("", *_OF_VERSION_2) else method
        return Described("fake", people, maker, None, split, {"scenario": below[0]} if method else {})
    return unknown_name(
        path,
        "id0_0000.mp4 in Celeb-real, 00000.mp4 in YouTube-real, id0_id1_0000.mp4 in Celeb-synthesis or in its "
        "FaceSwap/METHOD",
    )


def _test_list(path: Path, *, is_plus: bool) -> list[str]:
    """Return the test videos. In the list of Celeb-DF++ labels are ignored: whether 1 means real is not documented."""
    if not path.is_file():
        return []
    names = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line:
            continue
        found = _LINE.fullmatch(line)
        label = _FOLDERS.get(found[2].split("/")[0]) if found else None
        if found is None or label is None:
            raise DataError(f"{path.name} line {number}: got {line!r}, wanted '1 YouTube-real/00170.mp4' (1 is real).")
        if not is_plus and ("real" if found[1] == "1" else "fake") != label:
            raise DataError(f"{path.name} line {number}: {line!r} contradicts its folder; 1 is real. Fetch it again.")
        names.append(found[2])
    return names


_BIBTEX = """@inproceedings{li2020celebdf,
  author = {Li, Yuezun and Yang, Xin and Sun, Pu and Qi, Honggang and Lyu, Siwei},
  title = {{Celeb-DF}: A Large-Scale Challenging Dataset for {DeepFake} Forensics},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year = {2020}
}"""

CORPORA.register(
    CorpusLoader(
        name="celeb_df",
        accepted="Celeb-DF: a folder with 'Celeb-real/', 'YouTube-real/' and 'Celeb-synthesis/'",
        recognises=lambda path: (path / "Celeb-real").is_dir() or (path / "Celeb-synthesis").is_dir(),
        read=read_celeb_df,
        title="Celeb-DF v2 or Celeb-DF++",
        corpus="Celeb-DF",
        expected={"real": "in 'Celeb-real' or 'YouTube-real'", "fake": "in 'Celeb-synthesis'"},
        paper="Li et al., CVPR 2020, arXiv:1909.12962; Celeb-DF++: Li et al., arXiv:2507.18015",
        licence="Celeb-DF terms: research only, on request",
        fetch="https://github.com/yuezunli/celeb-deepfakeforensics and https://github.com/OUC-VAS/Celeb-DF-PP (forms)",
        bibtex=_BIBTEX,
    )
)
