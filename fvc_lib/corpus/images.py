"""Build the index of task image: each usable image with its class, numbers, leakage group and part of the split.

Task image learns to predict the class and the targets of single pictures; a target is a number such as calories. A
leakage group holds copies of the same picture and pictures of the same subject. The split never divides a group.

IMAGES, IMAGE_TARGETS and REJECTED are tables whose columns ``services.tables`` describes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import polars as pl
import polars.selectors as cs

from fvc_lib.corpus.copies.groups import Components, GroupMember, join_groups
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.copies.perceptual_hash import SamePictures
from fvc_lib.corpus.corpus_files import (
    NOT_A_LOSS,
    CorpusFiles,
    Refusal,
    Rejections,
    counts_text,
    reasons_text,
    refuse_lost,
    some_of,
    written_when_refused,
)
from fvc_lib.corpus.folds import PartSplit, split_parts
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.probing import IMAGE_FILES, ProbeResult, probe_files
from fvc_lib.corpus.samples.drawings import generate_sample_dishes
from fvc_lib.corpus.sources.images import ListedImage, list_images
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, did_you_mean
from fvc_lib.services.tables import IMAGE_TARGETS, IMAGES, check_table

# Reasons of rejected rows that do not count as loss, because they are no fault of the corpus.
_NO_LOSS = NOT_A_LOSS | {"copy_across_split", "no_picture", "nothing_to_learn"}
NO_TARGETS = "none"
_LISTED = {"path": pl.String, "class_label": pl.String, "stated_group": pl.String, "part": pl.String, "row": pl.Int64}
_FACTS = {"width": pl.Int64, "height": pl.Int64, "size_bytes": pl.Int64, "content_sha256": pl.String, "copy": pl.Int64}
_VALUE = "value:"  # prefix of a column with the known values of a target
_NUMBERS = cs.starts_with(_VALUE)
_LABELS = cs.by_name("class_label") | _NUMBERS


@dataclass(frozen=True)
class ImageIndex:
    """The index of a corpus of images: the tables that a run of task image starts from."""

    images: pl.DataFrame  # IMAGES table, sorted by ``image_id``
    targets: pl.DataFrame  # IMAGE_TARGETS table of the known numbers, sorted by image and target
    rejected: pl.DataFrame  # REJECTED table
    root: Path  # absolute folder that each path is relative to
    classes: tuple[str, ...]  # the classes that occur, sorted
    units: Mapping[str, str]  # unit of each target, in the requested order
    layout: str  # food101, nutrition5k, folder or manifest
    notes: tuple[str, ...]  # sentences with counts


def image_root(config: RunConfig) -> Path:
    """Return the absolute folder that the paths of the index are relative to; no file is read."""
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
        progress: called with (done, total), first for generated sample dishes, then for decoded images.
        stop: called after each image; if it returns true, decoding stops, and a later call continues it.

    Raises:
        UsageError: the corpus has no known layout or lacks a requested target.
        DataError: nothing is usable, too much is lost, or a part of the split has no image.
        LeakageError: a group is on both sides of the official split.
        StoppedError: ``stop`` returned true.
    """
    corpus = config.corpus or generate_sample_dishes(image_root(config), progress=progress)
    files, layout, listing = list_images(corpus, allow_outside=config.allow_outside)
    units, rejections = wanted_targets(config.targets, listing.units), listing.rejections
    with written_when_refused(rejections, rejected_path):
        images = learnable(listing.images, list(units), rejections)
        probed, _ = probe_files(
            IMAGE_FILES, files.root, images["path"].to_list(), Path(config.cache_dir) / "index",
            workers=config.workers, progress=progress, stop=stop,
        )  # fmt: skip
        images = _readable(images, probed, config.near_duplicate_bits, rejections)
        images, notes = with_groups(images, looked_for=config.near_duplicate_bits > 0)
        images = one_of_each_content(images, rejections)
        refuse_lost(files.root, "image", rejections.frame(), images.height, config.max_rejected_share, _NO_LOSS)
        images = without_copies_across(images, "known", "copy", rejections)
        groups, labels, parts = (images[name].to_list() for name in ("group_id", "class_label", "part"))
        split = split_parts(groups, labels, parts, seed=config.seed)
        refuse_empty_parts(split)
        images = images.with_columns(
            part=pl.Series(split.parts),
            split_source=pl.Series(split.sources),
            source=pl.lit(layout),
            image_id=pl.col("content_sha256").replace_strict(video_ids(images["content_sha256"])),
        ).sort("image_id")
        classes, targets = images["class_label"].drop_nulls().unique().sort().to_list(), _targets(images, units)
        if len(classes) < 2 and targets.is_empty():
            raise DataError(
                f"the images have {len(classes)} class ({', '.join(classes)}) and no number to predict. Add images of "
                "another class, or a manifest with numbers."
            )
    if never := sorted(set(classes).difference(images.filter(part="train")["class_label"])):
        notes.append(f"{len(never):,} classes have no training image: {some_of(never, 8)}.")
    rejected = rejections.frame()
    if rejected.height:
        notes.append(f"Left out: {reasons_text(rejected)}.")
    images = check_table(images.select(*IMAGES.columns), IMAGES, "images")
    sentences = (*listing.notes, *notes, *split.notes)
    return ImageIndex(images, targets, rejected, files.root, tuple(classes), units, layout, sentences)


def learnable(images: Sequence[ListedImage], targets: Sequence[str], rejections: Rejections) -> pl.DataFrame:
    """Return the images that have a class or a value of at least one of ``targets``; reject the others.

    Returns:
        A table with the columns path, class_label, stated_group, part, row, and ``value:NAME`` for each target, sorted
        by path.
    """
    rows = [
        (image.path, image.class_label, image.stated_group, image.part, image.row, *map(image.targets.get, targets))
        for image in images
    ]
    schema = {**_LISTED, **{f"{_VALUE}{name}": pl.Float64 for name in targets}}
    table = pl.DataFrame(rows, schema=schema, orient="row").sort("path", "row")
    has_label = pl.any_horizontal(_LABELS.is_not_null())
    detail = pl.format("'{}' has no class and no number of the field targets. Fill one in.", "path")
    reject(table.filter(~has_label), "nothing_to_learn", detail, rejections)
    return table.filter(has_label)


def refuse_empty_parts(split: PartSplit) -> None:
    """Raise ``DataError`` if a part of the split has no row."""
    if split.empty_parts:
        raise DataError(
            f"split: nothing is left for {' and '.join(split.empty_parts)} ({counts_text(split.parts)}). Add files of "
            "other groups, or change the corpus's own split."
        )


def reject(rows: pl.DataFrame, reason: str, detail: pl.Expr, rejections: Rejections) -> None:
    """Add ``rows`` to ``rejections``.

    Args:
        rows: a table with the columns path, row and, if known, class_label.
        reason: short name of the reason, the same for all rows.
        detail: expression for the message of each row.
        rejections: receives the rows.
    """
    for row in rows.with_columns(detail=detail).iter_rows(named=True):
        rejections.add_file(row["path"], Refusal(reason, row["detail"]), row.get("class_label"), row["row"])


def _readable(
    images: pl.DataFrame, probed: Mapping[str, ProbeResult], near_duplicate_bits: int, rejections: Rejections
) -> pl.DataFrame:
    """Return the images that can be decoded, with the additional columns of ``_FACTS``; reject the others.

    Images with the same number in the column ``copy`` are copies. These are equal files or, unless
    ``near_duplicate_bits`` is 0, pictures with near perceptual hashes and similar thumbnails. Copies must be known: a
    model would recognise a photograph from training that was saved again, resized, cropped or brightened for testing.
    """
    paths = images["path"].unique().sort()
    facts_of = {path: facts for path in paths if (facts := probed[path].facts) is not None}
    one_each = {facts.content_sha256: probed[path] for path, facts in facts_of.items()}
    copies = Components(len(one_each))
    if near_duplicate_bits:
        judge = SamePictures([each.thumbnail for each in one_each.values()])
        hashes = [each.perceptual_hash for each in one_each.values()]
        for pair in near_duplicate_links(hashes, near_duplicate_bits, judge):
            copies.join(*pair)
    copy_of = dict(zip(one_each, copies.label.tolist(), strict=True))
    rows = [(path, *astuple(facts), copy_of[facts.content_sha256]) for path, facts in facts_of.items()]
    for path, label, row in images.select("path", "class_label", "row").rows():
        if path not in facts_of:
            rejections.add_file(path, Refusal(probed[path].reason, probed[path].detail), label, row)
    table = pl.DataFrame(rows, schema={"path": pl.String, **_FACTS}, orient="row")
    return images.join(table, on="path", maintain_order="left")


def with_groups(images: pl.DataFrame, *, looked_for: bool = True) -> tuple[pl.DataFrame, list[str]]:
    """Return (images, notes): ``images`` with the additional columns ``known`` and ``group_id``, and sentences.

    ``known`` is the official part of an image, else the official part of its stated group, else train. Stated groups
    that share a copy are joined, and an image without a stated group is grouped with its copies. Copies in different
    official parts do not join groups, because ``without_copies_across`` leaves out the training copy later.

    Args:
        images: the readable images.
        looked_for: whether near-copies were searched; if not, a note warns of them.
    """
    of_group = pl.col("part").drop_nulls().min().over("stated_group")
    of_group = pl.when(pl.col("stated_group").is_not_null()).then(of_group)
    images = images.with_columns(known=pl.coalesce("part", of_group, pl.lit("train")))
    smallest = pl.col("content_sha256").min().over("copy")
    facts = images.select(
        "stated_group",
        name=pl.format("{} {}", "path", pl.col("row").fill_null(0)),
        key=pl.format("{} {}", smallest, "known"),
    )
    group_ids, _ = join_groups([GroupMember(name, name, key, stated) for stated, name, key in facts.iter_rows()])
    notes = []
    alone = images["stated_group"].null_count()
    if alone and not looked_for:
        notes.append(
            f"{alone:,} images have no stated group, and near-copies were not looked for: a copy may be trained on and "
            "tested on. Set near_duplicate_bits, or state groups in a manifest."
        )
    group_id = pl.Series(group_ids, dtype=pl.String).str.replace("^video ([0-9a-f]{16})$", "image $1")
    return images.with_columns(group_id=group_id), notes


def _rank(part: str) -> pl.Expr:
    """Return an expression for the rank of the part in column ``part``: test 0, validation 1, train 2, null for null.

    Of copies in several parts, those in the part of the lowest rank are kept.
    """
    return pl.col(part).replace_strict({"test": 0, "validation": 1, "train": 2}, return_dtype=pl.Int64)


def one_of_each_content(images: pl.DataFrame, rejections: Rejections) -> pl.DataFrame:
    """Return one image for each file content, sorted by path; reject the others.

    Of files with equal content, one in the test part is preferred to one in validation, and that to one in train; then
    the first path is chosen. It gets the known class and target values of all files of this content. If files of equal
    content have two classes, or two values of one target, all of them are rejected.
    """
    known = _LABELS.drop_nulls()
    images = images.sort(_rank("part").fill_null(3), "path", "row").with_columns(
        disputed=pl.any_horizontal(known.n_unique().over("content_sha256") > 1),
        first=pl.col("path").first().over("content_sha256"),
    )
    detail = pl.format("the content of '{}' is listed with two classes or numbers. Keep the right one.", "first")
    reject(images.filter("disputed"), "conflicting_labels", detail, rejections)
    images = images.filter(~pl.col("disputed")).with_columns(known.first().over("content_sha256"))
    is_first = pl.col("content_sha256").is_first_distinct()
    detail = pl.format("same content as '{}', which is used.", "first")
    reject(images.filter(~is_first), "duplicate_content", detail, rejections)
    return images.filter(is_first).sort("path")


def without_copies_across(rows: pl.DataFrame, part: str, same: str, rejections: Rejections) -> pl.DataFrame:
    """Return the rows that are not copies of rows in a more important part; reject the copies.

    Test is more important than validation, and validation is more important than train. So the test part is never
    reduced, and results on an official split remain comparable.

    Args:
        rows: a table with the columns path, row, ``part`` and ``same``.
        part: name of the column with the official part; rows with null stay.
        same: name of the column that has equal values for copies.
        rejections: receives the rejected rows.
    """
    rank = _rank(part)
    rows = rows.with_columns(
        is_lost=(rank > rank.min().over(same)).fill_null(value=False),
        twin=pl.col("path").sort_by(rank, "path", nulls_last=True).first().over(same),
    )
    detail = pl.format(
        "looks like '{}' of another part, or like a copy of it. Leave it out, or put both into one part. If they only "
        "look alike, lower near_duplicate_bits (0: off).", "twin",
    )  # fmt: skip
    reject(rows.filter("is_lost"), "copy_across_split", detail, rejections)
    return rows.filter(~pl.col("is_lost"))


def _targets(images: pl.DataFrame, units: Mapping[str, str]) -> pl.DataFrame:
    """Return the IMAGE_TARGETS table of ``images``: one row per image and known target; ``units`` are by target."""
    long = images.unpivot(_NUMBERS, index=["image_id", "group_id"], variable_name="target").drop_nulls("value")
    long = long.with_columns(pl.col("target").str.strip_prefix(_VALUE))
    long = long.with_columns(unit=pl.col("target").replace_strict(units, return_dtype=pl.String))
    long = long.with_columns(pl.col("value").cast(pl.Float64)).sort("image_id", "target")
    return check_table(long.select(*IMAGE_TARGETS.columns), IMAGE_TARGETS, "targets")


def wanted_targets(wanted: Sequence[str], units: Mapping[str, str]) -> dict[str, str]:
    """Return the targets to predict with their units, in the requested order.

    Args:
        wanted: names without unit, such as ``calories``. Empty means all targets; the single name ``none`` means no
            target.
        units: unit of each target of the corpus.

    Raises:
        UsageError: the corpus lacks a wanted target, or ``none`` is given together with other names.
    """
    if tuple(wanted) == (NO_TARGETS,):
        return {}
    for name in wanted:
        if name not in units:
            near, have = did_you_mean(name, units), ", ".join(units) or "no column of numbers"
            raise UsageError(f"targets: got {name!r}; the corpus has {have}.{near} Name some of these, or none alone.")
    return {name: units[name] for name in wanted or units}
