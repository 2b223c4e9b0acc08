"""What an MLflow store holds, without ids and times of creation; and exports that die on the way."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fvc_lib.analysis.mlflow import export as mlflow_connection
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths


class Killed(BaseException):
    """As a kill would: nothing catches it."""


class FailingClient:
    """Passes calls on until the n-th, before or after which it dies."""

    def __init__(self, client: Any, calls: int, *, after: bool) -> None:
        self._client, self._left, self._after = client, calls, after
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._left and not self._after:
                raise Killed(name)
            answer = method(*args, **kwargs)
            if self.calls == self._left:
                raise Killed(name)
            return answer

        return call


@contextlib.contextmanager
def failing(monkeypatch: Any, calls: int, *, after: bool = False) -> Iterator[list[FailingClient]]:
    """While this lasts, every export dies at its ``calls``-th call (0: never)."""
    made: list[FailingClient] = []
    connected = mlflow_connection.connected

    @contextlib.contextmanager
    def dying(uri: str) -> Iterator[FailingClient]:
        with connected(uri) as client:
            made.append(FailingClient(client, calls, after=after))
            yield made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_connection, "connected", dying)
        yield made


def stored(uri: str) -> list[dict[str, Any]]:
    """All runs that are not in the trash, with everything of them."""
    with mlflow_connection.connected(uri) as client:
        found = []
        for experiment in client.search_experiments():
            runs = client.search_runs([experiment.experiment_id], max_results=1000)
            names = {run.info.run_id: run.info.run_name for run in runs}
            found += [_run(client, experiment.name, run, names) for run in runs]
        return sorted(found, key=str)


def stored_run(uri: str, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """The one run that is ``wanted``; reading all of them takes as long as an export."""
    with mlflow_connection.connected(uri) as client:
        (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
        runs = client.search_runs([experiment.experiment_id], max_results=1000)
        names = {run.info.run_id: run.info.run_name for run in runs}
        (run,) = filter(wanted, runs)
        return _run(client, experiment.name, run, names)


def _run(client: Any, experiment: str, run: Any, names: dict[str, str]) -> dict[str, Any]:
    tags = dict(run.data.tags)
    parent = names.get(tags.pop("mlflow.parentRunId", ""))
    history = [
        (key, point.step, point.timestamp, repr(float(point.value)))
        for key in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, key)
    ]
    return {
        "experiment": experiment,
        "name": run.info.run_name,
        "parent": parent,
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time),
        "params": dict(run.data.params),
        "tags": tags,
        "points": sorted(history),
        "artifacts": _artifacts(client, run.info.run_id),
    }


def _artifacts(client: Any, run_id: str, path: str = "") -> dict[str, str]:
    found = {}
    for entry in client.list_artifacts(run_id, path):
        if entry.is_dir:
            found |= _artifacts(client, run_id, entry.path)
        else:
            local = Path(client.download_artifacts(run_id, entry.path))
            found[entry.path] = hashlib.sha256(local.read_bytes()).hexdigest()
    return found


def shorten(run: RunPaths, num_folds: int) -> RunPaths:
    """Leave only the first folds of ``run``: exported in fewer calls."""
    for fold in range(num_folds, 5):
        run.predictions(fold).unlink(missing_ok=True)
        run.metrics("04_fold_training", fold).unlink(missing_ok=True)
    status = json.loads(run.status_json.read_text())
    for fold in range(num_folds, 5):
        status["stages"].pop(f"04_fold_training_fold_{fold}", None)
    write_document(run.status_json, status)
    return run


def copied(template: Path, folder: Path) -> str:
    """A database of its own from ``template``: creating one takes two seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(template, folder / "mlflow.db")
    return f"sqlite:///{folder / 'mlflow.db'}"
