from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bootstrap
from benchmarks.bootstrap import (
    CONTESTANTS,
    NINE_METRICS,
    SAME_DRAWS,
    Sample,
    main,
    nine_by_scikit_learn,
    report,
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


def test_the_report_has_ratios_of_processor_time_and_peaks() -> None:
    seconds = {name: [2.0, 4.0] for name in CONTESTANTS} | {bootstrap.OURS: [0.5, 0.5], bootstrap.NINE: [1.0, 2.0]}
    lines = report(SMALL, seconds, dict.fromkeys(CONTESTANTS, 3_000_000))
    assert lines[0].startswith("120 rows in 40 groups, 40 replicates")
    assert lines[1].split() == ["ours,", "AUC", "0.50", "4.0", "(6.0)", "3.0"]
    assert next(line for line in lines if line.startswith(bootstrap.NINE)).split()[-3:] == ["2.0", "(2.0)", "3.0"]


def test_peak_memory_is_that_of_the_work_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--measure", bootstrap.OURS, "120", "40", "60"])
    assert 0 <= int(capsys.readouterr().out) < 50_000_000
