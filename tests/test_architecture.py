"""Rooms import only from the rooms below them, and no import is circular."""

import ast
import gc
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "command_line": {
        "execution", "analysis", "tasks", "detectors", "engine", "corpus", "video", "metrics", "services"
    },
    "execution": {"services"},
    "analysis": {"services", "metrics"},
    "tasks": {"detectors", "engine", "corpus", "video", "metrics", "services"},
    "detectors": {"engine", "video", "metrics", "services"},
    "engine": {"metrics", "services"},
    "corpus": {"services", "video"},
    "video": {"services"},
    "metrics": set(),
    "services": set(),
}  # fmt: skip
MODULES = sorted((ROOT / "fvc_lib").rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path) for path in MODULES}


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection() -> Iterator[None]:
    """A search for garbage among syntax trees takes three times as long as parsing."""
    gc.disable()
    yield
    gc.enable()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def all_imports(path: Path) -> set[str]:
    """Return every dotted name that ``path`` imports, at any depth of the file."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: write absolute imports"
            found.add(node.module)
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & NAMES  # modules of a package
    return found


def imports_of(path: Path) -> set[str]:
    """Return the imports of ``path`` that are ours."""
    return {name for name in all_imports(path) if name.split(".")[0] == "fvc_lib"}


def test_a_room_imports_only_from_the_rooms_below_it():
    for path in MODULES:
        room, *inside = path.relative_to(ROOT / "fvc_lib").parts
        others = {name.split(".")[1] for name in imports_of(path) if name.count(".")} - {room}
        allowed = MAY_IMPORT[room] if inside else {*MAY_IMPORT} if room == "public.py" else set()
        assert others <= allowed, f"{path} may import {sorted(allowed)}"
        packages = {name.split(".")[0] for name in all_imports(path)}
        assert not packages & {"torchvision", "timm", "torchmetrics", "run_notebooks"}, path


def test_no_import_is_circular():
    graph = {dotted(path): imports_of(path) - {dotted(path)} for path in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


NOT_LEARNING = (
    "corpus.index", "video.decode.clip", "video.augmentations", "video.clips.making", "video.clips.store",
    "video.clips.shards", "execution.run.runner", "analysis.pages.report",
    "tasks.leakage_audit", "tasks.video.results", "tasks.split_results",
)  # fmt: skip
STAGES_BEFORE_LEARNING = (
    "analysis.figures.corpus", "analysis.pages.display", "analysis.read.queries",
    "corpus.folds", "execution.run.session", "tasks.video.controls", "tasks.video.results",
)  # fmt: skip


@pytest.mark.slow
def test_no_start_and_no_early_stage_loads_what_learns():
    """Each package takes a second to load, in every kernel."""
    early = [(name, ("torch", "sklearn", "nbconvert")) for name in STAGES_BEFORE_LEARNING]
    last = ("services.tables", ("polars",))  # shows that a loaded package is seen
    starts = [(name, ("torch", "sklearn")) for name in ("command_line.main", "execution.papermill_entry")]
    checks = [*starts, *early, *((name, ("torch",)) for name in NOT_LEARNING), last]
    code = (  # imports modules one after the other, and prints the packages that they load and must not
        "import importlib, sys\n"
        f"for name, packages in {checks}:\n"
        "    importlib.import_module(f'fvc_lib.{name}')\n"
        "    for package in set(packages) & set(sys.modules):\n"
        "        print(package, 'loaded by', name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["polars loaded by services.tables"]


FILES = {"cfg", "conf", "csv", "feather", "html", "json", "lock", "pt", "py", "safetensors", "txt", "yaml"}
NOT_OURS = {
    "a.b", "a.b.c", "fvc.run_key", "mlflow.note.content", "p.grad", "papermill.engine", "run.tables.predictions",
    "run.tables.results", "run.tables", "stream.frames",
}  # fmt: skip


def defined_in(path: Path) -> set[str]:
    """Return the names at the top of a module, and the modules of a package."""
    names = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in tree_of(path).body:
        names |= {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
        names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return names


def test_dotted_names_in_docstrings_are_of_something_that_is_there():
    names = {dotted(path): defined_in(path) for path in MODULES}
    wrong = []
    for path in MODULES:
        nodes = list(ast.walk(tree_of(path)))
        local = {node.arg for node in nodes if isinstance(node, ast.arg)}
        local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        local |= {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom)
                  and not str(node.module).startswith("fvc_lib") for alias in node.names}  # fmt: skip
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
        for name in re.findall(r"``([a-z_]+(?:\.[A-Za-z_]\w*)+)``", "\n".join(texts)):
            module, _, last = name.rpartition(".")
            is_ours = any(f".{known}".endswith(f".{module}") and last in has for known, has in names.items())
            if not is_ours and last not in FILES and name not in NOT_OURS and name.split(".")[0] not in local:
                wrong.append(f"{path.name}: {name}")
    assert wrong == []


@pytest.mark.slow
def test_a_message_with_a_command_has_it_as_it_can_be_typed():
    """Commands are made by ``command_text`` for any folder and run; the headline fills in runs of missing controls."""
    filled_in = {"services/tasks.py", "analysis/read/headline.py"}
    wrong = []
    for path in MODULES:
        if str(path.relative_to(ROOT / "fvc_lib")) in filled_in:
            continue
        tree = tree_of(path)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            # The record's --params is of any checkout.
            typed = re.search(r"run_notebooks\.py -(?!-params|-executor)|--resume RUN -p", text)
            if typed and id(node) not in docstrings:
                wrong.append(f"{path.name}:{node.lineno}: {text}")
    assert wrong == []
