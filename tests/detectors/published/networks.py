"""Small published networks of every family, and helpers that run their publishers' code."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import nn

from fvc_lib.corpus.samples.footage import Encoding, Shot, draw_camera, encode_frames, render_shot
from fvc_lib.detectors.network import HEADS, Detector, Trunk, tune
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.video_networks import VideoTrunk, pytorchvideo_parts, torchvision_parts
from fvc_lib.detectors.weights import LoadedWeights
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.task import Sample
from fvc_lib.services.config import RunConfig
from fvc_lib.services.registry import DETECTORS, TrunkOptions
from fvc_lib.tasks.video.training import VideoTask
from tests.kits.task_kit import Clips

CPU = torch.device("cpu")
SIDE, FRAMES = 32, 4

_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_VIDEO = {**_LAYERS, "image_size": SIDE, "num_frames": FRAMES, "num_labels": 5}
_PICTURE = {**_LAYERS, "image_size": SIDE, "patch_size": 16}
# By detector: class and settings in transformers, and the class of the network's processor.
SMALL_FOLDERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "timesformer": ("TimesformerForVideoClassification", {**_VIDEO, "patch_size": 16}, "VideoMAEImageProcessor"),
    "videomae": ("VideoMAEForVideoClassification", {**_VIDEO, "patch_size": 16}, "VideoMAEImageProcessor"),
    "vivit": ("VivitForVideoClassification", {**_VIDEO, "tubelet_size": [2, 16, 16]}, "VivitImageProcessor"),
    "vjepa2": (
        "VJEPA2ForVideoClassification",
        {
            "crop_size": SIDE, "frames_per_clip": FRAMES, "hidden_size": 48, "num_hidden_layers": 2, "num_labels": 5,
            "num_attention_heads": 2, "num_pooler_layers": 1, "pred_hidden_size": 48, "pred_num_hidden_layers": 1,
            "pred_num_attention_heads": 2,
        },
        "VJEPA2VideoProcessor",
    ),
    "clip_vit_b16": ("CLIPVisionModel", _PICTURE, "CLIPImageProcessor"),
    "xclip_b16": ("XCLIPVisionModel", {**_PICTURE, "num_frames": FRAMES}, "VideoMAEImageProcessor"),
    "dinov2_small": ("Dinov2Model", {**_PICTURE, "drop_path_rate": 0.2}, "BitImageProcessor"),
    "dinov3_small": ("DINOv3ViTModel", {**_PICTURE, "num_register_tokens": 4}, "DINOv3ViTImageProcessor"),
    "siglip_base": ("SiglipVisionModel", _PICTURE, "SiglipImageProcessor"),
}  # fmt: skip
PICTURES = ("clip_vit_b16", "xclip_b16", "dinov2_small", "dinov3_small", "siglip_base")


def transformers() -> Any:
    return imported("transformers", "the tests")


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return the network that ``make`` builds; parameters and statistics that are constant become random."""
    with forked_random_state(seed, CPU):
        network = make()
        for tensor in network.state_dict().values():
            if tensor.is_floating_point() and tensor.std(correction=0) == 0:
                tensor.add_(0.1 * torch.rand(tensor.shape))
    return network.eval()


def small_network(name: str) -> Any:
    """Return a small network of the publisher's class in transformers, with its class layer if it has one."""
    kind = getattr(transformers(), SMALL_FOLDERS[name][0])
    return seeded(lambda: kind(kind.config_class(**SMALL_FOLDERS[name][1])))


def write_folder(name: str, folder: Path) -> Any:
    """Write a folder as on the hub, with its processor, and return the publisher's network."""
    network = small_network(name)
    network.save_pretrained(folder)
    _, _, processor = SMALL_FOLDERS[name]
    getattr(transformers(), processor)().save_pretrained(folder)
    return network


def given_to(layer: nn.Module, compute: Callable[[], Any]) -> torch.Tensor:
    """Return the input of ``layer`` while ``compute`` runs."""
    found: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].detach()))
    try:
        with torch.inference_mode():
            compute()
    finally:
        hook.remove()
    return found[0]


def noise(number: int, num_frames: int, side: int) -> torch.Tensor:
    """Return noise as frames uint8 (B, T, 3, H, W)."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.randint(0, 256, (number, num_frames, 3, -(-side // 8), -(-side // 8)), generator=generator)
    return coarse.repeat_interleave(8, -1).repeat_interleave(8, -2)[..., :side, :side].to(torch.uint8).contiguous()


def real_frames(number: int, side: int) -> torch.Tensor:
    """Return uint8 (N, 3, side, side): corners of encoded and decoded frames of the sample corpus."""
    pictures = []
    for shot in (Shot(f"frame {place}", 192, 192, 2, draw_camera(f"frame {place}")) for place in range(number)):
        content = encode_frames(render_shot(shot), Encoding("libx264", "mp4", 25, 1.0), 1_000_000)
        with av.open(io.BytesIO(content)) as container:
            picture = next(container.decode(video=0)).to_ndarray(format="rgb24")
        pictures.append(torch.from_numpy(np.ascontiguousarray(picture[:side, :side])).permute(2, 0, 1))
    return torch.stack(pictures)


def trunk_of(name: str, weights: Path | None = None, *, num_frames: int = 0, side: int = 0) -> Trunk:
    spec = DETECTORS.get(name)
    clips = spec.clips(num_frames, side)
    trunk: Trunk = spec.build_trunk(TrunkOptions(name, clips.num_frames, clips.side, weights))
    return trunk.eval()


# Small networks for the promises of the engine


def _torchvision(make: Callable[[Any], nn.Module]) -> Callable[[Path], Trunk]:
    def build(folder: Path) -> Trunk:
        network = make(imported("torchvision.models.video", "the tests"))
        size, blocks = torchvision_parts(network)
        return VideoTrunk(network, size, recomputable=blocks)

    return build


def _r2plus1d(models: Any) -> nn.Module:
    """Return an R(2+1)D with its first two layers, one block each."""
    kinds = models.resnet
    network = kinds.VideoResNet(kinds.BasicBlock, [kinds.Conv2Plus1D] * 4, [1, 1, 1, 1], kinds.R2Plus1dStem)
    network.layer3, network.layer4, network.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 5)
    return network


def _swin(models: Any) -> nn.Module:
    return models.swin_transformer.SwinTransformer3d(
        [2, 4, 4], 12, [1, 1], [2, 2], [2, 4, 4], stochastic_depth_prob=0.5, attention_dropout=0.3
    )


def _x3d(*, from_scratch: bool) -> Callable[[Path], Trunk]:
    def build(folder: Path) -> Trunk:
        create = imported("pytorchvideo.models.x3d", "the tests").create_x3d
        network = create(
            input_clip_length=FRAMES, input_crop_size=SIDE, width_factor=0.5, depth_factor=0.3, head_dim_out=16
        )
        size, blocks = pytorchvideo_parts(network)
        weights = None if from_scratch else LoadedWeights("made up", "", "none")
        return VideoTrunk(network, size, recomputable=blocks, weights=weights)

    return build


def _slowfast(folder: Path) -> Trunk:
    create = imported("pytorchvideo.models.slowfast", "the tests").create_slowfast
    network = create(
        slowfast_channel_reduction_ratio=(4,), stem_dim_outs=(8, 2),
        head_pool_kernel_sizes=((1, 1, 1), (4, 1, 1)),
    )  # fmt: skip
    size, blocks = pytorchvideo_parts(network)
    trunk = VideoTrunk(network, size, recomputable=blocks)
    trunk.slow_every = 4
    return trunk


def _from_folder(name: str) -> Callable[[Path], Trunk]:
    def build(folder: Path) -> Trunk:
        if not (folder / "config.json").exists():
            write_folder(name, folder)
        return trunk_of(name, folder, num_frames=FRAMES, side=SIDE)

    return build


@dataclass(frozen=True)
class Small:
    """A small network: its trunk, its head, and the parts that are trained."""

    trunk: Callable[[Path], Trunk]
    head: str = "mean"
    tune: str = "all"
    side: int = SIDE

    def build(self, folder: Path) -> Detector:
        trunk = self.trunk(folder)
        detector = Detector(trunk, HEADS[self.head](trunk.frame_feature_size))
        tune(detector, self.tune)
        return detector


SMALL = {
    "r2plus1d": Small(_torchvision(_r2plus1d)),
    "swin3d": Small(_torchvision(_swin)),
    "x3d": Small(_x3d(from_scratch=True)),
    "x3d with weights": Small(_x3d(from_scratch=False)),
    "slowfast": Small(_slowfast),
    "timesformer": Small(_from_folder("timesformer")),
    "videomae": Small(_from_folder("videomae"), tune="last:1"),
    "vivit": Small(_from_folder("vivit")),
    "vjepa2": Small(_from_folder("vjepa2")),
    "clip": Small(_from_folder("clip_vit_b16"), head="gru", tune="norms"),
    "dinov2": Small(_from_folder("dinov2_small"), head="attention"),
    "dinov3": Small(_from_folder("dinov3_small"), head="path", tune="effort:2"),
    "siglip": Small(_from_folder("siglip_base"), tune="head"),
    "timm": Small(lambda folder: trunk_of("timm:test_efficientnet", side=SIDE), head="path"),
    "timm vit": Small(lambda folder: trunk_of("timm:test_vit", side=SIDE), head="gru"),
    "efficientnet_lite0": Small(lambda folder: trunk_of("efficientnet_lite0", side=SIDE), tune="norms"),
}


@dataclass(frozen=True)
class LongerClips(Clips):
    """Clips of ``FRAMES`` frames with sides of ``SIDE`` pixels."""

    kept: dict[int, Sample] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Sample:
        if index not in self.kept:
            generator = torch.Generator().manual_seed(self.first + index)
            drawn = torch.randn(FRAMES, 3, SIDE, SIDE, generator=generator) * (40 if index % 2 else 25) + 128
            frames = drawn.round().clamp(0, 255).to(torch.uint8)
            self.kept[index] = Sample(f"clip{index}", {"frames": frames, "label": torch.tensor(float(index % 2))})
        return self.kept[index]


class SmallTask(VideoTask):
    """The video task with a network of ``SMALL``."""

    small: Small
    folder: Path
    double = False

    def build_model(self) -> nn.Module:
        network = self.small.build(self.folder)
        return network.double() if self.double else network


@dataclass(frozen=True)
class SmallTasks:
    """A picklable factory: ``SmallTasks(name, folder)(rank)`` returns the task in any process."""

    name: str
    folder: Path
    double: bool = False

    def __call__(self, rank: int = 0) -> SmallTask:
        config = RunConfig(model="frame_cnn")
        task = SmallTask(LongerClips(0, 6), LongerClips(1000, 4), config=config, weights=(0.7, 1.6))
        task.small, task.folder, task.double = SMALL[self.name], self.folder, self.double
        return task
