"""Fixtures of tests that measure the memory of this process."""

from multiprocessing import forkserver

import pytest


@pytest.fixture
def alone() -> None:
    """Stop the fork server of earlier tests, which has torch loaded (270 MB). The next test that needs it starts it."""
    forkserver._forkserver._stop()
