"""SQL over frames: our own queries, and anybody's, which can neither read nor write anything else.

DuckDB knows the frames it is given and nothing else: no files, no network, no extensions, bounded.
``enable_external_access`` alone is not enough: it leaves the folder for temporaries and the names around the database's
own (``.tmp``, ``:memory:.wal``) open to ``COPY`` and ``EXPORT``. So there is no folder for temporaries, the local file
system is disabled, and the settings are locked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


def ask(query: str, frames: Mapping[str, pl.DataFrame], parameters: Mapping[str, object] | None = None) -> pl.DataFrame:
    """The rows of ``query``, one of this project's own, over ``frames``, which it knows by their names here.

    Raises:
        duckdb.Error: the query is wrong.
    """
    with connect() as connection:
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


# --- Questions to begin with, for ``queries.ask_sql``; its tables are ``queries.SQL_TABLES``


@dataclass(frozen=True)
class SqlExample:
    """One question: a short name, what is asked in words, and the SQL that answers it."""

    name: str
    question: str
    sql: str


SQL_EXAMPLES = (
    SqlExample(
        "Hardest fold",
        "In which fold did the model rank worst, and how many groups is that said of?",
        """
SELECT run_id, scope, value AS roc_auc, num_videos, num_groups
FROM results
WHERE source = 'model' AND metric = 'roc_auc' AND scope LIKE 'fold_%'
ORDER BY roc_auc
""",
    ),
    SqlExample(
        "Worst mistakes",
        "Which videos was the model most sure of and wrong about?",
        """
SELECT p.run_id, p.fold, v.path, p.label, p.score, p.threshold, v.codec, v.platform
FROM predictions p JOIN videos v USING (run_id, video_id)
WHERE (p.score >= p.threshold) <> (p.label = 'fake')
ORDER BY abs(p.score - p.threshold) DESC
LIMIT 20
""",
    ),
    SqlExample(
        "Errors by codec",
        "How often is the model wrong about each codec, and of how many groups is that?",
        """
SELECT p.run_id, v.codec, p.label, count(*) AS num_videos, count(DISTINCT p.group_id) AS num_groups,
       avg(CAST((p.score >= p.threshold) <> (p.label = 'fake') AS INTEGER)) AS share_wrong
FROM predictions p JOIN videos v USING (run_id, video_id)
GROUP BY ALL
ORDER BY share_wrong DESC, num_videos DESC
""",
    ),
    SqlExample(
        "Calibration",
        "Of the videos scored about 0.7, are about 70 % fake?",
        """
SELECT run_id, floor(least(score, 0.999) * 10) / 10 AS score_from, count(*) AS num_videos,
       avg(score) AS mean_score, avg(CAST(label = 'fake' AS INTEGER)) AS share_fake
FROM predictions
GROUP BY ALL
ORDER BY run_id, score_from
""",
    ),
    SqlExample(
        "Best epoch",
        "At which epoch was each training's validation loss lowest, and what was its last?",
        """
SELECT run_id, stage, fold, arg_min(epoch, value) AS best_epoch, min(value) AS lowest_loss,
       arg_max(value, step) AS last_loss, max(epoch) AS last_epoch
FROM metrics
WHERE phase = 'validation' AND metric = 'loss'
GROUP BY run_id, stage, fold
ORDER BY run_id, stage, fold
""",
    ),
    SqlExample(
        "What training chose",
        "Which epoch, threshold and temperature did each training choose, and what did it cost?",
        """
SELECT run_id, stage, fold, trained, epochs, best_epoch, threshold, temperature, micro_batch, seconds,
       peak_rss_bytes / 1e9 AS peak_gb
FROM training
ORDER BY run_id, stage, fold, trained DESC
""",
    ),
    SqlExample(
        "Where memory went",
        "In which phase of which stage was most memory held?",
        """
SELECT run_id, stage, fold, phase, max(rss_mb) AS peak_rss_mb, max(allocated_mb) AS peak_allocated_mb,
       count(*) AS num_samples
FROM memory
GROUP BY ALL
ORDER BY peak_allocated_mb DESC NULLS LAST
LIMIT 20
""",
    ),
    SqlExample(
        "Largest groups",
        "Which groups hold the most videos? A fold cannot be smaller than its largest.",
        """
SELECT run_id, group_id, count(*) AS num_videos, count(DISTINCT label) AS num_labels, min(path) AS one_of_them
FROM videos
GROUP BY run_id, group_id
ORDER BY num_videos DESC, group_id
LIMIT 20
""",
    ),
    SqlExample(
        "Left out",
        "Why were listed videos or images not used?",
        """
SELECT run_id, reason, count(*) AS num_files, min(path) AS one_of_them
FROM rejected
GROUP BY run_id, reason
ORDER BY num_files DESC
""",
    ),
    SqlExample(
        "Confused classes",
        "Task image: which class is most often called which other one, and in how many groups?",
        """
SELECT run_id, class_label, predicted_label, count(*) AS num_images, count(DISTINCT group_id) AS num_groups,
       avg(probability) AS mean_probability
FROM image_predictions
WHERE class_label <> predicted_label
GROUP BY ALL
ORDER BY num_images DESC, class_label, predicted_label
LIMIT 20
""",
    ),
    SqlExample(
        "Furthest off",
        "Task image: for which images is a predicted number furthest off?",
        """
SELECT run_id, target, path, value, predicted, predicted - value AS off, unit
FROM target_predictions
QUALIFY row_number() OVER (PARTITION BY run_id, target ORDER BY abs(predicted - value) DESC) <= 5
ORDER BY run_id, target, abs(off) DESC
""",
    ),
    SqlExample(
        "Found last",
        "Task video_text: which queries find theirs last, and among how many?",
        """
WITH names AS (
    SELECT run_id, video_id AS query_id, min(path) AS query FROM video_texts GROUP BY ALL
    UNION ALL SELECT run_id, text_id, min(text) FROM video_texts GROUP BY ALL
)
SELECT r.run_id, r.direction, r.rank, r.num_candidates, r.num_positives, names.query
FROM retrieval_ranks r LEFT JOIN names USING (run_id, query_id)
ORDER BY r.rank / r.num_candidates DESC, r.query_id
LIMIT 20
""",
    ),
)
