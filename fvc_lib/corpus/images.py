"""List corpora of images, and build the index of task image.

Task image learns to predict the class and the targets of single pictures; a target is a number such as calories. The
index holds each usable image with its class, numbers, leakage group and part of the split. A leakage group holds copies
of the same picture and pictures of the same subject. The split never divides a group. IMAGES, IMAGE_TARGETS and
REJECTED are tables whose columns ``services.tables`` describes.

Layouts of corpora:

- Food-101 (Bossard et al., "Food-101 - Mining discriminative components with random forests", ECCV 2014):
  ``images/<class>/<number>.jpg`` and ``meta/{train,test}.txt``, with lines such as ``apple_pie/1005649``.
- Nutrition5k (Thames et al., "Nutrition5k: Towards automatic nutritional understanding of generic food", CVPR 2021):
  ``metadata/dish_metadata_cafe{1,2}.csv`` have no header and rows of varying length: dish id, kcal, grams of mass, fat,
  carbohydrate and protein, then ingredients, which are not read. ``dish_ids/splits`` has the official parts.
  ``imagery`` has the pictures, in one folder per dish below ``realsense_overhead`` and ``side_angles``.
- A manifest, or a folder with one folder per class.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path, PurePosixPath

import polars as pl
import polars.selectors as cs

from fvc_lib.corpus import label_table
from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.corpus_files import (
    NOT_A_LOSS,
    CorpusFiles,
    Refusal,
    Rejections,
    refuse_lost,
)
from fvc_lib.corpus.folds import split_parts
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.label_table import PART_NAMES, cell_text
from fvc_lib.corpus.listing import CorpusLoader, recognised
from fvc_lib.corpus.probing import IMAGE_FILES, ProbeResult, probe_files
from fvc_lib.corpus.samples.drawings import generate_sample_dishes
from fvc_lib.corpus.sources.published import folders_in, holds, read_lines
from fvc_lib.services.atomic_files import AnyPath, escape_text, path_to_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.registry import IMAGE_LAYOUTS
from fvc_lib.services.tables import IMAGE_TARGETS, IMAGES, check_table


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One image of a corpus. Texts are escaped as in tables (``atomic_files.path_to_text``)."""

    path: str  # relative to the corpus root, with '/'
    class_label: str | None = None
    stated_group: str | None = None  # leakage group in the list of the corpus, if any
    part: str | None = None  # official part: train, validation or test
    row: int | None = None  # 1-based row of the table that lists the image
    targets: Mapping[str, float | None] = field(default_factory=dict)  # numbers to predict by name; None: unknown


@dataclass
class ImageListing:
    """All images that a corpus lists, usable or rejected, before any image is opened."""

    images: list[ListedImage] = field(default_factory=list)  # images that may be usable; none was opened
    rejections: Rejections = field(default_factory=Rejections)  # images and rows that are not used
    units: dict[str, str] = field(default_factory=dict)  # unit of each target by its name; empty text: no unit

    def add(self, image: ListedImage, refusal: Refusal | None) -> None:
        """Add ``image`` to the listed images if ``refusal`` is None; else reject it for this reason."""
        if refusal is None:
            self.images.append(image)
        else:
            self.rejections.add_file(image.path, refusal, image.class_label, image.row)


def list_images(corpus: AnyPath, *, allow_outside: bool = False) -> tuple[CorpusFiles, str, ImageListing]:
    """List a corpus of images without opening an image.

    Args:
        corpus: a folder, or a manifest file.
        allow_outside: accept files outside the corpus folder, and follow links.

    Returns:
        (files, layout, listing): access to the files, the name of the layout, and the listed images.

    Raises:
        UsageError: the corpus has no known layout.
        DataError: a list of the corpus is missing.
    """
    corpus = Path(corpus)
    loader = recognised(IMAGE_LAYOUTS, corpus)
    files = CorpusFiles(corpus.parent if corpus.is_file() else corpus, "image", allow_outside)
    return files, loader.name, loader.read(files, corpus)


# --- Published corpora: what their lists state of each item, and a search for its pictures.


def _official_parts(folder: Path, lists: Mapping[str, str]) -> dict[str, str]:
    """Map each item, such as an image or a dish, to its official part: train or test.

    If an item is in several lists, the last list counts.

    Args:
        folder: the folder of the lists.
        lists: maps a part to the name of its list, a text file with one item per line; the test part comes last.

    Raises:
        DataError: a list is missing.
    """
    return {item: part for part, name in lists.items() for item in read_lines(folder / name) if item}


def _list_published(
    files: CorpusFiles, top: str, items: Mapping[str, ListedImage], names_of: Callable[[PurePosixPath], Sequence[str]],
    absent: str, found: ImageListing,
) -> ImageListing:  # fmt: skip
    """Add the pictures of a published corpus to ``found``, each with the facts of its item, and return ``found``.

    An item is what the corpus's lists name, such as a dish. Pictures of unlisted items are rejected, and so are items
    without a picture.

    Args:
        files: access to the files of the corpus.
        top: folder of the pictures, relative to the root.
        items: facts of each item by its name, such as a dish; its ``path`` stands for an item without a picture.
        names_of: returns the names that the item of a picture may have, from the picture's path below ``top``.
        absent: reason for the rejection of items without a picture.
        found: receives the pictures.
    """
    shown = set[str]()
    for path in files.walk(top, found.rejections):
        name = next((name for name in names_of(PurePosixPath(path).relative_to(top)) if name in items), "")
        refusal = files.check(path)
        if not name:
            refusal = Refusal("not_listed", f"{path!r} is no picture of anything in the corpus's lists.")
        shown.add(name)
        found.add(replace(items.get(name, ListedImage("")), path=path_to_text(path)), refusal)
    for name in sorted(items.keys() - shown):
        found.add(items[name], Refusal(absent, f"{name!r} is listed and has no picture below {top}. Fetch it."))
    return found


def list_food101(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of Food-101, with their official parts (train and test).

    Rejected are images that neither official list names, and lines of a list without an image.

    Raises:
        DataError: one of the two lists is missing.
    """
    parts = _official_parts(corpus / "meta", {"train": "train.txt", "test": "test.txt"})
    images = {
        line: ListedImage(path_to_text(f"images/{line}.jpg"), escape_text(line.partition("/")[0]), part=part)
        for line, part in parts.items()
    }
    return _list_published(
        files, "images", images, lambda path: [str(path).removesuffix(".jpg")], "missing_image", ImageListing()
    )


_DISH_TABLES = ("dish_metadata_cafe1.csv", "dish_metadata_cafe2.csv")
# Units of the targets, in the order of the columns.
_DISH_UNITS = {"calories": "kcal", "mass": "g", "fat": "g", "carbohydrate": "g", "protein": "g"}


def list_nutrition5k(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the pictures of Nutrition5k with the numbers (calories, mass, ...) of their dishes.

    There are no classes. The pictures of a dish are one group. Videos of side angles are not read: extract frames into
    the dishes' folders (``ffmpeg -i camera_A.h264 -vf fps=1 camera_A_%03d.jpeg``). Rejected are dishes without a
    picture, depth images, and pictures of dishes that the official lists do not name. Of several rows of a dish the
    first counts. A cell that is no number is an unknown value.

    Raises:
        DataError: a table of dishes is missing, or one of the two official lists.
    """
    lists = corpus / "dish_ids" / "splits"
    parts = _official_parts(lists, {"train": "rgb_train_ids.txt", "test": "rgb_test_ids.txt"}) if lists.is_dir() else {}
    dishes = dict[str, ListedImage]()
    for table in _DISH_TABLES:
        for row, line in enumerate(read_lines(corpus / "metadata" / table), start=1):
            name, *cells = line.split(",")  # ingredients follow the numbers, as many as a dish has
            if name and (not parts or name in parts):
                numbers = dict(zip(_DISH_UNITS, map(_number, cells), strict=False))
                dish = ListedImage(f"metadata/{table}", None, escape_text(name), parts.get(name), row, numbers)
                dishes.setdefault(name, dish)
    return _list_published(
        files, "imagery", dishes, lambda path: () if path.name.startswith("depth") else path.parts[:-1], "no_picture",
        ImageListing(units=dict(_DISH_UNITS)),
    )  # fmt: skip


# --- A manifest: one row per file, with classes, numbers, groups and parts as far as known.

# A column called calories_kcal is the target calories, in kcal.
UNITS = frozenset({"kcal", "kj", "g", "mg", "kg", "ml", "l", "mm", "cm", "m", "s", "percent", "celsius", "eur", "usd"})
_MANIFEST = (
    "a CSV or Parquet manifest with the column 'path' and a 'class' or columns of numbers, or a folder with a "
    "manifest.csv in it"
)


def list_manifest(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of a manifest (a table with one row per image).

    The manifest is the file ``corpus``, or the only table in the folder ``corpus``. Paths are relative to the
    manifest's folder. Optional columns are ``class`` (or ``label``), ``group`` and ``split``. Every other column of
    numbers is a target; a suffix such as ``_kcal`` is its unit. A cell that is no number is an unknown value. A column
    is not read if more than half of its filled cells are no numbers.

    Raises:
        UsageError: the file is no table, has no path column, or has two columns of the same meaning.
    """
    table, found = label_table.read_label_table(label_table.find_table(corpus, f"Wanted {_MANIFEST}.")), ImageListing()
    paths, labels = ("path", "image_path", "image"), ("class", "label", "class_label")
    others = table.further_columns([paths], [labels, label_table.GROUP_COLUMNS, label_table.SPLIT_COLUMNS])
    rows = [*label_table.file_rows(table, files, found.rejections, paths)]
    column_of = _target_columns(others, [row.cells for row in rows], found.units)
    for row in rows:
        part, no_part = label_table.stated_part(row.cells)
        numbers = {target: _number(row.cells[column.lower()]) for target, column in column_of.items()}
        label, group = cell_text(row.cells, *labels), cell_text(row.cells, *label_table.GROUP_COLUMNS)
        found.add(ListedImage(row.path, label, group, part, row.number, numbers), row.refused(no_part))
    return found


def _target_columns(columns: Iterable[str], rows: Sequence[Mapping[str, str]], units: dict[str, str]) -> dict[str, str]:
    """Map the name of each target (a number to predict) to its column.

    A name is the column without its unit: the column ``calories_kcal`` has the target ``calories``.

    Args:
        columns: the columns that may hold numbers.
        rows: the cells of each row by column in lower case.
        units: receives the units of the targets.
    """
    column_of = dict[str, str]()
    for column in columns:
        filled = [cell for cells in rows if (cell := cell_text(cells, column.lower()))]
        if 2 * sum(_number(cell) is None for cell in filled) <= len(filled) > 0:
            name, _, unit = column.rpartition("_")
            unit = unit if name and unit.lower() in UNITS else ""
            target = name if unit and name not in column_of else column  # mass_kg next to mass_g keeps its full name
            column_of[target], units[target] = column, unit
    return column_of


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# --- Folders of images, one per class, possibly below folders of parts.


def list_folder(files: CorpusFiles, corpus: Path) -> ImageListing:
    """List the images of a corpus with one folder per class.

    If all folders in it are named like parts (train, val, test), the classes are the folders inside these. Images
    outside the folders of classes are rejected.
    """
    found = ImageListing()
    has_parts = all(name.lower() in PART_NAMES for name in folders_in(corpus))
    for path in files.walk("", found.rejections):
        *folders, _ = PurePosixPath(path).parts
        part = PART_NAMES[folders.pop(0).lower()] if has_parts and folders else None
        refusal = files.check(path) if folders else Refusal("no_class", f"{path!r} lies in no folder of a class.")
        found.add(ListedImage(path_to_text(path), escape_text(folders[0]) if folders else None, part=part), refusal)
    return found


IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="food101",
        accepted="Food-101's folder with images/ and meta/",
        recognises=lambda path: (path / "images").is_dir() and holds("test.txt", "train.txt")(path / "meta"),
        read=list_food101,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="nutrition5k",
        accepted="Nutrition5k's with metadata/, dish_ids/ and imagery/",
        recognises=holds("imagery", *(f"metadata/{name}" for name in _DISH_TABLES)),
        read=list_nutrition5k,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="manifest",
        accepted=_MANIFEST,
        recognises=lambda path: (
            path.suffix.lower() in label_table.SUFFIXES if path.is_file() else holds(*label_table.PREFERRED_NAMES)(path)
        ),
        read=list_manifest,
        rank=1,
    )
)
IMAGE_LAYOUTS.register(
    CorpusLoader(
        name="folder",
        accepted="a folder with one folder per class",
        recognises=lambda path: bool(folders_in(path)),
        read=list_folder,
        rank=2,
    )
)


# --- The index.

# Of several copies those in the part of the lowest rank stay in the corpus.
_RANKS = {"test": 0, "validation": 1, "train": 2}
_LISTED = {"path": pl.String, "class_label": pl.String, "stated_group": pl.String, "part": pl.String, "row": pl.Int64}
_FACTS = {"width": pl.Int64, "height": pl.Int64, "size_bytes": pl.Int64, "content_sha256": pl.String, "copy": pl.String}
_VALUE = "value:"  # prefix of a column with the known values of a target
_NUMBERS = cs.starts_with(_VALUE)
_LABELS = cs.by_name("class_label") | _NUMBERS


@dataclass(frozen=True)
class SplitIndex:
    """The index of a corpus that is split once into train, validation and test (tasks image and video_text).

    It holds the tables of usable images or of pairs of videos and texts, of rejected files, and of numbers to predict.
    """

    rows: pl.DataFrame  # IMAGES or VIDEO_TEXTS table, sorted by ``image_id`` or ``pair_id``
    rejected: pl.DataFrame  # REJECTED table
    root: Path  # absolute folder that each path is relative to
    notes: tuple[str, ...]  # sentences with counts
    targets: pl.DataFrame  # IMAGE_TARGETS table of the known numbers, sorted by image and target; empty for videos


def image_root(config: RunConfig) -> Path:
    """Return the absolute folder that paths in the index are relative to, without reading a file.

    If ``config.corpus`` is empty, it is the folder of the sample dishes.
    """
    corpus = Path(config.corpus or Path(config.data_dir) / "sample_dishes")
    return CorpusFiles(corpus.parent if corpus.is_file() else corpus).root


def index_images(
    config: RunConfig,
    *,
    rejected_path: AnyPath | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SplitIndex:
    """List a corpus, decode each image once, and divide the usable ones into train, validation and test.

    The tables depend only on the files, their lists and ``config``, not on file order, worker count or location.

    Args:
        config: the run's configuration.
        rejected_path: write the REJECTED table here if too many images are lost.
        progress: called with (done, total), first for generated sample dishes, then for decoded images.

    Raises:
        UsageError: the corpus has no known layout or lacks a requested target.
        DataError: nothing is usable, too much is lost, or a part of the split has no image.
        LeakageError: a group is on both sides of the official split.
    """
    corpus = config.corpus or generate_sample_dishes(image_root(config), progress=progress)
    files, layout, listing = list_images(corpus, allow_outside=config.allow_outside)
    units, rejections = wanted_targets(config.targets, listing.units), listing.rejections
    images = learnable(listing.images, list(units), rejections)
    probed, _ = probe_files(
        IMAGE_FILES, files.root, images["path"].to_list(), Path(config.cache_dir) / "index",
        workers=config.workers, progress=progress,
    )  # fmt: skip
    images = _readable(images, probed, config.near_duplicate_bits, rejections)
    images = one_of_each_content(with_groups(images), rejections)
    no_loss = NOT_A_LOSS | {"copy_across_split", "no_picture", "nothing_to_learn"}  # no faults of the corpus
    refuse_lost(
        files.root, "image", rejections.frame(), images.height, config.max_rejected_share, no_loss, rejected_path
    )
    images = without_copies_across(images, "known", "copy", rejections)
    groups, labels, parts = (images[name].to_list() for name in ("group_id", "class_label", "part"))
    split = split_parts(groups, labels, parts, seed=config.seed)
    split.refuse_empty_parts()
    images = images.with_columns(
        part=pl.Series(split.parts),
        split_source=pl.Series(split.sources),
        source=pl.lit(layout),
        image_id=pl.col("content_sha256").replace_strict(video_ids(images["content_sha256"])),
    ).sort("image_id")
    classes, targets = images["class_label"].drop_nulls().unique().to_list(), _targets(images, units)
    if len(classes) < 2 and targets.is_empty():
        raise DataError(
            f"the images have {len(classes)} class ({', '.join(classes)}) and no number to predict. Add images of "
            "another class, or a manifest with numbers."
        )
    images = check_table(images.select(*IMAGES.columns), IMAGES, "images")
    notes = (f"{layout}: {files.root}", *split.notes)
    return SplitIndex(images, rejections.frame(), files.root, notes, targets)


def learnable(images: Sequence[ListedImage], targets: Sequence[str], rejections: Rejections) -> pl.DataFrame:
    """Reject images without a class and without a target value; return a table of the other images.

    A target is a number to predict, such as calories.

    Args:
        images: the listed images.
        targets: names of the numbers to predict.
        rejections: receives the images that have no class and no target value.

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
    is_unknown = pl.all_horizontal(_LABELS.is_null())
    detail = pl.format("'{}' has no class and no number of the field targets. Fill one in.", "path")
    return reject(table, is_unknown, "nothing_to_learn", detail, rejections)


def reject(
    rows: pl.DataFrame, is_rejected: pl.Expr, reason: str, detail: pl.Expr, rejections: Rejections
) -> pl.DataFrame:
    """Add the rows for which ``is_rejected`` is true to ``rejections``, and return the other rows.

    Args:
        rows: a table with the columns path, row and, if known, class_label.
        is_rejected: expression that is true for the rows to reject.
        reason: short name of the reason, the same for all rows.
        detail: expression for the message of each row.
        rejections: receives the rows.
    """
    for row in rows.filter(is_rejected).with_columns(detail=detail).iter_rows(named=True):
        rejections.add_file(row["path"], Refusal(reason, row["detail"]), row.get("class_label"), row["row"])
    return rows.filter(~is_rejected)


def _readable(
    images: pl.DataFrame, probed: Mapping[str, ProbeResult], near_duplicate_bits: int, rejections: Rejections
) -> pl.DataFrame:
    """Reject the images that cannot be decoded; return the others with facts of their files in additional columns.

    The additional columns are width, height, size_bytes, content_sha256 and copy. Images with the same text in the
    column ``copy`` are copies of each other: equal files, or pictures with near perceptual hashes. Copies must be
    known, because a model would recognise a photograph from training that was saved again, resized, cropped or
    brightened for testing.

    Args:
        images: table of listed images with the columns path, class_label and row.
        probed: result of decoding each image, by path.
        near_duplicate_bits: largest number of differing bits of near hashes; 0: only equal files are copies.
        rejections: receives the images that cannot be decoded.
    """
    for path, label, row in images.select("path", "class_label", "row").rows():
        if (result := probed[path]).facts is None:
            rejections.add_file(path, Refusal(result.reason, result.detail), label, row)
    read = [(path, probed[path], facts) for path in images["path"].unique().sort() if (facts := probed[path].facts)]
    hashes = [result.perceptual_hash for _, result, _ in read]
    near = near_duplicate_links(hashes, near_duplicate_bits) if near_duplicate_bits else []
    copies, _ = join_groups([GroupMember(path, path, facts.content_sha256) for path, _, facts in read], near)
    rows = [(path, *astuple(facts), copy) for (path, _, facts), copy in zip(read, copies, strict=True)]
    table = pl.DataFrame(rows, schema={"path": pl.String, **_FACTS}, orient="row")
    return images.join(table, on="path", maintain_order="left")


def with_groups(images: pl.DataFrame) -> pl.DataFrame:
    """Return the readable ``images`` with the additional columns ``known`` and ``group_id``.

    ``known`` is the part (train, validation or test) that the official split states for the image. If it states none,
    ``known`` is the part of other images in the same stated group. If they have none either, it is train.

    ``group_id`` is the leakage group. It joins images with the same stated group, and copies of the same picture.
    Copies with different values of ``known`` are not joined: ``without_copies_across`` later rejects one of them.
    """
    of_group = pl.col("part").drop_nulls().min().over(pl.coalesce("stated_group", "path"))
    images = images.with_columns(known=pl.coalesce("part", of_group, pl.lit("train")))
    smallest = pl.col("content_sha256").min().over("copy")
    facts = images.select(
        "stated_group",
        name=pl.format("{} {}", "path", pl.col("row").fill_null(0)),
        key=pl.format("{} {}", smallest, "known"),
    )
    group_ids, _ = join_groups([GroupMember(name, name, key, stated) for stated, name, key in facts.iter_rows()])
    group_id = pl.Series(group_ids, dtype=pl.String).str.replace("^video ([0-9a-f]{16})$", "image $1")
    return images.with_columns(group_id=group_id)


def one_of_each_content(images: pl.DataFrame, rejections: Rejections) -> pl.DataFrame:
    """Return ``images`` with a single row for each file content, sorted by path; reject the other rows.

    Of files with equal content, a file in the test part is preferred, then one in validation, then one in train. Of
    several such files the first by path is chosen. It gets the known class and target values of all files of this
    content. If files of equal content have two classes, or two values of the same target, all of them are rejected.
    """
    known = _LABELS.drop_nulls()
    images = images.sort(pl.col("part").replace_strict(_RANKS, default=3), "path", "row").with_columns(
        disputed=pl.any_horizontal(known.n_unique().over("content_sha256") > 1),
        first=pl.col("path").first().over("content_sha256"),
    )
    detail = pl.format("the content of '{}' is listed with two classes or numbers. Keep the right one.", "first")
    images = reject(images, pl.col("disputed"), "conflicting_labels", detail, rejections)
    images = images.with_columns(
        known.first().over("content_sha256"), again=~pl.col("content_sha256").is_first_distinct()
    )
    detail = pl.format("same content as '{}', which is used.", "first")
    return reject(images, pl.col("again"), "duplicate_content", detail, rejections).sort("path")


def without_copies_across(rows: pl.DataFrame, part: str, same: str, rejections: Rejections) -> pl.DataFrame:
    """Reject the rows that are copies of rows in a more important part of the split, and return the other rows.

    Test is more important than validation, and validation is more important than train. So the test part is never
    reduced, and results on an official split remain comparable.

    Args:
        rows: a table with the columns path, row, ``part`` and ``same``.
        part: name of the column with the official part; rows with null stay.
        same: name of the column that has equal values for copies.
        rejections: receives the rejected rows.
    """
    rank = pl.col(part).replace_strict(_RANKS, return_dtype=pl.Int64)
    rows = rows.with_columns(
        is_lost=(rank > rank.min().over(same)).fill_null(value=False),
        twin=pl.col("path").sort_by(rank, "path", nulls_last=True).first().over(same),
    )
    detail = pl.format(
        "looks like '{}' of another part, or like a copy of it. Leave it out, or put both into one part. If they only "
        "look alike, lower near_duplicate_bits (0: off).", "twin",
    )  # fmt: skip
    return reject(rows, pl.col("is_lost"), "copy_across_split", detail, rejections)


def _targets(images: pl.DataFrame, units: Mapping[str, str]) -> pl.DataFrame:
    """Return the IMAGE_TARGETS table of ``images``, with one row per image and known target.

    A target is a number to predict, such as calories. ``units`` maps each target to its unit.
    """
    long = images.unpivot(_NUMBERS, index=["image_id", "group_id"], variable_name="target").drop_nulls("value")
    target = pl.col("target").str.strip_prefix(_VALUE)
    unit = target.replace_strict(units, return_dtype=pl.String)
    long = long.with_columns(pl.col("value").cast(pl.Float64), target=target, unit=unit).sort("image_id", "target")
    return check_table(long.select(*IMAGE_TARGETS.columns), IMAGE_TARGETS, "targets")


def wanted_targets(wanted: Sequence[str], units: Mapping[str, str]) -> dict[str, str]:
    """Map the targets (numbers to predict) that a run asks for to their units, in the requested order.

    Args:
        wanted: names without unit, such as ``calories``. Empty means all targets; the single name ``none`` means no
            target.
        units: unit of each target of the corpus.

    Raises:
        UsageError: the corpus lacks a wanted target, or ``none`` is given together with other names.
    """
    if tuple(wanted) == ("none",):
        return {}
    if unknown := [name for name in wanted if name not in units]:
        have = ", ".join(units) or "no column of numbers"
        raise UsageError(f"targets: got {unknown[0]!r}, the corpus has {have}. Name some of these, or none.")
    return {name: units[name] for name in wanted or units}
