"""What a user sees who gives a corpus that no honest result can come from: one error, and a run folder that tells it.

Each corpus goes through the command line as it is typed. What its names and lists tell ends before a run begins; the
rest ends in the first stages.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.execution.run.status import RunStatus, read_status
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import INDEX, REJECTED, read_table

MakeVideo = Callable[..., Path]

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # each starts a kernel
SMALL = {"num_folds": "2", "fixed_size": "32", "epochs": "1", "shuffled_label_control": "false"}
# One line each; Python's own words for trouble belong into the record, not on the terminal.
NOISE = ("Traceback", 'File "', "Warning", "\x1b[")


@dataclass(frozen=True)
class Ended:
    """What a command left behind: exit code, terminal, and the run folder where one was begun."""

    exit_code: int
    stdout: str
    stderr: str
    runs_dir: Path

    @property
    def shown(self) -> str:
        return self.stdout + self.stderr

    @property
    def run(self) -> RunPaths:
        (run,) = list_runs(self.runs_dir)
        return run

    @property
    def status(self) -> RunStatus:
        return read_status(self.run)

    @property
    def rejected(self) -> pl.DataFrame:
        return read_table(self.run.rejected, REJECTED)


def use_corpus(corpus: Path, folder: Path) -> Ended:
    """Run everything on ``corpus`` with all that is written below ``folder``; the corpus must stay as it was."""
    before = _contents(corpus)
    given = [text for name, value in {"corpus": str(corpus), **SMALL}.items() for text in ("-p", name, value)]
    places = {"FVC_RUNS_DIR": "runs", "FVC_CACHE_DIR": "cache", "FVC_DATA_DIR": "data"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_notebooks.py"), "--jobs", "1", *given],  # so no step is tried out
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, **{name: str(folder / value) for name, value in places.items()}},
    )  # fmt: skip
    assert _contents(corpus) == before
    return Ended(done.returncode, done.stdout, done.stderr, folder / "runs")


def assert_one_clear_error(ended: Ended, exit_code: int, *words: str) -> None:
    """The exit code, and one line that holds all ``words``, on a terminal without noise."""
    assert ended.exit_code == exit_code, ended.shown
    errors = [line for line in ended.shown.splitlines() if "what happened: " in line or line.startswith("error: ")]
    assert len(errors) == 1, ended.shown
    assert [word for word in words if word not in errors[0]] == [], errors[0]
    assert [noise for noise in NOISE if noise in ended.shown] == [], ended.shown


def assert_told_by_its_run(ended: Ended, stage: str, error: str, *words: str) -> None:
    """``status.json`` and the folder agree with the terminal: this stage failed, none after it began."""
    status, run = ended.status, ended.run
    assert (status.state, status.exit_code, status.runner_pid) == ("failed", ended.exit_code, None)
    failed = status.stages[stage]
    assert (failed.state, failed.exit_code, failed.attempts) == ("failed", ended.exit_code, 1)
    assert failed.error is not None
    assert failed.error.name == error
    assert all(word in failed.error.message for word in words)
    assert failed.error.message in ended.stdout
    for key, other in status.stages.items():
        expected = ("done", 1) if key < stage else ("pending", 0)
        assert key == stage or (other.state, other.attempts) == expected, key
    assert_nothing_half_written(run, stage, list(status.stages))
    assert error in run.report_html.read_text()


def assert_nothing_half_written(run: RunPaths, failed: str, stages: Iterable[str]) -> None:
    """Only stages before ``failed`` count as finished; tables that exist are whole; no temporary file is left."""
    finished = {f"{stage}.ipynb" for stage in stages if stage < failed}
    assert {path.name for path in run.notebooks.glob("*.ipynb")} == finished | {f"{failed}.partial.ipynb"}
    assert {path for path in stages if run.stage_checkpoint(path).exists()} == {s for s in stages if s < failed}
    assert not run.folds.exists()
    assert not run.augmented_metadata.exists()
    for path, schema in ((run.index, INDEX), (run.rejected, REJECTED)):
        if path.exists():
            read_table(path, schema)
    written = [path for path in run.root.parent.parent.rglob("*") if path.is_file()]
    assert [path for path in written if "tmp" in path.name or path.name.startswith(".")] == []


def _contents(corpus: Path) -> dict[Path, bytes]:
    """Every file of the folder that holds the corpus."""
    folder = corpus if corpus.is_dir() else corpus.parent
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_manifest(path: Path, *rows: tuple[str, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label"), *rows])
    return path


@pytest.mark.fault(7, 9)
def test_no_readable_video(tmp_path):
    for label in ("real", "fake"):
        (tmp_path / "corpus" / label).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "corpus" / label / f"clip{number}.mp4").write_text(f"this is {label} text, not a video\n")
    ended = use_corpus(tmp_path / "corpus", tmp_path)
    words = ("no usable labelled video", "4 x unreadable", "Repair or fetch")
    assert_one_clear_error(ended, 3, "DataError", *words)
    assert_told_by_its_run(ended, "01_data_index", "DataError", *words)
    assert sorted(ended.rejected["path"]) == ["fake/clip0.mp4", "fake/clip1.mp4", "real/clip0.mp4", "real/clip1.mp4"]


LAYOUTS = ("A corpus is (1)", "(2)", "(3)")


@pytest.fixture(scope="module")
def bad_rows(tmp_path_factory: pytest.TempPathFactory, make_video: MakeVideo) -> Ended:
    """A manifest with five bad rows; without them it holds one scene at four qualities, so a single group."""
    folder = tmp_path_factory.mktemp("bad_rows")
    make_video(folder / "elsewhere.mp4", 7)
    for number, crf in enumerate((18, 23, 28, 33)):
        make_video(folder / f"corpus/copy{number}.mp4", 1, crf=crf)
    make_video(folder / "corpus/odd.mp4", 2)
    good = [(f"copy{number}.mp4", ("real", "fake")[number % 2]) for number in range(4)]
    bad = [
        ("copy0.mp4", "real"), ("./copy1.mp4", "fake"),
        ("odd.mp4", "parody"), ("odd.mp4", ""),
        ("../elsewhere.mp4", "fake"),
    ]  # fmt: skip
    return use_corpus(write_manifest(folder / "corpus/list.csv", *good, *bad), folder)


@pytest.mark.long
@pytest.mark.fault(35)
def test_bad_rows_are_counted_and_the_run_goes_on_without_them(bad_rows):
    assert bad_rows.status.stages["01_data_index"].state == "done"
    reasons = {"duplicate_path": 2, "label_not_used": 2, "outside_corpus": 1}
    assert Counter(bad_rows.rejected["reason"]) == reasons
    assert set(bad_rows.rejected["row"]) == {5, 6, 7, 8, 9}
    index = read_table(bad_rows.run.index, INDEX)
    assert sorted(index["path"]) == [f"copy{number}.mp4" for number in range(4)]
    record = bad_rows.run.executed_notebook("01_data_index").read_text()
    assert [reason for reason in reasons if reason not in record] == []


@pytest.mark.long
def test_fewer_groups_than_folds(bad_rows):
    words = ("num_folds: got 2", "1 with real videos and 1 with fake videos", "videos of other events")
    assert_one_clear_error(bad_rows, 3, "DataError", *words)
    assert_told_by_its_run(bad_rows, "02_folds", "DataError", *words)
