"""Save and restore the state of a training, including all random states, and report its metrics and events.

An effective batch has the samples of one optimizer step. A micro-batch is the part of it that is in memory at once. A
rank is one of the processes that train a model together.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from fvc_lib.engine import oom_detection
from fvc_lib.engine.device import ComputeDevice
from fvc_lib.engine.oom_detection import MicroBatchChange, MicroBatchPlan, OutOfMemory
from fvc_lib.engine.random_state import capture_random_state, restore_random_state
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.step import MemoryExhaustedError, Stepper
from fvc_lib.engine.task import LossMean
from fvc_lib.services.checkpoint_files import CheckpointFolder
from fvc_lib.services.memory import EventDetail, MemoryObserver, NoObserver, memory_advice

# Losses may be NaN, which JSON lacks. They are written as text, because null could not be read back as a number.
NAN_AS_TEXT = {"ser_json_inf_nan": "strings"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochRecord:
    """The losses and validation metrics of one finished epoch. ``epoch`` counts from 1."""

    __pydantic_config__ = NAN_AS_TEXT

    epoch: int
    learning_rate: float  # learning rate of the epoch's last step
    train_loss: float  # weighted mean over the epoch's samples, computed while the weights changed
    validation: dict[str, float]  # metrics on the validation data, including ``loss``; empty without such data


@dataclass
class TrainingState:
    """The progress of a training, without the weights and the optimizer's state."""

    micro_batches: MicroBatchPlan  # number of samples in memory at once, now and at every earlier step
    epochs_done: int = 0  # finished epochs
    batches_done: int = 0  # effective batches (those of one optimizer step) used in the epoch in progress
    step: int = 0  # effective batches used over all epochs
    epoch_loss: LossMean = field(default_factory=LossMean)  # the running training loss of the epoch in progress
    nonfinite_steps: int = 0  # effective batches skipped because of a loss or gradient that was not finite
    # The epoch (1-based) with the smallest validation loss; without validation data the last one. 0: none yet.
    best_epoch: int = 0
    best_loss: float = math.inf  # validation loss of ``best_epoch``
    best_model: dict[str, Tensor] = field(default_factory=dict)  # weights of ``best_epoch``, on the CPU
    history: list[EpochRecord] = field(default_factory=list)
    finished: bool = False  # whether the last epoch or early stopping was reached
    inexact_because: list[str] = field(default_factory=list)  # reasons why a repetition may give other bits

    @property
    def micro_batch(self) -> int:
        """Return the current number of samples in memory at once."""
        return self.micro_batches.current

    def to_document(self) -> dict[str, Any]:
        """Return the state as a dict of numbers, texts, lists and dicts, for a checkpoint.

        The best model is left out, because the checkpoint stores it separately.
        """
        document = {name: value for name, value in vars(self).items() if name != "best_model"}
        return document | {
            "micro_batches": self.micro_batches.to_document(),
            "epoch_loss": [self.epoch_loss.total, self.epoch_loss.weight],
            "history": [asdict(record) for record in self.history],
            "inexact_because": list(self.inexact_because),
        }

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], best_model: dict[str, Tensor], micro_batches: MicroBatchPlan
    ) -> Self:
        """Return the state that is stored in ``document``.

        Args:
            document: result of ``to_document``.
            best_model: the weights of the best epoch, by name.
            micro_batches: the planned micro-batch (number of samples in memory at once) of the resumed training. This
                object is changed in place: it takes over the earlier changes that are stored in ``document``.
        """
        micro_batches.resume(document["micro_batches"], document["step"])
        values = dict(document) | {
            "micro_batches": micro_batches,
            "epoch_loss": LossMean(*document["epoch_loss"]),
            "history": [EpochRecord(**record) for record in document["history"]],
        }
        return cls(**values, best_model=best_model)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's ``state_dict`` on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The history of a finished training, and whether a repetition would give the same bits."""

    __pydantic_config__ = NAN_AS_TEXT

    history: tuple[EpochRecord, ...]  # one record per epoch
    # The epoch (1-based) with the smallest validation loss, whose weights are the result. 0: no epoch was chosen, and
    # the last weights are the result.
    best_epoch: int
    steps: int  # effective batches used, including skipped ones
    nonfinite_steps: int  # effective batches skipped because a loss or gradient was not finite
    micro_batch: int  # samples in memory at once at the end; lower than planned after an out-of-memory
    micro_batch_schedule: tuple[MicroBatchChange, ...]  # all values of ``micro_batch``, the planned one first
    # Reasons why a repetition may give other bits; empty: it gives the same bits.
    inexact_because: tuple[str, ...]
    seconds: float  # duration of the call that finished the training, without earlier attempts
    initial_weights: str = ""  # digest of the weights at the beginning (``weights_digest``)
    best_weights: str = ""  # digest of the weights of the best epoch

    def schedule(self) -> str:
        """Return the micro-batch sizes of the training as text, such as ``8; 4 from step 12``."""
        first, *later = self.micro_batch_schedule
        changes = [f"{change.micro_batch} from step {change.step}" for change in later]
        return "; ".join([str(first.micro_batch), *changes])

    def claim(self) -> str:
        """Return a sentence on whether a repetition of the training gives the same result to the bit, or why not."""
        if self.inexact_because:
            return f"equality to the bit is not claimed: {'; '.join(self.inexact_because)}"
        if len(self.micro_batch_schedule) > 1:
            return "the same command gives the same result up to rounding: an out-of-memory changed the micro-batch"
        return "the same command gives the same bits again, with this torch and as many threads"


def numerics(compute: ComputeDevice, num_ranks: int = 1) -> dict[str, str]:
    """Return the settings that determine how sums are rounded, as text by name.

    They are torch's version, the number of threads, the device, the precision, the CPU's instruction set and the number
    of ranks.
    """
    return {
        "torch": str(torch.__version__),  # its own class would be refused on loading
        "threads": str(torch.get_num_threads()),
        "device": compute.device.type if compute.device.type == "cpu" else compute.name,
        "precision": str(compute.amp_dtype or torch.float32),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "ranks": str(num_ranks),
    }


class TrainingCheckpoints:
    """Write and read the checkpoints of one training, and decide when the next checkpoint is due.

    Only rank 0 (the leading process) reads and writes ``folder``; it sends a verified checkpoint to the other ranks.
    The random state of every rank is stored. All other parts of the state are equal on all ranks.
    """

    def __init__(self, folder: CheckpointFolder, compute: ComputeDevice, ranks: Ranks) -> None:
        self._folder = folder
        self._device = compute.device
        self._ranks = ranks
        self._numerics = numerics(compute, ranks.size)
        self._saved_at = time.monotonic()

    def save(self, model: nn.Module, stepper: Stepper, state: TrainingState) -> None:
        """Write a checkpoint with the model's weights, the optimizer's state, ``state`` and all random states.

        All ranks must call this; only rank 0 writes.

        Raises:
            CheckpointWriteError: the checkpoint cannot be written.
        """
        self._saved_at = time.monotonic()  # set before writing, so that a failure is not repeated at once
        random_states = self._ranks.everyone("save", capture_random_state(self._device))
        if not self._ranks.rank:
            self._write(state, {"model": model.state_dict(), **stepper.state_dict(), "random_states": random_states})

    def keep_result(self, state: TrainingState) -> None:
        """Replace the checkpoints of a finished training by one that has only the history and the best model.

        The last weights and the optimizer's state are dropped. Only rank 0 writes.
        """
        if not self._ranks.rank:
            self._write(state, {})
            self._folder.drop_previous()

    def _write(self, state: TrainingState, progress: Mapping[str, Any]) -> None:
        self._folder.save(
            {**progress, "training": state.to_document(), "numerics": self._numerics},
            epoch=state.epochs_done,
            step=state.step,
            best_epoch=state.best_epoch,
            best_model=state.best_model,
        )

    def restore(self, model: nn.Module, stepper: Stepper, micro_batches: MicroBatchPlan) -> TrainingState | None:
        """Restore model, stepper and random generators from the newest undamaged checkpoint.

        Args:
            model: receives the weights; must have the checkpoint's architecture.
            stepper: the optimizer of ``model``; receives the optimizer's state.
            micro_batches: the planned micro-batch (number of samples in memory at once) of the resumed training. This
                object is changed in place: it takes over the earlier changes that are stored in the checkpoint.

        Returns:
            The state of the training; None if there is no checkpoint. For a finished training (``keep_result``), model,
            stepper and random generators stay unchanged.

        Raises:
            CheckpointMismatchError: the checkpoint belongs to another configuration, data set or model.
            RuntimeError: names or shapes of the weights differ between the checkpoint and the model.
        """
        checkpoint = self._ranks.from_leader("restore", self._read)
        if checkpoint is None:
            return None
        saved = checkpoint["state"]
        state = TrainingState.from_document(saved["training"], checkpoint["best_model"], micro_batches)
        if "model" not in saved:  # the training has finished (``keep_result``)
            return state
        model.load_state_dict(saved["model"])
        stepper.load_state_dict(saved)
        before = {**saved["numerics"], "planned micro-batch": str(saved["training"]["micro_batches"]["planned"])}
        now = {**self._numerics, "planned micro-batch": str(micro_batches.planned)}
        for name, value in now.items():
            if value != before[name]:
                reason = f"{name} {before[name]} -> {value}, since step {state.step}"
                state.inexact_because.append(reason)
                _logger.warning("resumed under other conditions (%s): equality to the bit is no longer claimed", reason)
        random_states = saved["random_states"]
        if self._ranks.rank < len(random_states):  # else there were fewer ranks: this one keeps its initial state
            restore_random_state(random_states[self._ranks.rank], self._device)
        return state

    def _read(self) -> dict[str, Any] | None:
        """Return a dict with ``path`` (text), ``state`` and ``best_model`` of the newest undamaged checkpoint.

        The result is None if there is no checkpoint.
        """
        checkpoint = self._folder.load()
        if checkpoint is None:
            return None
        return {"path": str(checkpoint.path), "state": checkpoint.state, "best_model": checkpoint.best_model}

    def is_due(self, interval_seconds: float) -> bool:
        """Return whether ``interval_seconds`` have passed since the last call of ``save``, or since the beginning."""
        return time.monotonic() - self._saved_at >= interval_seconds


class MetricSink(Protocol):
    """An object that records metrics, such as ``services.stage_logs.MetricLog``."""

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` (values by name) of ``phase`` at ``step`` of ``epoch`` (1-based)."""
        return


class NoMetrics(MetricSink):
    """A ``MetricSink`` that records nothing, for ranks other than 0."""


class TrainingWatch:
    """Report the metrics and events of a training, together with its current epoch and step.

    Args:
        metrics: receives losses, learning rates and gradient norms.
        memory: receives phases, steps and events; None: they are not reported.
        name: name of a control training, such as ``control``, whose phases are ``control_train`` and so on; empty for
            the training of the model itself.
    """

    def __init__(self, metrics: MetricSink, memory: MemoryObserver | None = None, name: str = "") -> None:
        self._metrics = metrics
        self._prefix = f"{name}_" if name else ""
        self._memory = memory or NoObserver()
        self.state = TrainingState(MicroBatchPlan(1))  # the engine replaces it

    def at(self, phase: str) -> None:
        """Report to the memory observer that ``phase`` is in progress, with the current step, epoch and batch index.

        For the phase ``test`` only the step is reported.
        """
        state = self.state
        where = {} if phase == "test" else {"epoch": state.epochs_done + 1, "batch_idx": state.batches_done}
        self._memory.at(f"{self._prefix}{phase}", global_step=state.step, **where)

    def step_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write ``metrics`` (values by name) of the current training step to the metric log."""
        self._metrics.log(step=self.state.step, epoch=self.state.epochs_done + 1, phase="train", metrics=metrics)

    def epoch_metrics(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Write ``metrics`` (values by name) of the last finished epoch to the metric log.

        ``phase`` is train or validation.
        """
        self._metrics.log(step=self.state.step, epoch=self.state.epochs_done, phase=phase, metrics=metrics)

    def warn(self, kind: str, message: str, **details: EventDetail) -> None:
        """Log ``message`` as a warning, and report it to the memory observer as an event.

        ``kind`` is a short word for the kind of event, such as ``nonfinite``. ``details`` are further values by name.
        """
        _logger.warning(message)
        self._memory.event(kind, message, **details)

    def out_of_memory(self, event: OutOfMemory) -> None:
        """Report the out-of-memory error ``event`` to the memory observer. Call this after memory was freed."""
        then = f"next {event.micro_batch_next}" if event.micro_batch_next else "nothing smaller is left"
        sizes = "" if event.micro_batch is None else f" with {event.micro_batch} samples at once; {then}"
        place = event.where.replace("_", " ")
        self._memory.event(
            "out_of_memory",
            f"out of memory in {place}{sizes}: {event.message}",
            where=event.where,
            micro_batch=event.micro_batch,
            micro_batch_next=event.micro_batch_next,
        )

    def exhausted(self, error: BaseException) -> MemoryExhaustedError:
        """Report an out-of-memory error that a smaller micro-batch cannot avoid, and return the error to raise.

        It occurs, for example, while a checkpoint is loaded or copied.
        """
        message = (
            f"out of memory after step {self.state.step}, outside of a forward or backward pass: "
            f"{oom_detection.first_line(error)}. The last checkpoint stands. {memory_advice('elsewhere')}"
        )
        self._memory.event("out_of_memory", message, where="elsewhere")
        return MemoryExhaustedError(message)
