"""GenVidBench: two pairs of real source and generators, made to be trained on one and tested on the other.

``Pair{1,2}/SOURCE/*.mp4`` (or ``SOURCE/SOURCE/*.mp4``, as its archives unpack), and ``PairN_labels.txt`` with
``path 0`` (real) or ``path 1`` (fake). Reals are vript (Pair1) and hd_vg_130m (Pair2). A real belongs to the YouTube
video at the beginning of its name; fakes and reals of Pair2 that begin with one number were made from one prompt.
Source: Ni et al., "GenVidBench: a challenging benchmark for detecting AI-generated video", arXiv:2501.11340.
"""

import re
from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import (
    Described,
    first_of,
    listed_but_absent,
    read_lines,
    read_published,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

REALS = {"vript": "Pair1", "hd_vg_130m": "Pair2"}
_YOUTUBE = re.compile(r"(?P<id>[A-Za-z0-9_-]{11})(?=[._ -]|$)")
_ORDINAL = re.compile(r"(\d+)(?=[._ -])")
_LINE = re.compile(r"(\S.*?)[\s,]+([01])")


def read_genvidbench(folder: AnyPath) -> Listing:
    """List both pairs: Pair1 is the training part and Pair2 the test part, as the authors use them.

    Raises:
        DataError: a line of a list is none, or says of a real source that it is fake.
    """
    folder = Path(folder)
    pairs = [name for name in ("Pair1", "Pair2") if (folder / name).is_dir()]
    labels, notes = {}, []
    for pair in pairs:
        found = _labels(folder, pair)
        labels.update(found)
        if not found:
            notes.append(
                f"{pair}_labels.txt is not there; labels are those of the folders: {', '.join(REALS)} are real."
            )
    notes.extend(f"{name} is not there." for name in ("Pair1", "Pair2") if name not in pairs)
    notes.extend(listed_but_absent(folder, "PairN_labels.txt", labels))
    by_text = {path_to_text(path): label for path, label in labels.items()}
    return read_published(folder, "genvidbench", pairs, lambda path: _described(path, by_text), notes)


def _described(path: str, labels: dict[str, str]) -> Described | Refusal:
    pair, *below = path.split("/")
    if len(below) < 2:
        return unknown_name(path, "Pair1/SOURCE/NAME.mp4")
    source, name = below[0].lower(), below[-1]
    label = labels.get(path) or ("real" if source in REALS else "fake")
    split = "train" if pair == "Pair1" else "test"
    groups: tuple[str, ...] = ()
    if pair == "Pair2" and (ordinal := _ORDINAL.match(name)):  # first: 00012_a_boy_x has 11 characters before "_x", too
        groups = (f"genvidbench Pair2 prompt {int(ordinal[1])}",)
    elif label == "real" and (found := _YOUTUBE.match(name)) and not found["id"].isdigit():
        groups = (f"youtube {found['id']}",)
    if label == "real":
        return Described("real", groups, None, source, split)
    return Described("fake", groups, source, None, split)


def _labels(folder: Path, pair: str) -> dict[str, str]:
    """Return labels by path below the folder; a list's paths may begin at the folder or at the pair."""
    path = first_of(folder, f"{pair}_labels.txt", f"{pair}/{pair}_labels.txt", f"labels/{pair}_labels.txt")
    labels = {}
    for number, line in enumerate(read_lines(path) if path else [], start=1):
        if not line:
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise DataError(
                f"{pair}_labels.txt line {number}: got {line!r}, wanted 'path 0' (real) or 'path 1' (fake)."
            )
        name = found[1] if found[1].startswith(f"{pair}/") else f"{pair}/{found[1].lstrip('./')}"
        label = "fake" if found[2] == "1" else "real"
        source = name.split("/")[1].lower()
        if (source in REALS) != (label == "real"):
            raise DataError(f"{pair}_labels.txt line {number}: {line!r} contradicts {source}, which is not {label}.")
        labels[name] = label
    return labels


_BIBTEX = """@article{ni2025genvidbench,
  title = {{GenVidBench}: A Challenging Benchmark for Detecting {AI}-Generated Video},
  author = {Ni, Zhenliang and others},
  journal = {arXiv preprint arXiv:2501.11340},
  year = {2025}
}"""

CORPORA.register(
    CorpusLoader(
        name="genvidbench",
        accepted="GenVidBench: a folder with 'Pair1/' and 'Pair2/'",
        recognises=lambda path: (path / "Pair1").is_dir() or (path / "Pair2").is_dir(),
        read=read_genvidbench,
        title="GenVidBench",
        corpus="GenVidBench",
        expected={
            "real": "in 'Pair1/vript' or 'Pair2/hd_vg_130m'",
            "fake": "in 'Pair1/GENERATOR' or 'Pair2/GENERATOR'",
        },
        paper="Ni et al., arXiv:2501.11340",
        licence="CC BY-NC-SA 4.0 as its page says; the sources' own terms hold too",
        fetch="https://genvidbench.github.io",
        bibtex=_BIBTEX,
    )
)
