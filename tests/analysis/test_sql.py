"""A query reads the frames it is given, and that is all it can do; every example answers its question."""

from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pytest

from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.queries import MAX_ROWS, SQL_EXAMPLES, ask, ask_sql
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.task_runs import write_image_run, write_video_text_run

FRAMES = {"numbers": pl.DataFrame({"n": [1, 2, 3], "text": ["a", None, "<script>'"]})}
OF_OTHER_TASKS = {"image_predictions", "target_predictions", "retrieval_ranks", "video_texts"}

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
    "CREATE MACRO f() AS TABLE FROM read_text('{secret}')",
    "INSERT INTO numbers VALUES (4, 'x')",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{folder}/x.duckdb_extension'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET disabled_filesystems = ''",
    "SET memory_limit = '1TB'",
    "RESET disabled_filesystems",
    "SET temp_directory = '{folder}'",
    "PRAGMA profiling_output = '{folder}/profile'",
    "PRAGMA enable_external_access = true",
    "CALL enable_logging(storage = 'file', storage_path = '{folder}/log')",
    "CREATE SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "CREATE PERSISTENT SECRET (TYPE http)",
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
    with pytest.raises((duckdb.Error, ValueError)):
        ask(query.format(secret=secret, folder=tmp_path), FRAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    assert secret.read_text() == "a\n1\n"
    del some_python_variable


def test_parameters_are_values_whatever_they_hold() -> None:
    for text in ("' OR 1=1 --", "<script>'", "'); DROP VIEW numbers; --"):
        rows = ask("SELECT n, $text AS shown FROM numbers WHERE text = $text", FRAMES, {"text": text})
        assert rows.rows() == ([(3, text)] if text == "<script>'" else [])


def test_a_query_is_stopped_at_its_limits_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask_sql([], "SELECT range AS n FROM range(200000)")
    assert (answer.frame.height, len(answer.notes)) == (MAX_ROWS, 1)
    monkeypatch.setattr(queries, "_LIMITS", {"max_execution_time": 200, "memory_limit": "30MB"})
    for query, error, message in (
        ("SELECT count(*) FROM range(1000000000000)", duckdb.Error, "maximum execution time"),
        ("SELECT list(range) FROM range(100000000)", duckdb.Error, "Out of Memory"),
        ("SELECT INTERVAL 1 DAY AS i", ValueError, "VARCHAR"),
    ):
        with pytest.raises(error, match=message):
            ask_sql([], query)
    assert ask_sql([], "SELECT 1 AS a").frame.item() == 1


def test_every_example_answers_its_question_over_real_runs(make_run: Callable[..., RunPaths], tmp_path: Path) -> None:
    run, other = make_run(), make_run(name="run_20250305_000000_abcdef02", seed=4)
    other.params_yaml.write_text(RunConfig(experiment="demo", epochs=3).to_yaml())
    schema = {name: column.dtype for name, column in tables.REJECTED.columns.items()}
    rejected = pl.DataFrame([("a.mp4", None, 1, "real", "unreadable", "truncated")], schema=schema, orient="row")
    tables.write_table(rejected, tables.REJECTED, run.rejected)
    of_other_tasks = [write_image_run(tmp_path), write_video_text_run(tmp_path)]
    runs = {name: [run, other, *(of_other_tasks if name in OF_OTHER_TASKS else ())] for name in queries.SQL_TABLES}
    frames = {name: read(runs[name]).frame for name, read in queries.SQL_TABLES.items()}
    answers = {each.name: ask(each.sql, frames) for each in SQL_EXAMPLES}
    empty = [name for name, rows in answers.items() if rows.is_empty()]
    assert set(empty) <= {"What training chose"}  # these runs keep no outcome.json
    predictions = frames["predictions"]
    wrong = predictions.filter((pl.col("score") >= pl.col("threshold")) != (pl.col("label") == "fake"))
    assert answers["Worst mistakes"].height == min(20, wrong.height)
    assert answers["Calibration"]["num_videos"].sum() == predictions.height
    confused = frames["image_predictions"].filter(pl.col("class_label") != pl.col("predicted_label"))
    assert answers["Confused classes"]["num_images"].sum() == confused.height
    assert answers["Furthest off"].group_by("target").len().sort("target").rows() == [("calories", 5), ("mass", 5)]
    assert answers["Found last"]["rank"].max() == answers["Found last"]["rank"][0] == 5
