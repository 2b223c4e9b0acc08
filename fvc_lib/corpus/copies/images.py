"""Pictures that are copies of one another, to the byte or to the eye: which stay together, which are left out.

A photograph that was saved anew, resized, cropped or brightened is the same photograph. In training under one name and
in the test under another, it would be recognised and not understood.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.copies.likeness import SamePictures
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.listing import ListedImage, Refusal, Rejections
from fvc_lib.corpus.probing import ProbedImage

# The part that keeps its pictures where copies are on two sides; the others' are left out.
PREFERRED = {"test": 0, "validation": 1, "train": 2, None: 3}
_HELD_OUT = ("test", "validation")
_SAID = {"train": "training", "validation": "validation"}


@dataclass(frozen=True)
class Copies:
    """Which pictures are copies of one another."""

    of: Mapping[str, str]  # for each path what all copies of it share: the smallest content hash among them
    looked_for: bool  # whether near-copies were looked for, beside equal files


def copies_among(probed: Sequence[ProbedImage], near_duplicate_bits: int) -> Copies:
    """Find equal files, and pictures that look the same, by their hashes and thumbnails.

    With 0 for ``near_duplicate_bits`` only equal files; else see ``near_duplicates``.
    """
    content = {found.path: found.facts.content_sha256 for found in probed if found.facts is not None}
    one_each = list({content[found.path]: found for found in probed}.values())
    links: list[tuple[int, int]] = []
    if near_duplicate_bits:
        judge = SamePictures([found.thumbnail for found in one_each])
        links = near_duplicate_links([found.perceptual_hash for found in one_each], near_duplicate_bits, judge)
    members = [GroupMember(found.path, found.path, content[found.path]) for found in one_each]
    smallest: dict[str, str] = {}
    components = join_groups(members, links).group_ids
    for found, component in zip(one_each, components, strict=True):
        smallest[component] = min(content[found.path], smallest.get(component, content[found.path]))
    shared = {content[found.path]: smallest[name] for found, name in zip(one_each, components, strict=True)}
    return Copies({path: shared[own] for path, own in content.items()}, near_duplicate_bits > 0)


def groups_of_images(images: Sequence[ListedImage], copies: Copies) -> tuple[dict[str, str], list[str]]:
    """The group of each path, and sentences where stated groups were joined and where none was stated.

    An image without a stated group is a group with its copies, called by their content. Stated groups that share a copy
    are one group, as in ``groups.join_groups``: the other frames of a dish that is also filed as another one belong to
    both. Groups that the official split has on two sides stay two (there the copy in training is left out), and so do
    those of different corpora in a combined one, each of which is split by itself.
    """
    keys = {
        image.path: f"{copies.of[image.path]} {part if part in _HELD_OUT else 'train'} {image.corpus}"
        for image, part in zip(images, known_parts(images), strict=True)
    }
    stated = [image for image in images if image.stated_group is not None]
    members = [GroupMember(image.path, image.path, keys[image.path], image.stated_group) for image in stated]
    grouping = join_groups(members)
    home = {keys[image.path]: group for image, group in zip(stated, grouping.group_ids, strict=True)}
    groups = {path: home.get(key, f"image {copies.of[path][:16]}") for path, key in keys.items()}
    notes = []
    if grouping.merges:
        notes.append(f"{len(grouping.merges):,} times two stated groups share a copy of a picture: they are one group.")
    notes += _copies_notes(images, copies)
    if len(stated) < len(images) and not copies.looked_for:
        notes.append(
            f"{len(images) - len(stated):,} images have no stated group and stay together only with equal files: of a "
            "picture and its copy saved anew one may be trained on and the other tested on. Set near_duplicate_bits, "
            "or state groups in a manifest."
        )
    return groups, notes


def without_copies_across(
    images: Sequence[ListedImage], parts: Sequence[str], copies: Copies, rejections: Rejections
) -> tuple[list[int], list[str]]:
    """Leave out pictures with a copy in a part that is held out from theirs, as is done with equal files.

    The test part stays as it is, so results remain comparable with others on an official split; training loses what it
    could only help to recognise. Of copies in test and validation the test keeps its.

    Args:
        images: (N,).
        parts: (N,), as far as decided; what is undecided counts as training.
        copies: of their paths.
        rejections: receives what is left out.

    Returns:
        Places of the images that stay, and sentences on what was left out.
    """
    holders: dict[str, tuple[int, str, str]] = {}
    for image, part in zip(images, parts, strict=True):
        if part in _HELD_OUT:
            shown = (PREFERRED[part], image.path, part)
            holders[copies.of[image.path]] = min(shown, holders.get(copies.of[image.path], shown))
    kept: list[int] = []
    left_out: Counter[str] = Counter()
    for place, (image, part) in enumerate(zip(images, parts, strict=True)):
        _, twin, holder = holders.get(copies.of[image.path], (0, "", part))
        if part == holder:
            kept.append(place)
            continue
        detail = (
            f"looks like {twin!r} of the {holder} part, or like a copy of it, so it is not used elsewhere. Where they "
            "only look alike, lower near_duplicate_bits (0: off)."
        )
        rejections.add_file(image.path, Refusal("copy_across_split", detail), image.class_label, image.row)
        left_out[part] += 1
    return kept, [
        f"{count:,} of {parts.count(part):,} images of the {_SAID[part]} part ({count / parts.count(part):.1%}) look "
        "like images that are held out from it: left out, so that nothing tested on was learned."
        for part, count in sorted(left_out.items())
    ]


def known_parts(images: Sequence[ListedImage]) -> list[str]:
    """The part that each image is in by the corpus's word on it or on its stated group; else ``train``, to be cut."""
    said: defaultdict[str | None, set[str]] = defaultdict(set)
    for image in images:
        if image.part is not None:
            said[image.stated_group].add(image.part)
    of_group = {group: min(parts) for group, parts in said.items() if group and len(parts) == 1}
    return [image.part or of_group.get(image.stated_group or "", "train") for image in images]


def _copies_notes(images: Sequence[ListedImage], copies: Copies) -> Iterable[str]:
    if not copies.looked_for:
        return
    classes: defaultdict[str, set[str]] = defaultdict(set)
    sharing: defaultdict[str, set[str]] = defaultdict(set)
    for image in images:
        sharing[copies.of[image.path]].add(image.path)
        if image.class_label is not None:
            classes[copies.of[image.path]].add(image.class_label)
    found = {name: sorted(paths) for name, paths in sharing.items() if len(paths) > 1}
    if not found:
        yield f"No two of {len(images):,} images are copies of one another."
        return
    largest = max(found.values(), key=lambda paths: (len(paths), paths))
    disputed = sorted(min(found[name]) for name in found if len(classes[name]) > 1)
    yield (
        f"{sum(map(len, found.values())):,} images are copies of one another or look so (saved anew, resized, cropped, "
        f"mirrored, brightened): {len(found):,} sets, the largest of {len(largest):,} (with {min(largest)!r}). No set "
        "is divided by the split."
    )
    if disputed:
        yield (
            f"{len(disputed):,} of these sets have pictures of more than one class, such as that of {disputed[0]!r}: "
            "look at them."
        )


# Equal files among the images: one stays, unless what is said of them differs.


def settle_contents(
    images: Sequence[ListedImage], contents: Mapping[str, str], rejections: Rejections
) -> tuple[list[ListedImage], list[str]]:
    """Keep one image of each content.

    Of copies on both sides of an official split the one outside the training part stays: the training copy would be a
    test image that was learned. Else the first by path stays. Copies with two classes, or two numbers for one target,
    are all left out: nobody knows which is right.

    Returns:
        The images that stay, sorted by path, and sentences on what was left out.
    """
    sharing: defaultdict[str, list[ListedImage]] = defaultdict(list)
    for image in images:
        sharing[contents[image.path]].append(image)
    kept, counts = [], dict.fromkeys(_LEFT_OUT, 0)
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
    return sorted(kept, key=lambda image: image.path), [
        f"{counts[what]:,} {how}" for what, how in _LEFT_OUT.items() if counts[what]
    ]


def _preference(image: ListedImage) -> tuple[int, bool, int, str, int]:
    return PREFERRED[image.part], image.class_label is None, -len(image.targets), image.path, image.row or 0


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


_LEFT_OUT = {
    "class": "images whose content has two classes are left out, all of them.",
    "number": "images whose content has two numbers for one target are left out, all of them.",
    "copy": "exact copies of other images are left out.",
    "split": "training images are exact copies of official test or validation images: left out.",
}
