"""Processes that save a checkpoint and die of it, and checks of what they leave."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fvc_lib.services.checkpoint_files import BEST, Checkpoint, CheckpointBinding, CheckpointFolder, load_weights
from tests.faults.file_operations import FileOperations

BINDING = CheckpointBinding({"epochs": 9, "model": "frame_cnn"}, "f" * 64)


def state_of(step: int) -> dict[str, Any]:
    """Return a training state whose numbers all depend on the step."""
    return {
        "model": {"weight": torch.arange(900.0).reshape(30, 30) + step, "bias": torch.full((3,), float(step))},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(30, 30) / (step + 1)}}},
        "training": {"step": step, "history": [{"epoch": 1, "loss": 0.5 / (step + 1)}], "best_loss": 0.25},
    }


def best_of(epoch: int) -> dict[str, Tensor]:
    """Return the best model of an epoch; epoch 0 has none."""
    return {"weight": torch.arange(900.0).reshape(30, 30) - epoch} if epoch else {}


def three_epochs(path: Path) -> None:
    """Leave the checkpoints of three epochs; the second is the best."""
    folder = CheckpointFolder(path, BINDING)
    for epoch, best in ((0, 0), (1, 1), (2, 2), (3, 2)):
        step = 10 * epoch
        folder.save(state_of(step), epoch=epoch, step=step, best_epoch=best, best_model=best_of(best))


def go_on(path: Path, epoch: int, step: int, best: int) -> None:
    """Load what is there and save the next checkpoint, as ``Engine.fit`` does."""
    folder = CheckpointFolder(path, BINDING)
    folder.load()
    folder.save(state_of(step), epoch=epoch, step=step, best_epoch=best, best_model=best_of(best))


# Functions of a checkpoint folder by what they save, and the step that they save.
SAVES = {
    "mid-epoch": (partial(go_on, epoch=3, step=35, best=2), 35),
    "a better epoch": (partial(go_on, epoch=4, step=40, best=4), 40),
}


def live(act: Callable[[Path], None], path: Path, report: Path, number: int = 0, after_half: bool = False) -> None:
    """Do ``act`` and write all its operations to ``report``; die right before operation ``number`` or halfway in it."""

    def kill(now: int, half: Callable[[], Any]) -> None:
        if now == number:
            if after_half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    operations = FileOperations(path, kill)
    operations.begin()
    act(path)
    report.write_bytes(json.dumps(operations.done).encode())


def loaded(path: Path, binding: CheckpointBinding = BINDING) -> Checkpoint | None:
    """Return what the next process loads, after checking that nothing is damaged, left over or inconsistent."""
    complaints: list[str] = []
    folder = CheckpointFolder(path, binding, report=complaints.append)
    assert not list(path.rglob("*.tmp"))
    checkpoint = folder.load()
    assert complaints == []
    if checkpoint is not None and checkpoint.best_epoch:
        assert same(load_weights(path / BEST), checkpoint.best_model)
    if checkpoint is not None and binding is BINDING:
        assert same(checkpoint.state, state_of(checkpoint.step))
        assert same(checkpoint.best_model, best_of(checkpoint.best_epoch))
    return checkpoint


def same(value: Any, other: Any) -> bool:
    """Return whether two states are equal to the bit, at any depth."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(item, other[name]) for name, item in value.items())
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return value.dtype == other.dtype and value.equal(other)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)
