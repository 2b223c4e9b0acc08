"""Row 6: a training that is stopped again and again while it writes a checkpoint, and goes on each time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from fvc_lib.services.run_paths import RunPaths
from tests.faults.conftest import Result, elsewhere
from tests.faults.fold_lives import (
    result_of_fold,
    standing,
    train_and_be_stopped,
    train_folds,
    trained_steps,
)
from tests.faults.forked import run
from tests.faults.table import Tally
from tests.kits.training import TinyTraining


@dataclass(frozen=True)
class Whole:
    """The undisturbed run: where it lies, and what it left."""

    paths: RunPaths
    result: Result


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
    code, said = run(train_folds, paths.root, tiny.config.model_dump_json(), (0,), 1)
    assert code == 0, said
    return Whole(paths, result_of_fold(paths, 0))


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
    assert result_of_fold(paths, 0) == whole.result
    last = sum(codes.values())
    for steps in zip(*(trained_steps(paths, 0, attempt) for attempt in range(1, last + 1)), strict=True):
        taken = [step for some in steps for step in some]
        assert taken == list(range(1, len(taken) + 1))  # every step once
    tally.add(survived=codes[75])
