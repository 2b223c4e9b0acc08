"""What tests that measure this process need."""

from multiprocessing import forkserver

import pytest


@pytest.fixture
def alone() -> None:
    """No child of an earlier test beside this process: the server that others fork their processes from, with torch
    loaded, is 270 MB. It begins anew with the next test that needs it.
    """
    forkserver._forkserver._stop()
