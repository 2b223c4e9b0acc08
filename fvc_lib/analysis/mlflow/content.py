"""What MLflow shall hold of a run: one MLflow run for the whole, and one nested below it for each fold.

Pure reading of the run folder, without MLflow. What MLflow would refuse is left out here and named in the notes.

Keys of metrics: ``train/loss`` and ``validation/roc_auc`` as the training logged them (``STAGE/phase/metric`` of other
stages); ``all/model/roc_auc`` with ``/low`` and ``/high`` for results over all folds, ``all/metadata_only/roc_auc`` for
a control, ``outer_fold/model/roc_auc`` in a fold's own run; ``test/model/all/top1`` for a task without folds.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import polars as pl

from fvc_lib.analysis.read.headline import ReportHeadline, run_headline, run_parameters
from fvc_lib.analysis.read.queries import learning_curves, predictions, results, task_results
from fvc_lib.analysis.read.records import read_json_object, read_tables, run_status
from fvc_lib.analysis.wording import bytes_text, clean_text, interval_text, source_name
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.tasks import FOLD_TRAINING

TRAINING = FOLD_TRAINING
# MLflow's own limits of version 3 (mlflow.utils.validation): characters of a key, a parameter and a run's tag.
MAX_KEY, MAX_PARAM, MAX_TAG = 250, 6_000, 8_000
LARGEST_BYTES = 64_000_000  # of a file; a report of five folds is 6 MB, plotly with it

# ':' is legal on a POSIX server and not on a Windows one; '/' separates the parts of a key.
_REFUSED = re.compile(r"[^\w.\- ]")
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_SCHEMA = {"key": pl.String, "step": pl.Int64, "timestamp": pl.Int64, "value": pl.Float64}
_LATEST_MS = 2**50  # beyond the year 37,000 a clock was wrong
_STEPS_NAMED = 20
# A state that is missing here, such as "stopped without a word", is KILLED.
_STATUSES = {
    "done": "FINISHED", "by hand": "FINISHED", "interactive": "FINISHED", "failed": "FAILED", "running": "RUNNING",
    "waiting": "RUNNING", "pending": "RUNNING", "requeue": "RUNNING",
}  # fmt: skip
Times = tuple[int | None, int | None]


@dataclass(frozen=True)
class Content:
    """One MLflow run as it shall be.

    Attributes:
        status: of MLflow: RUNNING, FINISHED, FAILED or KILLED.
        end_ms: None while it is running.
        points: ``key step timestamp value``, one row per key and step; milliseconds; NaN where there is no number.
        artifacts: content by path, ``/`` between folders.
        notes: what MLflow takes differently or not at all, in words.
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
        told = [
            [
                each.name, each.status, each.start_ms, each.end_ms, dict(each.params), dict(each.tags),
                hashlib.sha256(each.points.write_csv().encode()).hexdigest(),
                {path: hashlib.sha256(content).hexdigest() for path, content in each.artifacts.items()},
            ]
            for each in (self.whole, *self.folds)
        ]  # fmt: skip
        return sha256_of_json(told)


def run_content(run: RunPaths) -> RunContent:
    """Everything of ``run`` that goes to MLflow, as far as it has come.

    A run is known by the ``run_id`` in its ``run.json``: a folder that was renamed or copied is the same run.
    """
    record, status = read_json_object(run.run_json), run_status(run)
    run_id = _name_in(record, "run_id") or path_to_text(run.run_id)
    experiment = _name_in(record, "experiment") or path_to_text(run.experiment)
    curves, table = learning_curves([run]), results([run])
    times = (
        _utc_ms(status.get("started_utc")) or _ms(curves.frame["ts"].min(), None),
        _utc_ms(status.get("finished_utc")) or _ms(curves.frame["ts"].max(), None),
    )
    key = sha256_of_json([experiment, run_id])
    notes = [*curves.notes, *table.notes]
    if run_id != path_to_text(run.run_id):
        notes.insert(0, f"{run_id}: its folder is called {path_to_text(run.run_id)}; run.json says whose it is.")
    whole = _whole(run, run_id, record, status, times, curves.frame, table.frame)
    folds = _folds_begun(curves.frame, status)
    return RunContent(
        experiment=stored_text(experiment),
        run_id=run_id,
        key=key,
        whole=whole,
        folds=tuple(_fold(run, fold, status, times, curves.frame, table.frame) for fold in folds),
        notes=tuple(notes),
    )


def _whole(
    run: RunPaths,
    run_id: str,
    record: dict[str, Any],
    status: dict[str, Any],
    times: Times,
    curves: pl.DataFrame,
    table: pl.DataFrame,
) -> Content:
    of_task = task_results([run])
    logged, end_ms = curves.filter(pl.col("fold").is_null()), times[1] or times[0]
    points = [_log_points(logged, times[0]), _result_points(table, end_ms), _task_points(of_task.frame, end_ms)]
    frames = {"kfold_results": table, "task_results": of_task.frame}
    notes = list(of_task.notes)
    scored = predictions([run])
    slices = read_tables([("", run.slices)], tables.SLICES)
    audit = read_tables([("", run.leakage_audit)], tables.LEAKAGE_AUDIT)
    for name, answer in {"predictions": scored, "slices": slices, "leakage_audit": audit}.items():
        frames[name] = answer.frame
        notes += answer.notes
    files = [run.report_html, run.params_yaml, run.run_json, run.status_json, run.code_patch]
    if not run.report_html.is_file():
        notes.append("There is no report.html yet: `run_notebooks.py report` writes it; export again after it.")
    artifacts = {path.name: _without_secrets(path.read_bytes()) for path in files if path.is_file()}
    for name, frame in frames.items():
        if not frame.is_empty():  # as CSV, which MLflow's pages show as a table
            artifacts[f"tables/{name}.csv"] = frame.drop("run_id", strict=False).write_csv().encode()
    tags = {**run_tags(run_headline(run), record), "fvc.run_id": run_id, **_not_finite(logged)}
    return _content(run_id, status.get("state"), times, run_parameters(run), tags, points, artifacts, notes)


def _fold(
    run: RunPaths, fold: int, status: dict[str, Any], times: Times, curves: pl.DataFrame, table: pl.DataFrame
) -> Content:
    stage = status["stages"].get(stage_key(TRAINING, fold))
    state = stage.get("state") if isinstance(stage, dict) else None
    logged = curves.filter(pl.col("fold") == fold)
    own = (_ms(logged["ts"].min(), times[0]), _ms(logged["ts"].max(), times[1]))
    outcome = read_json_object(run.fold_outcome(fold))
    params: dict[str, object] = {"fold": fold}
    params |= {name: outcome[name] for name in ("model", "num_parameters", "device") if name in outcome}
    points = [_log_points(logged, own[0], TRAINING), _result_points(table, own[1], fold)]
    tags = {"fvc.fold": str(fold), "fvc.state": str(state or "not recorded"), **_not_finite(logged)}
    path = run.fold_outcome(fold)
    artifacts = {path.name: _without_secrets(path.read_bytes())} if path.is_file() else {}
    return _content(f"fold {fold}", state, own, params, tags, points, artifacts, [])


def _content(
    name: str,
    state: object,
    times: Times,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    points: list[pl.DataFrame],
    artifacts: dict[str, bytes],
    notes: list[str],
) -> Content:
    """Everything within MLflow's limits, and a sentence about each thing that is left out or has another name."""
    notes = list(notes)
    known = {}
    for given, value in params.items():
        text = stored_text(value)
        if len(text) > MAX_PARAM:
            size = f"{len(text):,} characters, and MLflow takes {MAX_PARAM:,}"
            notes.append(f"parameter {given[:80]!r} was left out: it has {size}; params.yaml or outcome.json has it.")
        else:
            known[fitted(key_of(stored_text(str(given))), "parameter", notes)] = text
    every = pl.concat(points)
    renamed = {key: fitted(key, "metric", notes) for key in every["key"].unique().sort() if len(key) > MAX_KEY}
    every = every.with_columns(pl.col("key").replace(renamed)) if renamed else every
    every = every.unique(["key", "step"], keep="last", maintain_order=True).sort("step", "key", maintain_order=True)
    for path in [path for path, content in artifacts.items() if len(content) > LARGEST_BYTES]:
        size = bytes_text(len(artifacts.pop(path)))
        notes.append(f"{path} was left out: it has {size}, and at most {bytes_text(LARGEST_BYTES)} are exported.")
    notes += [f"tag {tag} was cut to {MAX_TAG:,} characters." for tag, text in tags.items() if len(text) > MAX_TAG]
    status = _STATUSES.get(str(state), "KILLED")
    return Content(
        name=fitted(stored_text(name), "run", notes),
        status=status,
        start_ms=times[0],
        end_ms=None if status == "RUNNING" else times[1] or times[0],
        params=known,
        tags={tag: text[:MAX_TAG] for tag, text in tags.items()},
        points=every,
        artifacts=artifacts,
        notes=tuple(notes),
    )


# --- Names and texts as MLflow takes them


def key_of(*parts: str) -> str:
    """The key of ``parts``, joined by ``/``; a character that MLflow refuses becomes its code point, ``_xHEX_``."""
    escaped = [_REFUSED.sub(lambda match: f"_x{ord(match[0]):X}_", part) for part in parts]
    # '', '.' and '..' would disappear from a path.
    return "/".join(part if part.strip(".") else f"_x{len(part)}_dots_" for part in escaped)


def fitted(key: str, kind: str, notes: list[str]) -> str:
    """``key`` where it is short enough, else its beginning and a digest of the whole, with a note."""
    if len(key) <= MAX_KEY:
        return key
    short = f"{key[: MAX_KEY - 20].rstrip('/')}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    notes.append(f"{kind} {key[:80]!r}... is called {short!r}: its name is too long for MLflow.")
    return short


def stored_text(value: object) -> str:
    """``value`` as it is stored: JSON unless it is a text; no secrets, no lone surrogates, no NUL."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = Redactor().text(text).encode("utf-8", "backslashreplace").decode()
    return shown.replace("\x00", "\\x00")


def _without_secrets(content: bytes) -> bytes:
    """A run's files hold none of the secrets of the process that wrote them; those of this one may be others."""
    return Redactor().text(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


# --- Points: key, step, timestamp and value


def _log_points(curves: pl.DataFrame, start_ms: int | None, plain_stage: str | None = None) -> pl.DataFrame:
    """Points of ``queries.learning_curves``; a missing or impossible time becomes ``start_ms``.

    Lines of ``plain_stage`` are called ``phase/metric``, those of others have their stage in front.
    """
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
    keys = [(key_of(row["scope"] if fold is None else "outer_fold", row["source"], row["metric"]), row) for row in rows]
    return _with_bounds(keys, ("low", "high", "fold_mean", "fold_std"), end_ms)


def _task_points(table: pl.DataFrame, end_ms: int | None) -> pl.DataFrame:
    """Points of the results of a task without folds (``tables.TASK_RESULTS``), controls among them."""
    rows = table.iter_rows(named=True)
    keys = [(key_of("test", row["source"], row["subject"], row["metric"]), row) for row in rows]
    return _with_bounds(keys, ("low", "high"), end_ms)


def _with_bounds(rows: list[tuple[str, dict[str, Any]]], bounds: tuple[str, ...], end_ms: int | None) -> pl.DataFrame:
    """Points at step 0 of each key's value and bounds; none of what is null: undefined, or does not apply."""
    named = [(key, row["value"]) for key, row in rows]
    named += [(f"{key}/{bound}", row[bound]) for key, row in rows for bound in bounds]
    # MLflow's SQL stores turn an infinity into 1.8e308, which reads as a number.
    points = [(key, 0, end_ms or 0, v if math.isfinite(v) else math.nan) for key, v in named if v is not None]
    return pl.DataFrame(points, schema=_SCHEMA, orient="row")


# --- Tags


def _not_finite(curves: pl.DataFrame) -> dict[str, str]:
    """A tag that says which values were not finite, by metric and step: in MLflow they are all NaN."""
    rows = curves.filter(pl.col("value").is_null()).sort("stage", "phase", "metric", "flag", "step")
    parts = []
    for (phase, metric, flag), steps in rows.group_by("phase", "metric", "flag", maintain_order=True):
        listed = steps["step"].to_list()
        more = f" and {len(listed) - _STEPS_NAMED:,} more" if len(listed) > _STEPS_NAMED else ""
        where = ", ".join(map(str, listed[:_STEPS_NAMED])) + more
        parts.append(f"{key_of(str(phase), str(metric))}: {flag} at step {where}")
    return {"fvc.not_finite": "; ".join(parts)} if parts else {}


def run_tags(headline: ReportHeadline, record: Mapping[str, Any]) -> dict[str, str]:
    """Tags of the whole run; ``mlflow.note.content`` is what MLflow shows above it, as Markdown."""
    attempts = record.get("attempts")
    last = _object(attempts[-1]) if isinstance(attempts, list) and attempts else {}
    code, hardware = _object(last.get("code")), _object(last.get("hardware"))
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
        "fvc.config_hash": record.get("config_hash"),
        **{
            f"fvc.hardware.{name}": hardware.get(name) or None
            for name in ("host", "processor", "cores", "machine", "memory_bytes", "gpus")
        },
    }
    return {name: stored_text(value) for name, value in found.items() if value not in (None, "", [])}


def _note(headline: ReportHeadline) -> str:
    """The verdict, what to know about it, and the numbers beside their controls."""

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
    """The folds that have begun, by their logs and by the status."""
    found = set(curves["fold"].drop_nulls().to_list())
    prefix = f"{TRAINING}_fold_"
    for key, stage in status["stages"].items():
        number = str(key).removeprefix(prefix)
        if str(key).startswith(prefix) and number.isdecimal() and isinstance(stage, dict):
            found |= {int(number)} if stage.get("state") != "pending" else set()
    return sorted(fold for fold in found if fold >= 0)


def _utc_ms(text: object) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return int(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() * 1000)


def _ms(seconds: Any, otherwise: int | None) -> int | None:
    return int(seconds * 1000) if isinstance(seconds, float) and 0 <= seconds < 2**40 else otherwise


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _name_in(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    return value if isinstance(value, str) and value.strip() else None
