"""Processes that train a task with the engine and may be ended at any change they make to their checkpoints."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.stage_logs import MetricLog
from tests.faults.file_operations import FileOperations
from tests.kits.engine_kit import SETTINGS, draining
from tests.kits.task_kit import TinyTasks

BINDING = CheckpointBinding({"task": "tiny"}, "f" * 64)
CHECKPOINTS, METRICS, RESULT = "checkpoints", "metrics.jsonl", "result.pt"


def train(tasks: TinyTasks, folder: Path, attempt: int) -> None:
    """One life: from where it is to the end, with a checkpoint after every step and a random number per step.

    SIGTERM is handled as a notebook's kernel does.
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        with MetricLog(folder / METRICS, run_id="run_0", fold=0, attempt=attempt) as log:
            engine = Engine(
                draining(tasks()), EngineSettings(**{**SETTINGS, "checkpoint_seconds": 0.0}),  # type: ignore[arg-type]
                resolve_device("cpu"), CheckpointFolder(folder / CHECKPOINTS, BINDING), log, stop=lambda: bool(asked),
            )  # fmt: skip
            state = engine.fit()
        scores = engine.task.new_accumulator()
        engine.predict(engine.task.validation_data, state.best_model, scores)
        found = {"best_model": state.best_model, "best_epoch": state.best_epoch, "scores": scores.to_document()}
        torch.save({**found, "losses": [record.validation for record in state.history]}, folder / RESULT)
    except (FvcError, StoppedError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def train_and_die(tasks: TinyTasks, folder: Path, attempt: int, operation: int, after_half: bool) -> None:
    """The same, killed right before the given change of the checkpoints, or halfway through it."""

    def kill(now: int, half: Callable[[], None]) -> None:
        if now == operation:
            if after_half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    FileOperations(folder / CHECKPOINTS, kill).begin()
    train(tasks, folder, attempt)


def train_and_be_stopped(tasks: TinyTasks, folder: Path, attempt: int, operation: int) -> None:
    """The same, with a SIGTERM while the given change is made."""

    def stop(now: int, half: Callable[[], None]) -> None:
        if now == operation:
            os.kill(os.getpid(), signal.SIGTERM)

    FileOperations(folder / CHECKPOINTS, stop).begin()
    train(tasks, folder, attempt)


def metrics(folder: Path) -> dict[tuple[object, ...], tuple[object, object]]:
    """By step, epoch, phase and metric; what several attempts wrote must agree."""
    found: dict[tuple[object, ...], tuple[object, object]] = {}
    for row in _rows(folder):
        key, value = (row["step"], row["epoch"], row["phase"], row["metric"]), (row["value"], row["flag"])
        assert found.setdefault(key, value) == value, key
    return found


def steps(folder: Path) -> list[int]:
    """The steps that were taken, in the order they were."""
    return [row["step"] for row in _rows(folder) if (row["phase"], row["metric"]) == ("train", "loss")]


def _rows(folder: Path) -> list[dict[str, Any]]:
    log = folder / METRICS
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
