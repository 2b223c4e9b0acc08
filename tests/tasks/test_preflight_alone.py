"""A training's peak before there is a run: predicted in a child from made-up clips, near what the preflight finds."""

from pathlib import Path

import pytest
import torch

from fvc_lib.engine.memory.preflight import StepProbe
from fvc_lib.services.config import RunConfig
from fvc_lib.services.memory.budget import KERNEL_BYTES
from fvc_lib.tasks.video.dry_run_memory import measured_training_peak, step_request


def test_the_step_is_the_one_that_is_configured():
    config = RunConfig(num_frames=3, fixed_size=32, model="r2plus1d", batch_size=2, effective_batch_size=6, amp="off")
    request = step_request(config)
    assert (request.largest_micro_batch, request.samples_per_step, request.num_workers) == (2, 6, 0)
    sample = request.task.training_data[5]
    assert sample.tensors["frames"].shape == (3, 3, 32, 32)
    assert sample.tensors["frames"].dtype == torch.uint8
    assert type(request.task.build_model()).__name__ == "R2Plus1d"
    step_bytes, seconds_per_sample = StepProbe(request).step(2)  # it really trains
    assert min(step_bytes, seconds_per_sample) > 0


@pytest.mark.long
def test_more_pixels_take_more_and_nothing_is_written(tmp_path: Path):
    config = RunConfig(
        runs_dir=str(tmp_path), cache_dir=str(tmp_path), data_dir=str(tmp_path), model="frame_cnn", device="cpu"
    )
    small, large = (measured_training_peak(config.model_copy(update={"fixed_size": side})) for side in (64, 448))
    assert small is not None
    assert large is not None
    assert KERNEL_BYTES < small < 1.2e9
    frames = 8 * 6 * 3 * (448**2 - 64**2)  # of a micro-batch, as bytes: the least that must be held
    assert large - small > 4 * frames
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("warm_workers")
def test_a_device_that_is_not_there_is_no_prediction():
    missing = "mps" if not torch.backends.mps.is_available() else "cuda"
    assert measured_training_peak(RunConfig(device=missing)) is None
