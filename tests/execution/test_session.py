"""An interactive notebook: it works on the newest run, with that run's values, and never changes the run."""

import shlex
import sys
from pathlib import Path

import papermill
import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan import begin_training_state
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.session import StageSession, open_stage
from fvc_lib.execution.run.status import run_lock
from fvc_lib.execution.stages import Task, read_notebook, stage_named
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.run_paths import RunPaths, list_runs


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FVC_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def begin(runs_dir: Path, **values: object) -> RunPaths:
    return begin_run(resolve_config({"runs_dir": str(runs_dir), **values}, environ={}), command="test")


@pytest.fixture
def opened(runs_dir: Path):
    sessions: list[StageSession] = []

    def open_as(stage: str, **cell: object) -> StageSession:
        session = open_stage(stage, {"run_dir": "", **cell})
        sessions.append(session)
        return session

    yield open_as
    for session in sessions:
        session.memory.close()


def test_a_relative_path_in_the_cell_is_recorded_as_where_it_leads(runs_dir, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = opened("01_data_index", corpus="videos", epochs=3)
    assert (session.headless, run_config(session.paths.params_yaml).epochs) == (False, 3)
    assert run_config(session.paths.params_yaml).corpus == str(tmp_path / "videos")
    assert opened("01_data_index", corpus="videos").paths == session.paths
    monkeypatch.chdir(runs_dir)
    with pytest.raises(UsageError, match=r"was made with other values: corpus"):
        opened("01_data_index", corpus="videos")


@pytest.mark.parametrize("run_dir", ["", "new"])
def test_a_notebook_that_works_on_others_tables_begins_no_run(runs_dir, run_dir):
    with pytest.raises(UsageError, match="which a new run does not have"):
        open_stage("04_fold_training", {"run_dir": run_dir, "fold": 0})
    assert not runs_dir.exists()


def test_an_untouched_notebook_without_any_run_does_what_its_demo_does_and_says_so(opened, capsys):
    begun_with = {"fixed_size": 96, "epochs": 12, "experiment": "demo"}
    session = opened("01_data_index", corpus="", seed=0)
    assert {name: getattr(session.config, name) for name in begun_with} == begun_with
    shown = capsys.readouterr().out
    assert all(f"{name} {value}" in shown for name, value in begun_with.items())
    again = opened("01_data_index", corpus="", seed=0)
    assert (again.paths, again.config) == (session.paths, session.config)


def test_a_notebook_of_another_task_works_on_the_newest_run_of_that_task_and_on_no_other(runs_dir, opened):
    image = begin(runs_dir, task="image", epochs=4)
    video = begin(runs_dir, epochs=9)
    session = opened("10_image_recognition", epochs=20, effective_batch_size=24)
    assert (session.paths, session.config.task, session.config.epochs) == (image, "image", 4)
    with pytest.raises(UsageError, match="is a run of task video, and this notebook is of task image"):
        open_stage("10_image_recognition", {"run_dir": str(video.root)})
    begun = opened("20_video_text", epochs=3)
    assert (begun.config.task, begun.config.epochs, len(list_runs(runs_dir))) == ("video_text", 3, 3)


def test_untouched_values_give_way_to_the_newest_runs_own(runs_dir, opened):
    begin(runs_dir, epochs=2)
    newest = begin(runs_dir, epochs=9)
    session = opened("04_fold_training", epochs=20, seed=0)
    assert session.paths == newest
    assert session.config.epochs == 9
    assert session.settings().filter(parameter="epochs")["value"].item() == "9"


def test_an_edited_value_never_changes_a_run_into_another(runs_dir, opened):
    run = begin(runs_dir, epochs=9)
    with pytest.raises(UsageError, match=r"epochs 9 -> 5") as caught:
        opened("04_fold_training", epochs=5, augmentations=["noise", "blur"])
    command = shlex.split(str(caught.value).rpartition("stays true of this one: ")[2])
    assert command[:2] == ["python", "run_notebooks.py"]
    assert command[2:6] == ["-p", "augmentations", "noise, blur", "-p"]
    assert command[-3:] == ["--resume", str(run.root), "--fork"]
    assert 'run_dir = "new"' not in str(caught.value)  # a new run has nothing for this notebook
    with pytest.raises(UsageError, match='run_dir = "new"'):
        opened("01_data_index", seed=5)
    assert opened("01_data_index", run_dir="new", seed=5).config.seed == 5
    assert len(list_runs(runs_dir)) == 2


@pytest.mark.slow
def test_a_training_that_began_interactively_goes_on_headlessly(runs_dir):
    """Without a note of its code the runner would set its checkpoint aside and begin anew."""
    run = begin(runs_dir, task="image")
    state = run.training_checkpoints("10_image_recognition", None) / "latest_checkpoint.pt"
    open_stage("10_image_recognition", {"run_dir": ""}).memory.close()
    state.write_text("half trained")
    notebook = read_notebook(CHECKOUT / "notebooks" / "10_image_recognition.ipynb")
    asked = Task(stage_named("10"), None), notebook, RunConfig(task="image")
    begin_training_state(run, *asked)  # as the runner does first
    assert state.read_text() == "half trained"

    (state.parent / "code.json").write_text("{}")  # of other code: nothing is set aside, nor called our own
    open_stage("10_image_recognition", {"run_dir": ""}).memory.close()
    assert state.exists()
    begin_training_state(run, *asked)
    assert not state.exists()


def test_a_signal_only_sets_a_flag_while_the_stage_asks_for_it(runs_dir, opened):
    begin(runs_dir)
    session = opened("04_fold_training")
    in_a_cell = eval("__import__('sys')._getframe()", vars(sys.modules["__main__"]))
    with pytest.raises(StoppedError, match="SIGUSR1"):
        session.on_signal(10, in_a_cell)
    polling = opened("04_fold_training")
    assert not polling.stop()
    polling.on_signal(10, in_a_cell)
    assert polling.stop()


def test_a_stage_that_only_looks_opens_while_its_run_is_worked_on_and_begins_none(runs_dir):
    with pytest.raises(UsageError, match=r"no run called 'new'.* begin one"):
        open_stage("06_analysis_dashboard", {"run_dir": "new"}, only_looks=True)
    assert list_runs(runs_dir) == []
    run = begin(runs_dir)
    with run_lock(run.root):
        session = open_stage("06_analysis_dashboard", {"run_dir": ""}, only_looks=True)
        session.memory.close()
    assert session.paths == run


@pytest.mark.fault(34)
@pytest.mark.parametrize("name", ["corpos", "fold_"])
def test_a_name_that_no_field_has_is_refused_before_a_run_begins(runs_dir, name):
    cells = ["", 'run_dir: str = ""', f"# Parameters\n{name} = 'videos'\n", "open_stage(...)"]
    with pytest.raises(UsageError, match=f"unknown parameter '{name}'"):
        open_stage("01_data_index", {"run_dir": "", name: "videos", "In": cells})
    assert not runs_dir.exists()


@pytest.mark.slow
def test_plain_papermill_takes_any_field(runs_dir, tmp_path, monkeypatch):
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{n}.mp4,{'fake' if n % 2 else 'real'}\n" for n in range(12)))
    asked = {"corpus": str(table), "annotations_only": True, "num_folds": 3, "learning_rate": 0.01}
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    papermill.execute_notebook(
        str(CHECKOUT / "notebooks/01_data_index.ipynb"), str(tmp_path / "out.ipynb"), asked, kernel_name="python3",
        language="python", progress_bar=False,
    )  # fmt: skip
    (run,) = list_runs(runs_dir)
    config = run_config(run.params_yaml)
    assert (config.num_folds, config.learning_rate, config.annotations_only) == (3, 0.01, True)
    assert run.annotations.is_file()
