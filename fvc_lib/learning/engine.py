"""The one training engine. It knows samples, losses and metrics by name only; what they mean is the task's business."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from fvc_lib.learning.accumulators import LossMean
from fvc_lib.learning.device import ComputeDevice, deterministic_algorithms
from fvc_lib.learning.loading import load_batches
from fvc_lib.learning.optimisation import (
    Precision,
    build_optimizer,
    finish_gradients,
    learning_rate_at,
    set_learning_rate,
)
from fvc_lib.learning.random_state import (
    capture_random_state,
    forked_random_state,
    restore_random_state,
    stable_seed,
)
from fvc_lib.learning.sampling import epoch_order, num_windows, windows
from fvc_lib.learning.task import Accumulator, Batch, SampleSet, Task
from fvc_lib.learning.training_state import EpochRecord, TrainingState, copy_weights
from fvc_lib.learning.transaction import WindowGradients, WindowTransaction, evaluate_batch
from fvc_lib.services.checkpoints import CheckpointFolder
from fvc_lib.services.errors import DataError, FvcError, StoppedError

_logger = logging.getLogger(__name__)


class TrainingDivergedError(FvcError):
    """The loss or its gradient was not finite too often; the last good checkpoint stands."""


class MetricSink(Protocol):
    """Where metrics go; ``services.metric_log.MetricLog`` is one."""

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` of ``phase`` at ``step`` of ``epoch`` (1-based)."""
        ...


class MemoryObserver(Protocol):
    """Told at every step where the training is, so that memory can be attributed; ``MemorySampler`` is one."""

    def at(
        self,
        phase: str,
        *,
        epoch: int | None = None,
        batch_idx: int | None = None,
        global_step: int | None = None,
    ) -> None:
        """Say where the training is."""
        ...


@dataclass(frozen=True)
class EngineSettings:
    """How to train, for any task.

    Attributes:
        micro_batch: samples in memory at once, to begin with.
        balance_classes: draw classes evenly (the training data must name them).
        early_stopping_epochs: 0 means never.
        max_nonfinite_steps: so many skipped steps are borne; one more ends the training.
        checkpoint_seconds: at most this long between checkpoints within an epoch.
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


class Engine:
    """Trains one task, resumably. All random draws come from a state forked for it: the caller's is left alone.

    Args:
        checkpoints: read at the start of ``fit``, written at epoch ends and at a stop.
        metrics: gets ``loss``, ``learning_rate`` and ``gradient_norm`` per step (phase train) and the validation
            metrics per epoch (phase validation).
        stop: asked at every step boundary; True saves and raises StoppedError.
        progress: called with (steps done, steps planned).
    """

    def __init__(
        self,
        task: Task,
        settings: EngineSettings,
        compute: ComputeDevice,
        checkpoints: CheckpointFolder,
        metrics: MetricSink,
        *,
        memory: MemoryObserver | None = None,
        stop: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not len(task.training_data):
            raise DataError("training data: got no sample, wanted at least one. Look at the folds and the clip store.")
        self.task = task
        self.settings = settings
        self.compute = compute
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._memory = memory
        self._stop = stop or (lambda: False)
        self._progress = progress or (lambda done, planned: None)
        self._precision = Precision(compute)
        self._windows_per_epoch = num_windows(len(task.training_data), settings.effective_batch_size)
        self._total_steps = self._windows_per_epoch * settings.epochs
        self._saved_at = time.monotonic()
        self.state = TrainingState(micro_batch=settings.micro_batch)

    def fit(self) -> TrainingState:
        """Train from the newest checkpoint, or from the start, to the end.

        Raises:
            StoppedError: ``stop`` said so; the state is saved.
            TrainingDivergedError: too many steps were not finite.
            MemoryExhaustedError: one sample alone does not fit.
            CheckpointMismatchError: the checkpoint belongs to another configuration or other data.
            CheckpointWriteError: the checkpoint folder cannot be written.
        """
        seed = stable_seed("engine", self.settings.seed)
        with forked_random_state(seed, self.compute.device), deterministic_algorithms(self.compute.device):
            self._set_up()
            while not self.state.finished:
                self._train_epoch()
        if not self.state.best_model:
            raise TrainingDivergedError(
                f"the validation loss was not finite in any of {self.state.epochs_done} epochs, so no epoch can be "
                "chosen: lower learning_rate, turn amp off, or look at the validation videos."
            )
        self._progress(self._total_steps, self._total_steps)
        return self.state

    def predict(self, data: SampleSet, weights: Mapping[str, Tensor], accumulator: Accumulator) -> LossMean:
        """Run ``data`` once through the model with ``weights``, in order, into ``accumulator``; returns the loss."""
        with forked_random_state(stable_seed("predict", self.settings.seed), self.compute.device):
            model = self.task.build_model().to(self.compute.device)
        model.load_state_dict(weights)
        with deterministic_algorithms(self.compute.device):
            return self._run_through(model, data, accumulator)

    def _set_up(self) -> None:
        self._model = self.task.build_model().to(self.compute.device)
        settings = self.settings
        self._optimizer = build_optimizer(self._model, settings.learning_rate, settings.weight_decay)
        self._transaction = WindowTransaction(self.task, self._model, self._precision, self.compute.device)
        self.state = TrainingState(micro_batch=settings.micro_batch)
        checkpoint = self._checkpoints.load()
        if checkpoint is None:
            self._save(epoch_ended=False)  # before the first step, so that a folder that refuses writes says so now
            return
        saved = checkpoint.state
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._precision.scaler.load_state_dict(saved["scaler"])
        self.state = TrainingState.from_document(saved["training"], checkpoint.best_model)
        # A lower one than before is a remedy for memory that ended; a higher one would undo a back-off.
        self.state.micro_batch = min(self.state.micro_batch, settings.micro_batch)
        restore_random_state(saved["random_state"], self.compute.device)

    def _save(self, *, epoch_ended: bool) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._precision.scaler.state_dict(),
            "training": self.state.to_document(),
            "random_state": capture_random_state(self.compute.device),
        }
        self._checkpoints.save(
            state,
            epoch=self.state.epochs_done,
            step=self.state.step,
            best_epoch=self.state.best_epoch,
            best_model=self.state.best_model,
            epoch_ended=epoch_ended,
        )
        self._saved_at = time.monotonic()

    def _train_epoch(self) -> None:
        self._model.train()
        for window in self._training_windows():
            self._stop_if_asked()
            self._train_window(window)
            if self.state.windows_done < self._windows_per_epoch:
                self._save_if_due()
        self._stop_if_asked()
        self._end_epoch()

    def _training_windows(self) -> Iterator[Batch]:
        data, settings, state = self.task.training_data, self.settings, self.state
        if settings.balance_classes and data.classes is None:
            raise DataError("balanced sampling: the training data names no classes; turn it off or give them.")
        classes = data.classes if settings.balance_classes else None
        order = epoch_order(len(data), state.epochs_done, settings.seed, classes)
        return self._load(data, windows(order, settings.effective_batch_size, state.windows_done))

    def _train_window(self, window: Batch) -> None:
        self._tell_memory("train")
        state = self.state
        result = self._transaction.gradients(window, state.micro_batch)
        if result.micro_batch < min(state.micro_batch, len(window)):
            state.micro_batch = result.micro_batch
            self._log("train", {"micro_batch": float(result.micro_batch)})
        rate = learning_rate_at(state.step, self._total_steps, self.settings.learning_rate, self.settings.warmup_share)
        norm = self._step(result, rate) if result.is_finite and result.loss.weight > 0 else math.nan
        state.step += 1
        state.windows_done += 1
        if result.is_finite:
            state.epoch_loss.add(result.loss)
        self._log("train", {"loss": result.loss.mean(), "learning_rate": rate, "gradient_norm": norm})
        if not math.isfinite(norm) and result.loss.weight > 0:
            self._count_nonfinite(window, result)
        self._progress(state.step, self._total_steps)

    def _step(self, result: WindowGradients, rate: float) -> float:
        """Take the optimizer's step unless the gradient is not finite; returns its norm before clipping."""
        scaler = self._precision.scaler
        scaler.unscale_(self._optimizer)
        factor = result.num_samples / result.loss.weight
        norm = float(finish_gradients(self._model.parameters(), factor, self.settings.max_gradient_norm))
        set_learning_rate(self._optimizer, rate)
        if math.isfinite(norm) or self._precision.scales_losses:
            scaler.step(self._optimizer)
        scaler.update()
        return norm

    def _count_nonfinite(self, window: Batch, result: WindowGradients) -> None:
        """No step was taken. A half-precision overflow is the scaler's business; anything else is bounded."""
        if self._precision.scales_losses and result.is_finite:
            return
        state = self.state
        state.nonfinite_steps += 1
        what = "gradient" if result.is_finite else "loss"
        ids = ", ".join(repr(sample_id) for sample_id in window.sample_ids)
        _logger.warning("step %d: %s is not finite; no step taken; samples: %s", state.step, what, ids)
        if state.nonfinite_steps > self.settings.max_nonfinite_steps:
            raise TrainingDivergedError(
                f"step {state.step}: the {what} was not finite for the {state.nonfinite_steps}th time (allowed: "
                f"{self.settings.max_nonfinite_steps}); the last samples were {ids}. The last good checkpoint stands: "
                "lower learning_rate, turn amp off, or look at these samples."
            )

    def _end_epoch(self) -> None:
        state = self.state
        self._tell_memory("validation")
        collected = self.task.new_accumulator()
        loss = self._run_through(self._model, self.task.validation_data, collected).mean()
        state.epochs_done += 1
        metrics = {"loss": loss, **collected.compute()}
        train_loss = state.epoch_loss.mean()
        rate = float(self._optimizer.param_groups[0]["lr"])
        state.history.append(EpochRecord(state.epochs_done, rate, train_loss, metrics))
        state.epoch_loss, state.windows_done = LossMean(), 0
        if loss < state.best_loss:
            state.best_loss, state.best_epoch = loss, state.epochs_done
            state.best_model = copy_weights(self._model)
        state.finished = self._is_last_epoch()
        self._metrics.log(step=state.step, epoch=state.epochs_done, phase="train", metrics={"epoch_loss": train_loss})
        self._metrics.log(step=state.step, epoch=state.epochs_done, phase="validation", metrics=metrics)
        self._save(epoch_ended=True)

    def _is_last_epoch(self) -> bool:
        patience = self.settings.early_stopping_epochs
        waited = self.state.epochs_done - self.state.best_epoch
        return self.state.epochs_done >= self.settings.epochs or bool(patience and waited >= patience)

    def _run_through(self, model: nn.Module, data: SampleSet, accumulator: Accumulator) -> LossMean:
        model.eval()
        mean = LossMean()
        micro_batch = self.state.micro_batch
        for batch in self._load(data, windows(np.arange(len(data)), micro_batch)):
            outputs, loss, micro_batch = evaluate_batch(
                self.task, model, batch, self._precision, self.compute.device, micro_batch
            )
            accumulator.update(outputs, batch)
            mean.update(loss)
        return mean

    def _load(self, data: SampleSet, batches: list[list[int]]) -> Iterator[Batch]:
        return load_batches(data, batches, num_workers=self.settings.num_workers, device=self.compute.device)

    def _stop_if_asked(self) -> None:
        if self._stop():
            self._save(epoch_ended=False)
            raise StoppedError(
                f"stopped as asked after step {self.state.step} of {self._total_steps}; the state is saved: "
                "resume with run_notebooks.py --resume latest."
            )

    def _save_if_due(self) -> None:
        if time.monotonic() - self._saved_at >= self.settings.checkpoint_seconds:
            self._save(epoch_ended=False)

    def _log(self, phase: str, metrics: Mapping[str, float]) -> None:
        self._metrics.log(step=self.state.step, epoch=self.state.epochs_done + 1, phase=phase, metrics=metrics)

    def _tell_memory(self, phase: str) -> None:
        if self._memory is not None:
            state = self.state
            self._memory.at(phase, epoch=state.epochs_done + 1, batch_idx=state.windows_done, global_step=state.step)
