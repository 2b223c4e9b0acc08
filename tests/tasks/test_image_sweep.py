"""The batch-size and resolution sweep: a loop over the preflight, and only where it is asked for."""

import polars as pl
import pytest

from fvc_lib.engine.memory.preflight import Footprint, Prediction, PreflightReport
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.memory.budget import MemoryBudget
from fvc_lib.services.memory.measured_steps import StepMeasurement
from fvc_lib.services.memory.policy import SWEEP, NoObserver
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import BATCH_SIZE_SWEEP, read_table
from fvc_lib.tasks.image import training as module
from fvc_lib.tasks.image.training import MadeUpImages, batch_size_sweep, recommended
from tests.kits.image_kit import image_tables, write_image_tables

GB = 10**9


class Phases(NoObserver):
    def __init__(self):
        self.names = []

    def at(self, phase, **_):
        self.names.append(phase)


@pytest.fixture
def paths(tmp_path):
    run = RunPaths(tmp_path / "runs/demo/run_0")
    write_image_tables(run, *image_tables(tmp_path / "corpus"))
    return run


def config(tmp_path, **changes):
    asked = {"task": "image", "corpus": str(tmp_path / "corpus"), "image_size": 16, "device": "cpu"}
    return resolve_config({**asked, "batch_size": 4, "batch_size_sweep": True, **changes}, environ={})


@pytest.fixture
def measured(monkeypatch):
    """What the preflight is asked; a step takes 1 GB, and 1 GB more for every 10,000 pixels at once, of 10 GB."""
    asked = []

    def preflight(request, *, budget, baseline_bytes, store):
        side = request.task.training_data[0].tensors["image"].shape[-1]
        asked.append((side, request.largest_micro_batch, request.effective_batch_size))
        sizes = [1 << power for power in range(request.largest_micro_batch.bit_length())]
        steps = {size: GB + GB * size * side**2 // 10_000 for size in sizes}
        steps = {size: taken for size, taken in steps.items() if taken < 12 * GB}
        found = StepMeasurement(step_bytes=steps, seconds_per_sample=dict.fromkeys(steps, side / 1000))
        planned, of_10_gb = request.largest_micro_batch, MemoryBudget(10 * GB, "by design")
        prediction = Prediction(found, Footprint(0, True, 0), planned, of_10_gb)
        micro_batch, problem = prediction.decision("" if steps else "no answer within 1 s")
        return PreflightReport(**vars(prediction), micro_batch=micro_batch, problem=problem)

    monkeypatch.setattr(module, "preflight", preflight)
    return asked


def test_nothing_is_measured_or_written_when_nobody_asked(paths, tmp_path, measured):
    phases = Phases()
    sweep = batch_size_sweep(paths, config(tmp_path, batch_size_sweep=False), memory=phases)
    assert sweep.is_empty()
    assert "-p batch_size_sweep true" in recommended(sweep)
    assert (phases.names, measured) == ([], [])
    assert not paths.batch_size_sweep.exists()


def test_batch_sizes_at_the_run_s_resolution_and_resolutions_with_its_batch_size(paths, tmp_path, measured):
    phases, seen = Phases(), []
    sweep = batch_size_sweep(
        paths, config(tmp_path), memory=phases, progress=lambda done, planned: seen.append((done, planned))
    )
    assert phases.names == [SWEEP, "setup"]
    assert seen[-1] == (8, 8)
    assert {effective for _, _, effective in measured} == {32}
    assert read_table(paths.batch_size_sweep, BATCH_SIZE_SWEEP).equals(sweep)
    by_batch = sweep.filter(pl.col("varied") == "batch_size")
    assert by_batch["batch_size"].to_list() == [1, 2, 4, 8, 16, 32]
    assert set(by_batch["image_size"]) == {16}
    by_size = sweep.filter(pl.col("varied") == "image_size")
    assert by_size["image_size"].to_list() == [16, 112, 160, 224, 384, 512, 1024]
    assert set(by_size["batch_size"]) == {4}
    assert by_size["fits"].to_list() == [True, True, False, False, None, None, None]
    assert by_size["detail"][2].startswith("over the budget of 10.00 GB (by design)")
    assert by_size["detail"][-1] == "no answer within 1 s"
    assert recommended(sweep).startswith("Take batch_size 1 at 16 pixels")
    assert recommended(sweep).endswith("Up to 112 pixels fit with batch_size 4.")


def test_it_stops_between_resolutions_when_asked_to(paths, tmp_path, measured):
    phases = Phases()
    with pytest.raises(StoppedError):
        batch_size_sweep(paths, config(tmp_path), memory=phases, stop=lambda: len(measured) == 2)
    assert phases.names == [SWEEP, "setup"]
    assert not paths.batch_size_sweep.exists()


@pytest.mark.long
def test_the_run_s_own_network_is_measured(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "IMAGE_SIZES", ())
    monkeypatch.setattr(module, "LARGEST_BATCH", 2)
    sweep = batch_size_sweep(paths, config(tmp_path, batch_size=2))
    assert sweep.select("varied", "batch_size", "image_size").rows() == [
        ("batch_size", 1, 16), ("batch_size", 2, 16), ("image_size", 2, 16),
    ]  # fmt: skip
    assert sweep["fits"].all()
    assert (sweep["seconds_per_epoch"] > 0).all()


def test_the_table_of_an_older_run_is_still_found(tmp_path):
    run = RunPaths(tmp_path)
    run.tables.mkdir()
    assert run.batch_size_sweep.name == "batch_size_sweep.parquet"
    older = run.tables / "measured_fits.parquet"
    older.touch()
    assert run.batch_size_sweep == older
    (run.tables / "batch_size_sweep.parquet").touch()
    assert run.batch_size_sweep.name == "batch_size_sweep.parquet"


def test_made_up_images_are_like_a_sample_but_for_their_pictures(paths, tmp_path):
    root, parts = module.read_image_parts(paths, config(tmp_path))
    sample = module.image_split_training(root, parts, config(tmp_path)).task.training_data[0]
    made = MadeUpImages(sample, 16, 40, 3)[2]
    assert made.tensors["image"].shape == (3, 40, 40)
    assert made.tensors["image"].dtype == sample.tensors["image"].dtype
    others = {name for name in sample.tensors if name != "image"}
    assert all(made.tensors[name].equal(sample.tensors[name]) for name in others)
