"""Questions to any number of runs, answered as polars frames.

Each query reads what the runs have recorded, also while they run. Its notes name what could not be read. ``run_id`` is
the name from ``naming.run_names``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandera.polars as pa
import polars as pl

from fvc_lib.analysis.read.logs import METRIC_LINES, curves, read_events, read_log_lines, read_samples
from fvc_lib.analysis.read.naming import run_names
from fvc_lib.analysis.read.records import Answer, LogFile, log_files, read_tables
from fvc_lib.analysis.read.sql import MAX_ROWS, ask, ask_user_query
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import as_mapping, path_to_text, read_json_object
from fvc_lib.services.config import NOT_HASHED
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.parameters import read_params_file
from fvc_lib.services.records.digests import damage_of
from fvc_lib.services.run_paths import CHECKPOINT_FOLDERS, RunPaths
from fvc_lib.services.tasks import CONTROL_TRAININGS, FOLD_TRAINING


def learning_curves(
    runs: Sequence[RunPaths], *, metrics: Sequence[str] = (), phases: Sequence[str] = (), folds: Sequence[int] = ()
) -> Answer:
    """Return the metric logs of ``runs``, narrowed to ``metrics``, ``phases`` and ``folds`` where these are given.

    Columns: ``run_id stage fold phase metric step epoch value flag attempt ts``, in step order within each curve.
    ``value`` is null where ``flag`` is nan, inf or -inf. A step that was logged again after a resume appears once, with
    the last attempt's last line.
    """
    lines = read_log_lines(_logs(runs, "metrics"), METRIC_LINES)
    wanted = {"metric": metrics, "phase": phases, "fold": folds}
    chosen = [pl.col(column).is_in(list(values)) for column, values in wanted.items() if values]
    frame = curves(lines.frame)
    return Answer(frame.filter(*chosen) if chosen else frame, lines.notes)


_PYTHON_TYPES: Mapping[pl.DataType, Any] = {pl.String(): str, pl.Int64(): int, pl.Float64(): float | int}
_TRAININGS = pl.Schema(
    {
        "run_id": pl.String(), "stage": pl.String(), "fold": pl.Int64(), "trained": pl.String(), "model": pl.String(),
        "device": pl.String(), "epochs": pl.Int64(), "best_epoch": pl.Int64(), "threshold": pl.Float64(),
        "temperature": pl.Float64(), "steps": pl.Int64(), "nonfinite_steps": pl.Int64(), "micro_batch": pl.Int64(),
        "seconds": pl.Float64(), "num_train_samples": pl.Int64(), "num_validation_samples": pl.Int64(),
        "num_test_samples": pl.Int64(), "peak_rss_bytes": pl.Int64(), "peak_device_bytes": pl.Int64(),
    }
)  # fmt: skip


def training_summary(runs: Sequence[RunPaths]) -> Answer:
    """Return one row per finished training, the controls' trainings included: the columns of ``_TRAININGS``.

    ``trained`` is ``model`` or the name of a control. Samples are videos, images, or pairs of a video and a text.
    Values that are missing or of another type are null.
    """
    rows, notes = [], []
    stages = {folder: stage for stage, folder in CHECKPOINT_FOLDERS.items()}
    for run, run_id in zip(runs, _names(runs), strict=True):
        outcomes = (run.root / "checkpoints").glob("*/outcome.json")
        for path in sorted(outcomes, key=lambda path: path.parent.name.removeprefix("fold_").zfill(9)):
            if damage := damage_of(path):
                notes.append(damage)
                continue
            outcome = read_json_object(path)
            trainings = {"model": outcome.get("training"), **{name: outcome.get(name) for name in CONTROL_TRAININGS}}
            if not isinstance(trainings["model"], dict):
                notes.append(f"{path_to_text(path)} holds no finished training.")
                continue
            name = path_to_text(path.parent.name)
            fold = name.removeprefix("fold_")
            place = (
                {"stage": FOLD_TRAINING, "fold": int(fold)} if fold.isdecimal() else {"stage": stages.get(name, name)}
            )
            for trained, record in trainings.items():
                if isinstance(record, dict):
                    known = {**outcome, **record, **place, "run_id": run_id, "trained": trained}
                    for part in ("train", "validation", "test"):
                        known[f"num_{part}_samples"] = known.get(f"num_{part}_videos", known.get(f"num_{part}"))
                    known["epochs"] = len(known["history"]) if isinstance(known.get("history"), list) else None
                    values = ((name, known.get(name), _PYTHON_TYPES[kind]) for name, kind in _TRAININGS.items())
                    rows.append({name: value if isinstance(value, kind) else None for name, value, kind in values})
    return Answer(pl.DataFrame(rows, schema=_TRAININGS), tuple(notes))


_PARAMETERS = {"parameter": pl.String, "run_id": pl.String, "value": pl.String, "changes_numbers": pl.Boolean}


def read_parameters(runs: Sequence[RunPaths]) -> Answer:
    """Return every parameter of every run, in the order of ``params.yaml``: ``parameter run_id value changes_numbers``.

    ``value`` is null for a run that lacks the parameter. ``changes_numbers`` is false for parameters that only say
    where and how to work, such as folders.
    """
    notes, values = [], {}
    for run, run_id in zip(runs, _names(runs), strict=True):
        try:
            values[run_id] = read_params_file(run.params_yaml) if run.params_yaml.is_file() else None
        except (FvcError, OSError) as error:
            notes.append(f"{path_to_text(run.params_yaml)} was left out: {error}")
    known = {run_id: as_mapping(each) for run_id, each in values.items() if each is not None}
    names = dict.fromkeys(name for each in known.values() for name in each)
    rows = [
        (name, run_id, _value_text(each[name]) if name in each else None, name not in NOT_HASHED)
        for name in names
        for run_id, each in known.items()
    ]
    return Answer(pl.DataFrame(rows, schema=_PARAMETERS, orient="row"), tuple(notes))


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def parameter_differences(runs: Sequence[RunPaths]) -> Answer:
    """Return the rows of ``read_parameters`` whose values are not the same in all ``runs``."""
    parameters = read_parameters(runs)
    differing = pl.col("value").n_unique().over("parameter") > 1
    return Answer(parameters.frame.filter(differing), parameters.notes)


def memory_samples(runs: Sequence[RunPaths]) -> Answer:
    """Return the memory samples of ``runs``, with the columns of ``logs.read_samples``."""
    return read_samples(_logs(runs, "memory"))


def memory_events(runs: Sequence[RunPaths]) -> Answer:
    """Return the memory events of ``runs``, with the columns of ``logs.read_events``."""
    return read_events(_logs(runs, "memory/events"), memory_samples(runs).frame)


def memory_peaks(runs: Sequence[RunPaths]) -> Answer:
    """Return the highest memory of each stage: ``run_id stage fold num_samples peak_rss_bytes peak_device_bytes``.

    All phases count. On a CPU the process is counted with its children, as a job's limit does; ``peak_device_bytes`` is
    null without an accelerator.
    """
    samples = memory_samples(runs)
    on_cpu = pl.col("device").fill_null("cpu").str.starts_with("cpu")
    allocated = pl.max_horizontal("allocated_mb", "max_allocated_mb")
    process = pl.max_horizontal("rss_mb", pl.when(on_cpu).then(allocated))
    peaks = samples.frame.group_by("run_id", "stage", "fold", maintain_order=True).agg(
        num_samples=pl.len().cast(pl.Int64),
        peak_rss_bytes=(process.max() * 1e6).round().cast(pl.Int64),
        peak_device_bytes=(pl.when(~on_cpu).then(allocated).max() * 1e6).round().cast(pl.Int64),
    )
    return Answer(peaks, samples.notes)


def results(runs: Sequence[RunPaths]) -> Answer:
    """Return the results of ``runs``: ``tables.RESULTS`` with ``run_id`` in front."""
    return _stored("results")(runs)


def task_results(runs: Sequence[RunPaths]) -> Answer:
    """Return the results of runs without folds: ``tables.TASK_RESULTS`` with ``run_id`` in front."""
    return _stored("task_results")(runs)


def fold_table(runs: Sequence[RunPaths]) -> Answer:
    """Return the model's metrics by run and fold: ``run_id fold num_videos num_groups`` and a column per metric."""
    stored = results(runs)
    rows = stored.frame.filter(source="model").with_columns(
        fold=pl.col("scope").str.extract(r"^fold_([0-9]+)$").cast(pl.Int64)
    )
    rows = rows.drop_nulls("fold")
    metrics = rows["metric"].unique(maintain_order=True).to_list()
    keys = ["run_id", "fold", "num_videos", "num_groups"]
    wide = rows.pivot("metric", index=keys, values="value", on_columns=metrics)
    return Answer(wide.sort("run_id", "fold"), stored.notes)


def predictions(runs: Sequence[RunPaths]) -> Answer:
    """Return the outer-fold predictions of ``runs``, folds in order: ``tables.PREDICTIONS`` with ``run_id``."""
    files = []
    for run_id, run in zip(_names(runs), runs, strict=True):
        numbers = (
            path.stem.removeprefix("predictions_fold_") for path in run.tables.glob("predictions_fold_*.parquet")
        )
        files += [(run_id, run.predictions(fold)) for fold in sorted(int(each) for each in numbers if each.isdecimal())]
    return read_tables(files, tables.PREDICTIONS)


def index_counts(run: RunPaths, by: str) -> Answer:
    """Count the videos and groups of the index by label and the column ``by``.

    Columns: ``label value num_videos num_groups total_bytes``. ``by`` is a column of ``tables.INDEX``, or ``size`` for
    width x height.
    """
    videos = SQL_TABLES["videos"]([run])
    value = pl.format("{} × {}", "width", "height") if by == "size" else pl.col(by).cast(pl.String)
    counts = videos.frame.group_by("label", value.fill_null("not known").alias("value")).agg(
        num_videos=pl.len().cast(pl.Int64),
        num_groups=pl.col("group_id").n_unique().cast(pl.Int64),
        total_bytes=pl.col("size_bytes").sum(),
    )
    return Answer(counts.sort(-pl.col("num_videos"), "value", "label"), videos.notes)


def fold_balance(run: RunPaths) -> Answer:
    """Count the videos and groups of each outer fold: ``fold label num_videos num_groups``."""
    folds = SQL_TABLES["folds"]([run])
    counts = folds.frame.group_by("fold", "label").agg(
        num_videos=pl.len().cast(pl.Int64), num_groups=pl.col("group_id").n_unique().cast(pl.Int64)
    )
    return Answer(counts.sort("fold", "label", descending=[False, True]), folds.notes)


def augmentation_counts(run: RunPaths) -> Answer:
    """Count the clips that each operation was drawn for: ``operation num_clips num_augmented share``.

    ``num_augmented`` is the number of augmented clips; ``share`` is the ratio of the two.
    """
    clips = SQL_TABLES["clips"]([run])
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
    return Answer(ask(query, {"clips": clips.frame}), clips.notes)


_READERS: Mapping[str, Callable[[Path], pl.DataFrame]] = {
    ".parquet": pl.read_parquet, ".feather": pl.read_ipc, ".jsonl": pl.read_ndjson,
    # Ids of digits stay text, as in the runs' tables.
    ".csv": lambda path: pl.read_csv(
        path, infer_schema_length=None,
        schema_overrides={name: pl.String for name in pl.read_csv(path, n_rows=0).columns if name.endswith("_id")},
    ),
}  # fmt: skip


def ask_sql(
    runs: Sequence[RunPaths],
    query: str,
    parameters: Mapping[str, object] | None = None,
    *,
    files: Mapping[str, Path | str] | None = None,
) -> Answer:
    """Answer any SQL query over the tables of ``runs`` (``SQL_TABLES``) and over ``files``.

    ``files`` are Parquet, Feather, CSV or JSONL files by table name. The query can read nothing else and write nothing.
    It may take 60 s and 2 GB; at most 100,000 rows are returned, and a note says if there are more.

    Raises:
        ValueError: the query returns no rows, or a column has a type that polars lacks.
        duckdb.Error: the query is wrong or exceeded a limit.
        UsageError: a file is missing, unreadable or of another kind.
    """
    # A table that the query does not name stays empty: it may have a million rows. ``query_table`` may name any.
    text = query.lower()
    answers = {name: read(runs if name in text or "query" in text else ()) for name, read in SQL_TABLES.items()}
    frames = {name: answer.frame for name, answer in answers.items()}
    for name, path in (files or {}).items():
        try:
            frames[name] = _READERS[Path(path).suffix.lower()](Path(path))
        except KeyError:
            raise UsageError(f"files: got {str(path)!r}, wanted a file that ends in {', '.join(_READERS)}.") from None
        except (OSError, pl.exceptions.PolarsError) as error:
            raise UsageError(f"files: {path_to_text(str(path))} cannot be read: {error}") from error
    rows = ask_user_query(query, frames, parameters)
    notes = dict.fromkeys(note for answer in answers.values() for note in answer.notes)
    cut = [f"Only the first {MAX_ROWS:,} rows are shown."] if rows.height > MAX_ROWS else []
    return Answer(rows.head(MAX_ROWS), (*notes, *cut))


def _logs(runs: Sequence[RunPaths], folder: str) -> list[LogFile]:
    return [file for run, name in zip(runs, run_names(runs), strict=True) for file in log_files(run, folder, name)]


def _stored(name: str, schema: str = "") -> Callable[[Sequence[RunPaths]], Answer]:
    """Return a reader of the table ``RunPaths.<name>``, whose schema is ``tables.<SCHEMA>``."""
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
    **{name: _stored(name) for name in ("target_predictions", "video_texts")},
    **{name: _stored(name) for name in ("retrieval_ranks", "captions")},
}
