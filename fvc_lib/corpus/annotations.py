"""What the label tables alone say: every row, which of them belong together, and which labels are agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from fvc_lib.corpus.groups import Grouping, GroupMember, Merge, join_groups
from fvc_lib.corpus.listing import Listing
from fvc_lib.services.tables import ANNOTATIONS, GROUP_LINKS, LABELS


def group_annotations(listing: Listing) -> Grouping:
    """Groups of the distinct source ids of a label source, in sorted order, joined by what it states of them.

    A source without a stated group is a group of its own, called ``source <source id>``.
    """
    sources = _sources(listing)
    return join_groups([GroupMember(source, source, None) for source in sources], (), listing.memberships)


def annotations_table(listing: Listing, grouping: Grouping) -> pl.DataFrame:
    """The ANNOTATIONS table, in the order of the label source; ``grouping`` is what ``group_annotations`` gave."""
    group_of = pl.DataFrame(
        {"source_id": _sources(listing), "group_id": grouping.group_ids},
        schema={"source_id": pl.String, "group_id": pl.String},
    )
    joined = listing.annotations.join(group_of, on="source_id", how="left", maintain_order="left")
    return joined.select(*ANNOTATIONS.columns)


def undisputed_labels(annotations: pl.DataFrame) -> pl.DataFrame:
    """Each source that all its rows call real, or all fake, once: ``video_id group_id label``, as folds are made from.

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


def links_table(merges: Sequence[Merge]) -> pl.DataFrame:
    """The GROUP_LINKS table, one row per merge in the order given."""
    schema = {name: column.dtype.type for name, column in GROUP_LINKS.columns.items()}
    return pl.DataFrame([asdict(merge) for merge in merges], schema=schema)


def _sources(listing: Listing) -> list[str]:
    return listing.annotations["source_id"].unique().sort().to_list()
