import json
import logging

import pytest

from fvc_lib.services.memory.measured_steps import MeasuredStep, StepMeasurement, StoredSteps, keep_steps, read_steps

FOUND = StepMeasurement(75, 10, 20, {1: 50, 2: 60}, {1: 0.5, 2: 0.25}, {4: "SIGKILL"})
MEASURED = {"step": MeasuredStep(circumstances={"threads": 2}, found=FOUND)}
NOTHING = StoredSteps(measurements={}, decisions={})


def test_what_was_kept_is_there_for_the_next_fold(tmp_path):
    path = tmp_path / "memory" / "preflight.json"
    keep_steps(path, MEASURED, {"step and budget": (2, "")})
    keep_steps(path, {}, {"step and another budget": (4, "")})
    found = read_steps(path)
    assert (found.measurements, found.decisions["step and budget"]) == (MEASURED, (2, ""))
    assert sorted(found.decisions) == ["step and another budget", "step and budget"]
    assert json.loads(path.read_text())["measurements"]["step"]["circumstances"] == {"threads": 2}


def test_without_a_path_nothing_is_kept():
    keep_steps(None, MEASURED, {})
    assert read_steps(None) == NOTHING


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\0" * 100,
        b"[]",
        b'{"format": 3}',
        b'{"format": 2, "measurements": {}, "decisions": {}}',
        b"\xff",
        b'{"format": 3, "measurements": {"step": {"found": 3}}, "decisions": {}}',
    ],
)
def test_a_damaged_or_older_file_is_named_and_costs_a_measurement_only(tmp_path, caplog, content):
    path = tmp_path / "preflight.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read_steps(path) == NOTHING
    assert str(path) in caplog.text
    keep_steps(path, MEASURED, {"decision": (2, "")})
    assert read_steps(path).measurements == MEASURED


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "memory").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        keep_steps(tmp_path / "memory" / "preflight.json", MEASURED, {})
    assert "measures again" in caplog.text
