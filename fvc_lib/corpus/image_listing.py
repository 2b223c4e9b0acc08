"""A corpus of images as the layouts in ``fvc_lib.corpus.sources.images`` list it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fvc_lib.corpus.corpus_files import CorpusFiles, Rejections, some_of
from fvc_lib.corpus.listing import recognised
from fvc_lib.services.atomic_files import AnyPath, escape_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image of a corpus. Text is table text (``atomic_files.path_to_text``)."""

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
    """One corpus as a layout's reader describes it."""

    images: list[ListedImage] = field(default_factory=list)  # to be opened
    rejections: Rejections = field(default_factory=Rejections)
    units: dict[str, str] = field(default_factory=dict)  # of each numeric target; empty text for none
    notes: list[str] = field(default_factory=list)
    folder: str = ""  # of the corpus among several in a combined one; empty: it is the only one

    def note_empty_classes(self, names: Iterable[str]) -> None:
        """Add a note on classes that the corpus names without an image."""
        empty = sorted(set(names) - {image.class_label for image in self.images})
        if empty:
            shown = some_of([escape_text(name) for name in empty], 8)
            self.notes.append(f"{len(empty):,} classes have no image and are not learned: {shown}.")


def list_images(
    corpus: AnyPath, layout: str = "auto", *, allow_outside: bool = False
) -> tuple[CorpusFiles, str, tuple[ImageListing, ...]]:
    """List a corpus of images without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        layout: one of ``IMAGE_LAYOUTS``, or auto.
        allow_outside: as of ``read_corpus``.

    Returns:
        Its files, its layout, and one listing for each folder of a combined corpus, else one.

    Raises:
        UsageError: the corpus has none of the layouts, or not the requested one.
        LeakageError: the official lists of Nutrition5k share dishes.
    """
    corpus = Path(corpus)
    if layout == "auto" or not corpus.exists():
        loader = recognised(IMAGE_LAYOUTS, corpus)
    else:
        loader = IMAGE_LAYOUTS.get(layout)
        if corpus.is_file() and not loader.recognises(corpus):
            raise UsageError(f"image_layout: got {layout!r}, but corpus {str(corpus)!r} is a file. Use auto.")
    folder, below = (corpus, "") if corpus.is_dir() else (corpus.parent, corpus.name)
    files = CorpusFiles(folder, "image", allow_outside)
    listed = loader.read(files, below)
    return files, loader.name, (listed,) if isinstance(listed, ImageListing) else tuple(listed)
