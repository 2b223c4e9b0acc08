"""Backbones: named networks that turn a picture into features, and a model that predicts classes and numbers from them.

Every detector with a network on single frames is also a backbone (``EncoderBackbone``): ``timm:NAME``,
``efficientnet_lite0``, ``clip_vit_b16`` and others. Networks for pictures alone are registered in ``BACKBONES``:
``small_resnet``, and ``torchvision:NAME`` through ``AdaptedBackbone``, whose package is imported on use.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from fvc_lib.detectors.network import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    Normalised,
    PictureTrunk,
    parameters_by_stage,
)
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
from fvc_lib.engine.task import Outputs
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import BACKBONES, DETECTORS, TrunkOptions

_TORCHVISION_WORKS = ("efficientnet_b0", "efficientnet_b3", "resnet50", "mobilenet_v3_large", "mobilenet_v3_small")

_logger = logging.getLogger(__name__)


class Backbone(nn.Module):
    """Base class of networks that turn pictures into features, and that consist of stages which can be frozen."""

    num_features: int  # of one picture

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the parameters by stage, from input to features; every parameter belongs to exactly one stage."""
        raise NotImplementedError

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Return the parts whose activations gradient checkpointing computes again."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Return features float (B, num_features) of images uint8 (B, 3, H, W)."""
        raise NotImplementedError


class AdaptedBackbone(Backbone):
    """A backbone made of any network. The network stays in evaluation mode during training.

    In training mode a batch norm would use the statistics of a micro-batch, and dropout would draw once per
    micro-batch. The result would depend on how a batch is split to fit the memory. All weights and biases are trained.

    Args:
        network: takes float pictures (B, 3, H, W) and returns features (B, D) or (B, D, 1, 1); has no class layer.
        num_features: D.
        recomputable: parts of it that are called with a single tensor; see ``engine.device.Recomputable``.
    """

    def __init__(self, network: nn.Module, num_features: int, *, recomputable: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.network = network
        self.num_features = num_features
        self.normalised = Normalised(IMAGENET_MEAN, IMAGENET_DEVIATION)
        self._recomputable = tuple(recomputable)
        self.network.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the network stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """See ``parameters_by_stage``."""
        return parameters_by_stage(self.network)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the recomputable parts; raise ``UsageError`` if none are known."""
        if not self._recomputable:
            raise UsageError(
                f"gradient_checkpointing: which parts of a {type(self.network).__name__} could be computed again is "
                f"not known. Turn gradient_checkpointing off or take -p backbone small_resnet."
            )
        return self._recomputable

    def forward(self, images: Tensor) -> Tensor:
        """Return features float (B, num_features) of images uint8 (B, 3, H, W).

        Raises:
            UsageError: the network does not take this size.
        """
        try:
            features: Tensor = self.network(self.normalised(images))
        except (AssertionError, ValueError) as error:  # of timm's vision transformers, which are made for one size
            raise refused_size(self, images, error) from error
        return features.flatten(1)


class EncoderBackbone(Backbone):
    """A backbone made of a detector's trunk on single frames, which decides how norms and dropout are treated."""

    def __init__(self, trunk: PictureTrunk) -> None:
        super().__init__()
        self.trunk = trunk
        self.num_features = trunk.frame_feature_size

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """See ``parameters_by_stage``."""
        return parameters_by_stage(self.trunk.network)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the trunk's blocks."""
        return self.trunk.recomputable_blocks()

    def forward(self, images: Tensor) -> Tensor:
        """Return features float (B, num_features) of images uint8 (B, 3, H, W).

        Raises:
            UsageError: the network does not take this size.
        """
        try:
            return self.trunk.encode_pictures(self.trunk.normalised(images)).flatten(1)
        except (AssertionError, ValueError) as error:
            raise refused_size(self, images, error) from error


def refused_size(backbone: Backbone, images: Tensor, error: Exception) -> UsageError:
    """Return the error to raise if ``backbone`` does not take pictures of the size of ``images`` (B, 3, H, W)."""
    network = backbone_network(backbone)
    wanted = (getattr(network, "pretrained_cfg", None) or {}).get("input_size")
    remedy = f"Give -p image_size {wanted[-1]}, which it was made for" if wanted else "Give another image_size"
    height, width = images.shape[-2:]
    reason = (str(error).splitlines() or [type(error).__name__])[0].removesuffix(".")
    return UsageError(
        f"image_size: a {type(network).__name__} does not take pictures of {height} x {width} pixels: {reason}. "
        f"{remedy}, or take another backbone."
    )


def build_backbone(name: str, weights: Path | None = None, size: int = 224) -> Backbone:
    """Build the named backbone, with the weights of a file or folder, or with random ones from torch's random state.

    Args:
        name: a name in ``BACKBONES``, or the name of a detector with a network on single frames.
        weights: a file of torch or safetensors with the network's ``state_dict``; for a detector also a folder, as its
            ``model_weights`` may be. None: a detector takes the weights that it brings, if any.
        size: side of the pictures in pixels, for networks that are made for a fixed size.

    Raises:
        UsageError: the name is unknown, a package is missing or does not work, the weights cannot be read or do not
            fit, or the detector's network does not take single frames.
    """
    backbone = named_backbone(name, weights, size)
    network = backbone_network(backbone)
    norms = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if isinstance(backbone, EncoderBackbone):
        return backbone
    if weights is not None:
        loaded = load_weights(network, weights, licence="unknown", field="backbone_weights")
        backbone.loaded_weights = loaded  # type: ignore[assignment]  # for the record
    elif norms and backbone is not network:
        _logger.warning(
            "backbone %s: batch norm keeps the statistics it begins with, and without backbone_weights these are of "
            "no picture. Give weights, or take small_resnet, which learns from scratch.",
            name,
        )
    return backbone


def named_backbone(name: str, weights: Path | None = None, size: int = 224, *, pretrained: bool = True) -> Backbone:
    """Build the named backbone; ``weights`` are loaded for detectors only, others start from scratch.

    Raises:
        UsageError: as ``build_backbone``.
    """
    if BACKBONES.is_own(name):
        backbone: Backbone = BACKBONES.get(name)(name.partition(":")[2])
        return backbone
    spec = DETECTORS.get(BACKBONES.check(name))
    licence = spec.weights_licence or "unknown"
    options = TrunkOptions(name, 1, size, weights, licence, pretrained=pretrained)
    try:
        trunk = spec.build_trunk(options) if spec.build_trunk else None
    except UsageError as error:  # in the words of the video tasks
        raise UsageError(str(error).replace("model_weights", "backbone_weights")) from error
    if not isinstance(trunk, PictureTrunk):
        raise UsageError(
            f"backbone {name!r}: it is no published network on single frames. Take {', '.join(BACKBONES.names())}, "
            "efficientnet_lite0, clip_vit_b16, dinov2_small or timm:NAME."
        )
    return EncoderBackbone(trunk)


def backbone_network(backbone: Backbone) -> nn.Module:
    """Return the module of ``backbone`` to whose ``state_dict`` files of weights correspond."""
    if isinstance(backbone, EncoderBackbone):
        return backbone.trunk.network
    return backbone.network if isinstance(backbone, AdaptedBackbone) else backbone


@BACKBONES.register("torchvision:NAME")
def _of_torchvision(name: str) -> AdaptedBackbone:
    models = imported("torchvision.models", f"torchvision:{name}")
    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"backbone 'torchvision:{name}': torchvision has no such model.{did_you_mean(name, known)}")
    return adapt_torchvision(models.get_model(name, weights=None), name)


def adapt_torchvision(network: Any, name: str) -> AdaptedBackbone:
    """Turn a classifier of torchvision into a backbone that returns the pooled features.

    Networks of ``features`` and ``classifier`` (efficientnet, mobilenet, densenet) lose the whole classifier, hidden
    layers too; networks of ``layer1`` to ``layer4`` and ``fc`` (resnet) lose ``fc``.

    Raises:
        UsageError: the network is built in another way.
    """
    if isinstance(getattr(network, "features", None), nn.Sequential) and hasattr(network, "classifier"):
        linear = next((part for part in network.classifier.modules() if isinstance(part, nn.Linear)), None)
        if linear is not None:
            network.classifier = nn.Identity()
            return AdaptedBackbone(network, linear.in_features, recomputable=tuple(network.features))
    if hasattr(network, "layer4") and isinstance(getattr(network, "fc", None), nn.Linear):
        num_features = network.fc.in_features
        network.fc = nn.Identity()
        layers = tuple(getattr(network, f"layer{number}") for number in (1, 2, 3, 4))
        return AdaptedBackbone(network, num_features, recomputable=layers)
    raise UsageError(
        f"backbone 'torchvision:{name}': it is built in a way that is not known here. Known are networks of 'features' "
        f"and 'classifier' or of 'layer1' to 'layer4' and 'fc', such as {', '.join(_TORCHVISION_WORKS)}; or take "
        "timm:NAME."
    )


class ImageModel(nn.Module):
    """A backbone with a class head, a regression head, or both.

    The regression head is linear. With a final ReLU, a picture whose output became negative would stay at zero, because
    its gradient is zero.

    Args:
        backbone: turns pictures into features.
        num_classes: C; 0: no class head.
        num_targets: T; 0: no regression head.
    """

    def __init__(self, backbone: Backbone, num_classes: int, num_targets: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.class_head = _head(backbone.num_features, num_classes)
        self.target_head = _head(backbone.num_features, num_targets)

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Return the backbone's blocks."""
        return self.backbone.recomputable_blocks()

    def forward(self, images: Tensor) -> Outputs:
        """Return ``class_logits`` float (B, C) and ``values`` float (B, T), scaled, of images uint8 (B, 3, H, W)."""
        features = self.backbone(images)
        none = features.new_zeros(len(features), 0)
        return {
            "class_logits": none if self.class_head is None else self.class_head(features),
            "values": none if self.target_head is None else self.target_head(features),
        }

    def train_stages(self, num_trained: int) -> None:
        """Train the heads and the backbone's last ``num_trained`` stages only; freeze the other stages."""
        stages = self.backbone.stages()
        for number, stage in enumerate(stages):
            for parameter in stage:
                parameter.requires_grad_(number >= len(stages) - num_trained)


def _head(num_features: int, num_outputs: int) -> nn.Linear | None:
    return nn.Linear(num_features, num_outputs) if num_outputs else None
