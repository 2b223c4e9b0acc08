"""WildDeepfake: faces cut out of videos from the internet, as sequences of pictures.

``{real,fake}_{train,test}/N.tar.gz`` unpack to ``N/{real,fake}/M/*.png``: archive N, sequence M. A sequence is a video
here; its pictures state no rate. What the archives have in common is published nowhere: an archive is taken for one
group, as which its sequences seem to be of one video, and looks tie the others. The layout was written from what
readers of the release expect of it (``N/{real,fake}/M/*.png`` behind each archive, an outer folder
``deepfake_in_the_wild``); the archives were not at hand. Source: Zi et al., "WildDeepfake: a challenging real-world
dataset for deepfake detection", ACM Multimedia 2020.
"""

import re
from pathlib import Path

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections
from fvc_lib.corpus.listing import CorpusLoader, Listing, listing_of_files
from fvc_lib.corpus.sources.published import folders_in, unknown_name
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA
from fvc_lib.video.decode.file_parts import picture_names

_PARTS = tuple(f"{label}_{part}" for label in ("real", "fake") for part in ("train", "test"))
_OUTER = "deepfake_in_the_wild"
_SEQUENCE = re.compile(r"((real|fake)_(train|test))/([^/]+)/(real|fake)/([^/]+)")


def read_wilddeepfake(folder: AnyPath) -> Listing:
    """List the sequences of pictures, with official parts by folder.

    Raises:
        DataError: no archive is unpacked.
    """
    folder = Path(folder)
    top = folder / _OUTER if (folder / _OUTER).is_dir() else folder
    files, rejections, entries, packed = CorpusFiles(top), Rejections(), [], []
    notes = [f"{part} is not there." for part in _PARTS if not (top / part).is_dir()]
    for part in _PARTS:
        folders = folders_in(top / part)
        packed += [name for name in _archives(top / part) if name.removesuffix(".tar.gz") not in folders]
        for below in sorted({Path(path).parent for path, is_link in files.walk_all(part) if not is_link}):
            path = path_to_text(below)
            if not picture_names(top / below):
                continue
            refusal = files.check(str(below))
            entry = refusal or _described(path)
            if isinstance(entry, Refusal):
                rejections.add_file(path, entry)
            else:
                entries.append(entry)
    if packed and not entries:
        raise DataError(
            f"corpus {str(top)!r}: looks like WildDeepfake, but {len(packed):,} archives are not unpacked: expected "
            f"{packed[0].removesuffix('.tar.gz')}/.../*.png next to {packed[0]}. Unpack each where it lies: tar -xzf."
        )
    if packed:
        notes.append(f"{len(packed):,} archives are not unpacked and not used, {packed[0]} among them.")
    notes.append("Archives are taken for groups, because nothing says which sequences are of one video.")
    return listing_of_files(files, "wilddeepfake", entries, rejections, notes)


def _archives(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.tar.gz")) if folder.is_dir() else []


def _described(path: str) -> Entry | Refusal:
    found = _SEQUENCE.fullmatch(path)
    if found is None or found[2] != found[5]:
        return unknown_name(path, "a folder of pictures such as real_train/1/real/3")
    return Entry(
        path=path,
        label=found[2],
        source_id=path,
        stated_group=f"wilddeepfake {found[1]} {found[4]}",
        real_source="internet" if found[2] == "real" else None,
        official_split=found[3],
    )


_BIBTEX = """@inproceedings{zi2020wilddeepfake,
  author = {Zi, Bojia and Chang, Minghao and Chen, Jingjing and Ma, Xingjun and Jiang, Yu-Gang},
  title = {{WildDeepfake}: A Challenging Real-World Dataset for Deepfake Detection},
  booktitle = {ACM International Conference on Multimedia},
  year = {2020}
}"""

CORPORA.register(
    CorpusLoader(
        name="wilddeepfake",
        accepted="WildDeepfake: a folder with 'real_train/', 'fake_train/' ... and unpacked archives in them",
        recognises=lambda path: any(
            (path / outer / f"real_{part}").is_dir() or (path / outer / f"fake_{part}").is_dir()
            for outer in ("", _OUTER)
            for part in ("train", "test")
        ),
        read=read_wilddeepfake,
        title="WildDeepfake",
        corpus="WildDeepfake",
        expected={"real": "in 'real_train/N/real/M'", "fake": "in 'fake_train/N/fake/M'"},
        paper="Zi et al., ACM Multimedia 2020, arXiv:2101.01456",
        licence="the terms on its page",
        fetch="https://github.com/OpenTAI/wild-deepfake or https://huggingface.co/datasets/xingjunm/WildDeepfake",
        bibtex=_BIBTEX,
    )
)
