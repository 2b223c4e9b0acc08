"""The curves of any number of runs, each from its compacted copy where that can be believed, else from its logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from fvc_lib.analysis.compaction import read_compacted
from fvc_lib.analysis.log_lines import METRIC_LINES, LineCount, read_log_lines, skipped_notes
from fvc_lib.analysis.metric_curves import curves
from fvc_lib.analysis.records import Answer, LogFile, log_files, run_names
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class CurveFilter:
    """Which curves are wanted; empty means all of a kind."""

    metrics: Sequence[str] = ()
    phases: Sequence[str] = ()
    folds: Sequence[int] = ()

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows of ``frame`` that are wanted."""
        wanted = {"metric": self.metrics, "phase": self.phases, "fold": self.folds}
        chosen = [pl.col(column).is_in(list(values)) for column, values in wanted.items() if values]
        return frame.filter(*chosen) if chosen else frame


def read_curves(runs: Sequence[RunPaths], wanted: CurveFilter) -> Answer:
    """The wanted curves of ``runs``; ``queries.learning_curves`` tells columns and order."""
    runs = sorted(runs, key=lambda run: (path_to_text(run.run_id), run.root))
    names = run_names(runs)
    logs = [log_files(run, "metrics", name) for run, name in zip(runs, names, strict=True)]
    counts: dict[LogFile, LineCount] = {}
    problems: list[str] = []
    parts, rest = [], []
    for number, (run, files) in enumerate(zip(runs, logs, strict=True)):
        compacted = read_compacted(run, files)
        problems += compacted.problems
        if compacted.frame is None:
            rest.append(number)
        else:
            counts |= compacted.counts
            parts.append(wanted.apply(compacted.frame).select(_run_number(number), pl.all()))
    if rest or not parts:
        lines = read_log_lines([file for number in rest for file in logs[number]], METRIC_LINES)
        counts |= dict(zip(lines.files, lines.counts, strict=True))
        problems += lines.problems.values()
        owners = pl.Series("run", [number for number in rest for _ in logs[number]], dtype=pl.UInt32)
        found = wanted.apply(curves(lines))
        parts.append(found.select(owners.gather(found["file_number"]), pl.exclude("file_number")))
    frame = pl.concat(parts)
    if rest and len(parts) > 1:
        frame = frame.sort("run", maintain_order=True)
    run_ids = pl.Series("run_id", list(map(path_to_text, names)), dtype=pl.String)
    files = [file for files in logs for file in files]
    notes = (*problems, *skipped_notes(files, [counts[file] for file in files]))
    return Answer(frame.select(run_ids.gather(frame["run"]), pl.exclude("run")), notes)


def _run_number(number: int) -> pl.Expr:
    return pl.lit(number, dtype=pl.UInt32).alias("run")
