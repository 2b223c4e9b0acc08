"""SQL over frames: our own queries, and anybody's, which can neither read nor write anything else.

DuckDB knows the frames it is given and nothing else: no files, no network, no extensions, bounded.
``enable_external_access`` alone is not enough: it leaves the folder for temporaries and the names around the database's
own (``.tmp``, ``:memory:.wal``) open to ``COPY`` and ``EXPORT``. So there is no folder for temporaries, the local file
system is disabled, and the settings are locked.

Anybody's query runs in a process of its own besides. DuckDB's limits stop most queries; lists and texts that are made
whole, as by ``repeat('x', 1000000000)``, it counts too late. The process has a limit of address space and a time.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from fvc_lib.services.isolated_workers import run_isolated

_CLOSED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_BATCH_ROWS = 2048  # DuckDB's own vector: a result is never much further ahead than what is taken of it
_FOREIGN_TYPES = ("INTERVAL", "UNION")


@dataclass(frozen=True)
class Limits:
    """What a query may take before it is stopped with an error; of its rows, so many are returned."""

    max_bytes: int = 1_000_000_000
    max_seconds: float = 60.0
    max_rows: int = 100_000


def connect(limits: Limits | None = None) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory that can neither read nor write files, load extensions, nor be talked out of it."""
    bounds: dict[str, str | bool | int | float | list[str]] = {}
    if limits is not None:
        bounds["memory_limit"] = f"{limits.max_bytes}B"
        bounds["max_execution_time"] = max(1, round(limits.max_seconds * 1000))
    connection = duckdb.connect(":memory:", config={**_CLOSED, **bounds})
    # Only now: a connection that is being made asks the file system about its name.
    connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
    connection.execute("SET lock_configuration = true")
    return connection


def connect_shared() -> duckdb.DuckDBPyConnection:
    """A connection to this process's one database, for queries of this project's own: to make one takes 17 ms of CPU,
    and this a tenth of one. What is registered on it no other connection sees.
    """
    return _database_of(os.getpid()).cursor()


@cache
def _database_of(process: int) -> duckdb.DuckDBPyConnection:
    """By process, because a forked one has none of the threads that work for its parent's."""
    return connect()


def ask(query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None = None) -> pl.DataFrame:
    """The rows of ``query``, one of this project's own, over ``frames`` by name; ``duckdb.Error``: it is wrong."""
    with connect_shared() as connection:
        _register(connection, frames)
        rows: pl.DataFrame = connection.sql(query, params=dict(parameters or {})).pl()
        return rows


def ask_bounded(
    query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None, limits: Limits
) -> tuple[pl.DataFrame, bool]:
    """The first rows of ``query``, anybody's, and whether there are more than ``limits`` lets through.

    Raises:
        ValueError: it is not one statement that only reads, or its columns share a name.
        duckdb.Error: it is wrong, or took more time or memory than ``limits``; DuckDB's message says which.
    """
    with connect(limits) as connection:
        _check_reads(connection, query)
        _register(connection, frames)
        relation = _with_known_types(connection.sql(query, params=dict(parameters or {})))
        if twice := sorted({name for name in relation.columns if relation.columns.count(name) > 1}):
            raise ValueError(f"query: several columns are called {', '.join(twice)}; name them apart with AS.")
        reader = relation.to_arrow_reader(_BATCH_ROWS)
        parts = [pl.DataFrame(reader.schema.empty_table())]
        num_rows = 0
        for batch in reader:
            parts.append(pl.DataFrame(batch))
            num_rows += batch.num_rows
            if num_rows > limits.max_rows:
                break
        return pl.concat(parts).head(limits.max_rows), num_rows > limits.max_rows


def _check_reads(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    statements = connection.extract_statements(query)
    kinds = [statement.type.name for statement in statements]
    if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
        got = "; ".join(kinds) or "none"
        raise ValueError(f"query: got {got}, wanted one statement that reads: SELECT, WITH, FROM, DESCRIBE or EXPLAIN.")


def _with_known_types(relation: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """Types that polars has no like of, and panics about, become text."""
    foreign = [any(name in str(kind) for name in _FOREIGN_TYPES) for kind in relation.types]
    if not any(foreign):
        return relation
    columns = [duckdb.ColumnExpression(name) for name in relation.columns]
    texts = [
        column.cast("VARCHAR").alias(name) if is_foreign else column
        for column, name, is_foreign in zip(columns, relation.columns, foreign, strict=True)
    ]
    return relation.select(*texts)


def _register(connection: duckdb.DuckDBPyConnection, frames: Mapping[str, pl.DataFrame]) -> None:
    for name, frame in frames.items():
        connection.register(name, frame.to_arrow())


# --- In a process of its own

_RESERVED_BYTES = 4 << 30  # address space that the libraries take before the first row
_GRACE_SECONDS = 5.0  # for reading the tables, and for DuckDB to notice by itself that the time is over


def ask_isolated(
    query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None, limits: Limits
) -> tuple[pl.DataFrame, bool]:
    """As ``ask_bounded``, in another process; parameters are texts, numbers, booleans, None or lists of them.

    Raises:
        ValueError: as there.
        duckdb.Error: as there, also when the process was ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, frame in frames.items():
            frame.write_ipc(Path(folder, f"{name}.arrow"))
        item = {"folder": folder, "query": query, "parameters": dict(parameters or {}), "limits": asdict(limits)}
        (answer,) = run_isolated(
            f"{__name__}:answer_in_folder",
            [item],
            workers=1,
            timeout_seconds=limits.max_seconds + _GRACE_SECONDS,
            memory_bytes=_RESERVED_BYTES + limits.max_bytes + 2 * sum(map(_size_bytes, frames.values())),
        )
        if answer.failure == "timeout":
            raise duckdb.InterruptException(f"The query was stopped: {answer.detail}.")
        if answer.failure is not None:
            raise duckdb.OutOfMemoryException(f"The query took its process down ({answer.detail}): ask for less.")
        if "error" in answer.value:
            raise _error(answer.value["error"], answer.value["message"])
        # Into memory, not mapped: the folder goes.
        return pl.read_ipc(Path(folder, "answer").read_bytes()), bool(answer.value["more"])


def answer_in_folder(item: Mapping[str, Any]) -> dict[str, Any]:
    """What the process does: read the tables, ask, leave the rows; an error as its type's name and its message."""
    folder = Path(item["folder"])
    frames = {path.stem: pl.read_ipc(path) for path in folder.glob("*.arrow")}
    try:
        rows, more = ask_bounded(item["query"], frames, item["parameters"], Limits(**item["limits"]))
        rows.write_ipc(folder / "answer")
    except (ValueError, duckdb.Error, OSError, MemoryError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"more": more}


def _error(name: str, message: str) -> Exception:
    kind = getattr(duckdb, name, None)
    if isinstance(kind, type) and issubclass(kind, duckdb.Error):
        return kind(message)
    # Arrow says of memory that ended that it is an input or output that failed.
    return duckdb.OutOfMemoryException(message) if name in ("OSError", "MemoryError") else ValueError(message)


def _size_bytes(frame: pl.DataFrame) -> int:
    return int(frame.estimated_size())


# --- Questions to begin with, for ``queries.ask_sql``; its tables are ``queries.SQL_TABLES``


@dataclass(frozen=True)
class SqlExample:
    """One question: a short name, what is asked in words, and the SQL that answers it."""

    name: str
    question: str
    sql: str


# In the file a comment, ``-- Name: question``, stands above each.
_TEXT = Path(__file__).with_name("examples.sql").read_text("utf-8")
_FOUND = re.findall(r"^-- (.+?): (.+)\n((?:(?!-- ).*\n)+)", _TEXT, re.MULTILINE)
SQL_EXAMPLES = tuple(SqlExample(name, question, sql.strip()) for name, question, sql in _FOUND)
