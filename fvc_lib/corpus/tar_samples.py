"""Samples in tar files in WebDataset's layout: ``KEY.mp4`` with ``KEY.json``, ``KEY.cls`` or ``KEY.txt``.

A sample is all members (files in the tar) with the same key. The key is the member's path up to the first dot of the
file name. Videos are read in place, by their offset in the tar. Of other members only short UTF-8 texts and JSON are
read. All others are refused by their name, without being read, so nothing is ever unpickled. A truncated tar gives the
samples before the cut.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, Rejections, is_named_as, some_of
from fvc_lib.corpus.frame_names import is_picture
from fvc_lib.services.atomic_files import message_text, path_to_text
from fvc_lib.services.tar_patterns import SUFFIX, fixed_folder, is_pattern, tars_of
from fvc_lib.video.decode.file_parts import Contents, FilePart, contents_of

# Kinds of texts and their largest sizes in bytes; metadata of yt-dlp has up to about a MiB.
_TEXTS = {"json": 4 << 20, "txt": 1 << 20, "cls": 1 << 10}
_COMPRESSED = (".tgz", *(f"{SUFFIX}.{kind}" for kind in ("gz", "bz2", "xz", "zst")))


@dataclass(frozen=True)
class TarSample:
    """A video in a tar with its texts, or a key without a video."""

    path: str  # table text, relative to the corpus: the tar's path and the member's
    cells: Mapping[str, str]  # scalars of ``KEY.json`` as text, by name in lower case
    label: str  # content of ``KEY.cls``, or empty
    text: str  # content of ``KEY.txt``, or empty
    links: tuple[str, ...] = ()  # leakage groups that the video belongs to
    refusal: Refusal | None = None


def tars_in(corpus: Path) -> list[str]:
    """Return the sorted names of the tars of ``corpus``: a tar, a folder of tars, or a pattern.

    Names are relative to ``tar_folder``. Hidden files are left out. Compressed tars are included, although they cannot
    be read.

    Raises:
        UsageError: the pattern is unusable (see ``tar_patterns.tars_of``).
    """
    folder = tar_folder(corpus)
    if is_pattern(corpus):
        return [str(tar.relative_to(folder)) for tar in tars_of(corpus)]
    names = [corpus.name] if corpus.is_file() else os.listdir(corpus) if corpus.is_dir() else []  # noqa: PTH208 - names
    ours = (name for name in names if name.lower().endswith((SUFFIX, *_COMPRESSED)) and not name.startswith("."))
    return sorted(name for name in ours if (folder / name).is_file())


def tar_folder(corpus: Path) -> Path:
    """Return the folder of the tars: ``corpus`` itself, the folder of a single tar, or the fixed start of a pattern."""
    return fixed_folder(corpus) if is_pattern(corpus) else corpus if corpus.is_dir() else corpus.parent


def tar_files(corpus: Path, allow_outside: bool | None = None) -> CorpusFiles:
    """Return the access to the files in ``tar_folder(corpus)``."""
    return CorpusFiles(tar_folder(corpus), "video", allow_outside)


def tar_samples(
    corpus: Path, files: CorpusFiles, rejections: Rejections, *, pictures: bool = False
) -> tuple[list[TarSample], tuple[str, ...]]:
    """Return (samples, notes): every sample in the tars of ``corpus``, and at most one note, on damaged tars.

    With ``pictures``, a still picture whose key has no video is a sample, too. If its key has no texts, it gets those
    of its folder: ``KEY.cls`` is the text of ``KEY/000.png``.

    Raises:
        UsageError: the pattern is unusable (see ``tar_patterns.tars_of``).
    """
    samples, names, damaged = list[TarSample](), tars_in(corpus), list[str]()
    for name in names:
        contents, refusal = Contents({}, {}), files.check(name)
        if refusal is None:
            try:
                contents = contents_of(files.root / name)
                files.look(len(contents.members))
            except OSError as error:
                advice = "Fetch it again, or unpack it (gunzip) and pack plain tars."
                refusal = Refusal("unreadable", f"the tar {name!r} {error.strerror}. {advice}")
        if contents.damage:
            used = f"{len(contents.members):,} members before that are used"
            where = f"the tar {name!r} is cut or damaged ({contents.damage})"
            refusal = Refusal("truncated", f"{where}: {used}. Fetch it again.")
        if refusal is not None:
            rejections.add_file(path_to_text(name), refusal)
            damaged.append(name)
        samples += _samples_of(name, contents, rejections, pictures=pictures)
    if not damaged:
        return samples, ()
    note = f"{len(damaged):,} of {len(names):,} tars cannot be read, or not to their end: {some_of(damaged, 5)}."
    return samples, (message_text(f"{note} How many videos that costs is not known; fetch them again."),)


def _samples_of(tar: str, contents: Contents, rejections: Rejections, *, pictures: bool) -> Iterator[TarSample]:
    videos, texts = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)  # names of members by key
    with_video = {_key_of(name)[0] for name in contents.members if is_named_as("video", name)}
    for name, member in contents.members.items():
        key, kind = _key_of(name)
        if any(part.startswith(".") for part in name.split("/") if part != os.pardir):
            continue  # hidden: macOS puts ._clip.mp4 next to clip.mp4
        if is_named_as("video", name) or (pictures and is_picture(name) and key not in with_video):
            videos[key].append(name)
        elif kind in _TEXTS:
            texts[key].append(name)
        else:
            refusal = _member_refusal(tar, name, member) or Refusal(
                "unknown_extension", f"{name!r} in {tar} was refused unread: no video, .json, .cls, .txt."
            )
            rejections.add_file(path_to_text(f"{tar}/{name.lstrip('/')}"), refusal)
    cut = _key_of(contents.last)[0] if contents.damage else ""
    # Pictures share the texts of their folder, and its fate where the tar is cut.
    folder_of = {key: key.rpartition("/")[0] for key, names in videos.items() if is_picture(names[0])}
    for key in dict.fromkeys((*videos, *(key for key in texts if key not in folder_of.values()))):
        folder = folder_of.get(key, "")
        of_key: Refusal | None = None
        content, cells = dict[str, str](), dict[str, str]()
        try:
            content, cells = _read_texts(contents, texts[key] or texts[folder])
        except (ValueError, RecursionError, OSError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            detail = f"{key!r} in {tar}: its texts cannot be read: {error}. Write UTF-8 and JSON, each once."
            of_key = Refusal("malformed_row", detail)
        if cut and (key == cut or (folder and folder in (cut, cut.rpartition("/")[0]))):
            detail = f"{key!r} in {tar}: the tar is cut or damaged within it. Fetch the tar again."
            of_key = Refusal("truncated", detail)
        if not videos[key]:
            detail = f"{key!r} in {tar} has {', '.join(texts[key])} and no video. Fetch it again."
            of_key = of_key or Refusal("missing_video", detail)
        links = [f"sample {tar}/{key}"] if len(videos[key]) > 1 else []
        if cells.get("url") and {"key", "status"} <= cells.keys():  # clips that video2dataset cut from one video
            links.append(f"url {cells['url']}")
        for name in videos[key] or [key]:
            path, refused = path_to_text(f"{tar}/{name}"), of_key
            if videos[key]:
                refused = of_key or _member_refusal(tar, name, contents.members[name])
            label, text = content.get("cls", ""), content.get("txt", "")
            yield TarSample(path, cells, label, text, tuple(map(path_to_text, links)), refused)


def _read_texts(contents: Contents, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (texts, cells) of a sample's members ``names``.

    ``texts`` maps json, txt and cls to their content. ``cells`` maps the fields of the JSON object, in lower case, to
    their values as text; lists and objects are left out.

    Raises:
        ValueError: a text is too long, is no UTF-8 or JSON, or is there twice.
    """
    content = dict[str, str]()
    for name in names:
        kind, member = _key_of(name)[1], contents.members[name]
        if isinstance(member, str) or kind in content:
            raise ValueError(f"the .{kind} {member if isinstance(member, str) else 'is there more than once'}")
        if member.size_bytes > _TEXTS[kind]:
            raise ValueError(f"the .{kind} has {member.size_bytes:,} bytes, wanted at most {_TEXTS[kind]:,}")
        content[kind] = member.read().decode("utf-8-sig").strip()
    document = json.loads(content.get("json", "{}"), object_pairs_hook=_in_lower_case)
    if not isinstance(document, dict):
        raise ValueError("the .json holds no object")
    cells = {name: str(value) for name, value in document.items() if isinstance(value, str | int | float)}
    "".join((*cells, *cells.values())).encode()  # half of a pair such as "\\ud800" is no text
    return content, cells


def _in_lower_case(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name.lower() for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} is in the .json more than once")
    return dict(zip(names, (value for _, value in pairs), strict=True))


def _member_refusal(tar: str, name: str, member: FilePart | str) -> Refusal | None:
    if isinstance(member, FilePart):
        return None
    return Refusal("not_a_file", f"{name!r} in {tar} was refused unread: it {member}. Pack plain files, each once.")


def _key_of(name: str) -> tuple[str, str]:
    """Return (key, kind) of a member by its name: ``("a/b", "seg.mp4")`` for ``a/b.seg.mp4``."""
    path = PurePosixPath(name)
    stem, _, kind = path.name.partition(".")
    return (str(path.with_name(stem)) if stem else name), kind.lower()
