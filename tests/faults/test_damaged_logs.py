"""Row 23: a power cut, a full disk or a second writer damages a log; good lines are read, bad ones counted."""

import re
from pathlib import Path

import pytest

from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog

STAGE = "04_fold_training"
NUM_LINES = 20


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "e" / "run_20260101_000000_aaaaaaaa")


def write(run: RunPaths, steps: range, attempt: int = 1) -> Path:
    path = run.metrics(STAGE, 0)
    with MetricLog(path, run_id=run.run_id, fold=0, attempt=attempt) as log:
        for step in steps:
            log.log(step=step, epoch=1, phase="train", metrics={"loss": step / 7})
    return path


def assert_read(run: RunPaths, steps: list[int], *, bad: int) -> None:
    """Check the steps of the learning curves and the number of lines that their notes leave out."""
    answer = learning_curves([run])
    counts = [re.match(r"([\d,]+) lines? of .*jsonl", note) for note in answer.notes]
    assert sum(int(count[1].replace(",", "")) for count in counts if count) == bad
    assert answer.frame.select("step", "value").rows() == [(step, step / 7) for step in steps]


@pytest.mark.fault(23)
def test_a_line_torn_at_any_byte_costs_itself_and_the_next_attempt_is_whole(run, tally):
    whole = write(run, range(NUM_LINES)).read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1):
        path = run.metrics(STAGE, 0)
        path.write_bytes(whole[:cut])
        write(run, range(NUM_LINES - 1, NUM_LINES + 3), attempt=2)
        assert path.read_bytes().startswith(whole[:cut] + b"\n{")
        if (cut - start) % 16 == 0:  # reading costs more than tearing
            assert_read(run, list(range(NUM_LINES + 3)), bad=1)
        tally.add(survived=1)


@pytest.mark.fault(23)
def test_a_tail_of_nuls_costs_the_lines_it_replaced(run):
    """As a file system leaves it that had noted the size, but not yet the content, when the power went."""
    path = write(run, range(NUM_LINES))
    lines = path.read_bytes().splitlines(keepends=True)
    rest = b"".join(lines[-3:])
    path.write_bytes(b"".join(lines[:-3]) + rest[:57] + bytes(len(rest) - 57))
    assert_read(run, list(range(NUM_LINES - 3)), bad=1)
    write(run, range(NUM_LINES - 3, NUM_LINES), attempt=2)
    assert_read(run, list(range(NUM_LINES)), bad=1)


@pytest.mark.fault(23)
def test_nuls_in_the_middle_and_glued_lines_cost_themselves_alone(run):
    path = write(run, range(NUM_LINES))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = bytes(len(lines[4]) - 1) + b"\n"
    lines[9] = lines[9].rstrip(b"\n")  # glued to the tenth
    lines[15:17] = [lines[15][:30] + lines[16]]  # torn, and the next written behind it
    path.write_bytes(b"".join(lines))
    run.metrics(STAGE, 1).write_bytes(bytes(4096))  # of this log nothing is left
    assert_read(run, [step for step in range(NUM_LINES) if step not in {4, 9, 10, 15, 16}], bad=4)
