"""Train a model from its newest checkpoint to the last epoch, and compute predictions with finished weights.

A task (a training problem) supplies data, model, loss and metrics. The module ``step`` computes a single training step.
"""

import gc
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fvc_lib.engine import device as devices, loading, oom_detection, step as stepping, task as tasks, training_state
from fvc_lib.engine.device import ComputeDevice, Precision
from fvc_lib.engine.joint_loss import evaluated_joint_loss, joint_part
from fvc_lib.engine.loading import PlannedBatch, batch_size_of, batches_per_epoch, effective_batches, share
from fvc_lib.engine.oom_detection import MicroBatchPlan, OutOfMemory
from fvc_lib.engine.optimizer import learning_rate_at
from fvc_lib.engine.random_state import forked_random_state, seed_generators, stable_seed
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.step import BatchGradients, BatchTransaction, MemoryExhaustedError, StepLostError, Stepper
from fvc_lib.engine.task import Accumulator, Batch, LossMean, LossSum, Outputs, SampleSet, Task
from fvc_lib.engine.training_state import EpochRecord, MetricSink, TrainingCheckpoints, TrainingState, TrainingWatch
from fvc_lib.services.checkpoint_files import CheckpointFolder, weights_digest
from fvc_lib.services.errors import DataError, FvcError, StoppedError
from fvc_lib.services.memory import MemoryObserver, memory_advice

_logger = logging.getLogger(__name__)
_TRAINING, _VALIDATION = 0, 1  # indices in the list of data sets that a training loads from


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a training that do not depend on the task, such as epochs, batch size, learning rate and seed."""

    epochs: int
    effective_batch_size: int
    micro_batch: int  # samples in memory at once; an out-of-memory error lowers it
    learning_rate: float
    weight_decay: float
    warmup_share: float
    max_gradient_norm: float
    early_stopping_epochs: int  # 0 means never
    seed: int
    num_workers: int = 0
    max_nonfinite_steps: int = 5  # steps that may be skipped because of a NaN or infinity; one more ends the training
    checkpoint_seconds: float = 120.0  # at most this long between checkpoints within an epoch
    gradient_checkpointing: bool = False  # compute activations again in the backward pass instead of keeping them


class TrainingDivergedError(FvcError):
    """The error that ends a training in which losses or gradients were NaN or infinite too often.

    The last checkpoint can still be used.
    """


class Engine:
    """Train the model of one task with checkpoints, from which an interrupted training resumes.

    With several ranks (processes) every rank runs an engine, and all have the same state at every step. A rank computes
    its share of every effective batch (the samples of one optimizer step) and of the validation data. The ranks decide
    together whether to save, stop or repeat. Random generators of the caller are restored after the training.

    Attributes:
        state: the progress of the training.
        initial_weights: digest of the initial weights, before any checkpoint is restored; empty before ``fit``.

    Args:
        task: supplies data, model, loss and metrics.
        settings: the settings of the training.
        compute: device and precision.
        checkpoints: read at the start of ``fit``, written at epoch ends and at a stop.
        metrics: receives ``loss``, ``learning_rate`` and ``gradient_norm`` per step (phase train), and the validation
            metrics per epoch (phase validation).
        memory: observer that records memory use; receives phases, steps and events.
        name: name of a control training (such as one on shuffled labels), which is put before every phase in the memory
            log; empty for the training of the model itself.
        stop: called before every step; if it returns True, the state is saved and ``StoppedError`` is raised.
        progress: called with (finished steps, planned steps) after every step.
        ranks: the exchanges with the other processes that share the training; None: only this process trains.
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
        name: str = "",
        stop: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if not len(task.training_data):
            raise DataError("training data: got no sample, wanted at least one. Look at the folds and the clip store.")
        self.task = task
        self.settings = settings
        self.compute = compute
        self.initial_weights = ""
        self._ranks = ranks or Ranks()
        self._checkpoints = TrainingCheckpoints(checkpoints, compute, self._ranks)
        self._stop = stop or (lambda: False)
        self._progress = progress or (lambda done, planned: None)
        self._precision = Precision(compute)
        self._batches_per_epoch = batches_per_epoch(len(task.training_data), settings.effective_batch_size)
        self._total_steps = self._batches_per_epoch * settings.epochs
        self._lost_step = -1  # the last optimizer step that ran out of memory
        self._watch = TrainingWatch(metrics, memory, name)
        self._enter(TrainingState(MicroBatchPlan(settings.micro_batch)))

    def fit(self) -> TrainingState:
        """Train up to the last epoch with the task's loss, and return the final state.

        The training continues from the newest checkpoint, if there is one. The errors are those of ``batches``.
        """
        for model, part in self.batches():
            self.transaction.step(self.transaction.loss(model, part))
        return self.state

    def batches(self) -> Generator[tuple[nn.Module, Batch]]:
        """Train up to the last epoch, and yield (model, micro-batch) for every loss that the caller must compute.

        The caller gives every loss to the ``step`` of ``transaction``, once per micro-batch. The training continues
        from the newest checkpoint, if there is one. At the end ``state.best_model`` has the weights of the epoch with
        the smallest validation loss. Without validation data it has the weights of the last epoch.

        Raises:
            StoppedError: ``stop`` returned True; the state is saved.
            TrainingDivergedError: too many steps were not finite, or the validation loss was finite in no epoch.
            MemoryExhaustedError: memory does not suffice for a single sample, the optimizer's step or a checkpoint.
            CheckpointMismatchError: the checkpoint belongs to another configuration, model or data set.
            CheckpointWriteError: the checkpoint folder cannot be written.
            LoaderDiedError: a loader process was killed.
            RankLostError: the connection to another rank was lost.
            FvcError: another rank failed; the error has the class and message of that rank's error.
        """
        seed = stable_seed("engine", self.settings.seed)
        device = self.compute.device
        exhausted = None
        try:
            with forked_random_state(seed, device), devices.deterministic_algorithms(device):
                yield from self._train()
        except (RuntimeError, MemoryError) as error:
            if not oom_detection.is_out_of_memory(error):
                raise
            exhausted = self._watch.exhausted(error)
        finally:
            self._loaded.close()
            for name in ("_model", "_stepper", "transaction"):  # their memory is not needed after this
                self.__dict__.pop(name, None)
        if exhausted is not None:
            raise exhausted  # not within ``except``, where the traceback would keep tensors in memory
        if not self.state.best_model:
            raise TrainingDivergedError(
                f"the validation loss was not finite in any of {self.state.epochs_done} epochs, so no epoch can be "
                "chosen: lower learning_rate, turn amp off, or look at the validation videos."
            )
        self._progress(self._total_steps, self._total_steps)

    def _train(self) -> Generator[tuple[nn.Module, Batch]]:
        self._set_up()
        self._progress(self.state.step, self._total_steps)  # set-up is complete
        while not self.state.finished:
            try:
                yield from self._train_epoch()
                continue
            except StepLostError as error:
                lost = str(error)
            self._restore_checkpoint(lost)  # not within ``except``, where the traceback would keep tensors

    def predict(self, data: SampleSet, weights: Mapping[str, Tensor], accumulator: Accumulator) -> LossMean:
        """Compute the outputs of a finished model for ``data``, and return the mean loss.

        The outputs go to ``accumulator``. The mean loss is the same on all ranks.

        Args:
            data: the samples, which are evaluated in order.
            weights: weights of the model, by name; the model itself is built new.
            accumulator: receives the outputs; with several ranks, only that of rank 0 receives all of them.
        """
        with forked_random_state(stable_seed("predict", self.settings.seed), self.compute.device):
            model = self.task.build_model().to(self.compute.device)
        model.load_state_dict(weights)
        self._watch.at("test")
        with devices.deterministic_algorithms(self.compute.device):
            loaded = self._load([data], self._planned_evaluation(0, data))
            loss, lowered = self._evaluate(model, data, loaded, accumulator)
        if lowered:
            self.state.inexact_because.append("out of memory while a finished model was scored")
        return loss

    def _enter(self, state: TrainingState) -> None:
        self.state = self._watch.state = state
        if loaded := self.__dict__.get("_loaded"):
            loaded.close()
        plan = self._planned(state.epochs_done, state.batches_done)
        self._loaded = self._load([self.task.training_data, self.task.validation_data], plan)

    def _set_up(self) -> None:
        settings, device = self.settings, self.compute.device
        self._model = self.task.build_model().to(device)
        if settings.gradient_checkpointing:
            devices.recompute_activations(self._model)
        self._stepper = Stepper(
            self._model,
            self._precision,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            max_gradient_norm=settings.max_gradient_norm,
        )
        self.transaction = BatchTransaction(
            self.task,
            self._model,
            self._precision,
            device,
            report=self._watch.out_of_memory,
            ranks=self._ranks,
        )
        if self._ranks.size > 1:
            weights = self._ranks.from_leader("weights", partial(training_state.copy_weights, self._model))
            self._model.load_state_dict(weights)
            if self._ranks.rank:
                seed_generators(stable_seed("engine", settings.seed, "rank", self._ranks.rank))
        self.initial_weights = weights_digest(self._model.state_dict())
        if self._restored():
            return
        self._enter(TrainingState(MicroBatchPlan(settings.micro_batch)))
        if device.type != "cpu":
            self.state.inexact_because.append(f"on {device.type} sums may round otherwise from run to run")
        self._save()  # if the folder cannot be written, the training ends here, before its first step

    def _restored(self) -> bool:
        """Restore the newest checkpoint; return False if there is none."""
        saved = self._checkpoints.restore(self._model, self._stepper, MicroBatchPlan(self.settings.micro_batch))
        if saved is None:
            return False
        self._enter(saved)
        return True

    def keep_result(self) -> None:
        """Replace the checkpoints of the finished training by one that has only the history and the best model.

        The training cannot continue from it.
        """
        self._checkpoints.keep_result(self.state)

    def _save(self) -> None:
        self._checkpoints.save(self._model, self._stepper, self.state)

    def _restore_checkpoint(self, lost: str) -> None:
        """Restore the newest checkpoint after memory ran out while the optimizer's step was changing the weights.

        ``lost`` is the message of the out-of-memory error.

        Raises:
            MemoryExhaustedError: there is no checkpoint; or memory ran out in this way before, at the same or a later
                step, so a repetition would not help.
        """
        at_step = self.state.step
        self._model.zero_grad(set_to_none=True)
        devices.release_cached_memory(self.compute.device)
        self._watch.out_of_memory(OutOfMemory("optimizer_step", lost, None, None))
        if at_step <= self._lost_step or not self._restored():
            raise MemoryExhaustedError(
                f"out of memory in the optimizer's step {at_step}, and not for the first time: {lost}. The "
                "last checkpoint stands. The step needs room for gradients and two moments per weight. "
                f"{memory_advice('optimizer_step')}"
            )
        self._lost_step = at_step
        to_step = self.state.step
        message = f"out of memory in the optimizer's step {at_step} ({lost}): back to step {to_step}"
        self._watch.warn("step_restored", message, to_step=to_step, lost_steps=at_step - to_step)

    def _train_epoch(self) -> Generator[tuple[nn.Module, Batch]]:
        if isinstance(self.task, tasks.FollowsEpochs):
            self.task.begin_epoch(self._model, self.state.epochs_done)
        self._model.train()
        num_batches = self._batches_per_epoch - self.state.batches_done
        for _, batch in zip(range(num_batches), islice(self._loaded, num_batches), strict=True):
            self._stop_if_asked()
            save = yield from self._train_step(batch)
            if save:
                self._save()
        self._stop_if_asked()
        self._end_epoch()

    def _planned(self, epochs_done: int, batches_done: int) -> Iterator[PlannedBatch]:
        """Yield the batches that this rank must load up to the end of the last epoch, in order.

        The training batches of every epoch are followed by the validation batches. The first epoch is ``epochs_done``
        (0-based), without its first ``batches_done`` training batches, which are already done.
        """
        data, settings = self.task.training_data, self.settings
        for epoch in range(epochs_done, settings.epochs):
            order = loading.epoch_order(len(data), epoch, settings.seed)
            for samples in effective_batches(order, settings.effective_batch_size, batches_done):
                yield PlannedBatch(_TRAINING, epoch, share(samples, self._ranks.rank, self._ranks.size))
            batches_done = 0
            yield from self._planned_evaluation(_VALIDATION, self.task.validation_data)

    def _planned_evaluation(self, data_set: int, data: SampleSet) -> Iterator[PlannedBatch]:
        batches = effective_batches(np.arange(len(data)), self.settings.effective_batch_size)
        return (PlannedBatch(data_set, None, batches[number]) for number in self._evaluated_here(data))

    def _evaluated_here(self, data: SampleSet) -> list[int]:
        """Return the indices of the batches of ``data`` that this rank (process) evaluates.

        ``data`` is divided, in order, into batches of ``effective_batch_size`` samples.
        """
        num_batches = batches_per_epoch(len(data), self.settings.effective_batch_size)
        return share(list(range(num_batches)), self._ranks.rank, self._ranks.size)

    def _train_step(self, batch: Batch) -> Generator[tuple[nn.Module, Batch], None, bool]:
        """Take one optimizer step on an effective batch, and return whether a checkpoint is to be saved now.

        ``batch`` is this rank's share of the effective batch. Before the step, the method yields a pair (model,
        micro-batch) for each part of ``batch``, whose loss the caller computes.
        """
        state = self.state
        num_samples = batch_size_of(
            len(self.task.training_data), self.settings.effective_batch_size, state.batches_done
        )
        self._watch.at("train")
        before = state.micro_batch
        draws = stable_seed("step", self.settings.seed, state.step)
        yield from self.transaction.parts(batch, before, num_samples, draws=draws)
        result = self.transaction.result
        rate = learning_rate_at(state.step, self._total_steps, self.settings.learning_rate, self.settings.warmup_share)
        due = self._checkpoints.is_due(self.settings.checkpoint_seconds)
        norm, due = stepping.take_together(self._stepper, self._ranks, result, rate, save_is_due=due)
        # Counters change only after the step. If memory runs out in it, the batch must not count.
        state.micro_batches.done(state.step, result.micro_batch)
        state.step += 1
        state.batches_done += 1
        if math.isfinite(result.loss.total):
            state.epoch_loss.add(result.loss)
        self._watch.step_metrics({"loss": result.loss.mean(), "learning_rate": rate, "gradient_norm": norm})
        if not math.isfinite(norm) and result.loss.weight > 0:
            self._count_nonfinite(batch, result)
        self._progress(state.step, self._total_steps)
        return due or state.micro_batch < before

    def _count_nonfinite(self, batch: Batch, result: BatchGradients) -> None:
        """Count and report a step that was skipped because its loss or gradient was not finite.

        ``batch`` is this rank's share of the samples; ``result`` has the loss. An overflow in float16, which the loss
        scaler handles, is not counted.

        Raises:
            TrainingDivergedError: more steps were skipped than ``max_nonfinite_steps``.
        """
        is_finite = math.isfinite(result.loss.total)
        if is_finite and self._precision.overflow_is_normal:
            return
        state, allowed = self.state, self.settings.max_nonfinite_steps
        state.nonfinite_steps += 1
        ids = self._ranks.everyone("nonfinite", list(batch.sample_ids))
        samples = ", ".join(repr(name) for names in ids for name in names)
        what = "gradient" if is_finite else "loss"
        message = f"step {state.step}: {what} is not finite; no step taken; samples: {samples}"
        self._watch.warn(
            "nonfinite", message, what=what, samples=samples, count=state.nonfinite_steps, allowed=allowed
        )  # fmt: skip
        if state.nonfinite_steps > allowed:
            raise TrainingDivergedError(
                f"{message}. That was the case {state.nonfinite_steps} times (allowed: {allowed}). The last good "
                "checkpoint stands: lower learning_rate, turn amp off, or look at these samples."
            )

    def _end_epoch(self) -> None:
        state = self.state
        validates = len(self.task.validation_data) > 0
        metrics = self._validation_metrics() if validates else {}
        loss = metrics.get("loss", math.inf)
        is_last = state.epochs_done + 1 == self.settings.epochs
        is_best = loss < state.best_loss if validates else is_last
        better = training_state.copy_weights(self._model) if is_best else {}
        state.epochs_done += 1
        train_loss = state.epoch_loss.mean()
        state.history.append(EpochRecord(state.epochs_done, self._stepper.learning_rate, train_loss, metrics))
        state.epoch_loss, state.batches_done = LossMean(), 0
        if better:
            state.best_loss, state.best_epoch = loss, state.epochs_done
            state.best_model = better
        patience = self.settings.early_stopping_epochs if validates else 0
        gave_up = bool(patience and state.epochs_done - state.best_epoch >= patience)
        state.finished = gave_up or state.epochs_done >= self.settings.epochs
        self._watch.epoch_metrics("train", {"epoch_loss": train_loss})
        self._watch.epoch_metrics("validation", metrics)
        self._save()

    def _validation_metrics(self) -> dict[str, float]:
        """Return the model's metrics on the validation data, including ``loss``."""
        self._watch.at("validation")
        collected = self.task.new_accumulator()
        mean, lowered = self._evaluate(self._model, self.task.validation_data, self._loaded, collected)
        if lowered:
            epoch = self.state.epochs_done + 1
            self.state.inexact_because.append(f"out of memory in the validation of epoch {epoch}")
        return {"loss": mean.mean(), **self._ranks.from_leader("metrics", collected.compute)}

    def _evaluate(
        self, model: nn.Module, data: SampleSet, loaded: Iterator[Batch], accumulator: Accumulator
    ) -> tuple[LossMean, bool]:
        """Evaluate ``model`` on all samples of ``data``.

        Several ranks share the batches of ``effective_batch_size`` samples, but each batch stays on one rank. So the
        batches have the same shapes, and sums are rounded in the same way, as in a single process. Scores, metrics and
        losses are then equal to the bit, if every rank has the same number of threads.

        Args:
            model: the model; it is set to evaluation mode.
            data: the samples.
            loaded: yields the batches of ``_planned_evaluation``; further batches after them are not read.
            accumulator: receives the outputs; with several ranks, only that of rank 0 receives all of them.

        Returns:
            (mean loss, whether an out-of-memory error lowered the micro-batch); both are the same on every rank.
        """
        model.eval()
        micro_batch = self.state.micro_batch
        numbers = self._evaluated_here(data)
        losses: list[tuple[float, float]] = []
        for _, batch in zip(numbers, islice(loaded, len(numbers)), strict=True):
            outputs, loss, micro_batch = evaluate_batch(
                self.task, model, batch, self._precision, self.compute.device, micro_batch, self._watch.out_of_memory
            )
            accumulator.update(outputs, batch)
            losses.append((float(loss.total), float(loss.weight)))
            if not math.isfinite(losses[-1][0]):
                samples = ", ".join(map(repr, batch.sample_ids))
                message = f"after step {self.state.step}: the loss of evaluated samples is not finite, among: {samples}"
                self._watch.warn("nonfinite", message, what="evaluation", samples=samples, count=None, allowed=None)
        lowered = micro_batch < self.state.micro_batch
        if self._ranks.size > 1:
            parts: list[Any] = self._ranks.everyone("evaluation", [losses, lowered, accumulator.to_document()])
            losses = [pair for its_losses, _, _ in parts for pair in its_losses]
            lowered = any(its_lowered for _, its_lowered, _ in parts)
            for _, _, document in parts[1:] if self._ranks.rank == 0 else ():
                accumulator.add_document(document)
        mean = LossMean()
        for total, weight in losses:  # added in the order of the samples, to round as a single process does
            mean.add(LossMean(total, weight))
        return mean, lowered

    def _load(self, data_sets: list[SampleSet], plan: Iterator[PlannedBatch]) -> Generator[Batch]:
        return loading.load_planned(
            data_sets,
            plan,
            num_workers=self.settings.num_workers,
            pin_memory=self.compute.device.type == "cuda",
        )

    def _stop_if_asked(self) -> None:
        if any(wish for (wish,) in self._ranks.meet("boundary", self._stop())):
            self._save()
            raise StoppedError(
                f"stopped as asked after step {self.state.step} of {self._total_steps}; the state is saved: resume the "
                "run to go on."
            )


def evaluate_batch(
    task: Task,
    model: nn.Module,
    batch: Batch,
    precision: Precision,
    device: torch.device,
    micro_batch: int,
    report: Callable[[OutOfMemory], None] = lambda event: None,
) -> tuple[Outputs, LossSum, int]:
    """Compute the outputs and the loss of one batch without gradients, and return them on the CPU.

    If memory runs out, caches are emptied and the complete batch is computed again. The first repetition uses the same
    micro-batch, because another split may round differently. Every further repetition halves it.

    Args:
        task: supplies forward pass and loss.
        model: the model, in evaluation mode.
        batch: the samples, at least one.
        precision: precision of the forward pass.
        device: device of ``model``.
        micro_batch: samples in memory at once.
        report: called with the description of every out-of-memory error.

    Returns:
        (outputs, loss, micro-batch): float32 outputs (B, ...) of the B samples by name; the loss summed over the batch,
        with the sum of weights; and the number of samples in memory at once that fitted.

    Raises:
        MemoryExhaustedError: the batch does not fit with a single sample in memory at once.
    """
    halvings = 0
    while True:
        compute = partial(_outputs_in_parts, task, model, batch, precision, device, micro_batch)
        found, failure = stepping.attempt(compute)
        if found is not None:
            return *found, micro_batch
        gc.collect()
        devices.release_cached_memory(device)
        used = min(micro_batch, len(batch))
        micro_batch = used >> halvings
        halvings = 1
        report(OutOfMemory("validation", failure, used, micro_batch or None))
        if not micro_batch:
            raise stepping.sample_too_large(failure, batch)


def _outputs_in_parts(
    task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device, micro_batch: int
) -> tuple[Outputs, LossSum]:
    outputs: list[Outputs] = []
    losses: list[LossSum] = []
    for start in range(0, len(batch), micro_batch):
        part = batch.part(start, start + micro_batch).to(device)
        with torch.inference_mode(), precision.autocast():
            result = task.forward(model, part)
            loss = task.loss(result, part)
        outputs.append({name: values.float().cpu() for name, values in result.items()})
        losses.append(LossSum(loss.total.cpu(), loss.weight.cpu()))
    joined = {name: torch.cat([part[name] for part in outputs]) for name in outputs[0]}
    joint = joint_part(task)
    if joint is not None:
        compared = evaluated_joint_loss(joint, model, joined, batch, device)
        losses.append(LossSum(compared, torch.zeros_like(losses[0].weight)))
    total = torch.stack([loss.total for loss in losses]).sum()
    weight = torch.stack([loss.weight for loss in losses]).sum()
    return joined, LossSum(total, weight)
