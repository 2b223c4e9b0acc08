import hashlib
from dataclasses import astuple

from hypothesis import given, strategies as st

from fvc_lib.corpus.copies.groups import GroupMember, join_groups


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
