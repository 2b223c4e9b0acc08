"""The index: every usable video of a corpus with its label, its leakage group and what the probe found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path

import polars as pl

from fvc_lib.corpus.annotations import annotations_table, group_annotations, links_table
from fvc_lib.corpus.groups import Grouping, GroupMember, Merge, join_groups
from fvc_lib.corpus.index_report import IndexReport, refuse_no_annotation, refuse_unusable, report_of
from fvc_lib.corpus.listing import Entry, Kind, Listing, Refusal, Rejections
from fvc_lib.corpus.near_duplicates import near_duplicate_links
from fvc_lib.corpus.probing import DEFAULT_PROBE_FUNCTION, DEFAULT_TIMEOUT_SECONDS, ProbeResult, probe_files
from fvc_lib.corpus.sources import read_corpus
from fvc_lib.services.tables import ANNOTATIONS, GROUP_LINKS, INDEX, REJECTED, write_table
from fvc_lib.video.probe import VideoProbe

VIDEO_ID_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Probed:
    entry: Entry
    result: ProbeResult


# Where in a _Probed the columns of the INDEX table are found.
_FOUND_IN = {
    field.name: attrgetter(f"{place}.{field.name}")
    for place, kind in (("result", ProbeResult), ("result.probe", VideoProbe), ("entry", Entry))
    for field in fields(kind)
}


def build_index(
    corpus: Path,
    *,
    index_path: Path,
    rejected_path: Path,
    work_dir: Path,
    near_duplicate_bits: int,
    max_rejected_share: float,
    group_links_path: Path | None = None,
    annotations_path: Path | None = None,
    annotations_only: bool = False,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    probe_function: str = DEFAULT_PROBE_FUNCTION,
) -> IndexReport:
    """Probe a corpus and write its index, what was rejected, what joined groups, and every annotation.

    The tables depend on the files and labels only: not on file order, worker count, working directory or where the
    corpus lies.

    Args:
        corpus: folder, manifest or FVC-2018 folder; see ``sources.read_corpus``.
        index_path: where the INDEX table goes, sorted by ``video_id``.
        rejected_path: where the REJECTED table goes.
        work_dir: probe results are kept here as they come; a killed index continues from them.
        near_duplicate_bits: perceptual hashes closer than this join groups; 0: off.
        max_rejected_share: the most labelled videos that may be lost, as a share.
        group_links_path: where the GROUP_LINKS table goes; none: it is not written.
        annotations_path: where the ANNOTATIONS table goes; none: it is not written.
        annotations_only: index the label tables alone. No video is opened, also where there are some; those are
            rejected as ``not_opened``, the index has no rows, and the links are those of the annotations.
        workers: probing processes; 0: one per available core.
        progress: called with (done, total) as files are probed.
        timeout_seconds: per file.
        probe_function: ``module:name`` run in the workers.

    Raises:
        UsageError: ``corpus`` is not a corpus.
        DataError: after the tables were written: no usable video, only one label, or too many lost; with
            ``annotations_only``: no row.
    """
    listing = read_corpus(corpus)
    annotated = group_annotations(listing)
    if annotations_only:
        listing = _unopened(listing)
    results, num_known = probe_files(
        listing.root, [entry.path for entry in listing.entries], work_dir,
        workers=workers, progress=progress, timeout_seconds=timeout_seconds, probe_function=probe_function,
    )  # fmt: skip
    index, rejected, merges, num_near_copies = _tables(listing, results, near_duplicate_bits)
    del results  # the tables hold what is needed of them, in a third of the memory
    if annotations_only:
        merges = annotated.merges
    write_table(rejected, REJECTED, rejected_path)
    if group_links_path is not None:
        write_table(links_table(merges), GROUP_LINKS, group_links_path)
    if annotations_path is not None:
        write_table(annotations_table(listing, annotated), ANNOTATIONS, annotations_path)
    write_table(index, INDEX, index_path)
    report = report_of(listing, index, rejected, merges, num_known=num_known, num_near_copies=num_near_copies)
    if annotations_only:
        refuse_no_annotation(report)
    else:
        refuse_unusable(report, max_rejected_share)
    return report


def video_ids(contents: Iterable[str], length: int = VIDEO_ID_LENGTH) -> dict[str, str]:
    """Content hash to id: its first ``length`` hex digits, more for contents that would otherwise share an id."""
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


def _unopened(listing: Listing) -> Listing:
    """The listing without its files."""
    rejections = Rejections()
    for entry in listing.entries:
        detail = f"{entry.path!r} is there, but annotations_only is on. Turn it off to index the videos."
        rejections.add(entry, Refusal("not_opened", detail))
    return replace(listing, entries=(), rejected=rejections.frame(listing.rejected))


def _tables(
    listing: Listing, results: dict[str, ProbeResult], near_duplicate_bits: int
) -> tuple[pl.DataFrame, pl.DataFrame, tuple[Merge, ...], int]:
    """The INDEX and REJECTED tables, what was merged, and how many files have a near-copy."""
    rejections = Rejections()
    probed = _readable(listing.entries, results, rejections)
    near_copies = _near_copies(probed, near_duplicate_bits) if near_duplicate_bits else []
    grouping = _group(probed, listing, near_copies)
    kept = _settle_contents(probed, rejections)
    index = _index_table(probed, kept, grouping, listing.kind)
    num_near_copies = len({place for pair in near_copies for place in pair})
    return index, rejections.frame(listing.rejected), grouping.merges, num_near_copies


def _readable(entries: Sequence[Entry], results: dict[str, ProbeResult], rejections: Rejections) -> list[_Probed]:
    probed = []
    for entry in entries:
        result = results[entry.path]
        if result.probe is None:
            rejections.add(entry, Refusal(result.reason, result.detail))
        else:
            probed.append(_Probed(entry, result))
    return probed


def _near_copies(probed: Sequence[_Probed], near_duplicate_bits: int) -> list[tuple[int, int]]:
    """Links of places whose files look alike; files with one content are linked by their hash already."""
    first = {item.result.content_sha256: place for place, item in reversed(list(enumerate(probed)))}
    places = sorted(first.values())
    hashes = [probed[place].result.perceptual_hash for place in places]
    return [(places[a], places[b]) for a, b in near_duplicate_links(hashes, near_duplicate_bits)]


def _group(probed: Sequence[_Probed], listing: Listing, near_copies: Sequence[tuple[int, int]]) -> Grouping:
    """Groups of all readable files: duplicates and disputed ones link groups too, before they are left out."""
    members = [
        GroupMember(item.entry.path, item.entry.source_id, item.result.content_sha256, item.entry.stated_group)
        for item in probed
    ]
    return join_groups(members, near_copies, listing.memberships)


def _settle_contents(probed: Sequence[_Probed], rejections: Rejections) -> list[int]:
    """Places in ``probed`` to keep: the first path of each content whose files all have one label."""
    sharing: defaultdict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(probed):  # sorted by path, as the listing is
        sharing[item.result.content_sha256].append(place)
    kept = []
    for places in sharing.values():
        first = probed[places[0]].entry
        if len({probed[place].entry.label for place in places}) > 1:
            paths = ", ".join(f"{probed[p].entry.path!r} ({probed[p].entry.label})" for p in places)
            refusal = Refusal("conflicting_labels", f"one content with two labels: {paths}. Keep the right one.")
            for place in places:
                rejections.add(probed[place].entry, refusal)
            continue
        kept.append(places[0])
        for place in places[1:]:
            detail = f"same content as {first.path!r}, which is used."
            rejections.add(probed[place].entry, Refusal("duplicate_content", detail))
    return kept


def _index_table(probed: Sequence[_Probed], kept: Sequence[int], grouping: Grouping, kind: Kind) -> pl.DataFrame:
    id_of = video_ids(probed[place].result.content_sha256 for place in kept)
    ids = {place: id_of[probed[place].result.content_sha256] for place in kept}
    places = sorted(kept, key=ids.__getitem__)
    made: dict[str, list[object]] = {
        "video_id": [ids[place] for place in places],
        "group_id": [grouping.group_ids[place] for place in places],
        "label_source": [kind] * len(places),
    }
    # Column by column: rows of Python objects would take several times the memory of the table.
    columns = []
    for name, column in INDEX.columns.items():
        values = made[name] if name in made else [_FOUND_IN[name](probed[place]) for place in places]
        columns.append(pl.Series(name, values, dtype=column.dtype.type))
    return pl.DataFrame(columns)
