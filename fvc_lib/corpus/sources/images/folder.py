"""A plain folder of images: one folder per class, or one per part with the classes in it."""

from __future__ import annotations

import os
from pathlib import Path

from fvc_lib.corpus import image_listing
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Refusal
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.registry import IMAGE_LAYOUTS

_PART_FOLDERS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def list_folder(files: CorpusFiles, below: str = "") -> ImageListing:
    """The images in the folder ``below`` the root of ``files``; the first folder below it is the class.

    Where those folders are all called train, val, validation or test, they are parts, and the class is the next one.
    Images beside the class folders have no class and are left out.
    """
    listing = ImageListing()
    paths = list(image_listing.walk_images(files, below, listing))
    folders = {parts[0] for path in paths if len(parts := image_listing.parts_below(path, below)) > 1}
    has_parts = bool(folders) and all(name.lower() in _PART_FOLDERS for name in folders)
    for path in paths:
        names = image_listing.parts_below(path, below)
        depth = 1 if has_parts else 0
        text, refusal = path_to_text(path), image_listing.image_refusal(files, path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            listing.refuse(text, refusal)
            continue
        part = _PART_FOLDERS[names[0].lower()] if has_parts else None
        listing.images.append(ListedImage(text, "folder", class_label=escape_text(names[depth]), part=part))
    classes = {image.class_label for image in listing.images}
    named = set() if has_parts else {escape_text(name) for name in image_listing.folders_of(files.root / below)}
    kept = f"; the folders {', '.join(sorted(folders))} are kept as parts" if has_parts else ""
    where = f" in {below!r}" if below else ""
    listing.notes.append(f"folder{where}: {len(listing.images):,} images in {len(classes):,} folders of classes{kept}.")
    listing.notes += image_listing.classes_without_images(named - classes)
    return listing


def _lacks(folder: Path) -> str:
    """A folder without classes has nothing to be learned; say what else the user may mean."""
    if not folder.is_dir():
        return ""
    tables = image_listing.manifests_in(folder)
    hint = f" Did you mean {str(folder / tables[0])!r}?" if tables else ""
    num_images = sum(image_listing.is_image_name(name) for name in os.listdir(folder))  # noqa: PTH208 - names, not paths
    return (
        f"{num_images:,} images and no folders, so no image has a class or a number to learn.{hint} Sort the images "
        "into one folder per class, or list their classes or numbers in a manifest."
    )


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: path.is_dir() and bool(image_listing.folders_of(path)),
        read=list_folder,
        lacks=_lacks,
        rank=3,
    )
)
