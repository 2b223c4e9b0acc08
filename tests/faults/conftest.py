"""What the tests of faults share: small real trainings, and an undisturbed one to compare with."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fvc_lib.services.atomic_files import sha256_of_json, write_json
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.shared_training import TrainingOutcome
from fvc_lib.tasks.video.training import TrainingSummary, train_fold
from tests.faults.small_runs import Place, Whole, metrics_of, small_corpus
from tests.kits.training import TinyTraining, tiny_training_in
from tests.tasks.conftest import scored_run  # noqa: F401 - a fixture

STAGE = "04_fold_training"


@dataclass(frozen=True)
class Result:
    """What a training leaves, as far as an undisturbed one must leave the same."""

    predictions: bytes
    weights: tuple[bytes, ...]
    metrics: dict[tuple[object, ...], tuple[object, object]]


def result_of(paths: RunPaths) -> Result:
    """Return the result of fold 0, with the weights of model and control."""
    folder = paths.fold_checkpoints(0)
    weights = ((folder / BEST).read_bytes(), (folder / "control" / BEST).read_bytes())
    return Result(paths.predictions(0).read_bytes(), weights, metrics_of(paths))


def train(
    tiny: TinyTraining, paths: RunPaths | None = None, attempt: int = 1, **options: Any
) -> TrainingOutcome[TrainingSummary]:
    """Train fold 0 with a metric log, in the run of ``tiny`` or another one."""
    paths = paths or tiny.paths
    with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0, attempt=attempt) as log:
        return train_fold(paths, tiny.config, 0, metric_log=log, attempt=attempt, **options)


@pytest.fixture(scope="session")
def whole_runs(session_folder: Path) -> Callable[[Mapping[str, object]], Whole]:
    """Return undisturbed runs by their parameters; the first test process that needs a run makes it."""

    def whole_run(values: Mapping[str, object]) -> Whole:
        task, key = str(values.get("task", "video")), sha256_of_json(dict(values))[:12]
        folder = session_folder / f"undisturbed {key}"
        stored = folder / "whole.json"
        with FileLock(f"{folder}.lock"):
            if not stored.exists():
                corpus, began = small_corpus(task, folder / "videos & 'more'"), time.monotonic()
                run, _ = Place(folder / "work", corpus, values).run()
                write_json(stored, [str(run.root), str(corpus), time.monotonic() - began])
        root, corpus_path, seconds = json.loads(stored.read_text())
        return Whole(RunPaths(Path(root)), Path(corpus_path), values, seconds)

    return whole_run


@pytest.fixture
def tiny(tiny_training: TinyTraining) -> TinyTraining:
    """Two epochs of the model and two of its control, without a measurement before them."""
    return tiny_training.with_config(memory_preflight=False, epochs=2)


@pytest.fixture(scope="session")
def undisturbed(drawn_tiny_training: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return the result of ``tiny`` in another folder, with nothing going wrong."""
    folder = tmp_path_factory.mktemp("undisturbed") / "copy"
    shutil.copytree(drawn_tiny_training, folder)
    tiny = tiny_training_in(folder).with_config(memory_preflight=False, epochs=2)
    train(tiny)
    return result_of(tiny.paths)


def elsewhere(tiny: TinyTraining, root: Path) -> RunPaths:
    """Return another run folder with the same tables."""
    paths = RunPaths(root)
    paths.tables.mkdir(parents=True)
    for table in (tiny.paths.folds, tiny.paths.augmented_metadata):
        (paths.tables / table.name).write_bytes(table.read_bytes())
    return paths
