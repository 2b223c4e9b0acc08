"""Exports a run to MLflow after the fact; the run folder stays the truth and is only read.

One MLflow run for the whole and one nested for each fold, in an experiment of the same name. Exporting again adds what
is new: a finished run that is there costs one question. One exporter at a time per run; two at once would each create
it, and the next export says so.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import polars as pl

from fvc_lib.analysis.mlflow.content import MAX_TAG, POINTS, Content, RunContent, fitted, run_content
from fvc_lib.analysis.mlflow.model import NetworkLoader, Registered, register_model
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.redaction import REPLACEMENT, Redactor
from fvc_lib.services.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------
# Brings one MLflow run to what it shall be: looks at what is there, and adds what is missing.
#
# Nothing is logged twice and nothing taken back. Whatever a killed export left is found again by tag and completed;
# what
# says at the end that all is there is one tag, written last.
#


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


# ----------------------------------------------------------------------------------------------------
# MLflow, loaded only when it is asked for: quiet, without telemetry, and with no password in what it says.
#
# Loading it takes seconds and warns about its own dependencies, and importing it sends usage data unless it was
# told not
# to before. So everything that touches it happens within ``connected``, which puts the process back as it was.
#


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


class TrackingError(FvcError):
    """MLflow, or the way to it, refused. What was exported so far stays, and the same command goes on from there."""


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
    text = uri
    for secret in _secrets(uri):
        text = text.replace(secret, REPLACEMENT)
    return Redactor().text(text)


@contextmanager
def connected(tracking_uri: str) -> Iterator[Any]:
    """An ``MlflowClient`` of ``tracking_uri``; no word of MLflow's reaches the terminal while it is in use.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: it cannot be reached or refuses something; the message holds no secret of the URI.
    """
    with _settings(tracking_uri), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own dependencies; nothing here could act on them
        mlflow = _loaded()
        with _silence():
            try:
                yield mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
            except _their_errors() as error:
                raise TrackingError(_told(error, tracking_uri)) from None


def _loaded() -> Any:
    try:
        return importlib.import_module("mlflow")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"exporting to MLflow needs the package {error.name!r}, which is not installed: "
            "pip install 'fvc_lib[mlflow]'"
        ) from error


def _their_errors() -> tuple[type[Exception], ...]:
    """What MLflow lets through: its own errors, those of its database library, and those of the network."""
    refused = importlib.import_module("mlflow.exceptions").MlflowException
    database = importlib.import_module("sqlalchemy.exc").SQLAlchemyError
    return refused, database, OSError


def _told(error: Exception, tracking_uri: str) -> str:
    """The first line of ``error``, long enough to act on, without what must not be shown."""
    text = " ".join(str(error).split())
    for secret in _secrets(tracking_uri):
        text = text.replace(secret, REPLACEMENT)
    text = Redactor().text(text)
    shown = text if len(text) <= 600 else f"{text[:600]}..."
    return (
        f"MLflow at {shown_uri(tracking_uri)}: {type(error).__name__}: {shown} "
        "What was exported so far stays; the same command goes on from there."
    )


def _secrets(uri: str) -> list[str]:
    """The parts of ``uri`` that may hold a password, the longest first."""
    try:
        parts = urlsplit(uri)
        user, password = parts.username, parts.password
    except ValueError:
        return [uri]
    info = parts.netloc.rpartition("@")[0]
    query = parts.query if parts.scheme != "sqlite" else ""
    found = {secret for secret in (info, password, user if password is None else None, query) if secret}
    return sorted(found, key=lambda secret: (-len(secret), secret))


@contextmanager
def _settings(tracking_uri: str) -> Iterator[None]:
    """The environment that MLflow reads at every call, for as long as it is in use."""
    wanted = dict(_ALWAYS)
    wanted |= {name: value for name, value in _UNLESS_SET.items() if name not in os.environ}
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


@contextmanager
def _silence() -> Iterator[None]:
    """A new database is announced in lines that look like trouble and are none; called with MLflow loaded."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


Progress = Callable[[str], None]
# Or MLflow's pages show the experiment as one about language models.
_TRAINING = {"mlflow.experimentKind": "custom_model_development"}


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        tracking_uri: without secrets.
        num_runs: MLflow runs of this run, its folds included.
        new_runs, new_points, new_artifacts: what was added by this export.
        model: the registered model; None where there is none.
        notes: in words, what MLflow refused, takes otherwise, or could not be read.
    """

    run_id: str
    experiment: str
    tracking_uri: str
    mlflow_run_id: str
    num_runs: int
    new_runs: int
    new_points: int
    new_artifacts: int
    model: Registered | None
    notes: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether anything was added."""
        added = self.new_runs or self.new_points or self.new_artifacts
        return bool(added or (self.model and self.model.is_new))

    def lines(self) -> list[str]:
        """For the terminal."""
        what = (
            f"{count_text(self.new_runs, 'run')}, {count_text(self.new_points, 'metric value')} and "
            f"{count_text(self.new_artifacts, 'file')} added"
            if self.changed
            else "nothing new"
        )
        lines = [f"{self.run_id}: experiment {self.experiment!r} of {self.tracking_uri}, {what}"]
        lines += [f"  model {self.model}"] if self.model else []
        return [*lines, *(f"  note: {note}" for note in self.notes)]


def export_run(
    run: RunPaths,
    *,
    tracking_uri: str,
    load_model: NetworkLoader | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Bring MLflow to what ``run`` holds now, finished or not.

    Args:
        run: a run folder.
        tracking_uri: ``sqlite:///...``, another database's URI, or an MLflow server's address.
        load_model: loads a fold's network for the registry; None: no model is registered.
        progress: told what is being done.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: MLflow refused or cannot be reached; what was exported so far stays and the next export goes on.
    """
    tell = progress or (lambda _: None)
    content = run_content(run)
    with connected(tracking_uri) as client:
        experiment_id = _experiment_id(client, content.experiment, tracking_uri)
        known, notes = runs_by_key(client, experiment_id, content.whole.key)
        uploaded = _upload_all(client, experiment_id, content, known, tell)
        model: Registered | None = None
        said: tuple[str, ...] = ()
        if load_model is not None:
            tell("model")
            model, said = register_model(client, experiment_id, run, content, uploaded[0].mlflow_run_id, load_model)
    told = [*content.notes, *notes, *_named_notes(content, uploaded), *said]
    redactor = Redactor()
    return ExportReport(
        run_id=content.run_id,
        experiment=content.experiment,
        tracking_uri=shown_uri(tracking_uri),
        mlflow_run_id=uploaded[0].mlflow_run_id,
        num_runs=len(uploaded),
        new_runs=sum(each.is_new for each in uploaded),
        new_points=sum(each.points for each in uploaded),
        new_artifacts=sum(each.artifacts for each in uploaded),
        model=model,
        notes=tuple(redactor.text(note) for note in told),
    )


def _upload_all(
    client: Any, experiment_id: str, content: RunContent, known: dict[str, Any], tell: Progress
) -> list[Uploaded]:
    """The whole first, since its folds are nested in it."""
    tell(f"{content.run_id}: {count_text(content.whole.points.height, 'number')}")
    whole = upload(client, experiment_id, content.whole, known.get(content.whole.key))
    uploaded = [whole]
    for fold, each in content.folds:
        tell(f"fold {fold}: {count_text(each.points.height, 'number')}")
        uploaded.append(upload(client, experiment_id, each, known.get(each.key), whole.mlflow_run_id))
    return uploaded


def _named_notes(content: RunContent, uploaded: list[Uploaded]) -> list[str]:
    contents = [content.whole, *(each for _, each in content.folds)]
    return [
        f"{each.name}: {note}"
        for each, done in zip(contents, uploaded, strict=True)
        for note in (*each.notes, *done.notes)
    ]


def _experiment_id(client: Any, name: str, tracking_uri: str) -> str:
    """Of the experiment called ``name``, created where there is none.

    Raises:
        TrackingError: it lies in MLflow's trash, where nothing can be added to it.
    """
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
