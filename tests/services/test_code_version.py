"""A notebook depends on all modules that it names, directly or indirectly, and on nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fvc_lib.execution.stages import read_notebook
from fvc_lib.services import code_versions
from fvc_lib.services.code_versions import code_behind
from fvc_lib.services.tasks import STAGES

ROOT = Path(__file__).parents[2]
NOTEBOOKS = [ROOT / "notebooks" / f"{stage.name}.ipynb" for stage in STAGES]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package: engine -> steps -> (in a function) tools.deep; a child is started by name; island is alone."""
    folder = tmp_path / "fvc_lib"
    files = {
        "__init__.py": "",
        "engine.py": "from fvc_lib import (  # (its steps)\n  steps,  # in order\n)\nCHILD = 'fvc_lib.child:go'\n",
        "steps.py": "def go():\n    from fvc_lib.tools.deep import down\n    return down\n",
        "child.py": "import json, fvc_lib.helper\n",
        "helper.py": "",
        "island.py": "from fvc_lib.engine import CHILD\n",
        "tools/__init__.py": "from fvc_lib.tools.shared import X\n",
        "tools/deep.py": "down = 1\n",
        "tools/shared.py": "X = 1\n",
        "tools/unused.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def modules_behind(sources, **options):
    return [name.removeprefix("fvc_lib.") for name in code_behind(sources, **options)]


def test_all_that_is_imported_at_any_depth_or_started_by_name_counts(package):
    expected = "fvc_lib child engine helper steps tools tools.deep tools.shared"
    assert modules_behind(["from fvc_lib.engine import CHILD"], package=package) == expected.split()
    assert modules_behind(["import fvc_library.engine, my.fvc_lib.engine"], package=package) == []
    assert modules_behind(["filled by fvc_lib.tools.*"], package=package)[-1] == "tools.unused"
    for source in (
        "from fvc_lib import engine",
        "import os, fvc_lib.engine as e",
        "if True: from fvc_lib.engine import CHILD",
        "from fvc_lib.engine \\\n    import CHILD",
        "from fvc_lib import island_, \\\n    engine",
        "from fvc_lib import (helper as h, engine as e)",
        "run('fvc_lib.engine:main')",
        '["python", "-m", "fvc_lib.engine"]',
    ):
        assert "steps" in modules_behind([source], package=package), source


def test_the_code_that_runs_a_notebook_is_not_what_the_notebook_depends_on():
    for path in NOTEBOOKS:
        execution = {name for name in modules_behind(read_notebook(path).cells) if name.startswith("execution.")}
        assert execution - {"execution.run"} == {"execution.run.session"}, path


def test_what_clips_are_stored_under_covers_every_module_that_importing_loads():
    """Compare with the interpreter's list of loaded modules, so that no new module is forgotten."""
    code = "import sys, fvc_lib.video.decode.clip\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("fvc_lib.") for name in done.stdout.split() if name.startswith("fvc_lib.video")}
    assert loaded <= set(modules_behind(["import fvc_lib.video.decode.clip"]))


def test_functions_that_changed_since_a_training_are_named_without_words_and_new_files(tmp_path, monkeypatch):
    for name in ("__init__.py", "engine/loop.py", "services/config.py", "metrics/intervals.py"):
        (tmp_path / "fvc_lib" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "fvc_lib" / name, tmp_path / "fvc_lib" / name)
    monkeypatch.setattr(code_versions, "CHECKOUT", tmp_path)
    sources = ["import fvc_lib.engine.loop, fvc_lib.services.config", "fvc_lib.metrics.*"]
    folders = [tmp_path / "checkpoints" / f"fold_{fold}" for fold in range(2)]
    for folder in folders:
        code_versions.note_code(folder, sources, {})
    for name, old, new, changed in (
        ("engine/loop.py", '"""', '"""Edited. ', []),
        ("engine/loop.py", "\nclass ", "\n# A comment.\nclass ", []),
        ("metrics/youden.py", "", "def youden(): ...\n", []),
        ("services/config.py", "    # Images\n", "    new = field(0, 'data', '')\n", []),
        ("engine/loop.py", "\n@dataclass", "\ndef added(): ...\n\n\n@dataclass", ["engine.loop.added"]),
    ):
        path = tmp_path / "fvc_lib" / name
        path.write_text(path.read_text().replace(old, new, 1) if old else new)
        for folder in folders:
            assert sorted(code_versions.changed_functions(folder)) == [f"fvc_lib.{name}" for name in changed]
    assert code_versions.mixed_code(folders) == ""
    code_versions.note_code(folders[1], sources, {})
    assert code_versions.mixed_code(folders) == "engine.loop.added"


def test_functions_are_compared_without_docstrings_comments_and_layout():
    method = '    def go(self):\n        """Doc."""\n        return 1\n'
    source = f'"""Module."""\nX = 1\nclass A:\n    """Doc."""\n    size = 2\n{method}'
    functions = code_versions.functions_in(source)
    assert set(functions) == {"module", "A", "A.go"}
    same = "X = 1  # one\nclass A:\n    size = (\n        2)\n\n    def go(self): return 1\n"
    assert code_versions.functions_in(same) == functions
    other = code_versions.functions_in(source.replace("return 1", "return 2"))
    assert {name for name in functions if functions[name] != other[name]} == {"A.go"}
    assert code_versions.functions_in("%time x = 1") != code_versions.functions_in("%time x = 2")
