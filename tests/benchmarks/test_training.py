from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from benchmarks.training.__main__ import measures, read_arguments
from benchmarks.training.cases import Case, Training
from benchmarks.training.extras import Extras
from benchmarks.training.figures import Figure, figures_table, summary
from benchmarks.training.overhead import (
    compete,
)
from benchmarks.training.turns import Turns

SMALL = Case(num_frames=2, size=24, micro_batch=2, effective_batch_size=4)


@pytest.fixture
def training(tmp_path):
    made = Training(SMALL, tmp_path, num_stored=12)
    made.store_clips()
    return made


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("model", ["frame_cnn", "r2plus1d"])
def test_both_sides_do_the_same_work(training, tmp_path, model):
    # Under equal weights both round alike; under others the engine divides in another place.
    training = replace(training, case=replace(SMALL, model=model), loss_weights=(1.0, 1.0))
    contest = compete(training, Extras(tmp_path / "x"), windows=3, epochs=3, num_validation=5, turns_per_block=1)
    assert largest_difference(contest.state.best_model, contest.bare.best_model) < 1e-6
    untrained = training.task(1, 1).build_model().state_dict()
    assert largest_difference(contest.state.best_model, untrained) > 1e-3
    assert contest.bare.best_loss == pytest.approx(contest.state.best_loss, rel=1e-6)


def test_sides_change_so_that_a_drift_cheats_nobody():
    seen = []

    def theirs():
        for number in itertools.count():
            seen.append(f"t{number}")
            yield

    turns = Turns(theirs(), turns_per_block=2)
    for number in range(8):
        turns()
        seen.append(f"o{number}")
    turns.finish()
    # "t0" is the way to the first pause.
    assert " ".join(seen) == "t0 o0 o1 t1 t2 t3 t4 o2 o3 o4 o5 t5 t6 t7 t8 o6 o7"
    assert len(turns.ours) == len(turns.their) == 4


@pytest.mark.parametrize(
    ("values", "relation", "verdict"),
    [
        ([1.8, 1.9, 1.7, 1.9, 1.8, 1.9, 1.8, 1.9], "at most", "met"),
        ([2.1, 2.2, 2.3, 2.1, 2.2, 2.4, 2.1, 2.2], "at most", "missed"),
        ([2.1, 2.2, 2.3, 2.1, 2.2, 2.4, 2.1, 2.2], "at least", "met"),
        ([1.0, 1.5, 1.8, 1.9, 2.1, 2.2, 2.5, 3.0], "at most", "undecided"),
        ([], "at most", ""),
    ],
)
def test_the_table_tells_met_from_missed_and_from_chance(values, relation, verdict):
    figure = Figure("frame_cnn", "sampler", "%", tuple(values), relation, 2.0)
    assert figure.verdict == verdict
    shown = {"missed": "**missed**", "": "not measured"}.get(verdict, verdict)
    line = figures_table([figure]).splitlines()[-1]
    assert line.split("|")[-2].strip() == shown
    assert summary([figure, figure]) == f"2 {verdict or 'not measured'}."


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        values = torch.rand(41, generator=generator).pow(3).tolist()
        low, high = Figure("", "", "", tuple(values)).interval
        held += low <= 0.5**3 <= high
    assert 0.93 <= held / 400 <= 0.995


def test_every_part_that_can_be_asked_for_is_there(tmp_path):
    asked = read_arguments(["--quick"])
    assert {name.split()[0] for name in measures(asked, tmp_path)} == set(asked.only)
