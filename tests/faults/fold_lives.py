"""Processes that train the folds of a small run and may be ended at any moment: what they do and what they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fvc_lib.services.checkpoint_files import (
    BEST,
    LATEST,
    CheckpointBinding,
    CheckpointFolder,
    load_document,
    load_weights,
)
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.video.training import TrainingSummary, train_fold
from tests.faults.checkpoint_lives import same
from tests.faults.conftest import STAGE, Result
from tests.faults.file_operations import FileOperations


def train_folds(root: Path, config: str, folds: tuple[int, ...], attempt: int) -> None:
    """One life: the folds in turn, each going on where it was; SIGTERM is handled as a notebook's kernel does."""
    paths, asked = RunPaths(root), []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        for fold in folds:
            with MetricLog(paths.metrics(STAGE, fold), run_id=paths.run_id, fold=fold, attempt=attempt) as log:
                train_fold(
                    paths, RunConfig.model_validate_json(config), fold, metric_log=log, attempt=attempt,
                    stop=lambda: bool(asked),
                )  # fmt: skip
    except (FvcError, StoppedError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def train_and_be_stopped(root: Path, config: str, attempt: int, operation: int) -> None:
    """Fold 0, with a SIGTERM while the given change of its checkpoints is made."""

    def stop(now: int, half: Callable[[], None]) -> None:
        if now == operation:
            os.kill(os.getpid(), signal.SIGTERM)

    FileOperations(RunPaths(root).fold_checkpoints(0), stop).begin()
    train_folds(root, config, (0,), attempt)


def result_of_fold(paths: RunPaths, fold: int) -> Result:
    """What the fold left; lines that several attempts wrote must agree and count once."""
    metrics: dict[tuple[object, ...], tuple[object, object]] = {}
    for row in metric_rows(paths, fold):
        key, value = (row["step"], row["epoch"], row["phase"], row["metric"]), (row["value"], row["flag"])
        assert metrics.setdefault(key, value) == value, key
    folders = (paths.fold_checkpoints(fold), paths.control_checkpoints(fold))
    return Result(
        paths.predictions(fold).read_bytes(), tuple((folder / BEST).read_bytes() for folder in folders), metrics
    )


def metric_rows(paths: RunPaths, fold: int) -> list[dict[str, object]]:
    """Every line; only one that a kill has torn may not be JSON, and none of ours is longer than one write."""
    log = paths.metrics(STAGE, fold)
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@dataclass(frozen=True)
class Standing:
    """How far a fold's two trainings had come on the disk, in steps, and whether the fold was finished."""

    steps: tuple[int, int]
    finished: bool


def standing(paths: RunPaths, whole: RunPaths, fold: int, scratch: Path) -> Standing:
    """Of ``fold``, looked at in a copy, because loading sweeps and repairs; ``whole`` is the undisturbed run.

    Raises:
        AssertionError: something on the disk is damaged, or not what a next attempt could go on from.
    """
    steps = []
    for folder, model in ((paths.fold_checkpoints, whole), (paths.control_checkpoints, whole)):
        theirs = getattr(model, folder.__name__)(fold)
        steps.append(_saved_step(folder(fold), _binding(theirs / LATEST), scratch))
    finished = read_outcome(paths.fold_outcome(fold), TrainingSummary) is not None and paths.predictions(fold).exists()
    return Standing((steps[0], steps[1]), finished)


def trained_steps(paths: RunPaths, fold: int, attempt: int) -> tuple[list[int], list[int]]:
    """The steps that ``attempt`` took, of the model's training and of the control's."""
    rows = [row for row in metric_rows(paths, fold) if row["attempt"] == attempt]
    model, control = ("train", "loss"), ("control", "train_loss")
    return tuple([row["step"] for row in rows if (row["phase"], row["metric"]) == one] for one in (model, control))  # type: ignore[return-value]


def _saved_step(folder: Path, binding: CheckpointBinding, scratch: Path) -> int:
    shutil.rmtree(scratch, ignore_errors=True)
    if not folder.exists():
        return 0
    shutil.copytree(folder, scratch)
    complaints: list[str] = []
    checkpoint = CheckpointFolder(scratch, binding, report=complaints.append).load()
    assert complaints == []
    assert not list(scratch.rglob("*.tmp"))
    if checkpoint is None:
        return 0
    assert not checkpoint.best_epoch or same(load_weights(scratch / BEST), checkpoint.best_model)
    return checkpoint.step


def _binding(latest: Path) -> CheckpointBinding:
    document = load_document(latest, 1)
    return CheckpointBinding(document["config"], document["data_fingerprint"])
