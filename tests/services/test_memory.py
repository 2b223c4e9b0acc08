"""The budget is the smallest limit there is; the sampler sees memory come and go."""

from __future__ import annotations

import json

import numpy as np
import psutil

from fvc_lib.services.memory import MemorySampler, memory_budget


def test_the_budget_names_who_set_it(monkeypatch):
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    assert memory_budget().total_bytes <= psutil.virtual_memory().total
    asked = memory_budget(0.25)
    assert asked.total_bytes == 250_000_000
    assert asked.origin == "mem_gb / FVC_MEM_GB"
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    assert memory_budget(0.25).total_bytes == 100 << 20


def test_the_log_shows_a_large_allocation_in_its_phase(tmp_path):
    path = tmp_path / "memory" / "04.jsonl"
    with MemorySampler(path, mem_gb=4.0, interval_seconds=30) as sampler:
        sampler.at("train", epoch=1, batch_idx=0, global_step=0)
        block = np.ones(200_000_000, dtype=np.uint8)
        sampler.at("validation", epoch=1)
        del block
        sampler.at("test")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_phase = {row["phase"]: row for row in rows}
    assert by_phase["validation"]["rss_mb"] - by_phase["train"]["rss_mb"] > 180
    assert by_phase["test"]["rss_mb"] < by_phase["validation"]["rss_mb"] - 150
    assert sampler.peak_bytes >= by_phase["validation"]["allocated_mb"] * 1e6 - 1e4
    assert by_phase["train"]["total_memory_mb"] <= 4000
    assert set(rows[0]) == {
        "timestamp", "phase", "epoch", "batch_idx", "global_step", "allocated_mb", "reserved_mb", "max_allocated_mb",
        "total_memory_mb", "usage_percent", "free_mb", "device", "rank", "rss_mb",
    }  # fmt: skip
