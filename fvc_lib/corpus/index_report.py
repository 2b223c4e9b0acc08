"""What became of a corpus: the figures of its index, and the refusal of an index that nothing can be made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from fvc_lib.corpus.annotations import links_table
from fvc_lib.corpus.groups import Merge
from fvc_lib.corpus.listing import NOT_A_LOSS, Kind, Listing
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LABELS

_REPAIR = "Repair or fetch again the files that cannot be read."
# What to do about a reason of the rejected table, where it is not to repair the file.
_REMEDIES = {
    "missing_video": "Fetch the files that are missing, or drop their rows.",
    "outside_corpus": "Files outside the corpus folder are never read: copy them into it, or put the manifest into the "
    "folder that holds them.",
    "linked_folder": "Linked folders are not entered: move them into the corpus, or use a manifest.",
    "conflicting_labels": "Keep one label for each video that is listed with two.",
    "label_not_used": "Only videos labelled real or fake are used.",
    "unknown_extension": "Give video files the extension of their container, such as .mp4.",
    "not_listed": "List the videos that no table names.",
    "no_path": "Fill the column 'path'.",
    "malformed_row": "Give every row as many cells as the header.",
    "unknown_url": "Give the URL of a YouTube, Facebook or Twitter video.",
}


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
        num_near_copies: readable files of different contents that look like another one, whatever their group.
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
    num_near_copies: int
    total_seconds: float
    total_bytes: int

    def summary_table(self) -> pl.DataFrame:
        """``what value``: the report as a short table of text; without a video, what the label source alone says."""
        rows = {"rows of the label source": f"{self.num_listed:,}", "videos in the index": f"{self.num_indexed:,}"}
        rows |= self._videos() if self.num_indexed else {"stated groups": f"{self.num_stated_groups:,}"}
        rows["joined beyond what was stated"] = f"{len(self.merges):,} links"
        return pl.DataFrame(list(rows.items()), schema={"what": pl.String, "value": pl.String}, orient="row")

    def _videos(self) -> dict[str, str]:
        return {
            **{f"  labelled {label}": f"{count:,}" for label, count in self.labels.items()},
            "  with a near-copy among all files": f"{self.num_near_copies:,}",
            "labelled videos lost": f"{self.rejected_share:.1%}",
            "total duration": f"{self.total_seconds / 60:,.1f} min",
            "total size": f"{self.total_bytes / 1e6:,.1f} MB",
            "leakage groups": f"{self.num_groups:,}",
            "  videos in the largest": f"{self.largest_group:,}",
            "  with both labels": f"{self.mixed_groups:,}",
        }

    def merge_table(self) -> pl.DataFrame:
        """``group_id why evidence first second``, one row per merge."""
        return links_table(self.merges)

    def rejected_table(self) -> pl.DataFrame:
        """``reason videos``, most frequent first."""
        rows = list(self.rejected.items())
        return pl.DataFrame(rows, schema={"reason": pl.String, "videos": pl.Int64}, orient="row")


def lost_labelled(rejected: pl.DataFrame, kind: Kind) -> int:
    """Rows of the rejected table by which a labelled video was lost.

    Duplicates, unused labels and files nobody listed are no loss. Nor is a missing video of FVC-2018: the corpus is
    annotations, and most of its videos are gone from the platforms.
    """
    no_loss = set(NOT_A_LOSS) | ({"missing_video"} if kind == "fvc2018" else set())
    return rejected.filter(~pl.col("reason").is_in(sorted(no_loss))).height


def report_of(
    listing: Listing,
    index: pl.DataFrame,
    rejected: pl.DataFrame,
    merges: tuple[Merge, ...],
    *,
    num_known: int,
    num_near_copies: int,
) -> IndexReport:
    """Describe an INDEX and a REJECTED table and what was merged; ``num_known`` files were not probed again."""
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
        num_near_copies=num_near_copies,
        total_seconds=float(index["duration_seconds"].sum()),
        total_bytes=int(index["size_bytes"].sum()),
    )


def refuse_unusable(report: IndexReport, max_rejected_share: float) -> None:
    """Stop on an index that nothing honest can be made of.

    Raises:
        DataError: no usable video, only one label, or more than ``max_rejected_share`` of the labelled videos lost.
    """
    reasons = ", ".join(f"{count} x {reason}" for reason, count in report.rejected.items()) or "nothing rejected"
    if not report.num_indexed:
        raise DataError(
            f"corpus {str(report.root)!r}: no usable labelled video ({reasons}). {_remedies(report)} "
            f"The rejected table says it file by file.{_without_videos(report)}"
        )
    if report.rejected_share > max_rejected_share:
        raise DataError(
            f"corpus {str(report.root)!r}: {report.rejected_share:.0%} of the labelled videos cannot be used, "
            f"at most {max_rejected_share:.0%} are allowed ({reasons}). {_remedies(report)} The rejected table says it "
            "file by file. Or raise max_rejected_share."
        )
    missing = [label for label, count in report.labels.items() if not count]
    if missing:
        raise DataError(
            f"corpus {str(report.root)!r}: has no usable video labelled {missing[0]!r}, only {report.num_indexed} of "
            f"the other label ({reasons}). Add {missing[0]} videos: one class alone cannot be told from anything."
        )


def refuse_no_annotation(report: IndexReport) -> None:
    """Stop on an index of annotations without any.

    Raises:
        DataError: the label source lists nothing.
    """
    if not report.num_listed:
        raise DataError(f"corpus {str(report.root)!r}: its label tables hold no row. Give a corpus with annotations.")


def refuse_empty_index(index: pl.DataFrame) -> None:
    """Stop what works on videos where the index has none.

    Raises:
        DataError: the index has no rows.
    """
    if index.is_empty():
        raise DataError(
            "the index holds no usable video: it was made from annotations only, and nothing but 01_data_index can run "
            "on those. Fetch the videos and start a new run without annotations_only."
        )


def _without_videos(report: IndexReport) -> str:
    if "missing_video" not in report.rejected:
        return ""
    return " To index what the label tables say without the videos, set annotations_only: -p annotations_only true."


def _remedies(report: IndexReport) -> str:
    """What to do about the reasons by which videos were lost, the most frequent first."""
    if not report.rejected:
        return "The corpus lists no video. Put videos into it."
    lost = [reason for reason in report.rejected if reason not in NOT_A_LOSS] or list(report.rejected)
    return " ".join(dict.fromkeys(_REMEDIES.get(reason, _REPAIR) for reason in lost))


def _counted(values: pl.Series) -> dict[str, int]:
    return dict(sorted(Counter(values.to_list()).items(), key=lambda item: (-item[1], item[0])))
