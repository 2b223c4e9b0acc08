"""SQL over frames. DuckDB sees the frames that it is given, and no file, network or extension."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import duckdb
import polars as pl

MAX_ROWS = 100_000  # of a user's query
_CLOSED: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_LIMITS: dict[str, str | bool | int | float | list[str]] = {"memory_limit": "2GB", "max_execution_time": 60_000}  # ms


def ask(query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None = None) -> pl.DataFrame:
    """Return the rows of one of the library's own queries over ``frames``, by name."""
    with connect() as connection:
        return _rows(connection, query, frames, parameters)


def ask_user_query(
    query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None = None
) -> pl.DataFrame:
    """Return the first ``MAX_ROWS`` + 1 rows of a user's query over ``frames``.

    The query can neither read nor write anything else. It may take 60 s and 2 GB.

    Raises:
        ValueError: the query returns no rows, or a column has a type that polars lacks.
        duckdb.Error: the query is wrong or exceeded a limit.
    """
    with _closed(_LIMITS) as connection:
        try:
            return _rows(connection, query, frames, parameters, MAX_ROWS + 1)
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"query: a column cannot be shown, cast it to VARCHAR: {error}") from error


def connect() -> duckdb.DuckDBPyConnection:
    """Return a connection to this process's database. Frames registered on it are its own."""
    return _database(os.getpid()).cursor()


@cache
def _database(process_id: int) -> duckdb.DuckDBPyConnection:
    """Open a database once per process: opening takes 17 ms, and a forked process has none of the threads."""
    return _closed({})


def _closed(limits: Mapping[str, str | bool | int | float | list[str]]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config={**_CLOSED, **limits})
    # ``enable_external_access`` leaves names such as ":memory:.wal" open. Opening a connection needs the file system,
    # so it is disabled only now.
    connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
    connection.execute("SET lock_configuration = true")
    return connection


def _rows(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    frames: Mapping[str, pl.DataFrame],
    parameters: Mapping[str, object] | None,
    limit: int | None = None,
) -> pl.DataFrame:
    for name, frame in frames.items():
        connection.register(name, frame.to_arrow())
    relation = connection.sql(query, params=dict(parameters or {}))
    if relation is None:
        raise ValueError(f"query: got {query!r}, which returns no rows; wanted a SELECT.")
    rows: pl.DataFrame = (relation if limit is None else relation.limit(limit)).pl()
    return rows


@dataclass(frozen=True)
class SqlExample:
    """A question in words and the SQL that answers it over ``queries.SQL_TABLES``."""

    name: str
    question: str
    sql: str


# Each query in the file follows a comment "-- Name: question".
_TEXT = Path(__file__).with_name("examples.sql").read_text("utf-8")
_FOUND = re.findall(r"^-- (.+?): (.+)\n((?:(?!-- ).*\n)+)", _TEXT, re.MULTILINE)
SQL_EXAMPLES = tuple(SqlExample(name, question, sql.strip()) for name, question, sql in _FOUND)
