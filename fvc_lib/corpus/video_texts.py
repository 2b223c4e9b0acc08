"""Index pairs of videos and texts: usable pairs, their leakage groups, and one split into train, validation and test.

A pair is a video with a text that describes it. A leakage group, which the split never divides, joins pairs with the
same stated group, the same file, equal content or near perceptual hashes. Equal texts do not join groups, because many
videos may have the same text. A note counts the test texts that also belong to training videos.

VIDEO_TEXTS and REJECTED are tables whose columns ``services.tables`` describes.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import polars as pl

from fvc_lib.corpus import label_table
from fvc_lib.corpus.corpus_files import (
    CorpusFiles,
    Entry,
    Refusal,
    Rejections,
    reasons_text,
    refuse_lost,
)
from fvc_lib.corpus.folds import PartSplit, split_parts
from fvc_lib.corpus.images import SplitIndex, reject, without_copies_across
from fvc_lib.corpus.index import grouped, video_ids
from fvc_lib.corpus.probing import VIDEO_FILES, ProbeResult, Progress, probe_files
from fvc_lib.corpus.samples.drawings import generate_sample_captions
from fvc_lib.corpus.tar_samples import tar_files, tar_samples, tars_in
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import IMAGE_TARGETS, VIDEO_TEXTS, check_table, frame_of

# --- List the pairs of a manifest (with any separator and one row per pair) or of tars.

ACCEPTED = (
    "Wanted a manifest with the columns 'path' and 'text', if known also 'split' (train, validation, test) and "
    "'group': CSV, any other separated text (manifest_separator) or Parquet; or a folder with one such file in it; or "
    "a tar, a folder of tars or a pattern like 'shards/{000..099}.tar', with KEY.mp4 and KEY.txt or KEY.json "
    "(WebDataset)."
)


_PATHS, _TEXTS = ("path", "video_path", "video"), ("text", "caption")
_ROWS = {
    "row": pl.Int64, "path": pl.String, "text": pl.String, "part": pl.String, "stated_group": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class PairListing:
    """The pairs that a manifest or tars list, before any video is opened.

    Attributes:
        root: absolute folder that every path is relative to.
        rows: the usable rows in the manifest's order, with the columns ``row`` (1-based number), ``path`` (table text),
            ``text`` (in Unicode form NFC, with single spaces), ``part`` (train, validation, test or null) and
            ``stated_group``.
        rejections: the other rows, with reasons.
        memberships: the distinct pairs (path, stated group) of all rows with a valid path. They include missing files,
            which also show that groups belong together.
        notes: sentences on damaged tars.
    """

    root: Path
    rows: pl.DataFrame
    rejections: Rejections
    memberships: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def read_pairs(manifest: AnyPath, separator: str = ",", *, allow_outside: bool = False) -> PairListing:
    """List the pairs of a manifest, a table with one row per pair of a video and a text.

    The needed columns are ``path`` (or ``video_path``) and ``text`` (or ``caption``). The columns ``split`` and
    ``group`` are optional.

    Args:
        manifest: a .parquet file, or separated text in UTF-8 (a byte order mark is allowed).
        separator: text between columns; see ``read_label_table``.
        allow_outside: accept listed files outside the manifest's folder as well, and follow links.

    Raises:
        UsageError: the manifest is no table of this kind, or a needed column is missing.
    """
    manifest = Path(manifest)
    table = label_table.read_label_table(manifest, separator)
    files, rejections = CorpusFiles(manifest.parent, "video", allow_outside), Rejections()
    table.further_columns((_PATHS, _TEXTS), (label_table.GROUP_COLUMNS, label_table.SPLIT_COLUMNS))
    rows = label_table.file_rows(table, files, rejections, _PATHS)
    return _listing(files.root, ((row, ()) for row in rows), rejections)


def read_tar_pairs(corpus: AnyPath, *, allow_outside: bool = False) -> PairListing:
    """List the pairs in a tar, in the tars of a folder, or in the tars that a pattern names.

    The text of a video ``KEY.mp4`` is the content of ``KEY.txt``, else ``text`` or ``caption`` in ``KEY.json``.
    ``split`` and ``group`` are read from ``KEY.json``, too.

    Raises:
        UsageError: a pattern is unusable (see ``run_paths.tars_of``).
    """
    files, rejections = tar_files(Path(corpus), allow_outside), Rejections()
    samples, notes = tar_samples(Path(corpus), files, rejections)
    pairs = [
        (label_table.FileRow(number, sample.path, sample.refusal, sample.cells, sample.path), sample.links)
        for number, sample in enumerate(samples, start=1)
    ]
    return _listing(files.root, pairs, rejections, notes)


def _listing(
    root: Path,
    pairs: Iterable[tuple[label_table.FileRow, tuple[str, ...]]],
    rejections: Rejections,
    notes: tuple[str, ...] = (),
) -> PairListing:
    """Return the listing of ``pairs``; pairs without a usable file or text, or with an unknown part, are rejected.

    Args:
        root: absolute folder that every path is relative to.
        pairs: tuples (row, groups) of all pairs; ``groups`` are leakage groups in addition to the stated group.
        rejections: receives the rejected pairs.
        notes: sentences for the user.
    """
    rows, memberships = [], set[tuple[str, str]]()
    for row, links in pairs:
        written = next((row.cells[name] for name in (".txt", *_TEXTS) if row.cells.get(name)), "")
        group = label_table.cell_text(row.cells, *label_table.GROUP_COLUMNS)
        text = " ".join(unicodedata.normalize("NFC", written).split())  # equal texts count as one
        part, no_part = label_table.stated_part(row.cells)
        if row.refusal is None or row.refusal.reason == "missing_video":
            memberships.update((row.path, name) for name in (group, *links) if name)
        problem = no_part
        if not text:
            problem = Refusal("no_text", "has no text. Write what is seen, or drop the row.")
        elif re.search("[\ud800-\udfff]", text):
            problem = Refusal("malformed_row", "its text is not UTF-8. Save it in UTF-8.")
        refusal = row.refused(problem)
        if refusal is None:
            rows.append((row.number, row.path, text, part, group))
        else:
            rejections.add_file(row.path, refusal, row=row.number)
    table = pl.DataFrame(rows, schema=_ROWS, orient="row")
    return PairListing(root, table, rejections, tuple(sorted(memberships)), notes)


def video_text_root(config: RunConfig) -> Path:
    """Return the folder that the paths of the pairs (videos with texts) are relative to; nothing is generated.

    It is the folder of the manifest or of the tars. If ``config.corpus`` is empty, it is the folder of the sample
    corpus.

    Raises:
        UsageError: ``config.corpus`` is neither a manifest, a folder with a single table, nor tars.
    """
    if not config.corpus:
        return (Path(config.data_dir) / "sample_captions").absolute()
    if _is_of_tars(corpus := Path(config.corpus)):
        return tar_files(corpus).root
    return label_table.find_table(corpus, ACCEPTED).parent.absolute()


def _is_of_tars(corpus: Path) -> bool:
    """Return whether the corpus is read from tars (True) or from a manifest (False).

    If a folder holds tars and a manifest, the manifest is read. A table with the same name as a tar does not count as a
    manifest, because video2dataset writes such tables.
    """
    tars = {name.split(".")[0] for name in tars_in(corpus)}
    return bool(tars) and tars.issuperset(Path(table).stem for table in label_table.tables_in(corpus))


def index_video_texts(
    config: RunConfig,
    *,
    rejected_path: AnyPath | None = None,
    progress: Progress = None,
) -> SplitIndex:
    """List the pairs of ``config.corpus``, probe their videos, and split them into train, validation and test.

    If ``config.corpus`` is empty, the sample corpus is generated and used. To probe a video is to decode it and to
    record its properties and hashes. Probes are stored under ``config.cache_dir``; a later call continues from them.

    The result depends on the files, the rows of the manifest and the fields of ``config`` below. It does not depend on
    the order of the rows, the number of workers or the location of the corpus.

    Args:
        config: ``corpus``, ``manifest_separator``, ``near_duplicate_bits``, ``max_rejected_share``
            and ``seed`` decide the result.
        rejected_path: write the REJECTED table here if too many pairs are lost.
        progress: called with (done, total), first for generated clips, then for probed files.

    Raises:
        UsageError: the corpus has no such manifest, or a pattern of tars is unusable (``run_paths.tars_of``).
        DataError: no pair is usable, too many are lost, or there are too few groups for three parts.
        LeakageError: the manifest's own split has a group or a video in two parts.
    """
    corpus = Path(config.corpus or generate_sample_captions(video_text_root(config), progress=progress))
    if _is_of_tars(corpus):
        listing = read_tar_pairs(corpus, allow_outside=config.allow_outside)
    else:
        manifest = label_table.find_table(corpus, ACCEPTED)
        listing = read_pairs(manifest, config.manifest_separator, allow_outside=config.allow_outside)
    probes, _ = probe_files(
        VIDEO_FILES, listing.root, listing.rows["path"].unique().sort().to_list(), Path(config.cache_dir) / "index",
        workers=config.workers, progress=progress,
    )  # fmt: skip
    return index_of(listing, probes, config, rejected_path)


def index_of(
    listing: PairListing, probes: Mapping[str, ProbeResult], config: RunConfig, rejected_path: AnyPath | None = None
) -> SplitIndex:
    """Return the index of the listed pairs: reject unusable pairs, make leakage groups, and split.

    Args:
        listing: the pairs.
        probes: maps each path to the probe result of its video.
        config: uses ``near_duplicate_bits``, ``max_rejected_share`` and ``seed``.
        rejected_path: write the REJECTED table here if too many pairs are lost.

    Raises:
        DataError: no pair is usable, too many are lost, or there are too few groups for three parts.
        LeakageError: the manifest's own split has a group or a video in two parts.
    """
    rejections = listing.rejections

    def unreadable(paths: Iterable[str], reason: str, detail: str) -> None:
        for path, row in listing.rows.filter(pl.col("path").is_in(list(paths))).select("path", "row").iter_rows():
            rejections.add_file(path, Refusal(reason, detail), row=row)

    entries = [Entry(path, None, path) for path in listing.rows["path"].unique().sort()]
    videos, _ = grouped(entries, listing.memberships, dict(probes), config.near_duplicate_bits, unreadable)
    table = listing.rows.join(
        videos.select("path", "content_sha256", "num_frames", "duration_seconds", "group_id"), on="path"
    )
    # Loss is checked here, because repeated rows and copies in two parts, which are rejected later, are no loss.
    refuse_lost(
        listing.root, "pair", rejections.frame(), table.height, config.max_rejected_share, rejected_path=rejected_path
    )
    # A stated group or a file in two parts raises an error here; copies in two parts are left out below.
    _split(table, pl.coalesce("stated_group", "path"), config.seed)
    table = table.sort("content_sha256", "text", "path", "part", "row", nulls_last=True)
    table = without_copies_across(table, "part", "group_id", rejections)
    split = _split(table, pl.col("group_id"), config.seed)
    split.refuse_empty_parts()
    same_pair = pl.col("row").first().over("content_sha256", "text")
    table = table.with_columns(
        part=pl.Series(split.parts), split_source=pl.Series(split.sources), used=same_pair,
        text_sha256=pl.col("text").map_elements(lambda text: sha256(text.encode()).hexdigest(), pl.String),
    )  # fmt: skip
    is_used, detail = pl.col("row") == pl.col("used"), pl.format("the same video and text as row {}.", "used")
    reject(table, ~is_used, "duplicate_pair", detail, rejections)
    table = table.with_columns(
        pl.col("path").min().over("content_sha256"),  # the path of a content is the first path of its files
        text_id=pl.col("text_sha256").replace_strict(video_ids(table["text_sha256"])),
        video_id=pl.col("content_sha256").replace_strict(video_ids(table["content_sha256"])),
    ).with_columns(pair_id=pl.col("video_id") + "_" + pl.col("text_id"))
    pairs = table.filter(is_used).select(*VIDEO_TEXTS.columns).sort("pair_id")
    pairs, rejected = check_table(pairs, VIDEO_TEXTS, "the pairs"), rejections.frame()
    num_texts = pairs["text_id"].n_unique()
    test = pairs.filter(part="test")
    known = test.join(pairs.filter(part="train"), on="text_id", how="semi")
    by_heart = (
        f"{known['text_id'].n_unique():,} of {test['text_id'].n_unique():,} different test texts ({known.height:,} of "
        f"{test.height:,} pairs) also belong to training videos: a model may know them by heart."
    )
    notes = (
        f"{pairs.height:,} pairs of {videos.height:,} videos and {num_texts:,} different texts.",
        *listing.notes,
        *([f"Not used: {reasons_text(rejected)}."] if rejected.height else ()),
        by_heart,
        *split.notes,
    )
    return SplitIndex(pairs, rejected, listing.root, notes, frame_of(None, IMAGE_TARGETS))


def _split(table: pl.DataFrame, group: pl.Expr, seed: int) -> PartSplit:
    """Return a split of the rows of ``table`` into train, validation and test that divides no group.

    ``group`` is an expression for the group of each row. A part that a row states in column ``part`` holds for the
    whole group.
    """
    groups, parts = table.select(group).to_series().to_list(), table["part"].to_list()
    return split_parts(groups, [None] * len(parts), parts, seed=seed)
