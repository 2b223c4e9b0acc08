from pathlib import Path

import polars as pl
import pytest

from fvc_lib.analysis.memory import out_of_memory_table, run_memory
from fvc_lib.analysis.read import queries
from fvc_lib.services.memory.policy import DeviceMemory
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MemorySampler
from tests.analysis.memory_story import StoryWriter


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "e" / "run_x")


def samples(run: RunPaths) -> pl.DataFrame:
    return queries.memory_samples([run]).frame


def events(run: RunPaths) -> pl.DataFrame:
    return queries.memory_events([run]).frame


def test_time_is_the_samplers_own(run: RunPaths) -> None:
    StoryWriter(run).sample(1, seconds=0.5).sample(2, seconds=1.25)
    assert samples(run)["seconds"].to_list() == [0.5, 1.75]


def test_a_clock_that_jumps_back_does_not_turn_time_round(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1).sample(2)
    writer.wall -= 7200
    writer.sample(3).sample(4)
    assert samples(run)["seconds"].to_list() == [1, 2, 3, 4]


def test_each_attempt_goes_on_where_the_one_before_ended(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1).sample(2).resume(pause=86400).sample(3).sample(4)
    writer.resume().sample(5, seconds=0.25)
    frame = samples(run)
    assert frame["seconds"].to_list() == [1, 2, 3, 4, 4.25]
    assert frame["attempt"].to_list() == [1, 1, 2, 2, 3]


def test_files_of_one_run_have_clocks_of_their_own(run: RunPaths) -> None:
    StoryWriter(run, fold=0).sample(1).sample(2)
    StoryWriter(run, fold=1).sample(1)
    StoryWriter(run, "02_folds", None).sample(1, "setup", seconds=9)
    frame = samples(run)
    assert frame.select("stage", "fold", "seconds").rows() == [
        ("02_folds", None, 9), ("04_fold_training", 0, 1), ("04_fold_training", 0, 2), ("04_fold_training", 1, 1),
    ]  # fmt: skip
    assert frame["attempt"].unique().to_list() == [1]


def test_events_are_not_taken_for_samples_nor_samples_for_events(run: RunPaths) -> None:
    StoryWriter(run).sample(1).event("out_of_memory", where="backward", micro_batch=8, micro_batch_next=4)
    assert samples(run).height == events(run).height == 1
    assert queries.memory_samples([run]).notes == ()


def test_an_event_stands_at_its_own_moment_in_its_own_attempt(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(1).event("near_limit", seconds=0.5).sample(2, seconds=0.5)
    writer.resume().sample(3).sample(4).event("near_limit", seconds=0.75)
    assert events(run)["seconds"].to_list() == [1.5, 4.75]
    assert events(run)["attempt"].to_list() == [1, 2]


def test_an_events_numbers_are_columns_and_its_details_stay_whole(run: RunPaths) -> None:
    StoryWriter(run).sample(1).event(
        "out_of_memory", "memory ended in backward", where="backward", asked_mb=512.5, micro_batch=8,
        micro_batch_next=4, context_file="a b.json", unheard_of="x",
    )  # fmt: skip
    row = events(run).row(0, named=True)
    assert (row["happened_in"], row["asked_mb"], row["micro_batch"], row["micro_batch_next"]) == (
        "backward",
        512.5,
        8,
        4,
    )
    assert (row["context_file"], row["message"]) == ("a b.json", "memory ended in backward")
    assert '"unheard_of":"x"' in row["details"]
    assert row["lost_steps"] is None


def test_odd_events_cost_their_numbers_and_not_the_answer(run: RunPaths) -> None:
    path = run.memory_events("04_fold_training", 0)
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"kind": "out_of_memory", "timestamp": 1, "elapsed_seconds": 1, "details": "text"}\n'
        '{"kind": "near_limit", "timestamp": 2, "elapsed_seconds": 2, "details": {"used_mb": "much"}}\n'
        '{"kind": "policy", "timestamp": 3, "elapsed_seconds": 3}\n'
        '{"message": "no kind"}\n\x00\x00\x00\n{"kind": "torn'
    )
    answer = queries.memory_events([run])
    assert answer.frame["kind"].to_list() == ["out_of_memory", "near_limit", "policy"]
    assert answer.frame["used_mb"].to_list() == [None] * 3
    (note,) = answer.notes
    assert note.startswith("3 lines of run_x/04_fold_training_fold_0.jsonl")
    assert "4, 5, 6" in note


def test_what_the_sampler_writes_is_what_is_read(run: RunPaths) -> None:
    """The real writer, opened twice as after a kill, with an accelerator that is watched."""
    stage = "04_fold_training"
    for attempt in (1, 2):
        with MemorySampler(run.memory(stage, 0), events=run.memory_events(stage, 0), interval_seconds=60) as memory:
            memory.watch_device("cuda:0", lambda: DeviceMemory(3_000_000, 4_000_000, 5_000_000, 9_000_000, 1_000_000))
            memory.at("train", epoch=attempt, batch_idx=0, global_step=7)
            memory.event(
                "out_of_memory", "memory ended", where="forward", asked_mb=1.5, micro_batch=4, micro_batch_next=2
            )
    found = run_memory(run)
    assert found.notes == ()
    assert found.usage["attempt"].unique().sort().to_list() == [1, 2]
    assert samples(run)["seconds"].is_sorted()
    peaks = {(row["place"], row["phase"]): row for row in found.peaks.iter_rows(named=True)}
    assert set(peaks) == {(place, phase) for place in ("process", "cuda:0") for phase in ("setup", "train")}
    assert (peaks["cuda:0", "setup"]["used_mb"], peaks["cuda:0", "train"]["used_mb"]) == (5, 3)
    assert 10 < peaks["process", "train"]["used_mb"] < 10_000
    assert out_of_memory_table(found)["next_micro_batch"].to_list() == ["2", "2"]
    assert found.events["epoch"].to_list() == [1, 2]
    assert found.events["attempt"].to_list() == [1, 2]
