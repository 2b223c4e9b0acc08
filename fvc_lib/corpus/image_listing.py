"""What a corpus of images lists, as the layouts in ``fvc_lib.corpus.sources.images`` read it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fvc_lib.corpus.listing import CorpusFiles, Rejections, recognised, some_of
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
    """A corpus, or one of several in a folder, as it describes itself; made by one of the layouts' readers."""

    images: list[ListedImage] = field(default_factory=list)  # what is to be opened
    rejections: Rejections = field(default_factory=Rejections)  # files and rows that are not, with reasons
    # The unit of each numeric target that the layout has, empty text for none.
    units: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # sentences on what was found and done
    folder: str = ""  # of the corpus among several in a combined one; empty: it is the only one

    def note_empty_classes(self, names: Iterable[str]) -> None:
        """Add a sentence on those classes that the corpus names and has no image of, if there are any."""
        empty = sorted(set(names) - {image.class_label for image in self.images})
        if empty:
            shown = some_of([escape_text(name) for name in empty], 8)
            self.notes.append(f"{len(empty):,} classes have no image, so nothing is said of them: {shown}.")


def list_images(
    corpus: AnyPath, layout: str = "auto", *, allow_outside: bool = False
) -> tuple[CorpusFiles, str, tuple[ImageListing, ...]]:
    """List what a corpus of images holds, without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        layout: one of ``IMAGE_LAYOUTS``, or auto: by what lies in the folder.
        allow_outside: as of ``read_corpus``.

    Returns:
        Its files, the layout it has, and one listing, or one for each folder of a combined corpus.

    Raises:
        UsageError: it is none of the layouts, or lacks what the one asked for needs; the message tells which there are.
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
