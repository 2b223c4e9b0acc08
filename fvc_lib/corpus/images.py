"""The index of task image: every usable image with its class, numbers, group and part, and what is left out."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from fvc_lib.corpus import listing
from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.copies.likeness import SamePictures
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.folds import split_parts
from fvc_lib.corpus.image_listing import ImageListing, ListedImage, list_images
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.listing import NOT_A_LOSS, CorpusFiles, Refusal, Rejections
from fvc_lib.corpus.probing import IMAGE_FILES, ProbedImage, probe_files
from fvc_lib.corpus.samples.dishes import generate_sample_dishes
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, did_you_mean
from fvc_lib.services.tables import IMAGE_TARGETS, IMAGES, PARTS, check_table, frame_of
from fvc_lib.video.decode.still_image import ImageFacts

# --- Refusal of an index of images that nothing can be made of, and sentences about one that can.

# Left out without anything being wrong with the corpus.
_NO_LOSS = NOT_A_LOSS | {"copy_across_split", "duplicate_row", "no_picture", "nothing_to_learn"}


def classes_of(images: pl.DataFrame) -> tuple[str, ...]:
    """The classes that occur in an IMAGES table, sorted."""
    return tuple(sorted(images["class_label"].drop_nulls().unique().to_list()))


def refuse_unlearnable(images: pl.DataFrame, targets: pl.DataFrame) -> None:
    """Stop on tables that a model cannot be trained on, chosen by and tested with.

    Raises:
        DataError: a part without images, or one class alone and no numbers.
    """
    counts = Counter(images["part"])
    empty = [part for part in PARTS if not counts[part]]
    if empty:
        have = ", ".join(f"{counts[part]:,} {part}" for part in PARTS if counts[part])
        raise DataError(
            f"the split leaves no image for {' and '.join(empty)} ({have}). Add images of other groups, or change the "
            "corpus's own split."
        )
    classes = classes_of(images)
    if len(classes) < 2 and targets.is_empty():
        raise DataError(
            f"the images have {len(classes)} class ({', '.join(classes)}) and no number to predict: one class alone "
            "cannot be told from anything. Add images of another class, or a manifest with numbers."
        )


def _closing_notes(images: pl.DataFrame, rejected: pl.DataFrame) -> Iterator[str]:
    """On classes that are never trained on, and how many images are left out for which reasons."""
    trained = set(images.filter(part="train")["class_label"].to_list())
    never = [name for name in classes_of(images) if name not in trained]
    if never:
        names = listing.some_of(never, 8)
        yield f"{len(never):,} classes have no training image, so none of their test images can be right: {names}."
    counts = listing.counted(rejected["reason"])
    if counts:
        yield f"Left out: {', '.join(f'{count:,} x {reason}' for reason, count in counts.items())}."


# --- Dev mode: a small part of a corpus, chosen by seed, on which a run takes minutes instead of hours.


def dev_subset(
    names: Sequence[str], strata: Sequence[str | None], parts: Sequence[str], *, per_stratum: int, seed: int
) -> list[int]:
    """Positions of the rows that stay, in rising order.

    Of every stratum (class) of the training part at most ``per_stratum`` rows stay. Validation and test keep the same
    share of each stratum as training does, and at least one row, so that they stay representative of one another but
    cost no more than they are worth; a stratum that training does not have keeps what the others keep together. Rows
    are chosen in the order of a hash of their names: a larger subset contains the smaller ones.

    Args:
        names: (N,), unique, from content.
        strata: (N,).
        parts: (N,), ``train``, ``validation`` or ``test``.
        per_stratum: at least 1.
        seed: chooses.
    """
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for position, (stratum, part) in enumerate(zip(strata, parts, strict=True)):
        places[part, "" if stratum is None else f"={stratum}"].append(position)
    sizes = {stratum: len(found) for (part, stratum), found in places.items() if part == "train"}
    overall_share = sum(min(size, per_stratum) for size in sizes.values()) / max(1, sum(sizes.values()))
    usable = []
    for (part, stratum), found in places.items():
        share = min(1.0, per_stratum / sizes[stratum]) if stratum in sizes else overall_share
        count = min(len(found), per_stratum) if part == "train" else max(1, round(share * len(found)))
        usable.extend(sorted(found, key=lambda position: _order(seed, names[position]))[:count])
    return sorted(usable)


def _order(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"dev\x1f{seed}\x1f{name}".encode("utf-8", "surrogateescape")).digest()


# --- Which numbers of a corpus are asked for, and how images without a class are spread over the parts by them.

NO_TARGETS = "none"
_QUARTERS = (0.25, 0.5, 0.75)
_LEAST_GROUPS = 12  # without a class, for each quarter to have one for every part


def wanted_targets(wanted: Sequence[str], units: Mapping[str, str]) -> dict[str, str]:
    """The targets to predict with their units, in the order asked for.

    Args:
        wanted: names, with or without their unit (``calories`` or ``calories_kcal``); empty: all; ``none`` alone: none.
        units: what the corpus has.

    Raises:
        UsageError: a name the corpus does not have, or ``none`` beside others.
    """
    if not wanted:
        return dict(units)
    if tuple(wanted) == (NO_TARGETS,):
        return {}
    if NO_TARGETS in wanted:
        raise UsageError(f"targets: got {', '.join(wanted)}; 'none' stands alone. Name the targets, or none of them.")
    spelt = {f"{name}_{unit}": name for name, unit in units.items() if unit} | {name: name for name in units}
    found = {}
    for name in wanted:
        if name not in spelt:
            have = f"The corpus has {', '.join(units)}" if units else "The corpus has no column of numbers"
            raise UsageError(f"targets: the corpus has no {name!r}.{did_you_mean(name, spelt)} {have}.")
        found[spelt[name]] = units[spelt[name]]
    return found


def joined_units(listings: Iterable[ImageListing]) -> dict[str, str]:
    """The units of several listings' targets.

    Raises:
        UsageError: a target has two units.
    """
    units: dict[str, str] = {}
    for name, unit in (item for each in listings for item in each.units.items()):
        if units.setdefault(name, unit) != unit:
            raise UsageError(
                f"target {name!r}: has the unit {units[name]!r} in one part of the corpus and {unit!r} in another. "
                "Convert one of them, or name it otherwise."
            )
    return units


def strata_of(images: Sequence[ListedImage], targets: Sequence[str]) -> list[str | None]:
    """What each image is spread evenly by: its class, or the quarter its first known number lies in, else None.

    Few images without a class are not divided further.
    """
    without_class = [image for image in images if image.class_label is None]
    if len({image.stated_group or image.path for image in without_class}) < _LEAST_GROUPS:
        return [image.class_label for image in images]
    unnamed = [dict(image.targets) for image in without_class]
    edges: dict[str, list[float]] = {}
    for name in targets:
        values = [known[name] for known in unnamed if name in known]
        edges[name] = np.quantile(values, _QUARTERS).tolist() if values else []
    return [image.class_label or _quarter(dict(image.targets), edges) for image in images]


def _quarter(values: Mapping[str, float], edges: Mapping[str, list[float]]) -> str | None:
    known = next((name for name in edges if name in values), None)
    if known is None:
        return None
    return f"{known} quarter {1 + int(np.searchsorted(edges[known], values[known], side='left'))}"


# --- Pictures that are copies of one another, to the byte or to the eye: which stay together, which are left out. A
# photograph that was saved anew, resized, cropped or brightened is the same photograph. In training under one name and
# in the test under another, it would be recognised and not understood.

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
    usable: list[int] = []
    left_out: Counter[str] = Counter()
    for position, (image, part) in enumerate(zip(images, parts, strict=True)):
        _, twin, holder = holders.get(copies.of[image.path], (0, "", part))
        if part == holder:
            usable.append(position)
            continue
        detail = (
            f"looks like {twin!r} of the {holder} part, or like a copy of it, so it is not used elsewhere. Where they "
            "only look alike, lower near_duplicate_bits (0: off)."
        )
        rejections.add_file(image.path, Refusal("copy_across_split", detail), image.class_label, image.row)
        left_out[part] += 1
    return usable, [
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


_LEFT_OUT = {
    "class": "images whose content has two classes are left out, all of them.",
    "number": "images whose content has two numbers for one target are left out, all of them.",
    "copy": "exact copies of other images are left out.",
    "split": "training images are exact copies of official test or validation images: left out.",
}


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
    usable, counts = [], Counter[str]()
    for copies in sharing.values():
        if len(copies) == 1:
            usable.append(copies[0])
            continue
        disputed = _dispute(copies)
        if disputed is not None:
            counts["class" if disputed.reason == "conflicting_labels" else "number"] += len(copies)
            for copy in copies:
                rejections.add_file(copy.path, disputed, copy.class_label, copy.row)
            continue
        first, *others = sorted(copies, key=_preference)
        usable.append(first)
        for copy in others:
            across = copy.part == "train" and first.part in _HELD_OUT
            counts["split" if across else "copy"] += 1
            why = f"of the official {first.part} part, so it is not trained on" if across else "which is used"
            reason = "copy_across_split" if across else "duplicate_content"
            refusal = Refusal(reason, f"same content as {first.path!r}, {why}.")
            rejections.add_file(copy.path, refusal, copy.class_label, copy.row)
    return sorted(usable, key=lambda image: image.path), [
        f"{counts[what]:,} {how}" for what, how in _LEFT_OUT.items() if counts[what]
    ]


def _preference(image: ListedImage) -> tuple[int, bool, int, str, int]:
    return PREFERRED[image.part], image.class_label is None, -len(image.targets), image.path, image.row or 0


def _dispute(copies: Sequence[ListedImage]) -> Refusal | None:
    classes = {image.class_label for image in copies if image.class_label is not None}
    if len(classes) > 1:
        named = sorted((image.path, str(image.class_label)) for image in copies)
        shown = listing.disputed(named)
        return Refusal("conflicting_labels", f"one content with two classes: {shown}. Keep the right one.")
    values: defaultdict[str, set[float]] = defaultdict(set)
    for image in copies:
        for name, value in image.targets:
            values[name].add(value)
    differing = sorted(name for name, found in values.items() if len(found) > 1)
    if differing:
        paths = listing.some_of(sorted(image.path for image in copies))
        found = " and ".join(f"{value:g}" for value in sorted(values[differing[0]]))
        detail = f"one content with two numbers for {differing[0]!r}, {found}: {paths}. Keep the right one."
        return Refusal("conflicting_targets", detail)
    return None


# --- The index: list, decode, find copies, split, write down.


@dataclass(frozen=True)
class ImageIndex:
    """What a run of task image works on."""

    images: pl.DataFrame  # IMAGES table, sorted by ``image_id``
    targets: pl.DataFrame  # IMAGE_TARGETS table, sorted by image and target: what is known, nothing else
    rejected: pl.DataFrame  # REJECTED table of all that is left out
    root: Path  # absolute folder that every path is relative to
    classes: tuple[str, ...]  # the classes that occur, sorted
    units: Mapping[str, str]  # the unit of each target, in the order the targets were asked for
    layout: str  # food101, nutrition5k, combined, folder or manifest
    notes: tuple[str, ...]  # sentences on what was found and done, with counts


@dataclass(frozen=True)
class _Placed:
    """An image with what was found and decided of it."""

    image: ListedImage
    image_id: str
    group_id: str
    stratum: str | None
    part: str
    split_source: str
    facts: ImageFacts


def image_root(config: RunConfig) -> Path:
    """The absolute folder that the paths of the index are relative to. Nothing is read or generated."""
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
    """List a corpus, decode every image once, and divide what is usable into train, validation and test.

    The tables depend on the files, their lists and ``config`` only: not on file order, worker count, working directory
    or where the corpus lies.

    Args:
        config: read are ``corpus``, ``data_dir``, ``cache_dir``, ``image_layout``, ``targets``, ``seed``,
            ``split_validation_share``, ``split_test_share``, ``dev_samples_per_class``, ``max_rejected_share``,
            ``near_duplicate_bits`` and ``workers``.
        rejected_path: where the REJECTED table goes when the corpus is refused, for the error to name it.
        progress: called with (done, total): dishes drawn, where the sample is generated, then images decoded.
        stop: asked after each of them; decoding goes on where it was stopped.

    Raises:
        UsageError: the corpus has none of the layouts, or not the targets asked for.
        DataError: nothing is usable, or too much is lost, or a part of the split has no image; LeakageError: a group
            is on both sides of the official split.
        StoppedError: ``stop`` said so.
    """
    if config.corpus:
        files, layout, listings = list_images(config.corpus, config.image_layout, allow_outside=config.allow_outside)
    else:
        sample = generate_sample_dishes(_sample_folder(config), progress=progress, stop=stop)
        files, layout, listings = list_images(sample, "manifest")
    units = wanted_targets(config.targets, joined_units(listings))
    rejections = Rejections([row for each in listings for row in each.rejections.rows])
    with listing.written_when_refused(rejections, rejected_path):
        listed = _learnable(listings, units, rejections)
        readable, facts, copies = _examined(files.root, listed, rejections, config, progress, stop)
        groups, group_notes = groups_of_images(readable, copies)
        contents = {path: found.content_sha256 for path, found in facts.items()}
        usable, content_notes = settle_contents(readable, contents, rejections)
        listing.refuse_lost(files.root, "image", rejections.frame(), len(usable), config.max_rejected_share, _NO_LOSS)
        places, across_notes = without_copies_across(usable, known_parts(usable), copies, rejections)
        placed, split_notes = _placed([usable[position] for position in places], listings, units, facts, groups, config)
        places, corpora_notes = without_copies_across(
            [item.image for item in placed], [item.part for item in placed], copies, rejections
        )
        placed, dev_notes = _subset([placed[position] for position in places], config)
        images, targets = _tables(placed, units)
        refuse_unlearnable(images, targets)
    rejected = rejections.frame()
    notes = [note for each in listings for note in each.notes]
    notes += [*group_notes, *content_notes, *across_notes, *corpora_notes, *split_notes, *dev_notes]
    notes += _closing_notes(images, rejected)
    return ImageIndex(images, targets, rejected, files.root, classes_of(images), units, layout, tuple(notes))


def _learnable(listings: Sequence[ImageListing], units: Mapping[str, str], rejections: Rejections) -> list[ListedImage]:
    """Images with a class or one of the numbers asked for; other numbers are dropped."""
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


def _examined(
    root: Path,
    listed: Sequence[ListedImage],
    rejections: Rejections,
    config: RunConfig,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None,
) -> tuple[list[ListedImage], dict[str, ImageFacts], Copies]:
    """Images that decode, the facts of each path of theirs, and which of them are copies.

    What the pictures look like takes more memory than all else that is known of them, and is gone after this.
    """
    probed, _ = probe_files(
        IMAGE_FILES, root, [image.path for image in listed], Path(config.cache_dir) / "index",
        workers=config.workers, progress=progress, stop=stop,
    )  # fmt: skip
    readable, facts = [], {}
    for image in listed:
        found = probed[image.path]
        if found.facts is None:
            rejections.add_file(image.path, Refusal(found.reason, found.detail), image.class_label, image.row)
        else:
            readable.append(image)
            facts[image.path] = found.facts
    copies = copies_among([probed[path] for path in sorted(facts)], config.near_duplicate_bits)
    return readable, facts, copies


def _placed(
    usable: Sequence[ListedImage],
    listings: Sequence[ImageListing],
    units: Mapping[str, str],
    facts: Mapping[str, ImageFacts],
    group_of: Mapping[str, str],
    config: RunConfig,
) -> tuple[list[_Placed], list[str]]:
    """Every image with its part. Each corpus of a combined one is split by itself: one may have an official split."""
    id_of = video_ids(facts[image.path].content_sha256 for image in usable)
    strata = dict(zip(usable, strata_of(usable, list(units)), strict=True))
    placed: list[_Placed] = []
    notes: list[str] = []
    for each in listings:
        images = [image for image in usable if image.corpus == each.folder]
        if not images:
            continue
        ids = [id_of[facts[image.path].content_sha256] for image in images]
        groups = [group_of[image.path] for image in images]
        split = split_parts(
            groups, [strata[image] for image in images], [image.part for image in images],
            validation_share=config.split_validation_share, test_share=config.split_test_share, seed=config.seed,
        )  # fmt: skip
        prefix = f"{each.folder}: " if each.folder else ""
        notes.extend(prefix + note for note in split.notes)
        placed.extend(
            _Placed(image, name, group, strata[image], part, source, facts[image.path])
            for image, name, group, part, source in zip(images, ids, groups, split.parts, split.sources, strict=True)
        )
    return sorted(placed, key=lambda item: item.image_id), notes


def _subset(placed: Sequence[_Placed], config: RunConfig) -> tuple[list[_Placed], list[str]]:
    if not config.dev_samples_per_class:
        return list(placed), []
    places = dev_subset(
        [item.image_id for item in placed], [item.stratum for item in placed], [item.part for item in placed],
        per_stratum=config.dev_samples_per_class, seed=config.seed,
    )  # fmt: skip
    note = (
        f"Dev mode: {len(places):,} of {len(placed):,} images are used, at most {config.dev_samples_per_class} for "
        "training of each class (without classes: of each quarter of the first target), and the same shares of "
        "validation and test. Results of it are for trying things out."
    )
    return [placed[position] for position in places], [note]


def _tables(placed: Sequence[_Placed], units: Mapping[str, str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    rows = [
        (
            item.image_id, item.image.path, item.image.class_label, item.group_id, item.part, item.split_source,
            item.image.source, item.facts.width, item.facts.height, item.facts.size_bytes, item.facts.content_sha256,
        )
        for item in placed
    ]  # fmt: skip
    numbers = [
        (item.image_id, item.group_id, name, units[name], value)
        for item in placed
        for name, value in sorted(item.image.targets)
    ]
    targets = check_table(frame_of(numbers, IMAGE_TARGETS), IMAGE_TARGETS, "targets")
    return check_table(frame_of(rows, IMAGES), IMAGES, "images"), targets
