"""What a training tells the world while it runs: metrics, where it is, and what went wrong and was mended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from fvc_lib.engine.oom_detection import MemoryState, OutOfMemory, OutOfMemoryFolder
from fvc_lib.engine.step import MemoryExhaustedError
from fvc_lib.engine.task import Batch
from fvc_lib.engine.training_state import TrainingState
from fvc_lib.services.memory_policy import MemoryObserver, NoObserver, memory_advice

_logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Where metrics go; ``services.stage_logs.MetricLog`` is one."""

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` of ``phase`` at ``step`` of ``epoch`` (1-based)."""
        ...


class NoMetrics:
    """Hears metrics and keeps none: for a rank whose numbers another one writes."""

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Ignore."""


class TrainingWatch:
    """Knows where the training is, and adds that to everything it passes on.

    Args:
        metrics: gets losses, rates and the like.
        memory: called with every step and event.
        oom_folder: gets a file per out-of-memory; None: none is written.
    """

    def __init__(
        self, metrics: MetricSink, memory: MemoryObserver | None = None, oom_folder: OutOfMemoryFolder | None = None
    ) -> None:
        self._metrics = metrics
        self._memory = memory or NoObserver()
        self._oom_folder = oom_folder
        self.state: TrainingState | None = None

    def at(self, phase: str) -> None:
        """The training has come to ``phase`` of its current effective batch; a test belongs to no epoch."""
        state = self._here()
        if phase == "test":
            self._memory.at(phase, global_step=state.step)
        else:
            self._memory.at(phase, epoch=state.epochs_done + 1, batch_idx=state.batches_done, global_step=state.step)

    def step_metrics(self, metrics: Mapping[str, float]) -> None:
        """Training metrics of the step in hand."""
        state = self._here()
        self._metrics.log(step=state.step, epoch=state.epochs_done + 1, phase="train", metrics=metrics)

    def epoch_metrics(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Metrics of the epoch that has just been counted."""
        state = self._here()
        self._metrics.log(step=state.step, epoch=state.epochs_done, phase=phase, metrics=metrics)

    def out_of_memory(self, event: OutOfMemory) -> None:
        """Memory ran out, and was freed again. The training goes on even where the context cannot be written."""
        state = self._here()
        epoch, file = state.epochs_done + 1, None
        if self._oom_folder is not None:
            phase = self._memory.prefix + ("validation" if event.where == "validation" else "train")
            try:
                file = self._oom_folder.write(event, phase=phase, epoch=epoch, step=state.step).name
            except OSError as error:
                _logger.warning("the context of an out-of-memory could not be written: %s", error)
        asked = event.state.asked_bytes
        self._memory.event(
            "out_of_memory",
            _in_words(event),
            where=event.where,
            asked_mb=None if asked is None else round(asked / 1e6, 3),
            micro_batch=event.micro_batch,
            micro_batch_next=event.micro_batch_next,
            context_file=file,
        )

    def micro_batch_changed(self, before: int, now: int) -> None:
        """From this step on fewer samples are in memory at once, or more again."""
        reason = "out of memory" if now < before else "memory suffices again"
        self.step_metrics({"micro_batch": float(now)})
        self._memory.event(
            "micro_batch", f"micro-batch {before} -> {now}: {reason}", micro_batch_before=before, micro_batch=now,
            reason=reason,
        )  # fmt: skip

    def step_restored(self, memory: MemoryState, from_step: int) -> None:
        """Out of memory in the optimizer's step, and a checkpoint was put back."""
        to_step = self._here().step
        message = f"out of memory in the optimizer's step {from_step} ({memory.message}): back to step {to_step}"
        _logger.warning(message)
        self._memory.event("step_restored", message, to_step=to_step, lost_steps=from_step - to_step)

    def nonfinite(self, what: str, sample_ids: Sequence[str], allowed: int) -> str:
        """A loss or gradient was not finite and no step was taken; returns the samples' ids as text."""
        state = self._here()
        ids = ", ".join(map(repr, sample_ids))
        message = f"step {state.step}: {what} is not finite; no step taken; samples: {ids}"
        _logger.warning(message)
        self._memory.event("nonfinite", message, what=what, samples=ids, count=state.nonfinite_steps, allowed=allowed)
        return ids

    def evaluated_nonfinite(self, batch: Batch) -> None:
        """The loss of samples that are only looked at is not finite; an epoch that has such cannot become the best."""
        ids = ", ".join(repr(sample_id) for sample_id in batch.sample_ids)
        message = f"after step {self._here().step}: the loss of samples looked at is not finite, among: {ids}"
        _logger.warning(message)
        self._memory.event("nonfinite", message, what="evaluation", samples=ids, count=None, allowed=None)

    def save_skipped(self, error: BaseException) -> None:
        """A checkpoint that was due within an epoch did not fit into memory beside the training."""
        reason = str(error).partition("\n")[0] or type(error).__name__
        message = f"step {self._here().step}: no memory for a checkpoint now ({reason}); the next one is due later"
        _logger.warning(message)
        self._memory.event("checkpoint_skipped", message)

    def exhausted(self, error: BaseException) -> MemoryExhaustedError:
        """Out of memory where nothing smaller can be tried: while loading, counting or copying a checkpoint."""
        reason = str(error).partition("\n")[0] or type(error).__name__
        message = (
            f"out of memory after step {self._here().step}, outside of a forward or backward pass: {reason}. The last "
            f"checkpoint stands. {memory_advice('elsewhere')}"
        )
        self._memory.event("out_of_memory", message, where="elsewhere", asked_mb=None, micro_batch=None,
                           micro_batch_next=None, context_file=None)  # fmt: skip
        return MemoryExhaustedError(message)

    def loader_restarted(self, reason: str) -> None:
        """A loader process died and was replaced."""
        state = self._here()
        message = f"{reason} The loader was started again at step {state.step}."
        _logger.warning(message)
        self._memory.event("loader_restarted", message, reason=reason)

    def _here(self) -> TrainingState:
        if self.state is None:
            raise RuntimeError("the watch was asked for a position before the training had one")
        return self.state


def _in_words(event: OutOfMemory) -> str:
    if event.where == "optimizer_step":
        return "out of memory in the optimizer's step"
    then = f"next {event.micro_batch_next}" if event.micro_batch_next else "nothing smaller is left"
    return f"out of memory in {event.where} with {event.micro_batch} samples at once; {then}"
