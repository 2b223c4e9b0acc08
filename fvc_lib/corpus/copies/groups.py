"""Leakage groups: connected components over everything that makes two videos the same footage.

Linked are videos with one stated group (an FVC cascade), one source id, one content, or perceptual hashes that are
near each other. Split by row instead, an oracle that only recognises the cascade scores AUC 0.996 on FVC-2018; split
by these groups it scores 0.5.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Why = Literal["same_source", "same_content", "near_duplicate"]
_Node = tuple[str, str]  # ("group", stated group), or ("source", source id) of a video without one


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One video file and the facts that decide its group."""

    path: str  # names the file in merge reports; unique
    source_id: str  # what the label source calls the video
    content_sha256: str | None  # hash of the file's content; none: a row of a label table, whatever became of its video
    stated_group: str | None = None  # the group the label source gave, if any

    @property
    def own_name(self) -> tuple[str, str]:
        """Name of a group without a stated one: the content, or the source if there is none."""
        return ("source", self.source_id) if self.content_sha256 is None else ("video", self.content_sha256)


@dataclass(frozen=True)
class Merge:
    """One link between sets of videos that the label source keeps apart."""

    group_id: str  # the group they are in now
    why: Why  # what linked them
    evidence: str  # the source id, the start of the content hash, or the two near-duplicate paths
    first: str  # the stated group, or the path of a video that had none, on one side
    second: str  # the same on the other side


@dataclass(frozen=True)
class Grouping:
    """Group ids in the order of the members, and what was merged."""

    group_ids: tuple[str, ...]
    merges: tuple[Merge, ...]


class Components:
    """Connected components of ``count`` things: ``label``, int64 (count,), is equal for connected ones."""

    def __init__(self, count: int) -> None:
        self.label = np.arange(count)
        self._next = np.arange(count)  # the members of each are a ring
        self._size = np.ones(count, np.int64)  # by label

    def copy(self) -> "Components":
        """Return an independent copy."""
        other = Components(0)
        other.label, other._next, other._size = self.label.copy(), self._next.copy(), self._size.copy()
        return other

    def join(self, left: int, right: int) -> bool:
        """Connect two things; return false if they are connected already. The smaller side is relabelled."""
        larger, smaller = int(self.label[left]), int(self.label[right])
        if larger == smaller:
            return False
        if self._size[larger] < self._size[smaller]:
            larger, smaller = smaller, larger
        member = smaller
        for _ in range(int(self._size[smaller])):
            self.label[member] = larger
            member = int(self._next[member])
        self._next[[larger, smaller]] = self._next[[smaller, larger]]
        self._size[larger] += self._size[smaller]
        return True


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
    # The node that stands for a member: a stated group of its source, or the source itself.
    home_of: dict[str, _Node] = {
        member.path: ("group", groups_of[member.source_id][0])
        if member.source_id in groups_of
        else ("source", member.source_id)
        for member in ordered
    }
    named: dict[_Node, str] = {("group", group): group for groups in groups_of.values() for group in groups}
    for member in ordered:
        named.setdefault(home_of[member.path], member.path)
    number = {node: place for place, node in enumerate(named)}
    names = list(named.values())  # of each component by its label: the smallest in it
    components, links = Components(len(names)), []

    def link(first: _Node, second: _Node, why: Why, evidence: str) -> None:
        one, other = (names[components.label[number[node]]] for node in (first, second))
        if components.join(number[first], number[second]):
            smaller, larger = sorted((one, other))
            names[components.label[number[first]]] = smaller
            links.append((number[first], why, evidence, smaller, larger))

    for source_id in sorted(groups_of):
        first, *others = groups_of[source_id]
        for other in others:
            link(("group", first), ("group", other), "same_source", source_id)
    first_home: dict[str, _Node] = {}
    for member in ordered:
        content = member.content_sha256
        if content is not None:
            home = home_of[member.path]
            link(first_home.setdefault(content, home), home, "same_content", content[:16])
    for one, other in sorted(sorted((members[a].path, members[b].path)) for a, b in near_duplicates):
        link(home_of[one], home_of[other], "near_duplicate", f"{one} ~ {other}")

    label = {node: int(components.label[place]) for node, place in number.items()}
    group_ids = _component_names(label, members, home_of)
    return Grouping(
        tuple(group_ids[label[home_of[member.path]]] for member in members),
        tuple(Merge(group_ids[int(components.label[place])], why, evidence, a, b)
              for place, why, evidence, a, b in links if int(components.label[place]) in group_ids),
    )  # fmt: skip


def _groups_by_source(members: Iterable[GroupMember], memberships: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for source_id, group in memberships:
        groups[source_id].add(group)
    for member in members:
        if member.stated_group is not None:
            groups[member.source_id].add(member.stated_group)
    return {source_id: sorted(found) for source_id, found in groups.items()}


def _component_names(
    label: dict[_Node, int], members: Sequence[GroupMember], home_of: dict[str, _Node]
) -> dict[int, str]:
    """Return group ids by label."""
    stated: defaultdict[int, list[str]] = defaultdict(list)
    smallest: dict[int, tuple[str, str]] = {}
    for (kind, name), root in label.items():
        if kind == "group":
            stated[root].append(name)
    for member in members:
        root = label[home_of[member.path]]
        smallest[root] = min(member.own_name, smallest.get(root, member.own_name))
    names = {}
    for root, (kind, name) in smallest.items():
        groups = sorted(stated[root])
        own = f"{kind} {name[:16] if kind == 'video' else name}"
        more = f"+{len(groups) - 1} more" if len(groups) > 1 else ""
        names[root] = f"{groups[0]}{more}" if groups else own
    return names
