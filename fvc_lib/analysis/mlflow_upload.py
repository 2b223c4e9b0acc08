"""Brings one MLflow run to what it shall be: looks at what is there, and adds what is missing.

Nothing is logged twice and nothing taken back. Whatever a killed export left is found again by tag and completed; what
says at the end that all is there is one tag, written last.
"""

from __future__ import annotations

import importlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.analysis.mlflow_content import Content
from fvc_lib.analysis.mlflow_names import MAX_TAG, fitted
from fvc_lib.analysis.mlflow_points import POINTS
from fvc_lib.analysis.wording import count_text

KEY, EXPORTED, ARTIFACTS, REFUSED = "fvc.key", "fvc.exported", "fvc.artifacts", "fvc.refused"
_PARENT = "mlflow.parentRunId"
_POINTS_AT_ONCE = 1000  # what MLflow takes in one request; of parameters and tags 100 each
_TEXTS_AT_ONCE = 100
_LARGEST_REQUEST = 800_000  # bytes of JSON; MLflow takes a million
_PAGE = 1000


@dataclass(frozen=True)
class Uploaded:
    """What one MLflow run received."""

    mlflow_run_id: str
    is_new: bool = False
    points: int = 0
    artifacts: int = 0
    notes: tuple[str, ...] = ()


def runs_by_key(client: Any, experiment_id: str, run_key: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The MLflow runs of one FVC run by key, folds included; where there are several of one, the oldest counts."""
    found: dict[str, Any] = {}
    notes, token = [], None
    while True:
        page = client.search_runs(
            [experiment_id], f"tags.`fvc.run_key` = '{run_key}'", max_results=_PAGE,
            order_by=["attributes.start_time ASC", "attributes.run_id ASC"], page_token=token,
        )  # fmt: skip
        for run in page:
            key = run.data.tags.get(KEY)
            if key in found:
                notes.append(
                    f"MLflow has the run {run.info.run_name!r} twice: {found[key].info.run_id} is kept up to date and "
                    f"{run.info.run_id} is not; delete it there."
                )
            elif key:
                found[key] = run
        token = page.token
        if not token:
            return found, tuple(notes)


def upload(
    client: Any, experiment_id: str, content: Content, existing: Any | None, parent_id: str | None = None
) -> Uploaded:
    """Bring the MLflow run of ``content`` up to date, creating it when ``existing`` is None.

    Raises:
        MlflowException: MLflow refuses or cannot be reached.
    """
    if existing is not None and parent_id and existing.data.tags.get(_PARENT) != parent_id:
        client.set_tag(existing.info.run_id, _PARENT, parent_id)  # its former one was deleted
    if existing is not None and existing.data.tags.get(EXPORTED) == content.digest:
        refused = existing.data.tags.get(REFUSED)
        return Uploaded(existing.info.run_id, notes=(refused,) if refused else ())
    run = existing or _created(client, experiment_id, content, parent_id)
    run_id = run.info.run_id
    notes, refused = _add_texts(client, run, content)
    missing, replaced = _missing_points(client, run, content.points)
    for batch in _point_batches(missing):
        refused += _logged(client, run_id, metrics=batch)
    if replaced:
        notes.append(
            f"{count_text(replaced, 'value')} had been exported before another took its place: MLflow takes none back, "
            "so both stand there, the newer one with the later time."
        )
    num_artifacts = _add_artifacts(client, run, content)
    _set_status(client, run, content)
    if refused:
        notes.append(told := " ".join(dict.fromkeys(refused))[:MAX_TAG])
        client.set_tag(run_id, REFUSED, told)
    client.set_tag(run_id, EXPORTED, content.digest)
    return Uploaded(run_id, existing is None, missing.height, num_artifacts, tuple(notes))


def _created(client: Any, experiment_id: str, content: Content, parent_id: str | None) -> Any:
    """Created together with the tags by which it is found again, or not at all."""
    found_by = {name: content.tags[name] for name in (KEY, "fvc.run_key")}
    nested = {_PARENT: parent_id} if parent_id else {}
    return client.create_run(
        experiment_id, start_time=content.start_ms, tags={**found_by, **nested}, run_name=content.name
    )


def _add_texts(client: Any, run: Any, content: Content) -> tuple[list[str], list[str]]:
    """Log parameters and tags that are missing or changed.

    Returns:
        Notes on parameters that have changed, which MLflow does not allow; and what it refused.
    """
    entities = _entities()
    there = run.data.params
    changed = {name: text for name, text in content.params.items() if name in there and there[name] != text}
    tags = {**content.tags, **{fitted(f"fvc.changed.{name}"): text for name, text in changed.items()}}
    params = [entities.Param(name, text) for name, text in content.params.items() if name not in there]
    new = [entities.RunTag(name, text) for name, text in tags.items() if run.data.tags.get(name) != text]
    refused: list[str] = []
    for some, others in itertools.zip_longest(_batches(params), _batches(new)):
        refused += _logged(client, run.info.run_id, params=some or [], tags=others or [])
    for name in run.data.tags:
        if name.startswith("fvc.") and name not in (*tags, EXPORTED, ARTIFACTS):
            # It said something that is true no longer.
            client.delete_tag(run.info.run_id, name)
    notes = [
        f"parameter {name}: MLflow keeps {there[name]!r} of an earlier export and takes no other; it is {text!r} now, "
        "as a tag says."
        for name, text in changed.items()
    ]
    return notes, refused


def _logged(client: Any, run_id: str, **entities: list[Any]) -> list[str]:
    """Log ``entities`` at once, or where MLflow refuses that, by name; returns a sentence about each that it refuses.

    A server of another version, or another database, may be stricter than the limits that are known here.
    """
    refusal = importlib.import_module("mlflow.exceptions").MlflowException
    try:
        client.log_batch(run_id, **entities)
        return []
    except refusal as error:
        by_name: dict[tuple[str, str], list[Any]] = {}
        for kind, some in entities.items():
            for entity in some:
                by_name.setdefault((kind, entity.key), []).append(entity)
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        if len(by_name) == 1:
            ((kind, name),) = by_name
            reason = " ".join(str(error.message).split())[:300]
            return [f"MLflow refuses the {kind.removesuffix('s')} {name[:80]!r}: {reason}"]
    return [said for (kind, _), some in by_name.items() for said in _logged(client, run_id, **{kind: some})]


def _missing_points(client: Any, run: Any, points: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The points that MLflow does not have yet, and how many of them stand for another value that it has.

    The time of a point does not count: a step that was done again after a kill has the same value at another time.
    Of several at one step MLflow shows the one with the latest time, so a new value gets a later one.
    """
    known = sorted(set(run.data.metrics) & set(points["key"]))
    if not known:
        return points, 0
    rows = [
        (key, point.step, point.timestamp, float(point.value))
        for key in known
        for point in client.get_metric_history(run.info.run_id, key)
    ]
    schema = {"key": pl.String, "step": pl.Int64, "there": pl.Int64, "had": pl.Float64}
    stored = pl.DataFrame(rows, schema=schema, orient="row").sort("there", maintain_order=True)
    stored = stored.unique(["key", "step"], keep="last", maintain_order=True)
    both = points.join(stored, on=["key", "step"], how="left", maintain_order="left")
    missing = both.filter(pl.col("there").is_null() | pl.col("had").ne_missing(pl.col("value")))
    later = pl.max_horizontal("timestamp", pl.col("there") + 1)
    return missing.with_columns(later.alias("timestamp")).select(POINTS), missing["there"].count()


def _point_batches(points: pl.DataFrame) -> Iterator[list[Any]]:
    metric = _entities().Metric
    longest = max((_size(key) for key in points["key"].unique()), default=0) + 120
    size = max(1, min(_POINTS_AT_ONCE, _LARGEST_REQUEST // longest))
    for start in range(0, points.height, size):
        rows = points.slice(start, size).iter_rows()
        yield [metric(key, value, timestamp, step) for key, step, timestamp, value in rows]


def _batches(entities: Sequence[Any]) -> Iterator[list[Any]]:
    """Parts of ``entities`` of which MLflow takes two in one request, one of parameters and one of tags."""
    part: list[Any] = []
    size = 0
    for entity in entities:
        its_size = _size(entity.key) + _size(entity.value) + 40
        if part and (len(part) == _TEXTS_AT_ONCE or size + its_size > _LARGEST_REQUEST // 2):
            yield part
            part, size = [], 0
        part.append(entity)
        size += its_size
    if part:
        yield part


def _size(text: str) -> int:
    return len(json.dumps(text))


def _add_artifacts(client: Any, run: Any, content: Content) -> int:
    """Upload all of them where any has changed; returns how many."""
    if not content.artifacts or run.data.tags.get(ARTIFACTS) == content.artifacts_digest:
        return 0
    with tempfile.TemporaryDirectory(prefix="fvc_mlflow_") as folder:
        for name, artifact in _sorted(content.artifacts.items()):
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(artifact)
        client.log_artifacts(run.info.run_id, folder)
    client.set_tag(run.info.run_id, ARTIFACTS, content.artifacts_digest)
    return len(content.artifacts)


def _sorted(items: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return sorted(items, key=lambda item: item[0])


def _set_status(client: Any, run: Any, content: Content) -> None:
    if content.status == "RUNNING":
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
    elif run.info.status != content.status or run.info.end_time != (content.end_ms or run.info.end_time):
        client.set_terminated(run.info.run_id, status=content.status, end_time=content.end_ms)


def _entities() -> Any:
    return importlib.import_module("mlflow.entities")
