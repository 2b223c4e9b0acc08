"""Food-101's layout: ``images/<class>/<number>.jpg`` and ``meta/{classes,train,test}.txt``.

Lines of ``train.txt`` and ``test.txt`` look like ``apple_pie/1005649``. Source: L. Bossard, M. Guillaumin and L. Van
Gool, "Food-101 - Mining discriminative components with random forests", ECCV 2014.
"""

from pathlib import Path, PurePosixPath

from fvc_lib.corpus import listing
from fvc_lib.corpus.image_listing import ImageListing, ListedImage
from fvc_lib.corpus.listing import CorpusFiles, CorpusLoader, Refusal
from fvc_lib.corpus.sources.published import read_lines
from fvc_lib.services.atomic_files import escape_text, path_to_text
from fvc_lib.services.registry import IMAGE_LAYOUTS

_LISTS = (("test", "test.txt"), ("train", "train.txt"))  # test first: what both list stays there


def is_food101(folder: Path) -> bool:
    """Whether ``folder`` has the layout, be it that one of its lists is missing."""
    lists = ("classes.txt", *(name for _, name in _LISTS))
    return (folder / "images").is_dir() and any((folder / "meta" / name).is_file() for name in lists)


def list_food101(files: CorpusFiles, below: str = "") -> ImageListing:
    """The images of the folder ``below`` the root of ``files``, in its official parts.

    Images of a class that ``classes.txt`` does not have, and images in neither list, are left out: a class is never
    guessed. What a list names and is not there is reported.

    Raises:
        UsageError: one of the three lists is missing.
    """
    listed = ImageListing()
    meta = files.root / below / "meta"
    classes = {line for line in read_lines(meta / "classes.txt") if line}
    found = _found(files, listing.joined(below, "images"), listed)
    parts: dict[str, str] = {}
    for part, name in _LISTS:
        for row, key in enumerate(read_lines(meta / name), start=1):
            if not key:
                continue
            path = found.get(key) or listing.joined(below, "images", f"{key}.jpg")
            label = escape_text(key.partition("/")[0])
            refusal = _row_refusal(files, key, classes, path, parts.get(key))
            if refusal is not None:
                refusal = Refusal(refusal.reason, f"{name} row {row}: {refusal.detail}")
                listed.rejections.add_file(path_to_text(path), refusal, label, row)
                parts.setdefault(key, "refused")
                continue
            parts[key] = part
            listed.images.append(ListedImage(path_to_text(path), "food101", class_label=label, part=part, row=row))
    _refuse_rest(found, parts, classes, listed)
    counts = [sum(image.part == part for image in listed.images) for part in ("train", "test")]
    listed.notes.append(
        f"Food-101: {len(classes):,} classes, {counts[0]:,} images in train.txt and {counts[1]:,} in test.txt; its own "
        "split is kept."
    )
    listed.note_empty_classes(classes)
    return listed


def _found(files: CorpusFiles, top: str, listed: ImageListing) -> dict[str, str]:
    """``class/name without extension`` to path; of several files of one name a .jpg goes first."""
    found: dict[str, str] = {}
    for path in sorted(files.walk(top, listed.rejections), key=lambda path: (not path.endswith(".jpg"), path)):
        key = str(PurePosixPath(*listing.parts_below(path, top)).with_suffix(""))
        if key in found:
            detail = f"{path!r} has the name of {found[key]!r}, which is used. Remove one of them."
            listed.rejections.add_file(path_to_text(path), Refusal("not_listed", detail))
        else:
            found[key] = path
    return found


def _row_refusal(files: CorpusFiles, key: str, classes: set[str], path: str, taken: str | None) -> Refusal | None:
    label, slash, _ = key.partition("/")
    malformed = Refusal("malformed_row", f"got {key!r}, wanted a line like apple_pie/1005649.")
    if not slash:
        return malformed
    if taken is not None:
        return Refusal("duplicate_path", f"{key!r} is listed already ({taken}).")
    if label not in classes:
        return Refusal("unknown_class", f"the class {label!r} is not in classes.txt. Add it there, or drop it.")
    normalized = files.normalized(path)
    if isinstance(normalized, Refusal):
        return normalized
    return files.check(path) if normalized == path else malformed  # pie/../soup/1 is no picture of a pie


def _refuse_rest(found: dict[str, str], parts: dict[str, str], classes: set[str], listed: ImageListing) -> None:
    for key, path in found.items():
        if key in parts:
            continue
        label = key.partition("/")[0]
        if label in classes:
            refusal = Refusal("not_listed", f"{path!r} is in neither train.txt nor test.txt. List it, or leave it.")
        else:
            refusal = Refusal("unknown_class", f"{path!r}: the class {label!r} is not in classes.txt. Add it there.")
        listed.rejections.add_file(path_to_text(path), refusal, escape_text(label))


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="food101", accepted="Food-101's folder with images/ and meta/", recognises=is_food101, read=list_food101
    )
)
