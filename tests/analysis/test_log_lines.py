import json
import os
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fvc_lib.analysis.read.logs import METRIC_LINES, read_log_lines
from fvc_lib.analysis.read.records import LogFile
from fvc_lib.services.stage_logs import MetricLog


def metric_line(step: int = 1, **changes: object) -> bytes:
    row = {"run_id": "r", "ts": 1.5, "step": step, "epoch": 0, "phase": "train", "metric": "loss", "value": 0.25}
    return json.dumps({**row, "flag": None, "fold": 0, "attempt": 1, **changes}).encode()


def read(path: Path) -> tuple[pl.DataFrame, tuple[str, ...]]:
    answer = read_log_lines([LogFile(path, "run", "stage")], METRIC_LINES)
    return answer.frame, answer.notes


def naive(content: bytes) -> tuple[list[int], int]:
    """Steps of the good lines and the number of bad ones, one line at a time."""
    steps, bad = [], 0
    for line in content.decode("utf-8", "replace").split("\n"):
        if not line.strip(" \t\r\f\v"):
            continue
        try:
            row = json.loads(line)
            good = row["step"] is not None and row["phase"] is not None and row["metric"] is not None
            good = good and (row["value"] is not None or row["flag"] is not None)
        except (ValueError, KeyError, TypeError):
            good = False
        if good:
            steps.append(row["step"])
        bad += not good
    return steps, bad


BROKEN = [
    metric_line()[:40], b"\0" * 300, metric_line(2) + metric_line(3), b"\0\0" + metric_line(4), b"[1, 2]", b'"text"',
    b"null", b"{}", b"\xff\xfe{", metric_line(5, value=None), metric_line(6, phase=None), b"   \t ", b"",
]  # fmt: skip
GOOD = st.integers(0, 10**12).map(metric_line)


@given(
    st.lists(st.one_of(st.sampled_from([*BROKEN, metric_line(7, flag="nan", value=None)]), GOOD), max_size=12),
    st.integers(0, 200),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_good_lines_are_kept_and_bad_ones_counted_as_line_by_line(tmp_path: Path, lines: list[bytes], cut: int) -> None:
    content = b"\n".join(lines)
    content = content[: len(content) - cut] if cut < 60 else content + b"\n"
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    frame, notes = read(path)
    steps, bad = naive(content)
    assert frame["step"].to_list() == steps
    assert [note.split(" ")[0] for note in notes] == ([str(bad)] if bad else [])


def test_the_writers_values_come_back_exactly_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = {"loss": 0.1 + 0.2, "bad": float("nan"), "worse": float("-inf")}
    with MetricLog(path, run_id="x", fold=3, attempt=2) as log:
        log.log(step=5, epoch=1, phase="train", metrics=values)
    frame, notes = read(path)
    assert notes == ()
    assert frame.select("step", "epoch", "phase", "metric", "value", "flag", "fold", "attempt").rows() == [
        (5, 1, "train", "loss", 0.1 + 0.2, None, 3, 2),
        (5, 1, "train", "bad", None, "nan", 3, 2),
        (5, 1, "train", "worse", None, "-inf", 3, 2),
    ]
    path.write_bytes(b"\n".join(b'{"step":%d,"phase":"t","metric":"m","value":1}' % step for step in range(200_000)))
    frame, _ = read(path)
    assert frame["step"].equals(pl.Series("step", range(200_000)))
    assert frame["line"].equals(pl.Series("line", range(1, 200_001)))


NASTY = ("a[1]*?.jsonl", 'it\'s "q".jsonl', "'); DROP TABLE lines; --.jsonl", "<script>.jsonl", "n\nl.jsonl")


@pytest.mark.parametrize("name", [*NASTY, "\U0001f3ac.jsonl", os.fsdecode(b"bytes\xff\xfe.jsonl")])
def test_any_file_name_is_just_a_name_and_a_missing_file_hides_no_other(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(metric_line(1) + b"\n{torn")
    (tmp_path / "a1x.jsonl").write_bytes(metric_line(99))  # matches the first name as a pattern
    files = [LogFile(each, "run [x]'--", "stage") for each in (tmp_path / "gone.jsonl", path)]
    answer = read_log_lines(files, METRIC_LINES)
    assert answer.frame.select("run_id", "step").rows() == [("run [x]'--", 1)]
    gone, torn = answer.notes
    assert "gone.jsonl" in gone
    torn.encode()
