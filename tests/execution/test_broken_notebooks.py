"""One broken notebook per fault, run by the real runner: what its status, terminal and record then say."""

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fvc_lib.execution import papermill_engine
from fvc_lib.execution.plan import make_plan
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.runner import Runner, Terminal
from fvc_lib.execution.run.status import read_status
from fvc_lib.execution.stages import read_notebook
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import parse_text_value, resolve_config
from fvc_lib.services.tasks import Stage
from tests.execution.conftest import execute_notebook, wait_for, write_notebook

BROKEN = Path(__file__).parents[1] / "broken_notebooks"
DONE, RAISED = ["completed"] * 3, ["completed", "completed", "failed", "pending"]


def run_broken(name, folder):
    """Run the fixture ``name`` as the one stage of a run; returns exit code, stage, terminal's lines, record, run."""
    (folder / "notebooks").mkdir()
    path = Path(shutil.copy(BROKEN / f"{name}.ipynb", folder / "notebooks"))
    stage = Stage(name, (), lambda run, fold: (), lambda run, fold: ())
    config = resolve_config({"runs_dir": str(folder / "runs")}, environ={})
    notebooks = {name: read_notebook(path)}
    run, shown = begin_run(config, command="test"), io.StringIO()
    code = Runner(run, config, notebooks, Terminal(shown)).execute(
        lambda: make_plan(notebooks, config, run, stages=(stage,))
    )
    record = run.executed_notebook(name) if code == 0 else run.partial_notebook(name)
    return code, read_status(run).stages[name], shown.getvalue().splitlines(), record, run


def states_of(record):
    """Return the states of the code cells without the injected one."""
    return [
        cell["metadata"]["papermill"]["status"]
        for cell in json.loads(record.read_text())["cells"]
        if cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", [])
    ]


@pytest.mark.parametrize(
    ("name", "code", "error", "killed_by", "states"),
    [
        ("error_in_a_cell", 1, "ValueError", None, RAISED),
        ("error_in_a_display", 1, "ValueError", None, RAISED),
        ("os_exit", 138, None, None, RAISED),
        ("kills_itself", 137, None, "SIGKILL", RAISED),
        ("never_starts", 138, "KernelNeverStarted", None, ["pending"] * 2),
        pytest.param("output_flood", 0, None, None, None, marks=pytest.mark.slow),
        pytest.param("closes_stdout", 0, None, None, None, marks=pytest.mark.slow),
        pytest.param("thread_that_keeps_printing", 0, None, None, None, marks=pytest.mark.slow),
    ],
)
def test_a_broken_notebook_ends_with_its_code_its_reason_and_a_true_record(
    tmp_path, monkeypatch, name, code, error, killed_by, states
):
    if name == "never_starts":
        monkeypatch.setenv("PYTHONPATH", str(BROKEN / "environments/raises"))
    found, stage, shown, record, run = run_broken(name, tmp_path)
    assert (found, stage.exit_code, stage.killed_by, stage.error and stage.error.name) == (code, code, killed_by, error)
    assert stage.state == ("failed" if code else "done")
    assert record.stat().st_size < 5_000_000
    if code == 0:
        assert set(states_of(record)) == {"completed"}
        return
    assert set(states_of(record)) == set(states)
    assert states_of(record)[-len(states) :] == states
    assert not run.executed_notebook(name).exists()
    what, where, further = shown[-3:]
    assert (error or (killed_by if code == 137 else "kernel")) in what
    assert str(record) in where
    assert str(run.stage_log(name)) in where
    assert f"--resume {run.root}" in further
    banner, *cells = json.loads(record.read_text())["cells"]
    assert "papermill-error-cell-tag" in banner["metadata"]["tags"]
    assert "--resume" in "".join(banner["source"])
    if name == "kills_itself":
        assert "last words\n" in [output.get("text") for cell in cells for output in cell.get("outputs", [])]
    if name == "never_starts":
        assert "libssl.so.3 is not there" in Path(run.stage_log("never_starts")).read_text()


def test_a_kernel_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(BROKEN / "environments/hangs"))
    monkeypatch.setattr(papermill_engine, "START_TIMEOUT_SECONDS", 1)
    code, stage, *_ = run_broken("never_starts", tmp_path)
    assert (code, stage.error.name) == (138, "KernelNeverStarted")


def test_what_is_too_much_for_a_record_is_in_the_log_or_said_to_be_left_out(tmp_path):
    flood = "from IPython.display import HTML, display\ndisplay(HTML('y' * 5_000_000))\nprint('end')"
    source = write_notebook(tmp_path / "one.ipynb", [flood, "'after'"])
    assert execute_notebook(source, tmp_path, {}).exit_code == 0
    text = (tmp_path / "record.ipynb").read_text()
    assert len(text) < 500_000
    assert "after" in text
    is_said_once = text.count("too much for this record") == 1
    assert is_said_once
    assert "end\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "no_parameters_tag",
        "two_parameters_tags",
        "parameters_not_literal",
        pytest.param("parameter_named_like_code", marks=pytest.mark.fault(34)),
    ],
)
def test_a_notebook_whose_parameters_cannot_be_meant_is_refused_before_anything_runs(tmp_path, name):
    with pytest.raises(UsageError, match="wanted"):
        run_broken(name, tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.fault(34)
@pytest.mark.parametrize("name", ["seed = 0; open('pwned', 'w')  #", "seed\nimport os", "class", "a b", ""])
def test_a_parameter_named_like_code_is_refused_everywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="unknown parameter"):
        parse_text_value(name, "1")
    with pytest.raises(UsageError, match="unknown parameter"):
        resolve_config({name: 1}, environ={})
    with pytest.raises(UsageError, match="is no parameter of it"):
        execute_notebook(BROKEN / "error_in_a_cell.ipynb", tmp_path, {name: 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(1)
@pytest.mark.slow
def test_a_record_whose_writer_was_killed_shows_which_cell_was_running(tmp_path):
    write_notebook(tmp_path / "one.ipynb", ["1", "import time\ntime.sleep(600)", "2"])
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.execution.conftest import execute_notebook\n"
        "execute_notebook(Path(sys.argv[1]) / 'one.ipynb', Path(sys.argv[1]), {})"
    )
    record, wanted = tmp_path / "record.ipynb", ["completed", "running", "pending"]
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    wait_for(lambda: record.exists() and states_of(record)[-3:] == wanted, "the cell to run")
    time.sleep(0.1)
    writer.kill()
    writer.wait()
    assert states_of(record)[-3:] == wanted
