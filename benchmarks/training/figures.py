"""Figures with their spread, the targets they have to reach, and the table of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.decode.report import table

Verdict = Literal["met", "missed", "undecided", ""]


@dataclass(frozen=True)
class Figure:
    """One thing that was measured several times.

    Attributes:
        group: which training it is of.
        values: in ``unit``; none where it could not be measured.
        relation: of the median to ``target``; None has no target.
        worst_counts: the target is for the worst value instead of the median.
    """

    group: str
    what: str
    unit: str
    values: tuple[float, ...]
    relation: Literal["at most", "at least"] = "at most"
    target: float | None = None
    worst_counts: bool = False

    @property
    def median(self) -> float:
        """NaN without values."""
        return statistics.median(self.values) if self.values else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the median, whatever the distribution: between two of the values in order. Of fewer than six values
        there is none, and they are all in it.
        """
        ordered, count = sorted(self.values), len(self.values)
        if not ordered:
            return math.nan, math.nan
        reach = math.ceil(0.98 * math.sqrt(count))
        return ordered[max(0, count // 2 - reach)], ordered[min(count - 1, (count - 1) // 2 + reach)]

    @property
    def judged(self) -> float:
        """What is held against the target."""
        if not self.worst_counts or not self.values:
            return self.median
        return max(self.values) if self.relation == "at most" else min(self.values)

    @property
    def verdict(self) -> Verdict:
        """Met or missed by what was measured; undecided where chance alone may have put the median on its side."""
        if self.target is None or not self.values:
            return ""
        if not self.worst_counts and self.interval[0] < self.target < self.interval[1]:
            return "undecided"
        reached = self.judged <= self.target if self.relation == "at most" else self.judged >= self.target
        return "met" if reached else "missed"

    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        target = "" if self.target is None else f"{self.relation} {self.target:,g} {self.unit}"
        if not self.values:
            return self.group, self.what, target, "", "", "", "", "not measured"
        low, high = self.interval
        return (
            self.group,
            self.what,
            target,
            shown(self.judged, self.unit),
            f"{shown(low)} to {shown(high)}",
            shown(min(self.values)),
            shown(max(self.values)),
            {"missed": "**missed**"}.get(self.verdict, self.verdict),
        )

    def document(self) -> dict[str, object]:
        """As JSON values, the verdict included."""
        found = {"median": self.median, "interval": self.interval, "verdict": self.verdict}
        return {**asdict(self), **(found if self.values else {"verdict": "not measured"})}


def shown(value: float, unit: str = "") -> str:
    """Three digits that count."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.4f}"
    return f"{text} {unit}".rstrip()


def figures_table(figures: Iterable[Figure]) -> str:
    """One line a figure."""
    head = ("of", "what", "target", "median", "95 % of it", "least", "most", "")
    return table(head, [figure.row() for figure in figures])


def summary(figures: Sequence[Figure]) -> str:
    """How many targets are met."""
    verdicts = [figure.verdict or "not measured" for figure in figures if figure.target is not None]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts)) + "."


def of_shares(group: str, what: str, shares: Mapping[str, Sequence[float]], limit: float | None) -> list[Figure]:
    """Overheads in percent by clock. All threads' CPU time and the wall have the target; the training's own thread is
    part of the first.
    """
    names = {"process": "CPU of all threads", "wall": "wall", "thread": "CPU of its own thread"}
    return [
        Figure(group, f"{what}: {names[clock]}", "%", tuple(100 * share for share in shares[clock]), target=limit)
        if clock != "thread"
        else Figure(group, f"{what}: {names[clock]}", "%", tuple(100 * share for share in shares[clock]))
        for clock in names
    ]
