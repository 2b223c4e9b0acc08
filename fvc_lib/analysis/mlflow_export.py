"""Exports a run to MLflow after the fact; the run folder stays the truth and is only read.

One MLflow run for the whole and one nested for each fold, in an experiment of the same name. Exporting again adds what
is new: a finished run that is there costs one question. One exporter at a time per run; two at once would each create
it, and the next export says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fvc_lib.analysis import mlflow_connection
from fvc_lib.analysis.mlflow_connection import TrackingError, artifact_location, shown_uri
from fvc_lib.analysis.mlflow_content import RunContent, run_content
from fvc_lib.analysis.mlflow_model import NetworkLoader, Registered, register_model
from fvc_lib.analysis.mlflow_upload import Uploaded, runs_by_key, upload
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths

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
    with mlflow_connection.connected(tracking_uri) as client:
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
