"""Make leakage groups: sets of videos that show the same footage and must not be divided by a split.

Two videos are linked by equal stated groups (such as an FVC cascade), equal source ids, equal content, or near
perceptual hashes. A group is a connected component of these links. They matter: on FVC-2018, an oracle that only
recognises the cascade scores AUC 0.996 if single videos are split, and 0.5 if these groups are split.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

_Why = Literal["same_source", "same_content", "near_duplicate"]
_Node = tuple[str, str]  # ("group", stated group), or ("source", source id) of a video without one


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One video file and the facts that decide its group."""

    path: str  # names the file in merge reports; unique
    source_id: str  # name of the video in the label source
    content_sha256: str | None  # hash of the file's content; None: a row of a label table, with or without a video
    stated_group: str | None = None  # the group in the label source, if any


@dataclass(frozen=True)
class Merge:
    """A link that joined two groups of videos which the label source states as different."""

    group_id: str  # the group they are in now
    why: _Why
    evidence: str  # the source id, the start of the content hash, or the two near-duplicate paths
    first: str  # the stated group, or the path of a video that had none, on one side
    second: str  # the stated group, or the path of a video that had none, on the other side


@dataclass(frozen=True)
class Grouping:
    """Result of ``join_groups``: the group id of each member, in their order, and the links that joined groups."""

    group_ids: tuple[str, ...]
    merges: tuple[Merge, ...]


class Components:
    """Connected components of ``count`` items, numbered from 0.

    Attributes:
        label: int64 (count,), equal for items that are connected.
    """

    def __init__(self, count: int) -> None:
        self.label = np.arange(count)
        self._next = np.arange(count)  # the next item of the same component; the items form a ring
        self._size = np.ones(count, np.int64)  # number of items in each component, by label

    def copy(self) -> "Components":
        """Return an independent copy."""
        other = Components(0)
        other.label, other._next, other._size = self.label.copy(), self._next.copy(), self._size.copy()
        return other

    def join(self, left: int, right: int) -> bool:
        """Connect two items; return False if they were connected already.

        The smaller of the two components gets the label of the larger one.
        """
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

    A component with one stated group has its name. One with several is named after the first in sorted order, such as
    ``f138+3 more``. One without a stated group is called ``video <first 16 hex digits of its smallest content hash>``,
    or ``source <source id>`` if a member has no content. Two videos are not joined because both lack a stated group.
    Ids and merges do not depend on the order of the arguments.

    Args:
        members: the videos; files with one content are separate members.
        near_duplicates: pairs of positions in ``members`` whose perceptual hashes are near.
        memberships: (source id, stated group) pairs of the label source, also of videos that are not here: a video
            listed in two cascades joins them even if it can no longer be fetched.

    Raises:
        IndexError: a near-duplicate position is out of range.
    """
    groups_of = defaultdict[str, set[str]](set)
    own = ((member.source_id, member.stated_group) for member in members if member.stated_group is not None)
    for source_id, group in (*memberships, *own):
        groups_of[source_id].add(group)

    def home(member: GroupMember) -> _Node:
        groups = groups_of.get(member.source_id)
        return ("group", min(groups)) if groups else ("source", member.source_id)

    named: dict[_Node, str] = {("group", group): group for group in sorted(set().union(*groups_of.values()))}
    ordered = sorted(members, key=lambda member: member.path)
    for member in ordered:
        named.setdefault(home(member), member.path)
    number = {node: place for place, node in enumerate(named)}
    names = list(named.values())  # name of each component by its label: the smallest name in it
    components, links = Components(len(names)), list[tuple[int, _Why, str, str, str]]()

    def link(first: _Node, second: _Node, why: _Why, evidence: str) -> None:
        sides = sorted(names[components.label[number[node]]] for node in (first, second))
        if components.join(number[first], number[second]):
            names[components.label[number[first]]] = sides[0]
            links.append((number[first], why, evidence, sides[0], sides[1]))

    for source_id in sorted(groups_of):
        first, *others = sorted(groups_of[source_id])
        for other in others:
            link(("group", first), ("group", other), "same_source", source_id)
    first_home: dict[str, _Node] = {}
    for member in ordered:
        if member.content_sha256 is not None:
            first_of_content = first_home.setdefault(member.content_sha256, home(member))
            link(first_of_content, home(member), "same_content", member.content_sha256[:16])
    by_path = {member.path: home(member) for member in ordered}
    for one, two in sorted(sorted((members[a].path, members[b].path)) for a, b in near_duplicates):
        link(by_path[one], by_path[two], "near_duplicate", f"{one} ~ {two}")

    stated, unstated = defaultdict[int, list[str]](list), dict[int, str]()
    for node, place in number.items():
        if node[0] == "group":
            stated[int(components.label[place])].append(node[1])
    label_of = [int(components.label[number[home(member)]]) for member in members]
    for label, member in zip(label_of, members, strict=True):
        content = member.content_sha256
        name = f"source {member.source_id}" if content is None else f"video {content[:16]}"
        unstated[label] = min(name, unstated.get(label, name))
    group_ids = {
        label: f"{min(stated[label])}+{len(stated[label]) - 1} more"
        if len(stated[label]) > 1
        else (*stated[label], name)[0]
        for label, name in unstated.items()
    }
    merges = []
    for place, why, evidence, one, two in links:
        group_id = group_ids.get(int(components.label[place]))
        if group_id is not None:  # a component without a member has no id
            merges.append(Merge(group_id, why, evidence, one, two))
    return Grouping(tuple(group_ids[label] for label in label_of), tuple(merges))
