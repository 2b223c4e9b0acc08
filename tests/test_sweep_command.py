"""``run_notebooks.py sweep``: which runs it makes, what it refuses before anything runs, and what a kill costs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.analysis.read.comparison_tables import TABLE_FILES
from fvc_lib.command_line.sweep import Sweep, combinations, runs_at_once, values_to_sweep
from fvc_lib.execution.run.record import begin_run, run_hash
from fvc_lib.execution.run.status import read_status
from fvc_lib.services.atomic_files import read_json_object, sha256_of_json
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.tables import FOLDS, read_table
from tests.faults.small_runs import ROOT, SMALL, Place, results_of, small_corpus, wait_for_no_orphans


def test_values_with_a_comma_are_given_one_by_one():
    assert values_to_sweep([("model", "frame_cnn, r2plus1d_small"), ("seed", "0,1,1")]) == {
        "model": ["frame_cnn", "r2plus1d_small"],
        "seed": ["0", "1"],
    }
    listed = [("augmentations", "flip,noise"), ("augmentations", "flip")]
    assert values_to_sweep(listed) == {"augmentations": ["flip,noise", "flip"]}


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ([("modle", "frame_cnn")], "Did you mean 'model'"),
        ([("model", "frame_cnn,frame_cn")], "Did you mean 'frame_cnn'"),
        ([("epochs", "3,many")], "got 'many'"),
        ([("epochs", "3,,4")], "single commas"),
        ([("num_folds", "3,5")], "other videos or folds"),
        ([("corpus", "a,b")], "other videos or folds"),
        ([("near_duplicate_bits", "0,10")], "other videos or folds"),
        ([("mem_gb", "1,2")], "changes no number"),
    ],
)
def test_what_cannot_be_compared_or_is_misspelt_is_refused(over, words):
    with pytest.raises(UsageError, match=words):
        values_to_sweep(over)


def test_every_seed_has_the_folds_of_the_first(tmp_path):
    values = [("runs_dir", str(tmp_path / "runs"))]
    members = combinations([("seed", "4,5"), ("epochs", "1,2")], values=values)
    assert [one.name for one in members][:2] == ["seed 4, epochs 1", "seed 4, epochs 2"]
    configs = [one.asked.config for one in members]
    dealt_by = [config.seed if config.folds_seed is None else config.folds_seed for config in configs]
    assert dealt_by == [4] * 4
    assert configs[0].folds_seed is None, "a run alone with these values is the very same"
    assert {one.state for one in members} == {"new"}
    begin_run(configs[1], command="test")
    again = combinations([("seed", "4,5"), ("epochs", "1,2")], values=values)
    assert [one.state for one in again] == ["new", "unfinished", "new", "new"]
    assert again[1].run_hash == run_hash(configs[1])
    with pytest.raises(UsageError, match="with -p and with --over"):
        combinations([("seed", "4,5")], values=[*values, ("seed", "1")])
    with pytest.raises(UsageError, match="task video"):
        combinations([("seed", "4,5")], values=[*values, ("task", "image")])


@pytest.mark.parametrize(
    ("runs", "gpus", "folds", "ranks", "jobs", "expected"),
    [
        (4, 0, 2, 1, None, 1),  # none
        (4, 1, 2, 1, None, 1),
        (4, 2, 2, 1, None, 1),  # one run takes both
        (4, 4, 2, 1, None, 2),
        (4, 8, 2, 1, None, 4),
        (3, 8, 2, 1, None, 3),
        (2, 8, 5, 1, None, 1),  # two rounds with one run at a time, and with both
        (4, 8, 2, 2, None, 2),
        (4, 8, 2, 1, 1, 4),  # one training at a time in each
        (4, 2, 2, 4, None, 1),  # fewer GPUs than ranks
    ],
)
def test_runs_of_a_sweep_are_side_by_side_where_one_leaves_gpus_idle(runs, gpus, folds, ranks, jobs, expected):
    config = resolve_config({"num_folds": folds, "num_ranks": ranks}, environ={})
    assert runs_at_once(runs, gpus, config, jobs) == expected


def test_a_run_beside_others_leaves_when_the_sweep_is_killed():
    program = (
        "import threading, time; from fvc_lib.command_line import sweep\n"
        "threading.Thread(target=sweep._leave_with_the_sweep, daemon=True).start()\n"
        "print('works', flush=True); time.sleep(600)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "works\n"
        assert process.poll() is None
        process.stdin.close()  # as when the process that holds the other end is gone
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.long
def test_seeds_side_by_side_have_gpus_of_their_own_and_the_same_results_as_in_turn(tmp_path):
    # No GPU is here: the runs are dealt what CUDA_VISIBLE_DEVICES names, and train on the CPU, where torch finds none.
    corpus = small_corpus("video", tmp_path / "corpus")
    small = {**SMALL, "epochs": 1, "corpus": str(corpus), "memory_preflight": False, "real_source_control": False}
    given = [text for name, value in small.items() for text in ("-p", name, str(value))]
    command = [sys.executable, str(ROOT / "run_notebooks.py"), "sweep", *given, "--over", "seed", "0,1"]
    found, said, dealt = {}, {}, set()
    for name, gpus in (("beside", "3,5,7,9"), ("in_turn", "")):
        place = Place(tmp_path / name, corpus)
        place.folder.mkdir()
        environment = {**place.environment(), "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name], said[name] = {run_config(run).seed: results_of(run) for run in list_runs(place.runs)}, done.stdout
        dealt.update(
            read_json_object(run.run_json)["attempts"][0]["hardware"]["gpus_visible"] for run in list_runs(place.runs)
        )
    assert "2 runs at once: 3,5 | 7,9 of 4 GPUs" in said["beside"]
    assert "runs at once" not in said["in_turn"]
    assert dealt == {"3,5", "7,9", ""}
    assert found["beside"] == found["in_turn"]
    assert found["beside"].keys() == {0, 1}


@pytest.mark.slow
def test_a_comparison_is_told_what_has_no_run_and_one_that_fails_leaves_no_earlier_tables(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("import missing_module")
    values = [("runs_dir", str(tmp_path / "runs")), ("confidence", "0.9"), ("bootstrap_replicates", "300")]
    members = combinations([("model", f"{broken}:Net,frame_cnn,r2plus1d_small")], values=values)
    begun = [replace(one, run=begin_run(one.asked.config, command="test"), state="finished") for one in members[1:]]
    name = sha256_of_json(sorted(one.run_hash for one in members))[:8]
    folder = tmp_path / f"runs/sweep/comparison_{name}"
    folder.mkdir()
    for table in TABLE_FILES:
        (folder / table).write_text("of an earlier comparison")

    assert Sweep([members[0], *begun], jobs=None, executor="local").execute() == 2
    said = capsys.readouterr()
    assert f"{members[0].name} is not finished: the reference is model frame_cnn" in said.out
    assert "the comparison was not made: DataError: no run can be compared" in said.err
    assert "it has no run: its command failed with exit code 2. It was to be the reference." in said.err
    record = (folder / "08_detector_comparison.ipynb").read_text()
    assert "confidence = 0.9" in record
    assert "bootstrap_replicates = 300" in record
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
    assert numbers["detector"].to_list() == ["frame_cnn", "r2plus1d_small"]
    assert numbers["seeds"].to_list() == [0, 0]
    assert numbers["num_parameters"].null_count() == numbers["milliseconds_per_clip"].null_count() == 0
    assert "tran2018closer" in page.with_name("references.bib").read_text()
    index = (place.runs / "index.html").read_text()
    assert page.relative_to(place.runs).as_posix() in index


def test_an_index_shows_the_runs_of_a_comparison_together(tmp_path: Path):
    from fvc_lib.analysis.pages.runs_index import write_runs_index

    values = [("runs_dir", str(tmp_path / "runs"))]
    for one in combinations([("seed", "0,1")], values=values):
        begin_run(one.asked.config, command="test")
    (tmp_path / "runs/sweep/comparison_1").mkdir()
    (tmp_path / "runs/sweep/comparison_1/comparison.html").write_text("")
    html = write_runs_index(tmp_path / "runs").read_text()
    together = html.partition('class="together"')[2]
    assert 'href="sweep/comparison_1/comparison.html"' in together
    assert together.count('class="run"') == 2
