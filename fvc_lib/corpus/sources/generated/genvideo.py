"""GenVideo: videos of many text-to-video generators, and real ones.

``GenVideo-Val/Real/*`` are real and ``GenVideo-Val/Fake/GENERATOR/*`` fake: the official test part. Training archives
have ``Real/`` and ``Fake/GENERATOR/`` in the same way, in a folder of any other name. Nothing says which videos belong
together, so groups are made by looks alone. Source: Chen et al., "DeMamba: AI-generated video detection on
million-scale GenVideo benchmark", arXiv:2405.19707.
"""

from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal, joined
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import Described, folders_in, read_published, unknown_name
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.registry import CORPORA

VALIDATION = "GenVideo-Val"


def read_genvideo(folder: AnyPath) -> Listing:
    """List every ``Real/`` and ``Fake/GENERATOR/`` in the folder and in the folders directly below it."""
    folder = Path(folder)
    tops = _tops(folder)
    has_test = folder.name == VALIDATION or VALIDATION in tops

    def described(path: str) -> Described | Refusal:
        top = max((top for top in tops if not top or path.startswith(f"{top}/")), key=len)
        below = path[len(top) + 1 if top else 0 :].split("/")
        is_test = VALIDATION in (top, folder.name)
        split = ("test" if is_test else "train") if has_test else None
        if below[0] == "Real":
            return Described("real", (), None, below[1] if len(below) > 2 else "genvideo real", split)
        if len(below) < 3:
            return unknown_name(path, "Fake/GENERATOR/NAME.mp4")
        return Described("fake", (), below[1], None, split)

    walked = [joined(top, name) for top in tops for name in ("Real", "Fake")]
    return read_published(folder, "genvideo", walked, described, ["Groups are made by looks alone: no list has any."])


def _tops(folder: Path) -> list[str]:
    """Return the folders of ``Real`` or ``Fake/GENERATOR``: the folder itself or folders in it."""
    return [
        name
        for name in ("", *folders_in(folder))
        if name not in ("Real", "Fake") and ((folder / name / "Real").is_dir() or folders_in(folder / name / "Fake"))
    ]


def _recognises(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    if folder.name == VALIDATION:
        return bool(folders_in(folder / "Fake"))
    return VALIDATION in folders_in(folder)


_BIBTEX = """@article{chen2024demamba,
  title = {{DeMamba}: {AI}-Generated Video Detection on Million-Scale {GenVideo} Benchmark},
  author = {Chen, Haoxing and others},
  journal = {arXiv preprint arXiv:2405.19707},
  year = {2024}
}"""

CORPORA.register(
    CorpusLoader(
        name="genvideo",
        accepted=f"GenVideo: a folder with '{VALIDATION}/Real/' and '{VALIDATION}/Fake/GENERATOR/'",
        recognises=_recognises,
        read=read_genvideo,
        title="GenVideo",
        corpus="GenVideo",
        expected={"real": "in 'GenVideo-Val/Real'", "fake": "in 'GenVideo-Val/Fake/GENERATOR'"},
        paper="Chen et al., arXiv:2405.19707",
        licence="CC BY-NC 4.0 as its page says; the sources' own terms hold too",
        fetch="https://github.com/chenhaoxing/DeMamba and https://modelscope.cn/datasets/cccnju/GenVideo-100K",
        bibtex=_BIBTEX,
    )
)
