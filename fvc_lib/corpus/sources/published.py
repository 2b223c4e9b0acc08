"""Read published corpora by patterns of their paths, and by the lists that they come with.

A corpus is declared by a ``CorpusLoader``, and by ``Rule``s or a table of entries. ``read_published`` lists the videos.
A group is a leakage group: videos of the same source, which a split never divides. This module declares corpora of
videos that a generator made from text, pictures or videos:

- GenVideo: ``GenVideo-Val/Real/*`` are real and ``GenVideo-Val/Fake/GENERATOR/*`` are fake. Both are the official test
  part. Training archives have the same layout in a folder of any other name. No list states groups, so only
  near-duplicates form groups.
- GenVidBench: ``Pair{1,2}/SOURCE/*.mp4``, or ``SOURCE/SOURCE/*.mp4``. The sources vript (Pair1) and hd_vg_130m (Pair2)
  are real. A real belongs to the YouTube video whose id begins its file name. Videos of Pair2 whose names begin with
  the same number were made from the same prompt.
- AIGVDBench: ``Real/`` are real; ``OpenSource/{T2V,I2V,V2V}/MODEL/`` and ``ClosedSource/MODEL/`` are fake. A name
  begins with the YouTube id of the real clip behind it, ``YouTubeID_clip_AtoB.mp4``. Rows of train.jsonl, val.jsonl and
  test.jsonl have a ``Video_id``. The lists test and val share 110 of 2,953 YouTube videos.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from posixpath import dirname
from types import MappingProxyType
from typing import Any

from fvc_lib.corpus.corpus_files import CorpusFiles, Entry, Refusal, Rejections, some_of
from fvc_lib.corpus.listing import CorpusLoader, Listing, attributes_text, listing_of_files
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

PARTS = {"train": "train", "val": "validation", "test": "test"}  # official part by its name in published lists
Describe = Callable[..., Entry | Refusal | None]  # takes an escaped path and facts; returns None to skip the path
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Rule:
    """A rule that derives the label and other facts of a video from its path, for paths that match ``pattern``.

    The fields ``groups``, ``origin`` and ``listed`` are templates. In a template, ``{name}`` stands for the text that
    the regular expression's group ``(?P<name>...)`` matches, and ``{path}`` stands for the whole path.

    Attributes:
        pattern: regular expression for the whole path, relative to the corpus folder.
        label: real or fake; empty: the files are skipped.
        groups: leakage groups of the video; videos that share a group are never separated by a split.
        origin: the generator of a fake, or the source of a real video.
        listed: name of the video in the lists of the official split.
        attributes: names of regular expression groups in ``pattern`` whose texts are stored as further facts.
        corpus: name of the corpus if the layout holds several corpora.
    """

    pattern: str
    label: str
    groups: tuple[str, ...] = ()
    origin: str = ""
    listed: str = "{path}"
    attributes: tuple[str, ...] = ()
    corpus: str = ""


@dataclass(frozen=True)
class PathRules:
    """The rules that derive facts of a corpus's videos (label, groups, generator, ...) from the paths of their files.

    Attributes:
        wanted: examples of valid paths, for the text of a refusal.
        rules: the first rule that matches a path describes its video.
    """

    wanted: str
    rules: tuple[Rule, ...]

    def describe(
        self,
        path: str,
        parts: Mapping[str, str] = _NOTHING,
        other_part: str | None = None,
        also: Mapping[str, str] = _NOTHING,
    ) -> Entry | Refusal | None:
        """Return the entry (label, groups and other facts) of the video at a path, or None for a path to skip.

        A path that no rule matches gets a refusal.

        Args:
            path: path of the video, escaped as in tables (``path_to_text``).
            parts: official part of each video by its name in the lists.
            other_part: official part of videos that are in no list.
            also: maps a group to a further group to which all its videos belong.
        """
        matches = ((rule, match) for rule in self.rules if (match := re.fullmatch(rule.pattern, path)))
        for rule, match in matches:
            if not rule.label:
                return None
            fill = {"path": path, **match.groupdict()}
            groups = [group.format_map(fill) for group in rule.groups]
            groups += [also[group] for group in groups if group in also]
            part = parts.get(rule.listed.format_map(fill), other_part)
            attributes = {name: fill[name] for name in rule.attributes}
            return entry_of_video(path, rule.label, groups, rule.origin.format_map(fill), part, attributes, rule.corpus)
        return Refusal("unknown_name", f"{path!r}: wanted {self.wanted}. Restore its published name, or move it away.")


def entry_of_video(
    path: str,
    label: str,
    groups: Sequence[str],
    origin: str,
    part: str | None = None,
    attributes: Mapping[str, str] = _NOTHING,
    corpus: str = "",
) -> Entry:
    """Return the ``Entry`` of a video of a published corpus.

    Args:
        path: path of the video, escaped as in tables (``path_to_text``); also the source id.
        label: real or fake.
        groups: all leakage groups that the video belongs to; the first becomes the stated group.
        origin: the generator of a fake, or the source of a real video; may be empty.
        part: official part: train, validation, test or None.
        attributes: further facts.
        corpus: name of the corpus; empty: the name that the loader states.
    """
    maker = origin or None if label == "fake" else None
    return Entry(
        path=path,
        label=label,
        source_id=path,
        stated_group=next(iter(groups), None),
        manipulation=maker,
        generator=maker,
        real_source=origin if label == "real" else None,
        official_split=part,
        attributes=attributes_text(attributes),
        links=tuple(groups[1:]),
        corpus=corpus,
    )


def read_published(
    root: AnyPath,
    kind: str,
    folders: Iterable[str],
    describe: Describe,
    notes: Iterable[str] = (),
    *,
    pictures: bool = False,
    **facts: Any,
) -> Listing:
    """List the videos of a published corpus, with the facts that ``describe`` returns for each path.

    Args:
        root: folder of the corpus.
        kind: name of the loader.
        folders: folders below ``root`` to search; missing ones are skipped.
        describe: takes a path and ``facts``; returns the entry, or a refusal, or None to skip the file.
        notes: sentences for the user.
        pictures: whether the videos are folders of pictures instead of files.
        facts: further arguments of ``describe``, such as ``parts`` of ``PathRules.describe``.
    """
    files = CorpusFiles(root)
    rejections = Rejections()
    entries = list[Entry]()
    found = [path for folder in folders for path in files.walk(folder, rejections, pictures=pictures)]
    lists = (".json", ".jsonl", ".csv", ".txt")  # some releases have these among their videos
    rejections.rows = [row for row in rejections.rows if not row[0].endswith(lists)]
    for path in dict.fromkeys(map(dirname, found) if pictures else found):
        text = path_to_text(path)
        described = describe(text, **facts)
        refusal = files.check(path) if isinstance(described, Entry) else described
        if refusal is not None:
            rejections.add_file(text, refusal)
        elif isinstance(described, Entry):
            entries.append(described)
    if not any(entry.official_split for entry in entries):
        notes = [*notes, "There is no official split: its lists are not there, or the corpus has none."]
    return listing_of_files(files, kind, entries, rejections, notes)


def read_listed(
    root: Path, kind: str, folders: Iterable[str], source: str, entries: Mapping[str, Entry], notes: Iterable[str] = ()
) -> Listing:
    """List the videos of a published corpus that ``entries`` describes; reject all other videos.

    Args:
        root: folder of the corpus.
        kind: name of the loader.
        folders: folders below ``root`` to search.
        source: name of the list that the entries were read from, for messages.
        entries: the entry of each listed video by its path.
        notes: sentences for the user.
    """

    def describe(path: str) -> Entry | Refusal:
        return entries.get(path) or Refusal("not_listed", f"{path!r}: {source} does not name it.")

    return read_published(root, kind, folders, describe, [*listed_but_absent(root, source, entries), *notes])


def first_of(root: Path, *names: str) -> Path | None:
    """Return the path of the first of ``names`` that exists below ``root``; None if none does."""
    return next((root / name for name in names if (root / name).exists()), None)


def holds(*names: str) -> Callable[[Path], bool]:
    """Return a predicate of a folder: true if at least one of ``names`` (files or folders) exists in the folder."""
    return lambda folder: first_of(folder, *names) is not None


@contextmanager
def annotations(path: Path) -> Iterator[str]:
    """Return a context manager that yields the text of the file ``path``, a list that belongs to a corpus.

    Errors that occur while the text is read or used are turned into ``DataError``. Bytes that are not UTF-8 become
    surrogate escapes.

    Raises:
        DataError: the list cannot be read, or the code inside the context raises an error such as ``ValueError`` or
            ``KeyError``. The message names the list.
    """
    try:
        yield path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r}: is not as published ({error!r}). Fetch it again.") from error


def official_parts(folder: Path, names_in: Callable[[str], Iterable[str]], *patterns: str) -> dict[str, str]:
    """Map the name of each video in the three lists of an official split to its part: train, validation or test.

    The lists are searched by ``patterns``. The first pattern for which at least one list exists is used. The result is
    empty if there is no list. If a video is in several lists, test counts before validation, and validation before
    train. A pattern without ``{}`` names a list of the test part alone.

    Args:
        folder: folder of the corpus.
        names_in: returns the names in the text of a list.
        patterns: paths below ``folder`` in which ``{}`` stands for train, val or test.

    Raises:
        DataError: one or two of the lists are missing, or a list is damaged.
    """
    found = [pattern for pattern in patterns if first_of(folder, *map(pattern.format, PARTS))]
    parts = dict[str, str]()
    for pattern, (name, part) in product(found[:1], PARTS.items()):
        with annotations(folder / pattern.format(name)) as text:
            parts |= dict.fromkeys(names_in(text), part)
    return parts


def read_lines(path: AnyPath) -> list[str]:
    """Return the stripped lines of a text file, including empty lines.

    Raises:
        DataError: the file cannot be read.
    """
    with annotations(Path(path)) as text:
        return [line.strip() for line in text.splitlines()]


def listed_but_absent(root: Path, source: str, names: Iterable[str]) -> list[str]:
    """Return a list of one sentence that counts the listed videos without a file; an empty list if none is missing.

    Args:
        root: folder of the corpus.
        source: name of the file that lists the videos, for the sentence.
        names: paths of the listed videos, relative to ``root``.
    """
    absent = [name for name in names if not (root / name).is_file()]
    return [f"{len(absent):,} videos that {source} names are not there: {some_of(absent, 3)}."] if absent else []


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the folders in ``folder`` that are not hidden; empty if it does not exist."""
    return sorted(path.name for path in folder.glob("*/") if not path.name.startswith("."))


# --- Corpora of generated videos.

_VALIDATION = "GenVideo-Val"
_TOP = r"(?P<top>(?:(?!Real/|Fake/)[^/]+/)?)"
GENVIDEO = PathRules(
    "Fake/GENERATOR/NAME.mp4",
    (
        Rule(rf"{_TOP}Real/(?P<source>[^/]+)/.+", "real", origin="{source}", listed="{top}"),
        Rule(rf"{_TOP}Real/[^/]+", "real", origin="genvideo real", listed="{top}"),
        Rule(rf"{_TOP}Fake/(?P<model>[^/]+)/.+", "fake", origin="{model}", listed="{top}"),
    ),
)
_REALS = r"(?P<pair>Pair[12])/(?P<source>(?i:vript|hd_vg_130m))/(?:.*/)?"
# Rules for numbered names come first: 00012_a_boy_x begins with 11 characters before "_x", as a name with a YouTube id.
GENVIDBENCH = PathRules(
    "Pair1/SOURCE/NAME.mp4",
    (
        Rule(
            r"(?P<pair>Pair2)/(?P<source>(?i:vript|hd_vg_130m))/(?:.*/)?0*(?P<number>\d+)[._ -][^/]*", "real",
            ("genvidbench Pair2 prompt {number}",), origin="{source}", listed="{pair}",
        ),
        Rule(
            r"(?P<pair>Pair2)/(?P<source>[^/]+)/(?:.*/)?0*(?P<number>\d+)[._ -][^/]*", "fake",
            ("genvidbench Pair2 prompt {number}",), "{source}", listed="{pair}",
        ),
        Rule(
            _REALS + r"(?P<youtube>(?!\d{11})[A-Za-z0-9_-]{11})[._ -][^/]*", "real", ("youtube {youtube}",),
            origin="{source}", listed="{pair}",
        ),
        Rule(_REALS + "[^/]+", "real", origin="{source}", listed="{pair}"),
        Rule(r"(?P<pair>Pair[12])/(?P<source>[^/]+)/.+", "fake", origin="{source}", listed="{pair}"),
    ),
)  # fmt: skip
_CLIP = r"/(?:.*/)?(?P<name>(?P<youtube>[A-Za-z0-9_-]{11})_\S+)\.\w+"
AIGVDBENCH = PathRules(
    "Real/YouTubeID_clip_AtoB.mp4, OpenSource/T2V/MODEL/NAME.mp4 or ClosedSource/MODEL/NAME.mp4",
    (
        Rule(f"Real{_CLIP}", "real", ("youtube {youtube}",), origin="youtube", listed="{name}"),
        Rule(
            f"(?P<access>Open)Source/(?P<mode>T2V|I2V|V2V)/(?P<model>[^/]+){_CLIP}", "fake", ("youtube {youtube}",),
            "{model}", listed="{name}", attributes=("access", "mode"),
        ),
        Rule(
            f"(?P<access>Closed)Source/(?P<model>[^/]+){_CLIP}", "fake", ("youtube {youtube}",), "{model}",
            listed="{name}", attributes=("access",),
        ),
    ),
)  # fmt: skip


def read_genvideo(folder: Path) -> Listing:
    """List the videos of GenVideo.

    The folders ``Real`` (real videos) and ``Fake/GENERATOR`` (fakes) are searched in ``folder`` and in its direct
    subfolders. Videos in ``GenVideo-Val`` are the official test part.
    """
    tops = ["", *(f"{name}/" for name in folders_in(folder) if name not in ("Real", "Fake"))]
    other = "test" if folder.name == _VALIDATION else "train" if f"{_VALIDATION}/" in tops else None
    walked = [f"{top}{name}" for top in tops for name in ("Real", "Fake")]
    notes = ["Groups are made by looks alone: no list has any."]
    parts = {f"{_VALIDATION}/": "test"}
    return read_published(folder, "genvideo", walked, GENVIDEO.describe, notes, parts=parts, other_part=other)


def read_genvidbench(folder: Path) -> Listing:
    """List the videos of GenVidBench: Pair1 is the training part and Pair2 the test part, as the authors use them."""
    parts = {"Pair1": "train", "Pair2": "test"}
    return read_published(folder, "genvidbench", parts, GENVIDBENCH.describe, parts=parts)


def _clips_in(text: str) -> list[str]:
    """Return the names of the clips in a list of AIGVDBench, without folder and extension.

    ``text`` is the content of the list: one JSON object per line, with the name in ``Video_id``.
    """
    names = [json.loads(line)["Video_id"] for line in text.splitlines() if line.strip()]
    return [name.rsplit("/", 1)[-1].removesuffix(".mp4") for name in names]


def read_aigvdbench(folder: Path) -> Listing:
    """List the videos of AIGVDBench.

    A video in several lists belongs to the test part if the test list names it, else to validation.

    Raises:
        DataError: one of the three lists is missing, or a row of a list has no ``Video_id``.
    """
    parts = official_parts(folder, _clips_in, "{}.jsonl", "lists/{}.jsonl", "jsonl/{}.jsonl")
    tops = ("Real", "OpenSource", "ClosedSource")
    return read_published(folder, "aigvdbench", tops, AIGVDBENCH.describe, parts=parts)


CORPORA.register(
    CorpusLoader(
        name="aigvdbench",
        accepted="AIGVDBench: a folder with 'Real/', 'OpenSource/' and 'ClosedSource/'",
        recognises=holds("OpenSource", "ClosedSource"),
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
        recognises=holds("Pair1", "Pair2"),
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
        recognises=lambda folder: (
            (folder / _VALIDATION).is_dir() or (folder.name == _VALIDATION and (folder / "Fake").is_dir())
        ),
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
