from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bootstrap
from benchmarks.bootstrap import (
    CONTESTANTS,
    NINE_METRICS,
    SAME_DRAWS,
    Sample,
    nine_by_scikit_learn,
    take_turns,
)
from fvc_lib.metrics.cross_validation import measure_over_folds

SMALL = Sample(num_rows=120, num_groups=40, replicates=40)


def test_all_who_draw_the_same_groups_give_the_same_ends_and_scipy_about_the_same() -> None:
    found = {name: work(SMALL) for name, work in CONTESTANTS.items()}
    for name in SAME_DRAWS:
        np.testing.assert_allclose(found[name], found[bootstrap.LOOP], atol=1e-12)
    np.testing.assert_allclose(found["scipy.stats.bootstrap, AUC"], found[bootstrap.LOOP], atol=0.06)


def test_the_peer_computes_the_same_nine_metrics() -> None:
    labels, scores, _ = SMALL.columns
    measures = [measure_over_folds(name, scores, 0.5, np.zeros(labels.size)) for name in NINE_METRICS]
    expected = [metric(labels, values) for metric, values in measures]
    np.testing.assert_allclose(nine_by_scikit_learn(labels, scores), expected, atol=1e-12)


def test_a_contestant_who_computes_something_else_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CONTESTANTS, bootstrap.NINE_LOOP)
    monkeypatch.setitem(CONTESTANTS, bootstrap.OURS, lambda sample: (0.0, 1.0))
    with pytest.raises(SystemExit, match="ours, AUC gives"):
        take_turns(SMALL, 1)
