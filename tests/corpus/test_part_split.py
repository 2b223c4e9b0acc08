from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.corpus.folds import PartSplit, split_parts
from fvc_lib.services.errors import LeakageError

SHARES = {"validation_share": 0.15, "test_share": 0.2}


def split(rows: list[tuple[str, str | None, str | None]], seed: int = 0, **shares: float) -> PartSplit:
    groups, strata, official = zip(*rows, strict=True) if rows else ((), (), ())
    return split_parts(groups, strata, official, seed=seed, **{**SHARES, **shares})


@st.composite
def corpora(draw: st.DrawFn) -> list[tuple[str, str | None, str | None]]:
    """Groups of 1 to 4 rows, some of more than one class, each with one official part or none."""
    rows = []
    for number in range(draw(st.integers(1, 25))):
        part = draw(st.sampled_from([None, None, "train", "validation", "test"]))
        for _ in range(draw(st.integers(1, 4))):
            said = part if draw(st.booleans()) else None
            rows.append((f"g{number}", draw(st.sampled_from(["a", "b", "c", None])), said))
    return rows


@settings(max_examples=30)
@given(corpora(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_groups_stay_whole_official_parts_are_kept_and_the_order_of_the_rows_does_not_matter(
    rows: list[tuple[str, str | None, str | None]], random, seed: int
) -> None:
    result = split(rows, seed)
    parts_of = defaultdict(set)
    for (group, _, said), part, source in zip(rows, result.parts, result.sources, strict=True):
        parts_of[group].add(part)
        assert source == ("official" if said == part else "made")
    assert all(len(parts) == 1 for parts in parts_of.values())
    stated = {group: said for group, _, said in rows if said is not None}
    cut = {part for part in ("validation", "test") if part not in stated.values()}
    for group, said in stated.items():
        assert parts_of[group] == {said} or (said == "train" and parts_of[group] <= cut)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = split([rows[place] for place in order], seed)
    assert [shuffled.parts[order.index(place)] for place in range(len(rows))] == list(result.parts)
    assert shuffled.notes == result.notes


@settings(max_examples=30)
@given(corpora(), st.integers(0, 3))
def test_every_part_gets_a_group_where_there_are_enough(
    rows: list[tuple[str, str | None, str | None]], seed: int
) -> None:
    result = split(rows, seed)
    stated = {group: said for group, _, said in rows if said is not None}
    free = {group for group, _, _ in rows if stated.get(group, "train") == "train"}
    missing = [part for part in ("validation", "test") if part not in stated.values()]
    if len(free) > len(missing):
        assert result.empty_parts == ()
    if free:
        assert "train" in result.parts


def test_a_class_with_too_few_groups_is_trained_on_and_said() -> None:
    rows = [(f"a{number}", "a", None) for number in range(10)] + [("b0", "b", None), ("b1", "b", None)]
    result = split(rows)
    assert result.parts[-2:] == ("train", "train")
    assert "'b'" in result.notes[-1]


def test_validation_is_cut_from_the_training_groups_of_an_official_split_alone() -> None:
    rows = [(f"t{n}", "a", "train") for n in range(20)] + [(f"e{n}", "a", "test") for n in range(5)]
    result = split(rows)
    assert result.parts[20:] == ("test",) * 5
    assert result.sources[20:] == ("official",) * 5
    counts = Counter(zip(result.parts[:20], result.sources[:20], strict=True))
    assert counts == {("train", "official"): 17, ("validation", "made"): 3}
    assert len(result.notes) == 2


def test_a_group_on_both_sides_of_an_official_split_stops_the_run() -> None:
    rows = [("x", "a", "train"), ("x", "a", "test"), ("y", "a", "train"), ("z", None, None)]
    with pytest.raises(LeakageError, match=r"divides 1 group: 'x' in test and train") as error:
        split(rows)
    assert error.value.exit_code == 3


def test_too_few_groups_leave_parts_empty_and_say_which() -> None:
    assert split([("x", "a", None)]).empty_parts == ("validation", "test")
    assert split([("x", "a", "test")]).empty_parts == ("train", "validation")
    assert split([("x", "a", "train"), ("y", "b", None)]).empty_parts == ("validation",)
