"""Rows 3 and 6: trainings that are killed or stopped again and again at moments nobody chose, and go on each time."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fvc_lib.services.run_paths import RunPaths
from tests.faults.conftest import Result, elsewhere
from tests.faults.fold_lives import (
    Standing,
    result_of_fold,
    standing,
    train_and_be_stopped,
    train_folds,
    trained_steps,
)
from tests.faults.forked import Child, run, start
from tests.faults.table import Tally
from tests.kits.training import TinyTraining

FOLDS = (0, 1)


@dataclass(frozen=True)
class Whole:
    """The undisturbed run: where it lies, what it left and how long it computed."""

    paths: RunPaths
    results: tuple[Result, ...]
    cpu_seconds: float


@pytest.fixture
def tiny(tiny_training: TinyTraining) -> TinyTraining:
    """A checkpoint after every step for which the disk is quick enough."""
    return tiny_training.with_config(epochs=2, checkpoint_minutes=0)


@pytest.fixture(scope="session")
def known_whole() -> list[Whole]:
    """Trained once: the folder of clips changes nothing."""
    return []


@pytest.fixture
def whole(tiny: TinyTraining, tmp_path: Path, known_whole: list[Whole]) -> Whole:
    if not known_whole:
        known_whole.append(train_undisturbed(tiny, tmp_path / "whole" / "run_0"))
    return known_whole[0]


def train_undisturbed(tiny: TinyTraining, root: Path) -> Whole:
    paths = elsewhere(tiny, root)
    run(train_folds, root, "", (), 0)  # the first child waits until everything is imported
    child = start(train_folds, paths.root, tiny.config.model_dump_json(), FOLDS, 1)
    seconds = computed(child, 1_000.0)
    code, said = child.end()
    assert code == 0, said
    return Whole(paths, tuple(result_of_fold(paths, fold) for fold in FOLDS), seconds)


def computed(child: Child, cpu_seconds: float) -> float:
    """Wait until the child has computed for so long, or has ended; how long it has. No other process's load counts."""
    seconds = 0.0
    while child.process.is_alive() and seconds < cpu_seconds:
        try:
            times = psutil.Process(child.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            break
        seconds = max(seconds, times.user + times.system)
        time.sleep(0.005)
    return seconds


def stands(paths: RunPaths, whole: Whole, scratch: Path) -> list[Standing]:
    return [standing(paths, whole.paths, fold, scratch) for fold in FOLDS]


def killed_until_done(tiny: TinyTraining, whole: Whole, root: Path, chance: random.Random, max_kills: int) -> int:
    """Train both folds, killed after random delays; returns how often. What was done is never done again."""
    paths, kills = elsewhere(tiny, root / "run_0"), 0
    before = stands(paths, whole, root / "scratch")
    for attempt in range(1, 1_000):
        child = start(train_folds, paths.root, tiny.config.model_dump_json(), FOLDS, attempt)
        if kills < max_kills:
            computed(child, chance.expovariate(6 / whole.cpu_seconds))
            child.process.kill()
        code, said = child.end()
        assert code in (0, -signal.SIGKILL), said
        for fold, stood in zip(FOLDS, before, strict=True):
            for steps, saved in zip(trained_steps(paths, fold, attempt), stood.steps, strict=True):
                assert steps == list(range(saved + 1, saved + 1 + len(steps)))
                assert not (steps and stood.finished)
        if code == 0:
            break
        kills += 1
        before = stands(paths, whole, root / "scratch")
    assert tuple(result_of_fold(paths, fold) for fold in FOLDS) == whole.results
    return kills


@pytest.mark.long
@pytest.mark.fault(3)
def test_two_folds_killed_at_random_moments_end_as_if_nothing_had_been(tiny, whole, tmp_path, tally):
    tally.add(survived=killed_until_done(tiny, whole, tmp_path / "killed", random.Random(1), max_kills=5))
    assert tally.survived > 1


@pytest.mark.long
@pytest.mark.fault(3)
def test_two_hundred_kills_at_random_moments_change_nothing(tiny, whole, tmp_path, tally):
    seed = int(os.environ.get("FVC_FAULT_SEED", "2026"))
    print(f"delays drawn with FVC_FAULT_SEED={seed}")
    chance = random.Random(seed)
    for number in range(200):
        if tally.survived >= 200:
            break
        tally.add(survived=killed_until_done(tiny, whole, tmp_path / f"killed_{number}", chance, max_kills=40))
    print(f"{tally.survived} kills")
    assert tally.survived >= 200


def stopped_until_done(
    tiny: TinyTraining, whole: Whole, paths: RunPaths, operations: random.Random, max_stops: int
) -> Counter[int]:
    """Fold 0, stopped by SIGTERM in the midst of writing checkpoints; counts exit codes."""
    codes: Counter[int] = Counter()
    for attempt in range(1, 100):
        config = tiny.config.model_dump_json()
        operation = operations.randint(1, 150) if attempt <= max_stops else 0
        code, said = run(train_and_be_stopped, paths.root, config, attempt, operation)
        assert code in (0, 75), said
        codes[code] += 1
        standing(paths, whole.paths, 0, paths.root / "scratch")
        if code == 0:
            break
    return codes


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    ("seed", "max_stops"), [(0, 3), *(pytest.param(seed, 99, marks=pytest.mark.long) for seed in range(1, 11))]
)
def test_sigterm_during_a_save_lets_it_finish_and_the_training_go_on(
    seed, max_stops, tiny, whole, tmp_path, tally: Tally
):
    paths = elsewhere(tiny, tmp_path / "stopped" / "run_0")
    codes = stopped_until_done(tiny, whole, paths, random.Random(seed), max_stops)
    assert codes[75] > 1
    assert result_of_fold(paths, 0) == whole.results[0]
    last = sum(codes.values())
    for steps in zip(*(trained_steps(paths, 0, attempt) for attempt in range(1, last + 1)), strict=True):
        taken = [step for some in steps for step in some]
        assert taken == list(range(1, len(taken) + 1))  # every step once
    tally.add(survived=codes[75])
