"""Processes that save a checkpoint and die of it: what they do, and how to tell what they left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fvc_lib.services.checkpoint_files import BEST, Checkpoint, CheckpointBinding, CheckpointFolder, load_weights
from tests.faults.file_operations import FileOperations

BINDING = CheckpointBinding({"epochs": 9, "model": "frame_cnn"}, "f" * 64)


def state_of(step: int) -> dict[str, Any]:
    """What a training might save, every number of it telling the step."""
    return {
        "model": {"weight": torch.arange(900.0).reshape(30, 30) + step, "bias": torch.full((3,), float(step))},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(30, 30) / (step + 1)}}},
        "training": {"step": step, "history": [{"epoch": 1, "loss": 0.5 / (step + 1)}], "best_loss": 0.25},
    }


def best_of(epoch: int) -> dict[str, Tensor]:
    """The best model of an epoch; none of epoch 0."""
    return {"weight": torch.arange(900.0).reshape(30, 30) - epoch} if epoch else {}


def save(folder: CheckpointFolder, epoch: int, step: int, best_epoch: int) -> None:
    """To the disk."""
    folder.save(
        state_of(step), epoch=epoch, step=step, best_epoch=best_epoch, best_model=best_of(best_epoch)
    )  # fmt: skip


def three_epochs(path: Path) -> None:
    """Leave the checkpoints of three epochs, of which the second is the best."""
    folder = CheckpointFolder(path, BINDING)
    save(folder, 0, 0, 0)
    for epoch, best in ((1, 1), (2, 2), (3, 2)):
        save(folder, epoch, 10 * epoch, best)


def first_save(path: Path) -> None:
    """Before the first step, into a folder that is not there yet."""
    save(CheckpointFolder(path, BINDING), 0, 0, 0)


def save_in_mid_epoch(path: Path) -> None:
    """As ``Engine.fit`` does it: what is there is loaded, then comes the next."""
    folder = CheckpointFolder(path, BINDING)
    folder.load()
    save(folder, 3, 35, 2)


def save_a_better_epoch(path: Path) -> None:
    """Save at an epoch's end, with a new best model."""
    folder = CheckpointFolder(path, BINDING)
    folder.load()
    save(folder, 4, 40, 4)


def repair_the_best_model(path: Path) -> None:
    """Load a folder whose best model is not the latest checkpoint's."""
    CheckpointFolder(path, BINDING).load()


def record(act: Callable[[Path], None], path: Path, report: Path) -> None:
    """Do it undisturbed and write down every operation."""
    operations = FileOperations(path)
    operations.begin()
    act(path)
    report.write_bytes(json.dumps(operations.done).encode())


def die(act: Callable[[Path], None], path: Path, number: int, after_half: bool) -> None:
    """Do it and be killed right before operation ``number``, or halfway through it."""

    def kill(now: int, half: Callable[[], None]) -> None:
        if now == number:
            if after_half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    FileOperations(path, kill).begin()
    act(path)


def loaded(path: Path) -> Checkpoint | None:
    """What the next process finds: whole, consistent with its best model, without complaints or leftovers."""
    complaints: list[str] = []
    folder = CheckpointFolder(path, BINDING, report=complaints.append)
    assert not list(path.rglob("*.tmp"))
    checkpoint = folder.load()
    assert complaints == []
    if checkpoint is not None:
        assert_same(checkpoint.state, state_of(checkpoint.step))
        assert_same(checkpoint.best_model, best_of(checkpoint.best_epoch))
        if checkpoint.best_epoch:
            assert_same(load_weights(path / BEST), best_of(checkpoint.best_epoch))
    return checkpoint


def assert_same(value: Any, wanted: Any) -> None:
    """Equal to the bit, at any depth."""
    assert same(value, wanted), f"{value} is not {wanted}"


def same(value: Any, other: Any) -> bool:
    """Whether two states are equal to the bit, at any depth."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.dtype == other.dtype and value.equal(other)
    if isinstance(value, dict):
        return (
            isinstance(other, dict)
            and value.keys() == other.keys()
            and all(same(item, other[name]) for name, item in value.items())
        )
    if isinstance(value, (list, tuple)):
        return (
            type(value) is type(other)
            and len(value) == len(other)
            and all(same(a, b) for a, b in zip(value, other, strict=True))
        )
    return type(value) is type(other) and bool(value == other)
