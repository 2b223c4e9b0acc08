"""Food-101's layout: ``images/<class>/<number>.jpg`` and ``meta/{classes,train,test}.txt``.

Lines of ``train.txt`` and ``test.txt`` look like ``apple_pie/1005649``. Source: L. Bossard, M. Guillaumin and L. Van
Gool, "Food-101 - Mining discriminative components with random forests", ECCV 2014.
"""

from pathlib import Path, PurePosixPath

from fvc_lib.corpus.corpus_files import CorpusFiles, Refusal, joined, parts_below
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.listing import CorpusLoader
from fvc_lib.corpus.sources.published import read_lines
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.registry import IMAGE_LAYOUTS

_LISTS = {"test": "test.txt", "train": "train.txt"}  # test first: an image in both lists is tested on


def list_food101(files: CorpusFiles, below: str = "") -> ImageListing:
    """List the images of the folder ``below`` the root of ``files``, in their official parts.

    Images of a class that ``classes.txt`` lacks, and images in neither list, are rejected. So are lines without a file.

    Raises:
        UsageError: one of the three lists is missing.
    """
    listed, top, meta = ImageListing(), joined(below, "images"), files.root / below / "meta"
    classes = {line for line in read_lines(meta / "classes.txt") if line}
    lines = {part: read_lines(meta / name) for part, name in _LISTS.items()}

    def reject(path: str, reason: str, detail: str, key: str, row: int | None = None) -> None:
        label = escape_text(key.partition("/")[0])
        listed.rejections.add_file(path_to_text(path), Refusal(reason, detail), label, row)

    there: dict[str, str] = {}
    for path in sorted(files.walk(top, listed.rejections), key=lambda path: (not path.endswith(".jpg"), path)):
        key = str(PurePosixPath(*parts_below(path, top)).with_suffix(""))
        if there.setdefault(key, path) != path:
            reject(path, "not_listed", f"{path!r} has the name of {there[key]!r}, which is used.", key)
    parts: dict[str, str] = {}
    for part, name in _LISTS.items():
        for row, key in enumerate(lines[part], start=1):
            if not key:
                continue
            path = there.get(key) or joined(top, f"{key}.jpg")
            refusal = _refusal(files, key, classes, path)
            if refusal is None and key in parts:
                refusal = Refusal("duplicate_path", f"{key!r} is listed already ({parts[key]}).")
            if refusal is not None:
                reject(path, refusal.reason, f"{name} row {row}: {refusal.detail}", key, row)
                parts.setdefault(key, "refused")
                continue
            parts[key] = part
            label = escape_text(key.partition("/")[0])
            listed.images.append(ListedImage(path_to_text(path), "food101", label, part=part, row=row))
    for key, path in there.items():
        if key not in parts:
            known = key.partition("/")[0] in classes
            reject(path, "not_listed" if known else "unknown_class", f"{path!r} is in no list of meta.", key)
    counts = [sum(image.part == part for image in listed.images) for part in ("train", "test")]
    listed.notes.append(
        f"Food-101: {len(classes):,} classes, {counts[0]:,} images in train.txt and {counts[1]:,} in test.txt; its own "
        "split is kept."
    )
    listed.note_empty_classes(classes)
    return listed


def _refusal(files: CorpusFiles, key: str, classes: set[str], path: str) -> Refusal | None:
    label, slash, _ = key.partition("/")
    malformed = Refusal("malformed_row", f"got {key!r}, wanted a line like apple_pie/1005649.")
    if not slash:
        return malformed
    if label not in classes:
        return Refusal("unknown_class", f"the class {label!r} is not in classes.txt. Add it there, or drop it.")
    normalized = files.normalized(path)
    if isinstance(normalized, Refusal):
        return normalized
    return files.check(path) if normalized == path else malformed  # pie/../soup/1 is no picture of a pie


def _recognises(folder: Path) -> bool:
    """Return whether the folder has the layout, even if one of its lists is missing."""
    lists = ("classes.txt", *_LISTS.values())
    return (folder / "images").is_dir() and any((folder / "meta" / name).is_file() for name in lists)


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="food101", accepted="Food-101's folder with images/ and meta/", recognises=_recognises, read=list_food101
    )
)
