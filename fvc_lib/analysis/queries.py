"""Typed questions to any number of runs, answered by DuckDB as polars frames.

Every query takes the runs it is about, reads what they have (also while they run) and says in the answer's notes what
could not be read. A run folder that was copied in simply counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import polars as pl

from fvc_lib.analysis.memory_logs import read_events, read_samples
from fvc_lib.analysis.records import METRIC_LINES, Answer, ask, entries, log_files, read_log_lines, read_tables
from fvc_lib.services import tables
from fvc_lib.services.memory_observer import PREFLIGHT
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths

_PREDICTIONS = re.compile(r"^predictions_fold_(?P<fold>\d+)\.parquet$")


def learning_curves(
    runs: Sequence[RunPaths],
    *,
    metrics: Sequence[str] = (),
    phases: Sequence[str] = (),
    folds: Sequence[int] = (),
) -> Answer:
    """The metric log of ``runs``; empty ``metrics``, ``phases`` or ``folds`` mean all of them.

    Where several attempts logged the same (stage, step, metric, phase, fold), as after a resume, the last attempt
    counts; within an attempt, the last line.

    Returns:
        ``run_id stage fold phase metric step epoch value flag attempt ts`` ordered by step within each curve;
        ``value`` is null where ``flag`` says nan, inf or -inf.
    """
    lines = read_log_lines([file for run in runs for file in log_files(run, "metrics")], METRIC_LINES)
    query = """
        SELECT run_id, stage, fold, phase, metric, step, epoch, value, flag, attempt, ts FROM (
            SELECT * EXCLUDE (fold, attempt, value), coalesce(fold, file_fold) AS fold,
                   coalesce(attempt, 1) AS attempt, CASE WHEN isfinite(value) THEN value END AS value FROM lines
        )
        WHERE (len($metrics) = 0 OR list_contains($metrics, metric))
          AND (len($phases) = 0 OR list_contains($phases, phase))
          AND (len($folds) = 0 OR list_contains($folds, fold))
        QUALIFY row_number() OVER (
            PARTITION BY file_number, fold, phase, metric, step ORDER BY attempt DESC, line DESC
        ) = 1
        ORDER BY run_id, stage, fold, phase, metric, step
    """
    asked = {"metrics": list(metrics), "phases": list(phases), "folds": list(folds)}
    return Answer(ask(query, {"lines": lines.frame}, asked), lines.notes)


def memory_samples(runs: Sequence[RunPaths]) -> Answer:
    """Every memory sample of ``runs``; ``memory_logs.read_samples`` tells the columns."""
    return read_samples([file for run in runs for file in log_files(run, "memory")])


def memory_events(runs: Sequence[RunPaths]) -> Answer:
    """What happened to the memory of ``runs``; ``memory_logs.read_events`` tells the columns."""
    files = [file for run in runs for file in log_files(run, "memory/events")]
    return read_events(files, memory_samples(runs).frame)


def memory_peaks(runs: Sequence[RunPaths]) -> Answer:
    """The highest memory of each stage, its preflight left out: ``run_id stage fold num_samples peak_rss_bytes
    peak_device_bytes``.

    The log's megabytes are 1e6 bytes. On a CPU ``allocated_mb`` is the process with its children, which is what a job's
    limit counts; ``peak_device_bytes`` is null without an accelerator.
    """
    samples = memory_samples(runs)
    query = """
        SELECT run_id, stage, fold, count(*) AS num_samples,
               CAST(max(greatest(rss_mb, CASE WHEN on_cpu THEN greatest(allocated_mb, max_allocated_mb) END))
                    FILTER (is_work) * 1000000 AS BIGINT) AS peak_rss_bytes,
               CAST(max(CASE WHEN NOT on_cpu THEN greatest(allocated_mb, max_allocated_mb) END)
                    FILTER (is_work) * 1000000 AS BIGINT) AS peak_device_bytes
        FROM (SELECT *, coalesce(device, 'cpu') LIKE 'cpu%' AS on_cpu, phase IS DISTINCT FROM $preflight AS is_work
              FROM samples)
        GROUP BY run_id, stage, fold ORDER BY run_id, stage, fold
    """
    return Answer(ask(query, {"samples": samples.frame}, {"preflight": PREFLIGHT}), samples.notes)


def results(runs: Sequence[RunPaths]) -> Answer:
    """The results tables of ``runs`` (``tables.RESULTS`` with ``run_id`` in front); runs without one add no rows."""
    return read_tables([(path_to_text(run.run_id), run.results) for run in runs], tables.RESULTS)


def fold_table(runs: Sequence[RunPaths], source: str = "model") -> Answer:
    """One row per run and fold: ``run_id fold num_videos num_groups`` and one column per metric."""
    found = results(runs)
    query = """
        SELECT run_id, CAST(regexp_extract(scope, '^fold_([0-9]+)$', 1) AS BIGINT) AS fold,
               num_videos, num_groups, metric, value
        FROM results WHERE source = $source AND regexp_full_match(scope, 'fold_[0-9]+')
    """
    rows = ask(query, {"results": found.frame}, {"source": source})
    metrics = rows["metric"].unique(maintain_order=True).to_list()
    wide = rows.pivot(
        "metric", index=["run_id", "fold", "num_videos", "num_groups"], values="value", on_columns=metrics
    )
    return Answer(wide.sort("run_id", "fold"), found.notes)


def predictions(runs: Sequence[RunPaths]) -> Answer:
    """Outer-fold predictions of ``runs`` (``tables.PREDICTIONS`` with ``run_id`` in front), folds in order."""
    files = []
    for run in runs:
        # Listed and matched in Python: a glob would read a folder's own brackets as a pattern.
        named = ((_PREDICTIONS.match(path.name), path) for path in entries(run, "tables"))
        matched = sorted((int(match["fold"]), path) for match, path in named if match)
        files += [(path_to_text(run.run_id), path) for _, path in matched]
    return read_tables(files, tables.PREDICTIONS)


def compare_runs(runs: Sequence[RunPaths], metrics: Sequence[str] = ("roc_auc",)) -> Answer:
    """The model's numbers over all folds, one row per run and metric, in the order of ``runs``:
    ``run_id metric value low high fold_mean fold_std num_videos num_groups``.
    """
    found = results(runs)
    query = """
        SELECT run_id, metric, value, low, high, fold_mean, fold_std, num_videos, num_groups FROM results
        WHERE source = 'model' AND scope = 'all' AND list_contains($metrics, metric)
        ORDER BY list_position($runs, run_id), list_position($metrics, metric)
    """
    asked: dict[str, object] = {"metrics": list(metrics), "runs": [path_to_text(run.run_id) for run in runs]}
    return Answer(ask(query, {"results": found.frame}, asked), found.notes)


def index_counts(run: RunPaths, by: str) -> Answer:
    """Videos and groups of the index by label and one column: ``label value num_videos num_groups total_bytes``.

    Args:
        run: the run whose index is counted.
        by: a column of ``tables.INDEX``, such as ``codec`` or ``platform``, or ``size`` for ``width x height``.

    Raises:
        ValueError: ``by`` is no such column.
    """
    known = (*tables.INDEX.columns, "size")
    if by not in known:
        raise ValueError(f"by: got {by!r}, wanted one of {', '.join(known)}.")
    found = read_tables([(path_to_text(run.run_id), run.index)], tables.INDEX)
    query = """
        SELECT label, coalesce(value, 'not known') AS value, count(*) AS num_videos,
               count(DISTINCT group_id) AS num_groups, CAST(sum(size_bytes) AS BIGINT) AS total_bytes
        FROM videos GROUP BY label, value ORDER BY num_videos DESC, value, label
    """
    value = pl.format("{} × {}", "width", "height") if by == "size" else pl.col(by).cast(pl.String)
    videos = found.frame.select("label", "group_id", "size_bytes", value.alias("value"))
    return Answer(ask(query, {"videos": videos}), found.notes)


def rejected_counts(run: RunPaths) -> Answer:
    """What the index had to leave out: ``reason num_videos``, most frequent first."""
    found = read_tables([(path_to_text(run.run_id), run.rejected)], tables.REJECTED)
    query = "SELECT reason, count(*) AS num_videos FROM rejected GROUP BY reason ORDER BY num_videos DESC, reason"
    return Answer(ask(query, {"rejected": found.frame}), found.notes)


def fold_balance(run: RunPaths) -> Answer:
    """How the outer folds came out: ``fold label num_videos num_groups``."""
    found = read_tables([(path_to_text(run.run_id), run.folds)], tables.FOLDS)
    query = """
        SELECT fold, label, count(*) AS num_videos, count(DISTINCT group_id) AS num_groups
        FROM folds GROUP BY fold, label ORDER BY fold, label DESC
    """
    return Answer(ask(query, {"folds": found.frame}), found.notes)


def augmentation_counts(run: RunPaths) -> Answer:
    """How often each operation was drawn: ``operation num_clips share`` of the ``num_augmented`` clips made.

    The operations column holds a JSON list of objects with a ``name``; clips where it does not are counted in notes.
    """
    found = read_tables([(path_to_text(run.run_id), run.augmented_metadata)], tables.AUGMENTED)
    made = found.frame.filter(pl.col("augmentation_index") > 0)
    drawn = [_operation_names(text) for text in made["operations"]]
    unread = sum(names is None for names in drawn)
    rows = pl.DataFrame(
        {"operation": [name for names in drawn for name in sorted(names or ())]}, schema={"operation": pl.String}
    )
    query = """
        SELECT operation, count(*) AS num_clips, $total AS num_augmented, count(*) / $total AS share
        FROM drawn GROUP BY operation ORDER BY num_clips DESC, operation
    """
    counts = ask(query, {"drawn": rows}, {"total": made.height})
    notes = (*found.notes, f"{unread} of {made.height} clips name no operation.") if unread else found.notes
    return Answer(counts, notes)


def ask_sql(runs: Sequence[RunPaths], query: str, parameters: dict[str, object] | None = None) -> Answer:
    """Any SQL over ``runs``, each table with ``run_id``: ``metrics memory memory_events results predictions folds
    videos rejected``.

    DuckDB runs it without access to files or extensions, so nothing but these tables can be read, and nothing written.

    Raises:
        duckdb.Error: the query is wrong; DuckDB's message says where.
    """
    sources = {
        "metrics": learning_curves(runs),
        "memory": memory_samples(runs),
        "memory_events": memory_events(runs),
        "results": results(runs),
        "predictions": predictions(runs),
        "folds": read_tables([(path_to_text(run.run_id), run.folds) for run in runs], tables.FOLDS),
        "videos": read_tables([(path_to_text(run.run_id), run.index) for run in runs], tables.INDEX),
        "rejected": read_tables([(path_to_text(run.run_id), run.rejected) for run in runs], tables.REJECTED),
    }
    notes = dict.fromkeys(note for answer in sources.values() for note in answer.notes)
    frames = {name: answer.frame for name, answer in sources.items()}
    return Answer(ask(query, frames, parameters), tuple(notes))


def _operation_names(text: str) -> set[str] | None:
    try:
        return {str(operation["name"]) for operation in json.loads(text)}
    except (ValueError, TypeError, KeyError):
        return None
