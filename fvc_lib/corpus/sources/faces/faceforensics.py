"""FaceForensics++ with FaceShifter, and DeepFakeDetection (DFD), which unpacks into the same tree.

``original_sequences/youtube/C/videos/TTT.mp4`` are real and ``manipulated_sequences/METHOD/C/videos/TTT_SSS.mp4`` fake,
at a compression C of raw (c0), c23 and c40: the face of sequence SSS on sequence TTT. DFD has
``original_sequences/actors/C/videos/AA__scene.mp4`` and
``manipulated_sequences/DeepFakeDetection/C/videos/AA_BB__scene__XXXXXXXX.mp4``.

A fake belongs to the groups of both sequences, and a sequence to the YouTube video that it was cut from
(``conversion_dict.json``): 1,000 sequences of 977 YouTube videos make 478 groups. Seven YouTube videos lie in two parts
of the official split. Source: Rossler et al., "FaceForensics++: learning to detect manipulated facial images", ICCV
2019; DFD: Dufour and Gully, 2019.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import (
    Described,
    first_of,
    read_json,
    read_published,
    split_lists,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

TITLE = "FaceForensics++"
_PATH = re.compile(
    r"(?P<kind>original|manipulated)_sequences/(?P<source>[^/]+)/(?P<compression>raw|c0|c23|c40)/videos/(?P<name>[^/]+)"
)
_SEQUENCE = re.compile(r"(\d{3})\.\w+")
_SWAP = re.compile(r"(\d{3})_(\d{3})\.\w+")
_ACTOR = re.compile(r"(\d{2})__(.+)\.\w+")
_ACTOR_SWAP = re.compile(r"(\d{2})_(\d{2})__(.+)__\w{8}\.\w+")


def read_faceforensics(folder: AnyPath) -> Listing:
    """List ``original_sequences/`` and ``manipulated_sequences/``.

    The lists of the official split (``splits/{train,val,test}.json``) and ``conversion_dict.json`` are searched in the
    folder, in ``splits/`` and in ``dataset/``, as in the authors' repository. Missing ones are noted.

    Raises:
        DataError: one list is there without the others, or a list is no JSON.
    """
    folder = Path(folder)
    youtube, split, notes = youtube_ids(folder), _official_parts(folder), []
    if (folder / "original_sequences/youtube").is_dir():
        if not youtube:
            notes.append(
                "conversion_dict.json is not there: 23 sequences that share their YouTube videos with others stay in "
                "groups of their own. Put it next to original_sequences."
            )
        if not split:
            notes.append("The lists train.json, val.json, test.json are not there, so there is no official split.")
    return read_published(
        folder,
        "faceforensics",
        ("original_sequences", "manipulated_sequences"),
        lambda path: _described(path, youtube, split),
        notes,
    )


def sequence_groups(name: str, youtube: Mapping[str, str]) -> tuple[str, ...]:
    """Return the groups of sequence ``name``: itself, and the YouTube video that it was cut from."""
    groups = (f"ff++ sequence {name}",)
    return (*groups, f"youtube {youtube[name]}") if name in youtube else groups


def youtube_ids(folder: Path) -> dict[str, str]:
    """Return the YouTube video of each sequence; empty without ``conversion_dict.json``."""
    path = first_of(folder, "conversion_dict.json", "dataset/conversion_dict.json", "splits/conversion_dict.json")
    table = read_json(path) if path else {}
    return {str(name).zfill(3): str(source).rsplit(" ", 1)[0] for name, source in table.items()}


def _official_parts(folder: Path) -> dict[str, str]:
    """Return the official part of each sequence; empty without the lists."""
    parts = {}
    for part, path in split_lists(
        folder, "splits/{}.json", "dataset/splits/{}.json", "{}.json", "split_{}.json"
    ).items():
        pairs = read_json(path, list)
        if not all(isinstance(pair, list) for pair in pairs):
            raise DataError(f'{str(path)!r}: wanted a list of pairs of sequences, such as ["953", "974"].')
        # Some copies of the lists hold 3 or "3" in place of "003".
        parts.update({str(sequence).zfill(3): part for pair in pairs for sequence in pair})
    return parts


def _described(path: str, youtube: Mapping[str, str], split: Mapping[str, str]) -> Described | Refusal | None:
    match = _PATH.fullmatch(path)
    if match is None:
        is_mask = "/masks/" in path or "/images/" in path
        return None if is_mask else unknown_name(path, "original_sequences/youtube/c23/videos/000.mp4 or the like")
    source, name = match["source"], match["name"]
    attributes = {"compression": "raw" if match["compression"] == "c0" else match["compression"]}
    if match["kind"] == "original":
        if found := _SEQUENCE.fullmatch(name):
            groups, part = sequence_groups(found[1], youtube), split.get(found[1])
            return Described("real", groups, None, source, part, attributes)
        if found := _ACTOR.fullmatch(name):
            return Described("real", (f"dfd actor {found[1]}",), None, source, None, attributes, "DFD")
        return unknown_name(path, "a sequence such as 000.mp4 or an actor's scene such as 01__kitchen_pan.mp4")
    if found := _SWAP.fullmatch(name):
        both = [each for key in found.groups() for each in sequence_groups(key, youtube)]
        return Described("fake", both, source, None, split.get(found[1]), attributes)
    if found := _ACTOR_SWAP.fullmatch(name):
        actors = (f"dfd actor {found[1]}", f"dfd actor {found[2]}")
        return Described("fake", actors, source, None, None, attributes, "DFD")
    return unknown_name(path, "target_source such as 000_003.mp4")


def _lacks(path: Path) -> str:
    there = first_of(path, "original_sequences", "manipulated_sequences")
    return f"has {there.name} alone, wanted original_sequences and manipulated_sequences." if there else ""


_BIBTEX = r"""@inproceedings{roessler2019faceforensics,
  author = {R{\"o}ssler, Andreas and Cozzolino, Davide and Verdoliva, Luisa and Riess, Christian and Thies, Justus and
            Nie{\ss}ner, Matthias},
  title = {{FaceForensics++}: Learning to Detect Manipulated Facial Images},
  booktitle = {IEEE/CVF International Conference on Computer Vision (ICCV)},
  year = {2019}
}"""

CORPORA.register(
    CorpusLoader(
        name="faceforensics",
        accepted=f"{TITLE} or DFD: a folder with 'original_sequences/' and 'manipulated_sequences/'",
        recognises=lambda path: (path / "original_sequences").is_dir() or (path / "manipulated_sequences").is_dir(),
        read=read_faceforensics,
        lacks=_lacks,
        title="FaceForensics++ (with FaceShifter) and DeepFakeDetection",
        corpus="FaceForensics++",
        expected={
            "real": "in 'original_sequences/youtube/c23/videos' or the like",
            "fake": "in 'manipulated_sequences/Deepfakes/c23/videos' or the like",
        },
        paper="Rossler et al., ICCV 2019, arXiv:1901.08971",
        licence="FaceForensics terms of use: research only, on request",
        fetch="https://github.com/ondyari/FaceForensics (a form); its dataset/ has splits/ and conversion_dict.json",
        bibtex=_BIBTEX,
    )
)
