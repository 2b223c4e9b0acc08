import json
import logging

import pytest

from fvc_lib.engine.memory.preflight import PreflightStore, StepMeasurement

FOUND = StepMeasurement(75, 10, 20, {1: 50, 2: 60}, {1: 0.5, 2: 0.25}, {4: "SIGKILL"})


def test_what_was_kept_is_there_for_the_next_fold(tmp_path):
    path = tmp_path / "memory" / "preflight.json"
    PreflightStore(path).keep("step", {"threads": 2}, FOUND, "step and budget", (2, ""))
    another = PreflightStore(path)
    assert another.look_up("step", "step and budget") == (FOUND, (2, ""))
    assert another.look_up("step", "another budget") == (FOUND, None)
    assert another.look_up("another", "another") == (None, None)
    assert json.loads(path.read_text())["measurements"]["step"]["circumstances"] == {"threads": 2}


def test_without_a_path_nothing_is_kept():
    store = PreflightStore(None)
    store.keep("key", {}, FOUND, "decision", (2, ""))
    assert store.look_up("key", "decision") == (None, None)


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
        assert PreflightStore(path).look_up("step", "") == (None, None)
    assert str(path) in caplog.text
    PreflightStore(path).keep("step", {}, FOUND, "decision", (2, ""))
    assert PreflightStore(path).look_up("step", "decision") == (FOUND, (2, ""))


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "memory").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        PreflightStore(tmp_path / "memory" / "preflight.json").keep("key", {}, FOUND, "key", (2, ""))
    assert "measures again" in caplog.text
