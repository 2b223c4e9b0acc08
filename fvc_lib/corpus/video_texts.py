"""Index pairs of videos and texts: usable pairs, their leakage groups, and one split into train, validation and test.

A leakage group, which the split never divides, joins pairs of one stated group, one file, equal content or near
perceptual hashes. Equal texts do not join groups, because many videos may have the same text. A note counts the test
texts that also belong to training videos.
"""

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path

import polars as pl

from fvc_lib.corpus import label_table
from fvc_lib.corpus.copies.groups import GroupMember, Merge, join_groups
from fvc_lib.corpus.copies.near_duplicates import near_copies
from fvc_lib.corpus.corpus_files import (
    CorpusFiles,
    Refusal,
    Rejections,
    counts_text,
    reasons_text,
    refuse_lost,
    written_when_refused,
)
from fvc_lib.corpus.folds import groups_text, split_parts
from fvc_lib.corpus.index import video_ids
from fvc_lib.corpus.probing import VIDEO_FILES, ProbeResult, probe_files
from fvc_lib.corpus.samples.captions import generate_sample_captions
from fvc_lib.corpus.tar_samples import tar_files, tar_samples, tars_in
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import PARTS, VIDEO_TEXTS, check_table

# --- The manifest: any separator, one row per pair.

ACCEPTED = (
    "Wanted a manifest with the columns 'path' and 'text', if known also 'split' (train, validation, test) and "
    "'group': CSV, any other separated text (manifest_separator) or Parquet; or a folder with one such file in it; or "
    "a tar, a folder of tars or a pattern like 'shards/{000..099}.tar', with KEY.mp4 and KEY.txt or KEY.json "
    "(WebDataset)."
)


@dataclass(frozen=True, slots=True)
class PairRow:
    """One usable row of the manifest: the file is there, the text is not empty."""

    row: int  # 1-based data row
    path: str  # table text, relative to the manifest's folder
    text: str  # normalised
    part: str | None  # part of the split that the manifest states
    stated_group: str | None


@dataclass(frozen=True)
class PairListing:
    """The pairs that a manifest or tars list, before any video is opened."""

    root: Path  # absolute folder that every path is relative to
    rows: tuple[PairRow, ...]  # usable rows in the manifest's order
    rejections: Rejections  # the other rows, with reasons
    # Distinct (path, stated group) of all rows with a valid path. Missing files also prove that groups belong together.
    memberships: tuple[tuple[str, str], ...]
    num_rows: int  # data rows of the manifest, or samples of tars
    notes: tuple[str, ...] = ()  # sentences on damaged tars


def normalised_text(text: str) -> str:
    """Return ``text`` in Unicode form NFC with single spaces between words and none around; case is unchanged.

    Two texts count as the same if this function returns the same for both.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def read_pairs(manifest: AnyPath, separator: str = ",", *, allow_outside: bool = False) -> PairListing:
    """List the pairs of a manifest.

    Columns are ``path`` (or ``video_path``), ``text`` (or ``caption``) and, if present, ``split`` and ``group``.

    Args:
        manifest: a .parquet file, or separated text in UTF-8 (a byte order mark is allowed).
        separator: between the columns; see ``read_label_table``.
        allow_outside: take listed files outside the manifest's folder as well, and follow links.

    Raises:
        UsageError: not such a table, or a needed column is missing.
    """
    manifest = Path(manifest)
    table = label_table.read_label_table(manifest, separator)
    files, rejections = CorpusFiles(manifest.parent, "video", allow_outside), Rejections()
    path, text_column = table.require(("path", "video_path", "video")), table.require(("text", "caption"))
    group_column, split = table.optional(label_table.GROUP_COLUMNS), table.optional(label_table.SPLIT_COLUMNS)
    table.refuse_misspelt((path, text_column, *label_table.GROUP_COLUMNS, *label_table.SPLIT_COLUMNS))
    rows, memberships = [], set()
    for row in label_table.file_rows(table, files, rejections, path, [text_column, group_column, split]):
        group = label_table.cell_text(row.cells, group_column)
        part, no_part = label_table.stated_part(row.cells, split)
        if group is not None and (row.refusal is None or row.refusal.reason == "missing_video"):
            memberships.add((row.path, group))
        text = normalised_text(row.cells[text_column])
        refusal = row.why_not(_text_refusal(text), no_part)
        if refusal is None:
            rows.append(PairRow(row.number, row.path, text, part, group))
        else:
            rejections.add_file(row.path, refusal, row=row.number)
    return PairListing(files.root, tuple(rows), rejections, tuple(sorted(memberships)), len(table.rows))


def read_tar_pairs(corpus: AnyPath, *, allow_outside: bool = False) -> PairListing:
    """List the pairs in a tar, in the tars of a folder, or in the tars that a pattern names.

    The text of a video ``KEY.mp4`` is the content of ``KEY.txt``, else ``text`` or ``caption`` in ``KEY.json``.
    ``split`` and ``group`` are read from ``KEY.json``, too.

    Raises:
        UsageError: a pattern is unusable (see ``tar_patterns.tars_of``).
    """
    corpus = Path(corpus)
    files, rejections = tar_files(corpus, allow_outside), Rejections()
    samples, notes = tar_samples(corpus, files, rejections)
    rows, memberships = list[PairRow](), set[tuple[str, str]]()
    for number, sample in enumerate(samples, start=1):
        cells = sample.cells
        group = label_table.cell_text(cells, *label_table.GROUP_COLUMNS)
        part, no_part = label_table.stated_part(cells, *label_table.SPLIT_COLUMNS)
        text = normalised_text(cells.get(".txt") or cells.get("text") or cells.get("caption", ""))
        refusal = sample.refusal or _text_refusal(text) or no_part
        memberships.update((sample.path, each) for each in (group, *sample.links) if each)
        if refusal is None:
            rows.append(PairRow(number, sample.path, text, part, group))
        else:
            rejections.add_file(sample.path, refusal, row=number)
    return PairListing(files.root, tuple(rows), rejections, tuple(sorted(memberships)), len(samples), notes)


def _text_refusal(text: str) -> Refusal | None:
    if not text:
        return Refusal("no_text", "has no text. Write what is seen, or drop the row.")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Refusal("malformed_row", "its text is not UTF-8. Save the manifest in UTF-8.")
    return None


_ROWS = {
    "row": pl.Int64, "path": pl.String, "text": pl.String, "part": pl.String, "stated_group": pl.String,
    "content_sha256": pl.String, "num_frames": pl.Int64, "duration_seconds": pl.Float64,
}  # fmt: skip


def _notes(pairs: pl.DataFrame, listing: PairListing, merges: Sequence[Merge]) -> Iterator[str]:
    """Yield sentences for the user that count the pairs, groups, parts and rejected rows of an index."""
    texts, videos = pairs["text_id"].n_unique(), pairs["video_id"].n_unique()
    yield f"{listing.num_rows:,} rows give {pairs.height:,} pairs of {videos:,} videos and {texts:,} different texts."
    yield from listing.notes
    if listing.rejections.rows:
        yield f"Not used: {reasons_text(listing.rejections.frame())}."
    if merges:
        reasons = counts_text(merge.why for merge in merges)
        yield f"{len(merges):,} links joined groups beyond what the manifest states: {reasons}."
    for part in PARTS:
        rows = pairs.filter(part=part)
        sizes = f"{rows.height:,} pairs of {rows['video_id'].n_unique():,} videos"
        yield f"Part {part}: {sizes} in {rows['group_id'].n_unique():,} groups."
    trained, test = pairs.filter(part="train")["text_id"].unique(), pairs.filter(part="test")
    known = test.filter(pl.col("text_id").is_in(trained.implode()))
    yield (
        f"{known['text_id'].n_unique():,} of {test['text_id'].n_unique():,} different test texts ({known.height:,} of "
        f"{test.height:,} pairs) also belong to training videos: a model may know them by heart."
    )


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class VideoTextIndex:
    """Index of a corpus of videos and texts."""

    pairs: pl.DataFrame  # VIDEO_TEXTS table, sorted by ``pair_id``
    rejected: pl.DataFrame  # REJECTED table of the manifest's rows that are not used
    root: Path  # folder that ``path`` is relative to
    notes: tuple[str, ...]  # sentences with counts


def video_text_root(config: RunConfig) -> Path:
    """Return the folder that the pairs' paths are relative to, without reading or generating anything.

    Raises:
        UsageError: ``config.corpus`` is no manifest and no folder with one.
    """
    if not config.corpus:
        return (Path(config.data_dir) / "sample_captions").absolute()
    if _is_of_tars(corpus := Path(config.corpus)):
        return tar_files(corpus).root
    return label_table.find_table(corpus, ACCEPTED).parent.absolute()


def _is_of_tars(corpus: Path) -> bool:
    """Return whether the corpus is read from tars instead of a manifest.

    A folder with tars and a manifest is read by its manifest. A table with the name of a tar next to it does not count
    as a manifest, because video2dataset writes such tables.
    """
    tars = {name.split(".")[0] for name in tars_in(corpus)}
    tables = label_table.tables_in(corpus) if corpus.is_dir() else []
    return bool(tars) and all(Path(table).stem in tars for table in tables)


def index_video_texts(
    config: RunConfig,
    *,
    rejected_path: AnyPath | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> VideoTextIndex:
    """List the pairs of ``config.corpus``, probe their videos, and split them into train, validation and test.

    If ``config.corpus`` is empty, the sample corpus is generated and used.

    The result depends on the files, the manifest's rows and the seed, not on the rows' order, the worker count or the
    place of the corpus. Probes are stored under ``config.cache_dir``; a later call continues from them.

    Args:
        config: ``corpus``, ``manifest_separator``, ``near_duplicate_bits``, ``max_rejected_share``
            and ``seed`` decide the result.
        rejected_path: write the REJECTED table here if the corpus is refused.
        progress: called with (done, total), first for generated clips, then for probed files.
        stop: called after each file; true stops, and a later call continues.

    Raises:
        UsageError: the corpus has no such manifest, or a pattern of tars is unusable (``tar_patterns.tars_of``).
        DataError: no usable pair, too many lost, or too few groups for three parts.
        LeakageError: the manifest's own split has a group or a video on two sides.
        StoppedError: ``stop`` returned true.
    """
    if config.corpus and _is_of_tars(Path(config.corpus)):
        listing = read_tar_pairs(config.corpus, allow_outside=config.allow_outside)
    elif config.corpus:
        manifest = label_table.find_table(config.corpus, ACCEPTED)
        listing = read_pairs(manifest, config.manifest_separator, allow_outside=config.allow_outside)
    else:
        listing = read_pairs(generate_sample_captions(video_text_root(config), progress=progress, stop=stop))
    probes, _ = probe_files(
        VIDEO_FILES, listing.root, sorted({row.path for row in listing.rows}), Path(config.cache_dir) / "index",
        workers=config.workers, progress=progress, stop=stop,
    )  # fmt: skip
    with written_when_refused(listing.rejections, rejected_path):
        return _index(listing, probes, config)


def _index(listing: PairListing, probes: Mapping[str, ProbeResult], config: RunConfig) -> VideoTextIndex:
    rejections, rows = listing.rejections, []
    for row in listing.rows:
        result = probes[row.path]
        if result.probe is None:
            rejections.add_file(row.path, Refusal(result.reason, result.detail), row=row.row)
        else:
            probe = result.probe
            rows.append((*astuple(row), result.content_sha256, probe.num_frames, probe.duration_seconds))
    # Before rows that are only repeated, or are copies across the split, are rejected: those are no loss.
    refuse_lost(listing.root, "pair", rejections.frame(), len(rows), config.max_rejected_share)
    table = pl.DataFrame(rows, schema=_ROWS, orient="row").sort("content_sha256", "text", "path", "row")
    videos = table.unique("path").sort("path")
    paths, contents = videos["path"].to_list(), videos["content_sha256"].to_list()
    near = near_copies(contents, [probes[path].perceptual_hash for path in paths], config.near_duplicate_bits)
    grouping = join_groups(list(map(GroupMember, paths, paths, contents)), near, listing.memberships)
    groups = pl.DataFrame({"path": paths, "group_id": grouping.group_ids}, schema={"path": str, "group_id": str})
    table = _without_copies_across(table.join(groups, on="path", maintain_order="left"), rejections)
    stated = pl.col("part").fill_null(pl.col("part").drop_nulls().min().over("group_id"))
    split = split_parts(
        table["group_id"].to_list(), [None] * table.height, table.select(stated)["part"].to_list(), seed=config.seed
    )
    if split.empty_parts:
        raise DataError(
            f"split: no pair is left for {' and '.join(split.empty_parts)}; "
            f"got {groups_text(len(set(grouping.group_ids)))}, wanted some in each of {', '.join(PARTS)}. Add videos "
            "that are not of one group, or change the manifest's split."
        )
    table = table.with_columns(
        # A content is called by the first path of its files.
        pl.col("path").min().over("content_sha256"),
        own_path="path",
        part=pl.Series(split.parts, dtype=pl.String),
        split_source=pl.Series(split.sources, dtype=pl.String),
        used=pl.col("row").first().over("content_sha256", "text"),
    )
    for row_number, own_path, used in table.filter(pl.col("row") != pl.col("used"))["row", "own_path", "used"].rows():
        detail = f"row {row_number}: the same video and text as row {used}, which is used."
        rejections.add_file(own_path, Refusal("duplicate_pair", detail), row=row_number)
    table = table.filter(pl.col("row") == pl.col("used"))
    hashes = [sha256(text.encode()).hexdigest() for text in table["text"]]
    text_ids, content_ids = video_ids(hashes), video_ids(table["content_sha256"])
    table = table.with_columns(
        text_id=pl.Series([text_ids[each] for each in hashes], dtype=pl.String),
        video_id=pl.col("content_sha256").replace_strict(content_ids, return_dtype=pl.String),
    ).with_columns(pair_id=pl.col("video_id") + "_" + pl.col("text_id"))
    pairs = check_table(table.select(*VIDEO_TEXTS.columns).sort("pair_id"), VIDEO_TEXTS, "the pairs")
    notes = (*_notes(pairs, listing, grouping.merges), *split.notes)
    return VideoTextIndex(pairs, rejections.frame(), listing.root, notes)


def _without_copies_across(rows: pl.DataFrame, rejections: Rejections) -> pl.DataFrame:
    """Return the rows without those whose footage is also in a later part of the stated split; reject these.

    The order of the parts is train, validation, test. Rows stay where the manifest contradicts itself, because its
    split divides a stated group or one file: ``split_parts`` raises an error for them.
    """
    several, rank = pl.col("part").drop_nulls().n_unique(), {part: place for place, part in enumerate(PARTS)}
    rows = rows.with_columns(
        last=pl.col("part").replace_strict(rank, return_dtype=pl.Int64).max().over("group_id"),
        contradicted=(
            (several.over("path") > 1) | (pl.col("stated_group").is_not_null() & (several.over("stated_group") > 1))
        ).any().over("group_id"),
    )  # fmt: skip
    is_copy = pl.col("part").replace_strict(rank, return_dtype=pl.Int64) < pl.col("last")
    is_copy = (is_copy & ~pl.col("contradicted")).fill_null(value=False)
    for row in rows.filter(is_copy).iter_rows(named=True):
        detail = (
            f"row {row['row']}: is in {row['part']}, but the {PARTS[row['last']]} part shows the same footage (group "
            f"{row['group_id']!r}). Leave it out, or put both into one part; where they only look alike, lower "
            "near_duplicate_bits (0: off)."
        )
        rejections.add_file(row["path"], Refusal("copy_across_split", detail), row=row["row"])
    return rows.filter(~is_copy)
