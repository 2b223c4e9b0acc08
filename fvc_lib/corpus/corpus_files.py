"""Find and check the files of a corpus, and refuse unusable files and rows with a reason and a remedy.

File names tell which pictures are frames of the same video, and which files are parts of the same longer video.

Terms of this module: a label source is the table, lists or folder names that state which videos are real and fake.
Table text is text in which bytes and characters that UTF-8 cannot hold are escaped (``atomic_files.path_to_text``). A
REJECTED table lists the files and rows that are not used, with reasons.
"""

import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePath
from posixpath import splitext
from typing import Literal

import polars as pl

from fvc_lib.services.atomic_files import AnyPath, message_text, path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import REJECTED, frame_of, write_table
from fvc_lib.video.decode.file_parts import PICTURES, part_at, picture_names

# Reasons of rejected rows that do not count as the loss of a labelled video.
NOT_A_LOSS = frozenset((
    "label_not_used", "duplicate_path", "duplicate_content", "unknown_extension", "not_listed",
    "not_opened", "not_in_trial",
))  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """The reason why a file of a corpus, or a row of its label table, is not used."""

    reason: str  # a short fixed name, such as ``missing_video``
    detail: str  # sentences for the user on the problem and its remedy


@dataclass(frozen=True, slots=True)
class Entry:
    """One labelled file of a corpus, or one row of its label table.

    Texts are escaped as in tables (``atomic_files.path_to_text``).
    """

    path: str  # relative to the corpus root, with '/'
    label: str | None  # real or fake; for a row of a table: its stripped text in lower case, None if empty
    source_id: str  # name of the video in the label source
    stated_group: str | None = None  # leakage group in the label source, if any
    manipulation: str | None = None  # how a fake was made
    platform: str | None = None  # where the video was published
    row: int | None = None  # 1-based data row of the table that lists the file
    origin: str = ""  # file name of that table
    generator: str | None = None  # the program that made a fake; None for reals
    real_source: str | None = None  # where a real video comes from; None for fakes
    official_split: str | None = None  # train, validation or test, by the corpus's own lists
    attributes: str | None = None  # further facts, as a JSON object that maps names to texts
    links: tuple[str, ...] = ()  # further groups that the file belongs to
    corpus: str = ""  # name of the corpus; ``read_corpus`` fills in what the loader leaves empty
    label_source: str = ""  # name of the loader; ``read_corpus`` fills it in


@dataclass
class Rejections:
    """The files and rows that are not used, with reasons; collected while a corpus is read.

    Attributes:
        rows: rows of the REJECTED table: path, source id, row number, label, reason, detail.
    """

    rows: list[tuple[str, str | None, int | None, str | None, str, str]] = field(default_factory=list)

    def add(self, entry: Entry, refusal: Refusal) -> None:
        """Record that ``entry``, a row or file of the label source, is not used because of ``refusal``."""
        self.add_file(entry.path, refusal, entry.label, entry.row, entry.source_id)

    def add_file(
        self, path: str, refusal: Refusal, label: str | None = None, row: int | None = None,
        source_id: str | None = None,
    ) -> None:  # fmt: skip
        """Record that a file or row is not used because of ``refusal``.

        ``path`` is escaped as in tables (``path_to_text``). ``row`` is the 1-based number of the row, and
        ``source_id`` the video's name in the label source, if they are known.
        """
        self.rows.append((path, source_id, row, label, refusal.reason, message_text(refusal.detail)))

    def frame(self, before: pl.DataFrame | None = None) -> pl.DataFrame:
        """Return all recorded rows as a REJECTED table, sorted by path and row.

        ``before`` is a REJECTED table whose rows are added; None: no further rows.
        """
        new = frame_of(self.rows, REJECTED)
        both = new if before is None else pl.concat([before, new])
        return both.sort("path", "row", "reason", "detail", nulls_last=True)


def refuse_lost(
    root: AnyPath, what: str, rejected: pl.DataFrame, num_used: int, max_rejected_share: float,
    no_loss: Iterable[str] = NOT_A_LOSS, rejected_path: AnyPath | None = None,
) -> None:  # fmt: skip
    """Raise ``DataError`` if the corpus at ``root`` has nothing usable, or if too large a share of it is lost.

    Args:
        root: folder of the corpus, for the message.
        what: name of an item of the corpus for the message, in the singular, such as "image".
        rejected: REJECTED table.
        num_used: number of usable files or rows.
        max_rejected_share: largest allowed value of lost / (lost + usable) rows, 0 to 1.
        no_loss: reasons whose rows do not count as lost.
        rejected_path: write ``rejected`` here before the error is raised.

    Raises:
        DataError: nothing is usable, or too much is lost. The message counts the reasons and shows an example of the
            most frequent reason.
    """
    lost = rejected.filter(~pl.col("reason").is_in(sorted(no_loss)))
    share = lost.height / max(1, lost.height + num_used)
    if num_used and share <= max_rejected_share:
        return
    shown = lost if lost.height else rejected
    too_many = (
        f"{share:.0%} of the {what}s cannot be used, at most {max_rejected_share:.0%} may be (max_rejected_share)"
    )
    problem = too_many if num_used else f"no usable {what}"
    examples = shown.filter(pl.col("reason") == pl.col("reason").mode().min())["detail"]
    advice = f"For example: {examples[0]}" if len(examples) else f"Put {what}s into it."
    if rejected_path is not None:
        write_table(rejected, REJECTED, rejected_path)
        advice += f" Why each of {rejected.height:,} rows is not used stands in {rejected_path}."
    raise DataError(f"corpus {str(root)!r}: {problem} ({reasons_text(shown)}). {advice}")


def reasons_text(rejected: pl.DataFrame) -> str:
    """Return the counts of the reasons in a REJECTED table as text, such as ``2 x no_video, 1 x truncated``."""
    counts = counted(rejected["reason"])
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts.items()) or "nothing rejected"


def counted(values: Iterable[str]) -> dict[str, int]:
    """Map each distinct value to its number of occurrences; frequent values first, equally frequent ones sorted."""
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def some_of(names: Sequence[str], limit: int = 20) -> str:
    """Return the first ``limit`` names, quoted, and the number of the others, such as ``'a', 'b' and 3 more``."""
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def counts_text(values: Iterable[str], limit: int = 8) -> str:
    """Return the counts of the ``limit`` most frequent values as text, such as ``133 x 'unlabelled', 2 x 'parody'``.

    The text ends with the number of the other distinct values, such as ``, and 3 more``.
    """
    counts = list(counted(values).items())
    more = f", and {len(counts) - limit} more" if len(counts) > limit else ""
    return ", ".join(f"{count} x {value!r}" for value, count in counts[:limit]) + more


def joined(*parts: str) -> str:
    """Return the non-empty ``parts``, joined by '/'."""
    return "/".join(filter(None, parts))


Kind = Literal["video", "image"]
_ENDINGS = {
    "video": "3g2 3gp 264 265 amv asf avi divx dv f4v flv gif h264 h265 hevc ivf m1v m2ts m4s m2v m4v mjpeg mjpg mkv "
    "mov mp4 mpe mpeg mpg mts mxf nut obu ogg ogv qt rm rmvb ts vob webm wmv y4m",
    "image": "avif bmp gif jfif jpe jpeg jpg mpo pgm png ppm tif tiff webp",
}
ENDINGS = {kind: frozenset(f".{ending}" for ending in endings.split()) for kind, endings in _ENDINGS.items()}
LAYOUT = "Frames of a video are read from a folder of their own: real/VIDEO/000.png or .jpg"
LABEL_FOLDER = re.compile(r"(?:\d+[_-])?(real|fake)", re.IGNORECASE)
_DIGITS = re.compile(r"\d+", re.ASCII)
_PARTS = re.compile(
    r"(?<=[^/_\-. ])(?:[_\-. ]+(?:seg|segment|shot|scene|crop|frame|clip|part)[_-]?\d+)+$", re.IGNORECASE | re.ASCII
)


def is_named_as(kind: Kind, name: str) -> bool:
    """Return whether ``name`` has a file extension of the given kind, video or image; case does not matter."""
    return PurePath(name).suffix.lower() in ENDINGS[kind]


@dataclass(frozen=True)
class Reading:
    """Options of the present call of ``read_corpus``, which lists a corpus of videos.

    The loaders of corpora get these options from the context variable ``READING``.
    """

    allow_outside: bool = False  # whether files outside the corpus folder may be used
    label_map: Mapping[str, str] = field(default_factory=dict)  # maps further labels, in lower case, to real or fake
    columns: Mapping[str, str] = field(default_factory=dict)  # maps names to a manifest's columns, in lower case


READING = ContextVar("reading", default=Reading())  # noqa: B039 - frozen


class CorpusFiles:
    """Access to the files in the folder of a corpus: finds files, checks paths, and refuses files outside the folder.

    A path is relative to ``root``, or absolute inside ``root``. It may not leave ``root`` by ``..``. Symbolic links may
    point inside ``root`` only. If ``allow_outside`` is set, files outside ``root`` are accepted as well.

    Args:
        root: folder of the corpus.
        kind: kind of the files, video or image.
        allow_outside: accept files from anywhere, and enter linked folders; None: see ``Reading.allow_outside``.
    """

    def __init__(self, root: AnyPath, kind: Kind = "video", allow_outside: bool | None = None) -> None:
        self._allow_outside = READING.get().allow_outside if allow_outside is None else allow_outside
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.resolve would also follow symbolic links
        self.kind: Kind = kind
        self._prefix = f"{str(self.root).rstrip(os.sep)}{os.sep}"
        self._real = cache(os.path.realpath)
        self._real_prefix = f"{os.path.realpath(root).rstrip(os.sep)}{os.sep}"

    def normalized(self, raw: str) -> str | Refusal:
        """Return the path ``raw``, which a list names, relative to the root and without ``.`` and ``..``; or a refusal.

        An empty path is refused. A path outside the root is refused, too; but if ``allow_outside`` is set, it is
        accepted, and an absolute path stays absolute. The result is a plain path, not escaped.
        """
        if not raw or "\0" in raw:
            return Refusal("no_path", f"got {raw!r} as path; wanted a file name relative to the corpus folder.")
        path = os.path.normpath(raw)
        for prefix in (self._prefix, self._real_prefix):
            if path.startswith(prefix):
                return path[len(prefix) :]
        if not self._allow_outside and (path == ".." or path.startswith(("/", "../"))):
            return self._outside(raw, "is not below it")
        return path

    def check(self, path: str) -> Refusal | None:
        """Return why the file ``path`` is unusable; None if it is usable. No file is decoded.

        ``path`` is a result of ``normalized``. A folder of PNG or JPEG pictures counts as a video, also in a tar.
        """
        # Text: a Path for each of 100,000 files would take longer than their stat.
        full = path if path.startswith("/") else f"{self._prefix}{path}"
        try:
            try:
                mode = os.stat(full).st_mode  # noqa: PTH116
            except NotADirectoryError:  # the path may lead into a tar
                if self.kind == "image" or not picture_names(full):
                    part_at(Path(full))
                return None
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError) or os.path.islink(full)  # noqa: PTH114
            remedy = "Check its spelling (case, '/', Unicode form), links and permissions, restore it, or drop its row."
            if full != full.encode(errors="replace").decode():
                remedy = "The name is no UTF-8. If the file exists, save the table as UTF-8."
            reason = f"missing_{self.kind}" if is_missing else "unreadable"
            return Refusal(reason, f"no file {path!r} in the corpus folder: {error.strerror}. {remedy}")
        place = full if os.path.islink(full) else os.path.dirname(full)  # noqa: PTH114, PTH120
        if not self._allow_outside and not f"{self._real(place)}{os.sep}".startswith(self._real_prefix):
            return self._outside(path, f"leads by a symbolic link to {os.path.realpath(full)!r}")
        if stat.S_ISREG(mode):
            return None
        if self.kind == "video" and (names := picture_names(full)):
            refusals = (self.check(f"{path}/{name}") for name in names if os.path.islink(f"{full}/{name}"))  # noqa: PTH114
            return next(filter(None, refusals), None)
        return Refusal("not_a_file", f"{path!r} is not a regular file. List {self.kind} files only.")

    def walk(
        self, top: str, rejections: Rejections, label: str | None = None, *, pictures: bool = False
    ) -> Iterator[str]:
        """Yield the paths of the files below ``top`` that have an extension of ``self.kind``; reject the others.

        Args:
            top: folder to search, relative to the root.
            rejections: receives the rejected files and linked folders.
            label: label that is stored with rejected files.
            pictures: also yield still pictures, because they may be frames of a video.

        Yields:
            Plain paths (not escaped), relative to the root.
        """
        for folder, folders, names in os.walk(self.root / top, followlinks=self._allow_outside):
            above = f"{self._real(folder)}/"
            # Hidden names (.DS_Store, ._clip.mp4) are never meant as part of a corpus. Links must not lead in a circle.
            in_circles = {name for name in folders if above.startswith(f"{self._real(f'{folder}/{name}')}/")}
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in in_circles)
            links = [name for name in folders if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114
            left = [] if self._allow_outside else links
            for name in sorted(name for name in (*left, *in_circles, *names) if not name.startswith(".")):
                path = os.path.normpath(f"{os.path.relpath(folder, self.root)}/{name}")
                if name not in names:
                    detail = f"{path!r} is a symbolic link to a folder. Move it here, or set -p allow_outside true."
                    rejections.add_file(path_to_text(path), Refusal("linked_folder", detail), label)
                elif is_named_as(self.kind, path) or (pictures and is_picture(path)):
                    yield path
                else:
                    detail = f"{path!r} has no extension of a finished {self.kind} file. Rename it."
                    rejections.add_file(path_to_text(path), Refusal("unknown_extension", detail), label)

    def _outside(self, path: str, how: str) -> Refusal:
        remedy = "Copy the file into the corpus, or set -p allow_outside true."
        return Refusal("outside_corpus", f"{path!r} {how}: outside the corpus folder. {remedy}")


# --- Frames and parts of one video, by their names.


def is_picture(name: str) -> bool:
    """Return whether the extension of ``name`` is that of a still picture; a GIF counts as a video."""
    return splitext(name)[1].lower() in ENDINGS["image"] - ENDINGS["video"]


def picture_folders(
    paths: Sequence[str],
    facts: Sequence[Hashable],
    words: Iterable[str] = (),
    names_in: Callable[[str], Iterable[str]] = lambda folder: (),
) -> Iterator[tuple[str, list[int], str]]:
    """Yield (folder, positions, problem) for each folder that holds pictures.

    ``positions`` are the indices in ``paths`` of the pictures in ``folder``. ``problem`` is empty if these pictures are
    the frames of one video, else a message that says why they are not.

    Args:
        paths: paths of pictures and other files; the other files are skipped.
        facts: the known facts of each path, such as its label; frames of one video must have equal facts.
        words: the labels that occur in the label source, such as ``real`` or ``deepfake``. If all folders are named by
            labels, they are class folders: their pictures are not the frames of one video. A folder named like real or
            fake is always a class folder.
        names_in: called with a folder; returns the names of further files in that folder.
    """
    folders = defaultdict[str, list[int]](list)
    for place, path in enumerate(paths):
        if is_picture(path):
            folders[path.rpartition("/")[0]].append(place)
    own_names = {folder.rpartition("/")[2] for folder in folders}
    of_labels = {name for name in own_names if not name or LABEL_FOLDER.fullmatch(name) or name.endswith(".tar")}
    known = {word.strip().lower() for word in words}
    if all(name.lower() in known for name in own_names - of_labels):
        of_labels = own_names
    for folder, places in folders.items():
        names = {paths[place].rpartition("/")[2] for place in places}.union(names_in(folder))
        are_frames = _are_frames(names) and len({facts[place] for place in places}) == 1
        problem = ""
        if not are_frames or folder.rpartition("/")[2] in of_labels:
            problem = (
                f"the pictures in {folder!r} are not the frames of one video: these lie in a folder of their own, have "
                "one label and group, and are PNG or JPEG files whose names differ only in a number"
            )
        yield folder, places, problem


def part_families(paths: Sequence[str], facts: Sequence[Hashable]) -> Iterator[tuple[str, list[int], str]]:
    """Find files that are named like parts of the same video; yield (video, positions, problem) for each video.

    The names of parts differ only in a suffix such as ``_seg3``; a number alone is no such suffix. ``video`` is the
    name without suffix. ``positions`` are the indices of the parts in ``paths``, two or more. ``problem`` is empty if
    the files can be parts of one video, else a message that says why they cannot.

    Args:
        paths: paths of files, or other names of videos.
        facts: the known facts of each path, such as its label; parts of one video must have equal facts.
    """
    families = defaultdict[str, list[int]](list)
    has_part = set()
    for place, path in enumerate(paths):
        stem, ending = splitext(path)
        bare = stem if ending.lower() in ENDINGS["image"] | ENDINGS["video"] else path
        whole = _PARTS.sub("", bare)
        if whole == bare or LABEL_FOLDER.fullmatch(whole.rpartition("/")[2]):
            families[bare].append(place)
        else:
            families[whole].append(place)
            has_part.add(whole)
    for whole, places in families.items():
        # If no name has a suffix, these are files of one name in several formats, such as a.mp4 and a.avi.
        if whole in has_part and len({paths[place] for place in places}) > 1:
            differ = len({facts[place] for place in places}) > 1
            problem = f"the parts of {whole!r} differ in label, group or another stated fact"
            yield whole, places, problem if differ else ""


def videos_of(paths: Sequence[str], facts: Sequence[Hashable], words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Find frames and parts of the same video by their names; return (videos, problems), one text for each path.

    ``videos`` holds the name of each path's video. The video of a frame is its folder. The video of a part is the
    common name of the parts. The video of any other file is the path itself. ``problems`` holds empty texts. Only if
    files are named like frames or parts of one video, but cannot be, it holds a message.

    Args:
        paths: paths of frames, parts and other files.
        facts: the known facts of each path, such as its label; frames or parts of one video must have equal facts.
        words: the labels that occur in the label source. A folder named like a label is not a video.
    """
    videos = list(paths)
    problems = [""] * len(paths)
    for find in (partial(picture_folders, words=words), part_families):
        for whole, places, problem in list(find(videos, facts)):
            for place in places:
                videos[place], problems[place] = videos[place] if problem else whole, problem
    return videos, problems


def _are_frames(names: Collection[str]) -> bool:
    """Return whether the files ``names`` can be the frames of one video.

    All must be PNG or JPEG files whose names differ only in numbers. At least one of these numbers must be different in
    all names, such as the number of the frame.
    """
    stems = [splitext(name)[0] for name in names if name.lower().endswith(PICTURES)]
    if len(stems) < len(names) or len({_DIGITS.sub("0", stem) for stem in stems}) > 1:
        return False
    numbers = zip(*([digits.lstrip("0") for digits in _DIGITS.findall(stem)] for stem in stems), strict=True)
    return len(stems) == 1 or any(len(set(of_all)) == len(stems) for of_all in numbers)
