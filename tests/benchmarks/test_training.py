from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.training.__main__ import document, measures, read_arguments
from benchmarks.training.cases import Case, Training
from benchmarks.training.extras import Extras
from benchmarks.training.figures import Figure, figures_table, of_shares, summary
from benchmarks.training.lines import measure_lines
from benchmarks.training.overhead import (
    Contest,
    compete,
    shares_of_differences,
    shares_of_events,
    shares_of_ratios,
    together,
)
from benchmarks.training.stall import measure_stall
from benchmarks.training.turns import Spent, Turns

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


def test_uneven_loss_weights_are_the_same_on_both_sides(training, tmp_path):
    contest = compete(training, Extras(tmp_path / "x"), windows=2, epochs=1, num_validation=5, turns_per_block=1)
    assert contest.bare.best_loss == pytest.approx(contest.state.best_loss, rel=1e-3)


def test_extras_are_used_as_often_as_they_are_counted(training, tmp_path):
    extras = Extras(tmp_path / "x", logged=3, sample_seconds=0.001, checkpoint_seconds=0.0)
    contest = compete(training, extras, windows=6, epochs=1, num_validation=4, turns_per_block=1)
    lines = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["metric"] == "gradient_norm" for line in lines) == 3 * contest.state.step == 18
    assert extras.num_samples > 4
    assert extras.checkpoints.num_saved > 2  # at the start and at the end; and the steps'
    assert len(contest.pairs()) == 3


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


def test_time_is_charged_to_who_spent_it(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def theirs():
        while True:
            yield
            clock[0] += 1.0

    turns = Turns(theirs())
    for _ in range(4):
        turns()
        clock[0] += 3.0
    turns.finish()
    assert [spent.wall for spent in turns.ours] == [3.0] * 4
    assert [spent.wall for spent in turns.their] == [1.0] * 4


def contest_of(ours, theirs):
    return Contest([Spent(x, x, x) for x in ours], [Spent(x, x, x) for x in theirs], None, None)


def test_a_ratio_is_of_two_blocks_and_the_two_between_them():
    shares = shares_of_ratios(contest_of([1.1, 1.3, 2.0, 2.0, 9.0], [1.0, 1.0, 1.0, 3.0, 1.0]))
    assert shares["wall"] == pytest.approx([0.2, 0.0])


def test_events_are_charged_as_often_as_they_come_by_default():
    usual = shares_of_ratios(contest_of([1.1, 1.1], [1.0, 1.0]))
    # Four events a pair cost 0.4 s: 0.1 s each, one of which comes every 50 s.
    shares = shares_of_events(contest_of([1.3, 1.3] * 3, [1.0, 1.0] * 3), usual, 12, 50.0)
    assert shares["process"] == pytest.approx([0.002] * 3)
    parts = {"transaction": usual, "sampler": {clock: [0.5, 9.0, 0.1] for clock in Spent._fields}}
    assert together(parts)["wall"] == pytest.approx([0.6])


def test_what_tiny_clips_show_is_charged_to_usual_steps():
    small, whole = contest_of([0.3, 0.3], [0.2, 0.2]), contest_of([9.0, 9.0], [5.0, 5.0])
    assert shares_of_differences(small, whole)["thread"] == pytest.approx([0.02])


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


def test_a_figure_without_a_target_has_no_verdict():
    assert Figure("", "usual step", "ms", (1.0, 2.0)).verdict == ""
    assert math.isnan(Figure("", "", "", ()).median)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        values = torch.rand(41, generator=generator).pow(3).tolist()
        low, high = Figure("", "", "", tuple(values)).interval
        held += low <= 0.5**3 <= high
    assert 0.93 <= held / 400 <= 0.995


def test_overheads_are_in_percent_and_the_target_is_for_all_threads_and_the_wall():
    figures = of_shares("m", "sampler", {"wall": [0.01], "thread": [0.5], "process": [0.03]}, 2.0)
    assert [(figure.values, figure.verdict) for figure in figures] == [
        ((3.0,), "missed"),
        ((1.0,), "met"),
        ((50.0,), ""),
    ]


def test_a_checkpoint_of_a_large_state_is_watched(tmp_path):
    figures = {figure.what: figure for figure in measure_stall(tmp_path, steps=80, between_seconds=0.02, width=64)}
    assert len(figures["a save blocks the training"].values) >= 1
    assert figures["a save blocks the training"].target == 60.0
    assert figures["usual step"].median > 0
    assert figures["usual step"].group == "state of 0 MB"


def test_lines_are_counted_per_second(tmp_path):
    figures = measure_lines(tmp_path, 2)
    assert len(figures) == 4
    assert all(figure.median > 100 and figure.target == 50_000 for figure in figures)


def test_the_report_is_also_json():
    figures = [Figure("frame_cnn", "sampler", "%", (1.0, 1.2), "at most", 2.0), Figure("", "", "", ())]
    read = json.loads(json.dumps(document(figures)))["figures"]
    assert (read[0]["median"], read[0]["verdict"]) == (1.1, "met")
    assert read[1]["verdict"] == "not measured"


def test_an_odd_number_of_blocks_is_refused(capsys):
    with pytest.raises(SystemExit):
        read_arguments(["--blocks", "7"])
    assert "even" in capsys.readouterr().err


def test_every_part_that_can_be_asked_for_is_there(tmp_path):
    asked = read_arguments(["--quick"])
    assert {name.split()[0] for name in measures(asked, tmp_path)} == set(asked.only)
