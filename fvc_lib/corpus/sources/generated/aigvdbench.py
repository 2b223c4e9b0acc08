"""AIGVDBench: 31 generators, each from the text, picture or video of one real clip.

``Real/`` are real; ``OpenSource/{T2V,I2V,V2V}/MODEL/`` and ``ClosedSource/MODEL/`` fake. The real clip that a video was
made from is in its name, ``YouTubeID_clip_AtoB.mp4``: the first 11 characters are the group. Its lists
train.jsonl, val.jsonl and test.jsonl have a ``Video_id`` in each row; test and val share 110 of 2,953 YouTube videos.
Source: the corpus's own page and lists.
"""

import json
import re
from pathlib import Path

from fvc_lib.corpus.corpus_files import Refusal
from fvc_lib.corpus.listing import CorpusLoader, Listing
from fvc_lib.corpus.sources.published import (
    Described,
    read_lines,
    read_published,
    split_lists,
    unknown_name,
)
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.errors import DataError
from fvc_lib.services.registry import CORPORA

_NAME = re.compile(r"(?P<youtube>[A-Za-z0-9_-]{11})_\S+")
_MODES = ("T2V", "I2V", "V2V")


def read_aigvdbench(folder: AnyPath) -> Listing:
    """List ``Real/``, ``OpenSource/`` and ``ClosedSource/``.

    A video in two lists is in the stricter one: test before validation before train.

    Raises:
        DataError: one of the three lists is missing, or a row of a list has no ``Video_id``.
    """
    folder = Path(folder)
    lists = split_lists(folder, "{}.jsonl", "lists/{}.jsonl", "jsonl/{}.jsonl")
    split = {stem: part for part, path in lists.items() for stem in _listed(path)}  # later parts win
    notes = [] if lists else ["train.jsonl, val.jsonl and test.jsonl are not there, so there is no official split."]

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


def _listed(path: Path) -> set[str]:
    """Return the names of the listed videos without extension."""
    stems = set[str]()
    for number, line in enumerate(read_lines(path), start=1):
        try:
            stems.update({str(json.loads(line)["Video_id"]).rsplit("/", 1)[-1].removesuffix(".mp4")} if line else ())
        except (ValueError, TypeError, KeyError):
            wanted = 'wanted an object with "Video_id"'
            raise DataError(f"{path.name} line {number}: got {line[:80]!r}, {wanted}.") from None
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
