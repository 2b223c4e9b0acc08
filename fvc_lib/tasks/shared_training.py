"""The recipe (the fixed order of steps) of every training: of one outer fold, or of a stage without folds.

The steps: read the data, plan memory, train the network and its controls, score the test part once, write the results.
A control is a training without real knowledge, such as one on shuffled labels. A stage is one notebook of a run. A
task, such as ``video`` or ``image``, provides its part as a ``Training``. One process trains, or several ranks
(processes that share every batch) do.
"""

import copy
import inspect
import logging
import os
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Generic, Self, TypedDict, TypeVar, Unpack, cast

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from fvc_lib.detectors.network import Trunk, loaded_weights_of
from fvc_lib.engine.device import ComputeDevice, peak_device_bytes, resolve_device
from fvc_lib.engine.loading import batches_per_epoch
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.preflight import planned_micro_batch, training_memory
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.rank_processes import Launch, run_ranks
from fvc_lib.engine.ranks import RankEndedError, Ranks
from fvc_lib.engine.task import Accumulator, Batch, LossSum, SampleSet, Task
from fvc_lib.engine.training_state import NAN_AS_TEXT, MetricSink, TrainingRecord, TrainingState
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.checkpoint_files import (
    CheckpointBinding,
    CheckpointFolder,
    CheckpointMismatchError,
    other_network,
    weights_digest,
)
from fvc_lib.services.code_versions import functions_in, in_words
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory import MemoryObserver, NoObserver, peak_rss_bytes
from fvc_lib.services.records.digests import read_document, undamaged_content, write_document
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths, stage_key
from fvc_lib.services.stage_logs import Report, not_reported
from fvc_lib.services.tasks import FOLD_TRAINING, REAL_SOURCES, SHUFFLED_LABELS

R = TypeVar("R", bound=TrainingRecord)
_logger = logging.getLogger(__name__)
_USER_FILE = re.compile(r"fvc_user_(\w+)_[0-9a-f]{16}")  # a user's module; the hash of its folder is ignored
OUTCOME, LOOP = "outcome.json", "loop.json"  # in a training's folder
MAX_GRADIENT_NORM = 1.0  # gradients are clipped to this L2 norm


@dataclass(frozen=True)
class TrainedClass:
    """The class, code and initial weights of a network that is trained.

    Attributes:
        name: module and name of the class.
        file: source file of the class; empty if it is not known.
        code: hex SHA-256 of its functions outside of FVC and torch (``own_code``); empty without such functions.
        num_parameters: number of parameters that are trained at any time.
        num_frozen: number of parameters that are never trained.
        weights: path and digest of the published weights that the network began with; empty: random weights.
        weights_licence: licence of these weights.
        notes: differences from the published network; for a class in a user's file, the file and its licence.
        functions: digests of the functions by name (``functions_of``), which show what code has changed.
    """

    name: str
    file: str = ""
    code: str = ""
    num_parameters: int = 0
    num_frozen: int = 0
    weights: str = ""
    weights_licence: str = ""
    notes: tuple[str, ...] = ()
    functions: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, str]:
        """The attributes ``name``, ``file`` and ``code``, which checkpoints store and ranks compare."""
        return {"name": self.name, "file": self.file, "code": self.code}

    @classmethod
    def of(cls, task: Task, model_name: str = "") -> Self:
        """Build the network of ``task``, and return the description of its class, code and initial weights.

        ``model_name`` is the model's name in the configuration, which may name a user's file.
        """
        with forked_random_state(0, torch.device("cpu")):
            model = task.build_model()
        kind = type(model)
        functions = functions_of(model)
        loaded = loaded_weights_of(model)
        files = [item.__code__.co_filename for item in vars(kind).values() if inspect.isfunction(item)]
        notes = [note for part in model.modules() if isinstance(part, Trunk) for note in part.notes]
        if DETECTORS.file_of(model_name):
            licence = DETECTORS.get(model_name).licence
            notes.insert(0, f"the network is {DETECTORS.identity(model_name)}, licence: {licence}")
        num_all = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return cls(
            name=f"{kind.__module__}.{kind.__qualname__}",
            file=files[0] if files else "",
            code=own_code(functions),
            num_parameters=trained,
            num_frozen=num_all - trained,
            weights=f"{loaded.source} (SHA-256 {loaded.sha256})" if loaded else "",
            weights_licence=loaded.licence if loaded else "",
            notes=tuple(notes),
            functions=functions,
        )

    def facts(self) -> str:
        """Return a text with the initial weights, the number of frozen parameters and the notes; may be empty."""
        facts = [f"weights from {self.weights}, licence: {self.weights_licence}"] if self.weights else []
        if self.num_frozen:
            facts.append(f"{self.num_frozen:,} parameters are frozen")
        return "; ".join([*facts, *self.notes])


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome(Generic[R]):
    """The record of one finished training.

    Its file ``outcome.json`` is written last, so it marks the training as finished. Nothing in it was chosen on the
    test part.

    Attributes:
        stage: name of the notebook, such as ``04_fold_training``.
        fold: number of the outer fold; None if the stage has no folds.
        model: name of the model in the configuration.
        num_parameters: number of parameters that are trained at any time.
        device: description of the device.
        num_train, num_validation, num_test: number of videos, pictures or pairs in each part.
        num_train_samples: number of training samples, augmented copies included.
        missing: ids of videos that were left out because they have no clip.
        training: the record of the model's training.
        control: the record of the shuffled-label control (the same training on shuffled labels); None: turned off.
        sources: the record of the real-source control (a model that learns which of two sources a real video comes
            from, instead of labels); None: turned off or not possible.
        predicted_peak_bytes: memory peak predicted before the training; None: no prediction was made.
        peak_rss_bytes: largest resident memory of the process; the maximum over several ranks.
        peak_device_bytes: largest memory on the accelerator; None on the CPU.
        fingerprint: digest of parameters and data (``Training.fingerprint``).
        num_ranks: number of ranks (processes) in the attempt that finished the training.
        finished_utc: end of the training, ISO 8601.
        network: the class that was trained.
        train_anew: command that repeats the training. It is set only if an earlier call finished the training, and it
            is not written to the file.
    """

    __pydantic_config__ = NAN_AS_TEXT

    stage: str = FOLD_TRAINING
    fold: int | None = None
    model: str
    num_parameters: int
    device: str
    num_train: int
    num_validation: int
    num_test: int
    num_train_samples: int = 0
    missing: tuple[str, ...] = ()
    training: R
    control: R | None = None
    sources: R | None = None
    predicted_peak_bytes: int | None
    peak_rss_bytes: int
    peak_device_bytes: int | None
    fingerprint: str
    num_ranks: int = 1
    finished_utc: str = ""
    network: TrainedClass
    train_anew: Annotated[str, Field(exclude=True)] = field(default="", compare=False)

    def sentence(self) -> str:
        """Return a text on the network, its size, device and duration, and whether it was trained now or earlier."""
        kind = self.network.name.rpartition(".")[2]
        done = self.training
        text = (
            f"{self.model} ({kind}), {self.num_parameters:,} parameters, on {self.device}, ranks: {self.num_ranks}; "
            f"{done.steps} steps in {done.seconds:.1f} s; {self.network.facts()}"
        ).rstrip("; ")
        if self.train_anew:
            text += f". A stored result of {self.finished_utc}; nothing was trained now. Train again: {self.train_anew}"
        return text


def outcome_to_json(outcome: TrainingOutcome[Any]) -> str:
    """Return ``outcome`` as JSON text, the content of ``outcome.json``."""
    adapter = TypeAdapter(cast(Any, TrainingOutcome)[type(outcome.training)])
    return adapter.dump_json(outcome, indent=2, ensure_ascii=True).decode() + "\n"


def outcome_from_json(text: str | bytes, record: type[R]) -> TrainingOutcome[R]:
    """Return the training outcome in the JSON text ``text``, which ``outcome_to_json`` wrote.

    ``record`` is the class of the training records in it, ``TrainingRecord`` or a subclass.
    """
    outcome: TrainingOutcome[R] = TypeAdapter(cast(Any, TrainingOutcome)[record]).validate_json(text)
    return outcome


def read_outcome(path: Path, record: type[R]) -> TrainingOutcome[R] | None:
    """Return the outcome in the file ``path``; None if the file is missing or has a format that cannot be read.

    Args:
        path: the file ``outcome.json`` of a training.
        record: class of the records in it.

    Raises:
        DataError: the digest of the file differs from the one recorded for its stage.
    """
    try:
        return outcome_from_json(undamaged_content(path), record)
    except (OSError, ValidationError):
        return None


@dataclass(frozen=True)
class Network:
    """One network to train: the model, a control (a training without real knowledge), or a network for calibration.

    Attributes:
        task: data, network and loss.
        data_fingerprint: digest of the samples of each part and of their targets.
        name: name of the network's folder and of its phases in the metric log. It is the name of the control
            (``tasks.CONTROL_TRAININGS``), and empty for the model.
    """

    task: Task
    data_fingerprint: str
    name: str = ""


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network whose test part is not scored yet.

    Attributes:
        network: the network's task and data.
        engine: the engine that trained it.
        state: the final state of the training, with the best epoch's weights.
        checkpoints: folder of its checkpoints.
        metrics: the log of its metrics.
        ranks: the processes that trained it together.
        seconds: duration of the training.
    """

    network: Network
    engine: Engine
    state: TrainingState
    checkpoints: Path
    metrics: MetricSink
    ranks: Ranks
    seconds: float

    def predict(self, data: SampleSet, accumulator: Accumulator) -> None:
        """Compute the outputs of the best epoch's model for the samples ``data``, and add them to ``accumulator``.

        Samples are taken once and in order. Afterwards every rank has the outputs of all samples.
        """
        gathered = copy.deepcopy(accumulator)  # only rank 0 gets the outputs of all samples here
        self.engine.predict(data, self.state.best_model, gathered)
        accumulator.add_document(self.ranks.from_leader("predicted", gathered.to_document))

    def log(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Log ``metrics`` (values by name) of the best epoch's model under the phase ``phase``, such as ``test``."""
        self.metrics.log(step=self.state.step, epoch=self.state.best_epoch, phase=phase, metrics=metrics)

    def record(self) -> dict[str, Any]:
        """Return the facts of the training as keyword arguments for ``TrainingRecord`` or a subclass."""
        state = self.state
        return {
            "history": tuple(state.history),
            "best_epoch": state.best_epoch,
            "steps": state.step,
            "nonfinite_steps": state.nonfinite_steps,
            "micro_batch": state.micro_batch,
            "micro_batch_schedule": tuple(state.micro_batches.changes),
            "inexact_because": tuple(state.inexact_because),
            "seconds": self.seconds,
            "initial_weights": self.engine.initial_weights,
            "best_weights": weights_digest(state.best_model),
        }


@dataclass(frozen=True)
class Finished(Generic[R]):
    """The result of ``Training.finish``, the final scoring of a task after its training.

    Attributes:
        records: the records of the model (key: empty text) and of its controls, by name.
        write: function that writes the result tables.
        kind: the class of a model that is fitted without training steps; None: the class of ``Training.networks``.
    """

    records: Mapping[str, R]
    write: Callable[[], None] = lambda: None
    kind: TrainedClass | None = None


@dataclass(frozen=True, kw_only=True)
class Training(Generic[R]):
    """The part of a training that a task provides: its networks, settings and final scoring.

    Attributes:
        stage: name of the notebook, which is part of file names.
        fold: number of the outer fold; None where the stage has no folds.
        model_name: name of the model in the configuration, for the record.
        settings: settings of the engine.
        parameters: JSON values that the weights depend on; a checkpoint with other values is refused.
        networks: the model first, then its controls, and networks that serve only to calibrate the model or a control.
        sizes: fields of the outcome: ``num_train num_validation num_test``, optionally ``num_train_samples missing``.
        finish: called on every rank after the training. It makes choices such as the threshold, scores the test part
            once, and returns the records and a function that writes the tables. The default returns no records: it
            suffices for a training that is planned but not run.
        outputs: files that ``finish`` writes; a training is finished when its outcome and these files exist.
        data_fingerprint: digest of samples and targets, for a model without training steps. Such a model has no
            ``networks``: ``finish`` fits it. Empty: the digest is in ``networks``.
    """

    stage: str
    fold: int | None = None
    model_name: str
    settings: EngineSettings
    parameters: Mapping[str, Any] = field(default_factory=dict)
    networks: Sequence[Network] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Sequence[TrainedNetwork]], Finished[R]] = lambda _trained: Finished({})
    outputs: Sequence[Path] = ()
    data_fingerprint: str = ""

    @property
    def task(self) -> Task:
        """The task (data, network and loss) of the model; controls have tasks of their own in ``networks``."""
        return self.networks[0].task

    @property
    def fingerprint(self) -> str:
        """A digest of the parameters and of the samples that the model is trained and tested on.

        A stored outcome is used again only if it has the same digest.
        """
        data = self.data_fingerprint or self.networks[0].data_fingerprint
        return sha256_of_json([dict(self.parameters), data])


class TrainingOptions(TypedDict, total=False):
    """Optional keyword arguments of every task's training function, such as the metric log and the ranks.

    ``OpenTraining`` explains them.
    """

    metric_log: MetricSink
    attempt: int
    memory: MemoryObserver | None
    stop: Callable[[], bool] | None
    progress: Report | None
    ranks: Ranks | None
    begun_with: Mapping[str, str] | None
    cell: str


def train(
    stage: str,
    fold: int | None,
    paths: RunPaths,
    config: RunConfig,
    read: Callable[[Ranks], Training[R]],
    record: type[R],
    **options: Unpack[TrainingOptions],
) -> TrainingOutcome[R]:
    """Train the networks of ``stage`` to the end, score the test part, and return the outcome (the training's record).

    An earlier attempt is continued from its checkpoint. A training that is finished already is not repeated: its stored
    outcome is returned. ``OpenTraining`` explains the arguments and the errors.
    """
    return OpenTraining(stage, fold, paths, config, read, record, **options).run()


class OpenTraining(Generic[R]):
    """A training whose loop over the batches the caller writes, so that the caller may change the loss.

        for network, batch in training.batches():
            loss = training.loss(network, batch)
            training.step(loss)
        outcome = training.finish()

    The function ``train`` runs exactly this loop. The same loop trains the model and its controls, so an edit of the
    loop affects the controls as well. An interrupted loop goes on from its last checkpoint when it is run again.

    ``batches`` yields nothing if the outcome is stored already, or if the model is fitted without steps. It also yields
    nothing if ``config.num_ranks`` is above 1 and ``ranks`` is None: then ``finish`` starts the ranks and waits for
    them.

    Attributes:
        route: a sentence on what the loop does.

    Args:
        stage: name of the notebook.
        fold: number of the outer fold; None where the stage has no folds.
        paths: paths of the run.
        config: resolved parameters of the run.
        read: function that reads the data and returns the ``Training``: networks, settings and final scoring. Its
            argument is the group of ranks.
        record: class of the records in the outcome, ``TrainingRecord`` or a subclass.
        metric_log: gets the phases train, validation and test; a control is logged under its name. With several ranks
            rank 0 writes the run's metric log instead.
        attempt: number of this attempt, for logs.
        memory: notified of the training's position at every step.
        stop: called at every step boundary; returns True to stop.
        progress: called with (steps done, steps planned), summed over all networks.
        ranks: the group of ranks that this process belongs to; None: this process is not a rank.
        begun_with: class and code of the network (``TrainedClass.identity``) in the process that started this rank. If
            this rank would train another class or code, that is an error. None: not checked.
        cell: text of the notebook's cell with the loop. If it or the network's code differs from an earlier training
            in the run, that training's files and metrics move to ``superseded``, and the training begins from the
            start. Empty: the loop is that of ``train``.

    Raises:
        DataError: data are missing, or too few for the training or its evaluation.
        CheckpointMismatchError: a checkpoint belongs to other parameters, data, or another network.
        UsageError: the requested device does not exist, or ranks would train another network than their starter.
    """

    def __init__(
        self,
        stage: str,
        fold: int | None,
        paths: RunPaths,
        config: RunConfig,
        read: Callable[[Ranks], Training[R]],
        record: type[R],
        *,
        metric_log: MetricSink,
        attempt: int = 1,
        memory: MemoryObserver | None = None,
        stop: Callable[[], bool] | None = None,
        progress: Report | None = None,
        ranks: Ranks | None = None,
        begun_with: Mapping[str, str] | None = None,
        cell: str = "",
    ) -> None:
        self._paths, self._config, self._record, self._log, self._attempt = paths, config, record, metric_log, attempt
        self._memory, self._stop, self._progress, self._ranks = memory, stop, progress, ranks or Ranks()
        self._folder = paths.training_checkpoints(stage, fold)
        self._trained: list[TrainedNetwork] = []
        self._open = ExitStack()  # closed when the test part is scored
        self._compute: ComputeDevice | None = None  # None until batches are computed
        self._predicted: int | None = None
        self._found = ""
        training = self._training = read(self._ranks)
        kind = self._kind = TrainedClass(training.model_name)
        if training.networks:
            kind = self._kind = TrainedClass.of(training.task, training.model_name)
        self._anew = command_text("--force", stage.partition("_")[0], "--resume", paths.root)
        if begun_with and begun_with != kind.identity:
            raise UsageError(
                f"num_ranks {self._ranks.size}: the ranks would train {kind.identity}, and the notebook that began "
                f"them has {begun_with}. They know what is in files alone: put it into one, give it as -p model "
                "my_net.py:MyNet, and restart the notebook; or train with num_ranks 1."
            )
        self._starts_ranks = ranks is None and config.num_ranks > 1 and bool(training.networks)
        if self._starts_ranks:
            self.route = f"{config.num_ranks} ranks train with the loop of the library: the loop here is not used."
            return
        if cell and training.networks:
            inputs = {"loop": functions_in(cell), "network": [kind.name, kind.code]}
            self._note_loop(inputs, paths.metrics(stage, fold))
        self._found = self._ranks.from_leader("outcome", self._stored)
        names = ", ".join(network.name or "the model" for network in training.networks)
        self.route = f"This loop trains, one after another: {names}."
        if not training.networks:
            self.route = f"{training.model_name} has no steps: it is fitted below, and the loop has nothing to do."
        elif self._found:
            self.route = "The training is finished, so the loop has nothing to do. An edit of its cell trains again."

    def _note_loop(self, inputs: Mapping[str, Any], log: Path) -> None:
        """Store ``inputs``, and move the files of an earlier training with other inputs to a superseded folder.

        ``inputs`` describe the code of the loop and of the network. The metric log in the file ``log`` is moved too:
        its lines are copied and then deleted, because its writer may have opened the file already.
        """
        known = read_document(self._folder / LOOP)
        if known and known != inputs:
            aside = self._paths.next_superseded()
            old_log, old_folder = (aside / path.relative_to(self._paths.root) for path in (log, self._folder))
            old_folder.parent.mkdir(parents=True)
            if log.exists():
                old_log.parent.mkdir()
                shutil.copy2(log, old_log)
                os.truncate(log, 0)
            self._folder.rename(old_folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_document(self._folder / LOOP, dict(inputs))

    def _stored(self) -> str:
        """Return the stored outcome of this training as JSON text; empty if the training is not finished.

        Raises:
            CheckpointMismatchError: the stored outcome belongs to another network.
        """
        file = self._folder / OUTCOME
        kind = self._kind
        training = self._training
        outcome = read_outcome(file, self._record)
        if outcome is None or outcome.fingerprint != training.fingerprint:
            return ""
        if training.networks and (outcome.network.name, outcome.network.code) != (kind.name, kind.code):
            what = f"the stored result {str(file)!r}"
            raise CheckpointMismatchError(other_network(what, outcome.network.identity, kind.identity, self._anew))
        return outcome_to_json(outcome) if all(map(Path.exists, training.outputs)) else ""

    def batches(self) -> Generator[tuple[nn.Module, Batch]]:
        """Yield (network, batch) for every batch of every network, in the order of the training.

        The caller calls ``step`` once for every pair. A batch has the samples that are in memory at once; several
        batches may form one effective batch. The optimizer makes a step after each effective batch. The validation part
        is scored after the last batch of an epoch.

        Raises:
            StoppedError: ``stop`` returned True; everything is saved (exit code 75).
            MemoryExhaustedError: one sample alone, or the optimizer's step, does not fit into memory.
            CheckpointMismatchError: a checkpoint belongs to other parameters, data, or another network.
            CheckpointWriteError: the disk is full or read-only.
            RankLostError: the node of one of several ranks was lost.
        """
        training = self._training
        if self._found or self._starts_ranks or not training.networks:
            return
        config = self._config
        ranks = self._ranks
        kind = self._kind
        progress = self._progress or not_reported  # of all networks together
        if not ranks.rank:  # the stage's checkpoint lists files that are overwritten from here on
            self._paths.stage_checkpoint(training.stage, training.fold).unlink(missing_ok=True)
        compute = self._compute = resolve_device(config.device, config.amp)
        key = stage_key(training.stage, training.fold)
        _logger.info("%s, attempt %d, on %s", key, self._attempt, compute.describe())
        self._trained.clear()
        with ExitStack() as opened:
            observer = opened.enter_context(training_memory(compute, self._memory))
            micro_batch, self._predicted = ranks.from_leader(
                "preflight",
                lambda: planned_micro_batch(
                    config, training.task, training.settings, compute, observer, num_ranks=ranks.size, stop=self._stop
                ),
            )
            settings = replace(training.settings, micro_batch=micro_batch)
            sizes = [len(network.task.training_data) for network in training.networks]
            steps = [settings.epochs * batches_per_epoch(size, settings.effective_batch_size) for size in sizes]
            for number, network in enumerate(training.networks):
                started, name = time.monotonic(), network.name
                metrics = ControlLog(self._log, name) if name else self._log
                binding = CheckpointBinding(dict(training.parameters), network.data_fingerprint, kind.identity)
                checkpoints = CheckpointFolder(self._folder / name, binding, anew=self._anew)
                report = partial(lambda before, done, _: progress(before + done, sum(steps)), sum(steps[:number]))
                engine = self._engine = Engine(
                    network.task,
                    settings,
                    compute,
                    checkpoints,
                    metrics,
                    memory=observer,
                    name=name,
                    stop=self._stop,
                    progress=report,
                    ranks=ranks,
                )
                yield from engine.batches()
                seconds = time.monotonic() - started
                trained = TrainedNetwork(network, engine, engine.state, self._folder / name, metrics, ranks, seconds)
                self._trained.append(trained)
            self._open = opened.pop_all()

    def loss(self, network: nn.Module, batch: Batch) -> LossSum:
        """Return the task's loss of a batch. The caller may multiply it by a number or add a scalar to it.

        If memory runs out here or in ``step``, the loss is NaN, and the effective batch begins again with half as many
        samples at once. This does not help a loss that the caller computes: it must fit into memory.
        """
        return self._engine.transaction.loss(network, batch)

    def step(self, loss: LossSum | Tensor) -> None:
        """Compute the gradients of the loss of one batch.

        ``loss`` is the result of the method ``loss``, or a scalar tensor that is the mean loss of the samples. The
        optimizer's step follows when the loop goes on. The metric log has the norm of the gradients before clipping, as
        ``gradient_norm`` of the phase ``train``.
        """
        self._engine.transaction.step(loss)

    def run(self) -> TrainingOutcome[R]:
        """Train to the end with the task's own loss, score the test part, and return the outcome.

        The methods ``batches`` and ``finish`` list the errors that may be raised.
        """
        for network, batch in self.batches():
            self.step(self.loss(network, batch))
        return self.finish()

    def finish(self) -> TrainingOutcome[R]:
        """Choose epoch, temperature and threshold, score the test part once, and write and return the outcome.

        The loop over ``batches`` must have ended.

        Raises:
            UsageError: the loop has not come to its end.
            RankEndedError: one of several ranks was killed.
            FvcError: another error that ``batches`` lists.
        """
        if self._starts_ranks:
            return self._of_ranks()
        if self._found:
            return replace(outcome_from_json(self._found, self._record), train_anew=self._anew)
        training = self._training
        ranks = self._ranks
        if len(self._trained) < len(training.networks):
            raise UsageError("the training has not come to its end: run the loop again, it goes on where it was saved.")
        with self._open:
            done = training.finish(self._trained)
        peaks = ranks.meet("peaks", peak_rss_bytes())
        kind, compute = done.kind or self._kind, self._compute

        def write() -> str:
            done.write()
            outcome = TrainingOutcome(
                stage=training.stage,
                fold=training.fold,
                model=training.model_name,
                num_parameters=kind.num_parameters,
                device=compute.describe() if compute else "cpu",
                training=done.records[""],
                control=done.records.get(SHUFFLED_LABELS),
                sources=done.records.get(REAL_SOURCES),
                predicted_peak_bytes=self._predicted,
                peak_rss_bytes=int(max(peaks)[0]),
                peak_device_bytes=peak_device_bytes(compute.device) if compute else None,
                fingerprint=training.fingerprint,
                num_ranks=ranks.size,
                finished_utc=datetime.now(UTC).isoformat(timespec="seconds"),
                network=kind,
                **{"num_train_samples": training.sizes["num_train"], **training.sizes},
            )
            text = outcome_to_json(outcome)
            write_text(self._folder / OUTCOME, text)
            return text

        outcome = outcome_from_json(ranks.from_leader("outcome", write), self._record)
        for one in self._trained:
            one.engine.keep_result()
        return outcome

    def _of_ranks(self) -> TrainingOutcome[R]:
        """Start the ranks, wait for them, and return the outcome that they wrote."""
        paths = self._paths
        stage = self._training.stage
        fold = self._training.fold
        arguments = [str(paths.root), "--stage", stage, *([] if fold is None else ["--fold", str(fold)])]
        log = paths.logs / f"{stage_key(stage, fold)}_ranks.log"
        # The identity is of this process, where a notebook cell may have redefined the network.
        launch = Launch(self._config.model_dump_json(), str(log), self._attempt, self._kind.identity)
        run_ranks(
            "fvc_lib.tasks.rank", arguments, self._config.num_ranks, launch,
            memory=self._memory or NoObserver(), stop=self._stop, progress=self._progress or not_reported,
        )  # fmt: skip
        written = read_outcome(self._folder / OUTCOME, self._record)
        if written is None:
            raise RankEndedError(f"the ranks ended and left no outcome; {log} says why.")
        return written


@dataclass(frozen=True)
class ControlLog:
    """A metric log for a control (a training without real knowledge), which writes to the model's log ``metrics``.

    There the control's ``name`` is the phase, and a metric is called ``<phase>_<metric>``, such as ``train_loss``.
    """

    metrics: MetricSink
    name: str

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Log ``metrics``, renamed to ``<phase>_<metric>``, under the control's name as phase."""
        renamed = {f"{phase}_{name}": value for name, value in metrics.items()}
        self.metrics.log(step=step, epoch=epoch, phase=self.name, metrics=renamed)


def settings_of(config: RunConfig, seed: int, default_micro_batch: int) -> EngineSettings:
    """Return the settings of the training engine, such as learning rate and batch size, from the configuration.

    Args:
        config: resolved parameters.
        seed: seed of the training.
        default_micro_batch: size of a micro-batch where ``batch_size`` is 0.
    """
    return EngineSettings(
        epochs=config.epochs,
        effective_batch_size=config.effective_batch_size,
        micro_batch=config.batch_size or default_micro_batch,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_share=config.warmup_share,
        max_gradient_norm=MAX_GRADIENT_NORM,
        early_stopping_epochs=config.early_stopping_epochs,
        seed=seed,
        num_workers=min(config.num_workers, available_cores()),
        checkpoint_seconds=60 * config.checkpoint_minutes,
        gradient_checkpointing=config.gradient_checkpointing,
    )


# Digests of the functions of a network's classes. Docstrings, comments and installed packages do not count.


def functions_of(network: nn.Module) -> dict[str, str]:
    """Return the digest of every function in the network's classes and their base classes, by dotted name.

    A digest is a part of a SHA-256 of the code, without docstrings and comments. Functions of installed packages are
    left out.
    """
    found = {}
    for kind in {base for part in network.modules() for base in type(part).__mro__}:
        module = _USER_FILE.sub(r"\1", kind.__module__)
        for name, function in vars(kind).items():
            if inspect.isfunction(function) and "site-packages" not in function.__code__.co_filename:
                found[f"{module}.{kind.__qualname__}.{name}"] = _digest(function)
    return dict(sorted(found.items()))


def own_code(functions: Mapping[str, str]) -> str:
    """Return one digest of the user's own code in a network: all functions outside of FVC and torch.

    Such code is in a user's file or a notebook cell. It is an input of a training: a change of it leads to a new
    training. The digest is empty without such functions.

    Args:
        functions: digests by dotted name (``functions_of``).
    """
    own = {name: digest for name, digest in functions.items() if not name.startswith(("fvc_lib.", "torch."))}
    return sha256_of_json(own) if own else ""


def changed_functions(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a text with the names of the first few functions whose digests differ; empty if all are equal.

    Args:
        then: digests by dotted name at the training (``functions_of``). Empty: not known, and the text is empty.
        now: digests by dotted name of the present code.
    """
    return in_words(name for name in {*then, *now} if then.get(name) != now.get(name)) if then else ""


def _digest(function: FunctionType) -> str:
    try:
        source = inspect.getsource(function)
    except OSError:  # the function's source is in no file
        source = function.__code__.co_code.hex()
    return sha256_of_json(functions_in(textwrap.dedent(source)))[:16]
