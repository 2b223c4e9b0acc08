"""Plain folders of images: one per class, or one per part with the classes in it; and folders of several corpora."""

import os
from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.label_table import PART_NAMES, tables_in
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Refusal
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

_PART_FOLDERS = ("train", "val", "valid", "validation", "test")
_COMBINED_RANK = 2


def list_folder(files: CorpusFiles, below: str = "") -> ImageListing:
    """The images in the folder ``below`` the root of ``files``; the first folder below it is the class.

    Where those folders are all called train, val, validation or test, they are parts, and the class is the next one.
    Images beside the class folders have no class and are left out.
    """
    found = ImageListing()
    paths = list(files.walk(below, found.rejections))
    folders = {parts[0] for path in paths if len(parts := listing.parts_below(path, below)) > 1}
    has_parts = bool(folders) and all(name.lower() in _PART_FOLDERS for name in folders)
    depth = 1 if has_parts else 0
    for path in paths:
        names = listing.parts_below(path, below)
        text, refusal = path_to_text(path), files.check(path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            found.rejections.add_file(text, refusal)
            continue
        part = PART_NAMES[names[0].lower()] if has_parts else None
        found.images.append(ListedImage(text, "folder", class_label=escape_text(names[depth]), part=part))
    num_classes = len({image.class_label for image in found.images})
    kept = f"; the folders {', '.join(sorted(folders))} are kept as parts" if has_parts else ""
    where = f" in {below!r}" if below else ""
    found.notes.append(f"folder{where}: {len(found.images):,} images in {num_classes:,} folders of classes{kept}.")
    if not has_parts:
        found.note_empty_classes(escape_text(name) for name in folders_of(files.root / below))
    return found


def _lacks(folder: Path) -> str:
    """A folder without classes has nothing to be learned; say what else the user may mean."""
    if not folder.is_dir():
        return ""
    tables = tables_in(folder)
    hint = f" Did you mean {str(folder / tables[0])!r}?" if tables else ""
    num_images = sum(listing.is_named_as("image", name) for name in os.listdir(folder))  # noqa: PTH208 - names, not paths
    return (
        f"{num_images:,} images and no folders, so no image has a class or a number to learn.{hint} Sort the images "
        "into one folder per class, or list their classes or numbers in a manifest."
    )


def list_combined(files: CorpusFiles, below: str = "") -> tuple[ImageListing, ...]:
    """A listing for each folder that is a corpus by itself; a plain folder of classes is one, too.

    Classes of one name are one class. Groups of equal names in two of them are two groups.

    Raises:
        UsageError: there is no folder.
    """
    listings = []
    for name in folders_of(files.root):
        found = (_inner(files.root / name) or IMAGE_LAYOUTS.get("folder")).read(files, name)
        folder = escape_text(name)
        images = [
            replace(
                image, corpus=folder, stated_group=image.stated_group and listing.joined(folder, image.stated_group)
            )
            for image in found.images
        ]
        listings.append(replace(found, images=images, folder=folder))
    if not listings:
        raise UsageError(f"corpus {str(files.root)!r}: has no folders to combine. Put each corpus into one of its own.")
    return tuple(listings)


def folders_of(folder: AnyPath) -> list[str]:
    """The names of the folders in ``folder`` that are not hidden, sorted.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"corpus {escape_text(str(folder))!r}: {error.strerror}. Allow its reading.") from error
    return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]


def _inner(folder: Path) -> CorpusLoader | None:
    """The loader of a folder in it; none for a folder that is neither a published corpus nor has a manifest."""
    loaders = [loader for loader in listing.by_rank(IMAGE_LAYOUTS) if loader.rank < _COMBINED_RANK]
    return next((loader for loader in loaders if loader.recognises(folder)), None)


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="combined",
        accepted="a folder that holds several such folders",
        recognises=lambda path: path.is_dir() and any(_inner(path / name) for name in folders_of(path)),
        read=list_combined,
        rank=_COMBINED_RANK,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: path.is_dir() and bool(folders_of(path)),
        read=list_folder,
        lacks=_lacks,
        rank=3,
    )
)
