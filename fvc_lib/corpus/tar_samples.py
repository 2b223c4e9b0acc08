"""Samples in tar files as WebDataset lays them out: members of one key, ``KEY.mp4`` beside ``KEY.json``, ``KEY.cls``
or ``KEY.txt``, where a key ends at the first dot of the member's last name.

A video is read where it lies. Of what stands beside it only short text is read, as UTF-8 and JSON; a member of another
kind is refused by its name, unread: nothing is ever unpickled. A tar that is cut gives what lies whole before the cut.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, Rejections, is_named_as, some_of
from fvc_lib.corpus.frame_names import is_picture
from fvc_lib.services.atomic_files import message_text, path_to_text
from fvc_lib.services.tar_patterns import SUFFIX, fixed_folder, is_pattern, tars_of
from fvc_lib.video.decode.file_parts import Contents, FilePart, contents_of

# What is read beside a video, and at most how many bytes of it; what yt-dlp says of one fills up to about a MiB.
_TEXTS = {"json": 4 << 20, "txt": 1 << 20, "cls": 1 << 10}
_COMPRESSED = (".tgz", *(f"{SUFFIX}.{kind}" for kind in ("gz", "bz2", "xz", "zst")))


@dataclass(frozen=True)
class TarSample:
    """A video in a tar, or where it should be, and what stands beside it."""

    path: str  # table text, relative to the corpus: the tar's path and the member's
    cells: Mapping[str, str]  # what ``KEY.json`` says in text, numbers or booleans, by name in lower case
    label: str  # what is in ``KEY.cls``; empty: there is none
    text: str  # what is in ``KEY.txt``; empty: there is none
    links: tuple[str, ...] = ()  # groups that it is in by how the tars were made
    refusal: Refusal | None = None  # why it cannot be used


def tars_in(corpus: Path) -> list[str]:
    """The names of the tars of ``corpus``, which is one, a pattern or a folder: those in it that are not hidden.

    They are relative to the folder of ``tar_files``, sorted; compressed ones, which cannot be read, are among them.

    Raises:
        UsageError: it is a pattern, and as ``tar_patterns.tars_of``.
    """
    if is_pattern(corpus):
        folder = fixed_folder(corpus)
        return [str(tar.relative_to(folder)) for tar in tars_of(corpus)]
    names = [corpus.name] if corpus.is_file() else os.listdir(corpus) if corpus.is_dir() else []  # noqa: PTH208 - names
    folder = corpus if corpus.is_dir() else corpus.parent
    ours = (name for name in names if name.lower().endswith((SUFFIX, *_COMPRESSED)) and not name.startswith("."))
    return sorted(name for name in ours if (folder / name).is_file())


def tar_files(corpus: Path, allow_outside: bool | None = None) -> CorpusFiles:
    """The files of the folder that tars lie in: the corpus, that of one tar, or what a pattern begins with."""
    folder = fixed_folder(corpus) if is_pattern(corpus) else corpus if corpus.is_dir() else corpus.parent
    return CorpusFiles(folder, "video", allow_outside)


def tar_samples(
    corpus: Path, files: CorpusFiles, rejections: Rejections, *, pictures: bool = False
) -> tuple[list[TarSample], tuple[str, ...]]:
    """Every sample in the tars of ``corpus``, tar by tar in their order, and a note on tars that are not whole.

    With ``pictures`` each still picture that lies beside no video of its key is a sample, too; what stands beside its
    folder, as ``KEY.cls`` beside ``KEY/000.png``, stands beside each picture that has nothing of its own.

    Other members, and tars that are cut, damaged or compressed, go into ``rejections``.

    Raises:
        UsageError: as ``tars_in``.
    """
    samples, names, damaged = list[TarSample](), tars_in(corpus), list[str]()
    for name in names:
        place, contents = path_to_text(name), Contents({}, {})
        refusal = files.check(name)
        if refusal is None:
            try:
                contents = contents_of(files.root / name)
                files.look(len(contents.members))
            except OSError as error:
                shown = f"the tar {name!r} {error.strerror}. Fetch it again, or unpack it (gunzip) and pack plain tars."
                refusal = Refusal("unreadable", shown)
        if contents.damage:
            where = f"the tar {name!r} is cut or damaged ({contents.damage})"
            used = f"{len(contents.members):,} members before that are used, but for the sample of {contents.last!r}"
            refusal = Refusal("truncated", f"{where}: {used}. Fetch it again.")
        if refusal is not None:
            rejections.add_file(place, refusal)
            damaged.append(name)
        samples += _samples_of(name, contents, rejections, pictures=pictures)
    if not damaged:
        return samples, ()
    note = (
        f"{len(damaged):,} of {len(names):,} tars cannot be read, or not to their end: {some_of(damaged, 5)}. How many "
        "videos that costs is not known; fetch them again, or unpack those that are compressed (gunzip)."
    )
    return samples, (message_text(note),)


def _samples_of(tar: str, contents: Contents, rejections: Rejections, *, pictures: bool) -> Iterator[TarSample]:
    videos, beside = (defaultdict[str, dict[str, FilePart | str]](dict) for _ in range(2))
    with_video = {_key_of(name)[0] for name in contents.members if is_named_as("video", name)}
    for name, member in contents.members.items():
        key, kind = _key_of(name)
        place = path_to_text(f"{tar}/{name.lstrip('/')}")
        if any(part.startswith(".") for part in name.split("/") if part != os.pardir):
            continue  # never meant, as in folders: macOS puts ._clip.mp4 beside clip.mp4
        if is_named_as("video", name) or (pictures and is_picture(name) and key not in with_video):
            videos[key][name] = member
        elif kind in _TEXTS:
            beside[key][kind] = "is there more than once, as .CLS beside .cls" if kind in beside[key] else member
        elif isinstance(member, str):
            rejections.add_file(place, _refused(tar, name, member))
        else:
            detail = (
                f"{name!r} in {tar} was refused unread: read are videos, and beside them .json, .cls and .txt. Nothing "
                "is unpickled."
            )
            if kind.endswith(tuple(f".{each}" for each in _TEXTS)):
                detail = f"{name!r} in {tar}: a key ends at the first dot, here as {key!r}. Put no dots into keys."
            rejections.add_file(place, Refusal("unknown_extension", detail))
    cut = _key_of(contents.last)[0] if contents.damage else None
    # Pictures share what stands beside their folder, and its fate where the tar is cut.
    of_folder = {key: key.rpartition("/")[0] for key, names in videos.items() if is_picture(next(iter(names)))}
    used, cut_too = set(of_folder.values()), {cut, cut and cut.rpartition("/")[0]} - {""}
    for key in list(dict.fromkeys((*videos, *(key for key in beside if key not in used)))):
        folder = of_folder.get(key, "")
        yield from _sample(tar, key, videos[key], beside[key] or beside[folder], is_cut=key == cut or folder in cut_too)


def _refused(tar: str, name: str, why: str) -> Refusal:
    return Refusal("not_a_file", f"{name!r} in {tar} was refused unread: it {why}. Pack plain files, each once.")


def _key_of(name: str) -> tuple[str, str]:
    """Key and kind of a member: ``("a/b", "seg.mp4")`` of ``a/b.seg.mp4``."""
    path = PurePosixPath(name)
    stem, _, kind = path.name.partition(".")
    return (str(path.with_name(stem)) if stem else name), kind.lower()


def _sample(
    tar: str, key: str, videos: Mapping[str, FilePart | str], beside: Mapping[str, FilePart | str], *, is_cut: bool
) -> Iterator[TarSample]:
    """One for each video of a key, or one that is refused."""
    said, cells, refusal = dict[str, str](), dict[str, str](), None
    try:
        for kind, member in beside.items():
            if isinstance(member, str):
                raise ValueError(f"the .{kind} {member}")
            if member.size_bytes > _TEXTS[kind]:
                raise ValueError(f"the .{kind} has {member.size_bytes:,} bytes, wanted at most {_TEXTS[kind]:,}")
            said[kind] = member.read().decode("utf-8-sig").strip()
        document = json.loads(said.get("json", "{}"), object_pairs_hook=_each_once)
        if not isinstance(document, dict):
            raise ValueError("the .json holds no object")
        plain = [(name.lower(), str(value)) for name, value in document.items() if isinstance(value, str | int | float)]
        written = _each_once(plain)
        "".join((*written, *written.values())).encode()  # half of a pair such as "\\ud800" is no text
        cells = written
    except (ValueError, RecursionError, OSError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        detail = (
            f"{key!r} in {tar}: what stands beside its video cannot be read: {error}. Write UTF-8 and JSON, each once."
        )
        refusal = Refusal("malformed_row", detail)
    if is_cut:
        refusal = Refusal("truncated", f"{key!r} in {tar}: the tar is cut or damaged within it. Fetch the tar again.")
    if not videos:
        status = f"; its status is {cells['status']!r}" if cells.get("status", "success") != "success" else ""
        kinds = ", ".join(f".{kind}" for kind in beside)
        detail = f"{key!r} in {tar} has {kinds} and no video{status}. Fetch it again."
        refusal = refusal or Refusal("missing_video", detail)
    links = [f"sample {tar}/{key}"] if len(videos) > 1 else []
    if cells.get("url") and {"key", "status"} <= cells.keys():  # video2dataset's: clips of one video share it
        links.append(f"url {cells['url']}")
    for name, why in videos.items() or [(key, None)]:
        path, shared = path_to_text(f"{tar}/{name}"), tuple(map(path_to_text, links))
        refused = refusal or (_refused(tar, name, why) if isinstance(why, str) else None)
        yield TarSample(path, cells, said.get("cls", ""), said.get("txt", ""), shared, refused)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} is in the .json more than once")
    return dict(pairs)
