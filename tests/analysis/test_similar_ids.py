"""Which ids look as if they came from one video, and which only follow a habit of naming."""

from __future__ import annotations

import pytest

from fvc_lib.analysis.audit.similar_ids import suspected_groups, suspicions


def found(*ids: str, groups: list[str | None] | None = None) -> dict[str, list[tuple[str, ...]]]:
    others = [f"{letter}{letter}{other}" for letter in "abcdefg" for other in "hijklmn"]
    whole = [*ids, *others]
    labels = ["real", "fake"] * len(whole)
    known = [*(groups or [None] * len(ids)), *[None] * len(others)]
    return {each.kind: list(each.families) for each in suspicions(whole, labels[: len(whole)], known)}


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (("real/000.mp4", "fake/000_003.mp4"), "shared sequence"),
        (("a/party.mp4", "b/party.avi"), "same name"),
        (("party", "party_2", "party-fake"), "name and suffix"),
        (("party_c23", "party_c40"), "name and suffix"),
        (("dQw4w9WgXcQ_0.mp4", "dQw4w9WgXcQ_17.mp4"), "YouTube id"),
    ],
)
def test_ids_of_one_video_are_suspected(ids, kind):
    assert tuple(sorted(ids)) in found(*ids)[kind]


@pytest.mark.parametrize(
    "ids", [("v1", "v2"), ("v_1", "v_2"), ("holiday", "holidays"), tuple(f"video_{number:04}" for number in range(40))]
)
def test_counters_and_words_are_not(ids):
    assert found(*ids) == {}


def test_ids_that_many_share_are_a_habit_of_naming():
    many = tuple(f"take_{number}" for number in range(60))
    assert found(*many) == {}


def test_what_the_groups_say_already_is_no_suspicion_and_suspected_groups_join_both():
    assert found("party", "party_2", groups=["one", "one"]) == {}
    ids, groups = ["party", "party_2", "tea", "cake"], ["one", "two", "two", None]
    told = suspicions([*ids, *"abcdefgh"], ["real"] * 12, [*groups, *[None] * 8])
    assert [each.num_both_labels for each in told] == [0]
    joined = suspected_groups(ids, groups, told)
    assert joined[0] == joined[1] == joined[2] != joined[3]
