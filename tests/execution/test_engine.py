"""``papermill --engine fvc``: what it leaves in a run folder, and what it refuses before any cell runs."""

import json
from pathlib import Path

import papermill
import pytest
from papermill.exceptions import PapermillException, PapermillExecutionError

from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import read_status, run_lock
from fvc_lib.execution.run.task import ERROR_MARKER_TAG
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, list_runs
from tests.execution.conftest import write_notebook

STAGE = "06_analysis_dashboard"
PARAMETERS = 'run_dir: str = ""\nseed: int = 0\nnum_workers: int = 0\n'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setenv("FVC_RUNS_DIR", str(tmp_path / "runs"))
    return begin_run(resolve_config({"seed": 3}), command="test")


def execute(folder: Path, *cells: str, stage: str = STAGE, extra: str = "", **parameters: object) -> Path:
    """Execute a notebook called ``stage`` with our engine as a user would; returns papermill's output file."""
    source = write_notebook(folder / f"{stage}.ipynb", cells, PARAMETERS + extra)
    out = folder / "out.ipynb"
    papermill.execute_notebook(
        str(source), str(out), parameters, engine_name="fvc", kernel_name="python3", language="python",
        progress_bar=False,
    )  # fmt: skip
    return out


def shown(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return ["".join(output["text"]) for output in outputs]


def test_a_record_status_and_attempt_stand_in_the_run_and_the_same_record_in_the_output(run, tmp_path):
    out = execute(tmp_path, "print('seed', seed, run_dir)", num_workers=2)
    status = read_status(run)
    assert (status.stages[STAGE].state, status.stages[STAGE].attempts) == ("done", 1)
    # The run's own seed counts, as under the runner; what may change between attempts was taken and noted.
    assert shown(out) == shown(run.executed_notebook(STAGE)) == [f"seed 3 {run.root}\n"]
    assert run_config(run.params_yaml).num_workers == 2
    assert len(json.loads(run.run_json.read_text())["attempts"]) == 2
    assert run.stage_checkpoint(STAGE).is_file()
    assert not list(run.notebooks.glob("*.partial.*"))

    execute(tmp_path, "print('again')", run_dir=str(run.root))
    assert read_status(run).stages[STAGE].attempts == 2
    assert shown(run.superseded / "1" / "notebooks" / f"{STAGE}.ipynb") == [f"seed 3 {run.root}\n"]


def test_a_cell_that_fails_is_papermills_error_and_the_runs_failure(run, tmp_path):
    with pytest.raises(PapermillExecutionError, match="nothing to see"):
        execute(tmp_path, "raise ValueError('nothing to see')")
    stage = read_status(run).stages[STAGE]
    assert (stage.state, stage.exit_code, stage.error.name) == ("failed", 1, "ValueError")
    record = json.loads(run.partial_notebook(STAGE).read_text())
    assert ERROR_MARKER_TAG in record["cells"][0]["metadata"]["tags"]
    assert (tmp_path / "out.ipynb").is_file()


@pytest.mark.slow
def test_one_fold_is_one_task_and_outputs_that_are_missing_are_an_error(run, tmp_path):
    fold = "fold: int = 0\n"
    with pytest.raises(PapermillException, match="04_fold_training_fold_1 did not run to its end"):
        execute(tmp_path, "print(fold)", stage="04_fold_training", extra=fold, fold=1)
    stages = read_status(run).stages
    assert stages["04_fold_training_fold_1"].error.name == "MissingOutput"
    assert stages["04_fold_training_fold_0"].attempts == 0
    with pytest.raises(UsageError, match="has folds 0 to 4"):
        execute(tmp_path, stage="04_fold_training", extra=fold, fold=5)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"sed": 3}, r"'sed' is no parameter of it\. Did you mean 'seed'"),
        ({"seed; import os": 3}, "is no parameter of it"),
        ({"num_workers": "many"}, "num_workers: got 'many'"),
        ({"seed": "true"}, "seed: got 'true'"),
        ({"run_dir": 7}, "run_dir: got 7"),
        ({"run_dir": "no_such_run"}, "no run called 'no_such_run'"),
        ({"seed": 4}, r"made with other values: seed 3 -> 4.*run_notebooks.py -p seed 4 --resume .* --fork"),
    ],
)
def test_parameters_are_checked_before_any_cell_runs(run, tmp_path, parameters, words):
    before = run.status_json.read_bytes()
    with pytest.raises(UsageError, match=words):
        execute(tmp_path, "1", **parameters)
    assert run.status_json.read_bytes() == before
    assert list_runs(tmp_path / "runs") == [run]
    assert not run.notebooks.exists()


def test_a_run_that_is_worked_on_and_a_notebook_of_no_stage_are_refused(run, tmp_path):
    with run_lock(run.root), pytest.raises(UsageError, match="another process works on this run"):
        execute(tmp_path, "1")
    with pytest.raises(UsageError, match="no single stage called"):
        execute(tmp_path, "1", stage="my_notebook")


@pytest.mark.slow
def test_without_any_run_one_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("FVC_RUNS_DIR", str(tmp_path / "runs"))
    for stage, words in ((STAGE, "which a new run does not have"), ("01_data_index", "image_size")):
        with pytest.raises(UsageError, match=words):
            execute(tmp_path, "1", stage=stage, image_size=64, run_dir="new")
        assert not list_runs(tmp_path / "runs")
    with pytest.raises(PapermillException):  # a cell that writes no index
        execute(tmp_path, "1", stage="01_data_index", seed=8, num_folds=2, run_dir="new")
    (run,) = list_runs(tmp_path / "runs")
    assert (run_config(run.params_yaml).seed, run_config(run.params_yaml).num_folds) == (8, 2)
    assert read_status(run).stages["01_data_index"].error.name == "MissingOutput"
