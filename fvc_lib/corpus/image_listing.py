"""What a corpus of images lists, whatever its layout: files with classes, numbers, groups and official parts.

A layout's file in ``fvc_lib.corpus.sources.images.*`` registers a ``CorpusLoader`` whose ``read`` takes the corpus'
``CorpusFiles`` and the path of the folder or manifest below their root, and gives one ``ImageListing``, or several.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath

from fvc_lib.corpus.listing import (
    CorpusFiles,
    Refusal,
    Rejections,
    folder_link_refusal,
    is_hidden,
    recognised,
    walk_files,
)
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

IMAGE_EXTENSIONS = frozenset(
    {".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pgm", ".png", ".ppm", ".tif", ".tiff",
     ".webp"}
)  # fmt: skip
MANIFEST_NAMES = ("manifest.csv", "manifest.parquet")
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image of a corpus. Text is table text (``services.path_text``)."""

    path: str  # relative to the corpus root, with '/'
    source: str  # food101, nutrition5k, folder or manifest
    class_label: str | None = None
    stated_group: str | None = None  # None: nothing but its content
    part: str | None = None  # the corpus's own
    targets: tuple[tuple[str, float], ...] = ()
    row: int | None = None  # 1-based row of the table that listed it
    corpus: str = ""  # folder of the corpus among several in a combined one


@dataclass
class ImageListing:
    """A corpus, or one of several in a folder, as it describes itself; made by one of the layouts' readers.

    Attributes:
        images: what is to be opened.
        rejections: files and rows that are not, with reasons.
        units: the unit of each numeric target that the layout has, empty text for none.
        notes: sentences on what was found and done.
        folder: of the corpus among several in a combined one; empty: it is the only one.
    """

    images: list[ListedImage] = field(default_factory=list)
    rejections: Rejections = field(default_factory=Rejections)
    units: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folder: str = ""

    def refuse(self, path: str, refusal: Refusal, *, label: str | None = None, row: int | None = None) -> None:
        """Leave out a file or row; ``path`` is table text."""
        self.rejections.add_file(path, refusal, label, row)


def is_image_name(name: str) -> bool:
    """Whether the extension, in any case, is one of a picture."""
    return PurePath(name).suffix.lower() in IMAGE_EXTENSIONS


def image_refusal(files: CorpusFiles, path: str) -> Refusal | None:
    """Why the normalized ``path`` cannot be used, in the words for images; None when it is a file in the corpus."""
    refusal = files.check(path)
    if refusal is None:
        return None
    if refusal.reason == "missing_video":
        return Refusal("missing_image", refusal.detail)
    if refusal.reason == "not_a_file":
        return Refusal("not_a_file", f"{path!r} is not a regular file. List image files only.")
    return refusal


def walk_images(files: CorpusFiles, top: str, listing: ImageListing) -> Iterator[str]:
    """Paths (not yet table text) of all images below ``top``; linked folders and other files are refused."""
    for path, is_folder in walk_files(files.root, top):
        if is_folder:
            listing.refuse(path_to_text(path), folder_link_refusal(files, path))
        elif is_image_name(path):
            yield path
        else:
            detail = f"{path!r} has no extension of an image. Rename it if it is one."
            listing.refuse(path_to_text(path), Refusal("unknown_extension", detail))


def folders_of(folder: Path) -> list[str]:
    """The names of the folders in ``folder`` that are not hidden, sorted.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"corpus {escape_text(str(folder))!r}: {error.strerror}. Allow its reading.") from error
    return [entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir()]


def classes_without_images(names: Iterable[str]) -> list[str]:
    """A sentence on classes that the corpus names and has no image of, if there are any."""
    empty = sorted(names)
    if not empty:
        return []
    more = f" and {len(empty) - _MOST_SHOWN:,} more" if len(empty) > _MOST_SHOWN else ""
    shown = ", ".join(repr(escape_text(name)) for name in empty[:_MOST_SHOWN])
    return [f"{len(empty):,} classes have no image, so nothing is said of them: {shown}{more}."]


def joined(*parts: str) -> str:
    """A path with '/' of those parts that are not empty."""
    return "/".join(part for part in parts if part)


def parts_below(path: str, top: str) -> tuple[str, ...]:
    """The names that lead from ``top`` to ``path``."""
    return PurePosixPath(path).relative_to(top).parts if top else PurePosixPath(path).parts


def read_lines(path: Path) -> list[str]:
    """The stripped lines of a text file, with their places kept: empty ones too. UTF-8, other bytes escaped.

    Raises:
        UsageError: it is missing or cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(
            f"{str(path)!r}: {error.strerror}. Restore the corpus's own list, or choose another image_layout."
        ) from error
    return [line.strip() for line in text.splitlines()]


def targets_of(values: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Targets of one image in a fixed order."""
    return tuple(sorted(values.items()))


def joined_units(listings: Iterable[ImageListing]) -> dict[str, str]:
    """The units of several listings' targets.

    Raises:
        UsageError: a target has two units.
    """
    units: dict[str, str] = {}
    for listing in listings:
        for name, unit in listing.units.items():
            if units.setdefault(name, unit) != unit:
                raise UsageError(
                    f"target {name!r}: has the unit {units[name]!r} in one part of the corpus and {unit!r} in another. "
                    "Convert one of them, or name it otherwise."
                )
    return units


def manifests_in(folder: Path) -> list[str]:
    """Names of the tables in ``folder`` that may be manifests; only those called so where there are any."""
    names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    preferred = [name for name in names if name in MANIFEST_NAMES]
    return preferred or [name for name in names if name.lower().endswith((".csv", ".parquet")) and not is_hidden(name)]


def list_images(corpus: Path, layout: str = "auto") -> tuple[CorpusFiles, str, tuple[ImageListing, ...]]:
    """List what a corpus holds, without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        layout: one of ``IMAGE_LAYOUTS``, or auto: by what lies in the folder.

    Returns:
        Its files, the layout it has, and one listing, or one for each folder of a combined corpus.

    Raises:
        UsageError: it is none of the layouts, or lacks what the one asked for needs; the message tells which there are.
        LeakageError: the official lists of Nutrition5k share dishes.
    """
    if layout == "auto" or not corpus.exists():
        loader = recognised(IMAGE_LAYOUTS, corpus)
    else:
        loader = IMAGE_LAYOUTS.get(layout)
        if corpus.is_file() and not loader.recognises(corpus):
            raise UsageError(f"image_layout: got {layout!r}, but corpus {str(corpus)!r} is a file. Use auto.")
    files, below = (CorpusFiles(corpus), "") if corpus.is_dir() else (CorpusFiles(corpus.parent), corpus.name)
    listed = loader.read(files, below)
    return files, loader.name, (listed,) if isinstance(listed, ImageListing) else tuple(listed)
