"""Make leakage groups: sets of videos that show the same footage and must not be divided by a split.

Two videos are linked by equal stated groups, equal source ids, equal content, or near perceptual hashes. A stated
group is one that the label source names, such as a cascade (in FVC-2018: a video and its near-duplicates). A leakage
group is a connected component of these links. Groups matter: on FVC-2018, an oracle that only recognises the cascade
scores AUC 0.996 if single videos are split, and 0.5 if whole groups are split.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

_Node = tuple[str, str]  # ("group", stated group), or ("source", source id) of a video without one


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A video file, or a row of a label table, with the facts that decide to which leakage group it belongs."""

    path: str  # unique name of the file, for the reports of merges
    source_id: str  # name of the video in the label source
    content_sha256: str | None  # hash of the file's content; None: a row of a label table, no file was read
    stated_group: str | None = None  # the group in the label source, if any


@dataclass(frozen=True)
class Merge:
    """A link between videos that joined two leakage groups which the label source states as separate.

    One or both of them may be a single video without a stated group.
    """

    group_id: str  # the joined group, which holds the videos of both
    why: str  # ``same_source``, ``same_content`` or ``near_duplicate``
    evidence: str  # the source id, the start of the content hash, or the two near-duplicate paths
    first: str  # name of one joined group: a stated group, or the path of a video without stated group
    second: str  # name of the other joined group, likewise


class Components:
    """Connected components of ``count`` items, which are numbered from 0.

    At first every item is a component of its own. ``join`` connects two items, and so joins their components.

    Attributes:
        label: component of each item, int64 (count,); connected items have equal labels.
    """

    def __init__(self, count: int) -> None:
        self.label = np.arange(count)
        self._next = np.arange(count)  # the next item of the same component; the items form a ring
        self._size = np.ones(count, np.int64)  # number of items in each component, by label

    def join(self, left: int, right: int) -> bool:
        """Connect two items; return False if they were connected already.

        The smaller of the two components gets the label of the larger one.
        """
        larger = int(self.label[left])
        smaller = int(self.label[right])
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
) -> tuple[tuple[str, ...], tuple[Merge, ...]]:
    """Make leakage groups: the connected components of the members and their links.

    Members are linked by equal source ids, equal contents, near hashes or equal stated groups. A missing stated group
    (None) is not a link.

    A component with one stated group has the name of that group. A component with several is named after the first in
    sorted order, such as ``f138+3 more``. A component without a stated group is called ``video <first 16 hex digits of
    its smallest content hash>``, or ``source <source id>`` if a member has no content hash.

    Args:
        members: the videos; two files of equal content are two members.
        near_duplicates: pairs of indices into ``members``; the perceptual hashes of these two are near.
        memberships: (source id, stated group) pairs of the label source. They include videos that are not in
            ``members``: a video listed in two cascades joins them even if it can no longer be fetched.

    Returns:
        (ids, merges): the group id of each member, in the order of ``members``, and the links that joined groups beyond
        what the label source states. Neither depends on the order of the arguments.

    Raises:
        IndexError: a near-duplicate position is out of range.
    """
    groups_of = defaultdict[str, set[str]](set)
    for source_id, group in memberships:
        groups_of[source_id].add(group)
    for member in members:
        if member.stated_group is not None:
            groups_of[member.source_id].add(member.stated_group)
    # Maps the path of each member to its node, sorted by path.
    node_of: dict[str, _Node] = {}
    for member in sorted(members, key=attrgetter("path")):
        groups = groups_of.get(member.source_id)
        node_of[member.path] = ("group", min(groups)) if groups else ("source", member.source_id)
    # Maps each node to its name: the stated group, or the first path of a member.
    all_groups = sorted(set[str]().union(*groups_of.values()))
    names: dict[_Node, str] = {("group", group): group for group in all_groups}
    for path, node in node_of.items():
        names.setdefault(node, path)
    number = {node: place for place, node in enumerate(names)}

    links = list[tuple[_Node, _Node, str, str]]()
    for source_id in sorted(groups_of):
        first, *others = sorted(groups_of[source_id])
        links += [(("group", first), ("group", other), "same_source", source_id) for other in others]
    content_of = {member.path: member.content_sha256 for member in members}
    first_node: dict[str, _Node] = {}
    for path, node in node_of.items():
        content = content_of[path]
        if content is not None:
            links.append((first_node.setdefault(content, node), node, "same_content", content[:16]))
    near_paths = (sorted((members[a].path, members[b].path)) for a, b in near_duplicates)
    for one, other in sorted(near_paths):
        links.append((node_of[one], node_of[other], "near_duplicate", f"{one} ~ {other}"))

    components = Components(len(number))
    smallest = list(names.values())  # the smallest name in each component, by label
    joined = list[tuple[int, str, str, str, str]]()
    for left, right, why, evidence in links:
        place = number[left]
        right_place = number[right]
        sides = sorted((smallest[components.label[place]], smallest[components.label[right_place]]))
        if components.join(place, right_place):
            smallest[components.label[place]] = sides[0]
            joined.append((place, why, evidence, *sides))

    places = [number[node_of[member.path]] for member in members]
    labels = [int(components.label[place]) for place in places]
    group_ids = dict[int, str]()
    for label, member in zip(labels, members, strict=True):
        content = member.content_sha256
        name = f"source {member.source_id}" if content is None else f"video {content[:16]}"
        group_ids[label] = min(name, group_ids.get(label, name))
    stated = defaultdict[int, list[str]](list)
    for (kind, name), place in number.items():
        if kind == "group":
            stated[int(components.label[place])].append(name)
    for label in group_ids.keys() & stated.keys():
        first, *others = stated[label]
        group_ids[label] = f"{first}+{len(others)} more" if others else first
    labelled = [(int(components.label[place]), facts) for place, *facts in joined]
    # A component without a member has no id.
    merges = [Merge(group_ids[label], *facts) for label, facts in labelled if label in group_ids]
    return tuple(group_ids[label] for label in labels), tuple(merges)
