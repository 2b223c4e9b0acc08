"""What fits is measured with a run's own images and settings, apart from its training, and only when asked for."""

import pytest

from fvc_lib.learning.image_fits import measured_image_fits
from fvc_lib.services.config import resolve_config
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory_observer import PREFLIGHT
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import read_table
from fvc_lib.services.task_tables import MEASURED_FITS
from tests.learning.image_kit import image_tables, write_image_tables


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
    assert phases.names == [PREFLIGHT, "setup"]
    assert not paths.measured_fits.exists()
