"""What a stage will take: from this run, else the newest like it, else a step tried out, else a kernel's imports."""

import json
import re
from pathlib import Path

import pytest

from fvc_lib.execution.plan.stage_memory import KERNEL_ORIGIN, WorkersRoom, predicted_peaks
from fvc_lib.execution.plan.stages import stages_of, tasks_in_order
from fvc_lib.execution.run.record import begin_run, record_resumption
from fvc_lib.execution.run.status import RunStatus, StageStatus, read_status
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.isolated_workers import available_cores
from fvc_lib.services.memory import workers as pools
from fvc_lib.services.memory.budget import MemoryBudget
from fvc_lib.services.memory.measured_steps import MeasuredStep, StepMeasurement, keep_steps
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import FOLD_TRAINING as TRAINING


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(runs_dir=str(tmp_path / "runs"), num_folds=2, workers=2, mem_gb=8)


def begun(config: RunConfig) -> RunPaths:
    """A run without tasks, later by a second than the one before; a real beginning would wait for that second."""
    number = sum(1 for _ in Path(config.runs_dir).glob("*/run_*"))
    run = RunPaths(Path(config.runs_dir) / config.experiment / f"run_20260101_0000{number:02d}_abcdef01")
    run.root.mkdir(parents=True)
    write_json(run.run_json, {"params": config.model_dump(mode="json"), "attempts": [{}]})
    write_text(run.params_yaml, config.to_yaml())
    RunStatus(run_id=run.run_id, started_utc="2026-01-01T00:00:00Z").write(run)
    return run


def finished(config: RunConfig, megabytes: int, **peaks: int) -> RunPaths:
    """A run whose tasks are done; ``peaks`` in MB by task key, ``megabytes`` for all others."""
    run = begun(config)
    status = read_status(run)
    for task in tasks_in_order(config):
        peak = peaks.get(f"_{task.key}", megabytes) * 1_000_000
        status.stages[task.key] = StageStatus(state="done", peak_rss_bytes=peak)
    status.write(run)
    return run


def in_megabytes(found) -> dict[str, int]:
    return {name: peak.peak_bytes // 1_000_000 for name, peak in found.items()}


def test_without_any_run_it_is_a_kernel_and_says_so(config):
    found = predicted_peaks(config, None)
    assert list(found) == [stage.name for stage in stages_of(config)]
    assert {name: peak.peak_bytes for name, peak in found.items()} == {
        stage.name: stage.kernel_bytes for stage in stages_of(config)
    }
    assert {peak.origin for peak in found.values()} == {KERNEL_ORIGIN}
    assert not Path(config.runs_dir).exists()


def test_a_run_tells_its_own_and_of_folds_the_largest(config):
    run = finished(config, 300, _04_fold_training_fold_1=900)
    found = predicted_peaks(config, run)
    assert in_megabytes(found)[TRAINING] == 900
    assert in_megabytes(found)["02_folds"] == 300
    assert {peak.origin for peak in found.values()} == {"measured in this run"}


def test_what_is_not_done_here_is_taken_from_the_newest_other_run(config):
    finished(config, 200)
    newest = finished(config, 400)
    run = finished(config, 300)
    status = read_status(run)
    status.stage("05_kfold_results").state = "failed"
    status.stage("04_fold_training_fold_1").state = "interrupted"
    status.write(run)
    found = predicted_peaks(config, run)
    assert in_megabytes(found)["05_kfold_results"] == 400
    assert found["05_kfold_results"].origin == f"measured in {newest.run_id}"
    assert found[TRAINING].origin == "measured in this run"  # of the fold that is done


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        ({"seed": 7, "learning_rate": 0.1, "epochs": 99}, set()),
        ({"fixed_size": 224}, {"03_augmentation", TRAINING}),
        ({"model": "r2plus1d"}, {TRAINING}),
        ({"effective_batch_size": 32}, {TRAINING}),
        ({"num_workers": 4}, {TRAINING}),
        ({"corpus": "/videos"}, {"01_data_index", "02_folds", "03_augmentation", "05_kfold_results"}),
    ],
)
def test_a_run_counts_for_the_stages_whose_memory_its_parameters_leave_as_it_was(config, changed, stages):
    finished(config, 123)
    found = predicted_peaks(config.model_copy(update=changed), None)
    assert {name for name, peak in found.items() if peak.peak_bytes != 123_000_000} == stages


def test_a_run_that_was_resumed_with_other_memory_counts_by_what_it_was_resumed_with(config):
    run = begin_run(config, command="test")
    status = read_status(run)
    status.stages[f"{TRAINING}_fold_0"] = StageStatus(state="done", peak_rss_bytes=123_000_000)
    status.write(run)
    resumed = config.model_copy(update={"batch_size": 2})
    record_resumption(run, resumed, command="test")
    assert in_megabytes(predicted_peaks(resumed, None))[TRAINING] == 123
    assert predicted_peaks(config, None)[TRAINING].origin == KERNEL_ORIGIN


def test_a_larger_machine_has_more_workers_and_so_a_higher_peak(config):
    """Of what a pool was measured to have, as far as the budget holds it; fewer workers promise no less."""
    run = finished(config, 400)
    event = {"kind": "workers", "details": {"workers": 2, "worker_mb": 100.0}}
    log = run.memory_events("03_augmentation")
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(json.dumps(each) for each in (event, {"kind": "policy"})) + "\n")
    peaks = {
        workers: in_megabytes(predicted_peaks(config.model_copy(update={"workers": workers}), run))["03_augmentation"]
        for workers in (1, 2, 16, 1000)
    }
    assert peaks == {1: 400, 2: 400, 16: 400 + 14 * 100, 1000: 400 + 74 * 100}
    new = config.model_copy(update={"workers": 12, "crop": "face", "runs_dir": config.cache_dir})
    guessed = in_megabytes(predicted_peaks(new, None))
    assert guessed["01_data_index"] == 410 + 10 * 105
    assert guessed["03_augmentation"] == int(510 + 7 * 1073.741824)  # seven that crop fit into 8 GB


ONE_GB = 1000 * 10**6


@pytest.mark.parametrize(
    ("workers", "mem_gb", "cores", "count", "why"),
    [
        (0, 8, 2, 2, "up to 2 worker processes of about 105 MB: one for each of 2 cores of the job, by site.conf"),
        (1, 8, 16, 1, "1 worker process of about 105 MB: -p workers 1"),
        (2, 8, 16, 2, "up to 2 worker processes of about 105 MB: -p workers 2"),
        (8, 8, 2, 8, "up to 8 worker processes of about 105 MB: -p workers 8"),
        (8, 0.7, 2, 3, r"up to 3 .* and not 8 \(-p workers 8\): 0.70 GB \(mem_gb .*\) hold no more beside 0.35"),
        (0, 0.4, 4, 1, r"1 worker process of .* and not 4 \(one for each of 4 cores of the job.*\): 0.40 GB"),
    ],
)
def test_the_plan_says_how_many_workers_and_which_limit_decides(config, workers, mem_gb, cores, count, why):
    config = config.model_copy(update={"workers": workers, "mem_gb": mem_gb})
    room = WorkersRoom.of_job(config, cores, "site.conf")
    found = predicted_peaks(config, None, rooms=lambda _: room)
    assert re.match(why, found["01_data_index"].workers)
    assert in_megabytes(found)["01_data_index"] == 410 + max(0, count - 2) * 105
    assert found["02_folds"].workers == found[TRAINING].workers == ""


def test_a_job_s_workers_keep_to_its_memory_and_without_a_limit_it_is_given_theirs(config):
    config = config.model_copy(update={"mem_gb": None, "workers": 0, "crop": "face"})
    rooms = [WorkersRoom.of_job(config, 4, "site.conf", memory_mib) for memory_mib in (None, 3000)]
    whole, small = (predicted_peaks(config, None, rooms=lambda _, room=room: room) for room in rooms)
    assert in_megabytes(whole)["03_augmentation"] == int(510 + 4 * 1073.741824)
    assert in_megabytes(small)["03_augmentation"] == int(510 + 2 * 1073.741824)
    assert "3.15 GB (of the job, by site.conf) hold no more beside 0.45 GB" in small["03_augmentation"].workers


def test_the_plan_foretells_what_a_pool_of_the_same_size_then_begins_with(config, monkeypatch):
    """Of a kernel that holds what it was measured to hold, in the run before, when its workers came."""
    monkeypatch.setattr(pools, "resident_bytes", lambda: 400 * 10**6)
    events = []

    class Watcher:
        budget = MemoryBudget(ONE_GB, "by design")

        def event(self, kind, message, **details):
            events.append({"kind": kind, "details": details})

    pools.watch(watcher := Watcher())
    try:
        began = pools.PoolBound(0, 16, 105 * 10**6, 99).now()
    finally:
        pools.unwatch(watcher)
    run = finished(config, 900)
    log = run.memory_events("01_data_index")
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(events[-1]) + "\n")
    again = config.model_copy(update={"mem_gb": 1, "workers": 0})
    room = WorkersRoom.of_job(again, 16, "site.conf")
    planned = predicted_peaks(again, run, rooms=lambda _: room)["01_data_index"]
    assert began == 5
    assert planned.workers.startswith("up to 5 worker processes of about 105 MB and not 16")
    assert planned.peak_bytes == 900 * 10**6


def test_a_step_is_tried_out_only_where_no_run_tells(config):
    asked: list[RunConfig] = []

    def measure(config: RunConfig) -> int:
        asked.append(config)
        return 777_000_000

    found = predicted_peaks(config, None, measure=measure)
    assert in_megabytes(found)[TRAINING] == 777
    assert "tried out" in found[TRAINING].origin
    finished(config, 123)
    assert in_megabytes(predicted_peaks(config, None, measure=measure))[TRAINING] == 123
    assert asked == [config]


def test_a_step_that_cannot_be_tried_out_costs_the_number_and_not_the_plan(config):
    def refuses(_: RunConfig) -> int:
        raise UsageError("no such device")

    assert predicted_peaks(config, None, measure=refuses)[TRAINING].origin == KERNEL_ORIGIN
    assert predicted_peaks(config, None, measure=lambda _: None)[TRAINING].origin == KERNEL_ORIGIN


def test_the_preflight_of_an_unfinished_fold_counts_with_the_micro_batch_it_chose(config):
    run = begun(config)
    step = StepMeasurement(10, worker_bytes=5 * 10**8, step_bytes={1: 10**9, 2: 2 * 10**9, 8: 9 * 10**9})
    keep_steps(run.preflight, {"a": MeasuredStep(circumstances={}, found=step)}, {"b": (2, "")})
    found = predicted_peaks(config, run)[TRAINING]
    assert found.origin.startswith("one step measured in this run")
    assert found.peak_bytes == 450_000_000 + 260_000_000 + 2 * 10**9
    many = config.model_copy(update={"num_workers": 1})
    assert predicted_peaks(many, run)[TRAINING].peak_bytes == 450_000_000 + 10 + 5 * 10**8 + 2 * 10**9


@pytest.mark.parametrize(("device", "pinned"), [("cuda (a GPU), float32", 5 << 26), ("cpu (x86_64), float32", 0)])
def test_page_locked_batches_that_wait_count_in_main_memory_where_batches_are_pinned(config, device, pinned):
    """Of 16 clips of 16 x 224 px: 38.5 MB, for which torch takes 64 MiB; two per loader process and one in use."""
    run = begun(config)
    step = StepMeasurement(10, batch_bytes=16 * 16 * 3 * 224 * 224, step_bytes={1: 10**9})
    measured = {"a": MeasuredStep(circumstances={"device": device}, found=step)}
    keep_steps(run.preflight, measured, {"b": (1, "")})
    many = config.model_copy(update={"num_workers": 2})
    found = predicted_peaks(many, run)[TRAINING]
    loaders = min(2, available_cores())
    wanted = pinned * (2 * loaders + 1) // 5
    assert found.peak_bytes == 450_000_000 + 260_000_000 + 10**9 + wanted


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"measurements": {}, "decisions": {}}', '{"decisions": 3}'])
def test_damaged_runs_are_passed_over(config, content):
    good = finished(config, 123)
    torn, foreign, nameless = (finished(config, 999) for _ in range(3))
    torn.status_json.write_text(content)
    foreign.run_json.write_text(content)
    foreign.params_yaml.write_text("epochs: [")
    nameless.status_json.write_text(json.dumps({"run_id": "x", "started_utc": "y", "stages": {"02_folds": {}}}))
    run = begun(config)
    run.preflight.parent.mkdir()
    run.preflight.write_text(content)
    found = predicted_peaks(config, run)
    assert {peak.origin for peak in found.values()} == {f"measured in {good.run_id}"}
