"""Lines of metric logs as curves: one row per step of each metric, the last attempt's, in step order."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from fvc_lib.analysis.log_lines import LogLines
from fvc_lib.analysis.records import LogFile
from fvc_lib.services.path_text import path_to_text

SCHEMA = pl.Schema(
    {
        "stage": pl.String,
        "fold": pl.Int64,
        "phase": pl.String,
        "metric": pl.String,
        "step": pl.Int64,
        "epoch": pl.Int64,
        "value": pl.Float64,
        "flag": pl.String,
        "attempt": pl.Int64,
        "ts": pl.Float64,
    }
)


def curves(lines: LogLines) -> pl.DataFrame:
    """The rows of ``lines`` that count, as curves.

    Where a file has the same (step, metric, phase, fold) several times, as after a resume, the last attempt counts;
    within an attempt, the last line.

    Returns:
        ``file_number`` and the columns of ``SCHEMA``, folder by folder of the files in their order, and within a
        folder by stage, fold (none last), phase, metric and step. ``value`` is null where ``flag`` says nan, inf or
        -inf.
    """
    frame = lines.frame.select(
        pl.Series("place", _places(lines.files), dtype=pl.UInt32).gather(lines.frame["file_number"]),
        "file_number",
        "line",
        "stage",
        pl.coalesce("fold", "file_fold").alias("fold"),
        # As numbers in the texts' own order: to sort a million texts takes three times as long.
        *(pl.col(name).cast(pl.Enum(lines.frame[name].unique().sort())) for name in ("phase", "metric")),
        "step",
        "epoch",
        pl.when(pl.col("value").is_finite()).then("value").alias("value"),
        "flag",
        pl.col("attempt").fill_null(1),
        "ts",
    )
    curve = ["place", "fold", "phase", "metric", "step", "file_number"]
    frame = frame.sort(*curve, "attempt", "line", nulls_last=True)
    is_last = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(-1)) for name in curve)
    at_end = pl.int_range(pl.len()) == pl.len() - 1
    return frame.filter(is_last | at_end).select("file_number", *SCHEMA).cast({"phase": pl.String, "metric": pl.String})


def _places(files: Sequence[LogFile]) -> list[int]:
    """Where each file's rows come: folders in the order given, stages of a folder by name."""
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(file.path.parent for file in files))}
    keys = [(folders[file.path.parent], path_to_text(file.stage)) for file in files]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]
