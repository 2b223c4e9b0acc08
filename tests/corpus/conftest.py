"""Where the tests of corpora find what is not part of the repository."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data beside the repository, which is not part of it."""
    folder = Path(__file__).resolve().parents[3] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the data in {folder}")
    return folder
