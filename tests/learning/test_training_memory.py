"""Which phase a fold's memory is counted in, and under which names its control's is."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager

import pytest
import torch

from fvc_lib.learning import training_memory as module
from fvc_lib.learning.device import ComputeDevice, resolve_device
from fvc_lib.learning.fold_settings import engine_settings
from fvc_lib.learning.memory_profile import AllocationRecording
from fvc_lib.learning.training_memory import planned_micro_batch, training_memory
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory_observer import DeviceMemory, NoObserver
from fvc_lib.services.run_paths import RunPaths
from tests.learning.preflight_tasks import TroubledTask


class Places(NoObserver):
    """Keeps the phases it was told, and the phase of every event."""

    def __init__(self):
        self.phases, self.events = [], []

    def at(self, phase, **position):
        self.phases.append(phase)

    def event(self, kind, message, **details):
        self.events.append((kind, self.phases[-1:]))


def planned(tmp_path, config, seen):
    """What is planned for a task whose steps would be measured."""
    task, paths = TroubledTask("raise", from_size=99), RunPaths(tmp_path)
    return planned_micro_batch(paths, config, task, engine_settings(config, 0), resolve_device("cpu"), seen)


def test_measuring_beforehand_is_a_phase_of_its_own_and_set_up_goes_on_after_it(tmp_path):
    seen = Places()
    assert planned(tmp_path, RunConfig(batch_size=4, mem_gb=0.1), seen) == (1, None)
    assert seen.phases == ["preflight", "setup"]
    assert seen.events == [("preflight", ["setup"])]


@pytest.mark.parametrize(("mem_gb", "gigabytes"), [(2.0, 2.0), (9.0, 3.0)])
def test_on_a_gpu_that_takes_main_memory_the_smaller_limit_is_the_budget(monkeypatch, mem_gb, gigabytes):
    memory = DeviceMemory(0, 0, 0, 3_000_000_000, 3_000_000_000)
    monkeypatch.setattr(module, "device_memory_probe", lambda device: lambda: memory)
    compute = ComputeDevice(torch.device("mps"), None, "Apple GPU")
    assert module.device_budget(RunConfig(mem_gb=mem_gb), compute).total_bytes == gigabytes * 1e9


def test_without_measuring_there_is_no_such_phase(tmp_path):
    seen = Places()
    assert planned(tmp_path, RunConfig(batch_size=4, mem_gb=0.1, memory_preflight=False), seen) == (4, None)
    assert seen.phases == []


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_what_a_recordings_own_reports_take_is_not_counted_as_the_trainings(tmp_path, monkeypatch, error):
    seen = Places()

    @contextmanager
    def recorded(folder, device):
        try:
            yield AllocationRecording(tmp_path / "memray_1_0.bin")
        finally:
            seen.at("the recording's reports are written")

    monkeypatch.setattr(module, "recorded_allocations", recorded)
    config = RunConfig(profile_memory=True)
    with (
        contextlib.suppress(ZeroDivisionError),
        training_memory(RunPaths(tmp_path), config, "04_fold_training", 0, resolve_device("cpu"), seen) as kept,
    ):
        kept.control_observer.at("test")
        if error:
            raise error
    assert seen.phases == ["control_test", "report", "the recording's reports are written"]
    assert [kind for kind, _ in seen.events] == ["policy", "recording"]  # where it lies is told, also of a failed one
