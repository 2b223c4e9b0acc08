"""``--resume`` with other values and ``--fork`` as they are typed: what is refused, what is offered, what a fork is."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fvc_lib.command_line.main import main
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import run_lock
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import run_config
from fvc_lib.services.run_paths import RunPaths, list_runs


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    folders = {name: str(tmp_path / name) for name in ("runs_dir", "cache_dir", "data_dir")}
    small = {"model": "frame_cnn", "num_frames": 1, "fixed_size": 32, "num_folds": 2}
    config = RunConfig(**folders, **small, epochs=3, memory_preflight=False, experiment="first ones")
    return begin_run(config, command="test")


@pytest.fixture
def command(run: RunPaths, monkeypatch: pytest.MonkeyPatch, warm_workers: None) -> Callable[..., Result]:
    """Type a command; in this process, because a new one spends seconds on imports."""

    def type_(*arguments: str, **environment: str) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["run_notebooks.py", *arguments])
            given = {"FVC_RUNS_DIR": str(run.root.parents[1]), **environment}
            return CliRunner().invoke(main, arguments, env=given, prog_name="run_notebooks.py")

    return type_


def files(run: RunPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.fault(28)
def test_a_changed_value_is_refused_with_the_difference_and_the_command_that_forks(run, command):
    before = files(run)
    refused = command("--resume", "latest", "-p", "epochs", "5", "-p", "seed", "1")
    assert refused.exit_code == 2
    assert "seed 0 -> 1; epochs 3 -> 5" in refused.stderr
    offered = refused.stderr.strip().rpartition(": ")[2]
    assert offered == "python run_notebooks.py --resume latest -p epochs 5 -p seed 1 --fork"
    accepted = command(*shlex.split(offered)[2:], "--dry-run")
    assert accepted.exit_code == 0, accepted.stderr
    assert f"fork of {run.run_id}: seed 0 -> 1; epochs 3 -> 5" in accepted.stdout
    assert "run: a new folder under" in accepted.stdout
    assert files(run) == before
    assert list_runs(run.root.parents[1]) == [run]


@pytest.mark.fault(28)
@pytest.mark.long
def test_a_value_on_the_command_line_counts_also_where_the_environment_has_one(run, command):
    refused = command("--resume", "latest", "-p", "fixed_size", "48", FVC_FIXED_SIZE="64")
    assert refused.exit_code == 2
    assert "fixed_size 32 -> 48" in refused.stderr
    other_machine = command("--resume", "latest", "--dry-run", FVC_FIXED_SIZE="64")
    assert other_machine.exit_code == 0, other_machine.stderr


def test_a_fork_needs_a_run_a_difference_and_nobody_at_work(run, command):
    before = files(run)
    for arguments, words in (
        (["--fork", "-p", "epochs", "5"], "Name that run: --resume RUN --fork"),
        (["--resume", "latest", "--fork"], "has these very values"),
        (["--resume", "latest", "--fork", "-p", "epochs", "3"], "has these very values"),
        (["--resume", "latest", "--fork", "-p", "corpus", "absent"], "absent"),
    ):
        done = command(*arguments)
        assert done.exit_code == 2, done.stderr
        assert words in done.stderr
    assert files(run) == before
    with run_lock(run.root):
        done = command("--resume", "latest", "--fork", "-p", "epochs", "5")
    assert done.exit_code == 2
    assert "is being worked on" in done.stderr
    assert list_runs(run.root.parents[1]) == [run]


@pytest.mark.slow
@pytest.mark.fault(28)
def test_a_fork_is_a_run_of_its_own_beside_the_first_and_records_what_it_comes_from(run, command):
    before = files(run)
    done = command(
        "--resume", run.run_id, "--fork", "-p", "epochs", "5", "-p", "num_workers", "2", "--only", "02", "--jobs", "1"
    )
    assert done.exit_code == 3, done.stderr  # there is no index to make folds of
    first, fork = list_runs(run.root.parents[1])
    assert first == run
    assert fork.root.parent == run.root.parent
    record = json.loads(fork.run_json.read_text())
    assert record["forked_from"] == run.run_id
    assert record["changed"] == {"epochs": [3, 5], "num_workers": [0, 2]}
    assert "--fork" in record["attempts"][0]["command"]
    assert run_config(fork.params_yaml) == run_config(run.params_yaml).model_copy(
        update={"epochs": 5, "num_workers": 2}
    )
    assert f"fork of {run.run_id}: epochs 3 -> 5; num_workers 0 -> 2" in done.stdout
    assert "copied from it: nothing" in done.stdout
    assert files(run) == before
