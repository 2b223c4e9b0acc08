"""Every notebook has its question, contract, parameters and short cells, before any is run."""

import ast
import importlib
import runpy
import statistics
import symtable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fvc_lib.execution.stages import STAGE_PARAMETERS, read_notebook, stage_named
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import (
    DETECTOR_COMPARISON,
    ENSEMBLE,
    ROBUSTNESS,
    SCORE_AUDIT,
    STAGES,
    TASK_OF_STAGE,
    VERDICTS,
)

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
OF_NO_RUN = {
    DETECTOR_COMPARISON: "sweep",
    ENSEMBLE: "ensemble",
    ROBUSTNESS: "robustness",
    SCORE_AUDIT: "audit",
    VERDICTS: "predict",
}  # and its command


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def cells(path: Path) -> list[Any]:
    return nbformat.read(path, as_version=4).cells


def test_every_stage_has_its_notebook_and_every_notebook_its_stage():
    assert [path.stem for path in PATHS] == sorted([*OF_NO_RUN, *(stage.name for stage in STAGES)])


def test_parameters_are_the_configurations_own_with_its_defaults(path):
    defaults = resolve_config({"task": TASK_OF_STAGE.get(path.stem, "video")}, environ={}).model_dump(mode="json")
    for name, value in read_notebook(path).parameters.items():
        if name not in STAGE_PARAMETERS:
            assert value == defaults[name], f"{path.name}: {name}"


def test_every_parameter_is_annotated_and_commented(cells):
    source = next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        assert isinstance(statement, ast.AnnAssign), f"annotate: {ast.unparse(statement)}"
        assert "# " in lines[statement.lineno - 1], f"say what it means: {lines[statement.lineno - 1]}"


def test_a_notebook_opens_with_its_question_its_contract_and_its_parameters(path, cells):
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert "?" in cells[0].source.splitlines()[0]
    for word in ("Purpose", "Reads", "Writes", "Runtime", "Headless"):
        assert f"**{word}**" in cells[1].source
    assert cells[2].metadata["tags"] == ["parameters"]
    if path.stem in OF_NO_RUN:
        assert f"run_notebooks.py {OF_NO_RUN[path.stem]}" in cells[1].source
        return
    assert f"--only {path.stem[:2]}" in cells[1].source
    only_looks = not stage_named(path.stem).outputs(RunPaths(Path()), 0)
    assert f'open_stage("{path.stem}", globals(){", only_looks=True" * only_looks})' in cells[3].source


def test_a_notebook_is_short_and_defines_nothing(cells):
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert 12 <= len(cells) <= 20
    lengths = [len(source.splitlines()) for source in code]
    assert sum(lengths) <= 105
    assert statistics.median(lengths) <= 6
    for source in code:
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        assert not any(isinstance(node, kinds) for node in ast.walk(ast.parse(source))), source


@pytest.mark.fault(41)
def test_a_figure_that_fails_ends_no_notebook(cells):
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    shown = [ast.unparse(statement) for statement in ast.parse(code).body]
    assert all(text.startswith("with only_shows()") for text in shown if "show_figures(" in text)


def test_a_notebook_has_at_most_eight_imports_of_ours_and_all_are_there(cells):
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).startswith("fvc_lib")]
    assert len(ours) <= 8
    for node in ours:
        for alias in node.names:
            module = importlib.import_module(str(node.module))
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")


def test_no_cell_takes_the_name_of_a_parameter_so_that_all_cells_run_twice_in_one_kernel(path, cells):
    """``open_stage`` reads parameters from ``globals()``, where the first time through leaves its variables."""
    for cell in cells:
        if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", []):
            names = symtable.symtable(cell.source, path.name, "exec").get_symbols()
            bound = {name.get_name() for name in names if name.is_assigned() or name.is_imported()}
            assert bound & {*RunConfig.model_fields, *STAGE_PARAMETERS} == set(), cell.source


def test_saving_a_notebook_in_jupyterlab_leaves_the_committed_file_as_it_is(path, tmp_path):
    """``make lab`` has JupyterLab call ``clean`` before it writes a file, here one that ran."""
    namespace = runpy.run_path(str(FOLDER.parent / ".ci" / "clean_notebook.py"))
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.language_info.version = "3.11.2"
    for cell in notebook.cells:
        cell.metadata.execution = {"iopub.execute_input": "now"}
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = 1, [nbformat.v4.new_output("stream", text="hello")]
    namespace["clean"](model={"type": "notebook", "content": notebook}, path=f"notebooks/{path.name}")
    nbformat.write(notebook, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
