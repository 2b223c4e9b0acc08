"""Reads JSONL files while they are written and after any crash: good lines kept, bad ones counted and told where.

File names never reach SQL: Python reads the bytes, block by block, and DuckDB sees a table of lines. So a name with
quotes, brackets or non-UTF-8 bytes is just a name, and a file of any size takes the memory of its good lines alone.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as arrow

from fvc_lib.analysis.read.records import Answer, LogFile
from fvc_lib.analysis.read.sql import ask, connect_shared
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.atomic_files import message_text, path_to_text
from fvc_lib.services.records.digests import damage_of

_BLOCK_BYTES = 1 << 23  # stays in the caches, and its memory is used again: fresh pages cost more than parsing
_TOLD_LINES = 3
_TOLD_FILES = 10


@dataclass(frozen=True)
class LineFormat:
    """The columns looked for in each line (DuckDB types) and the SQL condition that makes a line a good one."""

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
        "timestamp": "VARCHAR", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
        "batch_idx": "BIGINT", "global_step": "BIGINT", "allocated_mb": "DOUBLE", "reserved_mb": "DOUBLE",
        "max_allocated_mb": "DOUBLE", "total_memory_mb": "DOUBLE", "usage_percent": "DOUBLE", "free_mb": "DOUBLE",
        "device": "VARCHAR", "rank": "BIGINT", "rss_mb": "DOUBLE",
    },
    good="timestamp IS NOT NULL AND (rss_mb IS NOT NULL OR allocated_mb IS NOT NULL)",
)  # fmt: skip

EVENT_LINES = LineFormat(
    {
        "timestamp": "VARCHAR", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
        "batch_idx": "BIGINT", "global_step": "BIGINT", "kind": "VARCHAR", "message": "VARCHAR", "details": "JSON",
    },
    good="kind IS NOT NULL AND (timestamp IS NOT NULL OR elapsed_seconds IS NOT NULL)",
)  # fmt: skip


@dataclass(frozen=True)
class LineCount:
    """How many lines a file has, blank ones apart, how many are left out, and the first of these (1-based)."""

    num_lines: int = 0
    num_bad: int = 0
    first_bad: tuple[int, ...] = ()


@dataclass(frozen=True)
class LogLines:
    """Good lines of several files (``line`` is 1-based), and by a file's number what is wrong with the whole of it."""

    frame: pl.DataFrame
    files: tuple[LogFile, ...]
    counts: tuple[LineCount, ...]
    problems: Mapping[int, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, what could not be read."""
        return (*self.problems.values(), *skipped_notes(self.files, self.counts))


def read_log_lines(files: Sequence[LogFile], line_format: LineFormat) -> LogLines:
    """The good lines of ``files`` in file and line order.

    A line is good when it is one JSON object whose columns satisfy ``line_format``; torn, NUL-filled and glued lines
    are not and are counted, file by file. Blank lines count as nothing.
    """
    names = list(line_format.columns)
    structure = json.dumps(dict(line_format.columns))
    # TRY parses once; json_valid before from_json would parse twice. Only lines without a good object can be blank.
    query = f"""
        SELECT * EXCLUDE (text), coalesce({line_format.good}, false) AS good FROM (
            SELECT owner, line, text, {", ".join(f"fields.{name} AS {name}" for name in names)}
            FROM (SELECT *, TRY(from_json(text, '{structure}')) AS fields FROM lines)
        ) WHERE good OR NOT regexp_full_match(text, '\\s*')
    """
    problems: dict[int, str] = {}
    with connect_shared() as connection:
        parts = []
        for block in _blocks(files, problems):
            connection.register("lines", block)
            parts.append(connection.sql(query).pl())
    rows = pl.concat(parts)
    kept = rows.filter("good")
    frame = kept.select(*_owner_columns(files, kept["owner"]), "line", *names)
    return LogLines(frame, tuple(files), _counted(rows, len(files)), problems)


def skipped_notes(files: Sequence[LogFile], counts: Sequence[LineCount]) -> tuple[str, ...]:
    """In words, how many lines were left out and where; nothing when none were."""
    bad = [(file, count) for file, count in zip(files, counts, strict=True) if count.num_bad]
    if not bad:
        return ()
    total, num_lines = sum(count.num_bad for _, count in bad), sum(count.num_lines for count in counts)
    where = [f"{path_to_text(f'{file.run_id}/{file.path.name}')}: {_bad_text(count)}" for file, count in bad]
    if len(where) > _TOLD_FILES:
        where = [*where[:_TOLD_FILES], f"and in {count_text(len(where) - _TOLD_FILES, 'more file')}"]
    verb = "is" if total == 1 else "are"
    return (
        f"{count_text(total, 'line')} of {num_lines:,} could not be read and {verb} left out ({'; '.join(where)}).",
    )


def _bad_text(count: LineCount) -> str:
    numbers = ", ".join(map(str, count.first_bad))
    more = count.num_bad - len(count.first_bad)
    return f"line {numbers}" if count.num_bad == 1 else f"lines {numbers}" + (f" and {more:,} more" if more else "")


def _blocks(files: Sequence[LogFile], problems: dict[int, str]) -> Iterator[arrow.Table]:
    """All lines of ``files`` as tables ``owner line text``, at least one; files that cannot be read go to problems."""
    parts: list[bytes] = []
    owners: list[int] = []
    first_lines: list[int] = []
    size = 0
    for owner, file in enumerate(files):
        line = 1
        try:
            if damage := damage_of(file.path):
                problems[owner] = f"{message_text(damage)} Its good lines are shown and may be wrong."
            for piece in _whole_lines(file.path):
                if parts and size + len(piece) > _BLOCK_BYTES:
                    yield _line_table(parts, owners, first_lines)
                    parts, owners, first_lines, size = [], [], [], 0
                parts.append(piece)
                owners.append(owner)
                first_lines.append(line)
                size += len(piece)
                line += piece.count(b"\n")
        except OSError as error:
            problems[owner] = f"{path_to_text(file.path)} could not be read: {error.strerror}."
    yield _line_table(parts, owners, first_lines)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The content of ``path`` in pieces that end where a line does; the last line is ended where it is not."""
    rest = b""
    with open(path, "rb", buffering=0, opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        while piece := stream.read(_BLOCK_BYTES):
            if cut := piece.rfind(b"\n") + 1:
                yield rest + piece[:cut]
                rest = piece[cut:]
            else:
                rest += piece
    if rest:
        yield rest + b"\n"


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes into would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _line_table(parts: Sequence[bytes], owners: Sequence[int], first_lines: Sequence[int]) -> arrow.Table:
    """Lines as an Arrow table over the bytes themselves; a million lines cost no Python object each."""
    content = b"".join(parts)
    try:
        content.decode()
    except UnicodeDecodeError:  # DuckDB takes Arrow text on trust, so what is no UTF-8 is replaced before it sees it
        content = content.decode("utf-8", "replace").encode()
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) + 1
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    text = arrow.Array.from_buffers(
        arrow.large_string(), ends.size, [None, arrow.py_buffer(starts), arrow.py_buffer(content)]
    )
    num_lines = np.array([part.count(b"\n") for part in parts], np.int64)
    before = np.cumsum(num_lines) - num_lines
    line = np.arange(ends.size, dtype=np.int64) + np.repeat(np.array(first_lines, np.int64) - before, num_lines)
    owner = np.repeat(np.array(owners, np.int64), num_lines)
    return arrow.table({"owner": arrow.array(owner), "line": arrow.array(line), "text": text})


def _owner_columns(files: Sequence[LogFile], owner: pl.Series) -> list[pl.Series]:
    """For each line the number of its file, whose it is, and the fold that the file's name gives."""
    texts = {
        "run_id": [path_to_text(file.run_id) for file in files],
        "stage": [path_to_text(file.stage) for file in files],
        "file": [path_to_text(file.path.name) for file in files],
    }
    columns = [pl.Series(name, values, dtype=pl.String).gather(owner) for name, values in texts.items()]
    folds = pl.Series("file_fold", [file.fold for file in files], dtype=pl.Int64).gather(owner)
    return [owner.alias("file_number"), *columns, folds]


def _counted(rows: pl.DataFrame, num_files: int) -> tuple[LineCount, ...]:
    bad = rows.filter(~pl.col("good")).group_by("owner").agg(pl.len(), pl.col("line").head(_TOLD_LINES))
    bad_lines = {owner: (number, tuple(first)) for owner, number, first in bad.iter_rows()}
    lines = dict(rows.group_by("owner").len().iter_rows())
    return tuple(LineCount(lines.get(owner, 0), *bad_lines.get(owner, (0, ()))) for owner in range(num_files))


# --- Metric logs as curves: one row per step of each metric, the last attempt's, in step order

COLUMNS = ("stage", "fold", "phase", "metric", "step", "epoch", "value", "flag", "attempt", "ts")


def curves(lines: LogLines) -> pl.DataFrame:
    """The rows of ``lines`` that count (``queries.learning_curves``), folder by folder, with their files."""
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
    return (
        frame.filter(is_last | at_end).select("file_number", *COLUMNS).cast({"phase": pl.String, "metric": pl.String})
    )


def _places(files: Sequence[LogFile]) -> list[int]:
    """Where each file's rows come: folders in the order given, stages of a folder by name."""
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(file.path.parent for file in files))}
    keys = [(folders[file.path.parent], path_to_text(file.stage)) for file in files]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


# --- Memory logs: a stage's samples and events on one clock that only goes forward
#
# The wall clock may jump, and the sampler's own clock starts again whenever a killed stage is resumed. So time is
# summed up line by line: by the sampler's clock where it was written, else by the wall clock's steps forward.


_WALL_CLOCK = "coalesce(try_cast(timestamp AS DOUBLE), epoch(try_cast(timestamp AS TIMESTAMPTZ)))"
_EVENT_NUMBERS = (
    "asked_mb", "used_mb", "budget_mb", "predicted_peak_mb", "measured_step_mb", "baseline_mb", "usage_percent",
)  # fmt: skip
_EVENT_COUNTS = (
    "micro_batch", "micro_batch_before", "micro_batch_next", "micro_batch_planned", "to_step", "lost_steps",
)  # fmt: skip


def read_samples(files: Sequence[LogFile]) -> Answer:
    """The memory samples of ``files`` (``memory/<stage>.jsonl``) in file and line order.

    ``run_id stage fold attempt seconds line`` and the columns of the memory log, of which any but the time may be null.
    ``attempt`` counts from 1 how often the stage was started; ``seconds`` never decreases: time at work in this and all
    earlier attempts, without the pauses between them. A log from before there was a sampler's clock starts at its first
    sample and knows one attempt.
    """
    lines = read_log_lines(files, MEMORY_LINES)
    query = f"""
        WITH stamped AS (SELECT *, {_WALL_CLOCK} AS at_seconds FROM lines),
        beside AS (
            SELECT *, lag(elapsed_seconds) OVER written AS elapsed_before, lag(at_seconds) OVER written AS at_before,
                   lag(phase) OVER written AS phase_before, row_number() OVER written AS position
            FROM stamped WINDOW written AS (PARTITION BY file_number ORDER BY line)
        ), judged AS (
            -- A clock that began anew shows less than before; or, after an attempt that was over at once, another start
            -- in a phase that no training comes back to (after measuring beforehand a stage goes on setting up).
            SELECT *, elapsed_seconds IS NOT NULL AND (
                elapsed_before IS NULL OR elapsed_seconds < elapsed_before
                OR (phase = 'setup' AND phase_before NOT IN ('setup', 'fits', 'batch_size_sweep', 'preflight')
                    AND abs(at_seconds - elapsed_seconds - at_before + elapsed_before) > 0.005)
            ) AS clock_began
            FROM beside
        ), moved AS (
            SELECT *, CASE WHEN elapsed_seconds IS NULL THEN greatest(coalesce(at_seconds - at_before, 0), 0)
                           WHEN clock_began THEN elapsed_seconds ELSE elapsed_seconds - elapsed_before END AS moved
            FROM judged
        )
        SELECT run_id, stage, file_fold AS fold,
               CAST(1 + sum(CASE WHEN clock_began AND position > 1 THEN 1 ELSE 0 END) OVER so_far AS BIGINT) AS attempt,
               sum(moved) OVER so_far AS seconds,
               line, {", ".join(MEMORY_LINES.columns)}
        FROM moved WINDOW so_far AS (PARTITION BY file_number ORDER BY line)
        ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame}), lines.notes)


def read_events(files: Sequence[LogFile], samples: pl.DataFrame) -> Answer:
    """The memory events of ``files`` (``memory/events/<stage>.jsonl``) on the clock of the stages' ``read_samples``.

    An event's attempt is the one whose clock began at the same moment; without samples its own clock counts. Columns:
    ``run_id stage fold attempt seconds line phase epoch batch_idx global_step kind message details happened_in
    context_file device`` and, null where the event has none, the numbers of its details. ``details`` is JSON text.
    """
    lines = read_log_lines(files, EVENT_LINES)
    texts = ", ".join(
        f"details->>'$.{name}' AS {column}"
        for name, column in (("where", "happened_in"), ("context_file", "context_file"), ("device", "device"))
    )
    numbers = [f"try_cast(details->>'$.{name}' AS DOUBLE) AS {name}" for name in _EVENT_NUMBERS]
    numbers += [f"try_cast(details->>'$.{name}' AS BIGINT) AS {name}" for name in _EVENT_COUNTS]
    query = f"""
        WITH stamped AS (SELECT *, {_WALL_CLOCK} AS at_seconds FROM lines),
        sampled AS (
            SELECT run_id, stage, fold, attempt, seconds - elapsed_seconds AS offset_seconds,
                   {_WALL_CLOCK} - elapsed_seconds AS began_at, {_WALL_CLOCK} - seconds AS stage_began_at FROM samples
        ), clocks AS (
            SELECT run_id, stage, fold, attempt, round(began_at, 3) AS began_at, min(offset_seconds) AS offset_seconds,
                   min(stage_began_at) AS stage_began_at
            FROM sampled GROUP BY ALL
        ), matched AS (
            SELECT stamped.*, clocks.attempt, offset_seconds, stage_began_at
            FROM stamped LEFT JOIN clocks ON stamped.run_id = clocks.run_id AND stamped.stage = clocks.stage
                                         AND stamped.file_fold IS NOT DISTINCT FROM clocks.fold
            QUALIFY row_number() OVER (
                PARTITION BY file_number, line
                ORDER BY abs(at_seconds - elapsed_seconds - began_at) NULLS LAST, clocks.attempt DESC
            ) = 1
        )
        SELECT run_id, stage, file_fold AS fold, coalesce(attempt, 1) AS attempt,
               coalesce(elapsed_seconds + coalesce(offset_seconds, 0), greatest(at_seconds - stage_began_at, 0), 0)
                   AS seconds,
               line, phase, epoch, batch_idx, global_step, kind, coalesce(message, '') AS message,
               CAST(details AS VARCHAR) AS details, {texts}, {", ".join(numbers)}
        FROM matched ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame, "samples": samples}), lines.notes)
