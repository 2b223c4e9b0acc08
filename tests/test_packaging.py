"""Makefile, environment.yml and pyproject.toml agree on one lock, and links between the pages lead somewhere."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

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
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        assert requirement.specifier.contains(both[normalized(requirement.name)]), requirement
    for name, version in beside.items():
        assert importlib.metadata.version(name).split("+")[0] == version, name
        for requirement in needed_by(name):
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


def test_every_link_between_the_pages_leads_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
