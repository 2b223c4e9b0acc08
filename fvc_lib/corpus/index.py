"""The index: every usable video of a corpus with its label, its leakage group and what the probe found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path

import polars as pl

from fvc_lib.corpus.groups import Grouping, GroupMember, Merge, join_groups
from fvc_lib.corpus.listing import NOT_A_LOSS, Entry, Kind, Listing, Refusal, Rejections
from fvc_lib.corpus.near_duplicates import near_duplicate_links
from fvc_lib.corpus.probing import DEFAULT_PROBE_FUNCTION, DEFAULT_TIMEOUT_SECONDS, ProbeResult, probe_files
from fvc_lib.corpus.sources import read_corpus
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import INDEX, LABELS, REJECTED, write_table
from fvc_lib.video.probe import VideoProbe

VIDEO_ID_LENGTH = 16


@dataclass(frozen=True)
class IndexReport:
    """What the index holds and what it leaves out, for printing.

    Attributes:
        root: the corpus folder that ``path`` is relative to.
        kind: folder, manifest or fvc2018.
        num_listed: rows or files of the label source, used or not.
        num_indexed: videos in the index.
        num_known: files that were not probed again because they are unchanged.
        labels: videos per label, real and fake.
        label_source_labels: rows of the label source per label, as it spells them.
        rejected: rows of the rejected table per reason, most frequent first.
        rejected_share: share of labelled videos that were lost (see ``lost_labelled``).
        num_stated_groups: groups the label source stated, over all its rows.
        num_groups: leakage groups in the index.
        largest_group: videos in the largest of them.
        mixed_groups: groups that hold both labels.
        minority_in_mixed_groups: videos in those groups whose label is the rarer one there.
        merges: links that joined what the label source kept apart.
        total_seconds: duration of all videos whose duration is known.
        total_bytes: size of all videos.
    """

    root: Path
    kind: Kind
    num_listed: int
    num_indexed: int
    num_known: int
    labels: dict[str, int]
    label_source_labels: dict[str, int]
    rejected: dict[str, int]
    rejected_share: float
    num_stated_groups: int
    num_groups: int
    largest_group: int
    mixed_groups: int
    minority_in_mixed_groups: int
    merges: tuple[Merge, ...]
    total_seconds: float
    total_bytes: int

    def summary_table(self) -> pl.DataFrame:
        """``what value``: the report as a short table of text."""
        rows = {
            "rows of the label source": f"{self.num_listed:,}",
            "videos in the index": f"{self.num_indexed:,}",
            **{f"  labelled {label}": f"{count:,}" for label, count in self.labels.items()},
            "labelled videos lost": f"{self.rejected_share:.1%}",
            "leakage groups": f"{self.num_groups:,}",
            "  videos in the largest": f"{self.largest_group:,}",
            "  with both labels": f"{self.mixed_groups:,}",
            "  joined beyond what was stated": f"{len(self.merges):,} links",
            "total duration": f"{self.total_seconds / 60:,.1f} min",
            "total size": f"{self.total_bytes / 1e6:,.1f} MB",
        }
        return pl.DataFrame(list(rows.items()), schema={"what": pl.String, "value": pl.String}, orient="row")

    def merge_table(self) -> pl.DataFrame:
        """``group_id why evidence first second``, one row per merge."""
        schema = dict.fromkeys(("group_id", "why", "evidence", "first", "second"), pl.String)
        return pl.DataFrame([asdict(merge) for merge in self.merges], schema=schema)

    def rejected_table(self) -> pl.DataFrame:
        """``reason videos``, most frequent first."""
        rows = list(self.rejected.items())
        return pl.DataFrame(rows, schema={"reason": pl.String, "videos": pl.Int64}, orient="row")


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
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    probe_function: str = DEFAULT_PROBE_FUNCTION,
) -> IndexReport:
    """Probe a corpus and write its index and rejected tables.

    The tables depend on the files and labels only: not on file order, worker count, working directory or where the
    corpus lies.

    Args:
        corpus: folder, manifest or FVC-2018 folder; see ``sources.read_corpus``.
        index_path: where the INDEX table goes, sorted by ``video_id``.
        rejected_path: where the REJECTED table goes.
        work_dir: probe results are kept here as they come; a killed index continues from them.
        near_duplicate_bits: perceptual hashes closer than this join groups; 0: off.
        max_rejected_share: the most labelled videos that may be lost, as a share.
        workers: probing processes; 0: one per available core.
        progress: called with (done, total) as files are probed.
        timeout_seconds: per file.
        probe_function: ``module:name`` run in the workers.

    Raises:
        UsageError: ``corpus`` is not a corpus.
        DataError: after both tables were written: no readable video, only one label, or too many lost.
    """
    listing = read_corpus(corpus)
    results, num_known = probe_files(
        listing.root, [entry.path for entry in listing.entries], work_dir,
        workers=workers, progress=progress, timeout_seconds=timeout_seconds, probe_function=probe_function,
    )  # fmt: skip
    index, rejected, merges = _tables(listing, results, near_duplicate_bits)
    del results  # the tables hold what is needed of them, in a third of the memory
    write_table(rejected, REJECTED, rejected_path)
    write_table(index, INDEX, index_path)
    report = _report(listing, index, rejected, merges, num_known)
    _refuse_unusable(report, rejected, max_rejected_share)
    return report


def lost_labelled(rejected: pl.DataFrame, kind: Kind) -> int:
    """Rows of the rejected table by which a labelled video was lost.

    Duplicates, unused labels and files nobody listed are no loss. Nor is a missing video of FVC-2018: the corpus is
    annotations, and most of its videos are gone from the platforms.
    """
    no_loss = set(NOT_A_LOSS) | ({"missing_video"} if kind == "fvc2018" else set())
    return rejected.filter(~pl.col("reason").is_in(sorted(no_loss))).height


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


def _tables(
    listing: Listing, results: dict[str, ProbeResult], near_duplicate_bits: int
) -> tuple[pl.DataFrame, pl.DataFrame, tuple[Merge, ...]]:
    """The INDEX and REJECTED tables, and what was merged."""
    rejections = Rejections()
    probed = _readable(listing.entries, results, rejections)
    grouping = _group(probed, listing, near_duplicate_bits)
    kept = _settle_contents(probed, rejections)
    index = _index_table(probed, kept, grouping, listing.kind)
    return index, rejections.frame(listing.rejected), grouping.merges


def _readable(entries: Sequence[Entry], results: dict[str, ProbeResult], rejections: Rejections) -> list[_Probed]:
    probed = []
    for entry in entries:
        result = results[entry.path]
        if result.probe is None:
            rejections.add(entry, Refusal(result.reason, result.detail))
        else:
            probed.append(_Probed(entry, result))
    return probed


def _group(probed: Sequence[_Probed], listing: Listing, near_duplicate_bits: int) -> Grouping:
    """Groups of all readable files: duplicates and disputed ones link groups too, before they are left out."""
    members = [
        GroupMember(item.entry.path, item.entry.source_id, item.result.content_sha256, item.entry.stated_group)
        for item in probed
    ]
    pairs: Iterable[tuple[int, int]] = ()
    if near_duplicate_bits:
        first = {item.result.content_sha256: place for place, item in reversed(list(enumerate(probed)))}
        places = sorted(first.values())  # equal contents are linked by their hash already
        hashes = [probed[place].result.perceptual_hash for place in places]
        pairs = [(places[a], places[b]) for a, b in near_duplicate_links(hashes, near_duplicate_bits)]
    return join_groups(members, pairs, listing.memberships)


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


def _report(
    listing: Listing, index: pl.DataFrame, rejected: pl.DataFrame, merges: tuple[Merge, ...], num_known: int
) -> IndexReport:
    sizes = index.group_by("group_id").agg(
        pl.len(), *((pl.col("label") == label).sum().alias(label) for label in LABELS)
    )
    mixed = sizes.filter(pl.min_horizontal(*LABELS) > 0)
    lost = lost_labelled(rejected, listing.kind)
    return IndexReport(
        root=listing.root,
        kind=listing.kind,
        num_listed=listing.annotations.height,
        num_indexed=index.height,
        num_known=num_known,
        labels={label: int((index["label"] == label).sum()) for label in LABELS},
        label_source_labels=_counted(listing.annotations["label"].fill_null("")),
        rejected=_counted(rejected["reason"]),
        rejected_share=lost / max(1, lost + index.height),
        num_stated_groups=listing.annotations["stated_group"].drop_nulls().n_unique(),
        num_groups=sizes.height,
        largest_group=int(sizes["len"].max() or 0),  # type: ignore[arg-type]  # polars types max() as any literal
        mixed_groups=mixed.height,
        minority_in_mixed_groups=int(mixed.select(pl.min_horizontal(*LABELS)).to_series().sum()),
        merges=merges,
        total_seconds=float(index["duration_seconds"].sum()),
        total_bytes=int(index["size_bytes"].sum()),
    )


def _counted(values: pl.Series) -> dict[str, int]:
    return dict(sorted(Counter(values.to_list()).items(), key=lambda item: (-item[1], item[0])))


def _refuse_unusable(report: IndexReport, rejected: pl.DataFrame, max_rejected_share: float) -> None:
    reasons = ", ".join(f"{count} x {reason}" for reason, count in report.rejected.items()) or "nothing rejected"
    if not report.num_indexed:
        raise DataError(
            f"corpus {str(report.root)!r}: no readable labelled video ({reasons}). The rejected table names each file; "
            "repair or fetch them."
        )
    if report.rejected_share > max_rejected_share:
        raise DataError(
            f"corpus {str(report.root)!r}: {report.rejected_share:.0%} of the labelled videos cannot be used, "
            f"at most {max_rejected_share:.0%} are allowed ({reasons}). The rejected table names each file; repair "
            "them or raise max_rejected_share."
        )
    missing = [label for label, count in report.labels.items() if not count]
    if missing:
        raise DataError(
            f"corpus {str(report.root)!r}: has no readable video labelled {missing[0]!r}, only {report.num_indexed} of "
            f"the other label ({reasons}). Add {missing[0]} videos: one class alone cannot be told from anything."
        )
