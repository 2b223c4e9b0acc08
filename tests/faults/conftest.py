"""What the tests of faults share: small real trainings, and one that was never disturbed to compare with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from fvc_lib.services.atomic_files import sha256_of_json, write_json
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.small_runs import Place, Whole, small_corpus
from tests.kits.training import TinyTraining

STAGE = "04_fold_training"


@dataclass(frozen=True)
class Result:
    """What a training leaves behind, as far as an undisturbed one must leave the same."""

    predictions: bytes
    weights: tuple[bytes, ...]
    metrics: dict[tuple[object, ...], tuple[object, object]]


def result_of(paths: RunPaths) -> Result:
    """Of fold 0 in ``paths``; lines that several attempts wrote must agree and count once."""
    metrics: dict[tuple[object, ...], tuple[object, object]] = {}
    for line in paths.metrics(STAGE, 0).read_text().splitlines():
        row = json.loads(line)
        key, value = (row["step"], row["epoch"], row["phase"], row["metric"]), (row["value"], row["flag"])
        assert metrics.setdefault(key, value) == value, key
    return Result(
        paths.predictions(0).read_bytes(),
        tuple(
            (folder / BEST).read_bytes()
            for folder in (paths.fold_checkpoints(0), paths.fold_checkpoints(0).joinpath("control"))
        ),
        metrics,
    )


@pytest.fixture(scope="session")
def whole_runs(session_folder: Path) -> Callable[[Mapping[str, object]], Whole]:
    """Whole runs by their parameters that nothing disturbs; each run once, by the test process that needs it first."""

    def whole_run(values: Mapping[str, object]) -> Whole:
        task, key = str(values.get("task", "video")), sha256_of_json(dict(values))[:12]
        folder = session_folder / f"undisturbed {key}"
        kept = folder / "whole.json"
        with FileLock(f"{folder}.lock"):
            if not kept.exists():
                corpus, began = small_corpus(task, folder / "videos & 'more'"), time.monotonic()
                run, _ = Place(folder / "work", corpus, values).run()
                write_json(kept, [str(run.root), str(corpus), time.monotonic() - began])
        root, corpus_path, seconds = json.loads(kept.read_text())
        return Whole(RunPaths(Path(root)), Path(corpus_path), values, seconds)

    return whole_run


@pytest.fixture
def tiny(tiny_training: TinyTraining) -> TinyTraining:
    """Two epochs and two of the control, without a measurement before them."""
    return tiny_training.with_config(memory_preflight=False, epochs=2)


@pytest.fixture(scope="session")
def known_results() -> dict[str, Result]:
    """Undisturbed trainings by configuration: each is trained once, since the folder changes nothing."""
    return {}


@pytest.fixture
def undisturbed(tiny: TinyTraining, known_results: dict[str, Result], tmp_path: Path) -> Result:
    """The same training in a folder of its own, with nothing going wrong."""
    key = tiny.config.model_dump_json(exclude={"cache_dir"})
    if key not in known_results:
        paths = elsewhere(tiny, tmp_path / "undisturbed" / "run_9")
        with MetricLog(paths.metrics(STAGE, 0), run_id=paths.run_id, fold=0) as log:
            train_fold(paths, tiny.config, 0, metric_log=log)
        known_results[key] = result_of(paths)
    return known_results[key]


def elsewhere(tiny: TinyTraining, root: Path) -> RunPaths:
    """Another run folder with the same tables."""
    paths = RunPaths(root)
    paths.tables.mkdir(parents=True)
    for table in (tiny.paths.folds, tiny.paths.augmented_metadata):
        (paths.tables / table.name).write_bytes(table.read_bytes())
    return paths
