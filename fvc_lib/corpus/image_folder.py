"""A plain folder of images: one folder per class, or one per part with the classes in it."""

from __future__ import annotations

from fvc_lib.corpus.image_listing import (
    ImageListing,
    ListedImage,
    classes_without_images,
    folders_of,
    image_refusal,
    parts_below,
    walk_images,
)
from fvc_lib.corpus.listing import CorpusFiles, Refusal
from fvc_lib.services.path_text import escape_text, path_to_text

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
    paths = list(walk_images(files, below, listing))
    folders = {parts[0] for path in paths if len(parts := parts_below(path, below)) > 1}
    has_parts = bool(folders) and all(name.lower() in _PART_FOLDERS for name in folders)
    for path in paths:
        names = parts_below(path, below)
        depth = 1 if has_parts else 0
        text, refusal = path_to_text(path), image_refusal(files, path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            listing.refuse(text, refusal)
            continue
        part = _PART_FOLDERS[names[0].lower()] if has_parts else None
        listing.images.append(ListedImage(text, "folder", class_label=escape_text(names[depth]), part=part))
    classes = {image.class_label for image in listing.images}
    named = set() if has_parts else {escape_text(name) for name in folders_of(files.root / below)}
    kept = f"; the folders {', '.join(sorted(folders))} are kept as parts" if has_parts else ""
    where = f" in {below!r}" if below else ""
    listing.notes.append(f"folder{where}: {len(listing.images):,} images in {len(classes):,} folders of classes{kept}.")
    listing.notes += classes_without_images(named - classes)
    return listing
