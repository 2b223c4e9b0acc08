"""Rows 2 to 6 for every task: its training is killed or stopped at any change it makes to its checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.services.checkpoint_files import BEST, CheckpointBinding, CheckpointFolder, load_weights
from fvc_lib.services.errors import FvcError, StoppedError
from fvc_lib.services.stage_logs import MetricLog
from tests.faults.checkpoint_lives import same
from tests.faults.file_operations import FileOperations
from tests.faults.forked import run
from tests.kits.engine_kit import SETTINGS, draining
from tests.kits.task_kit import TinyTasks, each_task

OPERATIONS = 90  # of a few steps with a checkpoint after each; a whole training makes four times as many
BINDING = CheckpointBinding({"task": "tiny"}, "f" * 64)


def train(tasks: TinyTasks, folder: Path, attempt: int, number: int = 0, operation: int = 0) -> None:
    """Train to the end with a checkpoint after every step; send itself signal ``number`` at change ``operation``.

    SIGTERM is handled as a notebook's kernel does.
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

    def end(now: int, half: Callable[[], None]) -> None:
        if now == operation:
            half()
            os.kill(os.getpid(), number)

    FileOperations(folder / "checkpoints", end).begin()
    try:
        with MetricLog(folder / "metrics.jsonl", run_id="run_0", fold=0, attempt=attempt) as log:
            engine = Engine(
                draining(tasks()), EngineSettings(**{**SETTINGS, "checkpoint_seconds": 0.0}),  # type: ignore[arg-type]
                resolve_device("cpu"), CheckpointFolder(folder / "checkpoints", BINDING), log,
                stop=lambda: bool(asked),
            )  # fmt: skip
            state = engine.fit()
        scores = engine.task.new_accumulator()
        engine.predict(engine.task.validation_data, state.best_model, scores)
        found = {"best_model": state.best_model, "best_epoch": state.best_epoch, "scores": scores.to_document()}
        torch.save({**found, "losses": [record.validation for record in state.history]}, folder / "result.pt")
    except (FvcError, StoppedError) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def assert_standing(folder: Path, scratch: Path) -> None:
    """What lies on the disk can be gone on from; looked at in a copy, because loading sweeps and repairs."""
    shutil.rmtree(scratch, ignore_errors=True)
    if not folder.exists():
        return
    shutil.copytree(folder, scratch)
    complaints: list[str] = []
    checkpoint = CheckpointFolder(scratch, BINDING, report=complaints.append).load()
    assert complaints == []
    assert not list(scratch.rglob("*.tmp"))
    if checkpoint is not None and checkpoint.best_epoch:
        assert same(load_weights(scratch / BEST), checkpoint.best_model)


def end_of(folder: Path) -> tuple[Any, dict[tuple[object, ...], object]]:
    """The result, and the metrics by step, epoch, phase and name; what several attempts wrote must agree."""
    metrics: dict[tuple[object, ...], object] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        key = (row["step"], row["epoch"], row["phase"], row["metric"])
        assert metrics.setdefault(key, row["value"]) == row["value"], key
    return torch.load(folder / "result.pt"), metrics


@pytest.mark.long
@pytest.mark.fault(2, 3, 4, 5, 6)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
@each_task()
def test_an_end_at_any_change_of_a_checkpoint_changes_nothing(tasks, number, code, tmp_path, tally):
    """Also two within one epoch, and between the latest checkpoint and the best model."""
    whole, folder, chance = tmp_path / "whole", tmp_path / "ended", random.Random(int(number))
    for place in (whole, folder):
        place.mkdir()
    assert run(train, tasks, whole, 1) == (0, "")
    for attempt in range(1, 20):
        found, said = run(train, tasks, folder, attempt, number, chance.randint(1, OPERATIONS) if attempt < 13 else 0)
        if found == 0:
            break
        assert found == code, said
        assert_standing(folder / "checkpoints", tmp_path / "scratch")
        tally.add(survived=1)
    assert tally.survived > 1
    (result, metrics), (wanted, wanted_metrics) = end_of(folder), end_of(whole)
    assert same(result, wanted)
    assert metrics == wanted_metrics
