"""Build the index: a table of every usable video of a corpus with its label, leakage group and probe.

A leakage group holds the videos that show the same footage or come from the same source; a split never divides it. A
probe holds facts of a decoded file, such as its size, length, frame rate and codec. INDEX, REJECTED, GROUP_LINKS and
ANNOTATIONS are tables whose columns ``services.tables`` describes.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import chain, zip_longest
from pathlib import Path

import polars as pl

from fvc_lib.corpus.copies.groups import GroupMember, Merge, join_groups
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links
from fvc_lib.corpus.corpus_files import (
    NOT_A_LOSS,
    Entry,
    Refusal,
    Rejections,
    counts_text,
    reasons_text,
    refuse_lost,
    some_of,
)
from fvc_lib.corpus.listing import Listing, place, read_corpora, reading_options
from fvc_lib.corpus.probing import VIDEO_FILES, ProbeResult, Progress, probe_files, reencoded_files
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.memory import give_back_freed
from fvc_lib.services.tables import (
    ANNOTATIONS,
    GROUP_LINKS,
    INDEX,
    LABELS,
    REJECTED,
    column_types,
    frame_of,
    write_table,
)
from fvc_lib.video.decode.probe import VideoProbe
from fvc_lib.video.reencode import recipe_named

# --- Groups and labels from the label tables alone, without opening videos.


def group_annotations(listing: Listing) -> tuple[dict[str, str], tuple[Merge, ...]]:
    """Make leakage groups without opening videos; return (groups, merges).

    Only the label source is used: the table, lists or folder names that state labels. ``groups`` maps each source id
    (name of a video in the label source) to its group. ``merges`` are the links that joined stated groups. A source id
    without a stated group forms a group called ``source <source id>``.
    """
    sources = listing.annotations["source_id"].unique().sort().to_list()
    members = [GroupMember(source, source, None) for source in sources]
    group_ids, merges = join_groups(members, (), listing.memberships)
    return dict(zip(sources, group_ids, strict=True)), merges


def undisputed_labels(annotations: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``video_id group_id label`` of the videos whose rows all have the same label, real or fake.

    The label source (such as a table of labels) may have several rows for a video. The result has one row per video.
    ``video_id`` is the video's name in the label source, because there may be no file. Rows with an empty label are
    ignored.

    Args:
        annotations: ANNOTATIONS table: one row for each row of the label source.
    """
    num_labels = pl.col("label").n_unique().over("source_id")
    rows = annotations.drop_nulls("label").filter(num_labels == 1)
    rows = rows.filter(pl.col("label").is_in(LABELS)).unique("source_id", keep="first", maintain_order=True)
    return rows.select("group_id", "label", video_id="source_id").sort("video_id")


def listed_videos(listing: Listing) -> pl.DataFrame:
    """Return a table ``video_id group_id label official_split`` of all videos of a listing that may be usable.

    It is used in place of the index before any file is opened. So ``video_id`` is the path, and groups are those that
    the corpus states. The later index has at most these videos, because unreadable files and duplicates are left out.
    """
    group_of, _ = group_annotations(listing)
    rows = [(entry.path, group_of[entry.source_id], entry.label, entry.official_split) for entry in listing.entries]
    schema = dict.fromkeys(("video_id", "group_id", "label", "official_split"), pl.String)
    return pl.DataFrame(rows, schema=schema, orient="row")


# --- Refuse corpora that cannot be used.


def _losses(listing: Listing, rejected: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``rejected`` that count as the loss of a labelled video.

    ``rejected`` is a REJECTED table, and ``listing`` states the corpora. Rows with reasons such as duplicate content or
    an unused label do not count (``NOT_A_LOSS``). Missing videos of FVC-2018 do not count: that corpus consists of
    annotations, and most of its videos were deleted.
    """
    losses = rejected.filter(~pl.col("reason").is_in(sorted(NOT_A_LOSS)))
    for name, part in (listing.parts or {"": listing}).items():
        if part.kind == "fvc2018":
            is_of_part = pl.col("path").str.starts_with(name and f"{name}/")
            losses = losses.filter(~is_of_part | (pl.col("reason") != "missing_video"))
    return losses


def refuse_unusable(listing: Listing, videos: pl.DataFrame, rejected: pl.DataFrame, max_rejected_share: float) -> None:
    """Raise ``DataError`` if ``videos`` cannot be used to train and test a detector.

    Args:
        listing: the corpus that the videos come from.
        videos: usable videos, with the column ``label``.
        rejected: REJECTED table.
        max_rejected_share: largest share of labelled videos that may be lost, 0 to 1.

    Raises:
        DataError: no video is usable, all have the same label, or too many labelled videos are lost.
    """
    losses = _losses(listing, rejected) if videos.height else rejected
    try:
        refuse_lost(listing.shown, "labelled video", losses, videos.height, max_rejected_share)
    except DataError as error:
        raise DataError(f"{error} To index the label tables without videos: -p annotations_only true.") from None
    if lacking := sorted(set(LABELS) - set(videos["label"])):
        raise DataError(
            f"corpus {listing.shown!r}: has no usable video labelled {lacking[0]!r}, only {videos.height} of the other "
            f"label ({reasons_text(rejected)}). Add {lacking[0]} videos: one class alone is not enough."
        )


def refuse_empty_index(index: pl.DataFrame) -> None:
    """Raise ``DataError`` if the index (a table of the usable videos) has no row.

    Raises:
        DataError: the index has no row, because it was made with ``annotations_only``.
    """
    if index.is_empty():
        raise DataError(
            "the index holds no usable video: it was made from annotations only, and nothing but 01_data_index can run "
            "on those. Fetch the videos and start a new run without annotations_only."
        )


# --- The index.

_ROWS_AT_ONCE = 1 << 13  # rows of the index that are made at a time
_SAME_AS, _USED = "same content as ", ", which is used."  # the text of a rejection before and after the repr of a path
_PROBED = [field.name for field in fields(VideoProbe)]
_HASHES = ("content_sha256", "perceptual_hash")

Reject = Callable[[Iterable[str], str, str], None]  # called with (paths, reason, detail); rejects these paths


@dataclass(frozen=True)
class IndexReport:
    """Counts of the videos in a new index and of the rejected files, for printing."""

    num_known: int  # number of files that were not probed again because they are unchanged
    summary: pl.DataFrame  # table ``what value`` of counts as text
    rejected: pl.DataFrame  # table ``reason videos``: number of rejected files by reason, most frequent first
    # Table ``label rows sources with_a_file`` of the annotations: of all, of distinct ones, of those with a file.
    labels: pl.DataFrame
    notes: tuple[str, ...]  # sentences for the user


def build_index(
    corpus: AnyPath,
    config: RunConfig,
    tables: AnyPath,
    *,
    progress: Progress = None,
) -> IndexReport:
    """Probe a corpus, and write the tables of its videos, rejected files, links between groups, and annotations.

    An annotation is a row of the label source. The tables depend on the files, the labels and the name of the corpus.
    They do not depend on file order, worker count, working directory or the location of the corpus. Each probe result
    is stored below the cache folder at once, so a call that was killed can be repeated and continues there.

    Args:
        corpus: folder, manifest, tar or pattern; see ``listing.read_corpus``.
        config: uses the fields of the section ``data``, the cache folder and the number of workers. With
            ``annotations_only`` no video is opened: existing ones are rejected as ``not_opened``, and the index has no
            rows. With ``canonical`` or ``rescale`` videos are re-encoded before their probes are taken.
        tables: folder that receives Parquet files with the names of their tables: INDEX, sorted by ``video_id``,
            REJECTED, GROUP_LINKS and ANNOTATIONS. If videos are re-encoded, ``original_index`` is the INDEX of the
            files before that.
        progress: called with (done, total) as files are probed, then as they are re-encoded.

    Raises:
        UsageError: a corpus has no known layout, is given twice or lies within another corpus.
        DataError: no video is usable, only one label occurs, or too many videos are lost; with ``annotations_only``:
            the label tables have no row. It is raised after the tables were written.
    """
    work_dir = Path(config.cache_dir) / "index"
    folder = Path(tables)
    listing = read_corpora(
        [corpus, *config.more_corpora],
        work_dir,
        **reading_options(config),
    )
    group_of, merges = group_annotations(listing)
    rejections = Rejections()
    entry_of = {entry.path: entry for entry in listing.entries}

    def reject(paths: Iterable[str], reason: str, detail: str) -> None:
        for path in paths:
            rejections.add(entry_of[path], Refusal(reason, detail))

    num_known = 0
    videos = frame_of(None, INDEX)
    notes = listing.notes
    if config.annotations_only:
        reject(entry_of, "not_opened", "annotations_only is on. Turn it off to index the videos that are there.")
    else:
        results, num_known = probe_listing(listing, work_dir, workers=config.workers, progress=progress)
        videos, merges = grouped(listing.entries, listing.memberships, results, config.near_duplicate_bits, reject)
        videos = _settle_contents(videos, reject)
    if config.dev_groups:
        labels_of = dict(videos.group_by("group_id").agg(pl.col("label").unique()).iter_rows())
        chosen = trial_groups(labels_of, config.dev_groups, config.seed)
        in_trial = pl.col("group_id").is_in(sorted(chosen))
        outside = videos.filter(~in_trial)["path"]
        reject(outside, "not_in_trial", f"its group is not among the {config.dev_groups} of the trial (dev_groups).")
        videos = videos.filter(in_trial)
    if config.recipe and videos.height:
        originals, videos = _reencoded(videos, listing.root, config, reject, progress)
        if height := recipe_named(config.recipe).height:
            traces = "Smaller ones were enlarged, and slower ones repeat frames: both may still tell labels apart."
            notes += (f"Every video has {height} rows now. {traces}",)
        write_table(_with_ids(originals), INDEX, folder / "original_index.parquet")
    index, rejected = _with_ids(videos), rejections.frame(listing.rejected)
    group_id = pl.col("source_id").replace_strict(group_of, return_dtype=pl.String)
    annotations = listing.annotations.with_columns(group_id=group_id).select(*ANNOTATIONS.columns)
    write_table(rejected, REJECTED, folder / "rejected.parquet")
    links = frame_of([astuple(merge) for merge in merges], GROUP_LINKS)
    write_table(links, GROUP_LINKS, folder / "group_links.parquet")
    write_table(annotations, ANNOTATIONS, folder / "annotations.parquet")
    write_table(index, INDEX, folder / "index.parquet")
    if not config.annotations_only:
        refuse_unusable(listing, index, rejected, config.max_rejected_share)
    elif annotations.is_empty():
        raise DataError(f"corpus {listing.shown!r}: its label tables hold no row. Give a corpus with annotations.")
    reasons = rejected.group_by("reason").agg(videos=pl.len()).sort("videos", "reason", descending=[True, False])
    counts = {"rows": pl.len(), "sources": pl.col("source_id").n_unique(), "with_a_file": pl.col("is_present").sum()}
    labels = annotations.group_by("label").agg(**counts).sort("rows", "label", descending=[True, False])
    return IndexReport(num_known, _summary(listing, index, rejected), reasons, labels, notes)


def probe_listing(
    listing: Listing,
    work_dir: AnyPath,
    *,
    workers: int = 0,
    progress: Progress = None,
    chosen: Callable[[str], bool] = lambda _: True,
    writer: str = "",
) -> tuple[dict[str, ProbeResult], int]:
    """Probe the videos of a listing: decode each file, and record its properties and hashes.

    Results that an earlier call stored in ``work_dir`` are reused, also if the corpus was indexed alone then and is
    indexed together with others now.

    Args:
        listing: the videos.
        work_dir: folder of stored results.
        workers: number of processes; 0: one per available core.
        progress: called with (done, total) after each file. If there are several corpora, both numbers count the files
            of the corpus that is being probed.
        chosen: called with the path of a video; returns whether to probe it.
        writer: name of this process if several processes probe the same corpus; empty: this is the only one.

    Returns:
        (results, num_known): the results by path, and the number of results that an earlier call had stored.
    """
    results: dict[str, ProbeResult] = {}
    num_known = 0
    for name, part in (listing.parts or {"": listing}).items():
        paths = [entry.path for entry in part.entries if chosen(place(name, entry.path))]
        probed, known = probe_files(
            VIDEO_FILES, part.root, paths, work_dir, workers=workers, progress=progress, writer=writer
        )
        results |= {place(name, path): result for path, result in probed.items()}
        num_known += known
    return results, num_known


def grouped(
    files: Sequence[Entry],
    memberships: Iterable[tuple[str, str]],
    results: dict[str, ProbeResult],
    near_duplicate_bits: int,
    reject: Reject,
) -> tuple[pl.DataFrame, tuple[Merge, ...]]:
    """Make leakage groups of the readable files; return (videos, merges).

    ``videos`` is a table with one row per readable file and the columns of INDEX except ``video_id``. ``merges`` are
    the links that joined stated groups, such as equal contents.

    Args:
        files: the files of the corpus.
        memberships: pairs (source id, group) that the corpus states.
        results: probe result of each file by path. Used results are removed, so that hashes are not in memory twice.
        near_duplicate_bits: largest number of differing bits of near-duplicate frames; 0: they are not searched.
        reject: called for unreadable files; see ``Reject``.
    """
    entries = []
    for entry in files:
        result = results[entry.path]
        if result.probe is None:
            reject([entry.path], result.reason, result.detail)
        else:
            entries.append(entry)
    # Files that are left out later also count as links between groups.
    members = [
        GroupMember(entry.path, entry.source_id, results[entry.path].content_sha256, entry.stated_group)
        for entry in entries
    ]
    near = list[tuple[int, int]]()
    if near_duplicate_bits:
        near = near_duplicate_links([results[entry.path].perceptual_hash for entry in entries], near_duplicate_bits)
    group_ids, merges = join_groups(members, near, memberships)
    del members, near
    schema = {name: kind for name, kind in column_types(INDEX).items() if name not in {"video_id", "group_id"}}
    parts = [pl.DataFrame(schema=schema)]
    for start in range(0, len(entries), _ROWS_AT_ONCE):
        some = entries[start : start + _ROWS_AT_ONCE]
        found = [results.pop(entry.path) for entry in some]
        parts.append(pl.DataFrame({name: _column(name, some, found) for name in schema}, schema=schema))
        give_back_freed()
    return pl.concat(parts).with_columns(pl.Series("group_id", group_ids, pl.String)), merges


def _column(name: str, entries: Sequence[Entry], results: Sequence[ProbeResult]) -> list[object]:
    """Return the values of the INDEX column ``name``, one for each file.

    Properties and hashes come from ``results``. Other values, such as labels, come from ``entries``.
    """
    if name in _PROBED:
        return [getattr(result.probe, name) for result in results]
    return [getattr(row, name) for row in (results if name in _HASHES else entries)]


def _settle_contents(videos: pl.DataFrame, reject: Reject) -> pl.DataFrame:
    """Return ``videos`` with one row for each file content in each corpus; reject the other rows as duplicates.

    Of files with equal content in a corpus, the first row stays. If files of equal content have different labels, all
    of them are rejected.
    """
    is_disputed = pl.col("label").n_unique().over("content_sha256") > 1
    for rows in videos.filter(is_disputed).partition_by("content_sha256", maintain_order=True):
        stated = f"{counts_text(rows['label'])}: {some_of(rows['path'].to_list())}"
        reject(rows["path"], "conflicting_labels", f"one content with two labels: {stated}. Keep the right one.")
    first = pl.col("path").first().over("content_sha256", "corpus")
    videos = videos.filter(~is_disputed).with_columns(first=first)
    repeats = videos.filter(pl.col("path") != pl.col("first"))
    for path, used in repeats.select("path", "first").iter_rows():
        reject([path], "duplicate_content", f"{_SAME_AS}{used!r}{_USED}")
    return videos.filter(pl.col("path") == pl.col("first")).drop("first")


def used_for(rejected: pl.DataFrame) -> dict[str, str]:
    """Map the path of each file that was rejected as a duplicate to the path of the file used in its place.

    ``rejected`` is a REJECTED table.
    """
    rows = rejected.filter(reason="duplicate_content").select("path", "detail").iter_rows()
    return {path: ast.literal_eval(detail.removeprefix(_SAME_AS).removesuffix(_USED)) for path, detail in rows}


def trial_groups(labels_of_group: Mapping[str, Sequence[str]], number: int, seed: int) -> frozenset[str]:
    """Choose the names of some groups for a trial run on a part of the corpus.

    Groups with a real video and groups with a fake video are chosen alternately.

    The choice depends only on the groups' names, their labels and ``seed``. With the same seed, a smaller ``number``
    chooses a subset of the groups that a larger one chooses.

    Args:
        labels_of_group: the labels of each group's videos.
        number: largest number of groups to choose.
        seed: decides the order in which groups are chosen.
    """
    order = sorted(labels_of_group, key=lambda group: hashlib.sha256(f"{seed} {group}".encode()).digest())
    of_labels = ([group for group in order if label in labels_of_group[group]] for label in LABELS)
    in_turn = dict.fromkeys(chain(*zip_longest(*of_labels)))
    return frozenset([group for group in in_turn if group is not None][:number])


def _reencoded(
    videos: pl.DataFrame, root: Path, config: RunConfig, reject: Reject, progress: Progress
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Re-encode the files of ``videos``; return (originals, videos), two tables of the files for which that succeeded.

    ``originals`` has the probes (size, length, codec, ...) of the original files. ``videos`` has the same rows with the
    probes of the new files. Hashes and groups stay those of the original files in both.

    Args:
        videos: table with the columns of INDEX except ``video_id``.
        root: the folder that the paths in the table are relative to.
        config: uses recipe (settings of the encoder), cache_dir and workers.
        reject: called for files that cannot be re-encoded; see ``Reject``.
        progress: called with (done, total) after each file.
    """
    kind = reencoded_files(config.recipe, config.cache_dir)
    work_dir = Path(config.cache_dir) / "index"
    paths = videos["path"].to_list()
    measured, _ = probe_files(kind, root, paths, work_dir, workers=config.workers, progress=progress)
    for path in paths:
        if measured[path].probe is None:
            reject([path], measured[path].reason, measured[path].detail)
    readable = [path for path in paths if measured[path].probe is not None]
    originals = videos.filter(pl.col("path").is_in(readable))
    results = [measured[path] for path in originals["path"]]
    columns = [pl.Series(name, _column(name, (), results), originals.schema[name]) for name in _PROBED]
    return originals, originals.with_columns(columns)


def video_ids(contents: Iterable[str], length: int = 16) -> dict[str, str]:
    """Map each content hash to an id: its first ``length`` hex digits.

    If two hashes begin with the same digits, all ids get more digits, as many as are needed to tell them apart.
    """
    distinct = set(contents)
    while len({content[:length] for content in distinct}) < len(distinct):
        length += 1
    return {content: content[:length] for content in distinct}


def _with_ids(videos: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``video_id`` to ``videos``, and return the result as an INDEX table, sorted by id.

    An id consists of the first digits of the hash of the file's content.
    If several corpora hold the same content, the ids of these videos end with the name of their corpus.
    """
    content = pl.col("content_sha256")
    own = content.replace_strict(video_ids(videos["content_sha256"]), return_dtype=pl.String)
    end = "-" + pl.col("corpus").str.replace_all("[^0-9A-Za-z_-]+", "-")  # ids become names of files
    is_repeated = pl.len().over(content) > 1
    video_id = pl.when(is_repeated).then(own + end).otherwise(own)
    return videos.with_columns(video_id=video_id).select(*INDEX.columns).sort("video_id")


def _summary(listing: Listing, index: pl.DataFrame, rejected: pl.DataFrame) -> pl.DataFrame:
    losses = _losses(listing, rejected).height
    groups = index.group_by("group_id").agg(pl.col("label").n_unique())
    share_lost = losses / max(1, losses + index.height)
    num_mixed = groups.filter(label=2).height
    rows = {
        "rows of the label source": f"{listing.annotations.height:,}",
        "videos in the index": f"{index.height:,}",
        "labelled videos lost": f"{share_lost:.1%}",
        "leakage groups": f"{groups.height:,}",
        "  with both labels": f"{num_mixed:,}",
    }
    return pl.DataFrame(list(rows.items()), schema={"what": pl.String, "value": pl.String}, orient="row")
