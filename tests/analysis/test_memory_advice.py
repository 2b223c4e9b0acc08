from pathlib import Path

import pytest

from fvc_lib.analysis.memory.findings import memory_facts, run_memory
from fvc_lib.analysis.memory.report import advice_table, run_advice
from fvc_lib.analysis.read.queries import memory_peaks
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.memory_story import StoryWriter, troubled_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "e" / "run_x")


def changes(run: RunPaths, **asked: object) -> list[str]:
    return [advice.change for advice in run_advice(run_memory(run), asked)]


def test_a_run_in_trouble_is_told_the_gravest_first(tmp_path: Path) -> None:
    found = run_memory(troubled_run(tmp_path / "e" / "run_x"))
    table = advice_table(run_advice(found, {"batch_size": 16}))
    assert "-p batch_size 4 saves the retries" in table["change"][0]
    assert "lowered the micro-batch from 16 to 8" in table["seen"][1]
    assert "92.0 MB more with every epoch" in table["seen"][2]
    assert "lasts 1 more epoch." in table["seen"][2]
    assert "39% below" in table["seen"][3]
    assert table.height == 4  # nothing on larger batches or smaller limits


def test_one_clip_too_many_asks_for_something_else_than_a_smaller_batch(run: RunPaths) -> None:
    StoryWriter(run).sample(1900).event("out_of_memory", where="forward", micro_batch=1, micro_batch_next=None)
    assert "gradient_checkpointing true" in changes(run)[0]
    assert not any("batch_size" in change for change in changes(run))


def test_near_the_limit_a_smaller_batch_or_a_larger_limit_is_named_in_numbers(run: RunPaths) -> None:
    StoryWriter(run).sample(500, "setup").sample(1900, epoch=1)
    assert changes(run, batch_size=8) == [
        "Before it runs out: -p batch_size 4, or a limit of FVC_MEM_GB=2.4 (or --mem=2300M)."
    ]
    assert "gradient_checkpointing" in changes(run, batch_size=1)[0]


def test_room_is_offered_as_a_larger_batch_and_a_smaller_limit(run: RunPaths) -> None:
    StoryWriter(run, budget_mb=4000).sample(500, "setup").sample(900, epoch=1)
    larger, smaller = changes(run, batch_size=4, effective_batch_size=16)
    assert "-p batch_size 8 would need about 1.30 GB" in larger
    assert "FVC_MEM_GB=1.2 (or --mem=1200M) would have been enough" in smaller


@pytest.mark.parametrize(
    ("used_mb", "asked"),
    [
        (900, {"batch_size": 16, "effective_batch_size": 16}),  # a micro-batch is a part of the effective one
        (2200, {"batch_size": 4}),  # above half of the budget
        (1900, {"batch_size": 4}),  # twice what the steps add would leave too little room
    ],
)
def test_no_larger_batch_is_offered_where_there_is_no_room_for_it(
    run: RunPaths, used_mb: float, asked: dict[str, object]
) -> None:
    StoryWriter(run, budget_mb=4000).sample(500, "setup").sample(used_mb, epoch=1)
    assert not any("If training is slow" in change for change in changes(run, **asked))


def test_the_micro_batch_that_events_tell_counts_before_the_one_asked_for(run: RunPaths) -> None:
    writer = StoryWriter(run, budget_mb=4000).sample(500, "setup")
    writer.event("preflight", predicted_peak_mb=800.0, micro_batch=2, micro_batch_planned=2).sample(900)
    assert "-p batch_size 4 would" in changes(run, batch_size=8)[0]


def measured_run(
    run: RunPaths, budget_mb: float, trained_mb: float, planned: int = 2, phase: str = "preflight"
) -> StoryWriter:
    """A fold that was measured with up to 1,900 MB and then trained with ``trained_mb``."""
    writer = StoryWriter(run, budget_mb=budget_mb).sample(500, "setup").sample(1900, phase, children_mb=1300)
    writer.sample(700, "setup").event(
        "preflight", phase="setup", predicted_peak_mb=trained_mb, micro_batch=2, micro_batch_planned=planned,
        budget_mb=budget_mb,
    )  # fmt: skip
    return writer.sample(trained_mb, epoch=1)


def test_what_the_measuring_took_is_nothing_that_the_training_needs(run: RunPaths) -> None:
    measured_run(run, budget_mb=4000, trained_mb=1000)
    told = run_advice(run_memory(run), {})
    assert [advice.seen.partition(" (")[0] for advice in told] == [
        "Training peaks at 25.0% of its budget", "The work itself used 1.00 GB of 4.00 GB allowed."]  # fmt: skip
    assert "FVC_MEM_GB=1.3 (or" in told[1].change


def test_where_nothing_could_be_measured_the_lowered_micro_batch_is_told_all_the_same(run: RunPaths) -> None:
    writer = StoryWriter(run).sample(500, "setup").sample(510, "preflight")
    writer.event("preflight", predicted_peak_mb=None, micro_batch=1, micro_batch_planned=8, budget_mb=2000.0)
    found = run_memory(StoryWriter(run).sample(1000, epoch=1).run)
    assert run_advice(found, {})[0].seen == "The preflight lowered the micro-batch from 8 to 1 to fit 2.00 GB."


def test_only_what_measured_came_near_the_limit_and_can_be_spared(run: RunPaths) -> None:
    measured_run(run, budget_mb=2000, trained_mb=1000)
    told = run_advice(run_memory(run), {"batch_size": 8})
    assert told[0].seen == "Measuring a step before the training took up to 95% of the budget."
    assert "memory_preflight false" in told[0].change
    assert not any("batch_size 4" in advice.change or "FVC_MEM_GB" in advice.change for advice in told)


def test_what_measured_what_fits_is_spared_by_its_own_switch_and_counts_in_the_peak(run: RunPaths) -> None:
    measured_run(run, budget_mb=2000, trained_mb=1000, phase="fits")
    told = run_advice(run_memory(run), {"batch_size": 8})
    assert told[0].seen == "The batch-size sweep took up to 95% of the budget."
    assert told[0].change == "-p batch_size_sweep false spares it."
    assert memory_peaks([run]).frame["peak_rss_bytes"].to_list() == [1_900_000_000]


def test_a_training_that_was_lowered_to_fill_its_budget_is_told_once_what_would_leave_room(run: RunPaths) -> None:
    measured_run(run, budget_mb=2000, trained_mb=1950, planned=8)
    told = run_advice(run_memory(run), {"batch_size": 8})
    assert "lowered the micro-batch from 8 to 2" in told[0].seen
    assert told[0].change == ("The result stays the same; a limit of FVC_MEM_GB=2.5 (or --mem=2400M) would leave room.")
    assert sum("FVC_MEM_GB" in advice.change for advice in told) == 1


def test_the_reports_head_tells_what_is_recorded_and_nothing_else(tmp_path: Path, run: RunPaths) -> None:
    assert memory_facts(run_memory(run)) == ()
    facts = dict(memory_facts(run_memory(troubled_run(tmp_path / "e" / "run_y"))))
    assert facts == {
        "Memory budget": "2.00 GB, 96.5% used at most",
        "Predicted peak": "1.15 GB, 39% below what was measured",
        "Out of memory": "once in 1 stage: the micro-batch went from 8 down to 4",
        "Leak": "92.0 MB more with every epoch in 04_fold_training, fold 0, train",
    }
