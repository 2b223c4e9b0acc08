import json
import os
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fvc_lib.analysis.read import logs as log_lines
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
        except ValueError:
            bad += 1
            continue
        needed = ("step", "phase", "metric")
        good = isinstance(row, dict) and all(row.get(name) is not None for name in needed)
        good = good and (row.get("value") is not None or row.get("flag") is not None)
        if good:
            steps.append(row["step"])
        else:
            bad += 1
    return steps, bad


BROKEN = [
    metric_line()[:40],
    b"\0" * 300,
    metric_line(2) + metric_line(3),
    b"\0\0" + metric_line(4),
    b"[1, 2]",
    b'"text"',
    b"null",
    b"{}",
    b"\xff\xfe{",
    metric_line(5, value=None),
    metric_line(6, phase=None),
    b"   \t ",
    b"",
]


@given(
    st.lists(
        st.one_of(
            st.sampled_from(BROKEN),
            st.integers(0, 10**12).map(metric_line),
            st.just(metric_line(7, flag="nan", value=None)),
        ),
        max_size=12,
    ),
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
    assert bool(notes) == bool(bad)
    if bad:
        assert notes[0].startswith(f"{bad:,} line")


def test_what_the_writer_wrote_comes_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricLog(path, run_id="x", fold=3, attempt=2) as log:
        log.log(
            step=5, epoch=1, phase="train", metrics={"loss": 0.1 + 0.2, "bad": float("nan"), "worse": float("-inf")}
        )
    frame, notes = read(path)
    assert notes == ()
    assert frame.select("step", "epoch", "phase", "metric", "value", "flag", "fold", "attempt").rows() == [
        (5, 1, "train", "loss", 0.1 + 0.2, None, 3, 2),
        (5, 1, "train", "bad", None, "nan", 3, 2),
        (5, 1, "train", "worse", None, "-inf", 3, 2),
    ]


def test_a_line_that_is_still_being_written_appears_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = metric_line(1) + b"\n" + metric_line(2)
    path.write_bytes(whole[:-9])
    assert read(path)[0]["step"].to_list() == [1]
    path.write_bytes(whole)
    assert read(path)[0]["step"].to_list() == [1, 2]


NASTY = (
    "a[1]*?.jsonl",
    'it\'s "q".jsonl',
    "'); DROP TABLE lines; --.jsonl",
    "<script>.jsonl",
    "n\nl.jsonl",
    "\U0001f3ac.jsonl",
)


@pytest.mark.parametrize("name", [*NASTY, os.fsdecode(b"bytes\xff\xfe.jsonl")])
def test_any_file_name_is_just_a_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(metric_line(1) + b"\n{torn")
    (tmp_path / "a1x.jsonl").write_bytes(metric_line(99))  # what the first name would match as a pattern
    answer = read_log_lines([LogFile(path, "run [x]'--", "stage")], METRIC_LINES)
    assert answer.frame["step"].to_list() == [1]
    assert answer.frame["run_id"].to_list() == ["run [x]'--"]
    assert len(answer.notes) == 1
    answer.notes[0].encode()  # encodable whatever the name was


def test_a_file_that_cannot_be_opened_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(metric_line(1))
    files = [LogFile(tmp_path / name, "run", "stage") for name in ("gone.jsonl", "good.jsonl")]
    answer = read_log_lines(files, METRIC_LINES)
    assert answer.frame["step"].to_list() == [1]
    assert "gone.jsonl could not be read: No such file" in answer.notes[0]


@given(
    st.lists(st.sampled_from([*BROKEN, metric_line(8), b"\xc3", b"x" * 90]), min_size=1, max_size=30),
    st.integers(1, 400),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_size_of_the_blocks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[bytes], block_bytes: int
) -> None:
    content = b"\n".join(lines)
    files = []
    for number in range(3):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(content[number * 7 :])
        files.append(LogFile(path, "run", f"stage{number}"))
    whole = read_log_lines(files, METRIC_LINES)
    with monkeypatch.context() as patched:
        patched.setattr(log_lines, "_BLOCK_BYTES", block_bytes)
        cut = read_log_lines(files, METRIC_LINES)
    assert cut.frame.equals(whole.frame)
    assert (cut.counts, cut.notes) == (whole.counts, whole.notes)


def test_the_order_of_lines_is_kept_where_there_are_more_than_a_thread_takes(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    line = b'{"step":%d,"phase":"t","metric":"m","value":1}'
    path.write_bytes(b"\n".join(line % step for step in range(200_000)))
    frame, _ = read(path)
    assert frame["step"].equals(pl.Series("step", range(200_000)))
    assert frame["line"].equals(pl.Series("line", range(1, 200_001)))


def test_the_note_names_the_first_lines_and_the_first_files_alone(tmp_path: Path) -> None:
    files = []
    for number in range(12):
        path = tmp_path / f"{number:02d}.jsonl"
        path.write_bytes(metric_line() + b"\n" + b"torn\n" * (5 if number == 0 else 1))
        files.append(LogFile(path, "run", "stage"))
    (note,) = read_log_lines(files, METRIC_LINES).notes
    assert note.startswith(
        "16 lines of 28 could not be read and are left out (run/00.jsonl: lines 2, 3, 4 and 2 more; "
    )
    assert note.endswith("run/09.jsonl: line 2; and in 2 more files).")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "dangling"])
def test_what_is_no_plain_file_is_named_and_nobody_waits_for_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    (tmp_path / "good.jsonl").write_bytes(metric_line(3))
    answer = read_log_lines([LogFile(path, "r", "s"), LogFile(tmp_path / "good.jsonl", "r", "s")], METRIC_LINES)
    assert answer.frame["step"].to_list() == [3]
    assert "odd.jsonl could not be read" in answer.notes[0]
