"""AIGVDBench: 31 generators, each from the text, picture or video of one real clip.

``Real/`` are real; ``OpenSource/{T2V,I2V,V2V}/MODEL/`` and ``ClosedSource/MODEL/`` fake. The real clip that a video was
made from is in its name, ``YouTubeID_clip_AtoB.mp4``: the first 11 characters are the group. Its lists
train.jsonl, val.jsonl and test.jsonl have a ``Video_id`` in each row; test and val share 110 of 2,953 YouTube videos.
Source: the corpus's own page and lists.
"""

import json
import re
from pathlib import Path

from fvc_lib.corpus.listing import CorpusLoader, Listing, Refusal, some_of
from fvc_lib.corpus.sources.published import (
    Described,
    first_of,
    read_lines,
    read_published,
    require,
    shared_by_parts,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

_NAME = re.compile(r"(?P<youtube>[A-Za-z0-9_-]{11})_\S+")
_MODES = ("T2V", "I2V", "V2V")
_PARTS = {"train": "train", "val": "validation", "test": "test"}


def read_aigvdbench(folder: AnyPath) -> Listing:
    """The listing of ``Real/``, ``OpenSource/`` and ``ClosedSource/``.

    A video that two lists name is in the stricter one: test before validation before train.

    Raises:
        DataError: reals or fakes are missing, or a row of a list has no ``Video_id``.
    """
    folder = Path(folder)
    require(folder, "AIGVDBench", reals=("Real",), fakes=("OpenSource", "ClosedSource"))
    lists = {part: _listed(folder, name) for name, part in _PARTS.items()}
    split = {stem: part for part, stems in lists.items() for stem in stems}  # later parts win
    missing = [f"{name}.jsonl" for name in _PARTS if _list_of(folder, name) is None]
    notes = []
    if missing:
        lost = "the videos of the others alone have an official part" if split else "there is no official split"
        notes = [f"Missing: {some_of(missing)}; {lost}."]
    leaks = shared_by_parts({part: [stem[:11] for stem in stems] for part, stems in lists.items()})
    if leaks:
        notes.append(f"{len(leaks):,} YouTube videos lie in more than one part of the official split.")

    def described(path: str) -> Described | Refusal:
        parts = path.split("/")
        stem = parts[-1].rsplit(".", 1)[0]
        found = _NAME.fullmatch(stem)
        if found is None:
            return unknown_name(path, "YouTubeID_clip_AtoB.mp4")
        if len(parts) < 3 + (parts[1] in _MODES) and parts[0] != "Real":
            return unknown_name(path, "OpenSource/T2V/MODEL/NAME.mp4 or ClosedSource/MODEL/NAME.mp4")
        groups = (f"youtube {found['youtube']}",)
        if parts[0] == "Real":
            return Described("real", groups, None, "youtube", split.get(stem))
        mode, model = (parts[1], parts[2]) if parts[0] == "OpenSource" and len(parts) > 3 else ("", parts[1])
        attributes = {"access": "open" if parts[0] == "OpenSource" else "closed"} | ({"mode": mode} if mode else {})
        return Described("fake", groups, model, None, split.get(stem), attributes)

    return read_published(folder, "aigvdbench", ("Real", "OpenSource", "ClosedSource"), described, notes)


def _list_of(folder: Path, name: str) -> Path | None:
    return first_of(folder, f"{name}.jsonl", f"lists/{name}.jsonl", f"jsonl/{name}.jsonl")


def _listed(folder: Path, name: str) -> set[str]:
    """Names without extension of the videos of one part."""
    path = _list_of(folder, name)
    stems = set()
    for number, line in enumerate(read_lines(path) if path else [], start=1):
        if not line:
            continue
        try:
            stems.add(str(json.loads(line)["Video_id"]).rsplit("/", 1)[-1].removesuffix(".mp4"))
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f'{name}.jsonl line {number}: got {line[:80]!r}, wanted an object with "Video_id".'
            ) from None
    return stems


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
