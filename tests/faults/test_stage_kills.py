"""Row 1: whole runs of every task, killed within a stage and resumed, end as an undisturbed run."""

import pytest

from fvc_lib.services.run_paths import list_runs
from fvc_lib.services.tasks import TASK_OF_STAGE
from tests.faults.small_runs import VALUES, Place, assert_nothing_is_redone, assert_same_end, wait_for_no_orphans
from tests.faults.stage_moments import at_each_step, live_and_die


# ``make kills`` kills at any moment of a video run.
@pytest.mark.long
@pytest.mark.fault(1)
@pytest.mark.parametrize("stage", TASK_OF_STAGE)
def test_a_stage_killed_at_each_of_its_steps_ends_as_if_undisturbed(whole_runs, tmp_path, stage: str, tally):
    task = TASK_OF_STAGE[stage]
    whole = whole_runs(VALUES[task])
    place = Place(tmp_path / "killed", whole.corpus, {**VALUES[task], "checkpoint_minutes": 0})
    finished: dict[str, int] = {}
    steps = at_each_step(stage, whole.run)
    for number, (name, points) in enumerate(steps):
        alone = number % 2 == 1 and number < len(steps) - 1
        live_and_die(place, name, points, alone, *(["--resume", "latest"] if number else []))
        (run,) = list_runs(place.runs)
        assert_nothing_is_redone(run, finished)
        tally.add(survived=1)
    resumed, _ = place.run("--resume", "latest")
    assert list_runs(place.runs) == [resumed]
    assert_nothing_is_redone(resumed, finished)
    assert_same_end(resumed, whole.run)
    wait_for_no_orphans()
