"""What a stage will take: from this run, else the newest like it, else a step tried out, else a kernel's imports."""

import json
from pathlib import Path

import pytest

from fvc_lib.execution.plan.stage_memory import KERNEL_ORIGIN, predicted_peaks
from fvc_lib.execution.plan.stages import stages_of, tasks_in_order
from fvc_lib.execution.run.record import begin_run, record_resumption
from fvc_lib.execution.run.status import RunStatus, StageStatus, read_status
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
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
    assert guessed["03_augmentation"] == int(510 + 4 * 1073.741824)  # six that crop fit into 8 GB
    jobs = {
        cpus: in_megabytes(predicted_peaks(new, None, job_cpus=cpus))["03_augmentation"] for cpus in (2, 8, 64)
    }  # by the job's processors and no more than were asked for, whatever this machine has
    assert jobs == {cpus: int(510 + more * 1073.741824) for cpus, more in ((2, 0), (8, 6), (64, 10))}


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
