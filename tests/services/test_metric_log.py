"""Lines are complete JSON, in order, also after a torn end and for values that JSON lacks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fvc_lib.services.stage_logs import COLUMNS, JsonLines, MetricLog
from tests.faults.disks import SmallDisk, limited_files, small_tmpfs


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_metric_with_every_column_and_null_with_a_flag_for_a_number_that_json_lacks(tmp_path):
    path = tmp_path / "metrics" / "04_fold_training_fold_1.jsonl"
    with MetricLog(path, run_id="run_x", fold=1, attempt=2) as log:
        log.log(step=7, epoch=1, phase="train", metrics={"loss": 0.5, "auc": 1, "a": float("nan"), "b": -float("inf")})
    rows = read(path)
    assert {tuple(row) for row in rows} == {COLUMNS}
    assert [(row["metric"], row["value"], row["flag"]) for row in rows] == [
        ("loss", 0.5, None), ("auc", 1.0, None), ("a", None, "nan"), ("b", None, "-inf"),
    ]  # fmt: skip
    assert {(row["run_id"], row["step"], row["epoch"], row["fold"], row["attempt"]) for row in rows} == {
        ("run_x", 7, 1, 1, 2)
    }


@pytest.mark.parametrize("size", range(17))
def test_a_line_that_was_cut_counts_as_lost_unless_only_its_end_is_missing_and_the_next_writer_ends_it(tmp_path, size):
    path, block = tmp_path / "m.jsonl", b'{"a":1}\n' * 2
    with limited_files(tmp_path, size) as disk, JsonLines(path) as lines:
        disk.fill()
        lines.append_lines(block.splitlines(keepends=True))
    with JsonLines(path) as next_writer:
        next_writer.append({"a": 2})
    assert path.read_bytes() == block[:size] + b"\n" * (size % 8 > 0) + b'{"a":2}\n'
    assert lines.lines_lost == 2 - (size + 1) // 8


def test_a_process_that_is_killed_has_lost_no_line_it_appended(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from fvc_lib.services.stage_logs import JsonLines\n"
        "lines = JsonLines(Path(sys.argv[1]))\n"
        "for i in range(500): lines.append({'i': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert [row["i"] for row in read(path)] == list(range(500))


@pytest.fixture(params=["a full disk", "a file at its size limit"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a small disk: a tmpfs if this process may mount one, and a limit on the size of files."""
    full = request.param == "a full disk"
    with small_tmpfs(tmp_path / "disk") if full else limited_files(tmp_path) as disk:
        yield disk


def log_steps(log: MetricLog, steps: range) -> None:
    for step in steps:
        log.log(step=step, epoch=1, phase="train", metrics={"loss": 1 / (step + 1), "rate": 0.1 * step})


@pytest.mark.fault(12)
def test_a_full_disk_stops_nothing_and_the_log_says_how_many_lines_it_lost(small_disk, caplog, tally):
    path = small_disk.folder / "m.jsonl"
    log = MetricLog(path, run_id="r")
    log_steps(log, range(10))
    small_disk.fill()
    log_steps(log, range(10, 150))
    assert (lost := log.lines_lost) > 0
    small_disk.make_room()
    log_steps(log, range(150, 160))
    log.close()
    assert log.lines_lost == lost
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(lines) - len(rows) <= 1  # torn when the disk was full, and ended before the next line
    assert len(rows) == 2 * 160 - lost
    assert [row["step"] for row in rows[-20:]] == [step for step in range(150, 160) for _ in range(2)]
    first, last = [record.getMessage() for record in caplog.records]
    assert str(path) in first
    assert f"{lost:,} lines are lost" in last
    tally.add(survived=1)
