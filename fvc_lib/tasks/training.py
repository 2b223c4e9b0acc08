"""One training on one split, from a task to its outcome: memory planned and kept, resumed, scored, on one rank or many.

What is learned, and what is written about the test part, is the caller's: ``image_training``, ``video_text_training``.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from fvc_lib.engine.checkpoint import NAN_AS_TEXT, TrainingRecord, TrainingState
from fvc_lib.engine.device import ComputeDevice, peak_device_bytes, resolve_device
from fvc_lib.engine.distributed.launch import run_ranks
from fvc_lib.engine.distributed.ranks import RankLostError, Ranks
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.memory.training_memory import TrainingMemory, planned_micro_batch, training_memory
from fvc_lib.engine.random_state import forked_random_state, stable_seed
from fvc_lib.engine.task import Accumulator, LossMean, SampleSet, Task
from fvc_lib.engine.watching import MetricSink
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.checkpoints import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory_budget import peak_rss_bytes
from fvc_lib.services.memory_policy import MemoryObserver, NoObserver
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.tasks.video.task import settings_of

# ----------------------------------------------------------------------------------------------------
# What a training without folds found, as a value and as the file whose presence means that it is finished.


@dataclass(frozen=True)
class StageOutcome:
    """One finished training of a stage. Nothing in it was chosen on the test part.

    Attributes:
        stage: the notebook's name.
        num_parameters: trained at any time.
        num_train, num_validation, num_test: samples of each part that took part.
        predicted_peak_bytes: of the training, before it; None without a preflight.
        peak_rss_bytes: of this process; of several ranks, the largest one's.
        peak_device_bytes: of an accelerator; None on the CPU.
        fingerprint: of the parameters and data it was made with.
        num_ranks: processes that shared the training, of the attempt that finished it.
    """

    __pydantic_config__ = NAN_AS_TEXT

    stage: str
    model: str
    num_parameters: int
    device: str
    num_train: int
    num_validation: int
    num_test: int
    training: TrainingRecord
    predicted_peak_bytes: int | None
    peak_rss_bytes: int
    peak_device_bytes: int | None
    fingerprint: str
    num_ranks: int = 1


def stage_outcome_to_json(outcome: StageOutcome) -> str:
    """As it stands in its file."""
    return TypeAdapter(StageOutcome).dump_json(outcome, indent=2, ensure_ascii=True).decode() + "\n"


def stage_outcome_from_json(text: str) -> StageOutcome:
    """What ``stage_outcome_to_json`` gave."""
    return TypeAdapter(StageOutcome).validate_json(text)


def write_stage_outcome(path: Path, outcome: StageOutcome) -> None:
    """Replace ``path`` atomically."""
    write_text(path, stage_outcome_to_json(outcome))


def read_stage_outcome(path: Path) -> StageOutcome | None:
    """The outcome in ``path``; None when there is none, or none that this version understands."""
    try:
        return TypeAdapter(StageOutcome).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


Progress = Callable[[int, int], None]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitTraining:
    """What is to be trained.

    Attributes:
        stage: the notebook's name; names the artifacts.
        parameters: JSON values that the weights depend on; a checkpoint made with others is refused.
        data_fingerprint: over which samples, with which targets, play which part.
        model_name: for the record.
    """

    stage: str
    task: Task
    settings: EngineSettings
    parameters: Mapping[str, Any]
    data_fingerprint: str
    model_name: str

    @property
    def fingerprint(self) -> str:
        """Over parameters and data."""
        return sha256_of_json([dict(self.parameters), self.data_fingerprint])


@dataclass(frozen=True)
class TrainedSplit:
    """A finished training, with its memory still under watch: what is scored now belongs to it."""

    training: SplitTraining
    engine: Engine
    state: TrainingState
    ranks: Ranks
    compute: ComputeDevice
    paths: RunPaths
    predicted_peak_bytes: int | None
    seconds: float

    def predict(self, data: SampleSet, accumulator: Accumulator) -> LossMean:
        """Run ``data`` once, in order, through the best epoch's model; ``accumulator`` has all of it on every rank."""
        gathered = copy.deepcopy(accumulator)  # the engine's is whole on rank 0 alone
        loss = self.engine.predict(data, self.state.best_model, gathered)
        accumulator.add_document(self.ranks.from_leader("predicted", gathered.to_document))
        return loss

    def finish(self, *, num_train: int, num_validation: int, num_test: int, write: Callable[[], None]) -> StageOutcome:
        """``write`` tables on rank 0, and after them the outcome; it is returned on every rank."""
        most = int(max(peak for (peak,) in self.ranks.meet("peaks", peak_rss_bytes())))

        def written() -> str:
            write()
            outcome = StageOutcome(
                stage=self.training.stage,
                model=self.training.model_name,
                num_parameters=_num_parameters(self.training.task),
                device=self.compute.describe(),
                num_train=num_train,
                num_validation=num_validation,
                num_test=num_test,
                training=_record(self.state, self.seconds),
                predicted_peak_bytes=self.predicted_peak_bytes,
                peak_rss_bytes=most,
                peak_device_bytes=peak_device_bytes(self.compute.device),
                fingerprint=self.training.fingerprint,
                num_ranks=self.ranks.size,
            )
            write_stage_outcome(self.paths.stage_outcome(self.training.stage), outcome)
            return stage_outcome_to_json(outcome)

        return stage_outcome_from_json(self.ranks.from_leader("outcome", written))


@contextmanager
def trained_split(
    paths: RunPaths,
    config: RunConfig,
    training: SplitTraining,
    *,
    metric_log: MetricSink,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> Iterator[TrainedSplit]:
    """Train, going on from what an earlier attempt saved; a finished training is only read back.

    Args:
        paths: the run.
        config: its resolved parameters.
        training: what to train.
        metric_log: gets the phases train and validation.
        memory: told at every step where the training is.
        stop: asked at every step boundary.
        progress: called with (steps done, steps planned).
        ranks: of which this process is one; None: this one alone.

    Raises:
        StoppedError: ``stop`` said so; everything is saved (exit code 75).
        CheckpointMismatchError: what was saved belongs to other parameters or data.
        UsageError: the requested device is not there.
        MemoryExhaustedError, CheckpointWriteError, RankLostError: as ``fold_training.train_fold``.
    """
    ranks = ranks or Ranks()
    asked = stop is not None and stop()
    if any(wish for (wish,) in ranks.meet("begin", asked)):
        raise StoppedError("stopped as asked before training: resume with run_notebooks.py --resume latest.")
    compute = resolve_device(config.device, config.amp)
    _logger.info("%s on %s", training.stage, compute.describe())
    with training_memory(paths, config, training.stage, None, compute, memory, ranks.rank) as kept:
        settings, predicted = _planned(paths, config, training, compute, kept, ranks)
        started = time.monotonic()
        engine = Engine(
            training.task,
            settings,
            compute,
            CheckpointFolder(
                paths.stage_training(training.stage),
                CheckpointBinding(dict(training.parameters), training.data_fingerprint),
                keep_last=config.keep_checkpoints,
            ),
            metric_log,
            policy=kept.policy,
            memory=kept.observer,
            oom_folder=kept.oom_folder,
            stop=stop,
            progress=progress,
            ranks=ranks,
        )
        state = engine.fit()
        seconds = time.monotonic() - started
        yield TrainedSplit(training, engine, state, ranks, compute, paths, predicted, seconds)


def train_stage_on_ranks(
    paths: RunPaths,
    config: RunConfig,
    stage: str,
    *,
    metric_log: MetricSink,
    attempt: int = 1,
    memory: MemoryObserver | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> StageOutcome:
    """The training of ``stage`` on ``config.num_ranks`` processes; see ``training_on_ranks.on_ranks``."""
    train_on_ranks(paths, config, stage, None, attempt=attempt, memory=memory, stop=stop, progress=progress)
    written = read_stage_outcome(paths.stage_outcome(stage))
    if written is None:
        raise RankLostError(f"the ranks ended and left no outcome; {paths.logs} says why.")
    return written


def train_on_ranks(
    paths: RunPaths,
    config: RunConfig,
    stage: str,
    fold: int | None,
    *,
    attempt: int,
    memory: MemoryObserver | None,
    stop: Callable[[], bool] | None,
    progress: Progress | None,
) -> None:
    """The training on ``config.num_ranks`` processes."""
    run_ranks(
        "fvc_lib.tasks.rank",
        [str(paths.root), "--stage", stage, *([] if fold is None else ["--fold", str(fold)])],
        config,
        paths.logs / f"{stage_key(stage, fold)}_ranks.log",
        attempt=attempt,
        memory=memory or NoObserver(),
        stop=stop,
        progress=progress,
    )


def split_settings(
    config: RunConfig, stage: str, default_micro_batch: int, *, balance_classes: bool = False
) -> EngineSettings:
    """The engine's share of ``config`` for the training of ``stage``."""
    seed = stable_seed(stage, config.seed)
    return settings_of(config, seed=seed, micro_batch=default_micro_batch, balance_classes=balance_classes)


def _planned(
    paths: RunPaths,
    config: RunConfig,
    training: SplitTraining,
    compute: ComputeDevice,
    kept: TrainingMemory,
    ranks: Ranks,
) -> tuple[EngineSettings, int | None]:
    """The settings with a micro-batch that memory is planned for, and the peak that plan predicts."""
    micro_batch, predicted = ranks.from_leader(
        "preflight",
        lambda: planned_micro_batch(
            paths, config, training.task, training.settings, compute, kept.observer, num_ranks=ranks.size
        ),
    )
    return replace(training.settings, micro_batch=micro_batch), predicted


def _record(state: TrainingState, seconds: float) -> TrainingRecord:
    return TrainingRecord(
        history=tuple(state.history),
        best_epoch=state.best_epoch,
        steps=state.step,
        nonfinite_steps=state.nonfinite_steps,
        micro_batch=state.micro_batch,
        micro_batch_schedule=tuple(state.micro_batches.changes),
        inexact_because=tuple(state.inexact_because),
        seconds=seconds,
    )


def _num_parameters(task: Task) -> int:
    with forked_random_state(0, torch.device("cpu")):
        return sum(parameter.numel() for parameter in task.build_model().parameters() if parameter.requires_grad)
