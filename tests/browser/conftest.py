"""One Chromium for each module of these tests, one JupyterLab and one set of runs for all.

Playwright's event loop runs in the thread of the tests as long as it is open, and a notebook client there is refused.
So it is open for a module, not for the session, and notebooks run in other processes.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import CHROMIUM, WINDOW, Watched, open_chromium
from tests.browser.lab import Lab, LabNotebook, start_lab
from tests.browser.runs import Runs, environment_of, make_runs

OpenPage = Callable[..., Watched]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return runs that no test changes."""
    _skip_without_browser()
    return make_runs(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="session")
def lab(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with start_lab(tmp_path_factory.mktemp("lab"), environment_of(runs.folder.parent)) as started:
        yield started


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    _skip_without_browser()
    with open_chromium() as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Any) -> Iterator[OpenPage]:
    """Return ``open_page(address, home=, window=)``; each page has a profile of its own and is closed at the end."""

    def open_(address: str | Path, home: str = "file:", window: tuple[int, int] = WINDOW) -> Watched:
        context = chromium.new_context(viewport={"width": window[0], "height": window[1]})
        watched = Watched(context.new_page(), home)
        watched.page.goto(address.as_uri() if isinstance(address, Path) else address)
        return watched

    yield open_
    for context in chromium.contexts:
        context.close()


@pytest.fixture
def open_in_lab(open_page: OpenPage, lab: Lab) -> Callable[[str], LabNotebook]:
    """Return ``open_in_lab("06_analysis_dashboard.ipynb")``: a notebook of the copied folder in JupyterLab."""

    def open_(name: str) -> LabNotebook:
        watched = open_page(lab.address_of(name), home=lab.address, window=(1400, 1000))
        return LabNotebook(watched.page, watched, lab.notebooks / name)

    return open_


def _skip_without_browser() -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: pages are not looked at in a browser")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed (pip install '.[dev]'): pages are not looked at in a browser")
