"""What the engine's step costs over the bare loop's: its transaction, and what it does besides.

What a step does once in a while is done far more often here, so that its cost stands out of the noise, and is then
charged as often as it is done by default.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.training.bare import BareLoop
from benchmarks.training.cases import Training
from benchmarks.training.extras import CurrentObserver, Extras
from benchmarks.training.turns import Spent, Turns
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine
from fvc_lib.engine.training_state import TrainingState
from fvc_lib.services.config import RunConfig
from fvc_lib.services.stage_logs import SAMPLE_INTERVAL_SECONDS

BESIDES = ("metric log", "sampler", "checkpoints")
FIXED_COSTS = "transaction, seen on tiny clips"
TINY_SIZE = 16
LOGGED_AT_ONCE = 50
SHORT_SAMPLE_SECONDS = 0.01
CHECKPOINT_SECONDS = 60 * RunConfig().checkpoint_minutes

Shares = dict[str, list[float]]  # by clock, in parts of a bare step's time; one value for each pair of blocks


@dataclass(frozen=True)
class Contest:
    """One training by the engine and by the bare loop, in turns.

    Attributes:
        ours: what each block of the engine's turns took.
        their: the same of the bare loop.
        state: the engine's at the end.
        bare: the bare loop at its end.
    """

    ours: list[Spent]
    their: list[Spent]
    state: TrainingState
    bare: BareLoop

    def pairs(self) -> list[tuple[Spent, Spent]]:
        """Two blocks of ours and the two of theirs between them; a block that is left at the end is dropped."""
        number = min(len(self.ours), len(self.their)) // 2 * 2
        return [
            (self.ours[block] + self.ours[block + 1], self.their[block] + self.their[block + 1])
            for block in range(0, number, 2)
        ]


def compete(
    training: Training, extras: Extras, *, windows: int, epochs: int, num_validation: int, turns_per_block: int
) -> Contest:
    """The engine with ``extras`` against the bare loop, on the same clips in the same order."""
    task = training.task(windows, num_validation)
    settings = training.settings(epochs, checkpoint_seconds=extras.checkpoint_seconds)
    bare = BareLoop(task, settings, training.loss_weights)
    turns = Turns(bare.turns(), turns_per_block, extras.around)
    device, observer = resolve_device("cpu", "off"), CurrentObserver(extras)
    with extras.metrics() as metrics:
        engine = Engine(task, settings, device, extras.checkpoints, metrics, memory=observer, stop=turns)
        state = engine.fit()
        turns.finish()
    return Contest(turns.ours, turns.their, state, bare)


def measure_steps(training: Training, num_blocks: int, steps_per_block: int) -> dict[str, Shares]:
    """The shares of everything the engine does more, from contests of ``num_blocks`` (even) blocks a side.

    The transaction cannot be done more often than once a step: it gets one four times as long, and one on tiny clips.
    """
    tiny = replace(training, case=replace(training.case, num_frames=1, size=TINY_SIZE), folder=training.folder / "tiny")
    tiny.store_clips()
    whole, _ = _steps(training, 4 * num_blocks, steps_per_block)
    small, _ = _steps(tiny, 4 * num_blocks, steps_per_block)
    logged, _ = _steps(training, num_blocks, steps_per_block, logged=LOGGED_AT_ONCE)
    sampled, samples = _steps(training, num_blocks, steps_per_block, sample_seconds=SHORT_SAMPLE_SECONDS)
    saved, saves = _steps(training, num_blocks, steps_per_block, checkpoint_seconds=0.0)
    usual, lines = shares_of_ratios(whole), LOGGED_AT_ONCE * num_blocks * steps_per_block
    step = statistics.median(theirs.wall for _, theirs in logged.pairs()) / (2 * steps_per_block)
    return {
        "transaction": usual,
        FIXED_COSTS: shares_of_differences(small, whole),
        "metric log": shares_of_events(logged, usual, lines, step),
        "sampler": shares_of_events(sampled, usual, samples.num_samples, SAMPLE_INTERVAL_SECONDS),
        "checkpoints": shares_of_events(saved, usual, saves.checkpoints.num_saved, CHECKPOINT_SECONDS),
    }


def _steps(training: Training, num_blocks: int, steps_per_block: int, **extras: float) -> tuple[Contest, Extras]:
    with tempfile.TemporaryDirectory(dir=training.folder) as name:
        made = Extras(Path(name), **extras)  # type: ignore[arg-type]
        steps = num_blocks * steps_per_block
        done = compete(training, made, windows=steps, epochs=1, num_validation=1, turns_per_block=steps_per_block)
        return done, made


def measure_epochs(training: Training, *, epochs: int, windows: int, num_validation: int) -> Shares:
    """Everything on as it is by default, over whole epochs (an even number): validation and checkpoint included."""
    with tempfile.TemporaryDirectory(dir=training.folder) as name:
        extras = Extras(
            Path(name), logged=1, sample_seconds=SAMPLE_INTERVAL_SECONDS, checkpoint_seconds=CHECKPOINT_SECONDS
        )
        contest = compete(
            training, extras, windows=windows, epochs=epochs, num_validation=num_validation,
            turns_per_block=windows + 1,
        )  # fmt: skip
    return shares_of_ratios(contest)


def shares_of_ratios(contest: Contest) -> Shares:
    """Ours over theirs, less one."""
    return {
        clock: [ours[number] / theirs[number] - 1 for ours, theirs in contest.pairs()]
        for number, clock in enumerate(Spent._fields)
    }


def shares_of_differences(small: Contest, whole: Contest) -> Shares:
    """What ours costs more in ``small``, in parts of their time in ``whole``: what does not depend on the clips' size,
    without the noise of the work that does. Caches are warmer there, so it is the least the same can cost in ``whole``.
    """
    typical = [statistics.median(theirs[number] for _, theirs in whole.pairs()) for number in range(len(Spent._fields))]
    return {
        clock: [(ours[number] - theirs[number]) / typical[number] for ours, theirs in small.pairs()]
        for number, clock in enumerate(Spent._fields)
    }


def shares_of_events(contest: Contest, usual: Shares, num_events: int, seconds_between: float) -> Shares:
    """What events cost that come every ``seconds_between`` by default, as parts of that time.

    Args:
        contest: with ``num_events`` of them, spread over all blocks.
        usual: shares of the same training without any.
        num_events: in ``contest``.
        seconds_between: of training time, by default.
    """
    pairs = contest.pairs()
    events_per_pair = num_events / len(pairs)
    found: Shares = {}
    for number, clock in enumerate(Spent._fields):
        ratio = 1 + statistics.median(usual[clock])
        extra = [ours[number] - ratio * theirs[number] for ours, theirs in pairs]
        found[clock] = [seconds / events_per_pair / seconds_between for seconds in extra]
    return found


def together(parts: dict[str, Shares]) -> Shares:
    """The transaction's values and, on top, the medians of what a training does besides."""
    besides = [shares for part, shares in parts.items() if part in BESIDES]
    return {
        clock: [value + sum(statistics.median(shares[clock]) for shares in besides) for value in values]
        for clock, values in parts["transaction"].items()
    }
