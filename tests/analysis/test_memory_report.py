import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fvc_lib.analysis.memory.report import main
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.memory_story import troubled_run


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def troubled(tmp_path: Path) -> RunPaths:
    return troubled_run(tmp_path / "e" / "run_x")


def test_a_run_is_explained_from_its_peak_to_what_to_change(troubled: RunPaths) -> None:
    shown = report(troubled.root)
    assert shown.exit_code == 0
    for told in (
        "Memory peaks at 1.93 GB of 2.00 GB allowed (96.5%), in 04_fold_training, fold 1, train.",
        "Memory went above 90% of its budget twice, 6.0 s in all",
        "Memory leaks: 92.0 MB more with every epoch in 04_fold_training, fold 0, train.",
        "04_fold_training, fold 1  8 × 64 × 6 × 96 × 96  float32        3  340 MB",
        "redone with micro-batch 4 instead of 8  memory/oom/04_fold_training_fold_1/oom_000002_backward.json",
        "The prediction is off by more than 25% in 1 of 2 trainings",
        "-p batch_size 4 saves the retries",
    ):
        assert told in shown.stdout, told
    headings = ["Peak per phase", "Close to the limit", "Growth per epoch", "Out of memory",
                "Prediction and measurement", "What to change"]  # fmt: skip
    lines = shown.stdout.splitlines()
    assert [line for line in lines if line in headings] == headings
    assert "could not be read" not in shown.stdout


def test_one_log_is_explained_with_the_events_beside_it(troubled: RunPaths) -> None:
    log = troubled.memory("04_fold_training", 1)
    shown = report(log)
    assert "1 × out of memory" in shown.stdout
    assert "fold 0" not in shown.stdout
    same = report(troubled.memory_events("04_fold_training", 1)).stdout
    assert same.splitlines()[1:] == shown.stdout.splitlines()[1:]
    assert report(log.parent).stdout == report(troubled.root).stdout


def test_a_log_alone_in_some_folder_is_enough(troubled: RunPaths, tmp_path: Path) -> None:
    copy = tmp_path / "sent by mail.jsonl"
    copy.write_bytes(troubled.memory("04_fold_training", 0).read_bytes())
    shown = report(copy)
    assert shown.exit_code == 0
    assert "Memory leaks" in shown.stdout
    assert "no preflight is recorded" in shown.stdout


def test_a_torn_log_is_explained_and_what_is_lost_is_counted(troubled: RunPaths) -> None:
    log = troubled.memory("04_fold_training", 0)
    log.write_bytes(log.read_bytes()[:-40] + b"\n" + bytes(500) + b"\n" + b'{"timestamp":1}{"timestamp":2}\n')
    shown = report(log)
    assert shown.exit_code == 0
    assert "3 lines of run_x/04_fold_training_fold_0.jsonl could not be read" in shown.stdout


@pytest.mark.parametrize(
    "content", [b"\x00" * 4096, b'{"step": 1, "metric": "loss"}\n' * 3, b"\x89PNG" + bytes(range(256)) * 9000, b"\n\n"]
)
def test_what_is_no_memory_log_is_refused_with_what_was_found(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    shown = report(path)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert "is no memory log" in shown.stderr
    assert "Give one of a run's memory/*.jsonl files" in shown.stderr


def test_what_does_not_exist_or_is_no_run_is_refused(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "a b.jsonl", "no such file or folder"), (tmp_path, "is no run folder")):
        shown = report(path)
        assert (shown.exit_code, told in shown.stderr) == (2, True), shown.stderr
    assert report().exit_code == 2


def test_a_log_that_was_only_just_opened_has_nothing_yet(tmp_path: Path) -> None:
    path = RunPaths(tmp_path / "run_x").memory("02_folds")
    path.parent.mkdir(parents=True)
    path.touch()
    for subject in (path, path.parents[1]):
        shown = report(subject)
        assert shown.exit_code == 0
        assert shown.stdout.splitlines()[1:] == ["", "No memory samples are recorded."]


def test_it_needs_no_terminal_and_no_unicode(troubled: RunPaths) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "fvc_lib.analysis.memory.report", str(troubled.root)]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = done.stdout.decode("ascii")
    assert "Memory leaks" in shown
