"""Equal files among the images: one stays, unless what is said of them differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fvc_lib.corpus.image_copies import PREFERRED
from fvc_lib.corpus.image_listing import ListedImage
from fvc_lib.corpus.listing import Refusal, Rejections


def settle_contents(
    images: Sequence[ListedImage], contents: Mapping[str, str], rejections: Rejections
) -> tuple[list[ListedImage], list[str]]:
    """Keep one image of each content.

    Of copies on both sides of an official split the one outside the training part stays: the training copy would be a
    test image that was learned. Else the first by path stays. Copies with two classes, or two numbers for one target,
    are all left out: nobody knows which is right.

    Args:
        images: readable images.
        contents: content hash of each path.
        rejections: receives what is left out.

    Returns:
        The images that stay, sorted by path, and sentences on what was left out.
    """
    sharing: defaultdict[str, list[ListedImage]] = defaultdict(list)
    for image in images:
        sharing[contents[image.path]].append(image)
    kept, counts = [], {"class": 0, "number": 0, "copy": 0, "split": 0}
    for copies in sharing.values():
        if len(copies) == 1:
            kept.append(copies[0])
            continue
        disputed = _dispute(copies)
        if disputed is not None:
            counts["class" if disputed.reason == "conflicting_labels" else "number"] += len(copies)
            _refuse(copies, disputed, rejections)
            continue
        first, *others = sorted(copies, key=_preference)
        kept.append(first)
        for copy in others:
            across = copy.part == "train" and first.part in ("test", "validation")
            counts["split" if across else "copy"] += 1
            why = f"of the official {first.part} part, so it is not trained on" if across else "which is used"
            reason = "copy_across_split" if across else "duplicate_content"
            _refuse([copy], Refusal(reason, f"same content as {first.path!r}, {why}."), rejections)
    return sorted(kept, key=lambda image: image.path), list(_notes(counts))


def _preference(image: ListedImage) -> tuple[int, bool, int, str, int]:
    return (
        PREFERRED[image.part],
        image.class_label is None,
        -len(image.targets),
        image.path,
        image.row or 0,
    )


def _dispute(copies: Sequence[ListedImage]) -> Refusal | None:
    classes = {image.class_label for image in copies if image.class_label is not None}
    if len(classes) > 1:
        shown = ", ".join(sorted(f"{image.path!r} ({image.class_label})" for image in copies))
        return Refusal("conflicting_labels", f"one content with two classes: {shown}. Keep the right one.")
    values: defaultdict[str, set[float]] = defaultdict(set)
    for image in copies:
        for name, value in image.targets:
            values[name].add(value)
    differing = sorted(name for name, found in values.items() if len(found) > 1)
    if differing:
        paths = ", ".join(sorted(repr(image.path) for image in copies))
        found = " and ".join(f"{value:g}" for value in sorted(values[differing[0]]))
        detail = f"one content with two numbers for {differing[0]!r}, {found}: {paths}. Keep the right one."
        return Refusal("conflicting_targets", detail)
    return None


def _refuse(images: Iterable[ListedImage], refusal: Refusal, rejections: Rejections) -> None:
    for image in images:
        rejections.add_file(image.path, refusal, image.class_label, image.row)


def _notes(counts: Mapping[str, int]) -> Iterable[str]:
    if counts["class"]:
        yield f"{counts['class']:,} images whose content has two classes are left out, all of them."
    if counts["number"]:
        yield f"{counts['number']:,} images whose content has two numbers for one target are left out, all of them."
    if counts["copy"]:
        yield f"{counts['copy']:,} exact copies of other images are left out."
    if counts["split"]:
        yield f"{counts['split']:,} training images are exact copies of official test or validation images: left out."
