"""Published backbones: refusals name the problem, and results do not depend on the batch size."""

import pytest
import torch
from torch import nn

from fvc_lib.detectors.frames.backbone import ImageModel, build_backbone, of_classifier
from fvc_lib.detectors.network import PictureTrunk, parameters_by_stage
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.registry import BACKBONES, DETECTORS, TrunkOptions
from fvc_lib.tasks.image.training import require_backbone


def pictures(count=4):
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def conv_norm(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def adapted(network, path=None):
    return of_classifier(network, TrunkOptions("torchvision:it", 1, 16, path))


class LikeEfficientnet(nn.Module):
    """A network built like torchvision's: ``features``, ``avgpool``, and a classifier with a hidden layer."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_norm(3, 6), conv_norm(6, 8))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.2), nn.Linear(12, 1000))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class LikeResnet(nn.Module):
    """A network built like those of torchvision and timm: ``conv1 bn1 layer1 .. layer4 fc``."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.layer1, self.layer2, self.layer3, self.layer4 = (conv_norm(4, 4) for _ in range(4))
        self.fc = nn.Linear(4, num_classes) if num_classes else nn.Identity()

    def forward(self, x):
        x = self.bn1(self.conv1(x))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("like", [LikeEfficientnet, LikeResnet])
def test_batch_norms_with_weights_stay_as_in_evaluation_and_learn_all_the_same(like, tmp_path):
    torch.manual_seed(0)
    torch.save(like().state_dict(), tmp_path / "w.pt")
    model = ImageModel(adapted(like(), tmp_path / "w.pt"), 3, 1).train()
    assert model.training
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    whole = model(pictures())["class_logits"]
    parts = torch.cat([model(part)["class_logits"] for part in pictures().split(1)])
    torch.testing.assert_close(whole, parts)
    whole.square().sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert all(norm.weight.grad is not None for norm in norms)
    from_scratch = adapted(like())
    assert not any(isinstance(part, nn.BatchNorm2d) for part in from_scratch.modules())


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_a_picture_size_that_a_backbone_does_not_take_is_refused(error, monkeypatch):
    class OfOneSize(LikeResnet):
        def forward(self, x):
            if x.shape[-1] != 32:
                raise error(f"Input height ({x.shape[-2]}) doesn't match model (32).")
            return super().forward(x)

    def of_one_size():
        return PictureTrunk(OfOneSize(num_classes=0), 4)

    monkeypatch.setitem(BACKBONES._items, "like:NAME", lambda _: of_one_size())
    config = {"task": "image", "backbone": "like:it", "image_size": 64}
    says = r"OfOneSize does not take clips of 1 frames of 64 x 64 pixels: Input height \(64\).*Give.*image_size"
    with pytest.raises(UsageError, match=says):
        require_backbone(resolve_config(config, environ={}))
    if error is AssertionError:
        with pytest.raises(UsageError, match="16 x 16 pixels"):
            of_one_size()(pictures()[:, None])
    require_backbone(resolve_config({**config, "image_size": 32}, environ={}))


def test_a_part_that_is_nearly_all_stands_for_its_parts_and_every_parameter_is_in_one_stage():
    class LikeVit(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(4))
            self.patch_embed = nn.Sequential(nn.Linear(4, 4))
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
            self.norm = nn.LayerNorm(4)
            self.shared = self.norm

    network = LikeVit()
    names = {parameter: name for name, parameter in network.named_parameters()}
    stages = [[names[parameter] for parameter in stage] for stage in parameters_by_stage(network)]
    assert [stage[0] for stage in stages] == [
        "cls_token",
        "blocks.0.0.weight",
        "blocks.1.0.weight",
        "blocks.2.0.weight",
    ]
    assert stages[-1][-2:] == ["norm.weight", "norm.bias"]
    everything = [name for stage in stages for name in stage]
    assert sorted(everything) == sorted(name for name, _ in LikeVit().named_parameters())


def test_a_network_on_frames_is_a_backbone_with_its_weights():
    backbone = build_backbone("efficientnet_lite0", size=64)
    frames = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    trunk = DETECTORS.get("efficientnet_lite0").build_trunk(TrunkOptions("efficientnet_lite0", 1, 64)).eval()
    with torch.no_grad():
        assert backbone.eval()(frames[:, None]).equal(trunk(frames[:, None]))
    model = ImageModel(backbone, 3, 1).train()
    assert not any(part.training for part in backbone.modules() if isinstance(part, nn.BatchNorm2d))
    assert len(backbone.stages()) > 5
    assert model.recomputable_blocks()
    require_backbone(resolve_config({"task": "image", "backbone": "efficientnet_lite0"}, environ={}))
    with pytest.raises(UsageError, match=r"backbone 'frame_cnn': it is no published network on single frames"):
        build_backbone("frame_cnn")
