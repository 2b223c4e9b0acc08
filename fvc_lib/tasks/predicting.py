"""Predictors: trained models, of any task, that make predictions for new files such as videos.

A predictor is loaded from a finished run, an ensemble or a bundle (an exported folder that needs no run). Every task
has its own class of predictors, which ``TaskSpec.predictor`` names. ``predictor_of`` loads the predictor of a run or an
ensemble. ``tasks/bundle.py`` loads the predictor of a bundle.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import polars as pl
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from fvc_lib.corpus.corpus_files import Kind
from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.engine.device import Precision, deterministic_algorithms, resolve_device
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.checkpoint_files import BEST, load_weights, weights_digest
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.run_paths import RunPaths, is_ensemble
from fvc_lib.services.tables import KNOWN_FILES, TableSchema, read_table, write_table
from fvc_lib.services.tasks import DEFAULT_TASK, FINAL_TRAINING, TASKS
from fvc_lib.tasks.decoding import DecodedFile, scratch_folder
from fvc_lib.tasks.shared_training import (
    OUTCOME,
    TrainedClass,
    TrainingOutcome,
    changed_functions,
    functions_of,
    own_code,
    read_outcome,
)
from fvc_lib.video.clips.store import Pixels

Record = TypeVar("Record", bound=TrainingRecord)
KNOWN = "known_files.parquet"
PART_SENTENCES = {
    "train": "The run was trained on this very file: it may know it by heart, and the answer shows nothing.",
    "validation": "A file of the run: its epoch was chosen on it.",
    "test": "A file of the run's test part: not trained on, and already counted in its results.",
}


class Strict(BaseModel):
    """Base class of records that refuse unknown fields and values of a wrong type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ScoreRecord(Strict):
    """One metric on the test videos, of the model or of a control (a predictor without real knowledge).

    Attributes:
        source: ``model``, or the name of the control.
        metric: name of the metric.
        value: the metric; None if it is undefined.
        low, high: ends of its interval; None if there is none.
    """

    source: str
    metric: str
    value: float | None
    low: float | None
    high: float | None


class Standing(Strict):
    """The result of comparing a model with its controls (predictors without real knowledge).

    Attributes:
        standing: the result in words: ``above control``; ``not above control``; ``not shown`` (a control is missing or
            too uncertain); ``no result`` (the model has no valid score); or ``not stated`` (nobody compared them).
        sentences: the result and its reasons, as sentences.
        scores: metrics of the model and of its controls.
    """

    standing: str
    sentences: list[str]
    scores: list[ScoreRecord]


NOT_STATED = Standing(standing="not stated", sentences=["Where it stands, the run's report says."], scores=[])


@dataclass(frozen=True)
class Finding:
    """The prediction for one file, or the reason why there is none.

    Attributes:
        path: absolute path, as tables store it (``path_to_text``).
        sha256: hex SHA-256 of the content; empty if it was not read.
        values: the predicted values by column name, one for each of ``Predictor.columns``; empty after a failure.
        title: the most important part of the prediction, as text.
        lines: the rest of the prediction, as lines of text.
        failure: the reason why there is no prediction; empty after success.
        lasts: whether another attempt would give the same result; False after a crash or a timeout.
    """

    path: str
    sha256: str = ""
    values: Mapping[str, str | float | None] = field(default_factory=dict)
    title: str = ""
    lines: tuple[str, ...] = ()
    failure: str = ""
    lasts: bool = True


@dataclass(frozen=True)
class Trained:
    """A description of one trained network on the disk, from which the network can be loaded.

    Attributes:
        name: name of the run, and of the fold if there is one, for messages.
        config: the run's configuration; its paths to initial weights are valid on this machine.
        weights: file of the best epoch's weights.
        digest: digest of these weights (``weights_digest``), as the training recorded it.
        network: the class and code of the network.
        remedy: a sentence on what to do about a damaged file.
        known: the part of each file of the run (``train``, ``validation`` or ``test``), by the SHA-256 of its content.
        standing: how the model compares with its controls.
    """

    name: str
    config: RunConfig
    weights: Path
    digest: str
    network: TrainedClass
    remedy: str
    known: Mapping[str, str] = field(default_factory=dict)
    standing: Standing = NOT_STATED

    def state(self) -> dict[str, torch.Tensor]:
        """Read the weights from the disk and return them by parameter name (the network's state dict).

        Raises:
            FvcError: the weights are damaged or come from another training.
        """
        state = load_weights(self.weights)
        if weights_digest(state) != self.digest:
            raise FvcError(f"{str(self.weights)!r}: is not what {self.name} was judged by. {self.remedy}")
        return state

    def built(self, build: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
        """Build the network and load these weights.

        Args:
            build: function that returns the network with any weights.

        Returns:
            ``(network, cautions)``: the network, on the CPU in evaluation mode, and a tuple of sentences. The tuple has
            one sentence if functions of the library have changed since the training; otherwise it is empty.

        Raises:
            UsageError: the user's code has changed since the training, or the weights do not fit the network.
            FvcError: the weights are damaged or come from another training.
        """
        state, kind = self.state(), self.network
        with forked_random_state(0, torch.device("cpu")):
            network = build().eval()
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise UsageError(f"{self.name}: its weights do not fit {kind.name}: {error}. {self.remedy}") from error
        functions = functions_of(network)
        changed = changed_functions(kind.functions, functions)
        if not changed:
            return network, ()
        if own_code(functions) != kind.code:
            raise UsageError(
                f"{self.name}: the code of {kind.name} has changed since its training ({changed}). Bring that code "
                "back, or train again."
            )
        return network, (f"The model was trained by other code than this version's. What differs: {changed}.",)


def finished_training(
    paths: RunPaths,
    config: RunConfig,
    stage: str,
    fold: int | None,
    record: type[Record],
    name: str,
) -> tuple[Trained, TrainingOutcome[Record]]:
    """Return the description of the trained network of a stage or fold, and the outcome (record) of its training.

    Args:
        paths: the run.
        config: its configuration.
        stage: name of the stage.
        fold: number of the outer fold; None where the stage has no folds.
        record: class of the records in the outcome.
        name: name of the network, for messages.

    Raises:
        UsageError: the training is not finished.
        DataError: its record is damaged.
    """
    folder = paths.training_checkpoints(stage, fold)
    outcome = read_outcome(folder / OUTCOME, record)
    if outcome is None:
        options = ("-p", "train_final", "true") if stage == FINAL_TRAINING else ()
        raise UsageError(
            f"{name} is not finished, so there is no network to ask. Name another run, or finish this one: "
            f"{command_text('--resume', paths.root, *options)}"
        )
    again = command_text("--force", stage.partition("_")[0], "--resume", paths.root)
    trained = Trained(
        name=name,
        config=config,
        weights=folder / BEST,
        digest=outcome.training.best_weights,
        network=outcome.network,
        remedy=f"Train it again: {again}",
    )
    return trained, outcome


class Predictor(ABC):
    """A trained model that makes predictions for new files.

    Each file goes through the network alone: its prediction does not depend on the other files. A subclass has the
    class methods ``of_run(paths, standing, final)`` and ``of_bundle(bundle)``, which load a predictor.

    Args:
        name: name of the run, ensemble or bundle.
        config: parameters of the run.
        trained: the trained networks. A key is the name, without ending, of the file of weights in a bundle.
        standing: how the model compares with its controls.

    Attributes:
        kind: kind of the files, such as ``video``.
        file_word: the word for one file, for messages.
        columns: types of the predicted values, by column name.
        cautions: sentences that warn of code or decoding that differs from the run's.
    """

    kind: ClassVar[Kind] = "video"
    file_word: ClassVar[str] = "video"
    columns: Mapping[str, pl.DataType]
    cautions: tuple[str, ...] = ()

    def __init__(self, name: str, config: RunConfig, trained: Mapping[str, Trained], standing: Standing) -> None:
        self.name, self.config, self.trained, self.standing = name, config, trained, standing
        self.compute = resolve_device(config.device, config.amp)

    @abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Write the predictor's own files to ``folder``, and return the task's section of ``bundle.json``.

        ``folder`` is the bundle that is being made. The class method ``of_bundle`` reads these files and this section.

        Raises:
            OSError: a file cannot be written.
        """

    def check(self) -> None:  # noqa: B027 - most networks are loaded at once
        """Load every network once, so that errors of ``Trained.built`` are raised before files are predicted.

        The default does nothing, because most predictors load their network when they are created.
        """

    @property
    @abstractmethod
    def decode_hash(self) -> str:
        """The hex SHA-256 of the code and the library that decode files."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that changes whenever anything changes that affects a prediction, such as weights or settings."""

    @abstractmethod
    def findings(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Any]:
        """Yield one finding (a prediction or a failure) per file, in any order.

        A file that cannot be decoded gives a failure and does not stop the others.

        Args:
            files: absolute paths without repeats.
            workers: number of processes that decode; 0: one per core.

        Raises:
            FvcError: the code that decodes was changed, or a network returns values that are not finite.
            OSError: the cache cannot be written.
        """


class OneNetwork(Predictor):
    """A predictor with a single network, for tasks without folds.

    Every file of the run belongs to one part: train, validation or test.

    Args:
        trained: the trained network.

    Attributes:
        files_of_run: schema of the run's table of files, with at least the columns ``content_sha256 part``; a file may
            have several rows. The schema's name is the name of the table.
        parts: content of further files that affect a prediction, such as labels, as a JSON value. It is a part of
            ``identity``.
        notes: sentences on the limits of the predictions.
    """

    files_of_run: ClassVar[TableSchema]
    parts: Any

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained.name, trained.config, {"network": trained}, trained.standing)
        self.known = trained.known
        self.notes = ["Files of the run are known again by their content alone: an altered copy of one is not."]

    @classmethod
    def of_run(cls, paths: RunPaths, standing: Standing, *, final: bool = False) -> Self:
        """Return the predictor of a finished run.

        Args:
            paths: paths of the run.
            standing: how the model compares with its controls.
            final: must be False; only task ``video`` has a network trained on all groups.

        Raises:
            UsageError: the run is not finished.
            FvcError: a file of the run is damaged.
        """
        refuse_damaged(paths.root, logs=False)
        config = run_config(paths.params_yaml)
        stage = TASKS[config.task].training_stage.name
        trained, _ = finished_training(paths, config, stage, None, TrainingRecord, paths.run_id)
        files = read_table(paths.tables / f"{cls.files_of_run.name}.parquet", cls.files_of_run)
        known = dict(files.select("content_sha256", "part").iter_rows())
        trained = replace(trained, known=known, standing=standing)
        return cls.read(trained, trained.weights.parent, files)

    @classmethod
    def of_bundle(cls, bundle: Any) -> Self:
        """Return the predictor of ``bundle``, an exported model folder that was opened with ``Bundle.open``.

        Raises:
            FvcError: the bundle has content that no export writes.
        """
        known = dict(read_table(bundle.folder / KNOWN, KNOWN_FILES).iter_rows())
        trained = bundle.trained("network", known=known, standing=bundle.record.standing)
        return cls.read(trained, bundle.folder, None)

    @classmethod
    @abstractmethod
    def read(cls, trained: Trained, folder: Path, files: pl.DataFrame | None) -> Self:
        """Read the further files of a trained network, such as its labels, and return its predictor.

        Args:
            trained: the trained network.
            folder: folder of the further files: the run's folder of checkpoints, or the bundle.
            files: the run's table of files; None for a bundle.

        Raises:
            FvcError: a file has content that no training or export writes.
        """

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the table of the run's files to ``folder``, and return an empty section for ``bundle.json``.

        Subclasses add the files that ``read`` needs.
        """
        known = pl.DataFrame(list(self.known.items()), schema=list(KNOWN_FILES.columns), orient="row")
        write_table(known.sort("content_sha256"), KNOWN_FILES, folder / KNOWN)
        return {}

    @property
    def identity(self) -> str:
        """A text that changes whenever anything changes that affects a prediction, such as weights or labels."""
        digest = self.trained["network"].digest
        more = [list(self.columns), self.decode_hash, self.parts]
        return f"{self.name}@{digest[:12]}:{sha256_of_json(more)[:16]}"

    def findings(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Finding]:
        """Yield one finding (a prediction or a failure) per file, in any order.

        Args:
            files: absolute paths without repeats.
            workers: number of processes that decode; 0: one per core.
        """
        with scratch_folder(self.config) as folder:
            targets = [folder / f"{place}.npy" for place in range(len(files))]
            with closing(self._decoded(files, targets, workers)) as answers:
                for probed, decoded in answers:
                    target = targets[decoded.position]
                    if probed.reason:
                        yield Finding(probed.path, failure=f"{probed.reason}: {probed.detail}", lasts=probed.lasts)
                    elif decoded.failure:
                        yield Finding(probed.path, probed.content_sha256, failure=decoded.failure)
                    else:
                        yield self._answer(probed, np.load(target))
                    target.unlink(missing_ok=True)

    @abstractmethod
    def _decoded(
        self, files: Sequence[Path], targets: Sequence[Path], workers: int
    ) -> Generator[tuple[ProbeResult, DecodedFile]]:
        """Decode N files, and yield (probe, decoded) for each of them, in any order.

        ``targets`` are the N array files (.npy) to write, in the order of ``files``. ``probe`` has facts of the file,
        such as its hash; ``decoded`` has its position in ``files`` and whether decoding failed.
        """

    @abstractmethod
    def _answer(self, probed: ProbeResult, decoded: Pixels) -> Finding:
        """Predict one decoded file, and return the finding (the prediction for the file).

        Args:
            probed: path and hash of the file.
            decoded: the pixels that ``_decoded`` wrote.

        Raises:
            DataError: an output of the network is not finite.
        """

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Run the body of a ``with`` statement without gradients, in the precision of the training.

        Only deterministic algorithms are used.
        """
        with torch.inference_mode(), deterministic_algorithms(self.compute.device), Precision(self.compute).autocast():
            yield

    def _build(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the network with trained weights, in evaluation mode on its device; add cautions on changed code.

        ``build`` returns the network with any weights. Errors are those of ``Trained.built``.
        """
        network, cautions = self.trained["network"].built(build)
        self.cautions += cautions
        return network.to(self.compute.device)


def predictor_class(task: str) -> Any:
    """Return the predictor class of ``task``, a subclass of ``Predictor``."""
    return getattr(import_module(f"fvc_lib.tasks.{task}.predicting"), TASKS[task].predictor)


def predictor_of(paths: RunPaths, standing: Standing = NOT_STATED, *, final: bool = False) -> Predictor:
    """Return the predictor of a finished run or of an ensemble, which makes predictions for new files.

    Args:
        paths: paths of the run or ensemble.
        standing: how the model compares with its controls.
        final: whether to use the network that was trained on all groups, instead of the networks of the folds.

    Raises:
        UsageError: the run is not finished, or has no network trained on all groups.
        FvcError: a file of the run is damaged.
    """
    task = run_config(paths.params_yaml).task
    if final and (task != DEFAULT_TASK or is_ensemble(paths.root)):
        raise UsageError(f"--final: is for single runs of task {DEFAULT_TASK}, unlike {paths.run_id}. Leave it out.")
    found: Predictor = predictor_class(task).of_run(paths, standing, final=final)
    return found
