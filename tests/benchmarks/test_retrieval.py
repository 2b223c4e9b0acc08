from __future__ import annotations

import pytest

from benchmarks import retrieval
from benchmarks.retrieval import CONTESTANTS, NEEDS, OURS, Reading, Sample, main, report, take_turns, verdict

SMALL = Sample(num_videos=150, num_texts=60, signal=0.2, dimensions=32)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_finds_the_same(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = CONTESTANTS[name](SMALL)
    assert found == pytest.approx(retrieval.ours(SMALL), abs=1e-6)
    assert 0.2 < found[0] < 0.95  # neither all nor nothing is found


def test_a_contestant_who_finds_something_else_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTESTANTS, "other", lambda sample: (1.0, 1.0))
    monkeypatch.setattr(retrieval, "sgemm_seconds", lambda: 1e-11)
    with pytest.raises(SystemExit, match=r"other finds recall@10 of \(1.0, 1.0\)"):
        take_turns([OURS, "other"], SMALL, SMALL, 1)


def test_the_report_has_ratios_per_pair_and_says_what_was_missed() -> None:
    mine = Reading(OURS, Sample(1000, 1000, 0.0), [0.004, 0.002], (0.5, 0.6), 30_000_000)
    theirs = Reading("peer", Sample(100, 100, 0.0), [0.001, 0.001], (0.5, 0.6), 90_000_000)
    lines = report([mine, theirs], [1e-11, 2e-11])
    assert lines[1].split() == ["ours", "0.00", "2.00", "1.0", "(1.0)", "2.56", "30.0", "0.500", "0.600"]
    assert lines[2].split() == ["peer*", "0.00", "100.00", "50.0", "(37.5)", "0.05", "90.0", "0.500", "0.600"]
    assert verdict(mine, [1e-11], 29_000_000).count("met") == 2
    assert verdict(theirs, [1e-11], 29_000_000).count("MISSED") == 2


def test_peak_memory_is_that_of_the_work_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--measure", OURS, "3000", "200", "0.3", "16"])
    assert 0 <= int(capsys.readouterr().out) < 40_000_000
