"""What a stage measured last, read from the end of its metric log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOK_BYTES = 64_000


@dataclass(frozen=True)
class LastMetric:
    """One value of the log; ``loss`` where the newest step has one."""

    metric: str
    phase: str
    value: float | None
    step: int
    epoch: int

    def __str__(self) -> str:
        value = "not a number" if self.value is None else f"{self.value:.4g}"
        return f"{self.metric} {value} ({self.phase}) at step {self.step} of epoch {self.epoch}"


def last_metric(path: Path, attempt: int) -> LastMetric | None:
    """What attempt ``attempt`` logged last; None where it logged nothing or nothing that can be read.

    Only whole lines near the end are looked at: the last one may be half written.
    """
    newest: LastMetric | None = None
    for row in _rows_from_the_end(path):
        if row.get("attempt") != attempt:
            break
        found = _metric(row)
        if found is None:
            continue
        if newest is not None and (found.step, found.epoch) != (newest.step, newest.epoch):
            break
        if found.metric == "loss":
            return found
        newest = newest or found
    return newest


def _rows_from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - _LOOK_BYTES)
            stream.seek(start)
            data = stream.read()
    except OSError:
        return
    whole = data[: data.rfind(b"\n") + 1].splitlines()
    for line in reversed(whole[1:] if start else whole):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _metric(row: dict[str, Any]) -> LastMetric | None:
    try:
        value = None if row["value"] is None else float(row["value"])
        return LastMetric(str(row["metric"]), str(row["phase"]), value, int(row["step"]), int(row["epoch"]))
    except (KeyError, TypeError, ValueError):
        return None
