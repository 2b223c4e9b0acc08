"""What MLflow shall hold of a run: one MLflow run for the whole, and one nested below it for each fold.

Pure reading of the run folder, without MLflow. What MLflow would refuse is left out here and named.

A run is told from others by the ``run_id`` in its ``run.json``, not by its folder: a folder that was renamed, moved or
copied holds the same evidence, and must not count twice in a table of runs.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from html import escape
from typing import Any, Literal

import polars as pl

from fvc_lib.analysis.read.headline import ReportHeadline, Score, run_headline, run_parameters
from fvc_lib.analysis.read.queries import learning_curves, predictions, results, task_results
from fvc_lib.analysis.read.records import Answer, read_json_object, read_tables, run_status
from fvc_lib.analysis.wording import bytes_text, clean_text, interval_text, metric_name, source_name
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths, stage_key

# ----------------------------------------------------------------------------------------------------
# Names as MLflow takes them, and back: letters, digits, ``_ - . / `` and spaces, nothing that reads as a path.
#
# A character that MLflow refuses becomes ``_xHEX_``, its code point in hexadecimal, after the escapes of ECMA-376
# (``ST_Xstring``). A text that looks like such an escape has its first underscore escaped, so every name has
# exactly one
# key and every key made here exactly one name.
#


# MLflow's own limits of version 3 (mlflow.utils.validation): characters of a key, a parameter, a run's tag, and a name.
MAX_KEY = 250
MAX_PARAM = 6_000
MAX_TAG = 8_000

# ':' is legal on a POSIX server and not on a Windows one; '/' separates the parts of a key.
_REFUSED = re.compile(r"[^\w.\- ]")
_LIKE_AN_ESCAPE = re.compile(r"_(?=x(?:[0-9A-F_]|[^\w.\- ]))")
_ESCAPE = re.compile(r"_x([0-9A-F]*)_")


def key_of(*parts: str) -> str:
    """The key of ``parts``, joined by ``/``; any text is a legal part, also an empty one."""
    return "/".join(map(_escaped, parts))


def parts_of(key: str) -> tuple[str, ...]:
    """What ``key_of`` was given."""
    return tuple(_ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", p) for p in key.split("/"))


def fitted(key: str) -> str:
    """``key`` where it is short enough, else its beginning and a digest of the whole: 250 characters at most."""
    if len(key) <= MAX_KEY:
        return key
    return f"{key[: MAX_KEY - 20].rstrip('/')}_{sha256(key.encode()).hexdigest()[:16]}"


def _escaped(part: str) -> str:
    text = _LIKE_AN_ESCAPE.sub("_x5F_", part)
    text = _REFUSED.sub(lambda match: f"_x{ord(match[0]):X}_", text)
    if text in ("", ".", ".."):  # would disappear from a path
        return "_x_" if not text else "_x2E_" + text[1:]
    return text


# ----------------------------------------------------------------------------------------------------
# A run's numbers as MLflow's points: key, step, timestamp and value.
#
# Keys: ``train/loss`` and ``validation/roc_auc`` as the training logged them (``STAGE/phase/metric`` for other stages);
# ``all/model/roc_auc`` with ``/low`` and ``/high`` beside it for results over all folds, ``all/metadata_only/roc_auc``
# for a control, ``all_by_group/...`` with one vote per group, ``outer_fold/model/roc_auc`` in a fold's own run;
# ``test/model/text_to_video/recall@1`` for results of a task without folds.
#
# MLflow's SQL stores keep NaN, and turn an infinity into 1.8e308, which reads as a number. So both become NaN there, a
# gap in the curve, and a tag says which steps were what.
#


POINTS = ["key", "step", "timestamp", "value"]
_SCHEMA = {"key": pl.String, "step": pl.Int64, "timestamp": pl.Int64, "value": pl.Float64}
_EXTRAS = ("low", "high", "fold_mean", "fold_std")
_LATEST_MS = 2**50  # beyond the year 37,000 a clock was wrong
_STEPS_NAMED = 20


def log_points(curves: pl.DataFrame, start_ms: int | None, plain_stage: str | None = None) -> pl.DataFrame:
    """Points of metric lines (``queries.learning_curves``); a missing or impossible time becomes ``start_ms``.

    Lines of ``plain_stage`` are called ``phase/metric``, those of others have their stage in front.
    """
    time = (pl.col("ts") * 1000).round()
    possible = time.is_finite() & (time >= 0) & (time < _LATEST_MS)
    names = _names(curves, plain_stage)
    return curves.join(names, on=["stage", "phase", "metric"], how="left").select(
        "key",
        "step",
        pl.when(possible).then(time).otherwise(start_ms or 0).cast(pl.Int64).alias("timestamp"),
        pl.col("value").fill_null(math.nan),
    )


def result_points(table: pl.DataFrame, end_ms: int | None, fold: int | None = None) -> pl.DataFrame:
    """Points of the results, at step 0: of the model on one fold, or all that is said over all folds with controls.

    What is null is undefined or does not apply, and has no point.
    """
    over_all = ~pl.col("scope").str.starts_with("fold_")
    of_fold = (pl.col("scope") == f"fold_{fold}") & (pl.col("source") == "model")
    rows = table.filter(over_all if fold is None else of_fold)
    numbers: dict[str, float] = {}
    for row in rows.iter_rows(named=True):
        scope = row["scope"] if fold is None else "outer_fold"
        key = key_of(scope, row["source"], row["metric"])
        named = {key: row["value"], **{f"{key}/{extra}": row[extra] for extra in _EXTRAS}}
        numbers |= {name: value for name, value in named.items() if value is not None}
    return _at_once(numbers, end_ms)


def task_result_points(table: pl.DataFrame, end_ms: int | None) -> pl.DataFrame:
    """Points of the results of a task without folds (``task_tables.TASK_RESULTS``), at step 0, controls among them."""
    numbers: dict[str, float] = {}
    for row in table.iter_rows(named=True):
        key = key_of("test", row["source"], row["subject"], row["metric"])
        named = {key: row["value"], **{f"{key}/{bound}": row[bound] for bound in ("low", "high")}}
        numbers |= {name: value for name, value in named.items() if value is not None}
    return _at_once(numbers, end_ms)


def number_points(numbers: Mapping[str, float], end_ms: int | None) -> pl.DataFrame:
    """Single numbers of a finished training, as ``outcome/NAME`` at step 0."""
    return _at_once({key_of("outcome", name): value for name, value in numbers.items()}, end_ms)


def not_finite(curves: pl.DataFrame) -> dict[str, str]:
    """A tag that says which values were not finite, by metric and step; none where all were."""
    rows = curves.filter(pl.col("value").is_null()).sort("stage", "phase", "metric", "flag", "step")
    if rows.is_empty():
        return {}
    parts = []
    for (phase, metric, flag), steps in rows.group_by("phase", "metric", "flag", maintain_order=True):
        listed = steps["step"].to_list()
        more = f" and {len(listed) - _STEPS_NAMED:,} more" if len(listed) > _STEPS_NAMED else ""
        where = ", ".join(map(str, listed[:_STEPS_NAMED])) + more
        parts.append(f"{key_of(str(phase), str(metric))}: {flag} at step {where}")
    return {"fvc.not_finite": "; ".join(parts)}


def _names(curves: pl.DataFrame, plain_stage: str | None) -> pl.DataFrame:
    """The key of each stage, phase and metric: few, so they are made one by one."""
    distinct = curves.select("stage", "phase", "metric").unique().sort("stage", "phase", "metric")
    keys = [
        key_of(phase, metric) if stage == plain_stage else key_of(stage, phase, metric)
        for stage, phase, metric in distinct.iter_rows()
    ]
    return distinct.with_columns(pl.Series("key", keys, dtype=pl.String))


def _at_once(numbers: Mapping[str, float], end_ms: int | None) -> pl.DataFrame:
    finite = {key: value if math.isfinite(value) else math.nan for key, value in numbers.items()}
    rows = {"key": list(finite), "step": [0] * len(finite), "timestamp": [end_ms or 0] * len(finite)}
    return pl.DataFrame({**rows, "value": list(finite.values())}, schema=_SCHEMA)


# ----------------------------------------------------------------------------------------------------
# What is said of a run in words: its standing beside its controls, its code and its machine.


# Within a line; no text from outside stands at the beginning of one, where more has a meaning.
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")


def stored_text(value: object) -> str:
    r"""``value`` as it is stored: JSON unless it is a text, no secrets, nothing that a database refuses.

    Lone surrogates are no UTF-8, and PostgreSQL refuses NUL: they stand there as ``\udcXX`` and ``\x00``.
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = Redactor().text(text).encode("utf-8", "backslashreplace").decode()
    return shown.replace("\x00", "\\x00")


def run_tags(headline: ReportHeadline, record: Mapping[str, Any], table: pl.DataFrame) -> dict[str, str]:
    """Tags of the whole run; ``mlflow.note.content`` is what MLflow shows above it, as Markdown."""
    attempts = record.get("attempts")
    last = _object(attempts[-1]) if isinstance(attempts, list) and attempts else {}
    code = _object(last.get("code"))
    found: dict[str, object] = {
        "mlflow.note.content": _note(headline, table),
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
        **_hardware(_object(last.get("hardware"))),
    }
    return {name: stored_text(value) for name, value in found.items() if value not in (None, "", [])}


def scores_text(headline: ReportHeadline) -> str:
    """The model's number with its interval, in words."""
    score = headline.model_score
    return (
        "not recorded"
        if score is None
        else f"{headline.measure.name} {interval_text(score.value, score.low, score.high)}"
    )


def as_markdown(text: str) -> str:
    """``text`` such that Markdown and the HTML within it show it as it is."""
    return _MARKDOWN.sub(r"\\\1", escape(clean_text(text), quote=False))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _hardware(hardware: dict[str, Any]) -> dict[str, object]:
    names = ("host", "processor", "cores", "machine", "memory_bytes", "gpus")
    return {f"fvc.hardware.{name}": hardware[name] for name in names if hardware.get(name)}


def _note(headline: ReportHeadline, table: pl.DataFrame) -> str:
    """The verdict, what to know about it, and the numbers beside their controls."""
    lines = [f"**{as_markdown(headline.verdict.standing)}**: {as_markdown(headline.verdict.sentence)}"]
    lines += [as_markdown(caution) for caution in headline.cautions]
    if headline.failure:
        lines.append(as_markdown(headline.failure))
    if headline.scores:
        rows = "".join(map(_score_row, headline.scores))
        lines.append(f"| Scored by | {as_markdown(headline.measure.name)} with interval |\n| --- | --- |\n{rows}")
    others = table.filter((pl.col("scope") == "all") & (pl.col("source") == "model") & (pl.col("metric") != "roc_auc"))
    if not others.is_empty():
        rows = "".join(
            f"| {as_markdown(metric_name(row['metric']))} | {interval_text(row['value'], row['low'], row['high'])} |\n"
            for row in others.iter_rows(named=True)
        )
        lines.append(f"| Model, over all folds | with interval |\n| --- | --- |\n{rows}")
    if headline.measure.remark:
        lines.append(headline.measure.remark)
    return "\n\n".join(lines)


def _score_row(score: Score) -> str:
    number = interval_text(score.value, score.low, score.high)
    return f"| {as_markdown(source_name(score.source))} | {number} |\n"


# ----------------------------------------------------------------------------------------------------
# The files of a run that MLflow keeps: the report with its figures, the results as tables, and the record.


# A report of five folds is 6 MB, plotly with it.
LARGEST_BYTES = 64_000_000

Artifacts = dict[str, bytes]


def run_artifacts(
    run: RunPaths, results: Answer, predictions: Answer, task_results: Answer
) -> tuple[Artifacts, tuple[str, ...]]:
    """Content by path, and what was left out. Tables are CSV, which MLflow's pages show as tables."""
    files = {
        "report.html": run.report_html,
        "params.yaml": run.params_yaml,
        "run.json": run.run_json,
        "status.json": run.status_json,
        "code.patch": run.code_patch,
    }
    slices = read_tables([("", run.slices)], tables.SLICES)
    audit = read_tables([("", run.leakage_audit)], tables.LEAKAGE_AUDIT)
    frames = {
        "kfold_results": results, "task_results": task_results, "predictions": predictions, "slices": slices,
        "leakage_audit": audit,
    }  # fmt: skip
    found: Artifacts = {}
    notes = [note for answer in (task_results, predictions, slices, audit) for note in answer.notes]
    for name, path in files.items():
        if path.is_file():
            notes += _keep(found, name, _without_secrets(path.read_bytes()))
    for name, answer in frames.items():
        if not answer.frame.is_empty():
            notes += _keep(found, f"tables/{name}.csv", _csv(answer.frame))
    if "report.html" not in found and not run.report_html.is_file():
        notes.append("There is no report.html yet: `run_notebooks.py report` writes it; export again after it.")
    return found, tuple(notes)


def fold_artifacts(run: RunPaths, fold: int) -> tuple[Artifacts, tuple[str, ...]]:
    """What a fold's training found, if it is finished."""
    found: Artifacts = {}
    path = run.fold_outcome(fold)
    notes = _keep(found, path.name, _without_secrets(path.read_bytes())) if path.is_file() else []
    return found, tuple(notes)


def _keep(found: Artifacts, name: str, content: bytes) -> list[str]:
    if len(content) > LARGEST_BYTES:
        most = bytes_text(LARGEST_BYTES)
        return [f"{name} was left out: it has {bytes_text(len(content))}, and what is kept has at most {most}."]
    found[name] = content
    return []


def _without_secrets(content: bytes) -> bytes:
    """A run's files hold none of the secrets of the process that wrote them; those of this one may be others."""
    text = content.decode("utf-8", "surrogateescape")
    return Redactor().text(text).encode("utf-8", "surrogateescape")


def _csv(frame: pl.DataFrame) -> bytes:
    return frame.drop("run_id", strict=False).write_csv().encode()


TRAINING = "04_fold_training"

MlflowStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
# A state of ours that is missing here, such as "stopped without a word", is KILLED.
_STATUSES: dict[str, MlflowStatus] = {
    "done": "FINISHED", "by hand": "FINISHED", "failed": "FAILED", "running": "RUNNING", "waiting": "RUNNING",
    "pending": "RUNNING", "requeue": "RUNNING",
}  # fmt: skip


@dataclass(frozen=True)
class Content:
    """One MLflow run as it shall be.

    Attributes:
        key: finds it again, whatever its name: 64 hexadecimal digits.
        points: ``key step timestamp value``; one row per key and step, timestamps in ms, NaN where there is no number.
        artifacts: content by path, ``/`` between folders.
        notes: what MLflow takes differently, or not at all, in words.
    """

    key: str
    name: str
    status: MlflowStatus
    start_ms: int | None
    end_ms: int | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    points: pl.DataFrame
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def artifacts_digest(self) -> str:
        """Of all artifacts with their paths."""
        return sha256_of_json({path: hashlib.sha256(content).hexdigest() for path, content in self.artifacts.items()})

    @cached_property
    def digest(self) -> str:
        """Of everything: MLflow holds it already when it holds this."""
        told = [self.name, self.status, self.end_ms, dict(self.params), dict(self.tags), self.artifacts_digest]
        points = hashlib.sha256(self.points.write_csv().encode()).hexdigest()
        return sha256_of_json([told, points])


@dataclass(frozen=True)
class RunContent:
    """A run, its folds in order, and the name of the experiment and of the registered model."""

    experiment: str
    run_id: str
    whole: Content
    folds: tuple[tuple[int, Content], ...]
    notes: tuple[str, ...]


def run_content(run: RunPaths) -> RunContent:
    """Everything of ``run`` that goes to MLflow, as far as it has come."""
    record, status = read_json_object(run.run_json), run_status(run)
    run_id = _text_of(record.get("run_id")) or path_to_text(run.run_id)
    experiment = _text_of(record.get("experiment")) or path_to_text(run.experiment)
    curves, table = learning_curves([run]), results([run])
    identity = sha256_of_json([experiment, run_id])
    times = _times(status, curves.frame)
    folds = _folds(run, curves.frame, status)
    renamed = run_id != path_to_text(run.run_id)
    notes = (
        *(
            (f"{run_id}: its folder is called {path_to_text(run.run_id)}; run.json says whose it is.",)
            if renamed
            else ()
        ),
        *curves.notes,
        *table.notes,
    )
    return RunContent(
        experiment=stored_text(experiment),
        run_id=run_id,
        whole=_whole(run, run_id, identity, record, status, times, curves.frame, table.frame),
        folds=tuple((fold, _fold(run, fold, identity, status, times, curves.frame, table.frame)) for fold in folds),
        notes=notes,
    )


def _whole(
    run: RunPaths,
    run_id: str,
    identity: str,
    record: dict[str, Any],
    status: dict[str, Any],
    times: tuple[int | None, int | None],
    curves: pl.DataFrame,
    table: pl.DataFrame,
) -> Content:
    params, refused = _taken(run_parameters(run), MAX_PARAM, "parameter", "params.yaml, among its artifacts, has it")
    of_task = task_results([run])
    artifacts, left_out = run_artifacts(run, Answer(table), predictions([run]), of_task)
    logged, end_ms = curves.filter(pl.col("fold").is_null()), times[1] or times[0]
    points = pl.concat(
        [log_points(logged, times[0]), result_points(table, end_ms), task_result_points(of_task.frame, end_ms)]
    )
    tags = {**run_tags(run_headline(run), record, table), "fvc.run_id": run_id, "fvc.run_key": identity}
    tags |= not_finite(logged)
    return _content(identity, run_id, status.get("state"), times, params, tags, points, artifacts, refused + left_out)


def _fold(
    run: RunPaths,
    fold: int,
    identity: str,
    status: dict[str, Any],
    times: tuple[int | None, int | None],
    curves: pl.DataFrame,
    table: pl.DataFrame,
) -> Content:
    stage = status["stages"].get(stage_key(TRAINING, fold))
    state = stage.get("state") if isinstance(stage, dict) else None
    logged = curves.filter(pl.col("fold") == fold)
    own = (_ms(logged["ts"].min(), times[0]), _ms(logged["ts"].max(), times[1]))
    outcome = read_json_object(run.fold_outcome(fold))
    params, refused = _taken(
        {"fold": fold, **{name: outcome[name] for name in ("model", "num_parameters", "device") if name in outcome}},
        MAX_PARAM, "parameter", "the fold's outcome.json has it",
    )  # fmt: skip
    points = pl.concat(
        [
            log_points(logged, own[0], TRAINING),
            result_points(table, own[1], fold),
            number_points(_numbers(outcome), own[1]),
        ]
    )
    tags = {"fvc.run_key": identity, "fvc.fold": str(fold), "fvc.state": str(state or "not recorded")}
    tags |= not_finite(logged)
    artifacts, left_out = fold_artifacts(run, fold)
    key = sha256_of_json([identity, fold])
    return _content(key, f"fold {fold}", state, own, params, tags, points, artifacts, refused + left_out)


def _content(
    key: str,
    name: str,
    state: object,
    times: tuple[int | None, int | None],
    params: dict[str, str],
    tags: Mapping[str, str],
    points: pl.DataFrame,
    artifacts: Mapping[str, bytes],
    notes: tuple[str, ...],
) -> Content:
    known, refused = _taken({**tags, "fvc.key": key}, MAX_TAG, "tag", "run.json, among its artifacts, has it")
    points, long_names = _fitting(points)
    status = _STATUSES.get(str(state), "KILLED")
    return Content(
        key, fitted(stored_text(name)), status, times[0], None if status == "RUNNING" else times[1] or times[0],
        params, known, points, artifacts, (*notes, *refused, *long_names),
    )  # fmt: skip


def _taken(values: Mapping[str, object], limit: int, kind: str, remedy: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Names and texts that MLflow takes, and a sentence about each that it does not."""
    taken, refused = {}, []
    # A tag's name is ours and begins like a path's; a parameter's comes from a file.
    for given, value in values.items():
        name, text = given if kind == "tag" else key_of(stored_text(str(given))), stored_text(value)
        if len(text) > limit:
            size = f"{len(text):,} characters, and MLflow takes {limit:,}"
            refused.append(f"{kind} {name[:80]!r} was left out: it has {size}; {remedy}.")
        else:
            taken[fitted(name)] = text
            if fitted(name) != name:
                refused.append(f"{kind} {name[:80]!r}... is called {fitted(name)!r}: its name is too long for MLflow.")
    return taken, tuple(refused)


def _fitting(points: pl.DataFrame) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """``points`` with names that are short enough, one row per name and step, ordered; and which were cut."""
    cut = {name: fitted(name) for name in points["key"].unique().sort() if fitted(name) != name}
    notes = tuple(
        f"metric {old[:80]!r}... is called {new!r}: its name is too long for MLflow." for old, new in cut.items()
    )
    if cut:
        points = points.with_columns(pl.col("key").replace(cut))
    points = points.unique(["key", "step"], keep="last", maintain_order=True)
    # By step, so that a half-done export is the beginning of every curve.
    return points.sort("step", "key", maintain_order=True).select(POINTS), notes


def _folds(run: RunPaths, curves: pl.DataFrame, status: dict[str, Any]) -> list[int]:
    """The folds that have begun, by their logs and by the status."""
    found = set(curves["fold"].drop_nulls().to_list())
    prefix = f"{TRAINING}_fold_"
    for key, stage in status["stages"].items():
        number = str(key).removeprefix(prefix)
        if str(key).startswith(prefix) and number.isdecimal() and isinstance(stage, dict):
            found |= {int(number)} if stage.get("state") != "pending" else set()
    return sorted(fold for fold in found if fold >= 0)


def _numbers(outcome: Mapping[str, Any]) -> dict[str, float]:
    """The finished training's own numbers, whatever they are called."""
    training = outcome.get("training")
    every = {**(training if isinstance(training, dict) else {}), **outcome}
    return {
        name: float(value)
        for name, value in every.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("fold", "seconds")
        and not abs(value) > sys.float_info.max
    }


def _times(status: Mapping[str, Any], curves: pl.DataFrame) -> tuple[int | None, int | None]:
    """When the run began and ended in ms of UTC, by the status or else by its first and last metric."""
    return (
        _utc_ms(status.get("started_utc")) or _ms(curves["ts"].min(), None),
        _utc_ms(status.get("finished_utc")) or _ms(curves["ts"].max(), None),
    )


def _utc_ms(text: object) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return int(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() * 1000)


def _ms(seconds: Any, otherwise: int | None) -> int | None:
    return int(seconds * 1000) if isinstance(seconds, float) and 0 <= seconds < 2**40 else otherwise


def _text_of(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None
