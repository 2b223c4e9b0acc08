"""``run.json``: what was asked, and that a resume elsewhere no longer claims to be bit for bit the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fvc_lib.execution.run_record import begin_run, record_resumption
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths, list_runs


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(runs_dir=str(tmp_path / "runs"))


@pytest.fixture
def run(config: RunConfig) -> RunPaths:
    return begin_run(config, command="first")


def edit_record(run: RunPaths, path: str, value: object) -> None:
    """Make the last attempt say that it ran elsewhere; ``path`` is like ``versions.torch``."""
    record = json.loads(run.run_json.read_text())
    section, name = path.split(".")
    record["attempts"][-1][section][name] = value
    run.run_json.write_text(json.dumps(record))


def test_an_equal_resume_adds_an_attempt_and_withdraws_nothing(run, config):
    assert record_resumption(run, config, command="second") == []
    record = json.loads(run.run_json.read_text())
    assert [attempt["command"] for attempt in record["attempts"]] == ["first", "second"]
    assert "bit_equal_resume" not in record
    assert "differs" not in record["attempts"][1]


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("path", "before", "name"),
    [
        ("versions.torch", "2.12.0", "torch"),
        ("versions.numpy", "1.0", "numpy"),
        ("versions.python", "3.10.0", "python"),
        ("hardware.cores", 999, "threads"),
        ("hardware.omp_num_threads", "7", "threads"),
        ("hardware.processor", "Pentium", "processor"),
        ("hardware.machine", "vax", "machine"),
    ],
)
def test_another_version_processor_or_number_of_threads_is_told_and_ends_the_claim(
    run, config, monkeypatch, path, before, name
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    edit_record(run, "hardware.omp_num_threads", None)
    edit_record(run, path, before)
    clauses = record_resumption(run, config, command="second")
    assert [clause.split(" ")[0] for clause in clauses] == [name]
    assert f"{name} {before} -> " in clauses[0]
    record = json.loads(run.run_json.read_text())
    assert record["bit_equal_resume"] is False
    assert record["bit_equal_resume_because"] == clauses
    assert list(record["attempts"][1]["differs"]) == [name]


@pytest.mark.fault(29)
def test_the_number_of_threads_that_is_asked_for_counts_and_not_the_cores(run, config, monkeypatch):
    edit_record(run, "hardware.omp_num_threads", "2")
    edit_record(run, "hardware.cores", 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert record_resumption(run, config, command="second") == []
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert record_resumption(run, config, command="third") == ["threads 2 -> 4"]


@pytest.mark.fault(29)
def test_going_back_to_the_first_versions_does_not_restore_the_claim(run, config):
    edit_record(run, "versions.torch", "2.12.0")
    first = record_resumption(run, config, command="second")
    assert record_resumption(run, config, command="third") == []
    record = json.loads(run.run_json.read_text())
    assert record["bit_equal_resume"] is False
    assert record["bit_equal_resume_because"] == first


def test_an_attempt_that_noted_no_processor_differs_in_nothing(run, config):
    record = json.loads(run.run_json.read_text())
    for name in ("processor", "omp_num_threads"):
        del record["attempts"][0]["hardware"][name]
    run.run_json.write_text(json.dumps(record))
    assert [c for c in record_resumption(run, config, command="second") if not c.startswith("threads")] == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"attempts": []}', '{"attempts": [{}]}', '{"attempts": [3]}'])
def test_a_broken_record_is_named(run, config, content):
    run.run_json.write_text(content)
    with pytest.raises(DataError, match=r"run\.json: not a run's record"):
        record_resumption(run, config, command="second")


def test_a_run_that_could_not_be_prepared_is_none(config, tmp_path):
    seen = []

    def prepare(run):
        seen.append(run)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        begin_run(config, command="test", prepare=prepare)
    assert seen[0].root.is_dir()
    assert list_runs(tmp_path / "runs") == []


def test_what_was_prepared_is_recorded(config):
    run = begin_run(config, command="test", prepare=lambda run: {"forked_from": f"the one before {run.run_id}"})
    assert json.loads(run.run_json.read_text())["forked_from"] == f"the one before {run.run_id}"
