"""The marker ``fault``, the fixture ``tally`` and the table of ``--fault-table``: a plugin for the whole suite.

A test anywhere that shows what holds for a fault carries ``@pytest.mark.fault(12)``. It counts as one fault tried,
and survived when it passes; a test that injects many says so through ``tally``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.promises import PROMISES

_ROWS, _TALLY = "fault_rows", "fault_tally"


@dataclass
class Tally:
    """How many faults a test injected, and what became of them."""

    survived: int = 0
    lost: int = 0

    def add(self, *, survived: int = 0, lost: int = 0) -> None:
        """Count faults that were tried: those whose promise held and those whose did not."""
        self.survived += survived
        self.lost += lost


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="print the table of faults tried, survived and lost")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*numbers): shows what holds for these faults of tests/faults/promises.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rows = sorted({number for mark in item.iter_markers("fault") for number in mark.args})
        if unknown := [number for number in rows if number not in PROMISES]:
            raise pytest.UsageError(f"{item.nodeid}: no fault has the number {unknown[0]!r}; see promises.py")
        if rows:
            item.user_properties.append((_ROWS, rows))


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts what a test tries where that is not simply one fault; a test that fails has lost one more."""
    counted = Tally()
    yield counted
    request.node.user_properties.append((_TALLY, [counted.survived, counted.lost]))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--fault-table"):
        reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
        terminalreporter.section("faults")
        for line in table_lines(count(reports)):
            terminalreporter.write_line(line)


def count(reports: Iterable[pytest.TestReport]) -> dict[int, list[int]]:
    """Return by fault how many were survived and lost, out of the reports of all tests and phases."""
    by_test: dict[str, list[pytest.TestReport]] = {}
    for report in reports:
        by_test.setdefault(report.nodeid, []).append(report)
    rows = {number: [0, 0] for number in PROMISES}
    for phases in by_test.values():
        outcomes = {phase.outcome for phase in phases}
        if "skipped" in outcomes:
            continue
        # What the last phase knows is in none of the earlier.
        properties: dict[str, Any] = {name: value for phase in phases for name, value in phase.user_properties}
        survived, lost = properties.get(_TALLY, (0, 0))
        lost += "failed" in outcomes
        for number in properties.get(_ROWS, ()):
            rows[number][0] += survived or not lost
            rows[number][1] += lost
    return rows


def table_lines(rows: dict[int, list[int]]) -> list[str]:
    """The table as text: one line for each fault, and their sums."""
    width = max(len(promise.fault) for promise in PROMISES.values())
    lines = [f"{'row':>3}  {'fault':<{width}}  {'survived':>8} {'lost':>5}"]
    for number, (survived, lost) in rows.items():
        lines.append(f"{number:>3}  {PROMISES[number].fault:<{width}}  {survived:>8} {lost:>5}")
    sums = [sum(column) for column in zip(*rows.values(), strict=True)]
    return [*lines, f"{'':>3}  {'all':<{width}}  {sums[0]:>8} {sums[1]:>5}"]
