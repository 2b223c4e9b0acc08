"""The golden runs, made once for all tests of this folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.golden_runs import RUNS, run, run_folder


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all golden runs; they share its cache."""
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="session")
def golden_run(golden_folder: Path) -> Callable[[str], Path]:
    """Return ``golden_run(name)``: the run folder of a golden run, which is made when it is first asked for."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            code, shown = run(golden_folder, *RUNS[name], "--jobs", "2")
            assert code == 0, shown
            made[name] = run_folder(golden_folder, name)
        return made[name]

    return make
