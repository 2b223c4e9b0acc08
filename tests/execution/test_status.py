"""The status is true whoever wrote last: each task's own file over the document, the whole from its tasks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import RunStatus, StageStatus, put_stage, read_status
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return begin_run(RunConfig(runs_dir=str(tmp_path)), command="test")


def shared(*stages: StageStatus) -> RunStatus:
    status = RunStatus(run_id="r", started_utc="2026-01-01T00:00:00Z", shared=True)
    status.stages = {f"task_{number}": stage for number, stage in enumerate(stages)}
    status.follow_tasks()
    return status


def stage(state: str, exit_code: int | None = None, **values: object) -> StageStatus:
    return StageStatus(state=state, exit_code=exit_code, **values)


@pytest.mark.parametrize(
    ("stages", "state", "exit_code"),
    [
        ([stage("pending"), stage("pending")], "waiting", None),
        ([stage("done", 0), stage("pending")], "waiting", None),
        ([stage("done", 0), stage("running")], "running", None),
        ([stage("failed", 1), stage("running")], "running", None),
        ([stage("failed", 3), stage("pending")], "failed", 3),
        ([stage("interrupted", 75), stage("failed", 1)], "failed", 1),
        ([stage("interrupted", 75), stage("done", 0)], "requeue", 75),
        ([stage("interrupted", 143), stage("pending")], "interrupted", 143),
        ([stage("interrupted"), stage("pending")], "interrupted", None),
        ([stage("done", 0), stage("done", 0)], "done", 0),
    ],
)
def test_of_a_shared_run_the_whole_follows_from_its_tasks(stages, state, exit_code):
    status = shared(*stages)
    assert (status.state, status.exit_code) == (state, exit_code)


def test_a_damaged_document_is_named(run):
    run.status_json.write_text("{")
    with pytest.raises(DataError, match=r"status\.json: cannot be read"):
        read_status(run)


def test_jobs_that_write_at_once_keep_each_others_tasks_and_the_highest_peak_counts(run):
    stages = {f"task_{number}": stage("done", 0, peak_rss_bytes=number) for number in range(40)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: put_stage(run, *each), stages.items()))
    status = read_status(run)
    assert status.stages == stages
    assert status.peak_rss_bytes == 39
