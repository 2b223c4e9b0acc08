"""Videos whose ids look as if they came from one another: groups that a table does not state.

What is found is a suspicion. Ids may be alike for no reason, as counters are, and copies may have ids that differ.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_VIDEO_ENDINGS = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".gif"})
# A copy's ending: a number of few digits, a compression level, or what was done to it.
_SUFFIX = re.compile(
    r"(?:[_\-. ]+(?:\d{1,3}|c\d\d|q\d\d|v\d|raw|real|fake|copy|orig|original|edited|crop|cropped|aug|face|swap|swapped|"
    r"clip\d*|part\d*|seg\d*|frame\d*|scene\d*)|\s*\(\d+\))$",
    re.IGNORECASE,
)
_TWO_SEQUENCES = re.compile(r"(\d{3})_(\d{3})")  # FaceForensics++: target_source
_ONE_SEQUENCE = re.compile(r"\d{3}")
_YOUTUBE = re.compile(r"(?<![A-Za-z0-9])([A-Za-z0-9_-]{11})(?=$|[_\-. ])")
_MOST_ALIKE = 100  # videos; a name that more share, or a fifth of all, is a habit of naming
_KINDS = {
    "same name": "the same file name in several folders or formats",
    "name and suffix": "one name with different endings, such as clip and clip_2",
    "shared sequence": "numbers as in FaceForensics++, where 000_003 is made of 000 and 003",
    "YouTube id": "the same eleven characters, as of a YouTube video, in several ids",
}


@dataclass(frozen=True)
class Suspicion:
    """One kind of likeness between ids."""

    kind: str  # its name, and ``says``, what it is in words
    says: str
    # Ids that share it, two or more each, of more than one group where groups are known.
    families: tuple[tuple[str, ...], ...]
    num_both_labels: int  # families that hold reals and fakes

    @property
    def num_videos(self) -> int:
        """How many videos have a likeness of this kind."""
        return len({video for family in self.families for video in family})


def suspicions(ids: Sequence[str], labels: Sequence[str], groups: Sequence[str | None]) -> list[Suspicion]:
    """Return the kinds of likeness among ``ids`` (N,) that ``groups`` (N,) do not explain; None is an unknown group."""
    label_of, group_of = dict(zip(ids, labels, strict=True)), dict(zip(ids, groups, strict=True))
    most = max(2, min(_MOST_ALIKE, len(ids) // 5))
    found = []
    for kind, families in _families(ids).items():
        apart = [
            tuple(sorted(family))
            for family in families
            if 2 <= len(family) <= most and len({group_of[video] or f"alone {video}" for video in family}) > 1
        ]
        if apart:
            both = sum(len({label_of[video] for video in family}) > 1 for family in apart)
            found.append(Suspicion(kind, _KINDS[kind], tuple(sorted(apart)), both))
    return found


def suspected_groups(ids: Sequence[str], groups: Sequence[str | None], found: Iterable[Suspicion]) -> list[str]:
    """Group ids (N,) in which the families of ``found`` are joined to what ``groups`` say."""
    parent = {video: video for video in ids}

    def root(video: str) -> str:
        while parent[video] != video:
            parent[video] = parent[parent[video]]
            video = parent[video]
        return video

    def join(members: Iterable[str]) -> None:
        first, *others = (root(video) for video in members)
        for other in others:
            parent[root(other)] = root(first)

    stated: defaultdict[str, list[str]] = defaultdict(list)
    for video, group in zip(ids, groups, strict=True):
        if group is not None:
            stated[group].append(video)
    for members in (*stated.values(), *(family for each in found for family in each.families)):
        join(members)
    return [root(video) for video in ids]


def _families(ids: Sequence[str]) -> dict[str, list[set[str]]]:
    by_kind: dict[str, defaultdict[str, set[str]]] = {kind: defaultdict(set) for kind in _KINDS}
    for video in ids:
        for kind, key in _keys(video):
            by_kind[kind][key].add(video)
    # An ending tells something only where the name without it is shared by more than those of the very same name.
    same = {frozenset(family) for family in by_kind["same name"].values()}
    suffixed = [family for family in by_kind["name and suffix"].values() if frozenset(family) not in same]
    return {kind: suffixed if kind == "name and suffix" else list(keys.values()) for kind, keys in by_kind.items()}


def _keys(video: str) -> Iterator[tuple[str, str]]:
    path = PurePosixPath(video.replace("\\", "/"))
    stem = path.stem if path.suffix.lower() in _VIDEO_ENDINGS else path.name
    lower = stem.lower()
    yield "same name", lower
    if _ONE_SEQUENCE.fullmatch(stem):
        yield "shared sequence", stem
    elif pair := _TWO_SEQUENCES.fullmatch(stem):
        yield "shared sequence", pair[1]
        yield "shared sequence", pair[2]
    else:
        base = lower
        while (shorter := _SUFFIX.sub("", base)) != base and shorter:
            base = shorter
        if len(base) >= 3:  # nor do a letter and a number, as v_1, name a source
            yield "name and suffix", base
    for match in _YOUTUBE.finditer(stem):
        if _looks_random(match[1]):
            yield "YouTube id", match[1]


def _looks_random(text: str) -> bool:
    """Words are of one case, and numbers are of digits alone; a random id of eleven characters hardly ever is."""
    inside = text[1:]
    return (
        any(c.islower() for c in text)
        and any(c.isupper() for c in inside)
        and (any(c.isdigit() or c in "_-" for c in text) or sum(c.isupper() for c in inside) >= 2)
    )
