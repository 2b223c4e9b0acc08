"""MLflow, loaded only when it is asked for: quiet, without telemetry, and with no password in what it says.

Loading it takes seconds and warns about its own dependencies, and importing it sends usage data unless it was told not
to before. So everything that touches it happens within ``connected``, which puts the process back as it was.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.redaction import REPLACEMENT, Redactor

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"

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
    return (database.absolute().parent / ARTIFACTS / experiment).as_uri()


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
