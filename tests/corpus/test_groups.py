import hashlib
from pathlib import Path

from hypothesis import given, strategies as st

from fvc_lib.corpus.copies.groups import GroupMember, join_groups
from fvc_lib.corpus.sources.general import read_fvc2018


def sha(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def member(name: str, group: str | None = None, content: object = None) -> GroupMember:
    return GroupMember(name, name, sha(name if content is None else content), group)


def test_a_stated_group_keeps_its_name_and_null_groups_stay_apart() -> None:
    members = [member("a", "f12"), member("b", "f12"), member("c"), member("d")]
    grouping = join_groups(members)
    assert grouping.group_ids == ("f12", "f12", f"video {sha('c')[:16]}", f"video {sha('d')[:16]}")
    assert grouping.merges == ()
    assert set(join_groups(members[:2], memberships=[("a", "f2")]).group_ids) == {"f12+1 more"}


def test_merges_are_reported_with_what_joined_them() -> None:
    members = [member("a", "f1"), member("b", "f2"), member("c", content="b"), member("d"), member("e", "f9")]
    grouping = join_groups(members, [(3, 0)], [("a", "f1"), ("gone", "f9"), ("gone", "f3")])
    assert grouping.group_ids == ("f1", "f2", "f2", "f1", "f3+1 more")
    assert [(m.group_id, m.why, m.evidence, m.first, m.second) for m in grouping.merges] == [
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
    ids = join_groups(members, pairs).group_ids
    assert [ids.index(group_id) for group_id in ids] == naive


def test_fvc2018_cascades_that_share_a_video_are_one_group(shared: Path) -> None:
    listing = read_fvc2018(shared / "fvc2018")
    rows = dict(listing.annotations.select("source_id", "stated_group").iter_rows())
    members = [member(source, group) for source, group in rows.items()]
    grouping = join_groups(members, memberships=listing.memberships)
    assert len(members) == 5572
    assert len(set(grouping.group_ids)) == 376
    merged = {(merge.group_id, merge.why, merge.evidence, merge.first, merge.second) for merge in grouping.merges}
    assert merged == {
        ("f138+3 more", "same_source", "CkLI6Qb4drI", "f140", "f142"),
        ("f138+3 more", "same_source", "FJcVcV46XBE", "f138", "f139"),
        ("f138+3 more", "same_source", "FJcVcV46XBE", "f138", "f140"),
        ("f144+1 more", "same_source", "CjZt_9iehWI", "f144", "f145"),
    }
