"""Read published corpora of videos that a generator made from text, pictures or videos.

A group below is a leakage group, which a split never divides.

- GenVideo: ``GenVideo-Val/Real/*`` are real and ``GenVideo-Val/Fake/GENERATOR/*`` fake: the official test part.
  Training archives have the same layout in a folder of any other name. No list has groups, so groups are made of
  near-duplicates.
- GenVidBench: ``Pair{1,2}/SOURCE/*.mp4``, or ``SOURCE/SOURCE/*.mp4``. The sources vript (Pair1) and hd_vg_130m (Pair2)
  are real. ``PairN_labels.txt`` has lines ``path 0`` (real) or ``path 1`` (fake). A real belongs to the YouTube video
  that its name begins with. Videos of Pair2 that begin with one number were made from one prompt.
- AIGVDBench: ``Real/`` are real; ``OpenSource/{T2V,I2V,V2V}/MODEL/`` and ``ClosedSource/MODEL/`` are fake. A name
  begins with the YouTube id of the real clip behind it, ``YouTubeID_clip_AtoB.mp4``. Rows of train.jsonl, val.jsonl and
  test.jsonl have a ``Video_id``. The lists test and val share 110 of 2,953 YouTube videos.
"""

import json
import re
from pathlib import Path

from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import (
    Rule,
    by_rules,
    first_of,
    folders_in,
    listed_but_absent,
    read_lines,
    read_published,
    split_lists,
)
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

_VALIDATION = "GenVideo-Val"
_TOP = r"(?P<top>(?:(?!Real/|Fake/)[^/]+/)?)"
GENVIDEO_RULES = (
    Rule(rf"{_TOP}Real/(?P<source>[^/]+)/.+", "real", real_source="{source}", listed="{top}"),
    Rule(rf"{_TOP}Real/[^/]+", "real", real_source="genvideo real", listed="{top}"),
    Rule(rf"{_TOP}Fake/(?P<model>[^/]+)/.+", "fake", generator="{model}", listed="{top}"),
)
_REALS = r"(?P<pair>Pair[12])/(?P<source>(?i:vript|hd_vg_130m))/(?:.*/)?"
# An ordinal comes first: 00012_a_boy_x begins with 11 characters before "_x", as a YouTube id does.
GENVIDBENCH_RULES = (
    Rule(
        r"(?P<pair>Pair2)/(?P<source>(?i:vript|hd_vg_130m))/(?:.*/)?0*(?P<number>\d+)[._ -][^/]*", "real",
        ("genvidbench Pair2 prompt {number}",), real_source="{source}", listed="{pair}",
    ),
    Rule(
        r"(?P<pair>Pair2)/(?P<source>[^/]+)/(?:.*/)?0*(?P<number>\d+)[._ -][^/]*", "fake",
        ("genvidbench Pair2 prompt {number}",), "{source}", listed="{pair}",
    ),
    Rule(
        _REALS + r"(?P<youtube>(?!\d{11})[A-Za-z0-9_-]{11})[._ -][^/]*", "real", ("youtube {youtube}",),
        real_source="{source}", listed="{pair}",
    ),
    Rule(_REALS + "[^/]+", "real", real_source="{source}", listed="{pair}"),
    Rule(r"(?P<pair>Pair[12])/(?P<source>[^/]+)/.+", "fake", generator="{source}", listed="{pair}"),
)  # fmt: skip
_CLIP = r"/(?:.*/)?(?P<name>(?P<youtube>[A-Za-z0-9_-]{11})_\S+)\.\w+"
AIGVDBENCH_RULES = (
    Rule(f"Real{_CLIP}", "real", ("youtube {youtube}",), real_source="youtube", listed="{name}"),
    Rule(
        f"OpenSource/(?P<mode>T2V|I2V|V2V)/(?P<model>[^/]+){_CLIP}", "fake", ("youtube {youtube}",), "{model}",
        listed="{name}", attributes={"access": "open", "mode": "{mode}"},
    ),
    Rule(
        f"ClosedSource/(?P<model>[^/]+){_CLIP}", "fake", ("youtube {youtube}",), "{model}", listed="{name}",
        attributes={"access": "closed"},
    ),
)  # fmt: skip


def read_genvideo(folder: AnyPath) -> Listing:
    """List every ``Real/`` and ``Fake/GENERATOR/`` in the folder and in the folders directly below it."""
    folder = Path(folder)
    tops = ["", *(f"{name}/" for name in folders_in(folder) if name not in ("Real", "Fake"))]
    other = "test" if folder.name == _VALIDATION else "train" if f"{_VALIDATION}/" in tops else None
    describe = by_rules(GENVIDEO_RULES, "Fake/GENERATOR/NAME.mp4", {f"{_VALIDATION}/": "test"}, other)
    walked = [f"{top}{name}" for top in tops for name in ("Real", "Fake")]
    return read_published(folder, "genvideo", walked, describe, ["Groups are made by looks alone: no list has any."])


def read_genvidbench(folder: AnyPath) -> Listing:
    """List the videos of GenVidBench: Pair1 is the training part and Pair2 the test part, as the authors use them.

    Raises:
        DataError: a line of a list is malformed, or its label contradicts the folder.
    """
    folder, parts = Path(folder), {"Pair1": "train", "Pair2": "test"}
    listed, notes = list[str](), [f"{pair} is not there." for pair in parts if not (folder / pair).is_dir()]
    for pair in parts:
        path = first_of(folder, f"{pair}_labels.txt", f"{pair}/{pair}_labels.txt", f"labels/{pair}_labels.txt")
        for number, line in enumerate(read_lines(path) if path else (), start=1):
            match = re.fullmatch(rf"(?:\./)?(?:{pair}/)?(([^/]+)/.*?)[\s,]+([01])", line)
            if line and (match is None or (match[2].lower() in ("vript", "hd_vg_130m")) != (match[3] == "0")):
                wanted = "wanted 'path 0' of a real source (vript, hd_vg_130m), or 'path 1'"
                raise DataError(f"{pair}_labels.txt line {number}: got {line!r}, {wanted}. Fetch it again.")
            listed += [f"{pair}/{match[1]}"] if match else []
    notes += listed_but_absent(folder, "PairN_labels.txt", listed)
    describe = by_rules(GENVIDBENCH_RULES, "Pair1/SOURCE/NAME.mp4", parts)
    return read_published(folder, "genvidbench", parts, describe, notes)


def read_aigvdbench(folder: AnyPath) -> Listing:
    """List the videos of AIGVDBench.

    A video in several lists is put into the test part if that is among them, else into validation.

    Raises:
        DataError: one of the three lists is missing, or a row of a list has no ``Video_id``.
    """
    folder, parts = Path(folder), dict[str, str]()
    for part, path in split_lists(folder, "{}.jsonl", "lists/{}.jsonl", "jsonl/{}.jsonl").items():  # later parts win
        for number, line in enumerate(read_lines(path), start=1):
            try:
                names = [str(json.loads(line)["Video_id"])] if line else []
            except (ValueError, TypeError, KeyError):
                wanted = 'wanted an object with "Video_id". Fetch it again'
                raise DataError(f"{path.name} line {number}: got {line[:80]!r}, {wanted}.") from None
            parts.update({name.rsplit("/", 1)[-1].removesuffix(".mp4"): part for name in names})
    notes = [] if parts else ["train.jsonl, val.jsonl and test.jsonl are not there, so there is no official split."]
    wanted = "Real/YouTubeID_clip_AtoB.mp4, OpenSource/T2V/MODEL/NAME.mp4 or ClosedSource/MODEL/NAME.mp4"
    describe = by_rules(AIGVDBENCH_RULES, wanted, parts)
    return read_published(folder, "aigvdbench", ("Real", "OpenSource", "ClosedSource"), describe, notes)


def _is_genvideo(folder: Path) -> bool:
    has_fakes = folder.name == _VALIDATION and folders_in(folder / "Fake")
    return bool(has_fakes) or (folder / _VALIDATION).is_dir()


CORPORA.register(
    CorpusLoader(
        name="aigvdbench",
        accepted="AIGVDBench: a folder with 'Real/', 'OpenSource/' and 'ClosedSource/'",
        recognises=lambda path: (path / "OpenSource").is_dir() or (path / "ClosedSource").is_dir(),
        read=read_aigvdbench,
        title="AIGVDBench",
        corpus="AIGVDBench",
        expected={"real": "in 'Real'", "fake": "in 'OpenSource' or 'ClosedSource'"},
        paper="AIGVDBench, the corpus's own page",
        licence="as its page says",
        fetch="the authors' page; not fetched by FVC",
    )
)
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
        bibtex="""@article{ni2025genvidbench,
  title = {{GenVidBench}: A Challenging Benchmark for Detecting {AI}-Generated Video},
  author = {Ni, Zhenliang and others},
  journal = {arXiv preprint arXiv:2501.11340},
  year = {2025}
}""",
    )
)
CORPORA.register(
    CorpusLoader(
        name="genvideo",
        accepted=f"GenVideo: a folder with '{_VALIDATION}/Real/' and '{_VALIDATION}/Fake/GENERATOR/'",
        recognises=_is_genvideo,
        read=read_genvideo,
        title="GenVideo",
        corpus="GenVideo",
        expected={"real": "in 'GenVideo-Val/Real'", "fake": "in 'GenVideo-Val/Fake/GENERATOR'"},
        paper="Chen et al., arXiv:2405.19707",
        licence="CC BY-NC 4.0 as its page says; the sources' own terms hold too",
        fetch="https://github.com/chenhaoxing/DeMamba and https://modelscope.cn/datasets/cccnju/GenVideo-100K",
        bibtex="""@article{chen2024demamba,
  title = {{DeMamba}: {AI}-Generated Video Detection on Million-Scale {GenVideo} Benchmark},
  author = {Chen, Haoxing and others},
  journal = {arXiv preprint arXiv:2405.19707},
  year = {2024}
}""",
    )
)
