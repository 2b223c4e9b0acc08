from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.queries import READERS, TARGET_SECONDS, Result, Shape, measure, problems, write_runs

SMALL = Shape(num_runs=2, num_folds=2, num_steps=40)
RESULT = Result(1.0, 0.5, 100_000_000, 1000, (1000.0, 2.0, 3.0))


def test_every_reader_of_the_logs_gives_the_answer_of_ours(tmp_path):
    pytest.importorskip("pandas")
    write_runs(tmp_path, SMALL)
    names = [name for name in READERS if name != "mlflow, sqlite"]
    results = {name: measure(name, tmp_path, 1) for name in names}
    assert problems(results, judge_time=False) == []
    assert {result.num_lines for result in results.values()} == {SMALL.num_lines}


def test_a_wrong_answer_and_a_slow_one_are_told():
    wrong = replace(RESULT, answer=(1000.0, 2.5, 3.0))
    found = problems({"fvc, logs": replace(RESULT, curves_seconds=2.5), "polars": wrong}, judge_time=True)
    assert found == [
        "polars answers (1000.0, 2.5, 3.0), fvc (1000.0, 2.0, 3.0)",
        f"fvc, logs took 2.500 s, allowed {TARGET_SECONDS['fvc, logs']} s",
    ]
