"""A run's memory: logs on one clock, peaks by phase and place, growth, out-of-memory and prediction."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.memory import (
    MemoryFindings,
    judged_growth,
    memory_facts,
    out_of_memory_sentence,
)
from fvc_lib.analysis.read import queries
from fvc_lib.services.memory import DeviceMemory
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MemorySampler
from tests.analysis.memory_story import StoryWriter, memory_of, troubled_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "e" / "run_x")


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> MemoryFindings:
    return memory_of(troubled_run(tmp_path_factory.mktemp("troubled") / "e" / "run_x"))


def one(frame: pl.DataFrame, **values: object) -> dict[str, object]:
    rows = frame.filter(pl.col(name).eq_missing(pl.lit(value)) for name, value in values.items())
    assert rows.height == 1, rows
    return rows.row(0, named=True)


# --- Samples and events on one clock


def test_time_is_the_samplers_own_in_all_attempts_even_if_the_clock_jumps(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1).sample(2)
    writer.wall -= 7200
    writer.sample(3).resume(pause=86400).sample(4).sample(5)
    writer.resume().sample(6, seconds=0.25)
    StoryWriter(run, fold=1).sample(1, seconds=9)
    samples = queries.memory_samples([run]).frame
    own = samples.filter(fold=0)
    assert own["seconds"].to_list() == [1, 2, 3, 4, 5, 5.25]
    assert own["attempt"].to_list() == [1, 1, 1, 2, 2, 3]
    assert samples.filter(fold=1)["seconds"].to_list() == [9]


def test_an_event_stands_at_its_own_moment_with_its_numbers(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1).event("near_limit", seconds=0.5).sample(2, seconds=0.5)
    writer.resume().sample(3).sample(4)
    writer.event("out_of_memory", seconds=0.75, where="backward", micro_batch=8, unheard_of="x")
    events = queries.memory_events([run]).frame
    assert events.select("seconds", "attempt", "kind").rows() == [(1.5, 1, "near_limit"), (4.75, 2, "out_of_memory")]
    row = events.row(1, named=True)
    assert (row["happened_in"], row["micro_batch"]) == ("backward", 8)
    assert '"unheard_of":"x"' in row["details"]


def test_what_the_sampler_writes_is_what_is_read(run: RunPaths) -> None:
    """The real writer, opened twice as after a kill, with an accelerator that is watched."""
    stage = "04_fold_training"
    for attempt in (1, 2):
        with MemorySampler(run.memory(stage, 0), events=run.memory_events(stage, 0), interval_seconds=60) as memory:
            memory.watch_device("cuda:0", lambda: DeviceMemory(3_000_000, 4_000_000, 5_000_000, 9_000_000, 1_000_000))
            memory.at("train", epoch=attempt, batch_idx=0, global_step=7)
            memory.event("out_of_memory", "memory ended", where="forward", micro_batch=4, micro_batch_next=2)
    found = memory_of(run)
    assert found.notes == ()
    assert found.usage["attempt"].unique().sort().to_list() == [1, 2]
    peaks = {(row["place"], row["phase"]): row for row in found.peaks.iter_rows(named=True)}
    assert set(peaks) == {(place, phase) for place in ("process", "cuda:0") for phase in ("setup", "train")}
    assert (peaks["cuda:0", "setup"]["used_mb"], peaks["cuda:0", "train"]["used_mb"]) == (5, 3)
    assert 10 < peaks["process", "train"]["used_mb"] < 10_000
    assert found.out_of_memory["micro_batch_next"].to_list() == [2, 2]
    assert "2 times: the micro-batch went down to 2" in out_of_memory_sentence(found)
    assert found.events["attempt"].to_list() == [1, 2]


# --- Peaks


def test_the_peak_of_a_phase_is_its_highest_sample_and_every_phase_counts(troubled, run) -> None:
    highest = troubled.usage.group_by("stage", "fold", "phase").agg(pl.col("used_mb").max())
    assert set(troubled.peaks.select(highest.columns).rows()) == set(highest.rows())
    assert (troubled.peak["stage"], troubled.peak["fold"], troubled.peak["used_mb"]) == ("04_fold_training", 1, 1930)
    assert [name for name, _ in memory_facts(troubled)] == ["Memory", "Out of memory", "Leak"]
    StoryWriter(run).sample(500, "setup").sample(1900, "preflight").sample(700, "train")
    found = memory_of(run)
    assert (found.peak["phase"], found.peak["used_mb"]) == ("preflight", 1900)


def test_a_peak_between_two_samples_counts_in_the_phase_and_attempt_that_had_it(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(500, "setup", highest_mb=500).sample(600, "train", highest_mb=600)
    writer.sample(620, "train", highest_mb=950).sample(630, "validation", highest_mb=950)
    writer.resume().sample(400, "setup", highest_mb=400).sample(450, "train", highest_mb=450)
    peaks = memory_of(run).peaks
    assert [one(peaks, phase=phase)["used_mb"] for phase in ("setup", "train", "validation")] == [500, 950, 630]
    assert one(peaks, phase="train")["num_samples"] == 3


def test_an_accelerator_is_told_from_the_process_it_belongs_to(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1, "setup").event("preflight", predicted_peak_mb=5000.0)
    for used in (2000, 6000, 4000):
        writer.budget_mb = 2000
        writer.sample(700, rss_mb=600)
        writer.budget_mb = 8000
        writer.sample(used, seconds=0, device="cuda:0", reserved_mb=used + 500, rss_mb=600)
    found = memory_of(run)
    assert one(found.peaks, place="process", phase="train")["used_mb"] == 700
    device = one(found.peaks, place="cuda:0")
    assert (device["used_mb"], device["usage_percent"]) == (6000, 75)
    assert found.peak["place"] == "cuda:0"  # nearer to its own limit, though a line of the process came first
    assert found.predictions.select("place", "measured_mb").rows() == [("cuda:0", 6000)]


# --- Growth


def judged(*levels_mb: float) -> tuple[int, float | None, float | None, str]:
    return judged_growth(np.arange(1.0, len(levels_mb) + 1), np.array(levels_mb))


def around(level: float, count: int, deviation: float, seed: int) -> list[float]:
    return list(level + np.random.default_rng(seed).normal(0, deviation, count))


def test_a_leak_is_flagged_through_noise_and_a_step_or_noise_alone_is_not() -> None:
    for seed in range(20):
        found = judged(*(600 + 25 * np.arange(12) + around(0, 12, 4, seed)))
        assert found[3] == "leak"
        assert found[1] == pytest.approx(25, abs=3)
    for at in range(1, 12):
        assert judged(*around(500, at, 1, at), *around(700, 12 - at, 1, at + 100))[3] == "no leak"
    flagged = [judged(*around(800, 8, 40, seed))[3] == "leak" for seed in range(400)]
    assert np.mean(flagged) < 0.02
