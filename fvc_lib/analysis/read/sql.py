"""SQL over frames: our own queries, and anybody's, which can neither read nor write anything else.

DuckDB knows the frames it is given and nothing else: no files, no network, no extensions, bounded.
``enable_external_access`` alone is not enough: it leaves the folder for temporaries and the names around the database's
own (``.tmp``, ``:memory:.wal``) open to ``COPY`` and ``EXPORT``. So there is no folder for temporaries, the local file
system is disabled, and the settings are locked.

Limits are DuckDB's own: they stop nearly every query, but a single huge text (``repeat('x', 1000000000)``) it counts
too late.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import polars as pl

_CLOSED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_BATCH_ROWS = 2048  # DuckDB's own vector: a result is never much further ahead than what is taken of it


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


def ask(query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None = None) -> pl.DataFrame:
    """The rows of ``query``, one of this project's own, over ``frames`` by name; ``duckdb.Error``: it is wrong."""
    with connect() as connection:
        _register(connection, frames)
        rows: pl.DataFrame = connection.sql(query, params=dict(parameters or {})).pl()
        return rows


def ask_bounded(
    query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None, limits: Limits
) -> tuple[pl.DataFrame, bool]:
    """The first rows of ``query``, anybody's, and whether there are more than ``limits`` lets through.

    Raises:
        ValueError: it is not one statement that only reads, its columns share a name, or one has a foreign type.
        duckdb.Error: it is wrong, or took more time or memory than ``limits``; DuckDB's message says which.
    """
    with connect(limits) as connection:
        _check_reads(connection, query)
        _register(connection, frames)
        relation = connection.sql(query, params=dict(parameters or {}))
        if twice := sorted({name for name in relation.columns if relation.columns.count(name) > 1}):
            raise ValueError(f"query: several columns are called {', '.join(twice)}; name them apart with AS.")
        if any(re.search(r"\b(INTERVAL|UNION)\b", str(kind)) for kind in relation.types):  # polars would panic
            raise ValueError("query: a table here has no INTERVAL and no UNION: CAST that column AS VARCHAR.")
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


def _register(connection: duckdb.DuckDBPyConnection, frames: Mapping[str, pl.DataFrame]) -> None:
    for name, frame in frames.items():
        connection.register(name, frame.to_arrow())


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
