import json
import logging

import pytest

from fvc_lib.engine.memory.preflight import Measured, StepMeasurement, Stored, keep, read_stored

FOUND = StepMeasurement(75, 10, 20, {1: 50, 2: 60}, {1: 0.5, 2: 0.25}, {4: "SIGKILL"})
MEASURED = {"step": Measured(circumstances={"threads": 2}, found=FOUND)}
NOTHING = Stored(measurements={}, decisions={})


def test_what_was_kept_is_there_for_the_next_fold(tmp_path):
    path = tmp_path / "memory" / "preflight.json"
    keep(path, MEASURED, {"step and budget": (2, "")})
    keep(path, {}, {"step and another budget": (4, "")})
    found = read_stored(path)
    assert (found.measurements, found.decisions["step and budget"]) == (MEASURED, (2, ""))
    assert sorted(found.decisions) == ["step and another budget", "step and budget"]
    assert json.loads(path.read_text())["measurements"]["step"]["circumstances"] == {"threads": 2}


def test_without_a_path_nothing_is_kept():
    keep(None, MEASURED, {})
    assert read_stored(None) == NOTHING


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
        assert read_stored(path) == NOTHING
    assert str(path) in caplog.text
    keep(path, MEASURED, {"decision": (2, "")})
    assert read_stored(path).measurements == MEASURED


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "memory").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        keep(tmp_path / "memory" / "preflight.json", MEASURED, {})
    assert "measures again" in caplog.text
