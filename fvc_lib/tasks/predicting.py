"""What a run of a task without verdicts says of new files: what its task gives (``TaskSpec.predictor``), and how the
one network of a finished training comes back.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

import polars as pl
import torch
from torch import nn

from fvc_lib.corpus.listing import Kind
from fvc_lib.engine.device import ComputeDevice
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.training_state import TrainingRecord, weights_digest
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.errors import FvcError, UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import TASKS
from fvc_lib.tasks.recipe import code_of_network, read_outcome
from fvc_lib.tasks.stored_answer import Question, still_says
from fvc_lib.video.clips.store import Pixels

Value = str | float | None
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """What is said of one file, or the ``failure`` why nothing is.

    Attributes:
        position: of the file in the list.
        values: by column; all of ``Predictor.columns`` where there is no failure.
        title, lines: the same for a person, the answer first.
        seen: what the network saw: uint8 (3, S, S) of a picture, (T, 3, S, S) of a video.
        content_sha256: of the file; empty where it was not read.
    """

    position: int
    values: Mapping[str, Value] = field(default_factory=dict)
    title: str = ""
    lines: tuple[str, ...] = ()
    seen: Pixels | None = None
    content_sha256: str = ""
    failure: str = ""


class Predictor(Protocol):
    """Made from the run, a ``RunPaths``; ``UsageError`` or ``FvcError`` where it is not finished, or damaged."""

    kind: Kind  # of the files
    columns: Mapping[str, pl.DataType]  # of the answer
    notes: Sequence[str]  # what the answers can be held to, beside the run's results
    contents: Mapping[str, str]  # of what the run knows: in which part by content hash

    def predictions(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Prediction]:
        """One per file, as soon as it is there. ``workers`` processes decode; 0: one per core.

        Raises:
            FvcError: the code that decodes was changed, or the network says nothing finite.
            OSError: nothing can be written to the cache.
        """
        ...


PART_SENTENCES = {
    "train": "The run was trained on this very file: it may know it by heart, and the answer shows nothing.",
    "validation": "A file of the run: its epoch was chosen on it.",
    "test": "A file of the run's test part: not trained on, and already counted in its results.",
}


def predictor_of(paths: RunPaths) -> Predictor:
    """What answers for the run's task.

    Raises:
        UsageError: its task has nothing of the kind, or the run is not finished.
        FvcError: what it stored is damaged.
    """
    spec = TASKS[run_config(paths).task]
    if not spec.predictor:
        raise UsageError(f"{paths.run_id} is of task {spec.name}, which predicts nothing of single files.")
    made: Predictor = getattr(import_module(f"fvc_lib.tasks.{spec.name}.predicting"), spec.predictor)(paths)
    return made


def trained_network(
    paths: RunPaths, stage: str, build: Callable[[], nn.Module], question: Question, compute: ComputeDevice
) -> nn.Module:
    """The network that ``build`` gives with the run's best weights, in evaluation mode on the device.

    ``question`` is the one that it was asked when it was trained.

    Raises:
        UsageError: the training is not finished, or the network's code has changed since, and it says something else.
        FvcError: the weights are damaged or another training's.
    """
    outcome = read_outcome(paths.stage_outcome(stage), TrainingRecord)
    file = paths.stage_training(stage) / BEST
    if outcome is None or not file.is_file():
        raise UsageError(
            f"{paths.run_id}: its training is not finished, so there is no network to ask. Finish the run: "
            f"{command_text('--resume', paths.root)}"
        )
    weights, anew = load_weights(file), command_text("--force", stage[:2], "--resume", paths.root)
    noted = outcome.training.best_weights  # by earlier versions not
    if noted and weights_digest(weights) != noted:
        raise FvcError(f"{str(file)!r}: is not what the test part was judged by. Train again: {anew}")
    with forked_random_state(0, torch.device("cpu")):
        network = build().eval()
    kind = outcome.network
    changed = kind.name if kind is not None and code_of_network(network) != kind.code else ""
    remedy = f"Bring that code back, or train again: {anew}"
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        if not changed:
            raise
        told = f"{paths.run_id}: the code of {changed} is not what it was when it was trained"
        raise UsageError(f"{told}, and its weights are not of this network. {remedy}") from error
    if changed:
        told = still_says(
            outcome.answer, lambda: question.answer(network), code=changed, of=paths.run_id, remedy=remedy
        )
        _logger.warning(told)
    return network.to(compute.device)
