"""``-p num_ranks auto`` as it is typed: when it becomes a number, where that stands, and what trains by it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil
import pytest

from fvc_lib.command_line.run_command import NOTEBOOKS, RunCommand, Wanted
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.run.which_run import ask, find_or_begin
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import parse_text_value, run_config
from fvc_lib.services.run_paths import list_runs
from tests.faults.small_runs import SMALL, Place, metrics_of, results_of, small_corpus
from tests.kits.rank_kit import rank_processes

AUTO = ("num_ranks", "auto")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


def asked(tmp_path, *values, **options):
    folders = [(name, str(tmp_path / name)) for name in ("runs_dir", "cache_dir", "data_dir")]
    return ask((), (), [*folders, ("model", "frame_cnn"), ("num_folds", "2"), *values], options)


def test_a_new_run_has_the_ranks_that_the_gpus_allow(tmp_path):
    command = RunCommand(NOTEBOOKS, Wanted(), asked(tmp_path, AUTO))
    assert command.config.num_ranks == 4
    one_by_one = RunCommand(NOTEBOOKS, Wanted(jobs=1), asked(tmp_path, AUTO))
    assert one_by_one.config.num_ranks == 8
    assert RunCommand(NOTEBOOKS, Wanted(), asked(tmp_path)).config.num_ranks == 1


def test_a_submitted_run_has_the_ranks_that_a_node_of_the_site_has_gpus_for(tmp_path, monkeypatch):
    site = tmp_path / "site.conf"
    site.write_text("GPUS=1\nRANKS_PER_NODE=6\n")
    monkeypatch.setenv("FVC_SITE", str(site))
    for wanted, ranks in ((Wanted(executor="slurm"), 6), (Wanted(executor="slurm", one_job=True, jobs=2), 3)):
        assert RunCommand(NOTEBOOKS, wanted, asked(tmp_path, AUTO)).config.num_ranks == ranks


def test_a_resumed_run_keeps_its_ranks_on_a_machine_with_other_gpus_and_a_fork_does_not(tmp_path, monkeypatch):
    made = RunCommand(NOTEBOOKS, Wanted(), asked(tmp_path, AUTO))
    run = begin_run(made.config, command="test", chosen=made._chosen)
    assert "num_ranks: 4  #" in run.params_yaml.read_text()
    record = json.loads(run.run_json.read_text())
    assert record["params"]["num_ranks"] == 4
    assert record["chosen"].startswith("num_ranks auto: 4 (2 trainings at once")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    resumed = RunCommand(NOTEBOOKS, Wanted(resume="latest"), asked(tmp_path, AUTO))
    assert resumed.config.num_ranks == 4
    assert RunCommand(NOTEBOOKS, Wanted(resume="latest"), asked(tmp_path)).config.num_ranks == 4
    assert RunCommand(NOTEBOOKS, Wanted(resume="latest"), asked(tmp_path, ("num_ranks", "2"))).config.num_ranks == 2
    fork = RunCommand(NOTEBOOKS, Wanted(resume="latest", fork=True), asked(tmp_path, AUTO))
    assert fork.config.num_ranks == 1


def test_a_run_begun_in_a_notebook_has_all_gpus_for_its_training(tmp_path, capsys, monkeypatch):
    values = {"task": "image", "num_ranks": "auto", "runs_dir": str(tmp_path / "runs")}
    run, config = find_or_begin("10_image_recognition", "new", values, False)
    assert config.num_ranks == run_config(run).num_ranks == 8
    assert "num_ranks auto: 8 (1 training, 8 GPUs here" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    again, its_config = find_or_begin("10_image_recognition", "", values, False)
    assert (again, its_config.num_ranks) == (run, 8)
    with pytest.raises(UsageError, match="num_ranks 8 -> 3"):
        find_or_begin("10_image_recognition", "", {**values, "num_ranks": 3}, False)


@pytest.mark.parametrize("text", ["some", "-1", "1.5", ""])
def test_what_is_neither_a_number_of_ranks_nor_auto_is_refused(text):
    with pytest.raises(UsageError, match=r"num_ranks: got .*, wanted a number from 1 on, or auto"):
        parse_text_value("num_ranks", text)


def test_more_ranks_than_a_step_has_samples_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"num_ranks 17: an optimizer step has 16 samples .*at most as many ranks"):
        RunCommand(NOTEBOOKS, Wanted(), asked(tmp_path, ("num_ranks", "17")))


def _gpus_of_ranks(runs: Path) -> dict[tuple[str, str], str]:
    """The GPUs of the living ranks of all folds, by fold and rank."""
    found = {}
    for log in runs.glob("*/run_*/logs/04_fold_training_fold_*_ranks.log"):
        fold = log.stem.removeprefix("04_fold_training_fold_").removesuffix("_ranks")
        for rank, process in rank_processes(log).items():
            with contextlib.suppress(psutil.Error):
                found[fold, str(rank)] = process.environ()["CUDA_VISIBLE_DEVICES"]
    return found


@pytest.mark.long
def test_two_trainings_at_once_of_two_ranks_have_gpus_of_their_own_and_the_bits_of_ranks_by_hand(
    tmp_path: Path,
) -> None:
    """No GPU is here: groups of what CUDA_VISIBLE_DEVICES names are dealt, and torch, which finds none, takes gloo."""
    corpus = small_corpus("video", tmp_path / "corpus")
    values = {**SMALL, "epochs": 1, "memory_preflight": False, "real_source_control": False}
    runs, seen = {}, dict[tuple[str, str], str]()
    for name, ranks, gpus, jobs in (("auto", "auto", "3,5,7,9", "auto"), ("by_hand", "2", "", "1")):
        place = Place(tmp_path / name, corpus, {**values, "num_ranks": ranks})
        process = place.start("--jobs", jobs, variables={"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"})
        while process.poll() is None and name == "auto":
            seen |= _gpus_of_ranks(place.runs)
            time.sleep(0.05)
        shown, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, shown
        (runs[name],) = list_runs(place.runs)
        if name == "auto":
            assert "num_ranks auto: 2 (2 trainings at once, 4 GPUs here (3,5,7,9): 2 for each)" in shown
    assert [run_config(run).num_ranks for run in runs.values()] == [2, 2]
    folds = read_status(runs["auto"]).stages
    first, second = (folds[f"04_fold_training_fold_{fold}"] for fold in range(2))
    assert max(first.started_utc, second.started_utc) < min(first.finished_utc, second.finished_utc)
    assert seen == {("0", "0"): "3,5", ("0", "1"): "3,5", ("1", "0"): "7,9", ("1", "1"): "7,9"}
    assert results_of(runs["auto"]) == results_of(runs["by_hand"])
    assert metrics_of(runs["auto"]) == metrics_of(runs["by_hand"])
