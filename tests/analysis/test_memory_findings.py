from pathlib import Path

import polars as pl
import pytest

from fvc_lib.analysis.memory import (
    MemoryFindings,
    limit_sentence,
    out_of_memory_sentence,
    out_of_memory_table,
    prediction_sentence,
    run_memory,
)
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.memory_story import StoryWriter, troubled_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "e" / "run_x")


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> MemoryFindings:
    return run_memory(troubled_run(tmp_path_factory.mktemp("troubled") / "e" / "run_x"))


def one(frame: pl.DataFrame, **values: object) -> dict[str, object]:
    rows = frame.filter(pl.col(name).eq_missing(pl.lit(value)) for name, value in values.items())
    assert rows.height == 1, rows
    return rows.row(0, named=True)


def test_the_peak_of_a_phase_is_its_highest_sample(troubled: MemoryFindings) -> None:
    naive: dict[tuple[object, ...], float] = {}
    for row in troubled.usage.iter_rows(named=True):
        key = (row["stage"], row["fold"], row["phase"])
        naive[key] = max(naive.get(key, 0.0), row["used_mb"])
    got = {tuple(row[:3]): row[3] for row in troubled.peaks.select("stage", "fold", "phase", "used_mb").iter_rows()}
    assert got == naive
    assert (troubled.peak["stage"], troubled.peak["fold"], troubled.peak["used_mb"]) == ("04_fold_training", 1, 1930)


def test_a_peak_between_two_samples_counts_in_the_phase_that_had_it(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(500, "setup", highest_mb=500).sample(600, "train", highest_mb=600)
    writer.sample(620, "train", highest_mb=950).sample(630, "validation", highest_mb=950)
    found = run_memory(run)
    assert one(found.peaks, phase="train")["used_mb"] == 950
    assert one(found.peaks, phase="validation")["used_mb"] == 630
    assert one(found.peaks, phase="train")["num_samples"] == 2


def test_the_peak_is_of_every_phase(run: RunPaths) -> None:
    StoryWriter(run).sample(500, "setup").sample(1900, "preflight").sample(700, "train")
    found = run_memory(run)
    assert (found.peak["phase"], found.peak["used_mb"]) == ("preflight", 1900)
    assert limit_sentence(found).endswith("04_fold_training, fold 0")


def test_a_high_water_mark_of_an_earlier_attempt_does_not_count_again(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(500, "setup").sample(600, "train").sample(900, "train", highest_mb=1200)
    writer.resume().sample(400, "setup", highest_mb=400).sample(450, "train", highest_mb=450)
    peaks = run_memory(run).peaks
    assert (one(peaks, phase="setup")["used_mb"], one(peaks, phase="train")["used_mb"]) == (500, 1200)


def test_an_accelerator_is_told_from_the_process_it_belongs_to(run: RunPaths) -> None:
    writer = StoryWriter(run)
    for used in (2000, 6000, 4000):
        writer.sample(700, rss_mb=600)
        writer.budget_mb = 8000
        writer.sample(used, seconds=0, device="cuda:0", reserved_mb=used + 500, rss_mb=600)
        writer.budget_mb = 2000
    found = run_memory(run)
    assert one(found.peaks, place="process")["used_mb"] == 700
    device = one(found.peaks, place="cuda:0")
    assert (device["used_mb"], device["usage_percent"]) == (6000, 75)
    assert found.peak["place"] == "cuda:0"  # nearer to its own limit, though a line of the process came first


def test_every_out_of_memory_is_a_row_with_the_next_micro_batch(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1000)
    writer.event("out_of_memory", where="forward", asked_mb=512.0, micro_batch=8, micro_batch_next=4, epoch=1, step=2)
    writer.event("micro_batch", micro_batch_before=8, micro_batch=4)
    writer.event("out_of_memory", where="optimizer_step", context_file="x.json")
    found = run_memory(run)
    assert out_of_memory_table(found).select("epoch", "happened_in", "asked_for", "next_micro_batch").rows() == [
        ("1", "forward", "512 MB", "4"), ("", "optimizer_step", "not recorded", ""),
    ]  # fmt: skip
    assert out_of_memory_sentence(found) == "Memory ran out 2 times in 1 stage: the micro-batch went from 8 down to 4"


def test_a_prediction_is_held_against_training_and_validation_only(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1500, "setup").event("preflight", predicted_peak_mb=900.0, used_mb=1.0)
    writer.sample(800, "train").sample(1000, "validation").sample(1900, "test")
    row = run_memory(run).predictions.row(0, named=True)
    assert (row["predicted_mb"], row["measured_mb"], row["error_percent"]) == (900, 1000, -10)
    assert prediction_sentence(run_memory(run)).startswith("The prediction is at most 10% below the measured peak")


def test_a_prediction_for_an_accelerator_is_held_against_it(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1, "setup").event("preflight", predicted_peak_mb=5000.0)
    writer.sample(700).sample(4000, device="cuda:0", rss_mb=600)
    row = run_memory(run).predictions.row(0, named=True)
    assert (row["place"], row["measured_mb"], row["error_percent"]) == ("cuda:0", 4000, 25)


def test_growth_is_judged_for_each_training_of_each_attempt(troubled: MemoryFindings) -> None:
    assert troubled.leaks.select("fold", "phase").rows() == [(0, "train")]
    assert troubled.leaks["slope_mb"].item() == pytest.approx(92)
    others = troubled.growth.filter(pl.col("fold") == 1)
    assert set(others.select("attempt", "phase", "verdict").rows()) == {
        (1, "train", "too few epochs"), (2, "train", "no leak"), (2, "control_train", "no leak"),
    }  # fmt: skip
