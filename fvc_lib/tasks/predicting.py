"""What a finished training of a task without verdicts says of new files, whether its run is asked or a bundle of it.

A task has a class for that (``TaskSpec.predictor``), made of what a run left or of what a bundle holds; how the one
network of a finished training comes back is the same for all.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import polars as pl
import torch
from torch import nn

from fvc_lib.corpus.corpus_files import Kind
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.training_state import TrainingRecord, weights_digest
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import TASKS
from fvc_lib.tasks.bundle_folder import NOT_STATED, Standing
from fvc_lib.tasks.journal import BLOCK_FILES
from fvc_lib.tasks.network_code import changed_functions, functions_of, own_code
from fvc_lib.tasks.recipe import TrainedClass, TrainingOutcome, read_outcome
from fvc_lib.video.clips.clip_file import Pixels

_logger = logging.getLogger(__name__)

Value = str | float | None
PART_SENTENCES = {
    "train": "The run was trained on this very file: it may know it by heart, and the answer shows nothing.",
    "validation": "A file of the run: its epoch was chosen on it.",
    "test": "A file of the run's test part: not trained on, and already counted in its results.",
}


@dataclass(frozen=True)
class Finding:
    """What is said of one file, or the ``failure`` why nothing is.

    Attributes:
        path: table text, absolute.
        sha256: of its content; empty where it was not read.
        values: by column; all of ``Predictor.columns`` where there is no failure.
        title, lines: the same for a person, the answer first.
        picture: what was made of what the network saw, where it was asked for.
        failure: why nothing is said.
        lasts: whether the same file would be found the same again; not so where a worker died or took too long.
    """

    path: str
    sha256: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    title: str = ""
    lines: tuple[str, ...] = ()
    picture: str = ""
    failure: str = ""
    lasts: bool = True


@dataclass(frozen=True)
class Prediction:
    """A row of ``Predictor.predict``.

    Attributes:
        path: as it was given.
        values: what is said, by column; empty where there is a failure.
        part: ``train``, ``validation`` or ``test``, where the run has this very file; else empty.
        failure: why nothing is said.
    """

    path: Path
    values: Mapping[str, Value] = field(default_factory=dict)
    part: str = ""
    failure: str = ""


# Of a file, given what the network saw of it, uint8 (3, S, S) of a picture, (T, 3, S, S) of a video: a text to keep.
Picture = Callable[[str, Pixels], str]


def no_picture(_path: str, _seen: Pixels) -> str:
    """Keep no picture."""
    return ""


@dataclass(frozen=True)
class Trained:
    """One finished training without folds, of a run or of a bundle of it.

    Attributes:
        name: of the run.
        config: its configuration; what it names lies on this machine.
        weights: the file of its best weights, with their digest beside.
        digest: of these weights (``weights_digest``), as the training noted it; empty of earlier versions.
        network: the class that was trained.
        known: in which part a file of the run is, by the hash of its content.
        remedy: what to do where something of it is damaged or has changed, a sentence.
        standing: where it stands beside its controls.
    """

    name: str
    config: RunConfig
    weights: Path
    digest: str
    network: TrainedClass
    known: Mapping[str, str]
    remedy: str
    standing: Standing = NOT_STATED

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """Its weights; ``FvcError`` where they are damaged or another training's."""
        state = load_weights(self.weights)
        if self.digest and weights_digest(state) != self.digest:
            raise FvcError(f"{str(self.weights)!r}: is not what the test part was judged by. {self.remedy}")
        return state

    def built(self, build: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the network of ``build`` with these weights, on the CPU in evaluation mode, and cautions.

        A caution names the functions of the library that have changed since the training.

        Raises:
            UsageError: the user's own code has changed since the training, or the weights are another network's.
            FvcError: the weights are damaged or another training's.
        """
        state = self.state
        with forked_random_state(0, torch.device("cpu")):
            network = build().eval()
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise UsageError(
                f"{self.name}: its weights do not fit the network {self.network.name} of this version "
                f"({' '.join(str(error).split())[:300]}). {self.remedy}"
            ) from error
        return network, cautions_on_code(self.name, self.network, network, self.remedy)


def cautions_on_code(name: str, trained: TrainedClass, network: nn.Module, remedy: str) -> tuple[str, ...]:
    """Return a caution where the library's part of the network ``trained`` has changed; else nothing.

    Raises:
        UsageError: the user's own part has changed.
    """
    functions = functions_of(network)
    changed = changed_functions(trained.functions, functions)
    if changed and own_code(functions) != trained.code:
        raise UsageError(f"{name}: the code of {trained.name} has changed since its training ({changed}). {remedy}")
    return (f"{name} was trained by other code than this version's. What differs: {changed}.",) if changed else ()


class Predictor:
    """What a finished training says of files.

    Each file goes through the network alone, so that what is said of it does not depend on what is asked beside it.

    Attributes:
        kind: of the files.
        own_files: names of the files that a bundle has beside what every bundle has.
        trained: what it is made of.
        columns: of the answer.
        notes: what the answers can be held to, beside the run's results.
        cautions: sentences on code or decoding that is not the run's.
    """

    kind: ClassVar[Kind]
    own_files: ClassVar[tuple[str, ...]]

    def __init__(self, trained: Trained) -> None:
        self.trained, self.config, self.name = trained, trained.config, trained.name
        self.compute = resolve_device(self.config.device, self.config.amp)
        self.columns: Mapping[str, pl.DataType] = {}
        self.notes: Sequence[str] = ()
        self.cautions: tuple[str, ...] = ()

    @property
    def file_word(self) -> str:
        """What one of its files is called."""
        return "picture" if self.kind == "image" else self.kind

    @property
    def held_bytes(self) -> int:
        """What weights, and what is compared with, take in memory."""
        return self.trained.weights.stat().st_size

    def _build(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the network in evaluation mode on its device; raise as ``Trained.built``."""
        network, remarks = self.trained.built(build)
        self.cautions += remarks
        return network.to(self.compute.device)

    @classmethod
    def of_run(cls, trained: Trained, paths: RunPaths) -> Self:
        """Of a finished run; raises as ``predictor_of``."""
        raise NotImplementedError

    @classmethod
    def of_bundle(cls, trained: Trained, folder: Path) -> Self:
        """Of a bundle whose files have been checked; ``FvcError`` where they are what no export writes."""
        raise NotImplementedError

    @staticmethod
    def files_of_run(paths: RunPaths) -> pl.DataFrame:
        """``content_sha256 part group_id`` of the run's files, one or several rows each."""
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        """Write what ``of_bundle`` reads, ``own_files`` as far as there is something to write; raises ``OSError``."""
        raise NotImplementedError

    def write_form(self, paths: RunPaths, form: str, path: Path) -> str:
        """Write the network of the run in ``paths`` to ``path`` as ``form`` too; what it is, in sentences.

        Raises:
            UsageError: it cannot be written so, or says something else there; or the task has no such forms.
        """
        raise UsageError(f"--format {form}: is not for runs of task {self.config.task}. Leave it out.")

    @property
    def decode_hash(self) -> str:
        """Hex SHA-256 of the code and library that decode."""
        raise NotImplementedError

    @property
    def standing(self) -> Standing:
        """Where the training stands beside its controls."""
        return self.trained.standing

    @property
    def identity(self) -> str:
        """Of all that decides what is found of a file."""
        learned = weights_digest(self.trained.state)
        more = [list(self.columns), self.decode_hash, self.identity_of_parts()]
        return f"{self.name}@{learned[:12]}:{sha256_of_json(more)[:16]}"

    def identity_of_parts(self) -> Any:
        """Return the contents of its own files as a JSON value."""
        raise NotImplementedError

    def findings(self, files: Sequence[Path], *, workers: int = 0, picture: Picture = no_picture) -> Generator[Finding]:
        """Yield the finding of each of ``files``, in any order; a bad file costs itself alone.

        Args:
            files: absolute, each once.
            workers: processes that decode; 0: one per core.
            picture: told path and pixels of each file that is judged.

        Raises:
            FvcError: the code that decodes was changed, or the network says nothing finite.
            OSError: nothing can be written to the cache.
        """
        raise NotImplementedError

    def predict(self, files: Sequence[str | Path] | str | Path, *, workers: int = 0) -> list[Prediction]:
        """One row per file, in their order; a bad file costs itself alone. Arguments and errors as ``findings``."""
        given = [Path(each) for each in ([files] if isinstance(files, str | Path) else files)]
        absolute = [each.absolute() for each in given]
        todo, found = list(dict.fromkeys(absolute)), dict[str, Finding]()
        for start in range(0, len(todo), BLOCK_FILES):
            with closing(self.findings(todo[start : start + BLOCK_FILES], workers=workers)) as answers:
                found |= {each.path: each for each in answers}
        of_files = (found[path_to_text(path)] for path in absolute)
        return [
            Prediction(path, each.values, self.trained.known.get(each.sha256, ""), each.failure)
            for path, each in zip(given, of_files, strict=True)
        ]


def predictor_class(task: str) -> type[Predictor]:
    """Return the predictor class of ``task``; raise ``UsageError`` where there is none."""
    spec = TASKS[task]
    if not spec.predictor:
        raise UsageError(f"task {spec.name}: predicts nothing of single files.")
    found: type[Predictor] = getattr(import_module(f"fvc_lib.tasks.{spec.name}.predicting"), spec.predictor)
    return found


def predictor_of(paths: RunPaths, standing: Standing = NOT_STATED) -> Predictor:
    """Return the predictor of the run in ``paths``.

    Raises:
        UsageError: its task has nothing of the kind, or the run is not finished.
        FvcError: what it stored is damaged.
    """
    refuse_damaged(paths.root, logs=False)
    config = run_config(paths)
    answers = predictor_class(config.task)
    stage = TASKS[config.task].training_stage.name
    outcome = outcome_of(paths)
    trained = Trained(
        name=paths.run_id,
        config=config,
        weights=paths.stage_training(stage) / BEST,
        digest=outcome.training.best_weights,
        network=outcome.network,
        known=dict(answers.files_of_run(paths).select("content_sha256", "part").iter_rows()),
        remedy=f"Train again: {command_text('--force', stage[:2], '--resume', paths.root)}",
        standing=standing,
    )
    return answers.of_run(trained, paths)


def outcome_of(paths: RunPaths) -> TrainingOutcome[TrainingRecord]:
    """Return the outcome of a run without folds; raise ``UsageError`` where it is not finished."""
    stage = TASKS[run_config(paths).task].training_stage.name
    outcome = read_outcome(paths.stage_outcome(stage), TrainingRecord)
    if outcome is None or not (paths.stage_training(stage) / BEST).is_file():
        raise UsageError(
            f"{paths.run_id}: its training is not finished, so there is no network to ask. Finish the run: "
            f"{command_text('--resume', paths.root)}"
        )
    return outcome
