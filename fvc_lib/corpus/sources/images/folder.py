"""Folders of images, one per class, possibly below folders of parts; and folders of several corpora."""

from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus import listing
from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, joined, parts_below
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.label_table import PART_NAMES, tables_in
from fvc_lib.corpus.listing import CorpusLoader
from fvc_lib.corpus.sources.published import folders_in
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

_COMBINED_RANK = 2


def list_folder(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the images of the folder ``below`` the root of ``files``; the first folder below it is the class.

    If all those folders are called like parts (train, val, test), the class is the next folder. Images without a
    folder of a class are rejected.
    """
    found = ImageListing()
    folders = folders_in(files.root / below)
    depth = int(bool(folders) and all(name.lower() in PART_NAMES for name in folders))
    for path in files.walk(below, found.rejections):
        names = parts_below(path, below)
        refusal = files.check(path)
        if refusal is None and len(names) < depth + 2:
            refusal = Refusal("no_class", f"{path!r} lies in no folder of a class. Move it into one.")
        if refusal is not None:
            found.rejections.add_file(path_to_text(path), refusal)
            continue
        part = PART_NAMES[names[0].lower()] if depth else None
        found.images.append(ListedImage(path_to_text(path), "folder", escape_text(names[depth]), part=part))
    num_classes = len({image.class_label for image in found.images})
    parts = f", in the parts {', '.join(folders)}" if depth else ""
    found.notes.append(f"folder {below}: {len(found.images):,} images in {num_classes:,} folders of classes{parts}.")
    if not depth:
        found.note_empty_classes(map(escape_text, folders))
    return found


def _lacks(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    tables = tables_in(folder)
    hint = f" Did you mean {str(folder / tables[0])!r}?" if tables else ""
    return (
        f"a folder without folders, so no image has a class or a number to learn.{hint} Sort the images into one "
        "folder per class, or list their classes or numbers in a manifest."
    )


def list_combined(files: CorpusFiles, below: str = "") -> tuple[ImageListing, ...]:
    """List each folder as a corpus by itself. Equal class names are one class; equal group names are two groups.

    Raises:
        UsageError: there is no folder.
    """
    listings = []
    for name in folders_in(files.root):
        found = (_inner(files.root / name) or IMAGE_LAYOUTS.get("folder")).read(files, name)
        folder = escape_text(name)
        images = [
            replace(image, corpus=folder, stated_group=image.stated_group and joined(folder, image.stated_group))
            for image in found.images
        ]
        listings.append(replace(found, images=images, folder=folder))
    if not listings:
        raise UsageError(f"corpus {str(files.root)!r}: has no folders to combine. Put each corpus into one of its own.")
    return tuple(listings)


def _inner(folder: Path) -> CorpusLoader | None:
    """Return the loader of a published corpus or manifest in ``folder``, if it is one."""
    loaders = [loader for loader in listing.by_rank(IMAGE_LAYOUTS) if loader.rank < _COMBINED_RANK]
    return next((loader for loader in loaders if loader.recognises(folder)), None)


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="combined",
        accepted="a folder that holds several such folders",
        recognises=lambda path: any(_inner(path / name) for name in folders_in(path)),
        read=list_combined,
        rank=_COMBINED_RANK,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: bool(folders_in(path)),
        read=list_folder,
        lacks=_lacks,
        rank=3,
    )
)
