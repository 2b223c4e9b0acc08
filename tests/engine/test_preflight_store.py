import json
import logging

import pytest

from fvc_lib.engine.memory.preflight import Decision, PreflightStore, StepMeasurement

FOUND = StepMeasurement(75, 10, 20, {1: 50, 2: 60}, {4: "SIGKILL"})


def test_what_was_kept_is_there_for_the_next_fold(tmp_path):
    path = tmp_path / "memory" / "preflight.json"
    PreflightStore(path).keep_measurement("step", {"threads": 2}, FOUND)
    PreflightStore(path).keep_decision("step and budget", Decision(2, ""))
    another = PreflightStore(path)
    assert another.measurement("step") == FOUND
    assert another.decision("step and budget") == Decision(2, "")
    assert another.measurement("another") is None
    assert another.decision("another") is None
    assert json.loads(path.read_text())["measurements"]["step"]["circumstances"] == {"threads": 2}


def test_without_a_path_nothing_is_kept():
    store = PreflightStore(None)
    store.keep_decision("key", Decision(2, ""))
    assert store.decision("key") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\0" * 100, b"[]", b'{"format": 2}', b'{"format": 1, "measurements": [], "decisions": {}}', b"\xff"],
)
def test_a_damaged_file_is_named_and_costs_a_measurement_only(tmp_path, caplog, content):
    path = tmp_path / "preflight.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert PreflightStore(path).measurement("step") is None
    assert str(path) in caplog.text
    PreflightStore(path).keep_measurement("step", {}, FOUND)
    assert PreflightStore(path).measurement("step") == FOUND


@pytest.mark.parametrize("entry", [None, {}, {"found": {"step_bytes": {"a": 1}}}, {"found": 3}])
def test_a_damaged_entry_leaves_the_others_readable(tmp_path, caplog, entry):
    path = tmp_path / "preflight.json"
    PreflightStore(path).keep_measurement("good", {}, FOUND)
    document = json.loads(path.read_text())
    document["measurements"]["bad"] = document["decisions"]["bad"] = entry
    path.write_text(json.dumps(document))
    assert PreflightStore(path).measurement("bad") is None
    assert PreflightStore(path).decision("bad") is None
    assert PreflightStore(path).measurement("good") == FOUND


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "memory").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        PreflightStore(tmp_path / "memory" / "preflight.json").keep_decision("key", Decision(2, ""))
    assert "measures again" in caplog.text
