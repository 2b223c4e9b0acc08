"""The memory preflight measures in a child process, which may die, hang or run out of memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fvc_lib.engine import preflight as module
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.preflight import StepRequest, planned_micro_batch, preflight
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory import MemoryBudget
from fvc_lib.tasks.video.training import engine_settings
from tests.kits.engine_kit import Observer
from tests.kits.preflight_tasks import ComparingTask, TroubledTask

ROOT = Path(__file__).parents[2]
CPU = resolve_device("cpu")
PLENTY = MemoryBudget(1 << 40, "plenty")
EIGHT = MemoryBudget(8 << 30, "8 GiB")


def troubled(trouble: str, from_size: int, micro_batch: int = 8) -> StepRequest:
    return StepRequest(TroubledTask(trouble, from_size), micro_batch, effective_batch_size=16, compute=CPU)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def child(monkeypatch):
    """Return a function ``child(costs)``: steps add ``costs[micro_batch]`` bytes. It returns the measured sizes."""

    def given(costs):
        begun = []

        def measured(request, size, *_):
            begun.append(size)
            return costs[size]

        monkeypatch.setattr(module, "_measured", measured)
        return begun

    return given


@pytest.mark.parametrize(
    ("room", "micro_batch", "fits"), [(1000, 8, True), (700, 4, True), (150, 1, True), (50, 1, False)]
)
def test_the_largest_half_whose_step_fits_is_chosen(child, monkeypatch, room, micro_batch, fits):
    mb = 10**6
    monkeypatch.setattr(module.memory, "resident_bytes", lambda: 1000 * mb)
    monkeypatch.setattr(module, "_CHILD_BYTES", 0)
    begun = child({8: 800 * mb, 4: 400 * mb, 2: 200 * mb, 1: 100 * mb})
    budget = MemoryBudget(int((1000 + room) * mb / 0.95), "by design")
    report = preflight(troubled("raise", 99), budget=budget)
    assert (report.micro_batch, report.micro_batch_planned, report.fits) == (micro_batch, 8, fits)
    assert report.peak_bytes == (1000 + 100 * micro_batch) * mb
    assert begun == [size for size in (8, 4, 2, 1) if size >= micro_batch]
    assert report.lowered == (micro_batch < 8)
    assert ("too much" in report.message()) == (not fits)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    ("trouble", "from_size", "micro_batch", "found"),
    [
        ("raise", 99, 8, ""),
        ("be_killed", 5, 4, ""),
        pytest.param("take_64_gib", 3, 2, "", marks=pytest.mark.long),
        ("take_64_gib", 1, 1, "one sample alone ran out of memory"),
        ("raise", 1, 8, "ValueError: broken in a process with oom_score_adj 1000"),
        pytest.param("segfault", 5, 4, "", marks=pytest.mark.long),
        pytest.param("hang", 1, 8, "no answer within 5 s", marks=pytest.mark.long),
    ],
)
def test_only_memory_lowers_the_micro_batch(trouble, from_size, micro_batch, found):
    limit = 5.0 if trouble == "hang" else 60.0
    report = preflight(troubled(trouble, from_size), budget=EIGHT, time_limit_seconds=limit)
    assert (report.micro_batch, report.peak_bytes is None) == (micro_batch, bool(found))
    assert found in report.problem
    assert report.problem in report.message()


@pytest.mark.usefixtures("warm_workers")
def test_a_stop_ends_the_measuring_at_once():
    with pytest.raises(StoppedError):
        preflight(troubled("hang", 2), budget=PLENTY, stop=lambda: True)


@pytest.mark.usefixtures("warm_workers")
def test_a_loss_that_compares_all_samples_asks_for_a_smaller_effective_batch():
    request = replace(troubled("raise", 99), task=ComparingTask("take_64_gib", 8))
    report = preflight(request, budget=EIGHT)
    assert (report.micro_batch, report.peak_bytes) == (8, None)
    assert "effective_batch_size" in report.problem


# --- The call of a training


def planned(config, seen, **given):
    return planned_micro_batch(config, TroubledTask("raise", 99), engine_settings(config, 0), CPU, seen, **given)


@pytest.mark.usefixtures("warm_workers")
def test_measuring_is_a_phase_of_its_own_and_is_recorded():
    seen = Observer()
    assert planned(RunConfig(batch_size=2), seen)[0] == 2
    assert len(seen.of("preflight")) == 1
    with pytest.raises(StoppedError):
        planned(RunConfig(batch_size=4), seen, stop=lambda: True)
    assert [phase for phase, *_ in seen.places] == ["preflight", "setup"] * 2
