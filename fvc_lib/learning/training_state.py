"""Everything a training must remember to continue bit for bit, and how it goes into a checkpoint and back."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict
from torch import Tensor, nn

from fvc_lib.learning.accumulators import LossMean
from fvc_lib.learning.micro_batch import MicroBatchPlan

# Losses may be NaN, which is not JSON; as null they could not be read back.
NAN_AS_TEXT = ConfigDict(ser_json_inf_nan="strings")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochRecord:
    """One finished epoch (1-based).

    Attributes:
        learning_rate: of the epoch's last step.
        train_loss: weighted mean over the epoch's samples, as seen while the weights moved.
        validation: metrics of the inner validation part, ``loss`` among them.
    """

    __pydantic_config__ = NAN_AS_TEXT

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
        micro_batches: how many samples are in memory at once, and were at every step.
        nonfinite_steps: effective batches skipped because of a loss or gradient that was not finite.
        best_model: weights of ``best_epoch``, on the CPU.
        finished: whether the last epoch or early stopping was reached.
        inexact_because: what happened that other bits than an undisturbed training's must be expected for.
    """

    micro_batches: MicroBatchPlan
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
    inexact_because: list[str] = field(default_factory=list)

    @property
    def micro_batch(self) -> int:
        """Samples in memory at once, now."""
        return self.micro_batches.current

    def to_document(self) -> dict[str, Any]:
        """Numbers, lists and dicts; without the best model, which the checkpoint holds on its own."""
        return {
            "micro_batches": self.micro_batches.to_document(),
            "epochs_done": self.epochs_done,
            "windows_done": self.windows_done,
            "step": self.step,
            "epoch_loss": [self.epoch_loss.total, self.epoch_loss.weight],
            "nonfinite_steps": self.nonfinite_steps,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            "history": [asdict(record) for record in self.history],
            "finished": self.finished,
            "inexact_because": list(self.inexact_because),
        }

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], best_model: dict[str, Tensor], micro_batches: MicroBatchPlan
    ) -> TrainingState:
        """The state that ``to_document`` described, with ``micro_batches``, as planned now, going on from its own."""
        values = dict(document)
        changed = micro_batches.resumed(values["micro_batches"], values["step"])
        values["micro_batches"] = micro_batches
        values["epoch_loss"] = LossMean(*values["epoch_loss"])
        values["history"] = [EpochRecord(**record) for record in values["history"]]
        state = cls(**values, best_model=best_model)
        state.lose_exactness([changed] if changed else [])
        return state

    def lose_exactness(self, changed: Sequence[str]) -> None:
        """Note, and say, what has changed from one attempt to the next that decides how sums are rounded."""
        reasons = [f"{change}, since step {self.step}" for change in changed]
        self.inexact_because = [*self.inexact_because, *reasons]
        if reasons:
            _logger.warning(
                "resumed under other conditions (%s): the result is the same up to rounding; equality to the bit is no "
                "longer claimed",
                "; ".join(reasons),
            )


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state on the CPU, detached from further training."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
