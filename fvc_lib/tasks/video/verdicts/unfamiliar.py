"""What a run's videos say nothing about: codecs, sizes, lengths and rates beyond theirs, and copies of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.near_duplicates import near_duplicate_links

_SLACK = 0.1
_TAIL = 0.01
_FACTS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], float | None]]] = {
    "shorter side": ("pixels", lambda facts: min(facts["width"], facts["height"])),
    "longer side": ("pixels", lambda facts: max(facts["width"], facts["height"])),
    "length": ("seconds", lambda facts: facts["duration_seconds"]),
    "frame rate": ("frames a second", lambda facts: facts["frames_per_second"]),
    "bit rate": ("bits a second", lambda facts: facts["bits_per_second"]),
}
FAMILIARITY = (
    "Unfamiliar is a codec that no video of the run has, and a side, length, frame rate or bit rate more than a tenth "
    "below the 1st or above the 99th percentile of the run's videos, or not known where theirs is."
)


class Familiar:
    """The range of the run's videos; ``rows`` is INDEX."""

    def __init__(self, rows: pl.DataFrame) -> None:
        facts = rows.select(
            "codec", "width", "height", "duration_seconds", "frames_per_second", "bits_per_second"
        ).to_dicts()
        self.codecs = frozenset(row["codec"] for row in facts)
        self._ranges: dict[str, tuple[float, float] | None] = {}
        self._some_unknown: set[str] = set()
        for name, (_, of) in _FACTS.items():
            values = [of(row) for row in facts]
            known = np.array([value for value in values if value is not None])
            if known.size < len(values):
                self._some_unknown.add(name)
            low, high = (
                (np.quantile(known, _TAIL, method="lower"), np.quantile(known, 1 - _TAIL, method="higher"))
                if known.size
                else (0.0, 0.0)
            )
            self._ranges[name] = (float(low), float(high)) if known.size else None
        self.share_outside = sum(bool(self.reasons(row)) for row in facts) / max(1, len(facts))

    def reasons(self, facts: Mapping[str, Any]) -> list[str]:
        """In what a video is outside, a sentence each; ``facts``: of its probe, named as in INDEX."""
        found = []
        if facts["codec"] not in self.codecs:
            found.append(f"Unfamiliar: codec {facts['codec']}; the run's videos: {', '.join(sorted(self.codecs))}.")
        for name, (unit, of) in _FACTS.items():
            value, known = of(facts), self._ranges[name]
            if value is None:
                if name not in self._some_unknown:
                    found.append(f"Unfamiliar: its {name} is not known.")
            elif known is None:
                found.append(f"Unfamiliar: the {name} of the run's videos is not known.")
            elif not known[0] * (1 - _SLACK) <= value <= known[1] * (1 + _SLACK):
                low, high = (_shown(end) for end in known)
                found.append(f"Unfamiliar: {name} {_shown(value)} {unit}; the run's videos: {low} to {high}.")
        return found


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


_PAIRED = 50  # of more videos that show one footage all count as shown, so that time does not grow with them


def copied_rows(of_run: Sequence[str | None], new: Sequence[str | None], max_bits: int) -> list[list[int]]:
    """Which of the run's videos each new one shows the same footage as, by their places; by perceptual hashes.

    One new video does not stand between another and the run's: each is compared with the run's alone. A real and what
    was made of it may both be found.
    """
    if not max_bits:
        return [[] for _ in new]
    joined = Components(len(of_run) + len(new))
    for pair in near_duplicate_links([*of_run, *new], max_bits):
        joined.join(*pair)
    found: list[list[int]] = []
    for place, text in enumerate(new, start=len(of_run)):
        near = np.flatnonzero(joined.label[: len(of_run)] == joined.label[place]).tolist()
        if len(near) > _PAIRED:
            links = near_duplicate_links([*(of_run[each] for each in near), text], max_bits)
            found.append(near if any(other == len(near) for _, other in links) else [])
        else:
            found.append([each for each in near if near_duplicate_links([of_run[each], text], max_bits)])
    return found
