"""Groups, folds, the inner split and the split into parts: groups whole, both labels everywhere, no order matters."""

import hashlib
import itertools
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import astuple

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings, strategies as st

from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.folds import (
    FoldSplit,
    TrainingRows,
    balance_groups,
    balance_table,
    check_folds,
    make_folds,
    shuffle_labels_by_group,
    split_parts,
)
from fvc_lib.services.errors import DataError, LeakageError


def sha(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def member(name: str, group: str | None = None, content: object = None) -> GroupMember:
    return GroupMember(name, name, sha(name if content is None else content), group)


def test_a_stated_group_keeps_its_name_and_null_groups_stay_apart() -> None:
    members = [member("a", "f12"), member("b", "f12"), member("c"), member("d")]
    assert join_groups(members) == (("f12", "f12", f"video {sha('c')[:16]}", f"video {sha('d')[:16]}"), ())
    assert set(join_groups(members[:2], memberships=[("a", "f2")])[0]) == {"f12+1 more"}


def test_merges_are_reported_with_what_joined_them() -> None:
    members = [member("a", "f1"), member("b", "f2"), member("c", content="b"), member("d"), member("e", "f9")]
    ids, merges = join_groups(members, [(3, 0)], [("a", "f1"), ("gone", "f9"), ("gone", "f3")])
    assert ids == ("f1", "f2", "f2", "f1", "f3+1 more")
    assert [astuple(merge) for merge in merges] == [
        ("f3+1 more", "same_source", "gone", "f3", "f9"),
        ("f2", "same_content", sha("b")[:16], "c", "f2"),
        ("f1", "near_duplicate", "a ~ d", "d", "f1"),
    ]


MEMBERS = st.lists(
    st.tuples(st.sampled_from([None, None, "f1", "f2", "f3"]), st.integers(0, 8), st.integers(0, 8)), max_size=12
).map(
    lambda drawn: [
        GroupMember(f"path {place}", f"source {source}", sha(content), group)
        for place, (group, source, content) in enumerate(drawn)
    ]
)


@given(MEMBERS, st.data())
def test_groups_are_the_connected_components(members: list[GroupMember], data: st.DataObject) -> None:
    place = st.integers(0, max(0, len(members) - 1))
    pairs = data.draw(st.lists(st.tuples(place, place), max_size=3)) if members else []
    facts = [{("source", m.source_id), ("content", m.content_sha256), ("group", m.stated_group or m)} for m in members]
    for number, pair in enumerate(pairs):
        for one in pair:
            facts[one].add(("pair", number))
    naive = list(range(len(members)))  # the smallest member that is connected with each
    for _ in members:
        naive = [min(naive[b] for b in range(len(members)) if facts[a] & facts[b]) for a in range(len(members))]
    ids, _ = join_groups(members, pairs)
    assert [ids.index(group_id) for group_id in ids] == naive


def index_of(groups: list[tuple[int, int]]) -> pl.DataFrame:
    """An index with the given (real, fake) videos per group; its rows are in no particular order."""
    labels = [(f"g{n:03d}", ["real"] * real + ["fake"] * fake) for n, (real, fake) in enumerate(groups)]
    index = pl.DataFrame(labels, schema=["group_id", "label"], orient="row").explode("label")
    ids = [f"{7919 * place % 104729:08x}" for place in range(index.height)]
    return index.select(pl.Series("video_id", ids), "group_id", "label")


PURE = st.integers(1, 9).flatmap(lambda size: st.sampled_from([(size, 0), (0, size)]))
MIXED = st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any)
SIZES = st.lists(st.one_of(PURE, MIXED), min_size=4, max_size=24)
COUNTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(any), min_size=4, max_size=7)


@settings(max_examples=12)
@given(SIZES, st.integers(2, 6), st.integers(0, 99), st.floats(0.1, 0.5), st.randoms(use_true_random=False))
def test_groups_stay_whole_in_folds_splits_and_shuffled_labels_in_any_order_of_rows(
    groups: list[tuple[int, int]], num_folds: int, seed: int, share: float, random
) -> None:
    assume(min(sum(each > 0 for each in of_label) for of_label in zip(*groups, strict=True)) >= num_folds)
    index = index_of(groups)
    folds = make_folds(index, num_folds, seed)
    assert folds.drop("fold").equals(index.sort("video_id"))
    assert folds.group_by("group_id").agg(pl.col("fold").n_unique())["fold"].max() == 1
    balance = balance_table(folds)
    assert balance["fold"].to_list() == list(range(num_folds))
    assert balance.select("real", "fake").min_horizontal().min() > 0  # type: ignore[operator]
    if all(0 in group for group in groups):
        spread = [balance[label].max() - balance[label].min() for label in ("real", "fake")]  # type: ignore[operator]
        assert all(apart <= max(sizes) for apart, *sizes in zip(spread, *groups, strict=True))
    order = random.sample(range(index.height), index.height)
    assert folds.equals(make_folds(index[order], num_folds, seed))
    shuffled = shuffle_labels_by_group(folds, seed)
    assert shuffled.equals(shuffle_labels_by_group(folds[order], seed))
    assert shuffled.drop("label").equals(folds.drop("label"))
    assert shuffled.group_by("group_id").agg(pl.col("label").n_unique())["label"].max() == 1
    for (fold,), rows in shuffled.group_by("fold"):
        assert rows["group_id"].n_unique() == 1 or rows["label"].n_unique() == 2
        rest = folds.filter(pl.col("fold") != fold)
        if rest.unique(["group_id", "label"])["label"].value_counts()["count"].min() < 2:  # type: ignore[operator]
            with pytest.raises(DataError, match="one to train on and one for inner validation"):
                TrainingRows(folds).split(int(fold), inner_validation_share=share, seed=seed)
            continue
        split, again = (
            TrainingRows(some).split(int(fold), inner_validation_share=share, seed=seed)
            for some in (folds, folds[order])
        )
        parts = [split.train, split.validation, split.test]
        assert all(
            one.equals(other) for one, other in zip(parts, (again.train, again.validation, again.test), strict=True)
        )
        assert pl.concat(parts).sort("video_id").equals(folds)
        assert split.test.equals(folds.filter(fold=fold))
        assert sum(part["group_id"].n_unique() for part in parts) == folds["group_id"].n_unique()
        assert all(part["label"].n_unique() == 2 for part in parts)


@settings(max_examples=8)
@given(st.lists(PURE, min_size=4, max_size=24), st.integers(2, 4), st.integers(0, 99))
def test_shuffled_labels_are_spread_evenly_over_the_true_ones(
    groups: list[tuple[int, int]], num_folds: int, seed: int
) -> None:
    assume(min(sum(each > 0 for each in of_label) for of_label in zip(*groups, strict=True)) >= num_folds)
    folds = make_folds(index_of(groups), num_folds, seed)
    shuffled = shuffle_labels_by_group(folds, seed).select("group_id", pl.col("label").alias("drawn"))
    both = folds.join(shuffled, on="group_id").unique("group_id")
    for _, fold in both.group_by("fold"):
        share = float((fold["drawn"] == "fake").mean())  # type: ignore[arg-type]
        for _, stratum in fold.group_by("label"):
            assert abs((stratum["drawn"] == "fake").sum() - share * stratum.height) <= 1


@settings(max_examples=15)
@given(COUNTS, st.sampled_from([(0.5, 0.5), (0.75, 0.25), (1 / 3, 1 / 3, 1 / 3)]), st.integers(0, 5))
def test_no_move_or_swap_of_groups_improves_the_balance(
    drawn: list[tuple[int, int]], drawn_shares: tuple[float, ...], seed: int
) -> None:
    counts, shares = np.array(drawn), np.array(drawn_shares)
    assume((np.count_nonzero(counts, axis=0) >= len(shares)).all())

    def cost(parts: np.ndarray) -> float:
        load, totals = np.array([counts[parts == part].sum(axis=0) for part in range(len(shares))]), counts.sum(axis=0)
        return float((((load - np.outer(shares, totals)) / totals) ** 2).sum() + 1e4 * (load == 0).sum())

    parts = balance_groups(counts, shares, np.random.default_rng(seed))
    others = []
    for a, b in itertools.combinations(range(len(counts)), 2):
        others.append(parts.copy())
        others[-1][[a, b]] = parts[[b, a]]
    for place, part in itertools.product(range(len(counts)), range(len(shares))):
        others.append(parts.copy())
        others[-1][place] = part
    assert cost(parts) < 1e4
    assert cost(parts) <= min(map(cost, others)) + 1e-8


@pytest.mark.parametrize(
    ("groups", "num_folds", "message"),
    [
        ([(2, 1), (1, 0), (1, 0), (0, 5)], 5, r"3 with real videos and 2 with fake videos.*num_folds to at most 2"),
        ([(1, 0)] * 20 + [(0, 9)] * 3, 4, r"3 with fake videos.*num_folds to at most 3"),
        ([(1, 0)] * 20 + [(0, 9)], 2, r"1 with fake videos.*add videos of other events"),
    ],
)
def test_a_label_in_fewer_groups_than_folds_is_refused(groups, num_folds, message) -> None:
    with pytest.raises(DataError, match=message):
        make_folds(index_of(groups), num_folds, 0)


def test_a_group_or_video_on_two_sides_is_a_leak() -> None:
    folds = make_folds(index_of([(2, 0), (2, 0), (0, 2), (0, 2)]), 2, 0)
    leaking = folds.sort("group_id").with_columns(pl.Series("fold", [0, 1, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(LeakageError, match=r"1 groups are in more than one fold: 'g000' in folds 0, 1"):
        check_folds(leaking)
    check_folds(leaking, {"g000"})
    with pytest.raises(LeakageError):
        TrainingRows(leaking).split(0, inner_validation_share=0.5, seed=0)
    with pytest.raises(LeakageError, match="in more than one part"):
        FoldSplit(train=folds.head(1), validation=folds.tail(7), test=folds.head(0))
    with pytest.raises(LeakageError, match="listed twice"):
        check_folds(pl.concat([folds, folds.head(1)]))


# --- Parts.

Rows = list[tuple[str, str | None, str | None]]


@st.composite
def corpora(draw: st.DrawFn) -> Rows:
    """Groups of 1 to 4 rows, some of more than one class, each with one official part or none."""
    rows: Rows = []
    for number in range(draw(st.integers(1, 25))):
        part = draw(st.sampled_from([None, None, "train", "validation", "test"]))
        for _ in range(draw(st.integers(1, 4))):
            stated = part if draw(st.booleans()) else None
            rows.append((f"g{number}", draw(st.sampled_from(["a", "b", "c", None])), stated))
    return rows


@settings(max_examples=12)
@given(corpora(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_parts_keep_groups_and_official_parts_and_are_filled_where_groups_suffice(rows: Rows, random, seed) -> None:
    result = split_parts(*zip(*rows, strict=True), seed=seed)
    parts_of = defaultdict(set)
    for (group, _, own), part, source in zip(rows, result.parts, result.sources, strict=True):
        parts_of[group].add(part)
        assert source == ("official" if own == part else "made")
    assert all(len(parts) == 1 for parts in parts_of.values())
    stated = {group: own for group, _, own in rows if own is not None}
    missing = {part for part in ("validation", "test") if part not in stated.values()}
    for group, own in stated.items():
        assert parts_of[group] == {own} or (own == "train" and parts_of[group] <= missing)
    free = {group for group in parts_of if stated.get(group, "train") == "train"}
    names_of = {group: Counter("" if name is None else f"={name}" for own, name, _ in rows if own == group)
                for group in free}  # fmt: skip
    strata = Counter(min(each for each in names if names[each] == max(names.values())) for names in names_of.values())
    assert {"train", "validation", "test"} == {*result.parts} or max(strata.values(), default=0) <= len(missing)
    assert "train" in result.parts or not free
    order = random.sample(range(len(rows)), len(rows))
    shuffled = split_parts(*zip(*(rows[place] for place in order), strict=True), seed=seed)
    assert shuffled.parts == tuple(result.parts[place] for place in order)


@pytest.mark.parametrize(
    ("rows", "parts", "empty"),
    [
        ([("x", "a", None)], ["train"], ("validation", "test")),
        ([("x", "a", "test")], ["test"], ("train", "validation")),
        ([(f"a{n}", "a", None) for n in range(10)] + [("b0", "b", None)], ["train"], ()),  # b has too few groups
        ([(f"t{n}", "a", "train") for n in range(20)] + [("e", "a", "test")] * 5, ["test"] * 5, ()),
    ],
)
def test_what_a_part_cannot_be_made_of_stays_where_it_is(rows: Rows, parts: list[str], empty: tuple[str, ...]) -> None:
    result = split_parts(*zip(*rows, strict=True), seed=0)
    assert list(result.parts[-len(parts) :]) == parts
    assert {*result.parts}.isdisjoint(empty)
    with pytest.raises(DataError, match=" and ".join(empty)) if empty else nullcontext():
        result.refuse_empty_parts()


def test_a_group_on_both_sides_of_an_official_split_is_a_leak() -> None:
    with pytest.raises(LeakageError, match=r"1 groups .* 'x' in parts test, train.*put each group into one") as error:
        split_parts(["x", "x", "y"], ["a", "a", None], ["train", "test", None], seed=0)
    assert error.value.exit_code == 3
