"""A whole training, all its random states included, into a checkpoint and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fvc_lib.learning.device import ComputeDevice
from fvc_lib.learning.exactness import changed_numerics, numerics
from fvc_lib.learning.micro_batch import MicroBatchPlan
from fvc_lib.learning.out_of_memory import is_out_of_memory
from fvc_lib.learning.random_state import capture_random_state, restore_random_state
from fvc_lib.learning.ranks import Ranks
from fvc_lib.learning.stepping import Stepper
from fvc_lib.learning.training_state import TrainingState
from fvc_lib.services.checkpoints import CheckpointFolder, CheckpointMismatchError


class TrainingCheckpoints:
    """One training's checkpoints: what belongs into one, and when the next is due.

    Of several ranks only rank 0 touches the folder: it writes, and what it reads and has verified the others get from
    it. Each rank's random state is kept; all else is the same on all of them.
    """

    def __init__(self, folder: CheckpointFolder, compute: ComputeDevice, ranks: Ranks) -> None:
        self._folder = folder
        self._device = compute.device
        self._ranks = ranks
        self._numerics = numerics(compute, ranks.size)
        self._saved_at = time.monotonic()

    def save(self, model: nn.Module, stepper: Stepper, state: TrainingState, *, epoch_ended: bool) -> None:
        """Copy everything now; it is written beside the training (``CheckpointFolder.save``).

        Raises:
            CheckpointWriteError: the previous one could not be written.
            MemoryError: memory ended on a rank before any was in the exchange; on all ranks.
        """
        self._saved_at = time.monotonic()  # also where it fails: trying again at once would fail again
        random_state, *others = self._random_states()
        if self._ranks.rank:
            return
        self._ranks.settle()  # a resumed training does not repeat the steps that a checkpoint counts, nor tell of them
        everything = {
            "model": model.state_dict(),
            **stepper.state_dict(),
            "training": state.to_document(),
            "numerics": self._numerics,
            "random_state": random_state,
            "other_ranks_random_states": others,
        }
        self._folder.save(
            everything,
            epoch=state.epochs_done,
            step=state.step,
            best_epoch=state.best_epoch,
            best_model=state.best_model,
            epoch_ended=epoch_ended,
        )

    def _random_states(self) -> list[dict[str, Tensor]]:
        """Every rank's. Whether there is a checkpoint all decide alike, so where memory ends on one it does on all."""
        mine, ended = None, None
        try:
            mine = capture_random_state(self._device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            ended = error
        states = self._ranks.everyone("save", mine)
        if ended is not None:
            raise ended
        if None in states:
            raise MemoryError(f"memory ended on rank {states.index(None)}")
        return [state for state in states if state is not None]

    def restore(self, model: nn.Module, stepper: Stepper, micro_batches: MicroBatchPlan) -> TrainingState | None:
        """Put the newest whole checkpoint into ``model``, ``stepper`` and the generators; None without any.

        Args:
            model: of the checkpoint's architecture.
            stepper: of that model.
            micro_batches: as planned now; goes on from where the checkpoint's stood.

        Raises:
            CheckpointMismatchError: the checkpoint is of another configuration, of other data or another model.
        """
        checkpoint = self._ranks.from_leader("restore", self._read)
        if checkpoint is None:
            return None
        saved = checkpoint["state"]
        _refuse_another_model(model, saved["model"], checkpoint["path"])
        model.load_state_dict(saved["model"])
        stepper.load_state_dict(saved)
        state = TrainingState.from_document(saved["training"], checkpoint["best_model"], micro_batches)
        if checkpoint["ancestor"]:
            state.inexact_because.append(f"forked from {checkpoint['ancestor']} at step {state.step}")
        else:
            state.lose_exactness(changed_numerics({"ranks": "1", **saved["numerics"]}, self._numerics))
        random_states = [saved["random_state"], *saved.get("other_ranks_random_states", ())]
        if self._ranks.rank < len(random_states):  # else there were fewer ranks: this one keeps the state it began with
            restore_random_state(random_states[self._ranks.rank], self._device)
        return state

    def _read(self) -> dict[str, Any] | None:
        """What rank 0 hands to the others."""
        checkpoint = self._folder.load()
        if checkpoint is None:
            return None
        return {
            "path": str(checkpoint.path),
            "state": checkpoint.state,
            "best_model": checkpoint.best_model,
            "ancestor": checkpoint.ancestor,
        }

    def is_due(self, interval_seconds: float) -> bool:
        """Whether so much time has passed; not while the last one is still being written."""
        return time.monotonic() - self._saved_at >= interval_seconds and not self._folder.is_writing

    def finish(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        self._folder.finish()
        self._ranks.meet("saved")

    def give_memory_back(self) -> None:
        """Keep no copy of the state, once it is written: for when memory is short."""
        self._folder.give_memory_back()


def _refuse_another_model(model: nn.Module, saved: Mapping[str, Tensor], path: str) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    differing = [name for name in sorted({*own, *found}) if own.get(name) != found.get(name)]
    if differing:
        told = ", ".join(f"{name} {found.get(name)} -> {own.get(name)}" for name in differing[:3])
        raise CheckpointMismatchError(
            f"{path!r} is of another model: {len(differing)} tensors differ, {told}. Resume with the model it was "
            "made with, or start a new run."
        )
