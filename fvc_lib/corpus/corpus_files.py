"""Find and check the files of a corpus, and refuse unusable files and rows with a reason and a remedy."""

import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal

import polars as pl

from fvc_lib.corpus.frame_names import ENDINGS, LAYOUT, is_picture
from fvc_lib.services.atomic_files import AnyPath, message_text, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import REJECTED, frame_of, write_table
from fvc_lib.video.decode.file_parts import part_at, picture_names

# Reasons by which no labelled video is lost.
NOT_A_LOSS = frozenset((
    "label_not_used", "duplicate_path", "duplicate_content", "unknown_extension", "not_listed", "surplus_file",
    "not_opened", "not_in_trial",
))  # fmt: skip
_REPAIR = "Repair or fetch again the files that cannot be read."
_REMEDIES = {
    "missing_video": "Fetch the files that are missing, or drop their rows.",
    "missing_image": "Fetch the files that are missing, or drop their rows.",
    "no_video": "Leave out the files that hold no video.",
    "unsupported": "Convert the files whose format has no decoder here, or leave them out.",
    "outside_corpus": "Files outside the corpus folder are not read: copy them into it, put the manifest into "
    "the folder that holds them, or set allow_outside: true (-p allow_outside true).",
    "linked_folder": "Linked folders are not entered: move them into the corpus, or set allow_outside: true "
    "(-p allow_outside true).",
    "conflicting_labels": "Keep one label for each file that is listed with two.",
    "label_not_used": "Only videos labelled real or fake are used; label_map says what other labels mean.",
    "unknown_extension": "Give files the extension of their format, such as .mp4.",
    "not_listed": "List the files that no table names.",
    "no_path": "Fill the column 'path'.",
    "no_text": "Fill the column 'text'.",
    "malformed_row": "Give every row as many cells as the header, in UTF-8.",
    "unknown_url": "Give the URL of a YouTube, Facebook or Twitter video.",
    "unassigned_picture": f"{LAYOUT}. In a table, the column 'group' may name the video of a picture instead.",
    "unknown_split": "Write train, validation or test into the column 'split', or nothing.",
}


@dataclass(frozen=True)
class Refusal:
    """The reason why a file or row is not used."""

    reason: str  # a short fixed name, such as ``missing_video``
    detail: str  # sentences for the user: what is wrong, and how to mend it


@dataclass(frozen=True, slots=True)
class Entry:
    """One labelled file of a corpus, or one row of its label table.

    Text is table text (``atomic_files.path_to_text``).
    """

    path: str  # relative to the corpus root, with '/'
    label: str | None  # label of the file; of a row, its stripped text in lower case, None if empty
    source_id: str
    stated_group: str | None = None
    manipulation: str | None = None
    platform: str | None = None
    row: int | None = None  # 1-based data row of the table that listed it
    origin: str = ""  # file name of that table
    generator: str | None = None  # what made a fake; None for reals
    real_source: str | None = None  # where a real video comes from; None for fakes
    official_split: str | None = None  # train, validation or test, by the corpus's own lists
    attributes: str | None = None  # JSON object of text with further facts
    links: tuple[str, ...] = ()  # further groups that the file belongs to
    corpus: str = ""  # name of the corpus; ``read_corpus`` fills in what the loader leaves empty
    label_source: str = ""  # name of the loader; ``read_corpus`` fills it in


@dataclass
class Rejections:
    """Collect the rows of the REJECTED table."""

    rows: list[tuple[str, str | None, int | None, str | None, str, str]] = field(default_factory=list)

    def add(self, entry: Entry, refusal: Refusal) -> None:
        """Add an entry of the label source that is not used."""
        detail = message_text(refusal.detail)
        self.rows.append((entry.path, entry.source_id, entry.row, entry.label, refusal.reason, detail))

    def add_file(self, path: str, refusal: Refusal, label: str | None = None, row: int | None = None) -> None:
        """Add a file or row for which there is no entry; ``path`` is table text."""
        self.rows.append((path, None, row, label, refusal.reason, message_text(refusal.detail)))

    def frame(self, before: pl.DataFrame | None = None) -> pl.DataFrame:
        """Return the collected rows, and those of ``before``, as a REJECTED table sorted by path and row."""
        new = frame_of(self.rows, REJECTED)
        both = new if before is None else pl.concat([before, new])
        return both.sort("path", "row", "reason", "detail", nulls_last=True)


@contextmanager
def written_when_refused(rejections: Rejections, path: AnyPath | None) -> Iterator[None]:
    """Return a context that writes the REJECTED table to ``path`` if a ``DataError`` is raised inside it.

    The error is raised again, with ``path`` in its message. Nothing is written if ``path`` is None or no row was
    rejected.
    """
    try:
        yield
    except DataError as error:
        if path is None or not rejections.rows:
            raise
        write_table(rejections.frame(), REJECTED, path)
        raise type(error)(f"{error} Why each of {len(rejections.rows):,} rows is not used stands in {path}.") from error


def refuse_lost(
    root: AnyPath, what: str, rejected: pl.DataFrame, num_used: int, max_rejected_share: float,
    no_loss: Iterable[str] = NOT_A_LOSS,
) -> None:  # fmt: skip
    """Raise ``DataError`` if nothing of the corpus at ``root`` is usable, or too much is lost.

    Args:
        root: folder of the corpus, for the message.
        what: what the corpus lists, in the singular, such as "image".
        rejected: REJECTED table.
        num_used: number of usable files or rows.
        max_rejected_share: largest share, 0 to 1, that may be lost.
        no_loss: reasons whose rows do not count as lost.

    Raises:
        DataError: see above; the message counts the reasons and names remedies.
    """
    lost = rejected.filter(~pl.col("reason").is_in(sorted(no_loss)))
    share = lost.height / max(1, lost.height + num_used)
    if num_used and share <= max_rejected_share:
        return
    shown = lost if lost.height else rejected
    remedies = list(dict.fromkeys(_REMEDIES.get(reason, _REPAIR) for reason in counted(shown["reason"])))
    problem = f"no usable {what}"
    if num_used:
        problem = f"{share:.0%} of the {what}s cannot be used, at most {max_rejected_share:.0%} are allowed"
        remedies.append("Or raise max_rejected_share.")
    examples = [f"For example: {detail}" for detail in shown["detail"].head(1)]
    advice = " ".join([*remedies, *examples]) or f"The corpus lists none. Put {what}s into it."
    raise DataError(f"corpus {str(root)!r}: {problem} ({reasons_text(shown)}). {advice}")


def reasons_text(rejected: pl.DataFrame) -> str:
    """Return the counts of the reasons in a REJECTED table as text, such as ``2 x no_video, 1 x truncated``."""
    counts = counted(rejected["reason"])
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts.items()) or "nothing rejected"


def counted(values: Iterable[str]) -> dict[str, int]:
    """Map each distinct value to its number of occurrences, the most frequent value first."""
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def some_of(names: Sequence[str], limit: int = 20) -> str:
    """Return the first ``limit`` names, quoted, such as ``'a', 'b' and 3 more``."""
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def counts_text(values: Iterable[str], limit: int = 8) -> str:
    """Return the counts of the ``limit`` most frequent values, such as ``133 x 'unlabelled', 2 x 'parody'``."""
    counts = list(counted(values).items())
    more = f", and {len(counts) - limit} more" if len(counts) > limit else ""
    return ", ".join(f"{count} x {value!r}" for value, count in counts[:limit]) + more


def disputed(files: Sequence[tuple[str, str]]) -> str:
    """Return a text on files of equal content with different labels: ``1 x 'real', 1 x 'fake': 'a.mp4', 'b.mp4'``.

    ``files`` are (path, label) pairs. Long lists are shortened, because the text is stored for every one of the files.
    """
    return f"{counts_text(label for _, label in files)}: {some_of([path for path, _ in files])}"


def joined(*parts: str) -> str:
    """Join the parts that are not empty by '/'."""
    return "/".join(filter(None, parts))


def parts_below(path: str, top: str) -> tuple[str, ...]:
    """Return the names of the folders from ``top`` to ``path``, and the file name at the end.

    Raises:
        ValueError: ``path`` is not below ``top``.
    """
    return PurePosixPath(path).relative_to(top).parts


Kind = Literal["video", "image"]

# Suffixes of browsers and download programs for unfinished files.
_UNFINISHED = re.compile(
    r"\.(part|partial|crdownload|opdownload|download|ytdl|aria2|!qb|!ut|tmp|temp)(-frag\d+)?$", re.I
)


def is_named_as(kind: Kind, name: str) -> bool:
    """Return whether ``name`` has an extension of the given kind of file; case does not matter."""
    return PurePath(name).suffix.lower() in ENDINGS[kind]


def _dangling(path: Path) -> Path | None:
    """Return the first symbolic link among ``path`` and its parents whose target does not exist, else None."""
    links = (each for each in (path, *path.parents) if os.path.islink(each))  # noqa: PTH114 - raises nothing, also below
    return next((link for link in links if not os.path.exists(link)), None)  # noqa: PTH110


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@dataclass(frozen=True)
class Reading:
    """Options of ``read_corpus``, which hold while a loader reads a corpus (see ``READING``)."""

    allow_outside: bool = False
    label_map: Mapping[str, str] = field(default_factory=dict)  # lower-case labels to real or fake
    unused_labels: bool = False  # ``label_map`` may name labels without a row
    looks: Iterator[int] | None = None  # yields one item for each file that may be looked at; None: no limit


class LongCorpusError(Exception):
    """A corpus has more files than ``read_corpus`` may look at."""


READING = ContextVar("reading", default=Reading())  # noqa: B039 - frozen


class CorpusFiles:
    """Find listed files, and refuse those outside the corpus unless ``allow_outside`` is set.

    A path is relative to ``root``, or absolute inside it. It may not leave the root by ``..``, even to come back.
    Symbolic links may point inside the root only.

    Args:
        root: folder of the corpus.
        kind: kind of the files, video or image.
        allow_outside: take files from anywhere, and enter linked folders; None: the option of ``read_corpus``.
    """

    def __init__(self, root: AnyPath, kind: Kind = "video", allow_outside: bool | None = None) -> None:
        self._allow_outside = READING.get().allow_outside if allow_outside is None else allow_outside
        self._looks = READING.get().looks
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.resolve would also follow symbolic links
        self.kind: Kind = kind
        self._prefix = f"{str(self.root).rstrip(os.sep)}{os.sep}"
        self._real_prefix = f"{os.path.realpath(root).rstrip(os.sep)}{os.sep}"
        self._real_folders: dict[str, str] = {}

    def look(self, files: int = 1) -> None:
        """Count files that are looked at.

        Raises:
            LongCorpusError: more files than ``most_files`` of ``read_corpus`` were counted.
        """
        if self._looks is not None and sum(1 for _ in islice(self._looks, files)) < files:
            raise LongCorpusError

    def normalized(self, raw: str) -> str | Refusal:
        """Return ``raw`` as a path relative to the root, without ``.`` and ``..``, or a refusal.

        The path is not table text. It stays absolute if it is outside the root and that is allowed.
        """
        if not raw or "\0" in raw:
            return Refusal("no_path", f"got {raw!r} as path; wanted a file name relative to the corpus folder.")
        path = os.path.normpath(raw)
        for prefix in (self._prefix, self._real_prefix):
            if path.startswith(prefix):
                return path[len(prefix) :]
        if not self._allow_outside and path.startswith("/"):
            return self._outside(raw, "is absolute and not below it")
        if not self._allow_outside and (path == os.pardir or path.startswith(f"{os.pardir}{os.sep}")):
            return self._outside(raw, "leaves it by '..'")
        return path

    def check(self, path: str) -> Refusal | None:
        """Return why the normalized ``path`` is unusable; None for a file inside the corpus.

        A folder of PNG or JPEG pictures, also in a tar, is a video.
        """
        self.look()
        # Text: a Path for each of 100,000 files would take longer than their stat.
        full = path if path.startswith("/") else f"{self._prefix}{path}"
        try:
            if not self._allow_outside and not self._is_inside(full) and os.path.exists(full):  # noqa: PTH110 - as below
                return self._outside(path, f"leads by a symbolic link to {os.path.realpath(full)!r}")
            mode = os.stat(full).st_mode  # noqa: PTH116
        except NotADirectoryError:  # it may lead into a tar
            return self._check_member(path, full)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or _dangling(Path(full)):  # the latter of links in a circle
                return Refusal(f"missing_{self.kind}", self._why_missing(path, Path(full)))
            return Refusal("unreadable", f"{path!r}: {error.strerror}. Fix the name or the permissions.")
        if stat.S_ISREG(mode):
            return None
        if self.kind == "video" and (names := picture_names(full)):
            links = (name for name in names if os.path.islink(f"{full}/{name}"))  # noqa: PTH114
            return next((refusal for name in links if (refusal := self.check(f"{path}/{name}"))), None)
        return Refusal("not_a_file", f"{path!r} is not a regular file. List {self.kind} files only.")

    def _check_member(self, path: str, full: str) -> Refusal | None:
        if self.kind == "image":
            return Refusal("unreadable", f"{path!r}: pictures in tars are not read.")
        if picture_names(full):
            return None
        try:
            part_at(Path(full))
        except FileNotFoundError as error:
            return Refusal("missing_video", f"{path!r}: {error.strerror}. Restore it, or drop its row.")
        except OSError as error:
            return Refusal("unreadable", f"{path!r}: {error.strerror}. Fix the name, or fetch the tar again.")
        return None

    def _why_missing(self, path: str, full: Path) -> str:
        """Return a text on why a file is missing: a broken link, another spelling of the name, or no such file."""
        if link := _dangling(full):
            name = str(link).removeprefix(self._prefix)
            return f"{path!r}: the link {name!r} leads to {str(link.readlink())!r}, where nothing is. Restore that."
        spelled = ""
        for part in path.replace("\\", "/").split("/"):
            _, folders, names = next(os.walk(self.root / spelled), ("", [], []))
            there = {_folded(name): name for name in sorted((*folders, *names))}
            spelled = joined(spelled, there.get(_folded(part), "/"))
        if not spelled.endswith("/"):
            return (
                f"no file {path!r} in the corpus folder; {spelled!a} is there, with another spelling (case, '/', or "
                "Unicode form NFC or NFD). Write the name as the file has it."
            )
        windows = " Paths have '/' between folders, and begin in the corpus folder." if "\\" in path else ""
        return f"no file {path!r} in the corpus folder.{windows} Restore it, or drop its row."

    def walk(
        self, top: str, rejections: Rejections, label: str | None = None, *, pictures: bool = False
    ) -> Iterator[str]:
        """Yield the paths of files below ``top`` whose extension is that of ``kind``; reject the others.

        Paths are relative to the root and are not table text. With ``pictures``, still pictures are yielded, too,
        because they may be frames of a video. ``label`` is stored with rejected files.
        """
        for path, is_folder in self.walk_all(top):
            if is_folder:
                refusal = self.link_refusal(path)
            elif is_named_as(self.kind, path) or (pictures and is_picture(path)):
                yield path
                continue
            elif _UNFINISHED.search(path):
                refusal = Refusal("unknown_extension", f"{path!r} is a download that is not finished. Finish it.")
            elif _dangling(self.root / path):
                refusal = Refusal(f"missing_{self.kind}", self._why_missing(path, self.root / path))
            else:
                detail = f"{path!r} has no extension of {'an image' if self.kind == 'image' else 'a video'}."
                refusal = Refusal("unknown_extension", f"{detail} Rename it if it is one.")
            rejections.add_file(path_to_text(path), refusal, label)

    def walk_all(self, top: str) -> Iterator[tuple[str, bool]]:
        """Yield (path, is_linked_folder) for all files and linked folders below ``top`` that are not hidden.

        Linked folders are entered instead of yielded if files outside the corpus are allowed.
        """
        if (self.root / top).is_symlink() and not self._allow_outside:
            yield top, True
            return
        entered: set[str] = set()
        for folder, folders, names in os.walk(self.root / top, followlinks=self._allow_outside):
            real = os.path.realpath(folder)
            if real in entered:  # by another link, or in a circle
                folders.clear()
                continue
            entered.add(real)
            # Hidden names (.DS_Store, ._clip.mp4) are never meant as part of a corpus.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            below = Path(os.path.relpath(folder, self.root))
            links = [name for name in folders if (Path(folder) / name).is_symlink()] if not self._allow_outside else []
            yield from ((str(below / name), True) for name in links)
            self.look(len(names))
            yield from ((str(below / name), False) for name in sorted(names) if not name.startswith("."))

    def link_refusal(self, path: str) -> Refusal:
        """Return the refusal of a linked folder, which could lead out of the corpus or in a circle."""
        refusal = self.check(path)
        if refusal is not None and refusal.reason == "outside_corpus":
            return refusal
        detail = f"{path!r} is a symbolic link to a folder. Move the folder here, or set allow_outside: true."
        return Refusal("linked_folder", detail)

    def _is_inside(self, full: str) -> bool:
        if os.path.islink(full):  # noqa: PTH114
            return f"{os.path.realpath(full)}{os.sep}".startswith(self._real_prefix)
        folder = os.path.dirname(full)  # noqa: PTH120
        if folder not in self._real_folders:
            self._real_folders[folder] = f"{os.path.realpath(folder)}{os.sep}"
        return self._real_folders[folder].startswith(self._real_prefix)

    def _outside(self, path: str, how: str) -> Refusal:
        remedy = "Copy the file into the corpus, or set allow_outside: true."
        return Refusal("outside_corpus", f"{path!r} {how}: outside the corpus folder. {remedy}")
