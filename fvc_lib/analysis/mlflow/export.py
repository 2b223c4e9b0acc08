"""Exports a run to MLflow after the fact; the run folder stays the truth and is only read.

One MLflow run for the whole and one nested for each fold, in an experiment of the same name. What MLflow holds of a run
is found by the tag ``fvc.run_key``. It is skipped where it is complete and up to date, else replaced as a whole (the
earlier one goes to MLflow's trash). So exporting twice doubles nothing; the next export repeats one that was killed.

Keys of metrics: ``train/loss`` and ``validation/roc_auc`` as the training logged them (``STAGE/phase/metric`` of other
stages); ``all/model/roc_auc`` with ``/low`` and ``/high`` for results over all folds, ``all/metadata_only/roc_auc`` for
a control, ``target/NAME/model/roc_auc`` for one target of a protocol, ``outer_fold/model/roc_auc`` in a fold's own
run; ``test/model/all/top1`` for a task without folds.
"""

import datetime
import hashlib
import importlib
import json
import logging
import math
import os
import re
import shlex
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import polars as pl

from fvc_lib import CHECKOUT
from fvc_lib.analysis.read.headline import ReportHeadline, run_headline
from fvc_lib.analysis.read.naming import run_parameters
from fvc_lib.analysis.read.queries import SQL_TABLES, learning_curves, results
from fvc_lib.analysis.read.records import run_status
from fvc_lib.analysis.wording import clean_text, count_text, interval_text, source_name
from fvc_lib.services.atomic_files import as_mapping, as_text, path_to_text, read_json_object, sha256_of_json
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.records.digests import run_damage
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tables import csv_for_people
from fvc_lib.services.tasks import FOLD_TRAINING

# --- What MLflow shall hold of a run, read from its folder without MLflow

# MLflow's own limits of version 3 (mlflow.utils.validation): characters of a key (250, and of a bound such as
# "/fold_mean" behind ours), a parameter and a run's tag.
MAX_KEY, MAX_PARAM, MAX_TAG = 240, 6_000, 8_000

# ':' is legal on a POSIX server and not on a Windows one; '/' separates the parts of a key.
_REFUSED = re.compile(r"[^\w.\- ]")
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_SCHEMA = {"key": pl.String, "step": pl.Int64, "timestamp": pl.Int64, "value": pl.Float64}
_LATEST_MS = 2**50  # beyond the year 37,000 a clock was wrong
# A state that is missing here, such as "stopped without a word", is KILLED.
_STATUSES = {
    "done": "FINISHED", "by hand": "FINISHED", "interactive": "FINISHED", "failed": "FAILED", "running": "RUNNING",
    "waiting": "RUNNING", "pending": "RUNNING", "requeue": "RUNNING",
}  # fmt: skip
Times = tuple[int | None, int | None]


@dataclass(frozen=True)
class Content:
    """One MLflow run as it shall be: ``end_ms`` is None while it runs, ``artifacts`` are contents by path.

    ``points`` has ``key step timestamp value``, one row per key and step, in milliseconds, NaN for no number; ``notes``
    say what MLflow takes differently or not at all.
    """

    name: str
    status: str
    start_ms: int | None
    end_ms: int | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    points: pl.DataFrame
    artifacts: Mapping[str, bytes]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunContent:
    """A run, its folds in order, and its experiment; ``key`` finds it again, whatever its folder is called."""

    experiment: str
    run_id: str
    key: str
    whole: Content
    folds: tuple[Content, ...]
    notes: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of everything: MLflow is up to date when it holds this."""
        parts = []
        for each in (self.whole, *self.folds):
            points = hashlib.sha256(each.points.write_csv().encode()).hexdigest()
            files = {path: hashlib.sha256(content).hexdigest() for path, content in each.artifacts.items()}
            named = [each.name, each.status, each.start_ms, each.end_ms, dict(each.params), dict(each.tags)]
            parts.append([*named, points, files])
        return sha256_of_json(parts)


def run_content(run: RunPaths) -> RunContent:
    """Everything of ``run`` that goes to MLflow, as far as it has come.

    A run is known by the ``run_id`` in its ``run.json``: a folder that was renamed or copied is the same run.
    """
    record, status = read_json_object(run.run_json), run_status(run)
    run_id = as_text(record.get("run_id")) or path_to_text(run.run_id)
    experiment = as_text(record.get("experiment")) or path_to_text(run.experiment)
    curves, table = learning_curves([run]), results([run])
    times = (
        _utc_ms(status.get("started_utc")) or _ms(curves.frame["ts"].min(), None),
        _utc_ms(status.get("finished_utc")) or _ms(curves.frame["ts"].max(), None),
    )
    notes = list(dict.fromkeys([*run_damage(run.root), *curves.notes, *table.notes]))
    if run_id != path_to_text(run.run_id):
        notes.insert(0, f"{run_id}: its folder is called {path_to_text(run.run_id)}; run.json says whose it is.")
    return RunContent(
        experiment=stored_text(experiment),
        run_id=run_id,
        key=sha256_of_json([experiment, run_id]),
        whole=_whole(run, run_id, times, curves.frame, table.frame),
        folds=tuple(
            _fold(run, fold, status["stages"].get(stage_key(FOLD_TRAINING, fold)), times, curves.frame, table.frame)
            for fold in _folds_begun(curves.frame, status)
        ),
        notes=tuple(notes),
    )


def _whole(run: RunPaths, run_id: str, times: Times, curves: pl.DataFrame, table: pl.DataFrame) -> Content:
    record, headline = read_json_object(run.run_json), run_headline(run)
    logged, end_ms = curves.filter(pl.col("fold").is_null()), times[1] or times[0]
    answers = {name: SQL_TABLES[name]([run]) for name in ("task_results", "predictions", "slices", "leakage_audit")}
    frames = {"kfold_results": table, **{name: answer.frame for name, answer in answers.items()}}
    points = [_log_points(logged, times[0]), _result_points(table, end_ms)]
    points.append(_test_points(frames["task_results"], end_ms))
    notes = [note for answer in answers.values() for note in answer.notes]
    files = [run.report_html, run.params_yaml, run.run_json, run.status_json, run.code_patch]
    if not run.report_html.is_file():
        notes.append("There is no report.html yet: `run_notebooks.py report` writes it; export again after it.")
    artifacts = {path.name: path.read_bytes() for path in files if path.is_file()}
    for name, frame in frames.items():
        if not frame.is_empty():  # as CSV, which MLflow's pages show as a table
            artifacts[f"tables/{name}.csv"] = csv_for_people(frame.drop("run_id", strict=False)).encode()
    if run.robustness_results.is_file():
        artifacts[f"tables/{run.robustness_results.name}"] = run.robustness_results.read_bytes()
    tags = {**run_tags(headline, record), "fvc.run_id": run_id}
    return _content(run_id, headline.state, times, run_parameters(run), tags, points, artifacts, notes)


def _fold(run: RunPaths, fold: int, stage: object, times: Times, curves: pl.DataFrame, table: pl.DataFrame) -> Content:
    state = as_mapping(stage).get("state")
    logged = curves.filter(pl.col("fold") == fold)
    own = (_ms(logged["ts"].min(), times[0]), _ms(logged["ts"].max(), times[1]))
    path = run.fold_outcome(fold)
    outcome = read_json_object(path)
    params: dict[str, object] = {"fold": fold}
    params |= {name: outcome[name] for name in ("model", "num_parameters", "device") if name in outcome}
    points = [_log_points(logged, own[0], FOLD_TRAINING), _result_points(table, own[1], fold)]
    tags = {"fvc.fold": str(fold), "fvc.state": str(state or "not recorded")}
    artifacts = {path.name: path.read_bytes()} if path.is_file() else {}
    return _content(f"fold {fold}", state, own, params, tags, points, artifacts, [])


def _content(
    name: str, state: object, times: Times, params: Mapping[str, object], tags: Mapping[str, str],
    points: list[pl.DataFrame], artifacts: dict[str, bytes], notes: list[str],
) -> Content:  # fmt: skip
    known = {}
    for given, value in params.items():
        text = stored_text(value)
        if len(text) > MAX_PARAM:
            size = f"{len(text):,} characters, and MLflow takes {MAX_PARAM:,}"
            notes.append(f"parameter {given[:80]!r} was left out: it has {size}; params.yaml or outcome.json has it.")
        else:
            known[key_of(stored_text(str(given)))] = text
    every = pl.concat(points).unique(["key", "step"], keep="last", maintain_order=True)
    status = _STATUSES.get(str(state), "KILLED")
    return Content(
        name=stored_text(name)[:MAX_KEY],
        status=status,
        start_ms=times[0],
        end_ms=None if status == "RUNNING" else times[1] or times[0],
        params=known,
        tags={tag: text[:MAX_TAG] for tag, text in tags.items()},
        points=every.sort("step", "key", maintain_order=True),
        artifacts=artifacts,
        notes=tuple(notes),
    )


# --- Names and texts as MLflow takes them


def key_of(*parts: str) -> str:
    """Return the key of ``parts``, joined by ``/``.

    A character that MLflow refuses becomes ``_xHEX_``. A key that is too long is cut, and ends with a digest.
    """
    escaped = [_REFUSED.sub(lambda match: f"_x{ord(match[0]):X}_", part) for part in parts]
    # '', '.' and '..' would disappear from a path.
    key = "/".join(part if part.strip(".") else f"_x{len(part)}_dots_" for part in escaped)
    if len(key) <= MAX_KEY:
        return key
    return f"{key[: MAX_KEY - 20].rstrip('/')}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def stored_text(value: object) -> str:
    """``value`` as it is stored: JSON unless it is a text; no lone surrogates, no NUL."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


# --- Points: key, step, timestamp and value


def _log_points(curves: pl.DataFrame, start_ms: int | None, plain_stage: str | None = None) -> pl.DataFrame:
    """Points of ``queries.learning_curves``, called ``phase/metric`` for ``plain_stage``; else at ``start_ms``."""
    time = (pl.col("ts") * 1000).round()
    possible = time.is_finite() & (time >= 0) & (time < _LATEST_MS)
    distinct = curves.select("stage", "phase", "metric").unique().sort("stage", "phase", "metric")
    keys = [key_of(*names[1:]) if names[0] == plain_stage else key_of(*names) for names in distinct.iter_rows()]
    distinct = distinct.with_columns(pl.Series("key", keys, dtype=pl.String))
    return curves.join(distinct, on=["stage", "phase", "metric"], how="left").select(
        "key",
        "step",
        pl.when(possible).then(time).otherwise(start_ms or 0).cast(pl.Int64).alias("timestamp"),
        pl.col("value").fill_null(math.nan),
    )


def _result_points(table: pl.DataFrame, end_ms: int | None, fold: int | None = None) -> pl.DataFrame:
    """Points of the results: of the model on one fold, or of model and controls over all folds; no point for null."""
    over_all = ~pl.col("scope").str.starts_with("fold_")
    of_fold = (pl.col("scope") == f"fold_{fold}") & (pl.col("source") == "model")
    rows = table.filter(over_all if fold is None else of_fold).iter_rows(named=True)
    keys = []
    for row in rows:
        scope = row["scope"].split(":", 1) if fold is None else ["outer_fold"]  # target:NAME
        keys.append((key_of(*scope, row["source"], row["metric"]), row))
    return _with_bounds(keys, ("low", "high", "fold_mean", "fold_std"), end_ms)


def _test_points(table: pl.DataFrame, end_ms: int | None) -> pl.DataFrame:
    keys = [(key_of("test", r["source"], r["subject"], r["metric"]), r) for r in table.iter_rows(named=True)]
    return _with_bounds(keys, ("low", "high"), end_ms)


def _with_bounds(rows: list[tuple[str, dict[str, Any]]], bounds: tuple[str, ...], end_ms: int | None) -> pl.DataFrame:
    """Points at step 0 of each key's value and bounds; none of what is null: undefined, or does not apply."""
    named = [(key, row["value"]) for key, row in rows]
    named += [(f"{key}/{bound}", row[bound]) for key, row in rows for bound in bounds]
    # MLflow's SQL stores turn an infinity into 1.8e308, which reads as a number.
    points = [(key, 0, end_ms or 0, v if math.isfinite(v) else math.nan) for key, v in named if v is not None]
    return pl.DataFrame(points, schema=_SCHEMA, orient="row")


# --- Tags


_HARDWARE = ("host", "processor", "cores", "machine", "memory_bytes", "gpus")


def run_tags(headline: ReportHeadline, record: Mapping[str, Any]) -> dict[str, str]:
    """Tags of the whole run; ``mlflow.note.content`` is what MLflow shows above it, as Markdown."""
    attempts = record.get("attempts")
    last = as_mapping(attempts[-1]) if isinstance(attempts, list) and attempts else {}
    code, hardware = as_mapping(last.get("code")), as_mapping(last.get("hardware"))
    found: dict[str, object] = {
        "mlflow.note.content": _note(headline),
        "mlflow.source.name": "run_notebooks.py",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": code.get("commit"),
        "mlflow.source.git.branch": code.get("branch"),
        "fvc.state": headline.state,
        "fvc.standing": headline.verdict.standing,
        "fvc.verdict": headline.verdict.sentence,
        "fvc.caution": " ".join(headline.cautions),
        "fvc.failure": headline.failure,
        f"fvc.num_{headline.measure.one}s": headline.num_samples,
        "fvc.num_groups": headline.num_groups,
        "fvc.attempts": len(attempts) if isinstance(attempts, list) else None,
        "fvc.code_changed_since_commit": code.get("changed_since_commit"),
        "fvc.forked_from": record.get("forked_from"),
        "fvc.corpus": headline.corpus,
        "fvc.config_hash": record.get("config_hash"),
        **{f"fvc.hardware.{name}": hardware.get(name) or None for name in _HARDWARE},
    }
    return {name: stored_text(value) for name, value in found.items() if value not in (None, "", [])}


def _note(headline: ReportHeadline) -> str:
    """Return the verdict, its cautions, and the numbers next to their controls."""

    def shown(text: str) -> str:
        return _MARKDOWN.sub(r"\\\1", escape(clean_text(text), quote=False))

    lines = [f"**{shown(headline.verdict.standing)}**: {shown(headline.verdict.sentence)}"]
    lines += [shown(text) for text in (*headline.cautions, headline.failure) if text]
    if headline.scores:
        rows = "".join(
            f"| {shown(source_name(score.source))} | {interval_text(score.value, score.low, score.high)} |\n"
            for score in headline.scores
        )
        lines.append(f"| Scored by | {shown(headline.measure.name)} with interval |\n| --- | --- |\n{rows}")
    if headline.measure.remark:
        lines.append(headline.measure.remark)
    return "\n\n".join(lines)


def _folds_begun(curves: pl.DataFrame, status: dict[str, Any]) -> list[int]:
    found = set(curves["fold"].drop_nulls().to_list())
    for key, stage in status["stages"].items():
        match = re.fullmatch(f"{FOLD_TRAINING}_fold_([0-9]+)", key)
        if match and as_mapping(stage).get("state", "pending") != "pending":
            found.add(int(match[1]))
    return sorted(fold for fold in found if fold >= 0)


def _utc_ms(text: object) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return int(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() * 1000)


def _ms(seconds: Any, otherwise: int | None) -> int | None:
    return int(seconds * 1000) if isinstance(seconds, float) and 0 <= seconds < 2**40 else otherwise


# --- The export

RUN_KEY = "fvc.run_key"  # whose it is; on the whole and on each fold, from the moment they are created
EXPORTED = "fvc.exported"  # digest of what was exported; on the whole, written last
_PARENT = "mlflow.parentRunId"
_MOST_RUNS = 1000  # of one run of ours and its folds, with what killed exports left
# Or MLflow's pages show the experiment as one about language models.
_TRAINING = {"mlflow.experimentKind": "custom_model_development"}


@dataclass(frozen=True)
class ExportReport:
    """What an export did: the whole's MLflow run, how many there are with its folds, and what was written or replaced.

    Without a change ``num_points`` and ``num_artifacts`` are 0. ``num_replaced`` went to MLflow's trash.
    """

    run_id: str
    experiment: str
    tracking_uri: str
    mlflow_run_id: str
    num_runs: int
    num_points: int
    num_artifacts: int
    num_replaced: int
    notes: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether anything was written or removed."""
        return bool(self.num_points or self.num_artifacts or self.num_replaced)

    def lines(self) -> list[str]:
        """For the terminal."""
        counts = ((self.num_runs, "run"), (self.num_points, "metric value"), (self.num_artifacts, "file"))
        what = "{}, {} and {} exported".format(*(count_text(*each) for each in counts))
        what += f" in place of {count_text(self.num_replaced, 'earlier run')}" if self.num_replaced else ""
        what = what if self.changed else "nothing new"
        head = f"{self.run_id}: experiment {self.experiment!r} of {self.tracking_uri}, {what}"
        return [head, *(f"  note: {note}" for note in self.notes)]


def export_run(run: RunPaths, *, tracking_uri: str) -> ExportReport:
    """Bring MLflow at ``tracking_uri``, a database or a server, to what ``run`` holds now, finished or not.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: MLflow refused or cannot be reached; the same command repeats the export.
    """
    content = run_content(run)
    contents = (content.whole, *content.folds)
    with connected(tracking_uri) as client:
        place = experiment_id(client, content.experiment, tracking_uri)
        there = _runs_of(client, place, content.key)
        whole_id = next((r.info.run_id for r in there if r.data.tags.get(EXPORTED) == content.digest), None)
        is_new = whole_id is None
        if whole_id is None:
            tags = {RUN_KEY: content.key}
            whole_id = _export_one(client, place, content.whole, tags)
            for fold in content.folds:
                _export_one(client, place, fold, {**tags, _PARENT: whole_id})
            client.set_tag(whole_id, EXPORTED, content.digest)
        # Only now: at every moment MLflow holds one complete export, if it ever did.
        others = [r for r in there if whole_id not in (r.info.run_id, r.data.tags.get(_PARENT))]
        for other in others:
            client.delete_run(other.info.run_id)
    notes = [*content.notes, *(f"{each.name}: {note}" for each in contents for note in each.notes)]
    return ExportReport(
        run_id=content.run_id,
        experiment=content.experiment,
        tracking_uri=shown_uri(tracking_uri),
        mlflow_run_id=whole_id,
        num_runs=len(contents),
        num_points=sum(each.points.height for each in contents) if is_new else 0,
        num_artifacts=sum(len(each.artifacts) for each in contents) if is_new else 0,
        num_replaced=len(others),
        notes=tuple(notes),
    )


def _runs_of(client: Any, experiment_id: str, run_key: str) -> list[Any]:
    order = ["attributes.start_time ASC", "attributes.run_id ASC"]
    wanted = f"tags.`{RUN_KEY}` = '{run_key}'"
    return list(client.search_runs([experiment_id], wanted, max_results=_MOST_RUNS, order_by=order))


def _export_one(client: Any, experiment_id: str, content: Content, found_by: Mapping[str, str]) -> str:
    entities = importlib.import_module("mlflow.entities")
    run_id = str(
        client.create_run(experiment_id, start_time=content.start_ms, tags=found_by, run_name=content.name).info.run_id
    )
    params = [entities.Param(name, text) for name, text in content.params.items()]
    tags = [entities.RunTag(name, text) for name, text in content.tags.items()]
    points = [entities.Metric(key, value, time, step) for key, step, time, value in content.points.iter_rows()]
    client.log_batch(run_id, metrics=points, params=params, tags=tags)  # it divides them as the server wants
    with tempfile.TemporaryDirectory(prefix="fvc_mlflow_") as folder:
        for name, artifact in content.artifacts.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(artifact)
        if content.artifacts:
            client.log_artifacts(run_id, folder)
    if content.status != "RUNNING":
        client.set_terminated(run_id, status=content.status, end_time=content.end_ms)
    return run_id


def experiment_id(client: Any, name: str, tracking_uri: str) -> str:
    """Of the experiment called ``name``, created where there is none; ``TrackingError`` where it lies in the trash."""
    refused = importlib.import_module("mlflow.exceptions").MlflowException
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            location = artifact_location(tracking_uri, name)
            return str(client.create_experiment(name, artifact_location=location, tags=_TRAINING))
        except refused as error:  # another exporter was faster
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise TrackingError(
            f"MLflow at {shown_uri(tracking_uri)}: the experiment {name!r} was deleted there and lies in its trash. "
            f"Restore it (mlflow experiments restore --experiment-id {getattr(found, 'experiment_id', 'ID')}) or "
            "remove it for good (mlflow gc), then export again."
        )
    return str(found.experiment_id)


# --- MLflow, loaded only when it is asked for: quiet, without telemetry, and with no password in what it says

DATABASE = "mlflow.db"
ARTIFACTS_FOLDER = "mlflow_artifacts"

_ALWAYS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # What is too long is named in the report; MLflow would cut it and say so in a log that nobody keeps.
    "MLFLOW_TRUNCATE_LONG_VALUES": "false",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
# MLflow's own seven tries against a server that is away take four minutes, at the end of a run that is finished.
_UNLESS_SET = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
# A pool would keep connections open to a file that nobody talks to any more.
_FOR_SQLITE = {"MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool"}


REPLACEMENT = "[secret]"


class TrackingError(FvcError):
    """MLflow, or the way to it, refused; the same command repeats the export."""


def default_tracking_uri(runs_dir: Path, environ: Mapping[str, str] | None = None) -> str:
    """``MLFLOW_TRACKING_URI``, or the SQLite database beside the runs."""
    environ = os.environ if environ is None else environ
    if given := environ.get("MLFLOW_TRACKING_URI"):
        return given
    # What SQLAlchemy decodes or takes for the beginning of options; it takes other characters as they are.
    database = str(runs_dir.absolute() / DATABASE).replace("%", "%25").replace("?", "%3F")
    return f"sqlite:///{database}"


def artifact_location(tracking_uri: str, experiment: str) -> str | None:
    """Where an experiment's artifacts go that MLflow would put into the current folder; None: the server decides."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    database = Path(unquote(tracking_uri.removeprefix("sqlite:///").partition("?")[0]))
    return (database.absolute().parent / ARTIFACTS_FOLDER / experiment).as_uri()


def shown_uri(uri: str) -> str:
    """``uri`` as it may be shown: without user, password and query."""
    return _without(uri, uri)


@contextmanager
def connected(tracking_uri: str) -> Iterator[Any]:
    """Yield an ``MlflowClient`` of ``tracking_uri``; MLflow prints nothing meanwhile.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: it cannot be reached or refuses something; the message holds no secret of the URI.
    """
    with _settings(tracking_uri), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own dependencies; nothing here could act on them
        try:
            mlflow = importlib.import_module("mlflow")
        except ModuleNotFoundError as error:
            raise UsageError(
                f"MLflow needs the package {error.name!r}, which is not installed: "
                f"{shlex.join(['make', '-C', str(CHECKOUT), 'setup-mlflow'])}"
            ) from error
        theirs = (
            importlib.import_module("mlflow.exceptions").MlflowException,
            importlib.import_module("sqlalchemy.exc").SQLAlchemyError,
            OSError,
        )
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # a new database is announced in lines that look like trouble and are none
        try:
            yield mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        except theirs as error:
            raise TrackingError(_told(error, tracking_uri)) from None
        finally:
            logging.disable(before)


def _told(error: Exception, tracking_uri: str) -> str:
    """Return the beginning of ``error`` without secrets."""
    text = textwrap.shorten(_without(str(error), tracking_uri), 600, placeholder="...")
    return f"MLflow at {shown_uri(tracking_uri)}: {type(error).__name__}: {text} The same command repeats the export."


def _without(text: str, uri: str) -> str:
    """``text`` without the parts of ``uri`` that may hold a password, the longest first."""
    try:
        parts = urlsplit(uri)
        user, password = parts.username, parts.password
    except ValueError:
        return text.replace(uri, REPLACEMENT)
    query = parts.query if parts.scheme != "sqlite" else ""
    info = parts.netloc.rpartition("@")[0]
    found = {secret for secret in (info, password, user if password is None else None, query) if secret}
    for secret in sorted(found, key=lambda secret: (-len(secret), secret)):
        text = text.replace(secret, REPLACEMENT)
    return text


@contextmanager
def _settings(tracking_uri: str) -> Iterator[None]:
    """Set the environment variables that MLflow reads at every call, and restore them at the end."""
    wanted = _UNLESS_SET | {name: os.environ[name] for name in _UNLESS_SET if name in os.environ} | _ALWAYS
    wanted |= _FOR_SQLITE if tracking_uri.startswith("sqlite:") else {}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
