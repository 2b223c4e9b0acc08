"""What became of a corpus of videos and texts, in sentences; and the refusal of one that nothing can be made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from fvc_lib.corpus.groups import Merge
from fvc_lib.corpus.listing import Rejections, counts_text
from fvc_lib.corpus.video_text_manifest import PairListing
from fvc_lib.services.errors import DataError
from fvc_lib.services.task_tables import PARTS

_REMEDIES = {
    "missing_video": "Fetch the files that are missing, or drop their rows.",
    "no_path": "Fill the column 'path'.",
    "no_text": "Fill the column 'text'.",
    "malformed_row": "Give every row as many cells as the header, in UTF-8.",
    "outside_corpus": "Put the manifest into the folder that holds the videos: files outside it are never read.",
    "unknown_split": "Write train, validation or test into the column 'split', or nothing.",
}
_WHY = {
    "same_source": "by a file listed in both",
    "same_content": "by equal content",
    "near_duplicate": "by near-duplicates",
}


def notes_of(
    pairs: pl.DataFrame, listing: PairListing, rejections: Rejections, merges: Sequence[Merge], num_copies: int
) -> Iterator[str]:
    """Sentences with counts on a VIDEO_TEXTS table.

    Args:
        pairs: the table.
        listing: what the manifest lists.
        rejections: its rows that are not used.
        merges: links that joined what the manifest keeps apart.
        num_copies: files whose content another listed file has.
    """
    by_text = pairs.group_by("text_id").agg(pl.col("video_id").n_unique().alias("videos"))["videos"]
    by_video = pairs.group_by("video_id").agg(pl.col("text_id").n_unique().alias("texts"))["texts"]
    yield (
        f"{listing.num_rows:,} rows of the manifest give {pairs.height:,} pairs of {len(by_video):,} videos and "
        f"{len(by_text):,} different texts."
    )
    yield _several(by_text, "texts stand beside several videos") + " Equal texts are one text."
    yield _several(by_video, "videos have several texts")
    if rejections.rows:
        reasons = counts_text(row[4] for row in rejections.rows)
        missing = sum(row[4] == "missing_video" for row in rejections.rows)
        yield f"{len(rejections.rows):,} rows are not used ({reasons}); the files of {missing:,} of them are missing."
    if num_copies:
        yield f"{num_copies:,} files have the content of another one: their texts stand beside that video."
    if merges:
        reasons = ", ".join(f"{sum(m.why == why for m in merges):,} {how}" for why, how in _WHY.items())
        yield f"{len(merges):,} links joined groups beyond what the manifest states: {reasons}."
    sizes = pairs.group_by("part").agg(pl.len(), *(pl.col(f"{name}_id").n_unique() for name in ("video", "group")))
    rows = {row["part"]: row for row in sizes.iter_rows(named=True)}
    told = "; ".join(
        f"{part} {rows[part]['len']:,} pairs of {rows[part]['video_id']:,} videos in {rows[part]['group_id']:,} groups"
        for part in PARTS
        if part in rows
    )
    yield f"Parts: {told}."
    yield _known_texts(pairs)


def _several(counts: pl.Series, what: str) -> str:
    several = counts.filter(counts > 1)
    most = f", at most {int(several.to_numpy().max()):,}" if len(several) else ""
    return f"{len(several):,} {what}{most}."


def _known_texts(pairs: pl.DataFrame) -> str:
    """How much of the test could be known by heart from training."""
    trained = pairs.filter(pl.col("part") == "train")["text_id"].unique()
    test = pairs.filter(pl.col("part") == "test")
    texts = test["text_id"].unique()
    known = test.filter(pl.col("text_id").is_in(trained.implode()))
    if known.is_empty():
        return f"None of the {len(texts):,} different test texts stands beside a training video."
    return (
        f"{known['text_id'].n_unique():,} of the {len(texts):,} different test texts ({known.height:,} of "
        f"{test.height:,} test pairs) also stand beside training videos: a model may know them by heart."
    )


def refuse_lost(listing: PairListing, rejections: Rejections, max_rejected_share: float) -> None:
    """Stop on a manifest of which nothing, or too little, can be used.

    Asked before rows that are only repeated, or are copies across the split, are rejected: those are no loss.

    Raises:
        DataError: no usable row, or more than ``max_rejected_share`` of the rows lost.
    """
    lost = rejections.rows
    allowed = max_rejected_share * listing.num_rows
    if listing.num_rows and len(lost) < listing.num_rows and len(lost) <= allowed:
        return
    reasons = counts_text(row[4] for row in lost) or "the manifest has no row"
    remedies = " ".join(
        dict.fromkeys(_REMEDIES.get(row[4], "Repair or replace the files that cannot be read.") for row in lost)
    )
    examples = " For example: " + " ".join(row[5] for row in lost[:3]) if lost else ""
    usable = listing.num_rows - len(lost)
    raise DataError(
        f"corpus {str(listing.root)!r}: {usable:,} of {listing.num_rows:,} pairs of a video and a text can be used; at "
        f"most {max_rejected_share:.0%} may be lost ({reasons}). {remedies}{examples}"
    )


def refuse_empty_parts(empty: Sequence[str], num_groups: int) -> None:
    """Stop on a split that leaves nothing to learn from, to choose the epoch by, or to be tested on.

    Raises:
        DataError: names the part that is empty.
    """
    if empty:
        raise DataError(
            f"split: no pair is left for {' and '.join(empty)}; got {num_groups:,} groups, wanted some in each of "
            f"{', '.join(PARTS)}. Add videos that are not of one group, or change the manifest's split."
        )
