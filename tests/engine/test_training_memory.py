"""Which phase a fold's memory is counted in, and under which names its control's is."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager

import pytest
import torch

from fvc_lib.engine.device import ComputeDevice, resolve_device
from fvc_lib.engine.memory import training_memory as impossible_budget, training_memory as module
from fvc_lib.engine.memory.preflight import Footprint, PreflightReport
from fvc_lib.engine.memory.training_memory import planned_micro_batch, training_memory
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.memory.budget import SHARE_VARIABLE, MemoryBudget, MemoryShare, memory_budget
from fvc_lib.services.memory.measured_steps import StepMeasurement
from fvc_lib.services.memory.policy import DeviceMemory, NoObserver
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video.task import engine_settings
from tests.kits.preflight_tasks import TroubledTask
from tests.kits.task_kit import each_task


class Places(NoObserver):
    """Keeps the phases it was told, and the phase of every event."""

    def __init__(self):
        self.phases, self.events = [], []

    def at(self, phase, **position):
        self.phases.append(phase)

    def event(self, kind, message, **details):
        self.events.append((kind, self.phases[-1:]))


def planned(tmp_path, config, seen, task=None, **given):
    """What is planned for a task whose steps would be measured."""
    task, paths = task or TroubledTask("raise", from_size=99), RunPaths(tmp_path)
    return planned_micro_batch(paths, config, task, engine_settings(config, 0), resolve_device("cpu"), seen, **given)


@pytest.fixture
def holding(monkeypatch):
    """``holding(bytes)``: so much is what this process is said to hold, whatever earlier tests left in it."""
    return lambda held: monkeypatch.setattr(module, "resident_bytes", lambda: held)


def test_measuring_beforehand_is_a_phase_of_its_own_and_set_up_goes_on_after_it(tmp_path, holding):
    """Also where there is too little room for a process that measures: a budget that is tight, but not impossible."""
    holding(100_000_000)
    seen = Places()
    assert planned(tmp_path, RunConfig(batch_size=4, mem_gb=0.3), seen) == (1, None, 0)
    assert seen.phases == ["preflight", "setup"]
    assert seen.events == [("preflight", ["setup"])]


@pytest.mark.usefixtures("warm_workers")
def test_what_is_measured_is_told_meanwhile_and_a_wish_to_stop_ends_it(tmp_path):
    seen = Places()
    assert planned(tmp_path, RunConfig(batch_size=2), seen)[0] == 2
    assert seen.events == [("measuring", ["preflight"])] * 2 + [("preflight", ["setup"])]
    with pytest.raises(StoppedError):
        planned(tmp_path, RunConfig(batch_size=4), seen, TroubledTask("hang", from_size=1), stop=lambda: True)
    assert seen.phases[-1] == "setup"


@pytest.mark.parametrize(("mem_gb", "gigabytes"), [(2.0, 2.0), (9.0, 3.0)])
def test_on_a_gpu_that_takes_main_memory_the_smaller_limit_is_the_budget(monkeypatch, mem_gb, gigabytes):
    memory = DeviceMemory(0, 0, 0, 3_000_000_000, 3_000_000_000)
    monkeypatch.setattr(module, "device_memory_probe", lambda device: lambda: memory)
    compute = ComputeDevice(torch.device("mps"), None, "Apple GPU")
    assert module.device_budget(RunConfig(mem_gb=mem_gb), compute).total_bytes == gigabytes * 1e9


def test_without_measuring_there_is_no_such_phase(tmp_path):
    seen = Places()
    assert planned(tmp_path, RunConfig(batch_size=4, mem_gb=0.1, memory_preflight=False), seen) == (4, None, 0)
    assert seen.phases == []


@each_task()
def test_a_budget_that_this_process_is_over_already_is_refused_with_the_least_that_works(
    tasks, tmp_path, holding, monkeypatch
):
    """Of each task alike; what a step takes is given here."""
    holding(100_000_000)
    asked = []

    def measured(request, **given):
        asked.append((request.micro_batch, given["budget"].origin))
        footprint = Footprint(10**8, True, 0, after_training_bytes=50_000_000)
        found = StepMeasurement(step_bytes={1: 510_000_000})
        return PreflightReport(found, footprint, 1, MemoryBudget(10**12, "the machine's"), 1)

    monkeypatch.setattr(impossible_budget, "preflight", measured)
    config = RunConfig(batch_size=4, mem_gb=0.09)
    with pytest.raises(UsageError) as refused:
        planned(tmp_path, config, Places(), tasks())
    assert asked == [(1, memory_budget().origin)]
    for words in (
        "mem_gb 0.09: this process holds 0.10 GB before it trains",
        "about mem_gb 0.7, with one sample at a time: resume the run with -p mem_gb 0.7",
        "Or take it away with -p mem_gb none",
    ):
        assert words in str(refused.value)


@pytest.mark.usefixtures("warm_workers")
def test_the_least_that_works_is_measured(tmp_path, holding):
    holding(100_000_000)
    with pytest.raises(UsageError, match=r"The least that can work is about mem_gb 0\.[2-9], with one sample"):
        planned(tmp_path, RunConfig(batch_size=4, mem_gb=0.05), Places())


def test_where_it_cannot_be_measured_the_reason_is_said(tmp_path, holding):
    class Local(TroubledTask):
        """No other process can have it."""

    holding(100_000_000)
    with pytest.raises(UsageError, match=r"could not be measured \(the task cannot be sent to another process"):
        planned(tmp_path, RunConfig(batch_size=4, mem_gb=0.05), Places(), Local("raise", 99))


def test_a_rank_s_share_of_what_was_asked_for_is_refused_too_but_not_that_of_one_of_several_kernels(
    tmp_path, holding, monkeypatch
):
    """How many kernels run beside each other is not the user's word, and the runner's plan says what is too much."""
    holding(100_000_000)
    whole = MemoryBudget(150_000_000, "mem_gb / FVC_MEM_GB")
    monkeypatch.setenv(SHARE_VARIABLE, MemoryShare(75_000_000, 2, whole).as_text())
    alone = RunConfig(batch_size=4, mem_gb=0.15)
    assert planned(tmp_path, alone, Places()) == (1, None, 0)  # no room for a process that measures
    monkeypatch.setattr(impossible_budget, "preflight", without_prediction())
    together = alone.model_copy(update={"num_ranks": 2})
    with pytest.raises(UsageError, match=r"mem_gb 0\.15, 0\.0[78] GB for each rank: each of 2 ranks holds 0\.10 GB"):
        planned(tmp_path, together, Places(), num_ranks=2)


def without_prediction():
    report = PreflightReport(StepMeasurement(), Footprint(1, True, 0), 1, MemoryBudget(1, ""), 1, "for a reason")
    return lambda request, **given: report


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_what_a_recordings_own_reports_take_is_not_counted_as_the_trainings(tmp_path, monkeypatch, error):
    seen = Places()

    @contextmanager
    def recorded(folder, device):
        try:
            yield tmp_path / "memray_1_0.bin"
        finally:
            seen.at("the recording's reports are written")

    monkeypatch.setattr(module, "recorded_allocations", recorded)
    config = RunConfig(profile_memory=True)
    with (
        contextlib.suppress(ZeroDivisionError),
        training_memory(RunPaths(tmp_path), config, "04_fold_training", 0, resolve_device("cpu"), seen) as kept,
    ):
        kept.observer_of("control").at("test")
        if error:
            raise error
    assert seen.phases == ["control_test", "report", "the recording's reports are written"]
    assert [kind for kind, _ in seen.events] == ["policy", "recording"]  # where it lies is told, also of a failed one
