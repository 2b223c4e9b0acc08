"""One pass over samples that are only looked at: each rank its part, the whole as if one had done it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fvc_lib.learning.accumulators import LossMean
from fvc_lib.learning.evaluated_batch import evaluate_batch
from fvc_lib.learning.micro_batch import MicroBatchChange, MicroBatchPlan
from fvc_lib.learning.optimisation import Precision
from fvc_lib.learning.ranks import Ranks
from fvc_lib.learning.sampling import share, windows
from fvc_lib.learning.task import Accumulator, Batch, SampleSet, Task
from fvc_lib.learning.watching import TrainingWatch


class Evaluation:
    """Runs data through models of one task.

    A rank's part is a run of whole effective batches: split elsewhere, a convolution or a float32 sum may round
    otherwise. So scores, metrics and losses are those of a single process to the bit, if each rank has as many threads.

    Args:
        task: whose model, loss and accumulators these are.
        precision: as in training.
        device: where the model is.
        ranks: that share the work.
        window_size: samples loaded at once.
        watch: told of shortages and losses that are not finite.
        load: batches from lists of sample numbers.
        after_batch: called after each.
    """

    def __init__(
        self,
        task: Task,
        precision: Precision,
        device: torch.device,
        ranks: Ranks,
        *,
        window_size: int,
        watch: TrainingWatch,
        load: Callable[[SampleSet, list[list[int]]], Iterator[Batch]],
        after_batch: Callable[[], None],
    ) -> None:
        self._task = task
        self._precision = precision
        self._device = device
        self._ranks = ranks
        self._window_size = window_size
        self._watch = watch
        self._load = load
        self._after_batch = after_batch

    def run(
        self, model: nn.Module, data: SampleSet, accumulator: Accumulator, micro_batches: MicroBatchPlan, step: int
    ) -> LossMean:
        """The loss over all of ``data``, on every rank; ``accumulator`` is whole on rank 0 alone.

        ``micro_batches`` is given what had to be lowered, on every rank the same.
        """
        model.eval()
        size, num_before = self._window_size, len(micro_batches.changes)
        all_windows = windows(np.arange(len(data)), size)
        numbers = share(list(range(len(all_windows))), self._ranks.rank, self._ranks.size)
        losses = []
        for number, batch in zip(numbers, self._load(data, [all_windows[number] for number in numbers]), strict=True):
            sample = number * size
            planned = micro_batches.in_validation(step, sample)
            outputs, loss, fitted = evaluate_batch(
                self._task, model, batch, self._precision, self._device, planned, self._watch.shortage
            )
            if fitted < planned:
                micro_batches.fitted_in_validation(step, sample, fitted)
            accumulator.update(outputs, batch)
            losses.append((float(loss.total), float(loss.weight)))
            if not math.isfinite(losses[-1][0]):
                self._watch.evaluated_nonfinite(batch)
            self._after_batch()
        if self._ranks.size > 1:
            losses = self._joined(losses, numbers, micro_batches, num_before, step)
            self._ranks.to_leader("evaluated", accumulator.to_document(), accumulator.add_document)
        mean = LossMean()
        for total, weight in losses:  # one by one, in the order of the samples: so it rounds as in one process
            mean.add(LossMean(total, weight))
        return mean

    def _joined(
        self,
        losses: list[tuple[float, float]],
        numbers: list[int],
        micro_batches: MicroBatchPlan,
        num_before: int,
        step: int,
    ) -> list[tuple[float, float]]:
        """All ranks' losses in order; their changes of the micro-batch go into every rank's plan.

        A change holds to the end of the pass, so after a rank that had one the next begins with what was planned.
        """
        own = [(change.micro_batch, change.validation_sample) for change in micro_batches.changes[num_before:]]
        del micro_batches.changes[num_before:]
        first = numbers[0] * self._window_size if numbers else None
        joined: list[tuple[float, float]] = []
        found: list[tuple[int, int]] = []
        everyones: list[Any] = self._ranks.everyone("evaluation", [losses, own, first])
        for its_losses, its_changes, its_first in everyones:
            joined.extend((total, weight) for total, weight in its_losses)
            if found and its_first is not None:
                found.append((micro_batches.in_validation(step, its_first), its_first))
            found.extend((micro_batch, sample) for micro_batch, sample in its_changes)
        micro_batches.changes.extend(MicroBatchChange(step, size, sample) for size, sample in found)
        return joined
