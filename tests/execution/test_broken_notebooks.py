"""One broken notebook per failure, run by the real runner: what its status, terminal and record then say."""

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fvc_lib.execution.kernel import engine as kernel_engine
from fvc_lib.execution.plan.plan import make_plan
from fvc_lib.execution.plan.stages import read_notebook
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.runner import Runner, Terminal
from fvc_lib.execution.run.status import StageStatus, read_status
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import parse_text_value, resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import Stage
from tests.execution.conftest import execute_notebook

BROKEN = Path(__file__).parents[1] / "broken_notebooks"


@dataclass
class Ended:
    """What a run of one broken notebook left."""

    exit_code: int
    stage: StageStatus
    shown: list[str]
    cells: list[dict[str, Any]]
    run: RunPaths
    record: Path

    def states(self) -> list[str]:
        """Of the code cells as the notebook has them, parameters included."""
        return [
            cell["metadata"]["papermill"]["status"]
            for cell in self.cells
            if cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", [])
        ]

    def failed_cell(self) -> dict[str, Any]:
        return next(cell for cell in self.cells if cell["metadata"].get("papermill", {}).get("status") == "failed")


def run_broken(name: str, folder: Path, **values: object) -> Ended:
    """Run the fixture ``name`` as the one stage of a run below ``folder``."""
    (folder / "notebooks").mkdir()
    path = Path(shutil.copy(BROKEN / f"{name}.ipynb", folder / "notebooks"))
    stage = Stage(name, (), lambda run, fold: (), lambda run, fold: ())
    config = resolve_config({"runs_dir": str(folder / "runs"), **values}, environ={})
    notebooks = {name: read_notebook(path)}
    run = begin_run(config, command="test")
    shown = io.StringIO()
    runner = Runner(run, config, notebooks, Terminal(shown))
    code = runner.execute(lambda: make_plan(notebooks, config, run, stages=(stage,)))
    record = run.executed_notebook(name) if code == 0 else run.partial_notebook(name)
    cells = json.loads(record.read_text())["cells"]
    return Ended(code, read_status(run).stages[name], shown.getvalue().splitlines(), cells, run, record)


@pytest.mark.parametrize(
    ("name", "code", "error", "killed_by", "words"),
    [
        ("error_in_a_cell", 1, "ValueError", None, "ValueError: nothing to see | in two lines (cell In [4])"),
        ("sys_exit_zero", 1, "SystemExit", None, "SystemExit: 0 (cell In [4])"),
        ("os_exit", 138, None, None, "kernel went away (exit status 3)"),
        ("kills_itself", 137, None, "SIGKILL", "killed by SIGKILL at "),
        ("segmentation_fault", 138, None, "SIGSEGV", "kernel killed by SIGSEGV at "),
    ],
)
def test_a_notebook_that_breaks_is_told_as_it_was(tmp_path, name, code, error, killed_by, words):
    ended = run_broken(name, tmp_path)
    stage = ended.stage
    assert (ended.exit_code, stage.exit_code, stage.state, stage.killed_by) == (code, code, "failed", killed_by)
    assert (stage.error.name if stage.error else None) == error
    assert stage.host
    assert stage.peak_rss_bytes > 20e6

    # Three lines: what happened; where it was; the exact command.
    first, second, third = ended.shown[-3:]
    assert first.startswith(name)
    assert f"what happened: {words}" in first
    assert str(ended.record) in second
    assert str(ended.run.stage_log(name)) in second
    assert "peak memory 0." in second
    assert third.strip().split(": ", 1)[1].startswith(f"python run_notebooks.py --resume {ended.run.root}")

    # The record: cells before are completed, the broken one failed, the others never ran.
    assert ended.states() == ["completed", "completed", "failed", "pending"]
    outputs = ended.failed_cell()["outputs"]
    assert [output["ename"] for output in outputs if output["output_type"] == "error"] == [error or "KernelDied"]
    if name == "kills_itself":
        assert outputs[0] == {"output_type": "stream", "name": "stdout", "text": "last words\n"}
    banner = ended.cells[0]
    assert banner["cell_type"] == "markdown"
    assert words.split(" (")[0] in "".join(banner["source"])
    assert "--resume" in "".join(banner["source"])
    assert not ended.run.executed_notebook(name).exists()


def test_a_kernel_that_never_starts_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(BROKEN / "environments/raises"))
    ended = run_broken("never_starts", tmp_path)
    assert (ended.exit_code, ended.stage.error.name) == (138, "KernelNeverStarted")
    assert "ImportError: this environment is broken: libssl.so.3 is not there" in ended.shown[-3]
    assert "-m ipykernel --version" in ended.shown[-3]
    assert set(ended.states()) == {"pending"}
    assert "Traceback" in "".join(ended.cells[0]["source"])  # the end of its log


def test_a_kernel_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(BROKEN / "environments/hangs"))
    monkeypatch.setattr(kernel_engine, "START_TIMEOUT_SECONDS", 1.0)
    ended = run_broken("never_starts", tmp_path)
    assert (ended.exit_code, ended.stage.error.name) == (138, "KernelNeverStarted")
    assert "did not answer within 1 s" in ended.shown[-3]


def test_a_flood_stays_out_of_the_record_and_can_be_read_through_its_links(tmp_path):
    ended = run_broken("output_flood", tmp_path)
    assert ended.exit_code == 0
    assert set(ended.states()) == {"completed"}
    assert ended.record.stat().st_size < 5e6
    flood, shown, many = (cell["outputs"] for cell in ended.cells[4:7])
    assert flood[0]["text"].startswith("flood flood")
    assert flood[-1]["text"].endswith("the end of the flood\n")
    printed = (ended.record.parent / link_of(flood[1])).read_text()
    assert printed.startswith("flood flood")
    assert printed.endswith("the end of the flood\n")
    for number, output in enumerate(shown):
        page = (ended.record.parent / link_of(output)).read_text()
        harmless, _, content = page.partition("\n")
        assert "default-src 'none'" in harmless  # opened by a reader, it runs nothing and loads nothing
        assert content == f"<p>{number}</p>" + "<i>wide</i>" * 200_000
    assert len(json.dumps(many)) < 1e6
    assert ended.cells[-1]["outputs"][0]["text"] == "after\n"


def link_of(output: dict[str, Any]) -> str:
    return output["data"]["text/html"].split('href="')[1].split('"')[0]


def test_a_cell_that_closes_its_output_goes_on_and_ends(tmp_path):
    ended = run_broken("closes_stdout", tmp_path)
    assert ended.exit_code == 0
    assert ended.cells[-1]["outputs"][0]["data"]["text/plain"] == "'after'"


def test_a_thread_that_keeps_printing_does_not_keep_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_engine, "LEAVE_SECONDS", 1.0)
    ended = run_broken("thread_that_keeps_printing", tmp_path)
    assert ended.exit_code == 0
    assert set(ended.states()) == {"completed"}
    assert ended.record.stat().st_size < 5e6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_parameters_tag", "got 0 cells tagged 'parameters', wanted exactly one"),
        ("two_parameters_tags", "got 2 cells tagged 'parameters', wanted exactly one"),
        ("parameters_not_literal", "wanted 'name: type = literal'"),
        pytest.param("parameter_named_like_code", "wanted 'name: type = literal'", marks=pytest.mark.fault(34)),
    ],
)
def test_a_notebook_whose_parameters_cannot_be_meant_is_refused_before_anything_runs(tmp_path, name, words):
    with pytest.raises(UsageError, match="wanted") as refused:
        run_broken(name, tmp_path)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2
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
