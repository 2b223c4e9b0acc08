"""Dev mode: a small part of a corpus, chosen by seed, on which a run takes minutes instead of hours."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence


def dev_subset(
    names: Sequence[str], strata: Sequence[str | None], parts: Sequence[str], *, per_stratum: int, seed: int
) -> list[int]:
    """Places of the rows that stay.

    Of every stratum (class) of the training part at most ``per_stratum`` rows stay. Validation and test keep the same
    share of each stratum as training does, and at least one row, so that they stay representative of one another but
    cost no more than they are worth; a stratum that training does not have keeps what the others keep together. Rows
    are chosen in the order of a hash of their names: a larger subset contains the smaller ones.

    Args:
        names: (N,), unique, from content.
        strata: (N,).
        parts: (N,), ``train``, ``validation`` or ``test``.
        per_stratum: at least 1.
        seed: chooses.

    Returns:
        Places in rising order.
    """
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (stratum, part) in enumerate(zip(strata, parts, strict=True)):
        places[part, "" if stratum is None else f"={stratum}"].append(place)
    sizes = {stratum: len(found) for (part, stratum), found in places.items() if part == "train"}
    kept_overall = sum(min(size, per_stratum) for size in sizes.values()) / max(1, sum(sizes.values()))
    kept = []
    for (part, stratum), found in places.items():
        share = min(1.0, per_stratum / sizes[stratum]) if stratum in sizes else kept_overall
        count = min(len(found), per_stratum) if part == "train" else max(1, round(share * len(found)))
        kept.extend(sorted(found, key=lambda place: _order(seed, names[place]))[:count])
    return sorted(kept)


def _order(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"dev\x1f{seed}\x1f{name}".encode("utf-8", "surrogateescape")).digest()
