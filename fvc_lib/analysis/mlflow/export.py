"""Exports a run to MLflow after the fact; the run folder stays the truth and is only read.

One MLflow run for the whole and one nested for each fold, in an experiment of the same name. What MLflow holds of a run
is found by the tag ``fvc.run_key``. It is skipped where it is complete and up to date, else replaced as a whole (the
earlier one goes to MLflow's trash). So exporting twice doubles nothing; the next export repeats one that was killed.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fvc_lib.analysis.mlflow.content import Content, RunContent, run_content
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.redaction import REPLACEMENT, Redactor
from fvc_lib.services.run_paths import RunPaths

RUN_KEY = "fvc.run_key"  # whose it is; on the whole and on each fold, from the moment they are created
EXPORTED = "fvc.exported"  # digest of what was exported; on the whole, written last
_PARENT = "mlflow.parentRunId"
_POINTS_AT_ONCE = 500  # MLflow takes 1,000 values, 100 parameters and 100 tags, and 1 MB in one request
_TEXTS_AT_ONCE = 20
_PAGE = 1000
# Or MLflow's pages show the experiment as one about language models.
_TRAINING = {"mlflow.experimentKind": "custom_model_development"}


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        tracking_uri: without secrets.
        mlflow_run_id: of the whole run.
        num_runs: MLflow runs of this run, its folds included.
        num_points, num_artifacts: what was written; 0 when MLflow was up to date.
        num_replaced: MLflow runs of an earlier export that went to the trash.
        notes: in words, what MLflow takes otherwise or not at all, or what could not be read.
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
        what = "nothing new"
        if self.changed:
            what = (
                f"{count_text(self.num_runs, 'run')}, {count_text(self.num_points, 'metric value')} and "
                f"{count_text(self.num_artifacts, 'file')} exported"
            )
            what += f" in place of {count_text(self.num_replaced, 'earlier run')}" if self.num_replaced else ""
        head = f"{self.run_id}: experiment {self.experiment!r} of {self.tracking_uri}, {what}"
        return [head, *(f"  note: {note}" for note in self.notes)]


def export_run(run: RunPaths, *, tracking_uri: str) -> ExportReport:
    """Bring MLflow to what ``run`` holds now, finished or not.

    Args:
        run: a run folder.
        tracking_uri: ``sqlite:///...``, another database's URI, or an MLflow server's address.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: MLflow refused or cannot be reached; the same command repeats the export.
    """
    content = run_content(run)
    contents = (content.whole, *content.folds)
    with connected(tracking_uri) as client:
        experiment_id = _experiment_id(client, content.experiment, tracking_uri)
        there = _runs_of(client, experiment_id, content.key)
        whole_id = next((r.info.run_id for r in there if r.data.tags.get(EXPORTED) == content.digest), None)
        is_new = whole_id is None
        if whole_id is None:
            whole_id = _export_all(client, experiment_id, content)
            client.set_tag(whole_id, EXPORTED, content.digest)
        # Only now: at every moment MLflow holds one complete export, if it ever did.
        others = [r for r in there if whole_id not in (r.info.run_id, r.data.tags.get(_PARENT))]
        for other in others:
            client.delete_run(other.info.run_id)
    redactor = Redactor()
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
        notes=tuple(redactor.text(note) for note in notes),
    )


def _runs_of(client: Any, experiment_id: str, run_key: str) -> list[Any]:
    """The MLflow runs of one FVC run, folds included, the oldest first."""
    found: list[Any] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], f"tags.`{RUN_KEY}` = '{run_key}'", max_results=_PAGE,
            order_by=["attributes.start_time ASC", "attributes.run_id ASC"], page_token=token,
        )  # fmt: skip
        found += page
        token = page.token
        if not token:
            return found


def _export_all(client: Any, experiment_id: str, content: RunContent) -> str:
    """Create the run and its folds below it; returns the whole's id."""
    tags = {RUN_KEY: content.key}
    whole_id = _export_one(client, experiment_id, content.whole, tags)
    for fold in content.folds:
        _export_one(client, experiment_id, fold, {**tags, _PARENT: whole_id})
    return whole_id


def _export_one(client: Any, experiment_id: str, content: Content, found_by: Mapping[str, str]) -> str:
    entities = importlib.import_module("mlflow.entities")
    run_id = str(
        client.create_run(experiment_id, start_time=content.start_ms, tags=found_by, run_name=content.name).info.run_id
    )
    params = [entities.Param(name, text) for name, text in content.params.items()]
    tags = [entities.RunTag(name, text) for name, text in content.tags.items()]
    points = [entities.Metric(key, value, time, step) for key, step, time, value in content.points.iter_rows()]
    for start in range(0, len(params), _TEXTS_AT_ONCE):
        client.log_batch(run_id, params=params[start : start + _TEXTS_AT_ONCE])
    for start in range(0, len(tags), _TEXTS_AT_ONCE):
        client.log_batch(run_id, tags=tags[start : start + _TEXTS_AT_ONCE])
    for start in range(0, len(points), _POINTS_AT_ONCE):
        client.log_batch(run_id, metrics=points[start : start + _POINTS_AT_ONCE])
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
    return f"MLflow at {shown_uri(tracking_uri)}: {type(error).__name__}: {shown} The same command repeats the export."


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
