from __future__ import annotations

import pytest

from benchmarks import retrieval
from benchmarks.retrieval import CONTESTANTS, NEEDS, OURS, Sample, take_turns

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
