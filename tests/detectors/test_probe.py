"""Probes: statistics of a frozen trunk's stages, and which clips and modules belong to a probe."""

import pytest
import torch
from torch import nn

from fvc_lib.detectors.network import PictureTrunk, build_detector
from fvc_lib.detectors.probe import StageTrunk
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS

LITE0_CHANNELS = (16, 24, 40, 80, 112, 192, 320)


def test_a_probe_sees_the_centre_of_four_frames():
    spec, trunk = DETECTORS.get("probe:efficientnet_lite0"), DETECTORS.get("efficientnet_lite0")
    assert (spec.num_frames, spec.side, spec.frame_fit, spec.of_features) == (4, trunk.side, "crop", "both")
    assert trunk.frame_fit == "letterbox"
    modules = {"fvc_lib.detectors.probe", "fvc_lib.detectors.frames.efficientnet_lite0"}
    assert modules <= set(DETECTORS.declared_in(spec.name))
    kinds = {views: RunConfig(model=spec.name, views=views).of_features for views in ("frames", "frames,coding")}
    assert kinds == {"frames": "embedding", "frames,coding": "both"}
    with pytest.raises(UsageError, match="has no trunk"):
        build_detector(RunConfig(model="probe:forensic_boosting"))


def test_features_are_statistics_of_every_stage_and_the_output():
    detector = build_detector(RunConfig(model="probe:efficientnet_lite0", fixed_size=64, num_frames=2))
    trunk = detector.trunk
    frames = torch.randint(0, 256, (1, 2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    lite0 = trunk.network.network
    with torch.no_grad():
        features = trunk(frames)[0]
        blocks = torch.relu(lite0.stem(trunk.normalised(frames[0]))).clamp(max=6)
        position, ends = 0, (0, 2, 4, 7, 10, 14, 15)
        for number, block in enumerate(lite0.blocks):
            blocks = block(blocks)
            if number in ends:
                channels = LITE0_CHANNELS[ends.index(number)]
                mean, spread = features[:, position : position + 2 * channels].split(channels, 1)
                torch.testing.assert_close(mean, blocks.mean((2, 3)))
                torch.testing.assert_close(spread, blocks.std((2, 3), correction=0))
                position += 2 * channels
        torch.testing.assert_close(features[:, position:], lite0(trunk.normalised(frames[0])))
    assert trunk.frame_feature_size == features.shape[1] == 2 * sum(LITE0_CHANNELS) + 1280


class _Tokens(nn.Module):
    """A transformer-like network: eight blocks with outputs (N, tokens, C) of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        tokens = pictures.flatten(2)[:, :, :6]
        for block in self.blocks:
            tokens = block(tokens)
        return tokens.mean(1)


def test_of_blocks_with_outputs_of_one_shape_four_are_taken():
    network = _Tokens()
    trunk = StageTrunk(PictureTrunk(network, 6, recomputable=tuple(network.blocks)), 8)
    assert trunk._stages == [network.blocks[number] for number in (1, 3, 5, 7)]
    assert trunk.frame_feature_size == 4 * 2 * 6 + 6
