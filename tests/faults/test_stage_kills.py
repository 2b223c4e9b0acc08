"""Row 1: whole runs of every task, killed within a stage and resumed, end as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fvc_lib.execution.run.status import read_status
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tasks import TASK_OF_STAGE
from tests.faults.small_runs import VALUES, Place, assert_nothing_is_redone, assert_same_end, wait_for_no_orphans
from tests.faults.stage_moments import Kill, at_each_step, at_random

STAGES = ["01_data_index", "04_fold_training_fold_0", "05_kfold_results", *TASK_OF_STAGE]


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    yield
    wait_for_no_orphans()


# What of this is quick is in tests/execution and the other tests of faults; `make kills` kills anywhere.
@pytest.mark.long
@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("stage", "when"),
    [*((stage, at_random) for stage in STAGES), *((stage, at_each_step) for stage in TASK_OF_STAGE)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_run_killed_in_any_stage_ends_as_if_it_had_not_been(
    whole_runs, tmp_path, stage: str, when: Callable[[str, RunPaths], list[Kill]], tally
):
    task = TASK_OF_STAGE.get(stage, "video")
    whole = whole_runs(VALUES[task])
    place = Place(tmp_path / "killed", whole.corpus, {**VALUES[task], "checkpoint_minutes": 0})
    finished: dict[str, int] = {}
    for number, kill in enumerate(when(stage, whole.run)):
        if read_or_empty(place).get(stage) == "done":  # a moment came too late
            break
        kill.live_and_die(place, *(["--resume", "latest"] if number else []))
        (run,) = list_runs(place.runs)
        assert_nothing_is_redone(run, finished)
        tally.add(survived=1)
    resumed, _ = place.run("--resume", "latest")
    assert list_runs(place.runs) == [resumed]
    assert_nothing_is_redone(resumed, finished)
    assert_same_end(resumed, whole.run)


def read_or_empty(place: Place) -> dict[str, str]:
    """The states of the run's stages; none before there is a run."""
    runs = list_runs(place.runs)
    return {key: stage.state for key, stage in read_status(runs[-1]).stages.items()} if runs else {}
