"""Build the index of task image: each usable image with its class, numbers, leakage group and part of the split.

Task image learns classes and numbers (such as calories) of single pictures. A leakage group holds copies of one
picture and pictures of one subject; the split never divides it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.copies.likeness import SamePictures
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.corpus_files import (
    NOT_A_LOSS,
    CorpusFiles,
    Refusal,
    Rejections,
    counts_text,
    disputed,
    reasons_text,
    refuse_lost,
    some_of,
    written_when_refused,
)
from fvc_lib.corpus.folds import split_parts
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.probing import IMAGE_FILES, ProbedImage, probe_files
from fvc_lib.corpus.samples.dishes import generate_sample_dishes
from fvc_lib.corpus.sources.images import ImageListing, ListedImage, list_images
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, did_you_mean
from fvc_lib.services.tables import IMAGE_TARGETS, IMAGES, PARTS, check_table, frame_of
from fvc_lib.video.decode.still_image import ImageFacts

# Reasons that are no fault of the corpus.
_NO_LOSS = NOT_A_LOSS | {"copy_across_split", "no_picture", "nothing_to_learn"}
# Of copies in several parts, the part with the lowest number keeps its picture.
_PREFERRED = {"test": 0, "validation": 1, "train": 2, None: 3}
_HELD_OUT = ("test", "validation")
NO_TARGETS = "none"
_QUARTERS = (0.25, 0.5, 0.75)
_LEAST_GROUPS = 12  # without a class, so that each quarter has a group for each part


@dataclass(frozen=True)
class ImageIndex:
    """The index of a corpus of images: the tables that a run of task image starts from."""

    images: pl.DataFrame  # IMAGES table, sorted by ``image_id``
    targets: pl.DataFrame  # IMAGE_TARGETS table of the known numbers, sorted by image and target
    rejected: pl.DataFrame  # REJECTED table
    root: Path  # absolute folder that each path is relative to
    classes: tuple[str, ...]  # the classes that occur, sorted
    units: Mapping[str, str]  # unit of each target, in the requested order
    layout: str  # food101, nutrition5k, combined, folder or manifest
    notes: tuple[str, ...]  # sentences with counts


def image_root(config: RunConfig) -> Path:
    """Return the absolute folder that the paths of the index are relative to, without reading anything."""
    corpus = Path(config.corpus or Path(config.data_dir) / "sample_dishes")
    return CorpusFiles(corpus.parent if corpus.is_file() else corpus).root


def index_images(
    config: RunConfig,
    *,
    rejected_path: AnyPath | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> ImageIndex:
    """List a corpus, decode each image once, and divide the usable ones into train, validation and test.

    The tables depend only on the files, their lists and ``config``, not on file order, worker count or location.

    Args:
        config: the run's configuration.
        rejected_path: write the REJECTED table here if the corpus is refused.
        progress: called with (done, total), first for the sample's dishes, then for decoded images.
        stop: called after each image; true stops, and a later call continues decoding.

    Raises:
        UsageError: the corpus has no known layout or lacks a requested target.
        DataError: nothing is usable, too much is lost, or a part of the split has no image.
        LeakageError: a group is on both sides of the official split.
        StoppedError: ``stop`` returned true.
    """
    if config.corpus:
        files, layout, listings = list_images(config.corpus, config.image_layout, allow_outside=config.allow_outside)
    else:
        sample = generate_sample_dishes(image_root(config), progress=progress, stop=stop)
        files, layout, listings = list_images(sample, "manifest")
    units = wanted_targets(config.targets, joined_units(listings))
    rejections = Rejections([row for each in listings for row in each.rejections.rows])
    with written_when_refused(rejections, rejected_path):
        images = _learnable(listings, units, rejections)
        probed, _ = probe_files(
            IMAGE_FILES, files.root, [image.path for image in images], Path(config.cache_dir) / "index",
            workers=config.workers, progress=progress, stop=stop,
        )  # fmt: skip
        facts = {path: result.facts for path, result in probed.items() if result.facts is not None}
        for image in images:
            if (result := probed[image.path]).facts is None:
                rejections.add_file(image.path, Refusal(result.reason, result.detail), image.class_label, image.row)
        images = [image for image in images if image.path in facts]
        copies = copies_among([probed[path] for path in sorted(facts)], config.near_duplicate_bits)
        groups, notes = groups_of_images(images, copies, looked_for=config.near_duplicate_bits > 0)
        images = settle_contents(images, {path: each.content_sha256 for path, each in facts.items()}, rejections)
        refuse_lost(files.root, "image", rejections.frame(), len(images), config.max_rejected_share, _NO_LOSS)
        images = [images[place] for place in without_copies_across(images, known_parts(images), copies, rejections)]
        parts, split_notes = _parts_of(images, listings, list(units), groups, config.seed)
        # Each corpus of a combined one was split by itself, so copies may have come apart.
        images = sorted(images, key=lambda image: facts[image.path].content_sha256)
        stated = [parts[image.path][0] for image in images]
        images = [images[place] for place in without_copies_across(images, stated, copies, rejections)]
        table, targets = _tables(images, facts, parts, groups, units)
        classes = _classes_of(table)
        if empty := [part for part in PARTS if part not in table["part"]]:
            raise DataError(
                f"the split leaves no image for {' and '.join(empty)} ({counts_text(table['part'])}). Add images of "
                "other groups, or change the corpus's own split."
            )
        if len(classes) < 2 and targets.is_empty():
            raise DataError(
                f"the images have {len(classes)} class ({', '.join(classes)}) and no number to predict. Add images of "
                "another class, or a manifest with numbers."
            )
    rejected = rejections.frame()
    notes = [*(note for each in listings for note in each.notes), *notes, *split_notes]
    if never := sorted(set(classes) - set(_classes_of(table.filter(part="train")))):
        notes.append(f"{len(never):,} classes have no training image: {some_of(never, 8)}.")
    if rejected.height:
        notes.append(f"Left out: {reasons_text(rejected)}.")
    return ImageIndex(table, targets, rejected, files.root, classes, units, layout, tuple(notes))


def _classes_of(images: pl.DataFrame) -> tuple[str, ...]:
    return tuple(images["class_label"].drop_nulls().unique().sort())


def _learnable(listings: Sequence[ImageListing], units: Mapping[str, str], rejections: Rejections) -> list[ListedImage]:
    """Return the images that have a class or a number in ``units``, sorted by path; reject the others.

    Numbers that are not in ``units`` are dropped from the images.
    """
    learnable = []
    for image in (image for each in listings for image in each.images):
        targets = tuple((name, value) for name, value in image.targets if name in units)
        if image.class_label is None and not targets:
            detail = f"{image.path!r} has no class and no number of the field targets. Fill one in."
            rejections.add_file(image.path, Refusal("nothing_to_learn", detail), row=image.row)
        else:
            learnable.append(replace(image, targets=targets))
    return sorted(learnable, key=lambda image: (image.path, image.row or 0))


def _parts_of(
    images: Sequence[ListedImage],
    listings: Sequence[ImageListing],
    targets: Sequence[str],
    group_of: Mapping[str, str],
    seed: int,
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return (parts, notes); ``parts`` maps a path to its part and to ``official`` or ``made``.

    A combined corpus (a folder of several corpora) is split corpus by corpus, because only some have an official split.
    """
    strata, parts, notes = (
        dict(zip(images, strata_of(images, targets), strict=True)),
        dict[str, tuple[str, str]](),
        list[str](),
    )
    for each in listings:
        own = [image for image in images if image.corpus == each.folder]
        if own:
            groups = [group_of[image.path] for image in own]
            split = split_parts(groups, [strata[image] for image in own], [image.part for image in own], seed=seed)
            notes.extend(f"{each.folder}: {note}" if each.folder else note for note in split.notes)
            parts.update(zip([image.path for image in own], zip(split.parts, split.sources, strict=True), strict=True))
    return parts, notes


def _tables(
    images: Sequence[ListedImage],
    facts: Mapping[str, ImageFacts],
    parts: Mapping[str, tuple[str, str]],
    groups: Mapping[str, str],
    units: Mapping[str, str],
) -> tuple[pl.DataFrame, pl.DataFrame]:
    id_of, rows, numbers = video_ids(facts[image.path].content_sha256 for image in images), [], []
    for image in images:
        known, group = facts[image.path], groups[image.path]
        image_id = id_of[known.content_sha256]
        rows.append((
            image_id, image.path, image.class_label, group, *parts[image.path], image.source, known.width,
            known.height, known.size_bytes, known.content_sha256,
        ))  # fmt: skip
        numbers += [(image_id, group, name, units[name], value) for name, value in sorted(image.targets)]
    targets = check_table(frame_of(numbers, IMAGE_TARGETS), IMAGE_TARGETS, "targets")
    return check_table(frame_of(rows, IMAGES), IMAGES, "images"), targets


# --- Targets, and the strata of images without a class.


def wanted_targets(wanted: Sequence[str], units: Mapping[str, str]) -> dict[str, str]:
    """Return the targets to predict with their units, in the requested order.

    Args:
        wanted: names, with or without unit (``calories`` or ``calories_kcal``). Empty means all targets; the single
            name ``none`` means no target.
        units: unit of each target of the corpus.

    Raises:
        UsageError: the corpus lacks a name, or ``none`` is not alone.
    """
    if not wanted:
        return dict(units)
    if tuple(wanted) == (NO_TARGETS,):
        return {}
    spelt = {f"{name}_{unit}": name for name, unit in units.items() if unit} | {name: name for name in units}
    for name in wanted:
        if name not in spelt:
            near, have = did_you_mean(name, spelt), ", ".join(units) or "no column of numbers"
            raise UsageError(f"targets: got {name!r}; the corpus has {have}.{near} Name some of these, or none alone.")
    return {spelt[name]: units[spelt[name]] for name in wanted}


def joined_units(listings: Iterable[ImageListing]) -> dict[str, str]:
    """Return the unit of each target that any of the listings has.

    Raises:
        UsageError: a target has two units.
    """
    units: dict[str, str] = {}
    for name, unit in (item for each in listings for item in each.units.items()):
        if units.setdefault(name, unit) != unit:
            raise UsageError(
                f"target {name!r}: has the unit {units[name]!r} in one part of the corpus and {unit!r} in another. "
                "Convert one of them, or rename it."
            )
    return units


def strata_of(images: Sequence[ListedImage], targets: Sequence[str]) -> list[str | None]:
    """Return the stratum of each image, (N,): what a split spreads evenly over its parts.

    It is the image's class. Without a class, it is the quartile of the first of ``targets`` that is known, else None.
    If the images without a class are in fewer than 12 groups, they all get None.
    """
    without_class = [image for image in images if image.class_label is None]
    if len({image.stated_group or image.path for image in without_class}) < _LEAST_GROUPS:
        return [image.class_label for image in images]
    numbers = [dict(image.targets) for image in without_class]
    edges: dict[str, list[float]] = {}
    for name in targets:
        if values := [known[name] for known in numbers if name in known]:
            edges[name] = np.quantile(values, _QUARTERS).tolist()
    strata = []
    for image in images:
        values_of = dict(image.targets)
        known = next((name for name in edges if name in values_of), None)
        quarter = known and f"{known} quarter {1 + int(np.searchsorted(edges[known], values_of[known]))}"
        strata.append(image.class_label or quarter)
    return strata


# --- Copies. A photograph that was saved again, resized, cropped or brightened is the same photograph: on both sides of
# a split it would be recognised instead of understood.


def copies_among(probed: Sequence[ProbedImage], near_duplicate_bits: int) -> dict[str, str]:
    """Map each path to a name that is the same for all copies: the smallest of their content hashes.

    Copies are equal files. Unless ``near_duplicate_bits`` is 0, pictures with near perceptual hashes and similar
    thumbnails are copies, too.
    """
    content = {image.path: image.facts.content_sha256 for image in probed if image.facts is not None}
    one_each = list({content[image.path]: image for image in probed}.values())
    links: list[tuple[int, int]] = []
    if near_duplicate_bits:
        judge = SamePictures([image.thumbnail for image in one_each])
        links = near_duplicate_links([image.perceptual_hash for image in one_each], near_duplicate_bits, judge)
    contents = [content[image.path] for image in one_each]
    components = dict(
        zip(contents, join_groups([GroupMember(each, each, each) for each in contents], links).group_ids, strict=True)
    )
    # In descending order, so that the smallest of a component comes last.
    smallest = {components[own]: own for own in sorted(contents, reverse=True)}
    return {path: smallest[components[own]] for path, own in content.items()}


def groups_of_images(
    images: Sequence[ListedImage], copies: Mapping[str, str], *, looked_for: bool = True
) -> tuple[dict[str, str], list[str]]:
    """Return (groups, notes); ``groups`` maps each path to its group.

    Stated groups that share a copy are joined. An image without a stated group is grouped with its copies. Copies do
    not join groups in two cases: if they are in different parts of the official split (the training copy is then left
    out), and if they are in different corpora of a combined corpus (each corpus is split separately).

    Args:
        images: the usable images.
        copies: result of ``copies_among``.
        looked_for: whether near-copies were searched; only affects the notes.
    """
    keys = {
        image.path: f"{copies[image.path]} {part if part in _HELD_OUT else 'train'} {image.corpus}"
        for image, part in zip(images, known_parts(images), strict=True)
    }
    stated = [image for image in images if image.stated_group is not None]
    members = [GroupMember(image.path, image.path, keys[image.path], image.stated_group) for image in stated]
    grouping = join_groups(members)
    home = {keys[image.path]: group for image, group in zip(stated, grouping.group_ids, strict=True)}
    groups = {path: home.get(key, f"image {copies[path][:16]}") for path, key in keys.items()}
    notes = []
    if grouping.merges:
        notes.append(f"{len(grouping.merges):,} stated groups were joined to others, with which they share a copy.")
    if looked_for:
        sizes = [size for size in Counter(copies[image.path] for image in images).values() if size > 1]
        notes.append(f"{sum(sizes):,} of {len(images):,} images have copies, in {len(sizes):,} sets.")
    elif len(stated) < len(images):
        notes.append(
            f"{len(images) - len(stated):,} images have no stated group, and near-copies were not looked for: a copy "
            "may be trained on and tested on. Set near_duplicate_bits, or state groups in a manifest."
        )
    return groups, notes


def without_copies_across(
    images: Sequence[ListedImage], parts: Sequence[str], copies: Mapping[str, str], rejections: Rejections
) -> list[int]:
    """Return the positions of the images to keep, so that no two parts hold copies of one picture; reject the others.

    Of copies in several parts, the test part keeps its picture before validation, and validation before train. So the
    test part is never reduced, and results on an official split remain comparable.

    Args:
        images: (N,).
        parts: (N,), train, validation or test; images whose part is not decided yet have train.
        copies: result of ``copies_among``.
        rejections: receives the rejected images.
    """
    holders: dict[str, tuple[int, str, str]] = {}
    for image, part in zip(images, parts, strict=True):
        if part in _HELD_OUT:
            shown = (_PREFERRED[part], image.path, part)
            holders[copies[image.path]] = min(shown, holders.get(copies[image.path], shown))
    remaining = []
    for position, (image, part) in enumerate(zip(images, parts, strict=True)):
        _, twin, holder = holders.get(copies[image.path], (0, "", part))
        if part == holder:
            remaining.append(position)
            continue
        detail = (
            f"looks like {twin!r} of the {holder} part, or like a copy of it. If they only look alike, lower "
            "near_duplicate_bits (0: off)."
        )
        rejections.add_file(image.path, Refusal("copy_across_split", detail), image.class_label, image.row)
    return remaining


def known_parts(images: Sequence[ListedImage]) -> list[str]:
    """Return a part for each image, (N,): its official part, else that of its stated group, else ``train``."""
    stated: defaultdict[str | None, set[str]] = defaultdict(set)
    for image in images:
        if image.part is not None:
            stated[image.stated_group].add(image.part)
    of_group: dict[str | None, str] = {
        group: min(parts) for group, parts in stated.items() if group and len(parts) == 1
    }
    return [image.part or of_group.get(image.stated_group, "train") for image in images]


def settle_contents(
    images: Sequence[ListedImage], contents: Mapping[str, str], rejections: Rejections
) -> list[ListedImage]:
    """Return one image for each file content, sorted by path; reject the others.

    The image to keep is chosen in this order: in the test part, in validation, with a class, with most numbers, first
    by path. If files of equal content have two classes, or two numbers for one target, all are rejected.
    """
    sharing: defaultdict[str, list[ListedImage]] = defaultdict(list)
    for image in images:
        sharing[contents[image.path]].append(image)
    usable = []
    for copies in sharing.values():
        copies.sort(
            key=lambda image: (
                _PREFERRED[image.part], image.class_label is None, -len(image.targets), image.path, image.row or 0,
            )
        )  # fmt: skip
        first, shown = copies[0], disputed(sorted((image.path, image.class_label or "no class") for image in copies))
        targets = Counter(name for name, _ in {number for image in copies for number in image.targets})
        refusal = None
        if len({image.class_label for image in copies} - {None}) > 1:
            refusal = Refusal("conflicting_labels", f"one content with two classes: {shown}. Keep the right one.")
        elif twice := [name for name, count in targets.items() if count > 1]:
            refusal = Refusal("conflicting_targets", f"one content with two numbers for {min(twice)!r}: {shown}.")
        else:
            usable.append(first)
        for copy in copies if refusal else copies[1:]:
            across = copy.part == "train" and first.part in _HELD_OUT
            reason = "copy_across_split" if across else "duplicate_content"
            same = Refusal(reason, f"same content as {first.path!r}, which is used.")
            rejections.add_file(copy.path, refusal or same, copy.class_label, copy.row)
    return sorted(usable, key=lambda image: image.path)
