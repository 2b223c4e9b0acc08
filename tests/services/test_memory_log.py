"""The sampler attributes memory to phases, and warns before memory runs out."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fvc_lib.services.memory import MemoryObserver, ProcessMemory, ProcessTree
from fvc_lib.services.stage_logs import MemorySampler

pytestmark = pytest.mark.usefixtures("alone")

COLUMNS = [
    "timestamp", "phase", "epoch", "batch_idx", "global_step", "allocated_mb", "reserved_mb", "max_allocated_mb",
    "total_memory_mb", "usage_percent", "free_mb", "device", "rank", "rss_mb", "elapsed_seconds",
]  # fmt: skip
MEGABYTE = 1_000_000


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def sampled(tmp_path: Path):
    """Return a function that opens a sampler, which samples only on request."""
    opened: list[MemorySampler] = []

    def open_as(**settings: Any) -> MemorySampler:
        settings = {"events": tmp_path / "events.jsonl", "interval_seconds": 600, **settings}
        opened.append(MemorySampler(tmp_path / "samples.jsonl", **settings))
        return opened[-1]

    yield open_as
    for sampler in opened:
        sampler.close()


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the measured memory of this process."""

    def hold(held: int) -> None:
        monkeypatch.setattr(ProcessTree, "measure", lambda tree: ProcessMemory(held, held, held))

    return hold


def test_a_line_has_the_columns_it_always_had_and_the_monotonic_clock(sampled, tmp_path):
    observer: MemoryObserver = sampled(mem_gb=1e6)
    observer.at("train", epoch=1, batch_idx=2, global_step=3)
    _, before, after = lines_of(tmp_path / "samples.jsonl")
    assert list(after) == COLUMNS
    assert [after[name] for name in ("phase", "epoch", "batch_idx", "global_step")] == ["train", 1, 2, 3]
    assert (before["phase"], before["epoch"], after["device"], after["rank"]) == ("setup", None, "cpu", 0)
    assert after["elapsed_seconds"] >= before["elapsed_seconds"] >= 0
    assert after["usage_percent"] == pytest.approx(100 * after["allocated_mb"] / after["total_memory_mb"], abs=0.01)


def peaks_between_two_samples(path: Path) -> None:
    with MemorySampler(path, interval_seconds=600) as sampler:
        for phase, megabytes in (("preflight", 150), ("setup", 0), ("train", 75), ("validation", 0)):
            sampler.at(phase)
            if megabytes:
                np.ones(megabytes * MEGABYTE, dtype=np.uint8)
    rows = {row["phase"]: row for row in lines_of(path)}  # the last of each phase
    above = {phase: row["max_allocated_mb"] - row["allocated_mb"] for phase, row in rows.items()}
    assert above == pytest.approx({"preflight": 150, "setup": 0, "train": 75, "validation": 0}, abs=15)
    assert sampler.peak_bytes / MEGABYTE == pytest.approx(rows["preflight"]["max_allocated_mb"], abs=0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resets VmHWM")
def test_an_allocation_and_its_peak_stand_in_the_phase_they_came_in(tmp_path):
    # In a new process, because one that ran other tests may free memory and have children.
    code = (
        f"from pathlib import Path; from {__name__} import peaks_between_two_samples as body; "
        f"body(Path({str(tmp_path)!r}, 'log'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_an_event_carries_where_it_happened_and_its_numbers(sampled, tmp_path):
    sampler = sampled()
    sampler.at("train", epoch=2, batch_idx=5, global_step=17)
    sampler.event("out_of_memory", "no room", micro_batch=8, where="forward", loss=float("nan"))
    (event,) = lines_of(tmp_path / "events.jsonl")
    assert list(event) == ["timestamp", "elapsed_seconds", "phase", "epoch", "batch_idx", "global_step", "kind",
                           "message", "details"]  # fmt: skip
    assert (event["phase"], event["epoch"], event["batch_idx"], event["global_step"]) == ("train", 2, 5, 17)
    assert (event["kind"], event["message"]) == ("out_of_memory", "no room")
    assert event["details"] == {"micro_batch": 8, "where": "forward", "loss": "nan"}


def test_nearness_to_the_budget_is_said_once_with_what_to_try(sampled, tmp_path, caplog, holding):
    holding(98 * MEGABYTE)
    sampler = sampled(mem_gb=0.1)
    for _ in range(5):
        sampler.sample()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in ("memory on cpu is at 98 %", "mem_gb / FVC_MEM_GB", "Next, try"):
        assert words in record.message
    (event,) = lines_of(tmp_path / "events.jsonl")
    assert (event["kind"], event["message"]) == ("near_limit", record.message)
    assert event["details"]["usage_percent"] == 98
    assert event["details"]["budget_mb"] == 100
