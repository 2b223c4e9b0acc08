"""Leakage groups: connected components over everything that makes two videos the same footage.

Linked are videos with one stated group (an FVC cascade), one source id, one content, or perceptual hashes that are
near each other. Split by row instead, an oracle that only recognises the cascade scores AUC 0.996 on FVC-2018; split
by these groups it scores 0.5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Why = Literal["same_source", "same_content", "near_duplicate"]
_Node = tuple[str, str]  # ("group", stated group), or ("source", source id) of a video without one


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One video file as far as its group is concerned.

    Attributes:
        path: names the file in merge reports; unique.
        source_id: what the label source calls the video.
        content_sha256: hash of the file's content; none: a row of a label table, whatever became of its video.
        stated_group: the group the label source gave, if any.
    """

    path: str
    source_id: str
    content_sha256: str | None
    stated_group: str | None = None

    @property
    def own_name(self) -> tuple[str, str]:
        """What a group without a stated name is called by: the content, or the source where there is none."""
        return ("source", self.source_id) if self.content_sha256 is None else ("video", self.content_sha256)


@dataclass(frozen=True)
class Merge:
    """One link that joined two sets of videos which the label source kept apart.

    Attributes:
        group_id: the group they are in now.
        why: what linked them.
        evidence: the source id, the start of the content hash, or the two near-duplicate paths.
        first: the stated group, or the path of a video that had none, on one side.
        second: the same on the other side.
    """

    group_id: str
    why: Why
    evidence: str
    first: str
    second: str


@dataclass(frozen=True)
class Grouping:
    """Group ids in the order of the members, and what was merged."""

    group_ids: tuple[str, ...]
    merges: tuple[Merge, ...]


class _Components:
    """Union-find with path halving and union by size; a component is called by the smallest name in it."""

    def __init__(self) -> None:
        self._parent: dict[_Node, _Node] = {}
        self._size: dict[_Node, int] = {}
        self._name: dict[_Node, str] = {}
        self.links: list[tuple[_Node, Why, str, str, str]] = []

    def add(self, node: _Node, name: str) -> None:
        """Make ``node`` a component of its own; harmless when it exists."""
        if node not in self._parent:
            self._parent[node] = node
            self._size[node] = 1
            self._name[node] = name

    def find(self, node: _Node) -> _Node:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def link(self, first: _Node, second: _Node, why: Why, evidence: str) -> None:
        """Join two components and keep the link as evidence; nothing happens when they are one already."""
        first, second = self.find(first), self.find(second)
        if first == second:
            return
        names = sorted((self._name[first], self._name[second]))
        if self._size[first] < self._size[second]:
            first, second = second, first
        self._parent[second] = first
        self._size[first] += self._size[second]
        self._name[first] = names[0]
        self.links.append((first, why, evidence, names[0], names[1]))

    def nodes(self) -> Iterable[_Node]:
        return self._parent.keys()


def join_groups(
    members: Sequence[GroupMember],
    near_duplicates: Iterable[tuple[int, int]] = (),
    memberships: Iterable[tuple[str, str]] = (),
) -> Grouping:
    """Give every member the id of its connected component.

    A component with exactly one stated group keeps that name; with several it is named after the first of them in
    sorted order, as ``f138+3 more``; without any it is ``video <first 16 hex of its smallest content hash>``, or
    ``source <source id>`` where there is no content. Ids and merges do not depend on the order of the arguments.
    Members are never joined for lacking a stated group.

    Args:
        members: the videos; files with one content are separate members.
        near_duplicates: pairs of positions in ``members`` whose perceptual hashes are near.
        memberships: (source id, stated group) pairs of the label source, also of videos that are not here: a video
            listed in two cascades joins them even if it can no longer be fetched.

    Raises:
        IndexError: a near-duplicate position is out of range.
    """
    groups_of = _groups_by_source(members, memberships)
    ordered = sorted(members, key=lambda member: member.path)
    home_of = {member.path: _home(member, groups_of) for member in ordered}
    components = _Components()
    for groups in groups_of.values():
        for group in groups:
            components.add(("group", group), group)
    for member in ordered:
        components.add(home_of[member.path], member.path)
    for source_id in sorted(groups_of):
        first, *others = groups_of[source_id]
        for other in others:
            components.link(("group", first), ("group", other), "same_source", source_id)
    first_home: dict[str, _Node] = {}
    for member in ordered:
        content = member.content_sha256
        if content is not None:
            home = home_of[member.path]
            components.link(first_home.setdefault(content, home), home, "same_content", content[:16])
    for first, second in sorted(sorted((members[a].path, members[b].path)) for a, b in near_duplicates):
        components.link(home_of[first], home_of[second], "near_duplicate", f"{first} ~ {second}")

    names = _component_names(components, members, home_of)
    return Grouping(
        tuple(names[components.find(home_of[member.path])] for member in members),
        tuple(Merge(names[components.find(node)], why, evidence, a, b)
              for node, why, evidence, a, b in components.links if components.find(node) in names),
    )  # fmt: skip


def _home(member: GroupMember, groups_of: dict[str, list[str]]) -> _Node:
    """The node that stands for a member: a stated group of its source, or the source itself."""
    listed = groups_of.get(member.source_id)
    return ("group", listed[0]) if listed else ("source", member.source_id)


def _groups_by_source(members: Iterable[GroupMember], memberships: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for source_id, group in memberships:
        groups[source_id].add(group)
    for member in members:
        if member.stated_group is not None:
            groups[member.source_id].add(member.stated_group)
    return {source_id: sorted(found) for source_id, found in groups.items()}


def _component_names(
    components: _Components, members: Sequence[GroupMember], home_of: dict[str, _Node]
) -> dict[_Node, str]:
    """Root node to group id; ids of different components differ, whatever the stated groups are called."""
    stated: defaultdict[_Node, list[str]] = defaultdict(list)
    smallest: dict[_Node, tuple[str, str]] = {}
    for node in components.nodes():
        if node[0] == "group":
            stated[components.find(node)].append(node[1])
    for member in members:
        root = components.find(home_of[member.path])
        smallest[root] = min(member.own_name, smallest.get(root, member.own_name))
    names = {root: stated[root][0] for root in smallest if len(stated[root]) == 1}
    # Every stated name is taken, even one that was merged away: a made-up id may not look like it.
    taken = {name for found in stated.values() for name in found}
    for root in sorted(smallest.keys() - names.keys(), key=smallest.__getitem__):
        names[root] = _free_name(sorted(stated[root]), smallest[root], taken)
        taken.add(names[root])
    return names


def _free_name(stated: list[str], own_name: tuple[str, str], taken: set[str]) -> str:
    kind, full = own_name
    name = f"{stated[0]}+{len(stated) - 1} more" if stated else f"{kind} {full[:16] if kind == 'video' else full}"
    if name in taken:
        name = f"{name} ({full})"
    while name in taken:
        name += "'"
    return name
