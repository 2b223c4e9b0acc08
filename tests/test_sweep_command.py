"""``run_notebooks.py sweep``: which runs it makes, what it refuses before anything runs, and what a kill costs."""

import subprocess
import sys
import time

import polars as pl
import pytest

from fvc_lib.analysis.read.detector_comparison import TABLE_FILES
from fvc_lib.command_line.sweep import Combination, combinations, execute
from fvc_lib.execution.run.record import begin_run, run_hash
from fvc_lib.execution.run.status import read_status
from fvc_lib.services.atomic_files import sha256_of_json, write_text
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.tables import FOLDS, read_table
from tests.faults.small_runs import ROOT, SMALL, Place, results_of, small_corpus, wait_for_no_orphans


def test_values_with_a_comma_are_given_one_by_one():
    members = combinations([("model", "frame_cnn, r2plus1d_small"), ("seed", "0,1,1")])
    of = [(one.given.config.model, one.given.config.seed) for one in members]
    assert of == [("frame_cnn", 0), ("frame_cnn", 1), ("r2plus1d_small", 0), ("r2plus1d_small", 1)]
    listed = combinations([("augmentations", "flip,noise"), ("augmentations", "flip")])
    assert [one.name for one in listed] == ["augmentations flip,noise", "augmentations flip"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("modle", "frame_cnn"),
        ("epochs", "3,,4"),
        ("num_folds", "3,5"),
        ("corpus", "a,b"),
        ("mem_gb", "1,2"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(name, values):
    with pytest.raises(UsageError, match=name):
        combinations([(name, values)])


def test_every_seed_has_the_folds_of_the_first(tmp_path):
    values = [("runs_dir", str(tmp_path / "runs"))]
    members = combinations([("seed", "4,5"), ("epochs", "1,2")], values=values)
    assert [one.name for one in members][:2] == ["seed 4, epochs 1", "seed 4, epochs 2"]
    configs = [one.given.config for one in members]
    dealt_by = [config.seed if config.folds_seed is None else config.folds_seed for config in configs]
    assert dealt_by == [4] * 4
    assert configs[0].folds_seed is None, "a run alone with these values has the same hash"
    assert {one.find() for one in members} == {"new"}
    begin_run(configs[1], command="test")
    again = combinations([("seed", "4,5"), ("epochs", "1,2")], values=values)
    assert [one.find() for one in again] == ["new", "unfinished", "new", "new"]
    assert again[1].run_hash == run_hash(configs[1])


@pytest.mark.slow
def test_a_failed_comparison_leaves_no_earlier_tables(tmp_path, capsys, monkeypatch):
    values = [("runs_dir", str(tmp_path / "runs")), ("confidence", "0.9"), ("bootstrap_replicates", "300")]
    members = combinations([("model", "frame_cnn,r2plus1d_small")], values=values)
    for one in members:
        begin_run(one.given.config, command="test")
    find = Combination.find
    monkeypatch.setattr(Combination, "find", lambda one: find(one).replace("unfinished", "finished"))
    name = sha256_of_json(sorted(one.run_hash for one in members))[:8]
    folder = tmp_path / f"runs/sweep/comparison_{name}"
    write_text(folder / "08_detector_comparison.ipynb", "of an earlier comparison")
    for table in TABLE_FILES:
        (folder / table).write_text("of an earlier comparison")

    assert execute(members, None, "local") == 1
    assert "DataError" in capsys.readouterr().err
    record = (folder / "08_detector_comparison.ipynb").read_text()
    for text in ("confidence = 0.9", "bootstrap_replicates = 300"):
        assert text in record
    assert {path.name for path in folder.iterdir()} & set(TABLE_FILES) == set()


@pytest.mark.long
def test_a_sweep_killed_in_its_second_run_goes_on_and_ends_with_a_comparison(tmp_path):
    place = Place(tmp_path / "here", small_corpus("video", tmp_path / "corpus"))
    place.folder.mkdir()
    small = {**SMALL, "epochs": 1, "corpus": str(place.corpus)}
    given = [text for name, value in small.items() if name != "model" for text in ("-p", name, str(value))]
    over = ["--over", "model", "frame_cnn,r2plus1d_small"]
    command = [sys.executable, str(ROOT / "run_notebooks.py"), "sweep", *given, *over]

    def start() -> subprocess.Popen[str]:
        output, error = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            command, cwd=place.folder, env=place.environment(), text=True, stdout=output, stderr=error
        )

    killed = start()
    while (runs := list_runs(place.runs)) is not None and len(runs) < 2:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.1)
    killed.kill()
    killed.communicate()
    wait_for_no_orphans()
    before = results_of(runs[0])

    process = start()
    shown, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, shown
    assert "2 runs on the same folds, 1 of them finished" in shown
    runs = list_runs(place.runs)
    assert len(runs) == 2
    assert results_of(runs[0]) == before
    assert {read_status(run).state for run in runs} == {"done"}
    folds = [read_table(run.folds, FOLDS).sort("video_id") for run in runs]
    assert all(each.equals(folds[0]) for each in folds)

    (page,) = place.runs.glob("sweep/comparison_*/comparison.html")
    assert "r2plus1d_small" in page.read_text()
    numbers = pl.read_csv(page.with_name("detectors.csv"))
    for quantity in ("roc_auc", "num_parameters", "milliseconds_per_clip"):
        known = numbers.filter(quantity=quantity).drop_nulls("value")
        assert known["detector"].to_list() == ["frame_cnn", "r2plus1d_small"]
    assert page.relative_to(place.runs).as_posix() in (place.runs / "index.html").read_text()
