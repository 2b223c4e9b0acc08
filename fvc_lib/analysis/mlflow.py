"""Export what a run has recorded to MLflow, and register bundles in MLflow's model registry.

A bundle is a folder with a trained detector. A run becomes one MLflow run, in an MLflow experiment with the name of the
run's experiment. The tag ``fvc.run_key`` identifies it. A new export of the same run replaces the earlier one, which
goes to MLflow's trash. If an export was killed, run it again.

Keys of metrics (a control is a simple predictor that the model must beat):

- ``fold_0/train/loss``: logged in the training of a fold. Other stages log ``STAGE/phase/metric``.
- ``all/model/roc_auc``: result over all folds. Keys with ``/low`` and ``/high`` hold the ends of its interval.
- ``all/metadata_only/roc_auc``: result of a control.
- ``fold_0/model/roc_auc``: result of an outer fold.
- ``target/NAME/model/roc_auc``: result on a target, a corpus or generator that the run only tests on.
- ``test/model/all/top1``: result of a task without folds.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib
import math
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl

import fvc_lib
from fvc_lib.analysis.read.headline import ReportHeadline, run_headline
from fvc_lib.analysis.read.queries import SQL_TABLES
from fvc_lib.analysis.read.runs import Answer, as_list, run_status
from fvc_lib.analysis.wording import clean_text, count_text
from fvc_lib.services.atomic_files import as_mapping, as_text, read_json_object, sha256_of_json
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.home import HOME, IS_CHECKOUT
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import csv_for_people
from fvc_lib.services.tasks import FOLD_TRAINING

# --- What is exported, without MLflow

# The most characters of a key (MLflow allows 250) and of the value of a parameter or tag (mlflow.utils.validation).
MAX_KEY, MAX_TEXT = 240, 6_000
RUN_KEY = "fvc.run_key"
_ENDS = ("value", "low", "high")
_STORED = ("results", "task_results", "predictions", "slices", "leakage_audit")
TABLES = ("metrics", "parameters", *_STORED)  # names in ``queries.SQL_TABLES``
# MLflow's name for each state of a run. Any other state, such as "stopped without a word", becomes KILLED.
_STATUSES = {
    "done": "FINISHED", "by hand": "FINISHED", "interactive": "FINISHED", "failed": "FAILED", "running": "RUNNING",
    "waiting": "RUNNING", "pending": "RUNNING", "requeue": "RUNNING",
}  # fmt: skip


Point = tuple[str, int, int, float]  # key, step, milliseconds, value


@functools.cache
def key_of(*parts: str) -> str:
    """Return ``parts`` joined by ``/``, as a key that MLflow accepts.

    A character that MLflow refuses becomes ``_xHEX_``, with its code point in hexadecimal. A key of more than
    ``MAX_KEY`` characters is cut, and ends with a digest of the full key.
    """
    # ':' is legal on a POSIX server and not on a Windows one; '..' would disappear from a path.
    escaped = (
        re.sub(r"[^\w.\- ]|^\.+$", lambda match: "".join(f"_x{ord(c):X}_" for c in match[0]), part) or "_empty_"
        for part in parts
    )
    key = "/".join(escaped)
    return key if len(key) <= MAX_KEY else f"{key[: MAX_KEY - 20]}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _milliseconds(utc: object) -> int:
    return int(datetime.datetime.fromisoformat(utc).timestamp() * 1000) if isinstance(utc, str) else 0


def points_of(tables: Mapping[str, Answer], ended: int) -> list[Point]:
    """Return the logged metrics and the results as points ``(key, step, milliseconds, value)`` for MLflow.

    A result gives up to three points: its value and both ends of its interval. If several points have the same key and
    step, the last is returned. Undefined values are NaN; the tables hold no infinite ones.

    Args:
        tables: maps each name in ``TABLES`` to its rows, read with ``queries.SQL_TABLES``.
        ended: end of the run in milliseconds since 1970, the time of results and of log lines without a time.
    """
    curves, results, task_results = (tables[name].frame for name in ("metrics", "results", "task_results"))
    place = pl.when(stage=FOLD_TRAINING).then(pl.format("fold_{}", "fold")).otherwise("stage").fill_null("")
    time = (pl.col("ts") * 1000).round().cast(pl.Int64, strict=False).clip(0, 2**50).fill_null(ended)
    logged = curves.select(place, "phase", "metric", "step", time, pl.col("value").fill_null(math.nan)).rows()
    rows = [(key_of(*line[:3]), *line[3:]) for line in logged]
    measured = results.select(pl.col("scope").str.splitn(":", 2).struct.unnest(), "source", "metric", *_ENDS).rows()
    measured += task_results.select(pl.lit("test"), "source", "subject", "metric", *_ENDS).rows()
    for *parts, value, low, high in measured:
        names = [part for part in parts if part is not None]
        ends = (value, names), (low, [*names, "low"]), (high, [*names, "high"])
        rows += [(key_of(*key), 0, ended, end) for end, key in ends if end is not None]
    return list({row[:2]: row for row in rows}.values())


def run_tags(headline: ReportHeadline, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the MLflow tags of a run, as a dict from name to text.

    The tag ``mlflow.note.content`` holds the verdict and the cautions of ``headline``. MLflow shows it as Markdown at
    the top of the run's page. ``record`` is the content of ``run.json``.
    """
    verdict = headline.verdict
    attempts = as_list(record.get("attempts")) or [{}]
    code = as_mapping(as_mapping(attempts[-1]).get("code"))
    note = [f"**{verdict.standing}**: {verdict.sentence}", *headline.cautions]
    tags = {
        "mlflow.note.content": "\n\n".join(map(clean_text, note)),
        "mlflow.source.name": "run_notebooks.py",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": code.get("commit"),
        "fvc.state": headline.state,
        "fvc.standing": verdict.standing,
        "fvc.verdict": verdict.sentence,
        "fvc.corpus": headline.corpus,
        "fvc.config_hash": record.get("config_hash"),
    }
    return {name: str(value)[:MAX_TEXT] for name, value in tags.items() if value}


# --- The export


class RunExport:
    """Export of a run to MLflow, either at once or in steps while the run is working.

    The first step creates an MLflow run with the parameters. Later steps add the metric values that are new. The last
    step adds results and files, and removes earlier exports of the same run.

    Args:
        run: the run.
        tracking_uri: address of MLflow, a database or a server.
    """

    def __init__(self, run: RunPaths, tracking_uri: str) -> None:
        self.run = run
        self.tracking_uri = tracking_uri
        self._run_id = ""
        self._earlier = list[str]()
        self._sent = set[tuple[str, int]]()

    def read(self) -> None:
        """Read what the run has recorded so far into attributes of this object.

        The ``run_id`` in ``run.json`` identifies a run, so a renamed or copied folder counts as the same run.
        """
        self.record = read_json_object(self.run.run_json)
        self.status = run_status(self.run)
        self.headline = run_headline(self.run)
        self.run_id = as_text(self.record.get("run_id")) or self.headline.run_id
        self.experiment = as_text(self.record.get("experiment")) or self.headline.experiment
        self.tables = {name: SQL_TABLES[name]([self.run]) for name in TABLES}
        self.began = _milliseconds(self.status.get("started_utc"))
        self.ended = _milliseconds(self.status.get("finished_utc")) or self.began
        self.points = points_of(self.tables, self.ended)

    def update(self) -> None:
        """Log the run's parameters, its tags, and the metric values that were not logged yet.

        The first call creates the MLflow run.

        Raises:
            UsageError: MLflow is not installed.
            TrackingError: MLflow refused or cannot be reached. A later call logs the missing values.
        """
        self.read()
        own_tags = {"fvc.run_id": self.run_id, RUN_KEY: sha256_of_json([self.experiment, self.run_id])}
        tags = {**run_tags(self.headline, self.record), **own_tags}
        parameters = self.tables["parameters"].frame.select("parameter", "value").rows()
        with connected(self.tracking_uri) as client:
            if not self._run_id:
                experiment = experiment_id(client, self.experiment, self.tracking_uri)
                known = client.search_runs([experiment], f"tags.`{RUN_KEY}` = '{tags[RUN_KEY]}'")
                self._earlier = [str(run.info.run_id) for run in known]
                name = self.run_id[:MAX_KEY]
                created = client.create_run(experiment, start_time=self.began, tags=tags, run_name=name)
                self._run_id = str(created.info.run_id)
            entities = importlib.import_module("mlflow.entities")
            new = [point for point in self.points if point[:2] not in self._sent]
            # MLflow splits these lists into batches that the server accepts.
            client.log_batch(
                self._run_id,
                metrics=[entities.Metric(key, value, time, step) for key, step, time, value in new],
                params=[entities.Param(key_of(name), value[:MAX_TEXT]) for name, value in parameters],
                tags=[entities.RunTag(*tag) for tag in tags.items()],
            )
            self._sent.update(point[:2] for point in new)

    def finish(self, bundle: Path | None = None) -> list[str]:
        """Finish the export: log the remaining metric values, then the results and files of the run.

        Earlier exports of the same run are deleted.

        Args:
            bundle: folder with the trained detector, which is logged as a pyfunc model. None: no model is logged.

        Returns:
            Lines for the terminal: the number of exported values, and notes on files that could not be read.

        Raises:
            UsageError: MLflow is not installed.
            TrackingError: MLflow refused or cannot be reached.
        """
        self.update()
        run = self.run
        records = [run.params_yaml, run.run_json, run.status_json, run.code_patch, run.robustness_results]
        files = [run.report_html, *records]  # its figures have still pictures: plotly.js stays in the runs folder
        # As CSV, which MLflow's pages show as a table.
        stored = {name: self.tables[name].frame for name in _STORED if self.tables[name].frame.height}
        status = _STATUSES.get(str(self.status.get("state")), "KILLED")
        with connected(self.tracking_uri) as client:
            for path in filter(Path.is_file, files):
                client.log_artifact(self._run_id, str(path))
            for name, frame in stored.items():
                client.log_text(self._run_id, csv_for_people(frame.drop("run_id")), f"tables/{name}.csv")
            if bundle is not None:
                _log_model(client, self._run_id, bundle)
            if status != "RUNNING":
                client.set_terminated(self._run_id, status=status, end_time=self.ended)
            for run_id in self._earlier:  # after the new export, so that MLflow always holds a complete one
                client.delete_run(run_id)
        replaced = f" in place of {count_text(len(self._earlier), 'earlier export')}" if self._earlier else ""
        what = f"{count_text(len(self.points), 'metric value')} exported{replaced}"
        head = f"{self.run_id}: experiment {self.experiment!r} of {shown_uri(self.tracking_uri)}, {what}"
        notes = dict.fromkeys([*self.headline.notes, *(note for table in self.tables.values() for note in table.notes)])
        return [head, *(f"  note: {note}" for note in notes)]


def _log_model(client: Any, run_id: str, bundle: Path) -> None:
    """Add the folder ``bundle`` to an MLflow run as a pyfunc model. Its artifact is called ``model``."""
    with tempfile.TemporaryDirectory(prefix="fvc_mlflow_") as folder:
        importlib.import_module("mlflow.pyfunc").save_model(
            f"{folder}/model", loader_module=__name__, data_path=str(bundle),
            pip_requirements=[f"fvc_lib=={fvc_lib.__version__}"],
        )  # fmt: skip
        client.log_artifacts(run_id, folder)


def experiment_id(client: Any, name: str, tracking_uri: str) -> str:
    """Return the id of the MLflow experiment ``name``; create it if it is missing."""
    if experiment := client.get_experiment_by_name(name):
        return str(experiment.experiment_id)
    location = None  # the server decides
    if tracking_uri.startswith("sqlite:///"):  # else MLflow would put artifacts into the current folder
        location = (_database(tracking_uri).parent / "mlflow_artifacts" / name).as_uri()
    # Without this tag MLflow's pages show the experiment as one about language models.
    tags = {"mlflow.experimentKind": "custom_model_development"}
    return str(client.create_experiment(name, artifact_location=location, tags=tags))


# --- The model registry

SCHEME = "models:/"
_MODEL = re.compile(rf"{SCHEME}(?P<name>[^/@:]+)(?:@(?P<alias>[^/@:]+)|/(?P<version>\d+))")


def model_and_alias(text: str) -> tuple[str, str]:
    """Split the value of the option ``--register``, ``NAME`` or ``NAME@ALIAS``, into ``(name, alias)``.

    Without ``@ALIAS`` the alias is an empty text.

    Raises:
        UsageError: the text has another form.
    """
    name, _, alias = text.partition("@")
    if not name or re.search("[/@:]", name + alias):
        raise UsageError(f"--register: got {text!r}, wanted NAME or NAME@ALIAS, such as news@champion.")
    return name, alias


def register_bundle(bundle: Path, name: str, alias: str, *, experiment: str, run_id: str, tracking_uri: str) -> str:
    """Register ``bundle`` in MLflow's model registry as a new version of the model ``name``. Return its number.

    Args:
        bundle: folder of an exported bundle (a detector with its weights).
        name: name of the registered model, which is created if it is missing.
        alias: alias, such as ``champion``, that will point to the version. Empty: none is set.
        experiment: MLflow experiment that holds the bundle's files.
        run_id: id of the run that was exported.
        tracking_uri: address of MLflow, a database or a server.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: MLflow refused or cannot be reached.
    """
    with connected(tracking_uri) as client:
        if not client.search_registered_models(f"name='{name}'"):
            client.create_registered_model(name)
        tags = {"fvc.run_id": run_id}
        where = experiment_id(client, experiment, tracking_uri)
        made = client.create_run(where, tags=tags, run_name=f"bundle {run_id}").info
        _log_model(client, made.run_id, bundle)
        client.set_terminated(made.run_id)
        version = client.create_model_version(name, f"{made.artifact_uri}/model", made.run_id, tags=tags).version
        if alias:
            client.set_registered_model_alias(name, alias, version)
    return str(version)


class _ServedBundle:
    """Adapter that gives a bundle (an exported detector) the interface of MLflow's pyfunc models."""

    def __init__(self, path: str) -> None:
        self._detector = fvc_lib.load_detector(path)

    def predict(self, files: Any) -> list[dict[str, Any]]:
        """Return one dict with the prediction for each file, in the order of ``files``.

        For a video it holds the score, the verdict, the reasons for it, and why the file could not be read, if so.
        ``files`` are paths, or a table with a column ``path``.
        """
        return self._detector.predict(list(getattr(files, "path", files))).to_dicts()


def _load_pyfunc(path: str) -> _ServedBundle:
    """Load the bundle in the folder ``path``. ``mlflow.pyfunc.load_model`` and ``mlflow models serve`` call this."""
    return _ServedBundle(path)


def fetched_bundle(uri: str, *, tracking_uri: str, cache_dir: Path) -> Path:
    """Return the local folder of a registered bundle, and download the bundle if the cache does not hold it.

    A bundle is a folder with a trained detector. An alias is resolved in every call, because it may point to another
    version by now. The files are checked (SHA-256) when the bundle is loaded.

    Args:
        uri: address of the bundle in the model registry, ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        tracking_uri: address of MLflow, a database or a server.
        cache_dir: folder below which bundles are cached.

    Raises:
        UsageError: MLflow is not installed, there is no store at ``tracking_uri``, or ``uri`` does not name a
            registered bundle.
        TrackingError: MLflow refused or cannot be reached.
    """
    parts = _MODEL.fullmatch(uri)
    if parts is None:
        raise UsageError(f"{uri!r}: wanted {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION.")
    if tracking_uri.startswith("sqlite:///") and not _database(tracking_uri).is_file():
        raise UsageError(
            f"{uri!r}: there is no MLflow store at {shown_uri(tracking_uri)}. Set MLFLOW_TRACKING_URI, or register a "
            f"bundle first: {command_text('export', 'RUN', '--format', 'mlflow', '--register', parts['name'])}"
        )
    with connected(tracking_uri) as client:
        number = parts["version"] or client.get_model_version_by_alias(parts["name"], parts["alias"]).version
        source = client.get_model_version_download_uri(parts["name"], number)
        folder = cache_dir.expanduser().absolute() / "registered_models" / sha256_of_json([tracking_uri, source])
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetching.", dir=folder.parent) as building:
                artifacts = importlib.import_module("mlflow.artifacts")
                model = artifacts.download_artifacts(source, dst_path=building, tracking_uri=tracking_uri)
                digests = next(Path(model).glob("data/*/digests.json"), None)
                if digests is None:
                    raise UsageError(f"{uri!r}: version {number} is no bundle that export registered.")
                digests.parent.rename(folder)
    return folder


# --- MLflow, imported only when needed, without log output and telemetry, and without passwords in its messages

_ENVIRONMENT = {
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A pool would keep connections to the database open after the export.
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",
    # By default MLflow tries seven times to reach a server, which would delay the end of a run by four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}


class TrackingError(FvcError):
    """MLflow refused a request or cannot be reached. The same command can be run again."""


def default_tracking_uri(runs_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address in the environment variable ``MLFLOW_TRACKING_URI``.

    If it is not set, return the address of the SQLite file ``runs_dir/mlflow.db``.
    """
    # SQLAlchemy decodes '%' and takes '?' for the beginning of options.
    database = str(runs_dir.absolute() / "mlflow.db").replace("%", "%25").replace("?", "%3F")
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"


def _database(tracking_uri: str) -> Path:
    return Path(unquote(tracking_uri.removeprefix("sqlite:///").partition("?")[0])).absolute()


def shown_uri(text: str) -> str:
    """Return ``text`` without the user, the password and the query of the URIs in it."""
    return re.sub(r"(?<=//)[^/\s]*(?=@)|(?<=\?)\S+", "[secret]", text)


@contextlib.contextmanager
def connected(tracking_uri: str) -> Iterator[Any]:
    """Yield an ``MlflowClient`` connected to ``tracking_uri``. Warnings are silent within the ``with`` block.

    Settings of ``_ENVIRONMENT`` that the environment lacks are added to it.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: MLflow cannot be reached or refuses a request. The message hides passwords in the URI.
    """
    os.environ.update({**_ENVIRONMENT, **os.environ})
    try:
        mlflow = importlib.import_module("mlflow")
        sqlalchemy = importlib.import_module("sqlalchemy")
        with warnings.catch_warnings(action="ignore"):  # MLflow's warnings about its dependencies
            yield mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    except ModuleNotFoundError as error:
        setup = f"make -C {shlex.quote(str(HOME))} setup-mlflow" if IS_CHECKOUT else "pip install 'fvc_lib[mlflow]'"
        raise UsageError(f"MLflow needs the package {error.name!r}, which is not installed: {setup}") from error
    except (mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        text = f"{type(error).__name__}: {shown_uri(clean_text(error))[:600]}"
        raise TrackingError(f"MLflow at {shown_uri(tracking_uri)}: {text}") from None
