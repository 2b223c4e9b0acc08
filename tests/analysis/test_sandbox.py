"""A query reads the frames it is given, and that is all it can do."""

import contextlib
import resource
from pathlib import Path

import duckdb
import polars as pl
import pytest

from fvc_lib.analysis.read import queries, sql
from fvc_lib.analysis.read.sql import Limits, ask, ask_bounded, connect

FRAMES = {"numbers": pl.DataFrame({"n": [1, 2, 3], "text": ["a", None, "<script>'"]})}

READING = (
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_csv_auto(['{secret}'])",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT content FROM read_text('{secret}')",
    "SELECT content FROM read_blob('{folder}/*')",
    "SELECT * FROM read_json('{secret}')",
    "SELECT * FROM read_ndjson_objects('{secret}')",
    "SELECT * FROM read_parquet('{secret}')",
    "SELECT * FROM parquet_metadata('{secret}')",
    "SELECT * FROM parquet_kv_metadata('{secret}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM '{secret}'",
    'SELECT * FROM "{secret}"',
    "SELECT * FROM query('FROM read_text(''{secret}'')')",
    "SELECT * FROM query_table('{secret}')",
    "SELECT * FROM read_csv('.tmp/x')",
    "SELECT content FROM read_text(':memory:.wal')",
    "SELECT content FROM read_text('/proc/self/environ')",
    "SELECT * FROM read_csv('https://example.org/x.csv')",
    "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
    "SELECT getenv('HOME')",
    "SELECT * FROM duckdb_secrets(redact = false)",
    "SELECT * FROM sqlite_scan('{secret}', 't')",
    "SELECT * FROM postgres_scan('host=localhost', 'a', 'b')",
    "SELECT * FROM arrow_scan(1, 2, 3)",
    "SELECT * FROM pandas_scan(1)",
    "SELECT * FROM some_python_variable",
)  # fmt: skip
WRITING = (
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY (SELECT 1) TO ':memory:'",
    "COPY (SELECT 1) TO ':memory:.wal' (USE_TMP_FILE false)",
    "COPY (SELECT 1) TO '.tmp/out.csv'",
    "COPY numbers TO '/dev/stdout'",
    "EXPORT DATABASE '{folder}/all'",
    "EXPORT DATABASE '.tmp'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO ':memory:'",
    "IMPORT DATABASE '{folder}'",
    "ATTACH '{folder}/x.db'",
    "ATTACH ':memory:.wal' AS w",
    "SELECT 1; COPY (SELECT 1) TO ':memory:'",
    "CREATE TABLE t AS SELECT 1",
    "CREATE MACRO f() AS TABLE FROM read_text('{secret}')",
    "INSERT INTO numbers VALUES (4, 'x')",
    "DROP VIEW numbers",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{folder}/x.duckdb_extension'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET disabled_filesystems = ''",
    "SET memory_limit = '1TB'",
    "RESET disabled_filesystems",
    "SET temp_directory = '{folder}'",
    "PRAGMA enable_profiling = 'json'",
    "PRAGMA profiling_output = '{folder}/profile'",
    "PRAGMA enable_external_access = true",
    "CALL enable_logging(storage = 'file', storage_path = '{folder}/log')",
    "CREATE SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "CREATE PERSISTENT SECRET (TYPE http)",
    "USE memory",
    "VACUUM",
    "",
    "--",
)  # fmt: skip


@pytest.mark.fault(38)
@pytest.mark.parametrize("query", [*READING, *WRITING])
def test_no_query_reaches_a_file_the_network_or_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    some_python_variable = pl.DataFrame({"a": [1]})
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    monkeypatch.chdir(tmp_path)
    text = query.format(secret=secret, folder=tmp_path)
    with pytest.raises((duckdb.Error, ValueError)):
        ask_bounded(text, FRAMES, None, Limits())
    with connect() as connection, contextlib.suppress(duckdb.Error):  # also without the check of statements
        connection.execute(text)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    assert secret.read_text() == "a\n1\n"
    del some_python_variable


@pytest.mark.parametrize(
    "query",
    [
        "FROM numbers",
        "WITH a AS (SELECT n FROM numbers) SELECT * FROM a",
        "DESCRIBE numbers",
        "SUMMARIZE numbers",
        "SHOW TABLES",
        "EXPLAIN SELECT * FROM numbers",
        "VALUES (1), (2)",
        "SELECT INTERVAL 1 DAY AS i, now() AS t, [1, NULL] AS l, {'a': 1} AS s, 1::HUGEINT AS h, uuid() AS u",
        "SELECT union_value(a := 1) AS u, [INTERVAL 1 DAY] AS i",
    ],
)  # fmt: skip
def test_every_way_to_read_gives_a_frame(query: str) -> None:
    rows, more = ask_bounded(query, FRAMES, None, Limits())
    assert rows.height
    assert not more


def test_parameters_are_values_whatever_they_hold() -> None:
    for text in ("' OR 1=1 --", "<script>'", "'); DROP VIEW numbers; --"):
        rows, _ = ask_bounded(
            "SELECT n, $text AS shown FROM numbers WHERE text = $text", FRAMES, {"text": text}, Limits()
        )
        assert rows.rows() == ([(3, text)] if text == "<script>'" else [])


def test_only_so_many_rows_come_back_in_order_and_the_rest_is_told() -> None:
    query = "SELECT range AS n FROM range(10000) ORDER BY n DESC"
    rows, more = ask_bounded(query, {}, None, Limits(max_rows=3000))
    assert rows["n"].to_list() == list(range(9999, 6999, -1))
    assert more
    assert not ask_bounded(query, {}, None, Limits(max_rows=10_000))[1]
    assert ask_bounded("SELECT 1 AS a WHERE false", {}, None, Limits())[0].schema == {"a": pl.Int32}


def test_columns_of_one_name_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="several columns are called a; name them apart with AS"):
        ask_bounded("SELECT 1 AS a, 2 AS a", {}, None, Limits())


def test_a_query_is_stopped_at_its_limits_and_the_next_one_is_answered() -> None:
    with pytest.raises(duckdb.Error, match="maximum execution time"):
        ask_bounded("SELECT count(*) FROM range(1000000000000)", {}, None, Limits(max_seconds=0.2))
    with pytest.raises(duckdb.Error, match="Out of Memory"):
        ask_bounded("SELECT list(range) FROM range(100000000)", {}, None, Limits(max_bytes=30_000_000))
    assert ask("SELECT 1 AS a", {}).item() == 1


@pytest.mark.parametrize("runaway", ["repeat('x', 1000000000)", "length(repeat('x', 600000000))"])
def test_one_that_duckdb_cannot_stop_takes_only_its_own_process_with_it(
    monkeypatch: pytest.MonkeyPatch, runaway: str
) -> None:
    monkeypatch.setattr(sql, "_GRACE_SECONDS", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(duckdb.Error):
        queries.ask_sql([], f"SELECT {runaway} AS a", limits=Limits(max_bytes=50_000_000, max_seconds=0.5))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB; the text alone is of 600 MB


def test_sql_over_runs_is_answered_with_its_parameters_cut_and_refused() -> None:
    answer = queries.ask_sql([], "SELECT $a AS a FROM range(5)", {"a": "x'"}, limits=Limits(max_rows=2))
    assert answer.frame.rows() == [("x'",)] * 2
    assert answer.notes == ("Only the first 2 rows are shown.",)
    with pytest.raises(ValueError, match="got COPY, wanted one statement that reads"):
        queries.ask_sql([], "COPY (SELECT 1) TO 'x'")
