"""Everything a training must remember to continue bit for bit, and how it goes into a checkpoint and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from fvc_lib.learning.accumulators import LossMean


@dataclass(frozen=True)
class EpochRecord:
    """One finished epoch (1-based).

    Attributes:
        learning_rate: of the epoch's last step.
        train_loss: weighted mean over the epoch's samples, as seen while the weights moved.
        validation: metrics of the inner validation part, ``loss`` among them.
    """

    epoch: int
    learning_rate: float
    train_loss: float
    validation: dict[str, float]


@dataclass
class TrainingState:
    """Where a training stands.

    Attributes:
        epochs_done: finished epochs.
        windows_done: effective batches of the epoch in progress that were consumed: the sampler's position.
        step: effective batches consumed over all epochs.
        epoch_loss: the running training loss of the epoch in progress.
        micro_batch: samples in memory at once; only ever lowered, by an out-of-memory.
        nonfinite_steps: effective batches skipped because of a loss or gradient that was not finite.
        best_model: weights of ``best_epoch``, on the CPU.
        finished: whether the last epoch or early stopping was reached.
    """

    micro_batch: int
    epochs_done: int = 0
    windows_done: int = 0
    step: int = 0
    epoch_loss: LossMean = field(default_factory=LossMean)
    nonfinite_steps: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    best_model: dict[str, Tensor] = field(default_factory=dict)
    history: list[EpochRecord] = field(default_factory=list)
    finished: bool = False

    def to_document(self) -> dict[str, Any]:
        """Numbers, lists and dicts; without the best model, which the checkpoint holds on its own."""
        return {
            "micro_batch": self.micro_batch,
            "epochs_done": self.epochs_done,
            "windows_done": self.windows_done,
            "step": self.step,
            "epoch_loss": [self.epoch_loss.total, self.epoch_loss.weight],
            "nonfinite_steps": self.nonfinite_steps,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            "history": [asdict(record) for record in self.history],
            "finished": self.finished,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], best_model: dict[str, Tensor]) -> TrainingState:
        """The state that ``to_document`` described."""
        values = dict(document)
        values["epoch_loss"] = LossMean(*values["epoch_loss"])
        values["history"] = [EpochRecord(**record) for record in values["history"]]
        return cls(**values, best_model=best_model)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state on the CPU, detached from further training."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
