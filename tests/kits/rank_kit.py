"""Real ranks for the tests: forked processes that meet over gloo on the loopback device."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.engine.ranks import ProcessRanks, RankLostError, Ranks
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.errors import FvcError, StoppedError
from tests.faults.checkpoint_lives import same
from tests.faults.forked import Child, start
from tests.kits.engine_kit import SETTINGS, Observer, weight_distance
from tests.kits.training import ListLog

PATIENCE_SECONDS = 300.0  # of a machine ten times slower as well


def start_ranks(
    size: int, function: Callable[..., None], *arguments: Any, patience_seconds: float = PATIENCE_SECONDS
) -> list[Child]:
    """``function(ranks, *arguments)`` on ``size`` ranks, each in a process of its own; one rank meets nobody."""
    store = f"file://{tempfile.mkdtemp(prefix='fvc-ranks-')}/store"
    return [start(_live, rank, size, store, patience_seconds, function, arguments) for rank in range(size)]


def run_ranks(size: int, function: Callable[..., None], *arguments: Any) -> list[tuple[int, str]]:
    """``start_ranks``, and the exit code and words of each."""
    return [child.end() for child in start_ranks(size, function, *arguments)]


def _live(
    rank: int,
    size: int,
    store: str,
    patience_seconds: float,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    ranks: Ranks = Ranks()
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        ranks = ProcessRanks(rank, size, init_method=store, patience_seconds=patience_seconds)
    try:
        with ranks.sharing_errors():
            function(ranks, *arguments)
    except (FvcError, StoppedError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1 if isinstance(error, RankLostError) else error.exit_code)  # as ``tasks.rank`` does


@dataclass(frozen=True)
class Training:
    """One training of a task on ranks.

    Attributes:
        make_task: ``make_task(rank)``; picklable.
        folder: of the checkpoints, and beside it what every rank found.
        settings: changes of the kit's settings.
        stop: ``stop(rank)`` gives the function that the engine asks.
        prepare: ``prepare(rank)``, called in the rank's process before.
    """

    make_task: Callable[[int], Any]
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    stop: Callable[[int], Callable[[], bool]] | None = None
    prepare: Callable[[int], None] | None = None

    def found(self, rank: int = 0) -> dict[str, Any]:
        """What a rank that came to the end left."""
        return torch.load(self.folder / f"rank_{rank}.pt", weights_only=False)


def train(ranks: Ranks, training: Training) -> None:
    """As one rank: fit, then score the validation data with the best model."""
    if training.prepare is not None:
        training.prepare(ranks.rank)
    log, observer = ListLog(), Observer()
    changes = dict(training.settings)
    engine = Engine(
        training.make_task(ranks.rank),
        EngineSettings(**{**SETTINGS, **changes}),
        resolve_device("cpu"),
        CheckpointFolder(training.folder / "checkpoints", CheckpointBinding({}, "")),
        log,
        memory=observer,
        stop=training.stop(ranks.rank) if training.stop else None,
        ranks=ranks,
    )
    state = engine.fit()
    scores = engine.task.new_accumulator()
    loss = engine.predict(engine.task.validation_data, state.best_model, scores)
    torch.save(
        {
            "history": state.history,
            "best_model": state.best_model,
            "best_epoch": state.best_epoch,
            "schedule": state.micro_batches.changes,
            "inexact_because": state.inexact_because,
            "steps": state.step,
            "lines": log.lines,
            "events": observer.events,
            "loss": (loss.total, loss.weight),
            "scores": scores.to_document(),
        },
        training.folder / f"rank_{ranks.rank}.pt",
    )


def same_result(found: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """To the bit, in everything that a run keeps."""
    return (
        found["history"] == other["history"]
        and found["loss"] == other["loss"]
        and same(found["scores"], other["scores"])
        and same_weights(found, other)
    )


def same_weights(found: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """To the bit."""
    return all(tensor.equal(other["best_model"][name]) for name, tensor in found["best_model"].items())


def distance(found: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest relative difference between two trainings' weights."""
    return weight_distance(found["best_model"], other["best_model"])


def rank_processes(log: Path) -> dict[int, psutil.Process]:
    """Return the living processes of the ranks whose output is ``log``, by rank, as their files name them."""
    found = {}
    for path in log.parent.glob(f"{log.stem}_*.jsonl"):
        with contextlib.suppress(psutil.Error, IndexError):
            process = psutil.Process(json.loads(path.read_text().splitlines()[0])["named"]["pid"])
            if process.status() != psutil.STATUS_ZOMBIE:
                found[int(path.stem.rpartition("_")[2])] = process
    return found
