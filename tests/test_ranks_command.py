"""``-p num_ranks auto`` as it is typed: when it becomes a number, where that stands, and what trains by it."""

from __future__ import annotations

import pytest

from fvc_lib.command_line.run_command import RunCommand, RunOptions
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.which_run import given_values, open_run
from fvc_lib.services.errors import UsageError
from fvc_lib.services.home import NOTEBOOKS
from fvc_lib.services.parameters import run_config

AUTO = ("num_ranks", "auto")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


def given(tmp_path, *values, **options):
    folders = [(name, str(tmp_path / name)) for name in ("runs_dir", "cache_dir", "data_dir")]
    return given_values((), (), [*folders, ("model", "frame_cnn"), ("num_folds", "2"), *values], options)


def test_a_new_run_has_the_ranks_that_the_gpus_allow(tmp_path):
    command = RunCommand(NOTEBOOKS, RunOptions(), given(tmp_path, AUTO))
    assert command.config.num_ranks == 4
    one_by_one = RunCommand(NOTEBOOKS, RunOptions(jobs=1), given(tmp_path, AUTO))
    assert one_by_one.config.num_ranks == 8
    assert RunCommand(NOTEBOOKS, RunOptions(), given(tmp_path)).config.num_ranks == 1


def test_a_submitted_run_needs_a_number_of_ranks(tmp_path):
    with pytest.raises(UsageError, match="num_ranks NUMBER"):
        RunCommand(NOTEBOOKS, RunOptions(executor="slurm"), given(tmp_path, AUTO))


def test_a_resumed_run_keeps_its_ranks_on_a_machine_with_other_gpus_and_a_fork_does_not(tmp_path, monkeypatch):
    made = RunCommand(NOTEBOOKS, RunOptions(), given(tmp_path, AUTO))
    run = begin_run(made.config, command="test")
    assert "num_ranks: 4  #" in run.params_yaml.read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    resumed = RunCommand(NOTEBOOKS, RunOptions(resume="latest"), given(tmp_path, AUTO))
    assert resumed.config.num_ranks == 4
    assert RunCommand(NOTEBOOKS, RunOptions(resume="latest"), given(tmp_path, ("num_ranks", "2"))).config.num_ranks == 2
    fork = RunCommand(NOTEBOOKS, RunOptions(resume="latest", fork=True), given(tmp_path, AUTO))
    assert fork.config.num_ranks == 1


def test_a_run_begun_in_a_notebook_has_all_gpus_for_its_training(tmp_path, capsys):
    values = {"num_ranks": "auto", "runs_dir": str(tmp_path / "runs")}
    run, config, is_new = open_run("10_image_recognition", "new", values, command="test")
    assert config.num_ranks == run_config(run.params_yaml).num_ranks == 8
    assert is_new
    assert "num_ranks auto: 8 (" in capsys.readouterr().out
