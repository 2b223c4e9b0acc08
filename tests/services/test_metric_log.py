"""Lines are whole, in order and JSON, also after a torn end and for numbers JSON does not have."""

from __future__ import annotations

import json
import subprocess
import sys

from fvc_lib.services.metric_log import COLUMNS, JsonLines, MetricLog


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_metric_with_every_column(tmp_path):
    path = tmp_path / "metrics" / "04_fold_training_fold_1.jsonl"
    with MetricLog(path, run_id="run_x", fold=1, attempt=2) as log:
        log.log(step=7, epoch=1, phase="train", metrics={"loss": 0.5, "auc": 1})
    rows = read(path)
    assert [tuple(row) for row in rows] == [COLUMNS, COLUMNS]
    assert [(row["metric"], row["value"]) for row in rows] == [("loss", 0.5), ("auc", 1.0)]
    assert {(row["run_id"], row["step"], row["epoch"], row["fold"], row["attempt"]) for row in rows} == {
        ("run_x", 7, 1, 1, 2)
    }


def test_a_number_json_does_not_have_is_null_with_a_flag(tmp_path):
    with MetricLog(tmp_path / "m.jsonl", run_id="r") as log:
        log.log(step=0, epoch=0, phase="train", metrics={"a": float("nan"), "b": float("-inf")})
    assert [(row["value"], row["flag"]) for row in read(tmp_path / "m.jsonl")] == [(None, "nan"), (None, "-inf")]


def test_a_torn_last_line_is_closed_off_before_the_next(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a":1}\n{"a":')
    with JsonLines(path) as lines:
        lines.append({"a": 2})
    assert path.read_text() == '{"a":1}\n{"a":\n{"a":2}\n'


def test_a_process_that_is_killed_has_lost_no_line_it_appended(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from fvc_lib.services.metric_log import JsonLines\n"
        "lines = JsonLines(Path(sys.argv[1]))\n"
        "for i in range(500): lines.append({'i': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert [row["i"] for row in read(path)] == list(range(500))
