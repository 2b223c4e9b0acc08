"""Makefile, environment.yml and pyproject.toml agree on one lock, and links between the pages lead somewhere."""

import ast
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"mlflow", "detectors", "app"}
EXTRAS = PROJECT["optional-dependencies"]


def locked(name: str = "requirements.lock") -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines), "every line of the lock is name==version"
    return {normalized(name): version for name, version in (line.split("==") for line in lines)}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_locked_to_a_version_it_allows():
    lock = locked()
    wanted = PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["workbench"]
    for requirement in map(Requirement, wanted):
        version = lock[normalized(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked to {version}"


def needed_by(name: str) -> list[Requirement]:
    """Return the requirements of an installed package that hold on this machine."""
    wanted = map(Requirement, importlib.metadata.requires(name) or [])
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def test_the_lock_is_closed():
    """Two installations cannot differ, because the lock has what its packages need."""
    lock = locked()
    for name in lock:
        # A build of torch for an accelerator brings libraries that the build for a CPU does not have.
        needed = {normalized(requirement.name) for requirement in needed_by(name)} if name != "torch" else set()
        assert needed <= {*lock, "setuptools", "pip"}, name


@pytest.mark.parametrize("extra", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in sorted(OPTIONAL)])
def test_what_an_extra_needs_beside_the_lock_is_locked_and_nothing_twice(extra):
    base, beside = locked(), locked(f"requirements-{extra}.lock")
    assert not set(base) & set(beside)
    both = base | beside
    for requirement in map(Requirement, EXTRAS[extra]):
        assert requirement.specifier.contains(both[normalized(requirement.name)]), requirement
    for name, version in beside.items():
        assert importlib.metadata.version(name).split("+")[0] == version, name
        for requirement in needed_by(name):
            if name == "xgboost" and requirement.name.startswith("nvidia-"):
                continue  # as of torch: a library for an accelerator, without which it runs
            needed = both[normalized(requirement.name)]
            assert requirement.specifier.contains(needed, prereleases=True), f"{name} wants {requirement}"


def test_conda_brings_python_and_lets_pip_install_the_lock():
    """A package from both would be installed twice, and the order would decide which version is imported."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"}
    assert environment["channels"] == ["conda-forge"]  # one source: with two, priorities decide about versions
    *packages, pip = environment["dependencies"]
    names = {normalized(re.split(r"[=<> ]", package)[0]) for package in packages}
    assert names == {"python", "pip", "make"}
    assert not names & set(locked())
    # pip runs in the folder of environment.yml, so the lock lies next to it.
    assert shlex.split(" ".join(pip["pip"])) == ["--requirement", "requirements.lock", "--editable", "."]
    assert "--requirement requirements.lock" in (ROOT / "Makefile").read_text()
    assert PROJECT["requires-python"] == ">=3.11"


def test_what_is_imported_is_declared():
    installed = importlib.metadata.packages_distributions()
    extras = [text for name, texts in EXTRAS.items() if name not in {"dev", "bench"} for text in texts]
    declared = {normalized(Requirement(text).name) for text in (*PROJECT["dependencies"], *extras)}
    notebooks = [json.loads(path.read_text()) for path in (ROOT / "notebooks").glob("*.ipynb")]
    cells = [cell for notebook in notebooks for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = [path.read_text() for path in (ROOT / "fvc_lib").rglob("*.py")]
    found = set()
    for node in (
        node for text in [*sources, *("".join(c["source"]) for c in cells)] for node in ast.walk(ast.parse(text))
    ):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    imported = found - sys.stdlib_module_names - {"fvc_lib"}
    assert len(imported) > 25
    undeclared = {name for name in imported & set(installed) if not declared & set(map(normalized, installed[name]))}
    assert undeclared == set()


@pytest.mark.slow
def test_the_wheel_works_from_an_empty_folder(tmp_path):
    """What a checkout has next to the library is in the wheel, and nothing of the checkout is read."""
    project, work = tmp_path / "project", tmp_path / "empty"
    names = ("fvc_lib", "notebooks", "params", "slurm")
    for name in names:
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=project, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(tmp_path / "site")
    for name in names[1:]:
        shipped = {path.name for path in (tmp_path / "site/fvc_lib/installed" / name).iterdir()}
        assert shipped == {path.name for path in (ROOT / name).iterdir() if path.name[0] not in "._"}
    assert (tmp_path / "site/fvc_lib/py.typed").is_file()
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for name in ("FVC_RUNS_DIR", "FVC_CACHE_DIR", "FVC_DATA_DIR"):
        environment.pop(name, None)

    def asked(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "fvc_lib.command_line.program", *arguments]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert str(ROOT / "notebooks") not in done.stdout
        return done.stdout

    assert "04_fold_training" in asked("--list")
    plan = asked("-f", "params/demo.yaml", "--dry-run", "-p", "num_folds=3", "-r", "epochs", "1")
    assert f"a new folder under {work / 'runs'}" in plan
    assert "04_fold_training_fold_2" in plan
    assert "04_fold_training_fold_3" not in plan
    assert f"{work / 'runs'}" in asked("doctor", "--json")
    assert list(work.iterdir()) == []


def test_every_link_between_the_pages_leads_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
