"""What fits is measured with a run's own images and settings, apart from its training, and only when asked for."""

import pytest

from fvc_lib.engine.memory import preflight
from fvc_lib.engine.memory.preflight import StepRequest
from fvc_lib.services.config import resolve_config
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory_budget import MemoryBudget
from fvc_lib.services.memory_policy import FITS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import MEASURED_FITS, read_table
from fvc_lib.tasks.image.sweep import measured_image_fits
from fvc_lib.tasks.image.training import image_split_training, read_image_parts
from tests.engine.test_measured_fits import Children
from tests.kits.image_kit import image_tables, write_image_tables


class Phases:
    """Hears where a stage is."""

    def __init__(self):
        self.names = []

    def at(self, phase, **_):
        self.names.append(phase)

    def event(self, *_, **__):
        pass

    def watch_device(self, *_):
        pass


@pytest.fixture
def paths(tmp_path):
    run = RunPaths(tmp_path / "runs/demo/run_0")
    write_image_tables(run, *image_tables(tmp_path / "corpus"))
    return run


def config(tmp_path, **changes):
    asked = {"task": "image", "corpus": str(tmp_path / "corpus"), "image_size": 16, "device": "cpu"}
    return resolve_config({**asked, **changes}, environ={})


def test_nothing_is_measured_when_nobody_asked_and_the_table_is_there_without_rows(paths, tmp_path):
    phases = Phases()
    fits = measured_image_fits(paths, config(tmp_path, measure_fits=False), memory=phases)
    assert fits.is_empty()
    assert read_table(paths.measured_fits, MEASURED_FITS).equals(fits)
    assert phases.names == []


def test_it_stops_before_the_first_row_when_asked_to_and_says_that_it_measured(paths, tmp_path):
    phases = Phases()
    with pytest.raises(StoppedError):
        measured_image_fits(paths, config(tmp_path), memory=phases, stop=lambda: True)
    assert phases.names == [FITS, "setup"]
    assert not paths.measured_fits.exists()


def test_what_was_measured_of_the_trainings_own_step_is_the_preflights_measurement(paths, tmp_path, monkeypatch):
    """Each batch size at the run's own resolution, and no other; the preflight then starts no process."""
    children = Children(monkeypatch)
    asked = config(tmp_path, effective_batch_size=16, batch_size=8)
    measured_image_fits(paths, asked)
    assert (8, 112) in children.asked  # no part of what follows
    training = image_split_training(*read_image_parts(paths, asked), asked)
    request = StepRequest(training.task, 8, 16, device="cpu", amp=asked.amp)
    monkeypatch.setattr(preflight, "measured_in_child", lambda *_: pytest.fail("it measures"))
    found = preflight.preflight(
        request, budget=MemoryBudget(1 << 40, "plenty"), baseline_bytes=10**9, store=paths.preflight
    )
    assert dict(found.step_bytes_by_micro_batch) == {size: 1000 * size * 16**2 for size in (4, 8, 16)}
    assert found.reused
    assert (found.micro_batch, found.fits) == (8, True)


def test_where_there_is_no_room_to_measure_the_preflight_uses_what_the_fits_found(paths, tmp_path, monkeypatch):
    children = Children(monkeypatch, seconds_per_pixel=1e-9)
    asked = config(tmp_path, effective_batch_size=16, batch_size=16)
    measured_image_fits(paths, asked)
    assert children.asked
    training = image_split_training(*read_image_parts(paths, asked), asked)
    request = StepRequest(training.task, 16, 16, device="cpu", amp=asked.amp)
    held = preflight.footprint_of(request, 1 << 40).resident_bytes
    tight = MemoryBudget(held + 60_000_000, "tight")
    found = preflight.preflight(request, budget=tight, baseline_bytes=1 << 40, store=paths.preflight)
    assert found.micro_batch == 16
    assert found.predicted_peak_bytes == pytest.approx(held + 1000 * 16 * 16**2, rel=0.1)
