"""Exported bundles in MLflow's model registry: versions of a named model, found by alias, known by their digest.

The bundle's files belong to an MLflow run of their own, which no later export of the run replaces. What is fetched is
the bundle as it was written, by the SHA-256 of its ``digests.json``; whoever loads it checks every file by that one.
"""

import importlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fvc_lib.analysis.mlflow.export import connected, experiment_id, shown_uri
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.errors import FvcError, UsageError, command_text

SCHEME = "models:/"
FETCHED = "registered_models"  # in the cache, a folder per digest
_BUNDLE = "fvc.bundle_sha256"
_FOLDER = "bundle"
_DIGESTS = "digests.json"
_MODEL = re.compile(rf"{SCHEME}(?P<name>[^/@:]+)(@(?P<alias>[^/@:]+)|/(?P<version>\d+))")
_REGISTER = re.compile(r"(?P<name>[^/@:]+)(@(?P<alias>[^/@:]+))?")


@dataclass(frozen=True)
class Registered:
    """A version of a model: ``is_new`` where it was not there with this content; ``alias`` may be empty."""

    name: str
    version: str
    alias: str
    is_new: bool

    @property
    def uri(self) -> str:
        """By which it is fetched."""
        return f"{SCHEME}{self.name}@{self.alias}" if self.alias else f"{SCHEME}{self.name}/{self.version}"


def model_and_alias(text: str) -> tuple[str, str]:
    """Of ``NAME`` or ``NAME@ALIAS``; ``UsageError`` where it is neither."""
    found = _REGISTER.fullmatch(text)
    if found is None:
        raise UsageError(f"--register: got {text!r}, wanted NAME or NAME@ALIAS, such as news@champion.")
    return found["name"], found["alias"] or ""


def register_bundle(
    bundle: Path, name: str, alias: str, *, experiment: str, run_id: str, tracking_uri: str
) -> Registered:
    """Make ``bundle`` a version of the model ``name``; one with the same content is taken as it is.

    Args:
        bundle: folder of an exported bundle.
        name: of the registered model, made where there is none.
        alias: that points at the version from now on; empty: none.
        experiment: of MLflow, in which the bundle's files lie.
        run_id: of the run that was exported.
        tracking_uri: of the store.

    Raises:
        UsageError: MLflow is not installed.
        TrackingError: MLflow refused or cannot be reached.
    """
    digest = sha256_of_file(bundle / _DIGESTS)
    with connected(tracking_uri) as client:
        refused = importlib.import_module("mlflow.exceptions").MlflowException
        try:
            client.create_registered_model(name)
        except refused as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = client.search_model_versions(f"name='{name}'")
        same = [each.version for each in versions if each.tags.get(_BUNDLE) == digest]
        if not same:
            tags = {_BUNDLE: digest, "fvc.run_id": run_id}
            where = experiment_id(client, experiment, tracking_uri)
            made = client.create_run(where, tags=tags, run_name=f"bundle {run_id}")
            client.log_artifacts(made.info.run_id, str(bundle), _FOLDER)
            client.set_terminated(made.info.run_id)
            source = f"{made.info.artifact_uri}/{_FOLDER}"
            version = str(client.create_model_version(name, source, made.info.run_id, tags=tags).version)
        else:
            version = str(max(same, key=int))
        if alias:
            client.set_registered_model_alias(name, alias, version)
    return Registered(name, version, alias, is_new=not same)


def fetched_bundle(uri: str, *, tracking_uri: str, cache_dir: Path) -> Path:
    """Return the cached folder of the bundle ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.

    A bundle is fetched once; an alias is looked up each time.

    Raises:
        UsageError: MLflow is not installed, or ``uri`` names nothing, or no bundle.
        FvcError: what was fetched is not what was registered.
        TrackingError: MLflow refused or cannot be reached.
    """
    asked = _MODEL.fullmatch(uri)
    if asked is None:
        raise UsageError(f"{uri!r}: wanted {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION.")
    database = Path(unquote(tracking_uri.removeprefix("sqlite:///").partition("?")[0]))
    if tracking_uri.startswith("sqlite:///") and not database.is_file():
        raise UsageError(
            f"{uri!r}: there is no MLflow store at {shown_uri(tracking_uri)}. Set MLFLOW_TRACKING_URI, or register a "
            f"bundle first: {command_text('export-mlflow', 'RUN', '--register', asked['name'])}"
        )
    with connected(tracking_uri) as client:
        version = _version(client, asked, uri, tracking_uri)
        digest = str(version.tags.get(_BUNDLE, ""))
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UsageError(f"{uri!r}: version {version.version} is no bundle that export-mlflow registered.")
        folder = cache_dir.expanduser().absolute() / FETCHED / digest
        if (folder / _DIGESTS).is_file() and sha256_of_file(folder / _DIGESTS) == digest:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".fetching.", dir=folder.parent))
        try:
            source = client.get_model_version_download_uri(version.name, version.version)
            artifacts = importlib.import_module("mlflow.artifacts")
            found = Path(artifacts.download_artifacts(source, dst_path=str(building), tracking_uri=tracking_uri))
            if not (found / _DIGESTS).is_file() or sha256_of_file(found / _DIGESTS) != digest:
                raise FvcError(f"{uri!r}: what MLflow holds is not the bundle that was registered. Register it anew.")
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            found.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _version(client: Any, asked: re.Match[str], uri: str, tracking_uri: str) -> Any:
    refused = importlib.import_module("mlflow.exceptions").MlflowException
    try:
        if asked["version"]:
            return client.get_model_version(asked["name"], asked["version"])
        return client.get_model_version_by_alias(asked["name"], asked["alias"])
    except refused as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        names = sorted(each.name for each in client.search_registered_models(max_results=20))
        raise UsageError(
            f"{uri!r}: MLflow at {shown_uri(tracking_uri)} has no such model, version or alias. Models there: "
            f"{', '.join(names) or 'none'}."
        ) from error
