"""Read JSONL logs while they are written and after a crash: good lines are kept, bad ones counted.

Python reads the files, so their names never reach SQL. DuckDB parses a table of lines.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from fvc_lib.analysis.read.records import Answer, LogFile
from fvc_lib.analysis.read.sql import ask
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.atomic_files import message_text, path_to_text
from fvc_lib.services.records.digests import damage_of


@dataclass(frozen=True)
class LineFormat:
    """The columns of a log with their DuckDB types, and the SQL condition of a good line."""

    columns: Mapping[str, str]
    good: str


METRIC_LINES = LineFormat(
    {
        "ts": "DOUBLE", "step": "BIGINT", "epoch": "BIGINT", "phase": "VARCHAR", "metric": "VARCHAR",
        "value": "DOUBLE", "flag": "VARCHAR", "fold": "BIGINT", "attempt": "BIGINT",
    },
    good="step IS NOT NULL AND phase IS NOT NULL AND metric IS NOT NULL AND (isfinite(value) OR flag IS NOT NULL)",
)  # fmt: skip

MEMORY_LINES = LineFormat(
    {
        "timestamp": "DOUBLE", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
        "batch_idx": "BIGINT", "global_step": "BIGINT", "allocated_mb": "DOUBLE", "reserved_mb": "DOUBLE",
        "max_allocated_mb": "DOUBLE", "total_memory_mb": "DOUBLE", "usage_percent": "DOUBLE", "free_mb": "DOUBLE",
        "device": "VARCHAR", "rank": "BIGINT", "rss_mb": "DOUBLE",
    },
    good="timestamp IS NOT NULL AND elapsed_seconds IS NOT NULL AND (rss_mb IS NOT NULL OR allocated_mb IS NOT NULL)",
)  # fmt: skip

EVENT_LINES = LineFormat(
    {
        "timestamp": "DOUBLE", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
        "batch_idx": "BIGINT", "global_step": "BIGINT", "kind": "VARCHAR", "message": "VARCHAR", "details": "JSON",
    },
    good="kind IS NOT NULL AND timestamp IS NOT NULL AND elapsed_seconds IS NOT NULL",
)  # fmt: skip


def read_log_lines(files: Sequence[LogFile], line_format: LineFormat) -> Answer:
    """Return the good lines of ``files`` in file and line order.

    A good line is one JSON object that satisfies ``line_format``. Torn, NUL-filled and glued lines are left out and
    counted in the notes. Columns: ``file_number run_id stage file_fold line`` and those of the format; ``line`` counts
    from 1.
    """
    contents, notes = [], []
    for file in files:
        try:
            if damage := damage_of(file.path):
                notes.append(f"{message_text(damage)} Its good lines are shown and may be wrong.")
            contents.append(file.path.read_bytes().decode("utf-8", "replace"))
        except OSError as error:
            contents.append("")
            notes.append(f"{path_to_text(file.path)} could not be read: {error.strerror}.")
    text = pl.Series("text", contents, dtype=pl.String).str.split("\n")
    lines = pl.DataFrame([text]).with_row_index("file_number")
    lines = lines.with_columns(line=pl.int_ranges(1, pl.col("text").list.len() + 1)).explode("text", "line")
    query = f"""
        SELECT file_number, line, {", ".join(f"fields.{name} AS {name}" for name in line_format.columns)},
               coalesce({line_format.good}, false) AS good
        FROM (SELECT *, TRY(from_json(text, '{json.dumps(dict(line_format.columns))}')) AS fields FROM lines)
        WHERE good OR NOT regexp_full_match(text, '\\s*')
    """
    parsed = ask(query, {"lines": lines})
    for number, bad in parsed.filter(~pl.col("good")).group_by("file_number", maintain_order=True).agg("line").rows():
        name, first = path_to_text(f"{files[number].run_id}/{files[number].path.name}"), ", ".join(map(str, bad[:3]))
        notes.append(f"{count_text(len(bad), 'line')} of {name} could not be read, the first: {first}.")
    owners = pl.DataFrame(
        {
            "file_number": range(len(files)),
            "run_id": [path_to_text(file.run_id) for file in files],
            "stage": [path_to_text(file.stage) for file in files],
            "file_fold": [file.fold for file in files],
        },
        schema={"file_number": pl.UInt32, "run_id": pl.String, "stage": pl.String, "file_fold": pl.Int64},
    )
    good = parsed.filter("good").drop("good").join(owners, on="file_number", how="left", maintain_order="left")
    return Answer(good.select(*owners.columns, "line", *line_format.columns), tuple(notes))


def curves(lines: pl.DataFrame) -> pl.DataFrame:
    """Return one row per step of each metric, in step order: the last attempt's last line.

    ``lines`` are those of ``METRIC_LINES``.
    """
    curve = ["run_id", "stage", "fold", "phase", "metric", "step", "file_number"]
    frame = lines.with_columns(
        pl.coalesce("fold", "file_fold").alias("fold"),
        pl.when(pl.col("value").is_finite()).then("value").alias("value"),
        pl.col("attempt").fill_null(1),
        # Sorting a million texts takes three times as long as sorting their numbers.
        *(pl.col(name).cast(pl.Enum(lines[name].unique().sort())) for name in ("run_id", "stage", "phase", "metric")),
    ).sort(*curve, "attempt", "line", nulls_last=True)
    is_last = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(-1)) for name in curve)
    at_end = pl.int_range(pl.len()) == pl.len() - 1
    columns = ["run_id", "stage", "fold", "phase", "metric", "step", "epoch", "value", "flag", "attempt", "ts"]
    texts = dict.fromkeys(("run_id", "stage", "phase", "metric"), pl.String)
    return frame.filter(is_last | at_end).select(columns).cast(texts)  # type: ignore[arg-type]


# Numbers and texts in the details of memory events, which become columns.
_EVENT_NUMBERS = (
    "asked_mb", "used_mb", "budget_mb", "predicted_peak_mb", "measured_step_mb", "baseline_mb", "usage_percent",
)  # fmt: skip
_EVENT_COUNTS = (
    "micro_batch", "micro_batch_before", "micro_batch_next", "micro_batch_planned", "to_step", "lost_steps",
)  # fmt: skip
_EVENT_TEXTS = {"where": "happened_in", "context_file": "context_file", "device": "device"}


def read_samples(files: Sequence[LogFile]) -> Answer:
    """Return the memory samples of ``files`` in file and line order.

    Columns: ``run_id stage fold attempt seconds line`` and those of the log. ``attempt`` counts the starts of a stage
    from 1: its monotonic clock restarts at zero. ``seconds`` is the time at work in all attempts; pauses between them
    do not count.
    """
    lines = read_log_lines(files, MEMORY_LINES)
    query = f"""
        WITH steps AS (
            SELECT *, lag(elapsed_seconds) OVER (PARTITION BY file_number ORDER BY line) AS before FROM lines
        ), moved AS (
            SELECT *, before IS NULL OR elapsed_seconds < before AS starts,
                   elapsed_seconds - CASE WHEN elapsed_seconds >= before THEN before ELSE 0 END AS moved
            FROM steps
        )
        SELECT run_id, stage, file_fold AS fold, count(*) FILTER (starts) OVER so_far AS attempt,
               sum(moved) OVER so_far AS seconds, line, {", ".join(MEMORY_LINES.columns)}
        FROM moved WINDOW so_far AS (PARTITION BY file_number ORDER BY line)
        ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame}), lines.notes)


def read_events(files: Sequence[LogFile], samples: pl.DataFrame) -> Answer:
    """Return the memory events of ``files`` on the clock of ``samples`` (``read_samples``).

    An event belongs to the attempt whose clock started at the same time. Columns: ``run_id stage fold attempt seconds
    line phase epoch batch_idx global_step kind message details happened_in context_file device`` and the numbers of
    the details; ``details`` is JSON text.
    """
    lines = read_log_lines(files, EVENT_LINES)
    fields = [f"details->>'$.{name}' AS {column}" for name, column in _EVENT_TEXTS.items()]
    fields += [f"try_cast(details->>'$.{name}' AS DOUBLE) AS {name}" for name in _EVENT_NUMBERS]
    fields += [f"try_cast(details->>'$.{name}' AS BIGINT) AS {name}" for name in _EVENT_COUNTS]
    query = f"""
        WITH clocks AS (
            SELECT run_id, stage, fold, attempt, min(timestamp - elapsed_seconds) AS began_at,
                   min(seconds - elapsed_seconds) AS seconds_before
            FROM samples GROUP BY ALL
        ), matched AS (
            SELECT lines.*, clocks.attempt, seconds_before
            FROM lines LEFT JOIN clocks ON lines.run_id = clocks.run_id AND lines.stage = clocks.stage
                                       AND lines.file_fold IS NOT DISTINCT FROM clocks.fold
            QUALIFY row_number() OVER (
                PARTITION BY file_number, line
                ORDER BY abs(timestamp - elapsed_seconds - began_at) NULLS LAST, clocks.attempt DESC
            ) = 1
        )
        SELECT run_id, stage, file_fold AS fold, coalesce(attempt, 1) AS attempt,
               elapsed_seconds + coalesce(seconds_before, 0) AS seconds,
               line, phase, epoch, batch_idx, global_step, kind, coalesce(message, '') AS message,
               CAST(details AS VARCHAR) AS details, {", ".join(fields)}
        FROM matched ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame, "samples": samples}), lines.notes)
