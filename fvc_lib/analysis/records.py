"""Reads what a run wrote, while it is being written and after any crash: good lines kept, bad ones counted.

File names never reach SQL: Python reads the bytes and DuckDB sees a table of lines, with access to files switched
off. So a name with quotes, brackets or non-UTF-8 bytes is just a name, and a query cannot leave the runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandera.polars as pa
import polars as pl
import pyarrow as arrow

from fvc_lib.analysis.wording import count_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table

_FOLD = re.compile(r"^(?P<stage>.+)_fold_(?P<fold>\d+)$")


@dataclass(frozen=True)
class Answer:
    """A query's rows, and in words what could not be read for them (empty when all could)."""

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFile:
    """One JSONL file and whose it is: the run's folder name, not what its lines say, since folders get copied."""

    path: Path
    run_id: str
    stage: str
    fold: int | None = None

    @classmethod
    def named(cls, path: Path, run_id: str) -> LogFile:
        """The file of a run whose stage and fold its own name gives, as in ``04_fold_training_fold_2.jsonl``."""
        match = _FOLD.match(path.stem)
        return cls(path, run_id, match["stage"], int(match["fold"])) if match else cls(path, run_id, path.stem)


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
class _Block:
    """All files' bytes in one buffer, cut into lines."""

    content: bytes
    starts: np.ndarray[Any, np.dtype[np.int64]]  # (L + 1,) byte offsets of L lines, line feeds included
    owners: np.ndarray[Any, np.dtype[np.int64]]  # (L,) which file each line came from
    notes: list[str] = field(default_factory=list)


def connect() -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory that can neither read nor write files, load extensions, nor be talked out of it."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
        "lock_configuration": "true",
    }
    return duckdb.connect(":memory:", config=settings)


def ask(query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None = None) -> pl.DataFrame:
    """The rows of ``query`` over ``frames``, which it knows by their names here.

    Raises:
        duckdb.Error: the query is wrong.
    """
    with connect() as connection:
        for name, frame in frames.items():
            connection.register(name, frame.to_arrow())
        rows: pl.DataFrame = connection.sql(query, params=dict(parameters or {})).pl()
        return rows


def log_files(run: RunPaths, folder: str) -> list[LogFile]:
    """The JSONL files right in ``folder`` of ``run``; what lies in folders below it is not of the same kind."""
    return [LogFile.named(path, run.run_id) for path in entries(run, folder) if path.suffix == ".jsonl"]


def entries(run: RunPaths, folder: str) -> list[Path]:
    """What lies in ``folder`` of ``run``, by name; nothing where there is no such folder."""
    where = run.root / folder
    return sorted(where.iterdir()) if where.is_dir() else []


def read_log_lines(files: Sequence[LogFile], line_format: LineFormat) -> Answer:
    """The good lines of ``files`` in file and line order.

    A line is good when it is one JSON object whose columns satisfy ``line_format``; torn, NUL-filled and glued lines
    are not and are counted in the notes, file by file. Blank lines count as nothing.

    Returns:
        columns ``file_number run_id stage file file_fold line`` (line 1-based) and those of the format.
    """
    block = _read_block(files)
    names = list(line_format.columns)
    structure = json.dumps(dict(line_format.columns))
    # regexp_full_match finds blank lines 20 times as fast as trim.
    query = f"""
        WITH parsed AS (
            SELECT owner, row, CASE WHEN json_valid(line) THEN from_json(line, '{structure}') END AS fields
            FROM lines WHERE NOT regexp_full_match(line, '\\s*')
        ), spread AS (SELECT owner, row, {", ".join(f"fields.{name} AS {name}" for name in names)} FROM parsed)
        SELECT *, coalesce({line_format.good}, false) AS good FROM spread
    """
    with connect() as connection:
        connection.register("lines", _arrow_lines(block))
        rows = connection.sql(query).pl()
    first_row = np.searchsorted(block.owners, np.arange(len(files)))
    kept = rows.filter("good").sort("row")
    good = kept.select(
        *_owner_columns(files, kept["owner"]),
        (pl.col("row") - pl.Series(first_row, dtype=pl.Int64).gather(kept["owner"]) + 1).alias("line"),
        *names,
    )
    bad = rows.filter(~pl.col("good")).group_by("owner").len().sort("owner")
    return Answer(good, (*block.notes, *_bad_line_notes(bad, rows.height, files)))


def read_tables(paths: Iterable[tuple[str, Path]], schema: pa.DataFrameSchema) -> Answer:
    """All tables that exist among ``paths`` (run id, file), stacked, with ``run_id`` in front.

    A table that cannot be read or does not fit its schema is left out and noted: one foreign run folder must not hide
    the others.
    """
    frames, notes = [], []
    empty = pl.DataFrame(schema={name: column.dtype.type for name, column in schema.columns.items()})
    for run_id, path in paths:
        if not path.is_file():
            continue
        try:
            frame = read_table(path, schema)
        except DataError as error:
            notes.append(f"{path_to_text(path)} was left out: {error}")
            continue
        frames.append(frame.select(pl.lit(run_id).alias("run_id"), pl.all()))
    empty = empty.select(pl.lit("").alias("run_id"), pl.all()).clear()
    return Answer(pl.concat([empty, *frames]), tuple(notes))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an empty one: a missing or torn record is simply not recorded."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_block(files: Sequence[LogFile]) -> _Block:
    parts: list[bytes] = []
    starts, owners, notes, size = [np.zeros(1, np.int64)], [], [], 0
    for owner, file in enumerate(files):
        try:
            content = file.path.read_bytes()
        except OSError as error:
            notes.append(f"{path_to_text(file.path)} could not be read: {error.strerror}.")
            continue
        content = _valid_utf8(content if content.endswith(b"\n") or not content else content + b"\n")
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) + 1
        starts.append(ends + size)
        owners.append(np.full(ends.size, owner, np.int64))
        parts.append(content)
        size += len(content)
    return _Block(
        b"".join(parts),
        np.concatenate(starts),
        np.concatenate(owners) if owners else np.zeros(0, np.int64),
        notes,
    )


def _valid_utf8(content: bytes) -> bytes:
    """DuckDB takes Arrow text on trust, so bytes that are no UTF-8 are replaced before it sees them."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return content.decode("utf-8", "replace").encode()
    return content


def _arrow_lines(block: _Block) -> arrow.Table:
    """Lines as an Arrow table over the block's own bytes; a million lines cost no Python object each."""
    offsets, content = arrow.py_buffer(block.starts.tobytes()), arrow.py_buffer(block.content)
    num_lines = len(block.owners)
    lines = arrow.Array.from_buffers(arrow.large_string(), num_lines, [None, offsets, content])
    rows = arrow.array(np.arange(num_lines, dtype=np.int64))
    return arrow.table({"owner": arrow.array(block.owners), "row": rows, "line": lines})


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


def _bad_line_notes(bad: pl.DataFrame, num_lines: int, files: Sequence[LogFile]) -> list[str]:
    if bad.is_empty():
        return []
    total = int(bad["len"].sum())
    names = {owner: path_to_text(f"{files[owner].run_id}/{files[owner].path.name}") for owner in bad["owner"]}
    where = ", ".join(f"{names[owner]}: {count}" for owner, count in bad.iter_rows())
    verb = "is" if total == 1 else "are"
    return [f"{count_text(total, 'line')} of {num_lines:,} could not be read and {verb} left out ({where})."]
