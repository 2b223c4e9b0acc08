"""From a path the user gives to the images it lists, whichever of the layouts it has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus.image_listing import ImageListing, folders_of, is_image_name, joined
from fvc_lib.corpus.listing import CorpusFiles, is_hidden
from fvc_lib.corpus.sources.images.food101 import is_food101, list_food101
from fvc_lib.corpus.sources.images.general import MANIFEST_NAMES, list_folder, list_manifest
from fvc_lib.corpus.sources.images.nutrition5k import is_nutrition5k, list_nutrition5k
from fvc_lib.services.atomic_files import escape_text
from fvc_lib.services.errors import UsageError

ACCEPTED = (
    "A corpus of images is (a) Food-101's folder with images/ and meta/, (b) Nutrition5k's with metadata/, dish_ids/ "
    "and imagery/, (c) a folder that holds such folders, (d) a CSV or Parquet manifest with the column 'path' and a "
    "'class' or columns of numbers, or a folder with a manifest.csv in it, or (e) a folder with one folder per class."
)
_TABLES = (".csv", ".parquet")


def list_images(corpus: Path, layout: str = "auto") -> tuple[CorpusFiles, str, tuple[ImageListing, ...]]:
    """List what a corpus holds, without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        layout: food101, nutrition5k, combined, folder, manifest, or auto: by what lies in the folder.

    Returns:
        Its files, the layout it has, and one listing, or one for each folder of a combined corpus.

    Raises:
        UsageError: it is none of the layouts, or lacks what the one asked for needs; the message tells which there are.
        LeakageError: the official lists of Nutrition5k share dishes.
    """
    if corpus.is_file() and corpus.suffix.lower() in _TABLES:
        if layout not in ("auto", "manifest"):
            raise UsageError(f"image_layout: got {layout!r}, but corpus {str(corpus)!r} is a manifest. Use auto.")
        files = CorpusFiles(corpus.parent)
        return files, "manifest", (list_manifest(files, corpus.name),)
    if not corpus.is_dir():
        problem = "a file that is no table" if corpus.exists() else "no such file or folder"
        raise UsageError(f"corpus {str(corpus)!r}: {problem}. {ACCEPTED}")
    files = CorpusFiles(corpus)
    found = _layout_of(corpus) if layout == "auto" else layout
    if found == "combined":
        return files, found, _list_combined(files)
    return files, found, (_READERS[found](files, ""),)


def _list_manifest_in(files: CorpusFiles, below: str) -> ImageListing:
    names = _manifests(files.root / below)
    if len(names) != 1:
        got = ", ".join(repr(name) for name in names) or "none"
        raise UsageError(
            f"corpus {str(files.root / below)!r}: wanted one manifest in it, found {got}. Give the path of the "
            f"manifest itself as corpus. {ACCEPTED}"
        )
    return list_manifest(files, joined(below, names[0]))


_READERS: dict[str, Callable[[CorpusFiles, str], ImageListing]] = {
    "food101": list_food101,
    "nutrition5k": list_nutrition5k,
    "manifest": _list_manifest_in,
    "folder": list_folder,
}


def _list_combined(files: CorpusFiles) -> tuple[ImageListing, ...]:
    """A listing for each folder that is a corpus by itself; classes of one name are one class."""
    kinds = {name: _layout_of(files.root / name, nested=True) for name in folders_of(files.root)}
    if not kinds:
        raise UsageError(f"corpus {str(files.root)!r}: has no folders to combine. {ACCEPTED}")
    return tuple(_in_folder(_READERS[kind](files, name), escape_text(name)) for name, kind in kinds.items())


def _in_folder(listing: ImageListing, folder: str) -> ImageListing:
    """The listing of one corpus of several: groups of equal names in two of them are two groups."""
    images = [
        replace(image, corpus=folder, stated_group=joined(folder, image.stated_group) if image.stated_group else None)
        for image in listing.images
    ]
    return replace(listing, images=images, folder=folder)


def _layout_of(folder: Path, *, nested: bool = False) -> str:
    """The layout that ``folder`` looks like; a folder of such folders is combined."""
    if is_food101(folder):
        return "food101"
    if is_nutrition5k(folder):
        return "nutrition5k"
    if any((folder / name).is_file() for name in MANIFEST_NAMES):
        return "manifest"
    inner = folders_of(folder)
    if not nested and any(_layout_of(folder / name, nested=True) != "folder" for name in inner):
        return "combined"
    if not nested:
        _refuse_flat(folder, inner)
    return "folder"


def _refuse_flat(folder: Path, inner: list[str]) -> None:
    """A folder without classes has nothing to be learned; say what else the user may mean."""
    if inner:
        return
    tables = _manifests(folder)
    hint = f" Did you mean {str(folder / tables[0])!r}?" if tables else ""
    num_images = sum(is_image_name(name) for name in os.listdir(folder))  # noqa: PTH208 - names, not paths
    raise UsageError(
        f"corpus {str(folder)!r}: {num_images:,} images and no folders, so no image has a class or a number to learn."
        f"{hint} Sort the images into one folder per class, or list their classes or numbers in a manifest. {ACCEPTED}"
    )


def _manifests(folder: Path) -> list[str]:
    names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    preferred = [name for name in names if name in MANIFEST_NAMES]
    return preferred or [name for name in names if name.lower().endswith(_TABLES) and not is_hidden(name)]
