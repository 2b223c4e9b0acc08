"""Makefile, environment.yml and pyproject.toml agree on one lock; README's tree is true."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"mlflow", "webdataset"}


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines), "every line of the lock is name==version"
    return {normalized(name): version for name, version in (line.split("==") for line in lines)}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_locked_to_a_version_it_allows():
    lock = locked()
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        version = lock[normalized(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked to {version}"


def test_the_lock_is_closed():
    """What a locked package needs is locked too, so that two installations cannot differ."""
    lock = locked()
    for name in lock:
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = normalized(requirement.name)
                # A build of torch for an accelerator brings libraries that the build for a CPU does not have.
                assert needed in lock or name == "torch" or needed in {"setuptools", "pip"}, f"{name} needs {needed}"


def test_what_is_installed_is_what_is_locked():
    for name, version in locked().items():
        assert importlib.metadata.version(name).split("+")[0] == version, name


def test_makefile_and_conda_environment_install_the_same_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(part["pip"] for part in environment["dependencies"] if isinstance(part, dict))
    assert pip == ["--requirement requirements.lock", "--editable ."]
    assert "--requirement requirements.lock" in (ROOT / "Makefile").read_text()
    assert "python=3.11" in environment["dependencies"]
    assert PROJECT["requires-python"] == ">=3.11"


def test_optional_parts_are_extras_and_not_requirements():
    required = {normalized(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert set(PROJECT["optional-dependencies"]) >= OPTIONAL
    assert not required & OPTIONAL


def test_make_offers_what_the_readme_names():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    offered = set(re.findall(r"make ([a-z-]+)", shown))
    assert {"setup", "demo", "test", "lint", "format", "bench"} <= offered
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named <= offered


def tree_entries() -> dict[str, str]:
    text = (ROOT / "README.md").read_text()
    block = re.search(r"## What is where\n.*?```\n(.*?)```", text, re.DOTALL)
    assert block, "README has a tree under '## What is where'"
    entries, stack = {}, []
    for line in block[1].splitlines():
        match = re.match(r"^( *)(\S+)\s{2,}(.+)$", line)
        assert match, f"one entry and one clause per line: {line!r}"
        depth = len(match[1]) // 2
        stack = [*stack[:depth], match[2].rstrip("/")]
        entries["/".join(stack)] = match[3]
    return entries


def test_readmes_tree_names_what_is_there_and_nothing_else():
    entries = tree_entries()
    for path in entries:
        assert (ROOT / path).exists(), f"README's tree names {path}, which is not there"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    top = {path.split("/")[0] for path in tracked if not path.startswith(".")}
    assert top <= {path.split("/")[0] for path in entries}, "README's tree leaves out a top-level entry"
    rooms = {"/".join(path.split("/")[:2]) for path in tracked if path.startswith("fvc_lib/") and path.count("/") > 1}
    assert rooms <= set(entries), "README's tree leaves out a room"
    notebooks = {path for path in tracked if path.startswith("notebooks/")}
    assert notebooks <= set(entries), "README's tree leaves out a notebook"
