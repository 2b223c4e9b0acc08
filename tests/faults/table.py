"""The marker ``fault``, the fixture ``tally`` and the table of ``--fault-table``: a plugin for the whole suite.

A test that shows what holds for a fault carries ``@pytest.mark.fault(12)``. It counts as one fault, survived when the
test passes; a test that injects many counts them with ``tally``.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.promises import PROMISES

_ROWS, _TALLY = "fault_rows", "fault_tally"


@dataclass
class Tally:
    """The number of faults that a test injected and survived."""

    survived: int = 0

    def add(self, *, survived: int) -> None:
        """Count faults whose promise held."""
        self.survived += survived


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="print the table of faults tried, survived and lost")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*numbers): shows what holds for these faults of tests/faults/promises.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rows = sorted({number for mark in item.iter_markers("fault") for number in mark.args})
        if not PROMISES.keys() >= {*rows}:
            raise pytest.UsageError(f"{item.nodeid}: one of the faults {rows} is not in promises.py")
        if rows:
            item.user_properties.append((_ROWS, rows))


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Count the faults that one test tries."""
    counted = Tally()
    yield counted
    request.node.user_properties.append((_TALLY, counted.survived))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--fault-table"):
        reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
        rows = count(reports)
        terminalreporter.section("faults")
        terminalreporter.write_line(f"{'row':>3}  {'fault':<55}  survived  lost")
        for number, (survived, lost) in rows.items():
            terminalreporter.write_line(f"{number:>3}  {PROMISES[number][0]:<55}  {survived:>8} {lost:>5}")


def count(reports: Iterable[pytest.TestReport]) -> dict[int, list[int]]:
    """Return by fault the numbers survived and lost, from the reports of all tests and phases."""
    by_test = defaultdict[str, list[pytest.TestReport]](list)
    for report in reports:
        by_test[report.nodeid].append(report)
    rows = {number: [0, 0] for number in PROMISES}
    for phases in by_test.values():
        outcomes = {phase.outcome for phase in phases}
        if "skipped" in outcomes:
            continue
        # The last phase knows properties that the earlier ones do not.
        properties: dict[str, Any] = {name: value for phase in phases for name, value in phase.user_properties}
        lost = int("failed" in outcomes)
        for number in properties.get(_ROWS, ()):
            rows[number][0] += properties.get(_TALLY, 0) or 1 - lost
            rows[number][1] += lost
    return rows
