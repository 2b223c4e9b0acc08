"""Build the index: a table of every usable video of a corpus with its label, leakage group and probe.

A leakage group holds the videos that show the same footage or come from the same source; a split never divides it. A
probe is what decoding a file shows: its size, length, frame rate and codec.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.corpus.copies.groups import Grouping, GroupMember, Merge, join_groups
from fvc_lib.corpus.copies.near_duplicates import near_copies
from fvc_lib.corpus.corpus_files import (
    NOT_A_LOSS,
    Entry,
    Refusal,
    Rejections,
    counted,
    disputed,
    reasons_text,
    refuse_lost,
)
from fvc_lib.corpus.listing import Listing, place, read_corpora
from fvc_lib.corpus.probing import VIDEO_FILES, FileKind, ProbeResult, measured_again, probe_files
from fvc_lib.services.atomic_files import AnyPath, path_from_text
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

# --- From the label tables alone.


def group_annotations(listing: Listing) -> tuple[dict[str, str], tuple[Merge, ...]]:
    """Return a mapping from source id to group, and the links that joined stated groups.

    Only the groups that the label source states count; no video is compared. A source without a stated group forms a
    group called ``source <source id>``.
    """
    sources = listing.annotations["source_id"].unique().sort().to_list()
    grouping = join_groups([GroupMember(source, source, None) for source in sources], (), listing.memberships)
    return dict(zip(sources, grouping.group_ids, strict=True)), grouping.merges


def undisputed_labels(annotations: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``video_id group_id label`` of the sources whose rows all say real, or all say fake.

    ``video_id`` is the source id, because there may be no video. Rows with an empty label are ignored.

    Args:
        annotations: ANNOTATIONS rows.
    """
    sources = (
        annotations.drop_nulls("label")
        .group_by(pl.col("source_id").alias("video_id"))
        .agg(pl.col("group_id").first(), pl.col("label").first(), pl.col("label").n_unique().alias("labels"))
    )
    return sources.filter(pl.col("label").is_in(LABELS), labels=1).drop("labels").sort("video_id")


def num_stated_groups(listing: Listing) -> int:
    """Count the groups of the listed videos without opening a video; 0 if the label source states no group."""
    group_of, _ = group_annotations(listing)
    used = {entry.source_id for entry in listing.entries} or set(group_of)
    return len({group_of[source_id] for source_id in used}) if listing.memberships else 0


def listed_videos(listing: Listing) -> pl.DataFrame:
    """Return a table ``video_id group_id label official_split`` with one row per listed video.

    No file is opened. So ``video_id`` is the path, groups are those that the corpus states, and an index of this
    corpus has at most these rows.
    """
    group_of, _ = group_annotations(listing)
    rows = [(entry.path, group_of[entry.source_id], entry.label, entry.official_split) for entry in listing.entries]
    schema = dict.fromkeys(("video_id", "group_id", "label", "official_split"), pl.String)
    return pl.DataFrame(rows, schema=schema, orient="row")


# --- Refusals.


def _losses(listing: Listing, rejected: pl.DataFrame) -> pl.DataFrame:
    """Return the rejected rows that count as the loss of a labelled video.

    Missing videos of FVC-2018 do not count: the corpus consists of annotations, and most of its videos were deleted.
    """
    parts = listing.parts or {"": listing}
    tops = [name and f"{name}/" for name, part in parts.items() if part.kind == "fvc2018"]
    is_expected = pl.any_horizontal(pl.lit(value=False), *(pl.col("path").str.starts_with(top) for top in tops))
    is_loss = ~pl.col("reason").is_in(sorted(NOT_A_LOSS)) & ~(is_expected & (pl.col("reason") == "missing_video"))
    return rejected.filter(is_loss)


def refuse_unusable(listing: Listing, videos: pl.DataFrame, rejected: pl.DataFrame, max_rejected_share: float) -> None:
    """Raise ``DataError`` if ``videos`` cannot be used to train and test a detector.

    Args:
        listing: the corpus that the videos come from.
        videos: usable videos, with the column ``label``.
        rejected: REJECTED table.
        max_rejected_share: largest share of labelled videos that may be lost.

    Raises:
        DataError: no usable video, videos of one label only, or too many labelled videos lost.
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
    """Raise ``DataError`` if the index has no video.

    Raises:
        DataError: the index has no rows.
    """
    if index.is_empty():
        raise DataError(
            "the index holds no usable video: it was made from annotations only, and nothing but 01_data_index can run "
            "on those. Fetch the videos and start a new run without annotations_only."
        )


# --- The index.

_ROWS_AT_ONCE = 1 << 13  # rows of the table that are made at a time
_SAME_AS, _USED = "same content as ", ", which is used."  # around the repr of a path
_PROBED = [field.name for field in fields(VideoProbe)]


@dataclass(frozen=True)
class IndexReport:
    """Contents and exclusions of an index, for printing."""

    num_listed: int  # rows or files of the label source, used or not
    num_indexed: int  # videos in the index
    num_known: int  # files that were not probed again because they are unchanged
    summary: pl.DataFrame  # the report as text: ``what value``
    rejected: pl.DataFrame  # ``reason videos``, most frequent first
    merges: tuple[Merge, ...]  # links that joined groups beyond the stated ones
    notes: tuple[str, ...]  # sentences for the user


def build_index(
    corpus: AnyPath,
    *,
    more_corpora: Sequence[AnyPath] = (),
    index_path: AnyPath,
    rejected_path: AnyPath,
    work_dir: AnyPath,
    near_duplicate_bits: int,
    max_rejected_share: float,
    group_links_path: AnyPath | None = None,
    annotations_path: AnyPath | None = None,
    annotations_only: bool = False,
    allow_outside: bool = False,
    label_map: Mapping[str, str] | None = None,
    unused_labels: bool = False,
    dev_groups: int = 0,
    seed: int = 0,
    recipe: str = "",
    recipe_cache: AnyPath = "",
    originals_path: AnyPath | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    probe_function: str = VIDEO_FILES.function,
) -> IndexReport:
    """Probe a corpus and write its index, the rejected files, the links between groups, and every annotation.

    The tables depend on the files, the labels and the name of the corpus. They do not depend on file order, worker
    count, working directory or where the corpus lies.

    Args:
        corpus: folder, manifest, tar or pattern; see ``listing.read_corpus``.
        more_corpora: further ones, indexed together with it; see ``listing.read_corpora``.
        index_path: receives the INDEX table, sorted by ``video_id``.
        rejected_path: receives the REJECTED table.
        work_dir: keeps probe results as they come; a killed index continues from them.
        near_duplicate_bits: perceptual hashes closer than this join groups; 0: off.
        max_rejected_share: largest share of labelled videos that may be lost.
        group_links_path: receives the GROUP_LINKS table, if given.
        annotations_path: receives the ANNOTATIONS table, if given.
        annotations_only: index the label tables alone. No video is opened; existing ones are rejected as
            ``not_opened``, the index has no rows, and the links are those of the annotations.
        allow_outside: take listed files outside the corpus folder, and follow links.
        label_map: labels of its table, in lower case, that mean real or fake.
        unused_labels: ``label_map`` may name labels without a row.
        dev_groups: use only this many groups, drawn by ``seed`` (``trial_groups``); 0: all.
        seed: decides which groups ``dev_groups`` draws.
        recipe: settings by which videos are re-encoded before their probes are taken (``RunConfig.recipe``); empty: no
            re-encoding.
        recipe_cache: folder that keeps the re-encoded files.
        originals_path: receives the INDEX table of the files before re-encoding, if given.
        workers: probing processes; 0: one per available core.
        progress: called with (done, total) as files are probed, then as they are re-encoded.
        probe_function: ``module:name`` run in the workers.

    Raises:
        UsageError: a corpus has no known layout, is given twice or lies within another.
        DataError: after the tables were written: no usable video, only one label, or too many lost; with
            ``annotations_only``: no row.
    """
    listing = read_corpora(
        [corpus, *more_corpora],
        work_dir,
        allow_outside=allow_outside,
        label_map=label_map,
        unused_labels=unused_labels,
    )
    group_of, merges = group_annotations(listing)
    rejections = Rejections()
    entry_of = {entry.path: entry for entry in listing.entries}

    def reject(paths: Iterable[str], reason: str, detail: str) -> None:
        for path in paths:
            rejections.add(entry_of[path], Refusal(reason, detail))

    results: dict[str, ProbeResult] = {}
    num_known = 0
    if annotations_only:
        reject(entry_of, "not_opened", "annotations_only is on. Turn it off to index the videos that are there.")
    else:
        kind = replace(VIDEO_FILES, function=probe_function)
        results, num_known = probe_listing(listing, work_dir, kind=kind, workers=workers, progress=progress)
    for path, result in results.items():
        if result.probe is None:
            reject([path], result.reason, result.detail)
    readable = [entry for path, entry in entry_of.items() if path in results and results[path].probe is not None]
    # Files that are left out below link groups, too.
    grouping = _grouping(listing, readable, results, near_duplicate_bits)
    videos = _settle_contents(_table(readable, results, grouping.group_ids), reject)
    if dev_groups:
        labels_of = dict(videos.group_by("group_id").agg(pl.col("label").unique()).iter_rows())
        chosen = trial_groups(labels_of, dev_groups, seed)
        in_trial = pl.col("group_id").is_in(sorted(chosen))
        detail = f"its group is not among the {len(chosen)} of the trial (dev_groups)."
        reject(videos.filter(~in_trial)["path"], "not_in_trial", detail)
        videos = videos.filter(in_trial)
    originals, notes = videos, listing.notes
    if recipe:
        files, contents = files_of(listing), dict(videos.select("path", "content_sha256").iter_rows())
        sources = {content: files[path] for path, content in contents.items()}
        measured = measured_again(sources, recipe, recipe_cache, work_dir, workers=workers, progress=progress)
        for path, content in contents.items():
            if measured[content].probe is None:
                reject([path], measured[content].reason, measured[content].detail)
        probes = {content: result.probe for content, result in measured.items() if result.probe is not None}
        originals = videos.filter(pl.col("content_sha256").is_in(list(probes)))
        # Content and pictures, and so ids and groups, stay those of the files as they are.
        values = {name: [getattr(probes[content], name) for content in originals["content_sha256"]] for name in _PROBED}
        videos = originals.with_columns(pl.Series(name, values[name], originals.schema[name]) for name in _PROBED)
        notes += rescaling_notes(originals, recipe)
    index, rejected = _with_ids(videos), rejections.frame(listing.rejected)
    merges = merges if annotations_only else grouping.merges
    annotations = listing.annotations.with_columns(
        group_id=pl.col("source_id").replace_strict(group_of, return_dtype=pl.String)
    )
    for table, schema, table_path in (
        (rejected, REJECTED, rejected_path),
        (frame_of([astuple(merge) for merge in merges], GROUP_LINKS), GROUP_LINKS, group_links_path),
        (annotations.select(*ANNOTATIONS.columns), ANNOTATIONS, annotations_path),
        (index, INDEX, index_path),
        (_with_ids(originals) if originals_path else index, INDEX, originals_path),
    ):
        if table_path is not None:
            write_table(table, schema, table_path)
    if not annotations_only:
        refuse_unusable(listing, index, rejected, max_rejected_share)
    elif not listing.annotations.height:
        raise DataError(f"corpus {listing.shown!r}: its label tables hold no row. Give a corpus with annotations.")
    reasons = list(counted(rejected["reason"]).items())
    return IndexReport(
        listing.annotations.height,
        index.height,
        num_known,
        _summary(listing, index, rejected, merges),
        pl.DataFrame(reasons, schema={"reason": pl.String, "videos": pl.Int64}, orient="row"),
        merges,
        notes,
    )


def probe_listing(
    listing: Listing,
    work_dir: AnyPath,
    *,
    kind: FileKind[ProbeResult] = VIDEO_FILES,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    chosen: Callable[[str], bool] = lambda _: True,
    writer: str = "",
) -> tuple[dict[str, ProbeResult], int]:
    """Probe the files of a listing; return the results by path, and how many were stored by an earlier call.

    Stored results of a corpus are reused when it is later indexed together with others. Only paths for which
    ``chosen`` returns true are probed. Progress counts the files of one corpus at a time. For the other arguments see
    ``probe_files``.
    """
    results: dict[str, ProbeResult] = {}
    num_known = 0
    for name, part in (listing.parts or {"": listing}).items():
        paths = [entry.path for entry in part.entries if chosen(place(name, entry.path))]
        probed, known = probe_files(kind, part.root, paths, work_dir, workers=workers, progress=progress, writer=writer)
        results |= {place(name, path): result for path, result in probed.items()}
        num_known += known
    return results, num_known


def files_of(listing: Listing) -> dict[str, Path]:
    """Map each path in ``listing`` to its file."""
    return {
        place(name, entry.path): part.root / path_from_text(entry.path)
        for name, part in (listing.parts or {"": listing}).items()
        for entry in part.entries
    }


def _grouping(listing: Listing, entries: Sequence[Entry], results: Mapping[str, ProbeResult], bits: int) -> Grouping:
    found = [results[entry.path] for entry in entries]
    contents = [result.content_sha256 for result in found]
    copies = near_copies(contents, [result.perceptual_hash for result in found], bits)
    members = [
        GroupMember(entry.path, entry.source_id, content, entry.stated_group)
        for entry, content in zip(entries, contents, strict=True)
    ]
    return join_groups(members, copies, listing.memberships)


def _table(entries: Sequence[Entry], results: dict[str, ProbeResult], group_ids: Sequence[str]) -> pl.DataFrame:
    """Return the INDEX columns without ids, in the order of ``entries``.

    ``results`` is emptied, so that hashes are not held twice.
    """
    schema = {name: kind for name, kind in column_types(INDEX).items() if name not in {"video_id", "group_id"}}
    parts = [pl.DataFrame(schema=schema)]
    for start in range(0, len(entries), _ROWS_AT_ONCE):
        some = entries[start : start + _ROWS_AT_ONCE]
        found = [results.pop(entry.path) for entry in some]
        sources: list[Sequence[Any]] = [[result.probe for result in found], found, some]
        rows_of = {field.name: rows for rows in sources for field in fields(rows[0])}
        values = {name: [getattr(row, name) for row in rows_of[name]] for name in schema}
        parts.append(pl.DataFrame(values, schema=schema))
        give_back_freed()
    return pl.concat(parts).with_columns(pl.Series("group_id", group_ids, pl.String))


def _settle_contents(videos: pl.DataFrame, reject: Callable[[Iterable[str], str, str], None]) -> pl.DataFrame:
    """Return one row for each file content in each corpus: the first. Reject the others.

    All files of a content are rejected if they have different labels.
    """
    is_disputed = pl.col("label").n_unique().over("content_sha256") > 1
    for rows in videos.filter(is_disputed).partition_by("content_sha256", maintain_order=True):
        paths = disputed(rows.select("path", "label").rows())
        reject(rows["path"], "conflicting_labels", f"one content with two labels: {paths}. Keep the right one.")
    first = pl.col("path").first().over("content_sha256", "corpus")
    videos = videos.filter(~is_disputed).with_columns(first=first)
    for path, used in videos.filter(pl.col("path") != pl.col("first")).select("path", "first").iter_rows():
        reject([path], "duplicate_content", f"{_SAME_AS}{used!r}{_USED}")
    return videos.filter(pl.col("path") == pl.col("first")).drop("first")


def used_for(rejected: pl.DataFrame) -> dict[str, str]:
    """Map the path of each duplicate in a REJECTED table to the path of the used file of the same content."""
    rows = rejected.filter(reason="duplicate_content").select("path", "detail").iter_rows()
    return {path: ast.literal_eval(detail.removeprefix(_SAME_AS).removesuffix(_USED)) for path, detail in rows}


def trial_groups(labels_of_group: Mapping[str, Sequence[str]], number: int, seed: int) -> frozenset[str]:
    """Choose ``number`` groups: alternately a group with a real video and a group with a fake video.

    The choice depends only on the groups' names and ``seed``. With the same seed, a smaller ``number`` chooses a subset
    of the groups that a larger one chooses.

    Args:
        labels_of_group: the labels of each group's videos.
        number: how many groups to choose; fewer are returned if there are not enough.
        seed: decides the order in which groups are taken.
    """
    order = sorted(labels_of_group, key=lambda group: hashlib.sha256(f"{seed} {group}".encode()).digest())
    chosen: set[str] = set()
    for turn in range(2 * min(number, len(order))):
        label = LABELS[turn % 2]
        group = next((group for group in order if group not in chosen and label in labels_of_group[group]), None)
        if group is not None and len(chosen) < number:
            chosen.add(group)
    return frozenset(chosen)


def video_ids(contents: Iterable[str], length: int = 16) -> dict[str, str]:
    """Map each content hash to an id: its first ``length`` hex digits.

    If two hashes begin with the same digits, all ids are longer: as long as is needed to tell them apart.
    """
    distinct = set(contents)
    while len({content[:length] for content in distinct}) < len(distinct):
        length += 1
    return {content: content[:length] for content in distinct}


def _with_ids(videos: pl.DataFrame) -> pl.DataFrame:
    """Return the INDEX table of ``videos``, sorted by id.

    If several corpora hold the same content, each video's id ends with the name of its corpus.
    """
    ends = {}
    for name in videos["corpus"].unique():
        plain = re.sub("[^0-9A-Za-z_-]+", "-", name)[:40].strip("-")  # ids name files
        ends[name] = f"-{plain}" if plain == name else f"-{plain}-{hashlib.sha256(name.encode()).hexdigest()[:4]}"
    content = pl.col("content_sha256")
    end = pl.when(pl.len().over(content) > 1).then(pl.col("corpus").replace_strict(ends, return_dtype=pl.String))
    own = content.replace_strict(video_ids(videos["content_sha256"]), return_dtype=pl.String)
    return videos.with_columns(video_id=own + end.otherwise(pl.lit(""))).select(*INDEX.columns).sort("video_id")


def _summary(listing: Listing, index: pl.DataFrame, rejected: pl.DataFrame, merges: Sequence[Merge]) -> pl.DataFrame:
    rows = {
        "rows of the label source": f"{listing.annotations.height:,}",
        "stated groups": f"{listing.annotations['stated_group'].drop_nulls().n_unique():,}",
        "videos in the index": f"{index.height:,}",
    }
    if index.height:
        losses = _losses(listing, rejected).height
        groups = index.group_by("group_id").agg(pl.len(), pl.col("label").n_unique())
        rows |= {f"  labelled {label}": f"{count:,}" for label, count in counted(index["label"]).items()}
        rows["total duration"] = f"{float(index['duration_seconds'].sum()) / 60:,.1f} min"
        rows["labelled videos lost"] = f"{losses / (losses + index.height):.1%}"
        rows["leakage groups"] = f"{groups.height:,}"
        rows["  videos in the largest"] = f"{max(groups['len']):,}"
        rows["  with both labels"] = f"{groups.filter(label=2).height:,}"
    rows["joined beyond the stated groups"] = f"{len(merges):,} links"
    return pl.DataFrame(list(rows.items()), schema={"what": pl.String, "value": pl.String}, orient="row")


# --- Videos that are re-encoded to one height and one frame rate.

_SAME_RATE = 0.01  # 23.976 and 24, 29.97 and 30 frames a second differ by less


def rescaling_notes(originals: pl.DataFrame, recipe: str) -> tuple[str, ...]:
    """Return notes that count enlarged videos and videos with repeated frames, and say how to avoid them.

    Args:
        originals: INDEX of the files before re-encoding.
        recipe: settings of the re-encoding (``RunConfig.recipe``). The notes are empty if it sets no height.
    """
    made = recipe_named(recipe)
    if not made.height or originals.is_empty():
        return ()
    turned = pl.col("rotation_degrees").is_in([90, 270])
    rows = originals.select(pl.when(turned).then("width").otherwise("height")).to_series()
    small = int((rows < made.height).sum())
    slow = int((originals["frames_per_second"] < made.rate * (1 - _SAME_RATE)).sum())
    notes = [f"Every video has {made.height} rows and {made.rate} frames a second now."]
    if small:
        notes.append(
            f"{small:,} of {originals.height:,} videos were enlarged and are blurred by it, which may still tell them "
            f"apart: -p rescale {max(min(rows.to_list()) // 2 * 2, 16)} would enlarge none."
        )
    if slow:
        notes.append(
            f"{slow:,} of {originals.height:,} videos had fewer frames a second, and repeated frames may still tell "
            "them apart. Leave them out of the corpus to rule that out."
        )
    return tuple(notes)
