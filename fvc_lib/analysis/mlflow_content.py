"""What MLflow shall hold of a run: one MLflow run for the whole, and one nested below it for each fold.

Pure reading of the run folder, without MLflow. What MLflow would refuse is left out here and named.

A run is told from others by the ``run_id`` in its ``run.json``, not by its folder: a folder that was renamed, moved or
copied holds the same evidence, and must not count twice in a table of runs.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import polars as pl

from fvc_lib.analysis.headline import run_headline, run_parameters
from fvc_lib.analysis.mlflow_artifacts import fold_artifacts, run_artifacts
from fvc_lib.analysis.mlflow_names import MAX_PARAM, MAX_TAG, fitted, key_of
from fvc_lib.analysis.mlflow_points import (
    POINTS,
    log_points,
    not_finite,
    number_points,
    result_points,
    task_result_points,
)
from fvc_lib.analysis.mlflow_tags import run_tags, stored_text
from fvc_lib.analysis.queries import learning_curves, predictions, results, task_results
from fvc_lib.analysis.records import Answer, read_json_object
from fvc_lib.analysis.run_state import run_status
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths, stage_key

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
