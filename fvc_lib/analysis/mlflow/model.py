"""The network of one fold in MLflow's model registry, with its signature, and with what its number is worth.

Which fold's? A cross-validated number belongs to the procedure, not to one of the networks it made, and choosing the
network by its outer fold would make that number too good. So the one with the lowest loss on its own inner validation
groups is taken, which no outer fold takes part in, and the version's description says all of this.

It is stored as an exported graph (``torch.export``): loading it runs no code of a pickle and needs no FVC. It takes one
clip at a time and gives the calibrated score, which is what FVC's tables call ``score``.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from fvc_lib.analysis.mlflow.content import TRAINING, RunContent, as_markdown, fitted, key_of, scores_text, stored_text
from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.analysis.read.queries import learning_curves, predictions
from fvc_lib.analysis.read.records import read_json_object
from fvc_lib.analysis.wording import number_text
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import FvcError
from fvc_lib.services.run_paths import RunPaths


@dataclass(frozen=True)
class FoldNetwork:
    """A fold's best network, as whoever knows networks loads it.

    Attributes:
        module: a ``torch.nn.Module`` on the CPU in evaluation mode: uint8 clips (B, T, 3, H, W) to logits (B,), as
            ``tables.PREDICTIONS`` has them.
        clip_shape: (1, T, 3, H, W).
        weights_digest: hex SHA-256 of its weights.
    """

    module: Any
    clip_shape: tuple[int, int, int, int, int]
    weights_digest: str


class NetworkLoader(Protocol):
    """Given by the caller, since this room knows no networks."""

    def __call__(self, run: RunPaths, fold: int, /) -> FoldNetwork | None:
        """The best network of ``fold``; None where there is none.

        Raises:
            FvcError: it is there and cannot be loaded.
        """
        ...


@dataclass(frozen=True)
class _Choice:
    fold: int
    num_folds: int
    validation_loss: float
    temperature: float
    threshold: float


@dataclass(frozen=True)
class Registered:
    """The registered version; ``is_new`` tells whether this export made it."""

    name: str
    version: str
    fold: int
    is_new: bool

    def __str__(self) -> str:
        return f"{self.name} version {self.version} (fold {self.fold})"


def register_model(
    client: Any, experiment_id: str, run: RunPaths, content: RunContent, mlflow_run_id: str, load_model: NetworkLoader
) -> tuple[Registered | None, tuple[str, ...]]:
    """Store and register the run's network, once; what prevents it is said in the notes.

    Raises:
        MlflowException: MLflow refuses or cannot be reached.
    """
    choice = _choose(run)
    if choice is None and run.task_results.is_file():
        return None, ("No model was registered: that is done for the networks of task video alone.",)
    if choice is None:
        return None, ("No model was registered: that is done when all folds are finished and judged.",)
    try:
        network = load_model(run, choice.fold)
    except FvcError as error:
        return None, (f"No model was registered: {error}",)
    if network is None:
        return None, (f"No model was registered: fold {choice.fold} has left no best model.",)
    tags = _tags(content, choice, network)
    name = fitted(key_of(stored_text(content.experiment)))
    for version in client.search_model_versions(f"run_id = '{mlflow_run_id}'"):
        if version.tags.get("fvc.key") == tags["fvc.key"]:
            return Registered(version.name, str(version.version), choice.fold, False), ()
    try:
        stored = _stored(client, experiment_id, mlflow_run_id, network, choice, tags)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        return None, (f"No model was registered: torch cannot export the network of fold {choice.fold}: {reason}",)
    _ensure_registered(client, name)
    version = client.create_model_version(
        name, stored.artifact_location, run_id=mlflow_run_id, model_id=stored.model_id, tags=tags,
        description=_description(run, choice),
    )  # fmt: skip
    return Registered(name, str(version.version), choice.fold, True), ()


def _choose(run: RunPaths) -> _Choice | None:
    """The fold with the lowest inner validation loss, when every fold was judged; the first of equals."""
    judged = predictions([run]).frame.group_by("fold").agg(pl.col("temperature", "threshold").first()).sort("fold")
    if judged.is_empty() or not run.results.is_file():
        return None
    curves = learning_curves([run], metrics=["loss"], phases=["validation"]).frame
    lowest = curves.filter(pl.col("stage") == TRAINING).group_by("fold").agg(pl.col("value").min())
    logged = dict(lowest.iter_rows())
    best: _Choice | None = None
    for fold, temperature, threshold in judged.iter_rows():
        loss = _loss_of_best_epoch(run, fold, logged.get(fold))
        if best is None or loss < best.validation_loss:
            best = _Choice(fold, judged.height, loss, temperature, threshold)
    return best


def _loss_of_best_epoch(run: RunPaths, fold: int, logged: float | None) -> float:
    """On inner validation, by the fold's outcome, else the lowest that was ``logged``; infinite where neither says."""
    training = read_json_object(run.fold_outcome(fold)).get("training")
    if isinstance(training, dict):
        for epoch in training.get("history") or ():
            validation = epoch.get("validation") if isinstance(epoch, dict) else None
            loss = validation.get("loss") if isinstance(validation, dict) else None
            if (
                isinstance(loss, int | float)
                and math.isfinite(loss)
                and epoch.get("epoch") == training.get("best_epoch")
            ):
                return float(loss)
    return logged if logged is not None and math.isfinite(logged) else math.inf


def _tags(content: RunContent, choice: _Choice, network: FoldNetwork) -> dict[str, str]:
    calibration = [choice.temperature, choice.threshold]
    key = sha256_of_json([content.whole.key, choice.fold, network.weights_digest, calibration])
    return {
        "fvc.key": key,
        "fvc.run_id": stored_text(content.run_id),
        "fvc.fold": str(choice.fold),
        "fvc.chosen_by": "lowest inner validation loss",
        "fvc.standing": content.whole.tags.get("fvc.standing", "not recorded"),
        "fvc.threshold": repr(choice.threshold),
        "fvc.temperature": repr(choice.temperature),
        "fvc.weights_sha256": network.weights_digest,
    }


def _stored(
    client: Any, experiment_id: str, mlflow_run_id: str, network: FoldNetwork, choice: _Choice, tags: dict[str, str]
) -> Any:
    """The logged model with ``tags``: found, completed, or created; and an output of the run."""
    entities = importlib.import_module("mlflow.entities")
    found = client.search_logged_models([experiment_id], f"tags.`fvc.key` = '{tags['fvc.key']}'")
    model = found[0] if found else client.create_logged_model(
        experiment_id, name=f"fold_{choice.fold}", source_run_id=mlflow_run_id, tags=tags, model_type="classifier"
    )  # fmt: skip
    if str(model.status) != "READY":
        with tempfile.TemporaryDirectory(prefix="fvc_mlflow_") as folder:
            _save(network, choice.temperature, Path(folder) / "model", model.model_id, mlflow_run_id)
            client.log_model_artifacts(model.model_id, str(Path(folder) / "model"))
        client.finalize_logged_model(model.model_id, "READY")
    outputs = client.get_run(mlflow_run_id).outputs
    if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
        client.log_outputs(mlflow_run_id, [entities.LoggedModelOutput(model.model_id, step=0)])
    return model


def _save(network: FoldNetwork, temperature: float, folder: Path, model_id: str, mlflow_run_id: str) -> None:
    """Write MLflow's model folder: the exported graph, its signature and what is needed to run it."""
    import numpy as np
    import torch

    flavour = importlib.import_module("mlflow.pytorch")
    models, types = importlib.import_module("mlflow.models"), importlib.import_module("mlflow.types")
    inputs = types.Schema([types.TensorSpec(np.dtype("uint8"), network.clip_shape)])
    outputs = types.Schema([types.TensorSpec(np.dtype("float32"), (1,))])
    described = models.Model(run_id=mlflow_run_id, model_id=model_id)
    flavour.save_model(
        _scoring(network.module, temperature),
        str(folder),
        mlflow_model=described,
        signature=models.ModelSignature(inputs, outputs),
        input_example=np.zeros(network.clip_shape, np.uint8),
        # Given, or MLflow starts a process that loads the model to see what it imports.
        pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", "numpy"],
        serialization_format="pt2",
    )
    _drop_example(described, folder)


def _drop_example(described: Any, folder: Path) -> None:
    """Black frames as megabytes of JSON say nothing that the signature does not."""
    for name in ("input_example.json", "serving_input_example.json"):
        (folder / name).unlink(missing_ok=True)
    described.saved_input_example_info = None
    described.model_size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    described.save(str(folder / "MLmodel"))


def _scoring(module: Any, temperature: float) -> Any:
    """``module`` with its calibration: score = sigmoid(logit / temperature), the probability of fake."""
    import torch

    class CalibratedScore(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = module
            self.temperature = temperature

        def forward(self, frames: Any) -> Any:
            return torch.sigmoid(self.network(frames) / self.temperature)

    return CalibratedScore().eval()


def _ensure_registered(client: Any, name: str) -> None:
    refused = importlib.import_module("mlflow.exceptions").MlflowException
    try:
        client.create_registered_model(name, description="Networks of FVC's runs; each version says what it is worth.")
    except refused as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _description(run: RunPaths, choice: _Choice) -> str:
    headline = run_headline(run)
    chosen = (
        f"The network of fold {choice.fold} of {choice.num_folds} of {as_markdown(headline.run_id)}, chosen because "
        f"its loss on its own inner validation groups is the lowest ({number_text(choice.validation_loss)}); no outer "
        "fold took part in the choice."
    )
    worth = (
        f"The cross-validated number, {scores_text(headline)}, is of the procedure over all {choice.num_folds} folds. "
        "It belongs to no single network, and this one has not been measured on data that none of them knows."
    )
    standing = f"Standing: {headline.verdict.standing}. {as_markdown(headline.verdict.sentence)}"
    use = (
        "Input: one clip, uint8 (1, T, 3, H, W), fitted as FVC's decode does. Output: the score, a probability of fake "
        f"as calibrated on the inner validation groups; fake from {choice.threshold:.4f} on. It is visual-forensic: "
        "staged or out-of-context footage cannot be told by pixels."
    )
    sentences = [chosen, worth, standing, *headline.cautions, use]
    return stored_text("\n\n".join(sentences))
