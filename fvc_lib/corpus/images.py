"""The index of task image: each usable image with its class, numbers, group and part, and what is left out."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    counted,
    counts_text,
    disputed,
    refuse_lost,
    some_of,
    written_when_refused,
)
from fvc_lib.corpus.folds import split_parts
from fvc_lib.corpus.image_listing import ImageListing, ListedImage, list_images
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.probing import IMAGE_FILES, ProbedImage, probe_files
from fvc_lib.corpus.samples.dishes import generate_sample_dishes
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
    """The input of a run of task image."""

    images: pl.DataFrame  # IMAGES table, sorted by ``image_id``
    targets: pl.DataFrame  # IMAGE_TARGETS table of the known numbers, sorted by image and target
    rejected: pl.DataFrame  # REJECTED table
    root: Path  # absolute folder that each path is relative to
    classes: tuple[str, ...]  # the classes that occur, sorted
    units: Mapping[str, str]  # unit of each target, in the requested order
    layout: str  # food101, nutrition5k, combined, folder or manifest
    notes: tuple[str, ...]  # sentences with counts


@dataclass(frozen=True, slots=True)
class _Placed:
    """An image and its place in the split."""

    image: ListedImage
    image_id: str
    group_id: str
    stratum: str | None
    part: str
    split_source: str


def image_root(config: RunConfig) -> Path:
    """Return the absolute folder that the paths of the index are relative to, without reading anything."""
    corpus = Path(config.corpus) if config.corpus else _sample_folder(config)
    return CorpusFiles(corpus.parent if corpus.is_file() else corpus).root


def _sample_folder(config: RunConfig) -> Path:
    return Path(config.data_dir) / "sample_dishes"


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
        stop: asked after each image; a later call continues decoding.

    Raises:
        UsageError: the corpus has no known layout or lacks a requested target.
        DataError: nothing is usable, too much is lost, or a part of the split has no image.
        LeakageError: a group is on both sides of the official split.
        StoppedError: ``stop`` returned true.
    """
    if config.corpus:
        files, layout, listings = list_images(config.corpus, config.image_layout, allow_outside=config.allow_outside)
    else:
        sample = generate_sample_dishes(_sample_folder(config), progress=progress, stop=stop)
        files, layout, listings = list_images(sample, "manifest")
    units = wanted_targets(config.targets, joined_units(listings))
    rejections = Rejections([row for each in listings for row in each.rejections.rows])
    with written_when_refused(rejections, rejected_path):
        images = _learnable(listings, units, rejections)
        probed, _ = probe_files(
            IMAGE_FILES, files.root, [image.path for image in images], Path(config.cache_dir) / "index",
            workers=config.workers, progress=progress, stop=stop,
        )  # fmt: skip
        facts = {path: found.facts for path, found in probed.items() if found.facts is not None}
        for image in images:
            if (found := probed[image.path]).facts is None:
                rejections.add_file(image.path, Refusal(found.reason, found.detail), image.class_label, image.row)
        images = [image for image in images if image.path in facts]
        copies = copies_among([probed[path] for path in sorted(facts)], config.near_duplicate_bits)
        groups, notes = groups_of_images(images, copies, looked_for=config.near_duplicate_bits > 0)
        images = settle_contents(images, {path: each.content_sha256 for path, each in facts.items()}, rejections)
        refuse_lost(files.root, "image", rejections.frame(), len(images), config.max_rejected_share, _NO_LOSS)
        remaining = without_copies_across(images, known_parts(images), copies, rejections)
        placed, split_notes = _placed([images[place] for place in remaining], listings, units, facts, groups, config)
        # Each corpus of a combined one was split by itself, so copies may have come apart.
        remaining = without_copies_across(
            [each.image for each in placed], [each.part for each in placed], copies, rejections
        )
        placed = [placed[place] for place in remaining]
        table, targets = _tables(placed, facts, units)
        _refuse_unlearnable(table, targets)
    rejected, classes = rejections.frame(), _classes_of(table)
    notes = [*(note for each in listings for note in each.notes), *notes, *split_notes]
    if never := sorted(set(classes) - set(_classes_of(table.filter(part="train")))):
        notes.append(f"{len(never):,} classes have no training image: {some_of(never, 8)}.")
    if rejected.height:
        counts = counted(rejected["reason"])
        notes.append(f"Left out: {', '.join(f'{count:,} x {reason}' for reason, count in counts.items())}.")
    return ImageIndex(table, targets, rejected, files.root, classes, units, layout, tuple(notes))


def _classes_of(images: pl.DataFrame) -> tuple[str, ...]:
    return tuple(sorted(images["class_label"].drop_nulls().unique()))


def _refuse_unlearnable(images: pl.DataFrame, targets: pl.DataFrame) -> None:
    if empty := [part for part in PARTS if part not in images["part"]]:
        have = counts_text(images["part"])
        raise DataError(
            f"the split leaves no image for {' and '.join(empty)} ({have}). Add images of other groups, or change the "
            "corpus's own split."
        )
    classes = _classes_of(images)
    if len(classes) < 2 and targets.is_empty():
        raise DataError(
            f"the images have {len(classes)} class ({', '.join(classes)}) and no number to predict. Add images of "
            "another class, or a manifest with numbers."
        )


def _learnable(listings: Sequence[ImageListing], units: Mapping[str, str], rejections: Rejections) -> list[ListedImage]:
    """Return images with a class or a requested number, sorted; drop other numbers."""
    learnable = []
    for image in (image for each in listings for image in each.images):
        targets = tuple((name, value) for name, value in image.targets if name in units)
        if image.class_label is None and not targets:
            wanted = f"none of {', '.join(units)}" if units else "no number was asked for (targets)"
            detail = f"{image.path!r} has no class and {wanted}: there is nothing to learn from it. Fill one in."
            rejections.add_file(image.path, Refusal("nothing_to_learn", detail), row=image.row)
        else:
            learnable.append(replace(image, targets=targets))
    return sorted(learnable, key=lambda image: (image.path, image.row or 0))


def _placed(
    usable: Sequence[ListedImage],
    listings: Sequence[ImageListing],
    units: Mapping[str, str],
    facts: Mapping[str, ImageFacts],
    group_of: Mapping[str, str],
    config: RunConfig,
) -> tuple[list[_Placed], list[str]]:
    """Split each corpus of a combined one by itself, because only some have an official split."""
    id_of = video_ids(facts[image.path].content_sha256 for image in usable)
    strata = dict(zip(usable, strata_of(usable, list(units)), strict=True))
    placed: list[_Placed] = []
    notes: list[str] = []
    for each in listings:
        images = [image for image in usable if image.corpus == each.folder]
        if not images:
            continue
        groups = [group_of[image.path] for image in images]
        split = split_parts(
            groups, [strata[image] for image in images], [image.part for image in images],
            seed=config.seed,
        )  # fmt: skip
        notes.extend(f"{each.folder}: {note}" if each.folder else note for note in split.notes)
        placed.extend(
            _Placed(image, id_of[facts[image.path].content_sha256], group, strata[image], part, source)
            for image, group, part, source in zip(images, groups, split.parts, split.sources, strict=True)
        )
    return sorted(placed, key=lambda each: each.image_id), notes


def _tables(
    placed: Sequence[_Placed], facts: Mapping[str, ImageFacts], units: Mapping[str, str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    rows, numbers = [], []
    for each in placed:
        image, found = each.image, facts[each.image.path]
        rows.append((
            each.image_id, image.path, image.class_label, each.group_id, each.part, each.split_source, image.source,
            found.width, found.height, found.size_bytes, found.content_sha256,
        ))  # fmt: skip
        numbers += [(each.image_id, each.group_id, name, units[name], value) for name, value in sorted(image.targets)]
    targets = check_table(frame_of(numbers, IMAGE_TARGETS), IMAGE_TARGETS, "targets")
    return check_table(frame_of(rows, IMAGES), IMAGES, "images"), targets


# --- Targets, and the strata of images without a class.


def wanted_targets(wanted: Sequence[str], units: Mapping[str, str]) -> dict[str, str]:
    """Return the targets to predict with their units, in the requested order.

    Args:
        wanted: names, with or without their unit (``calories`` or ``calories_kcal``); empty: all; ``none`` alone: none.
        units: of the corpus's targets.

    Raises:
        UsageError: the corpus lacks a name, or ``none`` is not alone.
    """
    if not wanted:
        return dict(units)
    if NO_TARGETS in wanted:
        if len(wanted) > 1:
            raise UsageError(f"targets: got {', '.join(wanted)}; 'none' stands alone. Name targets, or none of them.")
        return {}
    spelt = {f"{name}_{unit}": name for name, unit in units.items() if unit} | {name: name for name in units}
    for name in wanted:
        if name not in spelt:
            have = f"The corpus has {', '.join(units)}" if units else "The corpus has no column of numbers"
            raise UsageError(f"targets: the corpus has no {name!r}.{did_you_mean(name, spelt)} {have}.")
    return {spelt[name]: units[spelt[name]] for name in wanted}


def joined_units(listings: Iterable[ImageListing]) -> dict[str, str]:
    """Return the units of all targets.

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
    """Return the stratum of each image: its class, else the quarter of its first known number, else None.

    Images without a class are not divided when they have few groups.
    """
    without_class = [image for image in images if image.class_label is None]
    if len({image.stated_group or image.path for image in without_class}) < _LEAST_GROUPS:
        return [image.class_label for image in images]
    numbers = [dict(image.targets) for image in without_class]
    edges: dict[str, list[float]] = {}
    for name in targets:
        values = [known[name] for known in numbers if name in known]
        edges[name] = np.quantile(values, _QUARTERS).tolist() if values else []

    def quarter(values: Mapping[str, float]) -> str | None:
        known = next((name for name in edges if name in values), None)
        place = known and 1 + int(np.searchsorted(edges[known], values[known], side="left"))
        return known and f"{known} quarter {place}"

    return [image.class_label or quarter(dict(image.targets)) for image in images]


# --- Copies. A photograph that was saved again, resized, cropped or brightened is the same photograph: on both sides of
# a split it would be recognised instead of understood.


def copies_among(probed: Sequence[ProbedImage], near_duplicate_bits: int) -> dict[str, str]:
    """Map each path to the smallest content hash among its copies.

    Copies are equal files and, unless ``near_duplicate_bits`` is 0, pictures with near hashes and like thumbnails.
    """
    content = {found.path: found.facts.content_sha256 for found in probed if found.facts is not None}
    one_each = list({content[found.path]: found for found in probed}.values())
    links: list[tuple[int, int]] = []
    if near_duplicate_bits:
        judge = SamePictures([found.thumbnail for found in one_each])
        links = near_duplicate_links([found.perceptual_hash for found in one_each], near_duplicate_bits, judge)
    contents = [content[found.path] for found in one_each]
    components = join_groups([GroupMember(each, each, each) for each in contents], links).group_ids
    smallest: dict[str, str] = {}
    for own, component in zip(contents, components, strict=True):
        smallest[component] = min(own, smallest.get(component, own))
    shared = dict(zip(contents, (smallest[component] for component in components), strict=True))
    return {path: shared[own] for path, own in content.items()}


def groups_of_images(
    images: Sequence[ListedImage], copies: Mapping[str, str], *, looked_for: bool = True
) -> tuple[dict[str, str], list[str]]:
    """Return the group of each path, and notes.

    Stated groups that share a copy are joined. An image without a stated group is grouped with its copies. Two cases
    stay apart: groups on two sides of the official split, whose training copy is left out, and groups of different
    corpora of a combined one, each of which is split by itself.
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
        notes.append(_copies_note(images, copies))
    elif len(stated) < len(images):
        notes.append(
            f"{len(images) - len(stated):,} images have no stated group, and near-copies were not looked for: a copy "
            "may be trained on and tested on. Set near_duplicate_bits, or state groups in a manifest."
        )
    return groups, notes


def _copies_note(images: Sequence[ListedImage], copies: Mapping[str, str]) -> str:
    sharing: defaultdict[str, list[ListedImage]] = defaultdict(list)
    for image in images:
        sharing[copies[image.path]].append(image)
    sets = [each for each in sharing.values() if len(each) > 1]
    num_mixed = sum(len({image.class_label for image in each} - {None}) > 1 for each in sets)
    mixed = f"; {num_mixed:,} sets have more than one class" if num_mixed else ""
    return f"{sum(map(len, sets)):,} of {len(images):,} images have copies, in {len(sets):,} sets{mixed}."


def without_copies_across(
    images: Sequence[ListedImage], parts: Sequence[str], copies: Mapping[str, str], rejections: Rejections
) -> list[int]:
    """Return the positions of images that have no copy in a part held out from theirs; reject the others.

    The test part stays as it is, so results remain comparable on an official split.

    Args:
        images: (N,).
        parts: (N,); undecided ones count as training.
        copies: of ``copies_among``.
        rejections: receives the others.
    """
    holders: dict[str, tuple[int, str, str]] = {}
    for image, part in zip(images, parts, strict=True):
        if part in _HELD_OUT:
            shown = (_PREFERRED[part], image.path, part)
            holders[copies[image.path]] = min(shown, holders.get(copies[image.path], shown))
    remaining: list[int] = []
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
    """Return the official part of each image or of its stated group, else ``train``."""
    stated: defaultdict[str | None, set[str]] = defaultdict(set)
    for image in images:
        if image.part is not None:
            stated[image.stated_group].add(image.part)
    of_group = {group: min(parts) for group, parts in stated.items() if group and len(parts) == 1}
    return [image.part or of_group.get(image.stated_group or "", "train") for image in images]


def settle_contents(
    images: Sequence[ListedImage], contents: Mapping[str, str], rejections: Rejections
) -> list[ListedImage]:
    """Return one image of each content, sorted by path; reject the others.

    Of copies on both sides of an official split the one outside the training part stays, else the first by path.
    Copies with two classes, or with two numbers for one target, are all rejected.
    """
    sharing: defaultdict[str, list[ListedImage]] = defaultdict(list)
    for image in images:
        sharing[contents[image.path]].append(image)
    usable = []
    for copies in sharing.values():
        first, *others = sorted(copies, key=_preference)
        refusal = next(_disputes(copies), None) if others else None
        if refusal is None:
            usable.append(first)
        for copy in others if refusal is None else copies:
            across = copy.part == "train" and first.part in _HELD_OUT
            reason = "copy_across_split" if across else "duplicate_content"
            same = Refusal(reason, f"same content as {first.path!r}, which is used.")
            rejections.add_file(copy.path, refusal or same, copy.class_label, copy.row)
    return sorted(usable, key=lambda image: image.path)


def _preference(image: ListedImage) -> tuple[int, bool, int, str, int]:
    return _PREFERRED[image.part], image.class_label is None, -len(image.targets), image.path, image.row or 0


def _disputes(copies: Sequence[ListedImage]) -> Iterator[Refusal]:
    shown = disputed(sorted((image.path, image.class_label or "no class") for image in copies))
    if len({image.class_label for image in copies} - {None}) > 1:
        yield Refusal("conflicting_labels", f"one content with two classes: {shown}. Keep the right one.")
    numbers = {number for image in copies for number in image.targets}
    if twice := [name for name, count in Counter(name for name, _ in numbers).items() if count > 1]:
        yield Refusal("conflicting_targets", f"one content with two numbers for {min(twice)!r}: {shown}.")
