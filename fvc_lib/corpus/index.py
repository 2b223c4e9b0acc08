"""The index: every usable video of a corpus with its label, its leakage group and its probe."""

import ast
import hashlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

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
from fvc_lib.corpus.listing import Listing
from fvc_lib.corpus.probing import VIDEO_FILES, FileKind, ProbeResult, measured_again, probe_files
from fvc_lib.corpus.rescaling import rescaling_notes
from fvc_lib.corpus.several import place, read_corpora
from fvc_lib.services.atomic_files import AnyPath, path_from_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.memory.budget import give_back_freed
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

# --- What the label tables alone say: every row, which of them belong together, and which labels are agreed on.


def group_annotations(listing: Listing) -> Grouping:
    """Group the distinct source ids of a label source, in sorted order, by its stated groups.

    A source without a stated group is a group of its own, called ``source <source id>``.
    """
    sources = _sources(listing)
    return join_groups([GroupMember(source, source, None) for source in sources], (), listing.memberships)


def annotations_table(listing: Listing, grouping: Grouping) -> pl.DataFrame:
    """Return the ANNOTATIONS table in the order of the label source, with groups of ``group_annotations``."""
    group_of = pl.DataFrame(
        {"source_id": _sources(listing), "group_id": grouping.group_ids},
        schema={"source_id": pl.String, "group_id": pl.String},
    )
    joined = listing.annotations.join(group_of, on="source_id", how="left", maintain_order="left")
    return joined.select(*ANNOTATIONS.columns)


def undisputed_labels(annotations: pl.DataFrame) -> pl.DataFrame:
    """Return ``video_id group_id label`` of each source whose rows agree on real or fake.

    Args:
        annotations: ANNOTATIONS rows; ``video_id`` is the source id, for there may be no video. An empty label
            disputes nothing.
    """
    sources = (
        annotations.drop_nulls("label")
        .group_by(pl.col("source_id").alias("video_id"))
        .agg(pl.col("group_id").first(), pl.col("label").first(), pl.col("label").n_unique().alias("labels"))
    )
    agreed = sources.filter((pl.col("labels") == 1) & pl.col("label").is_in(LABELS))
    return agreed.drop("labels").sort("video_id")


def num_stated_groups(listing: Listing) -> int:
    """Count the stated groups of the listed videos, before any is opened; 0 if none is stated."""
    if not listing.memberships:
        return 0
    group_of = dict(zip(_sources(listing), group_annotations(listing).group_ids, strict=True))
    used = {entry.source_id for entry in listing.entries} or set(group_of)
    return len({group_of[source_id] for source_id in used})


def listed_videos(listing: Listing) -> pl.DataFrame:
    """Return ``video_id group_id label official_split`` of each listed video: the most that an index can hold.

    No file is opened, so a video is called by its path and groups are what the corpus states.
    """
    group_of = dict(zip(_sources(listing), group_annotations(listing).group_ids, strict=True))
    rows = [(each.path, group_of[each.source_id], each.label, each.official_split) for each in listing.entries]
    return pl.DataFrame(
        rows, schema=dict.fromkeys(("video_id", "group_id", "label", "official_split"), pl.String), orient="row"
    )


def _sources(listing: Listing) -> list[str]:
    return listing.annotations["source_id"].unique().sort().to_list()


@dataclass(frozen=True)
class IndexReport:
    """Contents and exclusions of an index, for printing."""

    num_listed: int  # rows or files of the label source, used or not
    num_indexed: int  # videos in the index
    num_known: int  # files that were not probed again because they are unchanged
    rejected: dict[str, int]  # rows of the rejected table per reason, most frequent first
    rejected_share: float  # share of labelled videos that were lost
    num_groups: int  # leakage groups in the index
    largest_group: int  # videos in the largest of them
    mixed_groups: int  # groups with both labels
    merges: tuple[Merge, ...]  # links that joined groups beyond the stated ones
    facts: dict[str, str]  # further rows of the summary
    notes: tuple[str, ...] = ()  # sentences for the user

    def summary_table(self) -> pl.DataFrame:
        """Return the report as a table of text, ``what value``."""
        rows = {"rows of the label source": f"{self.num_listed:,}", "videos in the index": f"{self.num_indexed:,}"}
        rows |= self.facts
        if self.num_indexed:
            rows |= {
                "labelled videos lost": f"{self.rejected_share:.1%}",
                "leakage groups": f"{self.num_groups:,}",
                "  videos in the largest": f"{self.largest_group:,}",
                "  with both labels": f"{self.mixed_groups:,}",
            }
        rows["joined beyond what was stated"] = f"{len(self.merges):,} links"
        return pl.DataFrame(list(rows.items()), schema={"what": pl.String, "value": pl.String}, orient="row")

    def rejected_table(self) -> pl.DataFrame:
        """Return ``reason videos``, most frequent first."""
        rows = list(self.rejected.items())
        return pl.DataFrame(rows, schema={"reason": pl.String, "videos": pl.Int64}, orient="row")


def no_loss(kind: str) -> frozenset[str]:
    """Return the reasons by which no labelled video is lost.

    A missing video of FVC-2018 is no loss: the corpus is annotations, and most videos are gone from the platforms.
    """
    return NOT_A_LOSS | {"missing_video"} if kind == "fvc2018" else NOT_A_LOSS


def _report_of(
    listing: Listing,
    index: pl.DataFrame,
    rejected: pl.DataFrame,
    merges: tuple[Merge, ...],
    num_known: int,
    num_near_copies: int,
) -> IndexReport:
    of_label = [(pl.col("label") == label).sum().alias(label) for label in LABELS]
    groups = index.group_by("group_id").agg(pl.len(), *of_label)
    losses = _without_expected(rejected, listing)
    lost = losses.filter(~pl.col("reason").is_in(sorted(no_loss(listing.kind)))).height
    if index.height:
        facts = {f"  labelled {label}": f"{count:,}" for label, count in counted(index["label"]).items()}
        facts["  with a near-copy among all files"] = f"{num_near_copies:,}"
        facts["total duration"] = f"{float(index['duration_seconds'].sum()) / 60:,.1f} min"
        facts["total size"] = f"{int(index['size_bytes'].sum()) / 1e6:,.1f} MB"
    else:
        facts = {"stated groups": f"{listing.annotations['stated_group'].drop_nulls().n_unique():,}"}
    return IndexReport(
        num_listed=listing.annotations.height,
        num_indexed=index.height,
        num_known=num_known,
        rejected=counted(rejected["reason"].to_list()),
        rejected_share=lost / max(1, lost + index.height),
        num_groups=groups.height,
        largest_group=max(groups["len"], default=0),
        mixed_groups=groups.filter(pl.min_horizontal(*LABELS) > 0).height,
        merges=merges,
        facts=facts,
        notes=listing.notes,
    )


def _without_expected(rejected: pl.DataFrame, listing: Listing) -> pl.DataFrame:
    """Leave out the missing videos of corpora, among several, that are annotations."""
    annotated = [f"{name}/" for name, part in listing.parts.items() if no_loss(part.kind) > NOT_A_LOSS]
    below = [pl.col("path").str.starts_with(start) for start in annotated]
    return rejected.filter(~((pl.col("reason") == "missing_video") & pl.any_horizontal(pl.lit(False), *below)))


def refuse_unusable(
    listing: Listing, videos: pl.DataFrame, rejected: pl.DataFrame, max_rejected_share: float, hint: str = ""
) -> None:
    """Raise ``DataError`` if nothing honest can be made of ``videos`` of a corpus.

    Args:
        listing: the corpus.
        videos: its INDEX, or ``listed_videos`` before there is one.
        rejected: the REJECTED table that belongs to them.
        max_rejected_share: the most labelled videos that may be lost, as a share.
        hint: where to read why each is lost.

    Raises:
        DataError: no usable video, only one label, or too many lost.
    """
    try:
        losses = _without_expected(rejected, listing) if videos.height else rejected
        refuse_lost(listing.shown, "labelled video", losses, videos.height, max_rejected_share, no_loss(listing.kind))
    except DataError as error:
        if not videos.height and "missing_video" in rejected["reason"]:
            hint += " To index what the label tables say without the videos: -p annotations_only true."
        raise DataError(f"{error}{hint}") from None
    missing = [label for label in LABELS if label not in videos["label"]]
    if missing:
        raise DataError(
            f"corpus {listing.shown!r}: has no usable video labelled {missing[0]!r}, only {videos.height} of "
            f"the other label ({reasons_text(rejected)}). Add {missing[0]} videos: one class alone is not enough."
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


Measuring = Callable[[Mapping[str, Path]], Mapping[str, ProbeResult]]  # of files by the hash of their content


_ROWS_AT_ONCE = 1 << 13  # of the index are made at a time
_SAME_AS, _USED = "same content as ", ", which is used."  # around the repr of a path


@dataclass(frozen=True, slots=True)
class _Probed:
    entry: Entry
    result: ProbeResult


# Where in a _Probed the columns of the INDEX table are found.
_FOUND_IN = {
    field.name: attrgetter(f"{position}.{field.name}")
    for position, kind in (("result", ProbeResult), ("result.probe", VideoProbe), ("entry", Entry))
    for field in fields(kind)
}


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
    """Probe a corpus and write its index, what was rejected, what joined groups, and every annotation.

    The tables depend on the files and labels and on what the corpus is called: not on file order, worker count,
    working directory or where the corpus lies.

    Args:
        corpus: folder, manifest, tar or pattern; see ``listing.read_corpus``.
        more_corpora: further ones, indexed together with it; see ``several.read_corpora``.
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
        dev_groups: take this many whole groups, drawn by ``seed`` (``trial_groups``); 0: all.
        seed: of that draw.
        recipe: probe videos as re-encoded by this (``RunConfig.recipe``); empty: as they are.
        recipe_cache: keeps those files.
        originals_path: receives the INDEX table of the files before that, if given.
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
    annotated = group_annotations(listing)
    if annotations_only:
        listing = _unopened(listing)
    kind = replace(VIDEO_FILES, function=probe_function)
    results, num_known = probe_listing(listing, work_dir, kind=kind, workers=workers, progress=progress)
    index, originals, rejected, merges, num_near_copies = _tables(
        listing, results, near_duplicate_bits, dev_groups, seed,
        partial(
            measured_again, recipe=recipe, cache_dir=recipe_cache, work_dir=work_dir, workers=workers, progress=progress
        ) if recipe else None,
    )  # fmt: skip
    if annotations_only:
        merges = annotated.merges
    write_table(rejected, REJECTED, rejected_path)
    if group_links_path is not None:
        write_table(frame_of([astuple(merge) for merge in merges], GROUP_LINKS), GROUP_LINKS, group_links_path)
    if annotations_path is not None:
        write_table(annotations_table(listing, annotated), ANNOTATIONS, annotations_path)
    write_table(index, INDEX, index_path)
    if originals_path is not None:
        write_table(originals, INDEX, originals_path)
    report = _report_of(listing, index, rejected, merges, num_known, num_near_copies)
    report = replace(report, notes=(*report.notes, *(rescaling_notes(originals, recipe) if recipe else ())))
    if not annotations_only:
        hint = " The rejected table says it file by file."
        refuse_unusable(listing, index, rejected, max_rejected_share, hint)
    elif not report.num_listed:
        raise DataError(f"corpus {listing.shown!r}: its label tables hold no row. Give a corpus with annotations.")
    return report


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
    """Probe each file; return the results by path in ``listing``, and the number of results known before.

    What is known of a corpus is known of it among others. Arguments as ``probe_files``; ``chosen`` says of a path
    whether it counts.
    """
    results: dict[str, ProbeResult] = {}
    num_known = 0
    total = sum(chosen(entry.path) for entry in listing.entries)
    for name, part in (listing.parts or {"": listing}).items() if listing.entries else ():
        before = len(results)

        def report(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        paths = [entry.path for entry in part.entries if chosen(place(name, entry.path))]
        found, known = probe_files(kind, part.root, paths, work_dir, workers=workers, progress=report, writer=writer)
        results |= {place(name, path): result for path, result in found.items()}
        num_known += known
    return results, num_known


def files_of(listing: Listing) -> dict[str, Path]:
    """Map each path in ``listing`` to its file."""
    return {
        place(name, entry.path): part.root / path_from_text(entry.path)
        for name, part in (listing.parts or {"": listing}).items()
        for entry in part.entries
    }


def video_ids(contents: Iterable[str], length: int = 16) -> dict[str, str]:
    """Map each content hash to an id: its first ``length`` hex digits, or more to keep ids distinct."""
    by_prefix: defaultdict[str, list[str]] = defaultdict(list)
    for content in sorted(set(contents)):
        by_prefix[content[:length]].append(content)
    ids = {}
    for prefix, sharing in by_prefix.items():
        needed = len(prefix)
        while len({content[:needed] for content in sharing}) < len(sharing):
            needed += 1
        ids.update({content: content[:needed] for content in sharing})
    return ids


def _in_ids(corpus: str) -> str:
    """Return the name of a corpus as the end of an id, which names files: letters, digits, ``_`` and ``-`` only."""
    plain = re.sub("[^0-9A-Za-z_-]+", "-", corpus)[:40].strip("-")
    return plain if plain == corpus else f"{plain}-{hashlib.sha256(corpus.encode()).hexdigest()[:4]}"


def _unopened(listing: Listing) -> Listing:
    rejections = Rejections()
    for entry in listing.entries:
        detail = f"{entry.path!r} is there, but annotations_only is on. Turn it off to index the videos."
        rejections.add(entry, Refusal("not_opened", detail))
    return replace(listing, entries=(), rejected=rejections.frame(listing.rejected))


def _tables(
    listing: Listing,
    results: dict[str, ProbeResult],
    near_duplicate_bits: int,
    dev_groups: int,
    seed: int,
    measure: Measuring | None,
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, tuple[Merge, ...], int]:
    """Return INDEX, INDEX before ``measure``, REJECTED, merges, and the number of near-copies.

    ``results`` is emptied, so that results are not held twice.
    """
    rejections = Rejections()
    probed = _readable(listing.entries, results, rejections)
    copies = near_copies(
        [item.result.content_sha256 for item in probed],
        [item.result.perceptual_hash for item in probed],
        near_duplicate_bits,
    )
    # Groups of all readable files: duplicates and disputed ones link groups too, before they are left out.
    grouping = join_groups(
        [
            GroupMember(item.entry.path, item.entry.source_id, item.result.content_sha256, item.entry.stated_group)
            for item in probed
        ],
        copies,
        listing.memberships,
    )
    remaining = _settle_contents(probed, rejections)
    if dev_groups:
        remaining = _of_trial(probed, remaining, grouping, dev_groups, seed, rejections)
    before = None if measure is None else list(probed)
    if measure is not None:
        remaining = _measured_again(listing, probed, remaining, measure, rejections)
    index = _index_table(probed, remaining, grouping)
    originals = index if before is None else _index_table(before, remaining, grouping)
    num_near_copies = len({position for pair in copies for position in pair})
    return index, originals, rejections.frame(listing.rejected), grouping.merges, num_near_copies


def _readable(entries: Sequence[Entry], results: dict[str, ProbeResult], rejections: Rejections) -> list[_Probed]:
    probed = []
    for entry in entries:
        result = results.pop(entry.path)
        if result.probe is None:
            rejections.add(entry, Refusal(result.reason, result.detail))
        else:
            probed.append(_Probed(entry, result))
    return probed


def _settle_contents(probed: Sequence[_Probed], rejections: Rejections) -> list[int]:
    """Return places in ``probed``: the first path of each content per corpus, if its files agree on the label."""
    sharing: defaultdict[str, list[int]] = defaultdict(list)
    for position, item in enumerate(probed):  # sorted by path, as the listing is
        sharing[item.result.content_sha256].append(position)
    remaining = []
    for places in sharing.values():
        if len({probed[position].entry.label for position in places}) > 1:
            paths = disputed([(probed[p].entry.path, str(probed[p].entry.label)) for p in places])
            refusal = Refusal("conflicting_labels", f"one content with two labels: {paths}. Keep the right one.")
            for position in places:
                rejections.add(probed[position].entry, refusal)
            continue
        first: dict[str, Entry] = {}
        for position in places:
            entry = probed[position].entry
            if entry.corpus not in first:
                first[entry.corpus] = entry
                remaining.append(position)
                continue
            detail = f"{_SAME_AS}{first[entry.corpus].path!r}{_USED}"
            rejections.add(entry, Refusal("duplicate_content", detail))
    return remaining


def used_for(rejected: pl.DataFrame) -> dict[str, str]:
    """Map the path of each duplicate in a REJECTED table to the path of the used file of the same content."""
    rows = rejected.filter(reason="duplicate_content").select("path", "detail").iter_rows()
    return {path: ast.literal_eval(detail.removeprefix(_SAME_AS).removesuffix(_USED)) for path, detail in rows}


def _of_trial(
    probed: Sequence[_Probed],
    remaining: Sequence[int],
    grouping: Grouping,
    dev_groups: int,
    seed: int,
    rejections: Rejections,
) -> list[int]:
    """Return the places ``remaining`` in groups of the trial; reject the others."""
    labels: defaultdict[str, list[str]] = defaultdict(list)
    for position in remaining:
        labels[grouping.group_ids[position]].append(str(probed[position].entry.label))
    chosen = trial_groups(labels, dev_groups, seed)
    refusal = Refusal("not_in_trial", f"its group is not among the {len(chosen)} of the trial (dev_groups).")
    for position in remaining:
        if grouping.group_ids[position] not in chosen:
            rejections.add(probed[position].entry, refusal)
    return [position for position in remaining if grouping.group_ids[position] in chosen]


def trial_groups(labels_of_group: Mapping[str, Sequence[str]], number: int, seed: int) -> frozenset[str]:
    """Choose ``number`` groups: in turns one with a real and one with a fake video, in an order drawn by seed.

    The choice depends on the groups' names and ``seed`` alone, and a smaller number chooses among a larger one's.

    Args:
        labels_of_group: the labels of each group's videos.
        number: how many to take.
        seed: of the order.
    """
    order = sorted(labels_of_group, key=lambda group: hashlib.sha256(f"{seed} {group}".encode()).digest())
    queues = [deque(group for group in order if label in labels_of_group[group]) for label in ("real", "fake")]
    chosen: set[str] = set()
    while len(chosen) < number and any(queues):
        for queue in queues:
            while queue and queue[0] in chosen:
                queue.popleft()
            if queue and len(chosen) < number:
                chosen.add(queue.popleft())
    return frozenset(chosen)


def _measured_again(
    listing: Listing, probed: list[_Probed], remaining: Sequence[int], measure: Measuring, rejections: Rejections
) -> list[int]:
    """Replace probes in ``probed`` by those of ``measure``; return the ``remaining`` places that have one.

    Content and pictures, and so ids and groups, stay those of the files as they are.
    """
    files = files_of(listing)
    sources = {probed[each].result.content_sha256: files[probed[each].entry.path] for each in remaining}
    found, measured = measure(sources), []
    for position in remaining:
        entry, result = probed[position].entry, probed[position].result
        again = found[result.content_sha256]
        if again.probe is None:
            rejections.add(entry, Refusal(again.reason, again.detail))
        else:
            probed[position] = _Probed(entry, replace(result, probe=again.probe))
            measured.append(position)
    return measured


def _index_table(probed: list[_Probed], remaining: Sequence[int], grouping: Grouping) -> pl.DataFrame:
    """Return INDEX rows of the places ``remaining``. ``probed`` is emptied, so that hashes are not held twice."""
    places = sorted(remaining)
    contents = [probed[place].result.content_sha256 for place in places]
    id_of, times = video_ids(contents), Counter(contents)
    ends = {name: f"-{_in_ids(name)}" for name in {item.entry.corpus for item in probed}}
    made = {
        "video_id": [
            id_of[content] + (ends[probed[place].entry.corpus] if times[content] > 1 else "")
            for content, place in zip(contents, places, strict=True)
        ],
        "group_id": [grouping.group_ids[place] for place in places],
    }
    items: list[_Probed | None] = [probed[place] for place in places]
    probed.clear()
    parts = [pl.DataFrame(schema=column_types(INDEX))]
    for start in range(0, len(items), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        # Column by column: rows of Python objects would take several times the memory of the table.
        columns = []
        for name, kind_of_values in column_types(INDEX).items():
            values = made[name][some] if name in made else list(map(_FOUND_IN[name], items[some]))
            columns.append(pl.Series(name, values, dtype=kind_of_values))
        parts.append(pl.DataFrame(columns))
        items[some] = [None] * len(items[some])
        give_back_freed()
    return pl.concat(parts).sort("video_id")
