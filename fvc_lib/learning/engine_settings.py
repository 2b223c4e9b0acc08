"""How to train, whatever is trained."""

from __future__ import annotations

from dataclasses import dataclass

from fvc_lib.learning.micro_batch import MicroBatchChange, MicroBatchPlan


@dataclass(frozen=True)
class EngineSettings:
    """How to train, for any task.

    Attributes:
        micro_batch: samples in memory at once, to begin with.
        balance_classes: draw classes evenly (the training data must name them).
        early_stopping_epochs: 0 means never.
        max_nonfinite_steps: so many skipped steps are borne; one more ends the training.
        checkpoint_seconds: at most this long between checkpoints within an epoch.
        checkpoint_epochs: a checkpoint at the end of every so many epochs, and of the last.
        micro_batch_recovery_steps: see ``MicroBatchPlan``.
        replay: micro-batch changes of an earlier training to be repeated.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
    """

    epochs: int
    effective_batch_size: int
    micro_batch: int
    learning_rate: float
    weight_decay: float
    warmup_share: float
    max_gradient_norm: float
    early_stopping_epochs: int
    seed: int
    balance_classes: bool = False
    num_workers: int = 0
    max_nonfinite_steps: int = 5
    checkpoint_seconds: float = 120.0
    checkpoint_epochs: int = 1
    micro_batch_recovery_steps: int = 0
    replay: tuple[MicroBatchChange, ...] = ()
    gradient_checkpointing: bool = False

    def micro_batches(self) -> MicroBatchPlan:
        """The plan that a training begins with."""
        return MicroBatchPlan(self.micro_batch, self.micro_batch_recovery_steps, self.replay)
