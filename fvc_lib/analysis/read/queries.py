"""Queries over any number of runs, answered as polars frames.

A query reads what the runs have recorded so far, also while they run and after a crash. It returns an ``Answer``: a
frame, and notes on files and lines that could not be read. The column ``run_id`` holds the id of a run, or its path if
two runs have the same id. SQL runs in DuckDB, which can read the given frames only, and no files.
"""

import fnmatch
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import polars as pl

from fvc_lib.analysis.read.runs import Answer, read_tables, run_names, run_parameters, run_task
from fvc_lib.analysis.wording import count_text
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import message_text, path_to_text, read_json_object
from fvc_lib.services.config import NEUTRAL, NOT_HASHED, RunConfig
from fvc_lib.services.errors import FvcError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.records.digests import damage_of, refuse_damaged
from fvc_lib.services.run_paths import RunPaths, find_run, list_runs
from fvc_lib.services.tasks import CONTROL_TRAININGS, FOLD_TRAINING, TASKS

# --- SQL over frames

MAX_ROWS = 100_000  # the most rows that a user's query returns
Limits = dict[str, str | bool | int | float | list[str]]  # settings of DuckDB
_CLOSED: Limits = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_LIMITS: Limits = {"memory_limit": "2GB", "max_execution_time": 60_000}  # ms


def ask(
    query: str,
    frames: Mapping[str, pl.DataFrame],
    parameters: Mapping[str, object] | None = None,
    *,
    limits: Limits | None = None,
) -> pl.DataFrame:
    """Return the rows of an SQL query over ``frames``. The query can read nothing else, and it cannot write.

    Args:
        query: a SELECT statement in DuckDB's SQL.
        frames: maps the name of a table in the query to its rows.
        parameters: maps a parameter of the query to its value.
        limits: DuckDB settings such as the memory limit. If given, at most ``MAX_ROWS`` + 1 rows are returned.

    Raises:
        ValueError: the query returns no rows, or a column has a type that polars lacks.
        duckdb.Error: the query is wrong or exceeded a limit.
    """
    with duckdb.connect(":memory:", config={**_CLOSED, **(limits or {})}) as connection:
        # ``enable_external_access`` leaves names such as ":memory:.wal" open. Opening a connection needs the file
        # system, so it is disabled only now.
        connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
        connection.execute("SET lock_configuration = true")
        for name, frame in frames.items():
            connection.register(name, frame.to_arrow())
        relation = connection.sql(query, params=dict(parameters or {}))
        if relation is None:
            raise ValueError(f"query: got {query!r}, which returns no rows; wanted a SELECT.")
        try:
            rows: pl.DataFrame = (relation.limit(MAX_ROWS + 1) if limits else relation).pl()
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"query: a column cannot be shown, cast it to VARCHAR: {error}") from error
    return rows


@dataclass(frozen=True)
class SqlExample:
    """An example for users: a question in words, and the SQL query over ``SQL_TABLES`` that answers it."""

    name: str
    question: str
    sql: str


# Each query in the file follows a comment "-- Name: question".
SQL_EXAMPLES = tuple(
    SqlExample(name, question, sql.strip())
    for name, question, sql in re.findall(
        r"^-- (.+?): (.+)\n((?:(?!-- ).*\n)+)",
        Path(__file__).with_name("examples.sql").read_text("utf-8"),
        re.MULTILINE,
    )
)

# --- Logs


_METRIC_COLUMNS = {
    "ts": "DOUBLE", "step": "BIGINT", "epoch": "BIGINT", "phase": "VARCHAR", "metric": "VARCHAR",
    "value": "DOUBLE", "flag": "VARCHAR", "fold": "BIGINT", "attempt": "BIGINT",
}  # fmt: skip
_PLACE = {
    "timestamp": "DOUBLE", "elapsed_seconds": "DOUBLE", "phase": "VARCHAR", "epoch": "BIGINT",
    "batch_idx": "BIGINT", "global_step": "BIGINT",
}  # fmt: skip
_MEMORY_COLUMNS = {
    **_PLACE, "allocated_mb": "DOUBLE", "reserved_mb": "DOUBLE", "max_allocated_mb": "DOUBLE",
    "total_memory_mb": "DOUBLE", "usage_percent": "DOUBLE", "free_mb": "DOUBLE", "device": "VARCHAR", "rank": "BIGINT",
    "rss_mb": "DOUBLE",
}  # fmt: skip
_EVENT_COLUMNS = {**_PLACE, "kind": "VARCHAR", "message": "VARCHAR", "details": "JSON"}


def _read_log_lines(runs: Sequence[RunPaths], folder: str, columns: Mapping[str, str], good: str) -> Answer:
    """Return the valid lines of the runs' JSONL log files, in file and line order.

    Lines that are not valid are left out, and the notes count them.

    Args:
        runs: the runs.
        folder: folder of the logs, relative to the folder of a run.
        columns: maps the name of a JSON field to its DuckDB type.
        good: SQL condition on the fields that a valid line satisfies.

    Returns:
        The columns ``file_number name run_id stage file_fold line``, then those of ``columns``. ``line`` counts from 1.
        ``name`` is the file name without ending; stage and fold are parsed from it.
    """
    rows: list[tuple[int, str, str, list[str]]] = []
    notes = []
    for run, run_id in zip(runs, _names(runs), strict=True):
        for path in sorted((run.root / folder).glob("*.jsonl")):
            try:
                text = path.read_bytes().decode("utf-8", "replace")
            except OSError as error:
                notes.append(f"{path_to_text(path)} could not be read: {error.strerror}.")
                continue
            if damage := damage_of(path):
                notes.append(f"{message_text(damage)} Its good lines are shown and may be wrong.")
            rows.append((len(rows), path_to_text(path.stem), run_id, text.split("\n")))
    schema: dict[str, pl.DataType | type[pl.DataType]] = {
        "file_number": pl.Int64,
        "name": pl.String,
        "run_id": pl.String,
        "text": pl.List(pl.String),
    }
    files = pl.DataFrame(rows, schema, orient="row")
    line_numbers = pl.int_ranges(1, pl.col("text").list.len() + 1)
    lines = files.with_columns(line=line_numbers).explode("text", "line")
    # DuckDB parses a table of lines, so that the names of files never reach SQL.
    query = f"""
        SELECT file_number, name, run_id, regexp_replace(name, '_fold_\\d+$', '') AS stage,
               TRY_CAST(regexp_extract(name, '_fold_(\\d+)$', 1) AS BIGINT) AS file_fold, line,
               {", ".join(f"fields.{name} AS {name}" for name in columns)}, coalesce({good}, false) AS good
        FROM (SELECT *, TRY(from_json(text, '{json.dumps(columns)}')) AS fields FROM lines)
        WHERE good OR NOT regexp_full_match(text, '\\s*')
    """
    parsed = ask(query, {"lines": lines})
    bad = parsed.filter(~pl.col("good")).group_by("run_id", "name", maintain_order=True)
    for run_id, name, number, first in bad.agg(pl.len(), pl.col("line").first().alias("first")).rows():
        counted = count_text(number, "line")
        notes.append(f"{counted} of {run_id}/{name}.jsonl could not be read, the first is line {first}.")
    return Answer(parsed.filter("good").drop("good"), tuple(notes))


def learning_curves(
    runs: Sequence[RunPaths], *, metrics: Sequence[str] = (), phases: Sequence[str] = (), folds: Sequence[int] = ()
) -> Answer:
    """Return the metrics that ``runs`` logged during training, one row per logged value.

    Columns are ``run_id stage fold phase metric step epoch value flag attempt ts``, in step order within each curve.
    ``ts`` is in seconds since 1970. ``value`` is null where ``flag`` is nan, inf or -inf. If a step was logged again
    after a resume, only the last line of the last attempt (start of the stage) is returned.

    Args:
        runs: the runs.
        metrics: names of the metrics to return, such as ``loss``. Empty: all.
        phases: phases to return, such as ``train`` and ``validation``. Empty: all.
        folds: outer folds to return. Empty: all, and rows without a fold.
    """
    good = "step IS NOT NULL AND phase IS NOT NULL AND metric IS NOT NULL AND (isfinite(value) OR flag IS NOT NULL)"
    lines = _read_log_lines(runs, "metrics", _METRIC_COLUMNS, good)
    curve = ["run_id", "stage", "fold", "phase", "metric", "step", "file_number"]
    texts = dict.fromkeys(("run_id", "stage", "phase", "metric"), pl.String)
    # Sorting a million texts takes three times as long as sorting their numbers.
    as_numbers = [pl.col(name).cast(pl.Enum(lines.frame[name].unique().sort())) for name in texts]
    finite_value = pl.when(pl.col("value").is_finite()).then("value")
    frame = lines.frame.with_columns(
        pl.coalesce("fold", "file_fold").alias("fold"),
        finite_value.alias("value"),
        pl.col("attempt").fill_null(1),
        *as_numbers,
    )
    frame = frame.sort(*curve, "attempt", "line", nulls_last=True)
    next_differs = [pl.col(name).ne_missing(pl.col(name).shift(-1)) for name in curve]
    is_last = pl.any_horizontal(next_differs)
    columns = ["run_id", "stage", "fold", "phase", "metric", "step", "epoch", "value", "flag", "attempt", "ts"]
    is_last_of_all = pl.int_range(pl.len()) == pl.len() - 1
    rows = frame.filter(is_last | is_last_of_all).select(columns).cast(texts)  # type: ignore[arg-type]
    wanted = {"metric": metrics, "phase": phases, "fold": folds}
    chosen = [pl.col(column).is_in(list(values)) for column, values in wanted.items() if values]
    return Answer(rows.filter(*chosen) if chosen else rows, lines.notes)


def memory_samples(runs: Sequence[RunPaths]) -> Answer:
    """Return the logged memory samples of ``runs``, ordered by run, stage, fold and line.

    Columns are ``run_id stage fold attempt seconds line``, then the fields of the log, such as ``phase``, ``epoch`` and
    ``rss_mb``. ``attempt`` counts the starts of a stage from 1, and increases where ``elapsed_seconds`` decreases.
    ``seconds`` is the working time since the first start, without the pauses between attempts.
    """
    good = "timestamp IS NOT NULL AND elapsed_seconds IS NOT NULL AND (rss_mb IS NOT NULL OR allocated_mb IS NOT NULL)"
    lines = _read_log_lines(runs, "memory", _MEMORY_COLUMNS, good)
    query = f"""
        WITH steps AS (
            SELECT *, lag(elapsed_seconds) OVER (PARTITION BY file_number ORDER BY line) AS before FROM lines
        ), moved AS (
            SELECT *, before IS NULL OR elapsed_seconds < before AS starts,
                   elapsed_seconds - CASE WHEN elapsed_seconds >= before THEN before ELSE 0 END AS moved
            FROM steps
        )
        SELECT run_id, stage, file_fold AS fold, count(*) FILTER (starts) OVER so_far AS attempt,
               sum(moved) OVER so_far AS seconds, line, {", ".join(_MEMORY_COLUMNS)}
        FROM moved WINDOW so_far AS (PARTITION BY file_number ORDER BY line)
        ORDER BY run_id, stage, fold, file_number, line
    """
    return Answer(ask(query, {"lines": lines.frame}), lines.notes)


def memory_events(runs: Sequence[RunPaths]) -> Answer:
    """Return the logged memory events of ``runs``, such as an out-of-memory, one row per event.

    Columns are ``run_id stage fold attempt seconds line phase epoch batch_idx global_step kind message details``, then
    values from the details: ``happened_in context_file predicted_peak_mb micro_batch micro_batch_next``. ``details`` is
    JSON text. ``attempt`` counts the starts of a stage from 1. ``seconds`` is the working time since the first start,
    without the pauses between attempts.

    The log of events does not record the attempt. The function chooses the attempt whose start is nearest to
    ``timestamp - elapsed_seconds`` of the event.
    """
    good = "kind IS NOT NULL AND timestamp IS NOT NULL AND elapsed_seconds IS NOT NULL"
    lines = _read_log_lines(runs, "memory/events", _EVENT_COLUMNS, good)
    query = """
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
               CAST(details AS VARCHAR) AS details, details->>'where' AS happened_in,
               details->>'context_file' AS context_file,
               try_cast(details->>'predicted_peak_mb' AS DOUBLE) AS predicted_peak_mb,
               try_cast(details->>'micro_batch' AS BIGINT) AS micro_batch,
               try_cast(details->>'micro_batch_next' AS BIGINT) AS micro_batch_next
        FROM matched ORDER BY run_id, stage, fold, file_number, line
    """
    samples = memory_samples(runs).frame
    return Answer(ask(query, {"lines": lines.frame, "samples": samples}), lines.notes)


def memory_peaks(runs: Sequence[RunPaths]) -> Answer:
    """Return the peak memory of each stage and fold in bytes: the maximum over all phases and samples.

    Columns are ``run_id stage fold num_samples peak_rss_bytes peak_device_bytes``. ``peak_rss_bytes`` is main memory.
    On a CPU it includes child processes. ``peak_device_bytes`` is the memory of the accelerator, or null without one.
    """
    samples = memory_samples(runs)
    query = """
        WITH known AS (
            SELECT *, coalesce(device, 'cpu') LIKE 'cpu%' AS on_cpu,
                   greatest(allocated_mb, max_allocated_mb) AS highest_mb
            FROM samples
        )
        SELECT run_id, stage, fold, count(*) AS num_samples,
               CAST(round(1e6 * max(greatest(rss_mb, CASE WHEN on_cpu THEN highest_mb END))) AS BIGINT)
                   AS peak_rss_bytes,
               CAST(round(1e6 * max(highest_mb) FILTER (NOT on_cpu)) AS BIGINT) AS peak_device_bytes
        FROM known GROUP BY run_id, stage, fold ORDER BY run_id, stage, fold
    """
    return Answer(ask(query, {"samples": samples.frame}), samples.notes)


# --- Records


def training_summary(runs: Sequence[RunPaths]) -> Answer:
    """Return one row per finished training, with its number of epochs, best epoch, duration and memory.

    Columns begin with ``run_id stage fold trained model device epochs``. ``trained`` is ``model`` or the name of a
    control, such as the model trained on shuffled labels. ``num_train_samples``, ``num_validation_samples`` and
    ``num_test_samples`` count videos, images, or pairs of a video and a text. Values that are missing or of another
    type are null; ``best_epoch`` is null if none was chosen.
    """
    rows = list[tuple[str, str, str, str]]()
    notes = []
    for run, run_id in zip(runs, _names(runs), strict=True):
        for path in sorted((run.root / "checkpoints").glob("*/outcome.json")):
            outcome = read_json_object(path)
            name = path_to_text(path.parent.name)
            if (damage := damage_of(path)) or not isinstance(outcome.get("training"), dict):
                notes.append(damage or f"{path_to_text(path)} holds no finished training.")
                continue
            for trained, record in {"model": "training", **{name: name for name in CONTROL_TRAININGS}}.items():
                if isinstance(outcome.get(record), dict):
                    text = json.dumps({**outcome, **outcome[record]})
                    rows.append((run_id, name, trained, text))
    query = f"""
        WITH outcomes AS (
            SELECT *, TRY_CAST(regexp_extract(name, '^fold_(\\d+)$', 1) AS BIGINT) AS fold,
                   TRY_CAST(text AS JSON) AS record
            FROM texts
        )
        SELECT run_id, CASE WHEN fold IS NULL THEN name ELSE '{FOLD_TRAINING}' END AS stage, fold, trained,
               record->>'model' AS model, record->>'device' AS device,
               CAST(json_array_length(record, '$.history') AS BIGINT) AS epochs,
               nullif(TRY_CAST(record->>'best_epoch' AS BIGINT), 0) AS best_epoch,
               TRY_CAST(record->>'threshold' AS DOUBLE) AS threshold,
               TRY_CAST(record->>'temperature' AS DOUBLE) AS temperature,
               TRY_CAST(record->>'steps' AS BIGINT) AS steps,
               TRY_CAST(record->>'nonfinite_steps' AS BIGINT) AS nonfinite_steps,
               TRY_CAST(record->>'micro_batch' AS BIGINT) AS micro_batch,
               TRY_CAST(record->>'seconds' AS DOUBLE) AS seconds,
               TRY_CAST(coalesce(record->>'num_train_videos', record->>'num_train') AS BIGINT) AS num_train_samples,
               TRY_CAST(coalesce(record->>'num_validation_videos', record->>'num_validation') AS BIGINT)
                   AS num_validation_samples,
               TRY_CAST(coalesce(record->>'num_test_videos', record->>'num_test') AS BIGINT) AS num_test_samples,
               TRY_CAST(record->>'peak_rss_bytes' AS BIGINT) AS peak_rss_bytes,
               TRY_CAST(record->>'peak_device_bytes' AS BIGINT) AS peak_device_bytes
        FROM outcomes ORDER BY run_id, fold NULLS LAST, name, trained = 'model' DESC, trained
    """
    texts = pl.DataFrame(rows, dict.fromkeys(("run_id", "name", "trained", "text"), pl.String), orient="row")
    return Answer(ask(query, {"texts": texts}), tuple(notes))


_PARAMETERS = {"parameter": pl.String, "run_id": pl.String, "value": pl.String, "changes_numbers": pl.Boolean}


def read_parameters(runs: Sequence[RunPaths]) -> Answer:
    """Return the parameters of ``runs``, one row per parameter and run, in the order of ``params.yaml``.

    Columns are ``parameter run_id value changes_numbers``. ``value`` is text. ``changes_numbers`` is false for
    parameters that cannot change a result, such as folders.
    """
    notes, known = [], {}
    for run, run_id in zip(runs, _names(runs), strict=True):
        try:
            if run.params_yaml.is_file():
                known[run_id] = read_params_file(run.params_yaml)
        except (FvcError, OSError) as error:
            notes.append(f"{path_to_text(run.params_yaml)} was left out: {error}")
    rows = []
    for name in dict.fromkeys(name for values in known.values() for name in values):
        for run_id, values in known.items():
            value = values.get(name)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append((name, run_id, text, name not in NOT_HASHED))
    return Answer(pl.DataFrame(rows, schema=_PARAMETERS, orient="row"), tuple(notes))


def parameter_differences(runs: Sequence[RunPaths]) -> Answer:
    """Return the parameters that do not have the same value in all ``runs``, one row per parameter and run.

    Columns are ``parameter run_id value changes_numbers``. ``changes_numbers`` is false for parameters that cannot
    change a result, such as folders.
    """
    parameters = read_parameters(runs)
    differing = pl.col("value").n_unique().over("parameter") > 1
    return Answer(parameters.frame.filter(differing), parameters.notes)


# --- Tables


def _stored(name: str, schema: str = "") -> Callable[[Sequence[RunPaths]], Answer]:
    """Return a function that takes runs and reads one table of all of them as an ``Answer``.

    Args:
        name: attribute of ``RunPaths`` with the path of the table, such as ``results``.
        schema: name of the table's schema in ``services.tables``, in lower or upper case. Empty: ``name``.
    """
    wanted: tables.TableSchema = getattr(tables, (schema or name).upper())
    return lambda runs: read_tables(zip(_names(runs), (getattr(run, name) for run in runs), strict=True), wanted)


def _names(runs: Sequence[RunPaths]) -> list[str]:
    return list(map(path_to_text, run_names(runs)))


results = _stored("results")  # rows of tables.RESULTS, after a first column ``run_id``
task_results = _stored("task_results")  # rows of tables.TASK_RESULTS, after a first column ``run_id``


def fold_table(runs: Sequence[RunPaths]) -> Answer:
    """Return the metrics of the model on the test part of each outer fold, one row per run and fold.

    Columns are ``run_id fold num_videos num_groups``, then one column for each metric.
    """
    stored = results(runs)
    fold = pl.col("scope").str.extract(r"^fold_([0-9]+)$").cast(pl.Int64)
    rows = stored.frame.filter(source="model").with_columns(fold=fold).drop_nulls("fold")
    keys = ["run_id", "fold", "num_videos", "num_groups"]
    return Answer(rows.pivot("metric", index=keys, values="value").sort("run_id", "fold"), stored.notes)


def predictions(runs: Sequence[RunPaths]) -> Answer:
    """Return the scores that ``runs`` predicted for the test videos of their outer folds, one row per video.

    Columns are ``run_id``, then those of ``tables.PREDICTIONS``. Rows are ordered by run and fold.
    """
    files = []
    for run_id, run in zip(_names(runs), runs, strict=True):
        found = run.tables.glob("predictions_fold_*.parquet")
        files += [(run_id, path) for path in sorted(found, key=lambda path: (len(path.name), path.name))]
    return read_tables(files, tables.PREDICTIONS)


def predictions_of_other_seeds(run: RunPaths) -> list[pl.DataFrame]:
    """Return the predictions of other runs that differ from ``run`` in the seed alone, one frame per seed.

    Only runs of the same experiment that have results are searched. If several runs have the same seed, the latest is
    used. The runs may have different folds. Their predictions can still be compared: in each run, a video is scored by
    a network that was not trained on the video's group.
    """
    frames = {}
    parameters = {**NEUTRAL, **run_parameters(run)}
    for other in map(RunPaths, sorted(run.root.parent.glob("run_*"))):
        others = {**NEUTRAL, **run_parameters(other)}
        names = {*parameters, *others} - NOT_HASHED
        if other.results.is_file() and [name for name in names if parameters.get(name) != others.get(name)] == ["seed"]:
            scored = predictions([other])
            if scored.frame.height and not scored.notes:  # the other run's report names damaged files
                frames[others["seed"]] = scored.frame.drop("run_id")
    return list(frames.values())


def _asked(run: RunPaths, table: str, query: str) -> Answer:
    """Return the rows of an SQL query over one table of ``run``. ``table`` is a key of ``SQL_TABLES``."""
    answer = SQL_TABLES[table]([run])
    return Answer(ask(query, {table: answer.frame}), answer.notes)


def index_counts(run: RunPaths, by: str) -> Answer:
    """Count the videos and groups of a run's index (its table of videos) by label and one property.

    Columns are ``label value num_videos num_groups``, the largest number of videos first. ``value`` is text.

    Args:
        run: the run.
        by: the property, a column of ``tables.INDEX`` such as ``codec``, or ``size`` for width x height.
    """
    value = "width || ' × ' || height" if by == "size" else f"CAST({by} AS VARCHAR)"
    query = f"""
        SELECT label, coalesce({value}, 'not known') AS value, count(*) AS num_videos,
               count(DISTINCT group_id) AS num_groups
        FROM videos GROUP BY 1, 2 ORDER BY num_videos DESC, 2, 1
    """
    return _asked(run, "videos", query)


def augmentation_counts(run: RunPaths) -> Answer:
    """Count how many augmented clips each operation of the augmentation was applied to, one row per operation.

    Columns are ``operation num_clips num_augmented share``. ``num_clips`` is the number of augmented clips that the
    operation was applied to. ``num_augmented`` is the number of all augmented clips, and ``share`` is ``num_clips /
    num_augmented``.
    """
    query = """
        WITH made AS (
            SELECT clip_id, TRY_CAST(operations AS JSON) AS operations, count(*) OVER () AS num_augmented
            FROM clips WHERE augmentation_index > 0
        ), drawn AS (
            SELECT DISTINCT clip_id, num_augmented, unnest(operations->>'$[*].name') AS operation FROM made
        )
        SELECT operation, count(*) AS num_clips, num_augmented, count(*) / num_augmented AS share
        FROM drawn GROUP BY operation, num_augmented ORDER BY num_clips DESC, operation
    """
    return _asked(run, "clips", query)


SQL_TABLES: Mapping[str, Callable[[Sequence[RunPaths]], Answer]] = {
    "metrics": learning_curves,
    "memory": memory_samples,
    "memory_events": memory_events,
    "training": training_summary,
    "parameters": read_parameters,
    "predictions": predictions,
    "videos": _stored("index"),
    "clips": _stored("augmented_metadata", "augmented"),
    **{name: _stored(name) for name in (
        "results", "slices", "leakage_audit", "folds", "rejected", "group_links", "annotations", "task_results",
        "images", "image_targets", "image_predictions", "target_predictions", "video_texts", "retrieval_ranks",
        "captions",
    )},
}  # fmt: skip


# --- The selection of a dashboard's reader

_MOST_RUNS = 8  # the most runs that are selected by default


@dataclass(frozen=True)
class Selection:
    """What the user of a dashboard has chosen to see: runs, metrics and folds.

    Attributes:
        runs: the chosen runs, at least one.
        detail: the run shown in detail. If it is None or not in ``runs``, the first run is shown.
        metrics: metrics with learning curves. The first three are drawn.
        folds: outer folds to show. Empty: all.
        smoothing: smoothing of learning curves, in [0, 1). 0 is none.
    """

    runs: tuple[RunPaths, ...]
    detail: RunPaths | None = None
    metrics: tuple[str, ...] = ("loss",)
    folds: tuple[int, ...] = ()
    smoothing: float = 0.0

    @property
    def detailed(self) -> RunPaths:
        """The run that is shown in detail."""
        return self.detail if self.detail is not None and self.detail in self.runs else self.runs[0]


def default_selection(runs_dir: Path, run: str | None = None) -> Selection:
    """Return a selection of at most eight runs: ``run``, shown in detail, and the newest others of its experiment.

    ``run`` is a name or path. None: the newest run in ``runs_dir``.

    Raises:
        UsageError: there is no such run.
        DataError: a file of the run is damaged.
    """
    chosen = find_run(runs_dir, run or "latest")
    refuse_damaged(chosen.root)
    alike = [other for other in list_runs(runs_dir) if other.experiment == chosen.experiment and other != chosen]
    newest = alike[::-1][: _MOST_RUNS - 1]
    return Selection((chosen, *newest), metrics=default_metrics(chosen))


def default_metrics(run: RunPaths) -> tuple[str, ...]:
    """Return the names of the metrics whose learning curves the dashboard shows first for the run's task.

    They come from ``TaskSpec.curves``. A name with ``*`` in it stands for the first logged metric that it matches, in
    alphabetical order.
    """
    logged = learning_curves([run], phases=["validation"]).frame["metric"].unique().sort()
    declared = TASKS[task_of(run)].curves
    names = [fnmatch.filter(logged, name)[:1] if "*" in name else [name] for name in declared]
    return tuple(itertools.chain(*names))


def task_of(run: RunPaths) -> str:
    """Return the task of ``run``: ``video``, ``image`` or ``video_text``."""
    return run_task(run_parameters(run))


def confidence_of(selection: Selection) -> float:
    """Return the coverage, such as 0.95, of the intervals in the tables of the run that is shown in detail."""
    confidence = run_parameters(selection.detailed).get("confidence")
    return confidence if isinstance(confidence, float) else RunConfig().confidence


def table_of(selection: Selection, name: str) -> pl.DataFrame:
    """Return a table of the run that is shown in detail. It is empty if the file is missing or unreadable.

    ``name`` is a key of ``SQL_TABLES``, such as ``results``.
    """
    return SQL_TABLES[name]([selection.detailed]).frame


def of_folds(selection: Selection, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``frame`` that belong to the chosen folds. If no fold is chosen, return all rows."""
    return frame.filter(pl.col("fold").is_in(selection.folds)) if selection.folds else frame


# --- A user's SQL


def ask_sql(
    runs: Sequence[RunPaths],
    query: str,
    parameters: Mapping[str, object] | None = None,
    *,
    frames: Mapping[str, pl.DataFrame] | None = None,
) -> Answer:
    """Return the rows of a user's SQL query over the tables of ``runs`` (``SQL_TABLES``) and over ``frames``.

    The query can read nothing else and write nothing. It is stopped after 60 s or if it needs more than 2 GB. At most
    100,000 rows are returned, and a note says if there are more.

    Args:
        runs: runs whose tables the query may name.
        query: a SELECT.
        parameters: maps a parameter of the query to its value.
        frames: further tables of the user, as a dict from table name to frame.

    Raises:
        ValueError: the query returns no rows, or a column has a type that polars lacks.
        duckdb.Error: the query is wrong or exceeded a limit.
    """
    # A table may have a million rows, so it is read only if its name occurs in the query. DuckDB's ``query_table`` can
    # compose names, so with it all tables are read.
    text = query.lower()
    answers = {name: read(runs if name in text or "query" in text else []) for name, read in SQL_TABLES.items()}
    tables_of_runs = {name: answer.frame for name, answer in answers.items()}
    rows = ask(query, {**tables_of_runs, **(frames or {})}, parameters, limits=_LIMITS)
    notes = list(dict.fromkeys(note for answer in answers.values() for note in answer.notes))
    if rows.height > MAX_ROWS:
        notes.append(f"Only the first {MAX_ROWS:,} rows are shown.")
    return Answer(rows.head(MAX_ROWS), tuple(notes))
