"""Typed questions to any number of runs, answered by DuckDB as polars frames.

Every query takes the runs it is about, reads what they have (also while they run) and says in the answer's notes what
could not be read. A run folder that was copied in simply counts; ``run_id`` is what ``naming.run_names`` calls a run
among those asked for.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandera.polars as pa
import polars as pl

from fvc_lib.analysis.read.logs import METRIC_LINES, curves, read_events, read_log_lines, read_samples
from fvc_lib.analysis.read.naming import run_names
from fvc_lib.analysis.read.records import Answer, entries, log_files, read_tables
from fvc_lib.analysis.read.sql import Limits, ask, ask_isolated
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import path_to_text, read_json_object
from fvc_lib.services.config import NOT_HASHED
from fvc_lib.services.config_fields import RETIRED
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.records.digests import damage_of
from fvc_lib.services.run_paths import CHECKPOINT_FOLDERS, RunPaths
from fvc_lib.services.tasks import CONTROL_TRAININGS, FOLD_TRAINING

_PREDICTIONS = re.compile(r"^predictions_fold_(?P<fold>\d+)\.parquet$")


def learning_curves(
    runs: Sequence[RunPaths], *, metrics: Sequence[str] = (), phases: Sequence[str] = (), folds: Sequence[int] = ()
) -> Answer:
    """The metric log of ``runs``; empty ``metrics``, ``phases`` or ``folds`` mean all of them.

    ``run_id stage fold phase metric step epoch value flag attempt ts`` ordered by step within each curve; ``value`` is
    null where ``flag`` says nan, inf or -inf. Of the same (stage, step, metric, phase, fold) logged several times, as
    after a resume, the last attempt counts, and within an attempt the last line.
    """
    runs = sorted(runs, key=lambda run: (path_to_text(run.run_id), run.root))
    files = [file for run, name in zip(runs, run_names(runs), strict=True) for file in log_files(run, "metrics", name)]
    lines = read_log_lines(files, METRIC_LINES)
    wanted = {"metric": metrics, "phase": phases, "fold": folds}
    chosen = [pl.col(column).is_in(list(values)) for column, values in wanted.items() if values]
    frame = curves(lines)
    frame = frame.filter(*chosen) if chosen else frame
    run_ids = pl.Series("run_id", [path_to_text(file.run_id) for file in files], dtype=pl.String)
    return Answer(frame.select(run_ids.gather(frame["file_number"]), pl.exclude("file_number")), lines.notes)


def training_summary(runs: Sequence[RunPaths]) -> Answer:
    """How each finished training went, one row for the model and one for each control, as ``trained`` tells.

    ``run_id stage fold trained model device epochs best_epoch threshold temperature steps nonfinite_steps micro_batch
    seconds num_train_samples num_validation_samples num_test_samples peak_rss_bytes peak_device_bytes``; samples are
    videos, images, or pairs of a video and a text. A stage without folds has a null fold; what a record does not tell,
    or not in this type, is null.
    """
    rows: list[dict[str, Any]] = []
    notes = []
    for run, run_id in zip(runs, _names(runs), strict=True):
        for path, stage, fold in _trainings(run):
            if damage := damage_of(path):
                notes.append(damage)
                continue
            outcome = read_json_object(path)
            trainings = {"model": outcome.get("training"), **{name: outcome.get(name) for name in CONTROL_TRAININGS}}
            if not isinstance(trainings["model"], dict):
                notes.append(f"{path_to_text(path)} holds no finished training.")
                continue
            for trained, record in trainings.items():
                if isinstance(record, dict):
                    told = {**outcome, **record}
                    for part in ("train", "validation", "test"):
                        told[f"num_{part}_samples"] = told.get(f"num_{part}_videos", told.get(f"num_{part}"))
                    history = record.get("history")
                    told["epochs"] = len(history) if isinstance(history, list) else None
                    told |= {"run_id": run_id, "stage": stage, "fold": fold, "trained": trained}
                    rows.append({name: _of_type(told.get(name), kind) for name, kind in _TRAININGS.items()})
    return Answer(pl.DataFrame(rows, schema=_TRAININGS), tuple(notes))


def _trainings(run: RunPaths) -> list[tuple[Path, str, int | None]]:
    """Record, stage and fold of each finished training, folds in order; without a fold, the stage has none."""
    names = [folder.name for folder in entries(run, "checkpoints")]
    folds = sorted(int(match[1]) for name in names if (match := _FOLD.match(name)))
    found: list[tuple[Path, str, int | None]] = [(run.fold_outcome(fold), FOLD_TRAINING, fold) for fold in folds]
    stages = {folder: stage for stage, folder in CHECKPOINT_FOLDERS.items()}
    others = (stages.get(name, name) for name in names if not _FOLD.match(name))
    found += [(run.stage_outcome(stage), path_to_text(stage), None) for stage in others]
    return [each for each in found if each[0].is_file()]


def _of_type(value: Any, kind: pl.DataType) -> Any:
    if kind == pl.String:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= 2**63:
        return None
    return value if kind == pl.Float64 or isinstance(value, int) else None


_FOLD = re.compile(r"^fold_(0|[1-9]\d{0,8})$")
_TRAININGS = pl.Schema(
    {
        **dict.fromkeys(("run_id", "stage"), pl.String()), "fold": pl.Int64(),
        **dict.fromkeys(("trained", "model", "device"), pl.String()),
        **dict.fromkeys(("epochs", "best_epoch"), pl.Int64()),
        **dict.fromkeys(("threshold", "temperature"), pl.Float64()),
        **dict.fromkeys(("steps", "nonfinite_steps", "micro_batch"), pl.Int64()), "seconds": pl.Float64(),
        **dict.fromkeys(("num_train_samples", "num_validation_samples", "num_test_samples"), pl.Int64()),
        **dict.fromkeys(("peak_rss_bytes", "peak_device_bytes"), pl.Int64()),
    }
)  # fmt: skip


_PARAMETERS = pl.Schema(
    {"parameter": pl.String, "run_id": pl.String, "value": pl.String, "changes_numbers": pl.Boolean}
)

_MAX_BYTES = 1_000_000  # ours are of some kilobytes; YAML can grow a thousandfold when read


def read_parameters(runs: Sequence[RunPaths]) -> Answer:
    """Every parameter of every run in ``params.yaml``'s own order, with the columns of ``parameter_differences``."""
    rows: list[tuple[str, str, str | None, bool]] = []
    notes: list[str] = []
    found = [_parameters(run, notes) for run in runs]
    run_ids = list(map(path_to_text, run_names(runs)))
    names = dict.fromkeys(name for each in found if each is not None for name in each)
    for name in names:
        for run_id, each in zip(run_ids, found, strict=True):
            if each is not None:
                rows.append((name, run_id, each.get(name), name not in NOT_HASHED | RETIRED.keys()))
    return Answer(pl.DataFrame(rows, schema=_PARAMETERS, orient="row"), tuple(notes))


def _parameters(run: RunPaths, notes: list[str]) -> dict[str, str] | None:
    path = run.params_yaml
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"it has more than {_MAX_BYTES:,} bytes")
        return {str(name): _text(value) for name, value in read_params_file(path).items()}
    except (FvcError, OSError, RecursionError, ValueError) as error:
        notes.append(f"{path_to_text(path)} was left out: {error}")
        return None


def _text(value: Any) -> str:
    """A value as it would be typed; one that no parameter has, such as nested lists, by its type's name alone."""
    if isinstance(value, str):
        return value
    items = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, (str, int, float)) for item in items):
        return f"({type(value).__name__})"
    return json.dumps(value, ensure_ascii=False)


def parameter_differences(runs: Sequence[RunPaths]) -> Answer:
    """The parameters that are not the same in all ``runs``: ``parameter run_id value changes_numbers``.

    ``value`` is null where a run knows no such parameter; ``changes_numbers`` is false for those that say only where
    and how.
    """
    found = read_parameters(runs)
    differing = pl.col("value").n_unique().over("parameter") > 1  # to lack it is a value too
    return Answer(found.frame.filter(differing), found.notes)


def memory_samples(runs: Sequence[RunPaths]) -> Answer:
    """Every memory sample of ``runs``; ``logs.read_samples`` tells the columns."""
    named = zip(runs, run_names(runs), strict=True)
    return read_samples([file for run, name in named for file in log_files(run, "memory", name)])


def memory_events(runs: Sequence[RunPaths]) -> Answer:
    """What happened to the memory of ``runs``; ``logs.read_events`` tells the columns."""
    named = zip(runs, run_names(runs), strict=True)
    files = [file for run, name in named for file in log_files(run, "memory/events", name)]
    return read_events(files, memory_samples(runs).frame)


def memory_peaks(runs: Sequence[RunPaths]) -> Answer:
    """The highest memory of each stage: ``run_id stage fold num_samples peak_rss_bytes peak_device_bytes``.

    The log's megabytes are 1e6 bytes. On a CPU ``allocated_mb`` is the process with its children, which is what a job's
    limit counts; ``peak_device_bytes`` is null without an accelerator. Every phase counts, measuring beforehand too.
    """
    samples = memory_samples(runs)
    query = """
        SELECT run_id, stage, fold, count(*) AS num_samples,
               CAST(max(greatest(rss_mb, CASE WHEN on_cpu THEN greatest(allocated_mb, max_allocated_mb) END))
                    * 1000000 AS BIGINT) AS peak_rss_bytes,
               CAST(max(CASE WHEN NOT on_cpu THEN greatest(allocated_mb, max_allocated_mb) END)
                    * 1000000 AS BIGINT) AS peak_device_bytes
        FROM (SELECT *, coalesce(device, 'cpu') LIKE 'cpu%' AS on_cpu FROM samples)
        GROUP BY run_id, stage, fold ORDER BY run_id, stage, fold
    """
    return Answer(ask(query, {"samples": samples.frame}), samples.notes)


def results(runs: Sequence[RunPaths]) -> Answer:
    """The results tables of ``runs`` (``tables.RESULTS`` with ``run_id`` in front); runs without one add no rows."""
    return _stored("results")(runs)


def task_results(runs: Sequence[RunPaths]) -> Answer:
    """The same of runs without folds (``tables.TASK_RESULTS``)."""
    return _stored("task_results")(runs)


def fold_table(runs: Sequence[RunPaths]) -> Answer:
    """Of the model one row per run and fold: ``run_id fold num_videos num_groups`` and one column per metric."""
    found = results(runs)
    query = """
        SELECT run_id, CAST(regexp_extract(scope, '^fold_([0-9]+)$', 1) AS BIGINT) AS fold,
               num_videos, num_groups, metric, value
        FROM results WHERE source = 'model' AND regexp_full_match(scope, 'fold_[0-9]+')
    """
    rows = ask(query, {"results": found.frame})
    metrics = rows["metric"].unique(maintain_order=True).to_list()
    wide = rows.pivot(
        "metric", index=["run_id", "fold", "num_videos", "num_groups"], values="value", on_columns=metrics
    )
    return Answer(wide.sort("run_id", "fold"), found.notes)


def predictions(runs: Sequence[RunPaths]) -> Answer:
    """Outer-fold predictions of ``runs`` (``tables.PREDICTIONS`` with ``run_id`` in front), folds in order."""
    files = []
    for name, run in zip(_names(runs), runs, strict=True):
        # Listed and matched in Python: a glob would read a folder's own brackets as a pattern.
        found = ((_PREDICTIONS.match(path.name), path) for path in entries(run, "tables"))
        matched = sorted((int(match["fold"]), path) for match, path in found if match)
        files += [(name, path) for _, path in matched]
    return read_tables(files, tables.PREDICTIONS)


def compare_runs(runs: Sequence[RunPaths]) -> Answer:
    """The model's ROC AUC over all folds, one row per run, in the order of ``runs``:
    ``run_id metric value low high fold_mean fold_std num_videos num_groups``.
    """
    found = results(runs)
    query = """
        SELECT run_id, metric, value, low, high, fold_mean, fold_std, num_videos, num_groups FROM results
        WHERE source = 'model' AND scope = 'all' AND metric = 'roc_auc'
        ORDER BY list_position($runs, run_id)
    """
    return Answer(ask(query, {"results": found.frame}, {"runs": _names(runs)}), found.notes)


def index_counts(run: RunPaths, by: str) -> Answer:
    """Videos and groups of the index by label and one column: ``label value num_videos num_groups total_bytes``.

    ``by`` is a column of ``tables.INDEX``, or ``size`` for ``width x height``.

    Raises:
        ValueError: ``by`` is no such column.
    """
    known = (*tables.INDEX.columns, "size")
    if by not in known:
        raise ValueError(f"by: got {by!r}, wanted one of {', '.join(known)}.")
    found = SQL_TABLES["videos"]([run])
    query = """
        SELECT label, coalesce(value, 'not known') AS value, count(*) AS num_videos,
               count(DISTINCT group_id) AS num_groups, CAST(sum(size_bytes) AS BIGINT) AS total_bytes
        FROM videos GROUP BY label, value ORDER BY num_videos DESC, value, label
    """
    value = pl.format("{} × {}", "width", "height") if by == "size" else pl.col(by).cast(pl.String)
    videos = found.frame.select("label", "group_id", "size_bytes", value.alias("value"))
    return Answer(ask(query, {"videos": videos}), found.notes)


def fold_balance(run: RunPaths) -> Answer:
    """How the outer folds came out: ``fold label num_videos num_groups``."""
    found = SQL_TABLES["folds"]([run])
    query = """
        SELECT fold, label, count(*) AS num_videos, count(DISTINCT group_id) AS num_groups
        FROM folds GROUP BY fold, label ORDER BY fold, label DESC
    """
    return Answer(ask(query, {"folds": found.frame}), found.notes)


def augmentation_counts(run: RunPaths) -> Answer:
    """How often each operation was drawn: ``operation num_clips share`` of the ``num_augmented`` clips made."""
    found = SQL_TABLES["clips"]([run])
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


def ask_sql(
    runs: Sequence[RunPaths],
    query: str,
    parameters: Mapping[str, object] | None = None,
    *,
    files: Mapping[str, Path | str] | None = None,
    limits: Limits = Limits(),  # noqa: B008  # frozen
) -> Answer:
    """Any SQL that reads, over ``runs``, each table with ``run_id``: those of ``SQL_TABLES``, and your own ``files``.

    ``files`` are Parquet, Feather, CSV or JSONL files by the name that the query calls each. They are read before
    DuckDB begins, which runs without access to files, network or extensions: nothing but these tables and files can be
    read, and nothing written. A query that takes more time or memory than ``limits`` is stopped; of more rows only the
    first are returned, and a note says so.

    Raises:
        ValueError: it is not one statement that reads, or two of its columns share a name.
        duckdb.Error: it is wrong, or was stopped; DuckDB's message says where or why.
        UsageError: a file is missing, unreadable or of another kind, or is called like a table.
    """
    own = {name: _own_file(name, Path(path)) for name, path in (files or {}).items()}
    # A table that the query nowhere names is there, with its columns, and is not read: one may be of a million rows.
    words = set(re.findall(r"\w+", query.lower()))
    all_named = not words.isdisjoint({"query", "query_table"})
    answers = {name: read(runs if all_named or name in words else ()) for name, read in SQL_TABLES.items()}
    frames = {name: answer.frame for name, answer in answers.items()}
    rows, more = ask_isolated(query, frames | own, parameters, limits)
    notes = dict.fromkeys(note for answer in answers.values() for note in answer.notes)
    cut = (f"Only the first {limits.max_rows:,} rows are shown.",) if more else ()
    return Answer(rows, (*notes, *cut))


def _read_csv(path: Path) -> pl.DataFrame:
    """Columns called ``..._id`` stay text, as in the runs' tables: an id of digits would lose its zeros as a number."""
    names = pl.scan_csv(path).collect_schema().names()
    texts = {name: pl.String for name in names if name.endswith("_id")}
    return pl.read_csv(path, schema_overrides=texts, infer_schema_length=None)


_READERS: Mapping[str, Callable[[Path], pl.DataFrame]] = {
    ".parquet": pl.read_parquet, ".feather": pl.read_ipc, ".arrow": pl.read_ipc,
    ".csv": _read_csv, ".jsonl": pl.read_ndjson, ".ndjson": pl.read_ndjson,
}  # fmt: skip


def _own_file(name: str, path: Path) -> pl.DataFrame:
    if name.lower() in SQL_TABLES or not name.isidentifier():
        raise UsageError(
            f"files: got the name {name!r}, wanted a word that no table of the runs has; call it otherwise."
        )
    reader = _READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise UsageError(f"files: {name!r}: {path_to_text(path)} is no file that ends in {', '.join(_READERS)}.")
    try:
        return reader(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"files: {name!r}: {path_to_text(path)} cannot be read: {error}") from error


def _stored(name: str, schema: str = "") -> Callable[[Sequence[RunPaths]], Answer]:
    """Reads of each run the table that ``RunPaths`` calls ``name``, by the schema of that name in ``tables``."""
    wanted: pa.DataFrameSchema = getattr(tables, (schema or name).upper())
    return lambda runs: read_tables(zip(_names(runs), (getattr(run, name) for run in runs), strict=True), wanted)


def _names(runs: Sequence[RunPaths]) -> list[str]:
    return list(map(path_to_text, run_names(runs)))


SQL_TABLES: Mapping[str, Callable[[Sequence[RunPaths]], Answer]] = {
    "metrics": learning_curves,
    "memory": memory_samples,
    "memory_events": memory_events,
    "training": training_summary,
    "parameters": read_parameters,
    "predictions": predictions,
    **{name: _stored(name) for name in ("results", "slices", "leakage_audit", "folds")},
    "videos": _stored("index"),
    **{name: _stored(name) for name in ("rejected", "group_links", "annotations")},
    "clips": _stored("augmented_metadata", "augmented"),
    **{name: _stored(name) for name in ("task_results", "images", "image_targets", "image_predictions")},
    **{name: _stored(name) for name in ("target_predictions", "batch_size_sweep", "video_texts")},
    **{name: _stored(name) for name in ("retrieval_ranks", "captions")},
}


def _operation_names(text: str) -> set[str] | None:
    try:
        return {str(operation["name"]) for operation in json.loads(text)}
    except (ValueError, TypeError, KeyError):
        return None
