"""Read samples from tar files in WebDataset's layout: ``KEY.mp4`` with ``KEY.json``, ``KEY.cls`` or ``KEY.txt``.

A sample is all members (files in the tar) with the same key. The key is the member's path up to the first dot of the
file name. Videos are read in place, by their offset in the tar. Besides them, only short UTF-8 texts and JSON are read.
Members with other extensions, such as pickles, are rejected without being read. Of a truncated tar, the samples before
the cut are used.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, Rejections, is_named_as, some_of
from fvc_lib.services.atomic_files import message_text, path_to_text
from fvc_lib.services.run_paths import TAR_SUFFIX, fixed_folder, is_pattern, tars_of
from fvc_lib.video.decode.file_parts import Contents, contents_of

# Kinds of texts and their largest sizes in bytes; metadata of yt-dlp has up to about a MiB.
_TEXTS = {"json": 4 << 20, "txt": 1 << 20, "cls": 1 << 10}
_ENDINGS = (TAR_SUFFIX, ".tgz", *(f"{TAR_SUFFIX}.{kind}" for kind in ("gz", "bz2", "xz", "zst")))


@dataclass(frozen=True)
class TarSample:
    """A video in a tar with the texts that belong to it, such as its label or caption.

    It may also stand for texts without a video. Then ``refusal`` is set, because such a sample cannot be used.

    ``cells`` maps the names of the scalars in ``KEY.json``, in lower case, to their texts. The names ``.cls`` and
    ``.txt`` are mapped to the contents of ``KEY.cls`` and ``KEY.txt``.
    """

    path: str  # path of the tar, '/' and name of the member; table text, relative to the corpus
    cells: Mapping[str, str]
    links: tuple[str, ...] = ()  # leakage groups that the video belongs to
    refusal: Refusal | None = None  # why the sample is unusable; None: it is usable


def tars_in(corpus: Path) -> list[str]:
    """Return the sorted names of the tars of ``corpus``: a tar, a folder of tars, or a pattern of paths.

    Names are relative to the folder that holds the tars (see ``tar_files``). Hidden files are left out. Compressed tars
    are included, although they cannot be read.

    Raises:
        UsageError: the pattern is unusable (see ``run_paths.tars_of``).
    """
    if is_pattern(corpus):
        return [str(tar.relative_to(fixed_folder(corpus))) for tar in tars_of(corpus)]
    paths = [corpus] if corpus.is_file() else sorted(corpus.glob("[!.]*"))
    return [path.name for path in paths if path.name.lower().endswith(_ENDINGS) and path.is_file()]


def tar_files(corpus: Path, allow_outside: bool | None = None) -> CorpusFiles:
    """Return a ``CorpusFiles`` (access to files) for the videos in the folder that holds the tars of ``corpus``.

    If ``corpus`` is a pattern such as ``shards/{000..099}.tar``, the folder is the part before the first name with
    braces or wildcards, here ``shards``.
    """
    folder = fixed_folder(corpus) if is_pattern(corpus) else corpus if corpus.is_dir() else corpus.parent
    return CorpusFiles(folder, "video", allow_outside)


def tar_samples(corpus: Path, files: CorpusFiles, rejections: Rejections) -> tuple[list[TarSample], tuple[str, ...]]:
    """Return (samples, notes): every sample in the tars of ``corpus``, and a sentence if tars are damaged.

    Args:
        corpus: a tar, a folder of tars, or a pattern of paths, such as ``shards/{000..099}.tar``.
        files: access to the files of the corpus (``tar_files``).
        rejections: receives damaged tars, and members that are neither videos nor texts.

    Raises:
        UsageError: the pattern is unusable (see ``run_paths.tars_of``).
    """
    samples, damaged = list[TarSample](), list[str]()
    for name in tars_in(corpus):
        contents, refusal = Contents({}, {}), files.check(name)
        if refusal is None:
            try:
                contents = contents_of(files.root / name)
            except OSError as error:
                remedy = "Fetch it again, or unpack it (gunzip) and pack plain tars."
                refusal = Refusal("unreadable", f"the tar {name!r} {error.strerror}. {remedy}")
        if contents.damage:
            detail = f"the tar {name!r} is cut or damaged ({contents.damage}): only the members before that are used."
            refusal = Refusal("truncated", f"{detail} Fetch it again.")
        if refusal is not None:
            rejections.add_file(path_to_text(name), refusal)
            damaged.append(name)
        samples += _samples_of(name, contents, rejections)
    note = f"{len(damaged):,} tars cannot be read, or not to their end: {some_of(damaged, 5)}. Fetch them again."
    return samples, (message_text(note),) if damaged else ()


def _samples_of(tar: str, contents: Contents, rejections: Rejections) -> Iterator[TarSample]:
    """Yield the samples of a tar; reject the members that are neither videos nor texts.

    Args:
        tar: path of the tar, relative to the corpus.
        contents: members of the tar.
        rejections: receives the rejected members.
    """
    videos, texts = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)  # names of members by key
    for name, member in contents.members.items():
        key, kind = _key_of(name)
        if PurePosixPath(name).name.startswith("."):
            continue  # macOS puts ._clip.mp4 next to clip.mp4
        if is_named_as("video", name):
            videos[key].append(name)
        elif kind in _TEXTS:
            texts[key].append(name)
        else:
            why = f"it {member}" if isinstance(member, str) else "no video or text (name pictures in a manifest)"
            unread = Refusal("unknown_extension", f"{name!r} in {tar} was refused unread: {why}.")
            rejections.add_file(path_to_text(f"{tar}/{name.lstrip('/')}"), unread)
    for key in (*videos, *sorted(texts.keys() - videos.keys())):
        cells = dict[str, str]()
        refusal: Refusal | None = None
        try:
            cells = _read_texts(contents, texts[key])
        except (ValueError, RecursionError, OSError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            refusal = Refusal("malformed_row", f"{key!r} in {tar}: its texts cannot be read: {error}.")
        if contents.damage and key == _key_of(contents.last)[0]:
            detail = f"{key!r} in {tar}: the tar is cut or damaged within it. Fetch the tar again."
            refusal = Refusal("truncated", detail)
        links = [path_to_text(f"sample {tar}/{key}")] if len(videos[key]) > 1 else []
        if cells.get("url") and {"key", "status"} <= cells.keys():  # clips that video2dataset cut from one video
            links.append(path_to_text(f"url {cells['url']}"))
        for name in videos[key] or [key]:
            member = contents.members[name] if videos[key] else "has no video"
            refused = refusal
            if isinstance(member, str) and refused is None:
                reason = "not_a_file" if videos[key] else "missing_video"
                refused = Refusal(reason, f"{name!r} in {tar} {member}. Pack plain files, each once.")
            yield TarSample(path_to_text(f"{tar}/{name}"), cells, tuple(links), refused)


def _read_texts(contents: Contents, names: Sequence[str]) -> dict[str, str]:
    """Read the texts of a sample; return a mapping from names to texts, the ``cells`` of a ``TarSample``.

    ``contents`` are the members (files) of the tar, and ``names`` are the names of the members that hold texts. The
    content of a ``.txt`` or ``.cls`` file has this extension as its name. Values of the ``.json`` file have their own
    names in lower case; lists, objects and null are left out.

    Raises:
        ValueError: a text is too long, is no UTF-8 or JSON, or has the same kind as another one.
    """
    cells = dict[str, str]()
    for name in names:
        kind, member = _key_of(name)[1], contents.members[name]
        if isinstance(member, str) or f".{kind}" in cells or member.size_bytes > _TEXTS[kind]:
            raise ValueError(f"the .{kind} is there more than once, or has more than {_TEXTS[kind]:,} bytes")
        cells[f".{kind}"] = member.read().decode("utf-8-sig").strip()
    document = json.loads(cells.pop(".json", "{}"))
    if not isinstance(document, dict) or len({name.lower() for name in document}) < len(document):
        raise ValueError("the .json holds no object, or a name in two spellings")
    cells |= {name.lower(): str(value) for name, value in document.items() if isinstance(value, str | int | float)}
    "".join((*cells, *cells.values())).encode()  # fails for half of a surrogate pair, such as "\\ud800"
    return cells


def _key_of(name: str) -> tuple[str, str]:
    """Return (key, kind) of the member ``name``: the path before and after the first dot of the file name.

    For example, ``a/b.seg.mp4`` gives ``("a/b", "seg.mp4")``. The kind is in lower case.
    """
    folder, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return (folder + slash + stem if stem else name), kind.lower()
