"""The table counts what was tried where, also when tests run in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.faults.promises import PROMISES

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest

@pytest.mark.fault(1)
def test_one(): ...

@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("number", range(3))
def test_two(number, tally): tally.add(survived=10)

@pytest.mark.fault(2)
def test_three(tally):
    tally.add(survived=4)
    assert False

@pytest.mark.fault(3)
def test_four(): pytest.skip("not here")

@pytest.fixture
def broken():
    yield
    raise OSError

@pytest.mark.fault(4)
def test_five(broken): ...

def test_none(): ...
"""


def run_suite(folder: Path, source: str, *options: str) -> str:
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.faults.table"]')
    (folder / "test_suite.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "--strict-markers", *options,
         str(folder)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_rows_add_up_over_tests_and_processes(tmp_path):
    shown = run_suite(tmp_path, SUITE, "-n", "2", "--fault-table")
    lines = shown[shown.index("row  fault") :].splitlines()
    rows = {
        int(line[:3]): line[3:].removeprefix(f"  {PROMISES[int(line[:3])].fault}").split(None, 3)
        for line in lines[1 : 1 + len(PROMISES)]
    }
    assert rows[1] == ["31", "31", "0", "4 passed"]
    assert rows[2] == ["35", "34", "1", "1 failed, 3 passed"]
    assert rows[3] == ["0", "0", "0", "1 skipped"]
    assert rows[4] == ["1", "0", "1", "1 failed"]
    assert rows[5] == ["0", "0", "0", "none"]
    assert lines[1 + len(PROMISES)].split() == ["all", "67", "65", "2"]


def test_a_fault_without_a_promise_is_refused(tmp_path):
    shown = run_suite(tmp_path, "import pytest\n@pytest.mark.fault(51)\ndef test_x(): ...\n", "-n", "0")
    assert "no fault has the number 51" in shown
