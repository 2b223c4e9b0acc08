"""The memory profiles in ``params/`` change how a run is computed, never what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fvc_lib.detectors.frames.backbone import ImageModel, build_backbone
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, PAD
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.preflight import StepRequest, preflight
from fvc_lib.engine.task import LossSum, Sample
from fvc_lib.execution.run.which_run import values_of_another_corpus
from fvc_lib.services.config import MAY_CHANGE_ON_RESUME, RunConfig
from fvc_lib.services.memory import MemoryBudget
from fvc_lib.services.parameters import read_params_file, resolve_config
from fvc_lib.services.registry import DETECTORS
from fvc_lib.tasks.image.training import DEFAULT_MICRO_BATCH
from fvc_lib.tasks.video.training import VideoTask
from fvc_lib.tasks.video_text.task import VideoTextTask, network_plan

FOLDER = Path(__file__).parents[1] / "params"
PROFILES = ("full", "safe", "ultra_safe")
IMAGE_PROFILES = ("image_full", "safe", "ultra_safe")


def resolved(*names: str) -> RunConfig:
    values: dict[str, object] = {}
    for name in names:  # later files win, as on the command line
        values.update(read_params_file(FOLDER / f"{name}.yaml"))
    return resolve_config(values, environ={})


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_params_file_is_valid_and_says_what_it_is_for(path):
    resolve_config(read_params_file(path), environ={})
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("files", "given", "warns"),
    [
        (["safe", "demo"], {"corpus": "x"}, True),
        (["safe", "demo"], {"corpus": "x", "task": "image"}, False),  # another task's file
        (["safe", "demo"], {}, False),
        (["safe"], {"corpus": "x"}, False),
        ([], {}, True),  # the default network sees nothing in the sample corpus
        ([], {"model": "frame_cnn"}, False),
    ],
)
def test_values_of_another_corpus_are_warned_about(files, given, warns):
    config = resolve_config({}, environ={}, command_line=given)
    said = values_of_another_corpus([FOLDER / f"{name}.yaml" for name in files], config)
    assert ("--params params/demo.yaml" in said) == bool(said) == warns


@pytest.mark.parametrize("name", sorted({*PROFILES, *IMAGE_PROFILES}))
def test_a_memory_profile_sets_only_what_a_run_may_be_resumed_with(name):
    values = read_params_file(FOLDER / f"{name}.yaml")
    assert values
    assert values.keys() <= MAY_CHANGE_ON_RESUME


@dataclass(frozen=True)
class Noise:
    """Sixteen samples of noise: ``frames`` or a picture of the size that ``config`` names, and all targets of tasks."""

    config: RunConfig

    classes = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Sample:
        config, generator = self.config, torch.Generator().manual_seed(index)
        clip = (config.clips.num_frames, 3, config.clips.side, config.clips.side)
        shape = (3, config.image_size, config.image_size) if config.task == "image" else clip
        tokens = torch.full((config.max_text_tokens,), PAD)
        tokens[:3] = torch.tensor([BEGIN, 200, END])
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        name = "image" if config.task == "image" else "frames"
        tensors = {name: pixels, "label": torch.tensor(float(index % 2)), "tokens": tokens}
        return Sample(f"noise{index}", tensors | {n: torch.tensor(index) for n in ("video_index", "text_index")})


@dataclass(frozen=True)
class Pictures:
    """Task image's network on noise."""

    config: RunConfig

    @property
    def training_data(self) -> Noise:
        return Noise(self.config)

    validation_data = training_data

    def build_model(self):
        return ImageModel(build_backbone(self.config.backbone), 10, 0)

    def forward(self, model, batch):
        return model(batch.tensors["image"])

    def loss(self, outputs, batch):
        return LossSum(outputs["class_logits"].square().sum(), torch.tensor(float(len(batch))))

    def new_accumulator(self):
        raise NotImplementedError


def of_clips(config: RunConfig):
    return VideoTask(Noise(config), Noise(config), config=config, weights=(1.0, 1.0))


def of_texts(config: RunConfig):
    return VideoTextTask(Noise(config), Noise(config), network_plan(config, config.vocabulary_size), config)


TASKS = {
    "video": (of_clips, lambda config: DETECTORS.get(config.model).micro_batch),
    "image": (Pictures, lambda config: DEFAULT_MICRO_BATCH),
    "video_text": (of_texts, lambda config: DETECTORS.get(config.model).micro_batch),
}


@pytest.mark.parametrize(("task", "model"), [
    pytest.param("video", "frame_cnn", marks=pytest.mark.slow),
    *(pytest.param(*other, marks=pytest.mark.long) for other in (("image", ""), ("video_text", "frame_cnn"))),
])  # fmt: skip
@pytest.mark.usefixtures("warm_workers")
def test_each_profile_s_step_measures_below_the_one_before(task, model):
    """full, no profile, safe, ultra_safe; by the preflight's own measurement, in one process for all of them."""
    make, default = TASKS[task]
    asked = {"task": task, "device": "cpu", "fixed_size": 64, "image_size": 64, **({"model": model} if model else {})}
    taken = []
    for name in ("full", None, "safe", "ultra_safe"):
        values = read_params_file(FOLDER / f"{name}.yaml") if name else {}
        config = resolve_config({**values, **asked}, environ={})
        taken.append(config.batch_size or default(config))
    assert all(before > after for before, after in pairwise(taken))
    request = StepRequest(make(config), taken[0], config.effective_batch_size, resolve_device("cpu"))
    plenty = MemoryBudget(1 << 40, "plenty")
    steps = [
        preflight(replace(request, micro_batch=number), budget=plenty, time_limit_seconds=600).peak_bytes
        for number in taken
    ]
    assert all(before > after for before, after in pairwise(steps)), steps


@pytest.mark.parametrize("model", ["frame_cnn", "r2plus1d_small"])
def test_the_defaults_are_careful_without_any_profile(model):
    defaults = resolved()
    assert (defaults.batch_size, defaults.num_workers, defaults.gradient_checkpointing) == (0, 0, False)
    assert resolved("safe").batch_size < DETECTORS.get(model).micro_batch < resolved("full").batch_size
