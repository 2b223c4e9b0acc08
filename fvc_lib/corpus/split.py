"""One split of a corpus into train, validation and test: of whole groups, even in every stratum, official where given.

The corpus's own parts are kept. A part that it does not have is cut from the groups that are its training part or have
no part: so an official train and test leave the test alone and give validation a share of the training groups, and a
corpus without any split is divided in three. Which group goes where is drawn from stable hashes of the groups' names,
so it depends on no order, path, or number of processes.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import PARTS

_MOST_LISTED = 20


@dataclass(frozen=True)
class PartSplit:
    """In which part each row is.

    Attributes:
        parts: ``train``, ``validation`` or ``test`` of each row, in the order of the rows.
        sources: ``official`` where a row is in the part that its corpus says, else ``made``.
        notes: sentences about what was made, with counts.
    """

    parts: tuple[str, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def empty_parts(self) -> tuple[str, ...]:
        """Parts that no row is in: there were fewer groups than parts, or the official split names no such row."""
        return tuple(part for part in PARTS if part not in self.parts)


@dataclass
class _Group:
    """What a group's rows say together."""

    num_rows: int = 0
    strata: Counter[str] = field(default_factory=Counter)
    official: set[str] = field(default_factory=set)

    @property
    def stratum(self) -> str:
        """The commonest of its rows; the first by name of equally common ones."""
        return min(self.strata, key=lambda name: (-self.strata[name], name))


def split_parts(
    groups: Sequence[str],
    strata: Sequence[str | None],
    official: Sequence[str | None],
    *,
    validation_share: float,
    test_share: float,
    seed: int,
) -> PartSplit:
    """Put N rows into parts so that no group is in two and every stratum is in all of them.

    A stratum gives each part that is made its share of the stratum's groups, rounded, and at least one; they are taken
    evenly over the groups' sizes, but for groups that alone exceed the part's share of the rows, which are trained on.
    A stratum with fewer groups than parts to fill stays in train, unless a part would have no group at all. Systematic
    sampling over a sorted list: W. G. Cochran, "Sampling Techniques" (1977), chapter 8.

    Args:
        groups: (N,), what must stay together.
        strata: (N,), the class or whatever else is to be spread evenly; None is a stratum like others. A group counts
            as the stratum that most of its rows have.
        official: (N,), the part the corpus says, or None. A group with one stated part has it for all rows.
        validation_share: share in (0, 1) of the groups left after the test part.
        test_share: share in (0, 1) of the groups that are to be divided.
        seed: chooses between equally good splits.

    Raises:
        DataError: no rows, or an official part of another name.
        LeakageError: a group is in two parts of the official split; the groups are listed.
        ValueError: arguments of different lengths.
    """
    found = _gather(groups, strata, official)
    _refuse_straddling(found)
    stated = {name: next(iter(group.official)) for name, group in found.items() if group.official}
    missing = [part for part in ("test", "validation") if part not in stated.values()]
    shares = {"test": test_share, "validation": validation_share}
    part_of = {name: stated.get(name, "train") for name in found}
    free = sorted(name for name, part in part_of.items() if part == "train")
    rare = _cut(found, free, part_of, {part: shares[part] for part in missing}, seed)
    _fill_empty(found, free, part_of, missing, seed)
    parts = tuple(part_of[group] for group in groups)
    sources = tuple("official" if part == said else "made" for part, said in zip(parts, official, strict=True))
    return PartSplit(parts, sources, tuple(_notes(part_of, stated, missing, rare)))


def _gather(groups: Sequence[str], strata: Sequence[str | None], official: Sequence[str | None]) -> dict[str, _Group]:
    if not groups:
        raise DataError("a split of no rows: got nothing to divide, wanted at least one group. See what was rejected.")
    unknown = sorted({said for said in official if said is not None} - set(PARTS))
    if unknown:
        raise DataError(f"official split: got the part {unknown[0]!r}, wanted {', '.join(PARTS)} or nothing.")
    found: defaultdict[str, _Group] = defaultdict(_Group)
    for name, stratum, said in zip(groups, strata, official, strict=True):
        group = found[name]
        group.num_rows += 1
        group.strata["" if stratum is None else f"={stratum}"] += 1  # None is no name that a stratum could have
        if said is not None:
            group.official.add(said)
    return dict(found)


def _refuse_straddling(found: dict[str, _Group]) -> None:
    both = sorted(name for name, group in found.items() if len(group.official) > 1)
    if both:
        shown = "; ".join(f"{name!r} in {' and '.join(sorted(found[name].official))}" for name in both[:_MOST_LISTED])
        more = f"; and {len(both) - _MOST_LISTED} more" if len(both) > _MOST_LISTED else ""
        raise LeakageError(
            f"leakage: the official split divides {len(both)} groups: {shown}{more}. Put each of them into one part, "
            "or leave the split away so that one is made."
        )


def _cut(
    found: dict[str, _Group], free: Iterable[str], part_of: dict[str, str], shares: dict[str, float], seed: int
) -> list[str]:
    """Move groups of ``free`` into the parts of ``shares``, stratum by stratum; returns strata too small for that."""
    by_stratum: defaultdict[str, list[str]] = defaultdict(list)
    for name in free:
        by_stratum[found[name].stratum].append(name)
    rare = []
    for stratum in sorted(by_stratum):
        names = by_stratum[stratum]
        if len(names) <= len(shares):
            rare.append(stratum)
            continue
        left = sorted(names, key=lambda name: (found[name].num_rows, _hash(seed, "order", name)))
        for number, (part, share) in enumerate(shares.items()):
            still_needed = len(shares) - number  # a group for train and for each part after this one
            count = min(max(1, round(share * len(left))), len(left) - still_needed)
            chosen = set(_chosen(found, left, share, count, _hash(seed, part, stratum)))
            part_of.update(dict.fromkeys(chosen, part))
            left = [name for name in left if name not in chosen]
    return rare


def _chosen(found: dict[str, _Group], ordered: list[str], share: float, count: int, seed: int) -> list[str]:
    """``count`` groups spread evenly over ``ordered`` (by size), without oversized ones where others suffice."""
    most_rows = max(share * sum(found[name].num_rows for name in ordered), found[ordered[0]].num_rows)
    fitting = [name for name in ordered if found[name].num_rows <= most_rows]
    pool = fitting if len(fitting) >= count else ordered[:count]
    places = np.floor((np.arange(count) + np.random.default_rng(seed).random()) * len(pool) / count).astype(int)
    return [pool[place] for place in places]


def _fill_empty(
    found: dict[str, _Group], free: Iterable[str], part_of: dict[str, str], missing: Iterable[str], seed: int
) -> None:
    """Where every stratum was too small, give an empty part one group of the stratum that has most left in train."""
    for part in missing:
        training = [name for name in free if part_of[name] == "train"]
        if part in part_of.values() or len(training) < 2:
            continue
        left = Counter(found[name].stratum for name in training)
        chosen = min(training, key=lambda name: (-left[found[name].stratum], _hash(seed, part, name)))
        part_of[chosen] = part


def _notes(
    part_of: dict[str, str], stated: dict[str, str], missing: Sequence[str], rare: Sequence[str]
) -> Iterable[str]:
    counts = Counter(part_of.values())
    if stated:
        kept = Counter(stated.values())
        told = ", ".join(f"{part} with {kept[part]:,} groups" for part in PARTS if kept[part])
        yield f"The corpus's own split is kept: {told}."
    if missing:
        made = " and ".join(f"{part} ({counts[part]:,} groups)" for part in missing)
        of = f"the {len([p for p in stated.values() if p == 'train']):,} official training groups" if stated else ""
        alone = f"{len(part_of) - len(stated):,} groups without a part" if len(stated) < len(part_of) else ""
        yield f"Made by seed: {made}, cut from {' and '.join(text for text in (of, alone) if text)}."
    elif len(stated) < len(part_of):
        yield f"{len(part_of) - len(stated):,} groups without an official part are trained on."
    if rare:
        names = ", ".join(repr(name[1:]) if name else "those without a class" for name in rare[:_MOST_LISTED])
        more = f" and {len(rare) - _MOST_LISTED} more" if len(rare) > _MOST_LISTED else ""
        yield f"{len(rare)} strata have too few groups to be in every part and are trained on: {names}{more}."


def _hash(seed: int, *parts: str) -> int:
    text = "\x1f".join((str(seed), *parts))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")
