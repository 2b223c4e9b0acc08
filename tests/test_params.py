"""The memory profiles in ``params/`` change how a run is computed, never what comes out of it."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.preflight import StepRequest, preflight
from fvc_lib.engine.task import Sample
from fvc_lib.execution.run.which_run import values_of_another_corpus
from fvc_lib.services.config import MAY_CHANGE_ON_RESUME, RunConfig
from fvc_lib.services.memory import MemoryBudget
from fvc_lib.services.parameters import read_params_file, resolve_config
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.image.training import DEFAULT_MICRO_BATCH
from fvc_lib.tasks.video.training import VideoTask

FOLDER = Path(__file__).parents[1] / "params"


def resolved(*names: str, **values: object) -> RunConfig:
    given: dict[str, object] = {}
    for name in names:  # later files win, as on the command line
        given |= read_params_file(FOLDER / f"{name}.yaml")
    return resolve_config(given | values, environ={})


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_params_file_is_valid_and_says_what_it_is_for(path):
    resolved(path.stem)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("files", "given", "warns"),
    [
        (["safe", "demo"], {"corpus": "x"}, True),
        (["safe", "demo"], {"corpus": "x", "task": "image"}, False),  # another task's file
        (["safe", "demo"], {}, False),
        (["safe"], {"corpus": "x"}, False),
        ([], {}, False),  # the default learns the sample corpus, too
        ([], {"model": "frame_cnn"}, False),
    ],
)
def test_values_of_another_corpus_are_warned_about(files, given, warns):
    config = resolve_config({}, environ={}, command_line=given)
    said = values_of_another_corpus([FOLDER / f"{name}.yaml" for name in files], config)
    assert ("--params params/demo.yaml" in said) == bool(said) == warns


@pytest.mark.parametrize("name", ["full", "image_full", "safe", "ultra_safe"])
def test_a_memory_profile_sets_only_what_a_run_may_be_resumed_with(name):
    values = read_params_file(FOLDER / f"{name}.yaml")
    assert values
    assert values.keys() <= MAY_CHANGE_ON_RESUME


@dataclass(frozen=True)
class Noise:
    """Sixteen clips of noise of the given shape."""

    shape: tuple[int, ...]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator)
        return Sample(f"noise{index}", {"frames": pixels, "label": torch.tensor(float(index % 2))})


def micro_batches(default: int, **values: object) -> list[int]:
    """Return the micro-batches of full, no profile, safe and ultra_safe, in falling order."""
    configs = [resolved(*names, **values) for names in (("full",), (), ("safe",), ("ultra_safe",))]
    found = [config.batch_size or default for config in configs]
    assert all(before > after for before, after in pairwise(found))
    return found


def test_each_profile_computes_fewer_samples_at_once_than_the_one_before():
    micro_batches(DEFAULT_MICRO_BATCH, task="image")
    for model in ("frame_cnn", "r2plus1d_small"):
        micro_batches(DETECTORS.get(model).micro_batch, model=model)
        micro_batches(DETECTORS.get(model).micro_batch, model=model, task="video_text")
    defaults = resolved()
    assert (defaults.batch_size, defaults.num_workers, defaults.gradient_checkpointing) == (0, 0, False)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_each_profile_s_step_measures_below_the_one_before():
    """By the preflight's own measurement, in one process for all of them."""
    config = resolved(model="frame_cnn", device="cpu", fixed_size=64)
    taken = micro_batches(DETECTORS.get(config.model).micro_batch, model=config.model)
    noise = Noise((config.clips.num_frames, 3, config.clips.side, config.clips.side))
    task = VideoTask(noise, noise, config=config, weights=(1.0, 1.0))
    request = StepRequest(task, taken[0], config.effective_batch_size, resolve_device("cpu"))
    plenty = MemoryBudget(1 << 40, "plenty")
    steps = [
        preflight(replace(request, micro_batch=number), budget=plenty, time_limit_seconds=600).peak_bytes
        for number in taken
    ]
    assert all(before > after for before, after in pairwise(steps)), steps
