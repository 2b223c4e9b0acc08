"""Samples in tar files as WebDataset lays them out: members of one key, ``KEY.mp4`` beside ``KEY.json``, ``KEY.cls``
or ``KEY.txt``, where a key ends at the first dot of the member's last name.

A video is read where it lies. Of what stands beside it only short text is read, as UTF-8 and JSON; a member of another
kind is refused by its name, unread: nothing is ever unpickled.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fvc_lib.corpus.listing import CorpusFiles, Refusal, Rejections, is_named_as
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.errors import UsageError
from fvc_lib.video.decode.tar_members import SUFFIX, Member, members_of

_TEXTS = ("json", "cls", "txt")
_MOST_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class TarSample:
    """A video in a tar, and what stands beside it."""

    path: str  # table text, relative to the corpus: the tar's path and the member's
    cells: Mapping[str, str]  # what ``KEY.json`` says in text, numbers or booleans, by name
    label: str  # what is in ``KEY.cls``; empty: there is none
    text: str  # what is in ``KEY.txt``; empty: there is none
    refusal: Refusal | None = None  # why it cannot be used


def tars_in(corpus: Path) -> list[str]:
    """The names of the tars in a folder that are not hidden, or of ``corpus`` itself; sorted."""
    if corpus.is_file():
        return [corpus.name] if corpus.suffix.lower() == SUFFIX else []
    if not corpus.is_dir():
        return []
    found = (path for path in corpus.iterdir() if path.suffix.lower() == SUFFIX and path.is_file())
    return sorted(path.name for path in found if not path.name.startswith("."))


def tar_files(corpus: Path, allow_outside: bool | None = None) -> CorpusFiles:
    """The files of the folder that tars lie in, or that one tar does."""
    return CorpusFiles(corpus if corpus.is_dir() else corpus.parent, "video", allow_outside)


def tar_samples(corpus: Path, files: CorpusFiles, rejections: Rejections) -> list[TarSample]:
    """Every video in the tars of ``corpus``, tar by tar in their order; other members go into ``rejections``.

    Raises:
        UsageError: a tar cannot be read as a whole: cut, damaged or compressed.
    """
    samples = list[TarSample]()
    for name in tars_in(corpus):
        refusal = files.check(name)
        if refusal is not None:
            rejections.add_file(path_to_text(name), refusal)
            continue
        try:
            samples += _samples_of(name, members_of(files.root / name), rejections)
        except OSError as error:
            raise UsageError(
                f"corpus {str(corpus)!r}: the tar {name!r}: {error.strerror}. Fetch it again, or pack it anew, "
                f"uncompressed: tar -cf {name} ..."
            ) from error
    return samples


def _samples_of(tar: str, members: Mapping[str, Member | None], rejections: Rejections) -> Iterator[TarSample]:
    videos, beside = dict[str, str](), defaultdict[str, dict[str, Member]](dict)
    for name, member in members.items():
        key, kind = _key_of(name)
        place = path_to_text(f"{tar}/{name.lstrip('/')}")
        if member is None:
            detail = (
                f"{name!r} in {tar} was refused unread: a link, a device or a name that leads out. Pack plain files."
            )
            rejections.add_file(place, Refusal("not_a_file", detail))
        elif is_named_as("video", name):
            videos[name] = key
        elif kind in _TEXTS:
            beside[key][kind] = member
        else:
            detail = (
                f"{name!r} in {tar} was refused unread: read are videos, and beside them .json, .cls and .txt. Nothing "
                "is unpickled."
            )
            rejections.add_file(place, Refusal("unknown_extension", detail))
    for name, key in videos.items():
        yield _sample(tar, name, beside.get(key, {}))


def _key_of(name: str) -> tuple[str, str]:
    """Key and kind of a member: ``("a/b", "seg.mp4")`` of ``a/b.seg.mp4``."""
    path = PurePosixPath(name)
    stem, _, kind = path.name.partition(".")
    return str(path.with_name(stem or path.name)), kind.lower()


def _sample(tar: str, name: str, beside: Mapping[str, Member]) -> TarSample:
    path, said, cells = path_to_text(f"{tar}/{name}"), dict[str, str](), dict[str, str]()
    try:
        for kind, member in beside.items():
            if member.size_bytes > _MOST_TEXT_BYTES:
                raise ValueError(f"the .{kind} has {member.size_bytes:,} bytes, wanted at most {_MOST_TEXT_BYTES:,}")
            said[kind] = member.read().decode("utf-8-sig").strip()
        document = json.loads(said.get("json", "{}"))
        if not isinstance(document, dict):
            raise ValueError("the .json holds no object")
        cells = {str(each): str(value) for each, value in document.items() if isinstance(value, str | int | float)}
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        detail = f"{name!r} in {tar}: what stands beside it cannot be read: {error}. Write UTF-8 and JSON."
        return TarSample(path, {}, "", "", Refusal("malformed_row", detail))
    return TarSample(path, cells, said.get("cls", ""), said.get("txt", ""))
