from pathlib import Path

import polars as pl
import pytest
from hypothesis import assume, given, settings, strategies as st

from fvc_lib.corpus.folds import (
    FoldSplit,
    balance_table,
    check_folds,
    make_folds,
    shuffle_labels_by_group,
    split_for_fold,
)
from fvc_lib.corpus.sources.general.fvc2018 import read_fvc2018
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import FOLDS, check_table


def index_of(groups: list[tuple[int, int]]) -> pl.DataFrame:
    """An index with the given (real, fake) videos per group; its rows are in no particular order."""
    rows = [
        (f"g{number:03d}", label)
        for number, (real, fake) in enumerate(groups)
        for label in ["real"] * real + ["fake"] * fake
    ]
    return pl.DataFrame(
        {
            "video_id": [f"{7919 * place % 104729:08x}" for place in range(len(rows))],
            "group_id": [group for group, _ in rows],
            "label": [label for _, label in rows],
        }
    )


def spread(folds: pl.DataFrame, label: str) -> int:
    counts = balance_table(folds)[label]
    return int(counts.max() - counts.min())  # type: ignore[operator]


def is_feasible(groups: list[tuple[int, int]], num_folds: int) -> bool:
    return min(sum(real > 0 for real, _ in groups), sum(fake > 0 for _, fake in groups)) >= num_folds


PURE = st.integers(1, 9).flatmap(lambda size: st.sampled_from([(size, 0), (0, size)]))
MIXED = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any)
SIZES = st.lists(st.one_of(PURE, MIXED), min_size=4, max_size=24)


@settings(max_examples=40)
@given(SIZES, st.integers(2, 6), st.integers(0, 2**31 - 1))
def test_folds_hold_every_video_once_and_every_group_whole(
    groups: list[tuple[int, int]], num_folds: int, seed: int
) -> None:
    assume(is_feasible(groups, num_folds))
    index = index_of(groups)
    folds = make_folds(index, num_folds, seed)
    check_table(folds, FOLDS, "folds")
    assert folds["video_id"].to_list() == sorted(index["video_id"])
    assert folds.group_by("group_id").agg(pl.col("fold").n_unique())["fold"].max() == 1
    assert folds.drop("fold").equals(index.sort("video_id").select("video_id", "group_id", "label"))
    balance = balance_table(folds)
    assert balance["fold"].to_list() == list(range(num_folds))
    assert balance.select("real", "fake").min_horizontal().min() > 0  # type: ignore[operator]
    assert balance["videos"].sum() == index.height


@settings(max_examples=40)
@given(st.lists(PURE, min_size=4, max_size=24), st.integers(2, 6))
def test_folds_are_balanced_within_the_stated_tolerance(groups: list[tuple[int, int]], num_folds: int) -> None:
    assume(is_feasible(groups, num_folds))
    folds = make_folds(index_of(groups), num_folds, 0)
    assert spread(folds, "real") <= max(real for real, _ in groups)
    assert spread(folds, "fake") <= max(fake for _, fake in groups)


def test_fvc2018_is_balanced_to_a_video(shared: Path) -> None:
    rows = read_fvc2018(shared / "fvc2018").annotations.filter(pl.col("label").is_in(["real", "fake"]))
    index = rows.unique("source_id", keep="first").select(
        pl.col("source_id").alias("video_id"), pl.col("stated_group").alias("group_id"), "label"
    )
    folds = make_folds(index, 5, 0)
    assert spread(folds, "real") <= 1
    assert spread(folds, "fake") <= 1


@settings(max_examples=15)
@given(SIZES, st.integers(2, 5), st.integers(0, 9), st.randoms(use_true_random=False))
def test_folds_do_not_depend_on_the_order_of_rows(
    groups: list[tuple[int, int]], num_folds: int, seed: int, random
) -> None:
    assume(is_feasible(groups, num_folds))
    index = index_of(groups)
    order = list(range(index.height))
    random.shuffle(order)
    folds = make_folds(index, num_folds, seed)
    assert folds.equals(make_folds(index[order], num_folds, seed))
    shuffled_rows = folds[order]
    assert shuffle_labels_by_group(folds, seed).equals(shuffle_labels_by_group(shuffled_rows, seed))
    try:
        first = split_for_fold(folds, 0, inner_validation_share=0.25, seed=seed)
    except DataError:
        return
    second = split_for_fold(shuffled_rows, 0, inner_validation_share=0.25, seed=seed)
    assert all(getattr(first, part).equals(getattr(second, part)) for part in ("train", "validation", "test"))


@settings(max_examples=20)
@given(SIZES, st.integers(2, 5), st.floats(0.1, 0.5), st.integers(0, 99))
def test_splits_are_disjoint_complete_and_hold_both_labels(
    groups: list[tuple[int, int]], num_folds: int, share: float, seed: int
) -> None:
    assume(is_feasible(groups, num_folds))
    folds = make_folds(index_of(groups), num_folds, seed)
    for fold in range(num_folds):
        rest = folds.filter(pl.col("fold") != fold)
        has_two = all(rest.filter(pl.col("label") == label)["group_id"].n_unique() >= 2 for label in ("real", "fake"))
        if not has_two:
            with pytest.raises(DataError, match="one to train on and one for inner validation"):
                split_for_fold(folds, fold, inner_validation_share=share, seed=seed)
            continue
        split = split_for_fold(folds, fold, inner_validation_share=share, seed=seed)
        parts = [split.train, split.validation, split.test]
        assert pl.concat(parts).sort("video_id").equals(folds)
        assert split.test.equals(folds.filter(pl.col("fold") == fold))
        assert sum(part["group_id"].n_unique() for part in parts) == folds["group_id"].n_unique()
        assert all(part["label"].n_unique() == 2 for part in parts)


@settings(max_examples=20)
@given(SIZES, st.integers(2, 5), st.integers(0, 99))
def test_shuffled_labels_are_one_per_group_and_keep_folds(
    groups: list[tuple[int, int]], num_folds: int, seed: int
) -> None:
    assume(is_feasible(groups, num_folds))
    folds = make_folds(index_of(groups), num_folds, seed)
    shuffled = shuffle_labels_by_group(folds, seed)
    assert shuffled.drop("label").equals(folds.drop("label"))
    assert shuffled.group_by("group_id").agg(pl.col("label").n_unique())["label"].max() == 1
    several = folds.group_by("fold").agg(pl.col("group_id").n_unique()).filter(pl.col("group_id") > 1)["fold"]
    for fold in several:
        assert shuffled.filter(pl.col("fold") == fold)["label"].n_unique() == 2


@settings(max_examples=20)
@given(st.lists(PURE, min_size=4, max_size=24), st.integers(2, 4), st.integers(0, 99))
def test_shuffled_labels_are_spread_evenly_over_the_true_ones(
    groups: list[tuple[int, int]], num_folds: int, seed: int
) -> None:
    assume(is_feasible(groups, num_folds))
    folds = make_folds(index_of(groups), num_folds, seed)
    shuffled = shuffle_labels_by_group(folds, seed).select("group_id", pl.col("label").alias("drawn"))
    both = folds.join(shuffled, on="group_id").unique("group_id")
    for _, fold in both.group_by("fold"):
        share = float((fold["drawn"] == "fake").mean())  # type: ignore[arg-type]
        for _, stratum in fold.group_by("label"):
            assert abs((stratum["drawn"] == "fake").sum() - share * stratum.height) <= 1


class TestRefusals:
    def test_fewer_groups_than_folds(self) -> None:
        with pytest.raises(DataError, match=r"3 with real videos and 2 with fake videos.*num_folds to at most 2"):
            make_folds(index_of([(2, 1), (1, 0), (1, 0), (0, 5)]), 5, 0)

    def test_a_label_in_fewer_groups_than_folds(self) -> None:
        index = index_of([(1, 0)] * 20 + [(0, 9)] * 3)
        with pytest.raises(DataError, match=r"3 with fake videos.*num_folds to at most 3"):
            make_folds(index, 4, 0)
        assert make_folds(index, 3, 0)["fold"].n_unique() == 3

    def test_a_shared_group_is_listed(self) -> None:
        folds = make_folds(index_of([(2, 0), (2, 0), (0, 2), (0, 2)]), 2, 0)
        leaking = folds.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).mod(2).alias("fold")).sort("group_id")
        leaking = leaking.with_columns(pl.Series("fold", [0, 1, 0, 0, 1, 1, 1, 1]))
        with pytest.raises(LeakageError, match=r"1 group_ids are in more than one fold: 'g000' in folds 0, 1"):
            check_folds(leaking)
        with pytest.raises(LeakageError):
            split_for_fold(leaking, 0, inner_validation_share=0.5, seed=0)

    def test_a_split_with_a_group_on_two_sides_cannot_be_made(self) -> None:
        folds = make_folds(index_of([(2, 0), (2, 0), (0, 2), (0, 2)]), 2, 0)
        with pytest.raises(LeakageError, match="in more than one part"):
            FoldSplit(train=folds.head(1), validation=folds.tail(7), test=folds.head(0))
