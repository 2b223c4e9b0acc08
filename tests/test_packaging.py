"""Makefile, environment.yml and pyproject.toml agree on one lock; architecture.md's tree is true."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"mlflow", "detectors", "verdicts"}


def locked(name: str = "requirements.lock") -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
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


@pytest.mark.parametrize("extra", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in sorted(OPTIONAL)])
def test_what_an_extra_needs_beside_the_lock_is_locked_and_nothing_twice(extra):
    base, beside = locked(), locked(f"requirements-{extra}.lock")
    assert not set(base) & set(beside)
    both = base | beside
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        assert requirement.specifier.contains(both[normalized(requirement.name)]), requirement
    for name, version in beside.items():
        assert importlib.metadata.version(name).split("+")[0] == version, name
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = both[normalized(requirement.name)]
                assert requirement.specifier.contains(needed, prereleases=True), f"{name} wants {requirement}"


def conda_environment() -> dict[str, Any]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert isinstance(environment, dict)
    return environment


def pip_arguments() -> list[str]:
    """What conda hands to pip, in its order."""
    (listed,) = [part["pip"] for part in conda_environment()["dependencies"] if isinstance(part, dict)]
    return [word for line in listed for word in shlex.split(line)]


def conda_packages() -> list[str]:
    return [part for part in conda_environment()["dependencies"] if isinstance(part, str)]


def test_makefile_and_conda_environment_install_the_same_lock():
    assert pip_arguments() == ["--requirement", "requirements.lock", "--editable", "."]
    # pip runs in the folder of environment.yml, so what it names lies beside it.
    assert (ROOT / pip_arguments()[1]).is_file()
    assert "--requirement requirements.lock" in (ROOT / "Makefile").read_text()
    assert PROJECT["requires-python"] == ">=3.11"


def test_conda_brings_python_and_nothing_that_the_lock_names():
    """A package from both would be installed twice, and which version is imported would depend on the order."""
    environment, lock = conda_environment(), locked()
    assert set(environment) == {"name", "channels", "dependencies"}
    assert environment["channels"] == ["conda-forge"]  # one source: with two, priorities decide about versions
    names = {normalized(re.split(r"[=<> ]", package)[0]) for package in conda_packages()}
    assert names == {"python", "pip", "make"}
    assert not names & set(lock)


CONDA = next(filter(None, map(shutil.which, ("micromamba", "mamba", "conda"))), None)


def test_every_link_between_the_pages_leads_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
