"""A whole training, all its random states included, into a checkpoint and back."""

from __future__ import annotations

import time

from torch import nn

from fvc_lib.learning.device import ComputeDevice
from fvc_lib.learning.exactness import changed_numerics, numerics
from fvc_lib.learning.micro_batch import MicroBatchPlan
from fvc_lib.learning.random_state import capture_random_state, restore_random_state
from fvc_lib.learning.stepping import Stepper
from fvc_lib.learning.training_state import TrainingState
from fvc_lib.services.checkpoints import CheckpointFolder, CheckpointMismatchError


class TrainingCheckpoints:
    """One training's checkpoints: what belongs into one, and when the next is due."""

    def __init__(self, folder: CheckpointFolder, compute: ComputeDevice) -> None:
        self._folder = folder
        self._device = compute.device
        self._numerics = numerics(compute)
        self._saved_at = time.monotonic()

    def save(self, model: nn.Module, stepper: Stepper, state: TrainingState, *, epoch_ended: bool) -> None:
        """Copy everything now; it is written beside the training (``CheckpointFolder.save``).

        Raises:
            CheckpointWriteError: the previous one could not be written.
        """
        everything = {
            "model": model.state_dict(),
            **stepper.state_dict(),
            "training": state.to_document(),
            "numerics": self._numerics,
            "random_state": capture_random_state(self._device),
        }
        self._folder.save(
            everything,
            epoch=state.epochs_done,
            step=state.step,
            best_epoch=state.best_epoch,
            best_model=state.best_model,
            epoch_ended=epoch_ended,
        )
        self._saved_at = time.monotonic()

    def restore(self, model: nn.Module, stepper: Stepper, micro_batches: MicroBatchPlan) -> TrainingState | None:
        """Put the newest whole checkpoint into ``model``, ``stepper`` and the generators; None without any.

        Args:
            model: of the checkpoint's architecture.
            stepper: of that model.
            micro_batches: as planned now; goes on from where the checkpoint's stood.

        Raises:
            CheckpointMismatchError: the checkpoint is of another configuration, of other data or another model.
        """
        checkpoint = self._folder.load()
        if checkpoint is None:
            return None
        saved = checkpoint.state
        try:
            model.load_state_dict(saved["model"])
        except RuntimeError as error:
            told = " ".join(str(error).split()[:40])
            raise CheckpointMismatchError(f"{str(checkpoint.path)!r} is of another model: {told} ...") from error
        stepper.load_state_dict(saved)
        state = TrainingState.from_document(saved["training"], checkpoint.best_model, micro_batches)
        changed = changed_numerics(saved["numerics"], self._numerics)
        state.lose_exactness([f"forked from {checkpoint.ancestor}"] if checkpoint.ancestor else changed)
        restore_random_state(saved["random_state"], self._device)
        return state

    def is_due(self, interval_seconds: float) -> bool:
        """Whether so much time has passed; not while the last one is still being written."""
        return time.monotonic() - self._saved_at >= interval_seconds and not self._folder.is_writing

    def finish(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        self._folder.finish()

    def wait(self) -> None:
        """The same without an error, on the way out of another one."""
        self._folder.wait()
