from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from fvc_lib.corpus.copies.perceptual_hash import perceptual_hash
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.metrics.intervals import group_interval
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import AUGMENTED, GROUP_LINKS
from fvc_lib.tasks.leakage_audit import leakage_audit
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.selection import EarlierOpenings
from tests.kits.selection_kit import recorded_selection

CONFIG = RunConfig(bootstrap_replicates=200)
LINKS = pl.DataFrame(
    [("g", "near_duplicate", "a.mp4 ~ b.mp4", "<b>one</b>", "two"), ("g", "near_duplicate", "x", "two", "three")],
    schema=dict.fromkeys(GROUP_LINKS.columns, pl.String),
    orient="row",
)


class Clips:
    fingerprint = "f"


@pytest.fixture(scope="module")
def folds(tables: Any) -> pl.DataFrame:
    return tables.folds()


@pytest.fixture(scope="module")
def predictions(tables: Any, folds: pl.DataFrame) -> pl.DataFrame:
    noise = np.random.default_rng(2).normal(size=folds.height)
    return tables.predictions(folds, 1 / (1 + np.exp(-(controls.fake_labels(folds) - 0.5 + noise))))


@pytest.fixture(scope="module")
def hashes(folds: pl.DataFrame) -> list[str | None]:
    """Of the first three videos of groups 0 and 1, whose folds are the same, and of groups 2 and 3: all different."""
    found: list[str | None] = [None] * folds.height
    for row in range(12):
        coarse = np.random.default_rng(row).integers(20, 235, (3, 3, 8, 8)).astype(np.float64)
        found[row] = perceptual_hash(np.kron(coarse, np.ones((8, 8))).astype(np.uint8))
    return found


def copies(folds: pl.DataFrame) -> pl.DataFrame:
    rows = [
        (f"{video}_{number}", video, group, label, number, "[]", "s", "x")
        for video, group, label, _ in folds.iter_rows()
        for number in (0, 1)
    ]
    types = {name: column.dtype for name, column in AUGMENTED.columns.items()}
    return pl.DataFrame(rows, schema=types, orient="row")


def failed(audit: pl.DataFrame) -> dict[str, int]:
    return dict(audit.filter(~pl.col("passed")).select("check", "count").iter_rows())


def of(audit: pl.DataFrame, check: str) -> dict[str, Any]:
    return audit.filter(pl.col("check") == check).row(0, named=True)


def test_clean_tables_pass_every_check(tables, folds, predictions, hashes) -> None:
    index = tables.index(folds, perceptual_hash=hashes)
    records = [recorded_selection(Clips)] * 4
    audit = leakage_audit(index, folds, predictions, LINKS, CONFIG, augmented=copies(folds), selections=records)
    assert failed(audit) == {}
    assert audit["passed"].sum() == 9
    assert audit["check"].is_unique().all()
    assert of(audit, "joined_by_near_duplicate")["count"] == 2
    assert "'<b>one</b>' and 'two' (a.mp4 ~ b.mp4)" in of(audit, "joined_by_near_duplicate")["finding"]
    assert "48 without a hash" in of(audit, "near_duplicates_in_two_folds")["finding"]
    assert of(audit, "groups")["finding"] == "60 videos in 20 groups; the largest has 3."


def moved(folds: pl.DataFrame, video_id: str = "video00000") -> pl.DataFrame:
    """One video in the next fold, under a group of its own: what a split that misses its relatives would do."""
    alone = pl.col("video_id") == video_id
    return folds.with_columns(
        fold=pl.when(alone).then((pl.col("fold") + 1) % 4).otherwise("fold"),
        group_id=pl.when(alone).then(pl.lit("alone")).otherwise("group_id"),
    )


def test_a_group_that_the_grouping_failed_to_join_is_found_by_what_the_files_are(
    tables, folds, predictions, hashes
) -> None:
    """Group ids alone would see nothing here: the video that strayed has one of its own."""
    strayed = moved(folds)
    moved_predictions = predictions.drop("fold", "group_id").join(strayed.drop("label"), on="video_id")

    def audit(**columns: list[object]) -> dict[str, int]:
        index = tables.index(strayed, **columns)
        return failed(leakage_audit(index, strayed, moved_predictions.select(predictions.columns), LINKS, CONFIG))

    assert audit() == {}
    twin = [hashes[1], *hashes[1:]]
    assert audit(perceptual_hash=twin) == {"near_duplicates_in_two_folds": 1}
    contents = ["b" * 64, "b" * 64, *(f"{row:064d}" for row in range(2, folds.height))]
    assert audit(content_sha256=contents) == {"contents_in_two_folds": 1}
    stated = ["cascade", "cascade", *[None] * (folds.height - 2)]
    assert audit(stated_group=stated) == {"stated_groups_in_two_folds": 1}
    assert audit(source_id=["s", "s", *map(str, range(2, folds.height))]) == {"sources_in_two_folds": 1}


def test_every_other_way_to_leak_fails_its_own_check(tables, folds, predictions) -> None:
    index, records = tables.index(folds), [recorded_selection(Clips)] * 4
    first = pl.col("video_id") == "video00000"

    def audit(folds: pl.DataFrame = folds, predictions: pl.DataFrame = predictions, **more: Any) -> dict[str, int]:
        return failed(leakage_audit(index, folds, predictions, LINKS, CONFIG, **more))

    other_fold = folds.with_columns(fold=pl.when(first).then(3).otherwise("fold").cast(pl.Int64))
    assert audit(other_fold, other_fold.join(predictions.drop("group_id", "label", "fold"), on="video_id")) == {
        "groups_in_two_folds": 1
    }
    elsewhere = predictions.with_columns(fold=pl.when(first).then(3).otherwise("fold").cast(pl.Int64))
    assert audit(predictions=elsewhere) == {"predictions_not_by_their_own_fold": 1}
    strayed = copies(folds).with_columns(group_id=pl.when(first).then(pl.lit("other")).otherwise("group_id"))
    assert audit(augmented=strayed) == {"augmented_copies_out_of_place": 1}
    assert audit(selections=[*records, replace(records[0], openings=2, earlier=1)]) == {"chosen_after_opening": 1}
    assert audit(selections=[*records, None]) == {"chosen_after_opening": 0}
    assert audit(selections=[*records[1:], replace(records[0], is_complete=False)]) == {"chosen_after_opening": 1}
    assert audit(selections=[replace(records[0], openings=3)]) == {}


def test_outer_folds_that_were_opened_before_are_reported_and_not_judged(tables, folds, predictions) -> None:
    index = tables.index(folds)
    for before, count in (
        (EarlierOpenings(), 0),
        (EarlierOpenings(replaced=2, forked_from="run_<b>"), 2),
        (EarlierOpenings(unknown=1), 1),
    ):
        row = of(leakage_audit(index, folds, predictions, LINKS, CONFIG, before=before), "opened_before")
        assert (row["count"], row["passed"]) == (count, None)
        assert before.forked_from in row["finding"]


def test_what_a_split_by_row_would_have_claimed_is_computed_from_these_predictions(tables, folds, predictions) -> None:
    audit = leakage_audit(tables.index(folds), folds, predictions, LINKS, CONFIG)
    labels, groups = controls.fake_labels(predictions), predictions["group_id"].to_list()
    metric = within_folds(roc_auc, predictions["fold"])
    honest = group_interval(labels, predictions["score"], groups, metric, replicates=200)
    assert of(audit, "auc_by_group")["number"] == honest.value
    oracle = controls.group_lookup(controls.split_by_row(folds, seed=0))
    claimed = of(audit, "auc_claimed_by_row")
    assert claimed["number"] > 0.95 > honest.value
    assert claimed["count"] == sum(
        any(o["group_id"] == row["group_id"] and o["fold"] != row["fold"] for o in oracle.to_dicts())
        for row in oracle.to_dicts()
    )


def test_videos_whose_groups_are_all_new_claim_nothing_more_by_row(tables) -> None:
    alone = tables.folds(num_groups=60, per_group=1)
    noise = np.random.default_rng(1).normal(size=60)
    predictions = tables.predictions(alone, 1 / (1 + np.exp(-(controls.fake_labels(alone) + noise))))
    audit = leakage_audit(tables.index(alone), alone, predictions, LINKS, CONFIG)
    assert of(audit, "auc_claimed_by_row")["count"] == 0


def test_near_duplicates_that_were_not_looked_for_are_no_pass(tables, folds, predictions) -> None:
    config = RunConfig(bootstrap_replicates=200, near_duplicate_bits=0)
    audit = leakage_audit(tables.index(folds), folds, predictions, LINKS, config)
    assert of(audit, "near_duplicates_in_two_folds")["passed"] is None


def test_where_metadata_tells_the_labels_the_columns_that_carry_it_are_named(tables: Any, folds, predictions) -> None:
    told = leakage_audit(
        tables.index(folds, width=[640 if label == "fake" else 320 for label in folds["label"]]), folds, predictions,
        LINKS, CONFIG,
    )  # fmt: skip
    row = of(told, "metadata_carriers")
    assert "width (1.00)" in row["finding"]
    assert (row["number"], row["passed"]) == (1.0, None)
