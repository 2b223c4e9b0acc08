from __future__ import annotations

import json

import pytest
import torch

from benchmarks import detectors
from benchmarks.detectors import BARE, ENGINE, SIDES, Round, main, take_turns
from benchmarks.training.cases import Case, Training


@pytest.fixture
def small(tmp_path):
    training = Training(Case("frame_cnn", 2, 24, 2, 4), tmp_path, num_stored=8, loss_weights=(1.0, 1.0))
    training.store_clips()
    return Round(training, 3)


def without_a_step(own, folder, pause):
    weights = own.begun()[0].state_dict()
    for _ in range(own.num_steps + 1):
        pause()
    return weights


def test_sides_take_as_many_turns_and_train_the_same(small, tmp_path):
    found = take_turns(small, [ENGINE, BARE], tmp_path)
    assert [len(spent.seconds) for spent in found.values()] == [3, 3]
    assert all(min(spent.seconds) > 0 and spent.peak_bytes > 0 for spent in found.values())


def test_a_side_that_trains_otherwise_or_dies_stops_the_benchmark(small, tmp_path, monkeypatch):
    monkeypatch.setitem(SIDES, "idle", without_a_step)
    with pytest.raises(RuntimeError, match="by idle: weights differ"):
        take_turns(small, [BARE, "idle"], tmp_path)
    monkeypatch.setitem(SIDES, "dead", lambda own, folder, pause: torch.load(folder / "nothing"))
    with pytest.raises(RuntimeError, match="process of dead ended"):
        take_turns(small, ["dead"], tmp_path)


def test_peers_that_are_not_installed_are_left_out_by_name(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(detectors, "CASES", (Case("frame_cnn", 2, 24, 2, 4),))
    monkeypatch.setattr(detectors, "PEERS", dict.fromkeys(detectors.PEERS, ("no_such_package",)))
    threads = torch.get_num_threads()
    try:
        main(["--rounds", "1", "--steps", "2", "--models", "frame_cnn", "--json", str(tmp_path / "found.json")])
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr()
    assert shown.err.count("not installed (pip install no-such-package)") == 2
    assert "engine over bare loop" in shown.out
    assert len(json.loads((tmp_path / "found.json").read_text())) == 5
