"""One Chromium for each module of these tests, one JupyterLab and one set of runs for all.

Playwright's own event loop runs in the thread of the tests for as long as it is open, and whoever wants one there
meanwhile (a notebook client) is refused. So it is open for a module, not for the session, and what these tests need
of notebooks happens in other processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import CHROMIUM, WINDOW, Watched, open_chromium, open_page
from tests.browser.lab import Lab, LabNotebook, start_lab
from tests.browser.runs import Runs, make_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OpenFile = Callable[..., Watched]
OpenNotebook = Callable[[str], LabNotebook]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Never changed by a test."""
    _skip_without_browser()
    return make_runs(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="session")
def lab(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with start_lab(tmp_path_factory.mktemp("lab"), runs.environment()) as started:
        yield started


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    _skip_without_browser()
    with open_chromium() as browser:
        yield browser


@pytest.fixture
def opened(chromium: Browser) -> Iterator[list[Watched]]:
    """The pages of a test, which are closed at its end."""
    yield []
    for context in chromium.contexts:
        context.close()


@pytest.fixture
def open_file(chromium: Browser, opened: list[Watched]) -> OpenFile:
    """``open_file(path)`` opens a page from the disk, as from a file manager."""

    def open_(path: Path, window: tuple[int, int] = WINDOW, media: str = "screen") -> Watched:
        watched = open_page(chromium, window=window)
        opened.append(watched)
        watched.page.emulate_media(media=media)
        watched.page.goto(path.as_uri())
        return watched

    return open_


@pytest.fixture
def open_in_lab(chromium: Browser, lab: Lab, opened: list[Watched]) -> OpenNotebook:
    """``open_in_lab("06_analysis_dashboard.ipynb")`` opens a notebook of the copied folder in JupyterLab."""

    def open_(name: str) -> LabNotebook:
        watched = open_page(chromium, home=lab.address, window=(1400, 1000))
        opened.append(watched)
        return LabNotebook(watched, lab, name)

    return open_


def _skip_without_browser() -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: pages are not looked at in a browser")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed (pip install '.[dev]'): pages are not looked at in a browser")
