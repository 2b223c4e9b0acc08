"""A folder of corpora of images: each folder in it is read as what it is; classes of one name are one class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fvc_lib.corpus.image_listing import ImageListing, folders_of, joined
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, by_rank
from fvc_lib.services.atomic_files import escape_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS

_RANK = 2


def list_combined(files: CorpusFiles, below: str = "") -> tuple[ImageListing, ...]:
    """A listing for each folder that is a corpus by itself; a plain folder of classes is one, too.

    Raises:
        UsageError: there is no folder.
    """
    names = folders_of(files.root)
    if not names:
        raise UsageError(f"corpus {str(files.root)!r}: has no folders to combine. Put each corpus into one of its own.")
    return tuple(
        _in_folder((_inner(files.root / name) or IMAGE_LAYOUTS.get("folder")).read(files, name), escape_text(name))
        for name in names
    )


def _inner(folder: Path) -> CorpusLoader | None:
    """The loader of a folder in it; none for a folder that is neither a published corpus nor has a manifest."""
    loaders = [loader for loader in by_rank(IMAGE_LAYOUTS) if loader.rank < _RANK]
    return next((loader for loader in loaders if loader.recognises(folder)), None)


def _in_folder(listing: ImageListing, folder: str) -> ImageListing:
    """The listing of one corpus of several: groups of equal names in two of them are two groups."""
    images = [
        replace(image, corpus=folder, stated_group=joined(folder, image.stated_group) if image.stated_group else None)
        for image in listing.images
    ]
    return replace(listing, images=images, folder=folder)


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="combined",
        accepted="a folder that holds several such folders",
        recognises=lambda path: path.is_dir() and any(_inner(path / name) for name in folders_of(path)),
        read=list_combined,
        rank=_RANK,
    )
)
