"""Backbones: networks that turn a picture into features, and a model that predicts classes and numbers from them.

Every detector with a network on single frames is also a backbone (``EncoderBackbone``): ``timm:NAME``,
``efficientnet_lite0``, ``clip_vit_b16`` and others. Networks that are backbones only are registered in ``BACKBONES``:
``small_resnet``, and ``torchvision:NAME``, whose package is imported on use.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fvc_lib.detectors.network import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    PictureTrunk,
    parameters_by_stage,
)
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
from fvc_lib.engine.task import Outputs
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import BACKBONES, DETECTORS, TrunkOptions


class Backbone(nn.Module):
    """Base class of networks that turn pictures into features; their stages (groups of layers) can be frozen."""

    num_features: int  # of one picture

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return one tuple of parameters per stage, in the order from input to features; the stages do not overlap."""
        raise NotImplementedError

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Return the parts whose activations gradient checkpointing computes again."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Return features float (B, num_features) of images uint8 (B, 3, H, W)."""
        raise NotImplementedError


class EncoderBackbone(Backbone):
    """A backbone made of the trunk (network without head) of a detector on single frames.

    ``Trunk`` describes how norms and dropout behave in training.
    """

    def __init__(self, trunk: PictureTrunk) -> None:
        super().__init__()
        self.trunk = trunk
        self.num_features = trunk.frame_feature_size

    def stages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the parameters, one tuple per stage, as ``parameters_by_stage`` divides the trunk's network."""
        return parameters_by_stage(self.trunk.network)

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the trunk's parts whose activations gradient checkpointing may recompute."""
        return self.trunk.recomputable_blocks()

    def forward(self, images: Tensor) -> Tensor:
        """Return features float (B, num_features) of images uint8 (B, 3, H, W).

        Raises:
            UsageError: the network does not take pictures of this size.
        """
        try:
            return self.trunk.encode_pictures(self.trunk.normalised(images)).flatten(1)
        except (AssertionError, ValueError) as error:
            raise refused_size(self, images, error) from error


def refused_size(backbone: Backbone, images: Tensor, error: Exception) -> UsageError:
    """Return the error to raise if ``backbone`` does not take pictures of the size of ``images`` (B, 3, H, W).

    ``error`` is the error of the network, whose first line is part of the message.
    """
    network = backbone.trunk.network if isinstance(backbone, EncoderBackbone) else backbone
    height, width = images.shape[-2:]
    reason = (str(error).splitlines() or [type(error).__name__])[0].removesuffix(".")
    return UsageError(
        f"image_size: a {type(network).__name__} does not take pictures of {height} x {width} pixels: {reason}. "
        "Give the image_size that it was made for, or take another backbone."
    )


def build_backbone(name: str, weights: Path | None = None, size: int = 224, *, pretrained: bool = True) -> Backbone:
    """Build the backbone ``name`` with given, installed or random weights (drawn from torch's random state).

    Args:
        name: a name in ``BACKBONES``, or the name of a detector with a network on single frames.
        weights: a file of torch or safetensors with the network's ``state_dict``; for a detector also a folder, as for
            ``model_weights``. None: see ``pretrained``.
        size: side of the pictures in pixels, for networks that are made for a fixed size.
        pretrained: whether to load weights that are installed with the detector if ``weights`` is None. If False, or if
            none are installed, weights are random.

    Raises:
        UsageError: the name is unknown, a package is missing or does not work, the weights cannot be read or do not
            fit, or the detector's network does not take single frames.
    """
    spec = None if BACKBONES.is_own(name) else DETECTORS.get(BACKBONES.check(name))
    licence = (spec and spec.weights_licence) or "unknown"
    options = TrunkOptions(name, 1, size, weights, licence, pretrained=pretrained)
    try:
        if spec is None:
            backbone: Backbone = BACKBONES.get(name)(options)
            return backbone
        trunk = spec.build_trunk(options) if spec.build_trunk else None
    except UsageError as error:  # its message names the parameter of the video tasks
        raise UsageError(str(error).replace("model_weights", "backbone_weights")) from error
    if not isinstance(trunk, PictureTrunk):
        raise UsageError(
            f"backbone {name!r}: it is no published network on single frames. Take {', '.join(BACKBONES.names())}, "
            "efficientnet_lite0, clip_vit_b16, dinov2_small or timm:NAME."
        )
    return EncoderBackbone(trunk)


def _of_torchvision(options: TrunkOptions) -> EncoderBackbone:
    models, name = imported("torchvision.models", options.name), options.name.partition(":")[2]
    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"backbone {options.name!r}: torchvision has no such model.{did_you_mean(name, known)}")
    return of_classifier(models.get_model(name, weights=None), options)


BACKBONES.register(_of_torchvision, "torchvision:NAME")


def of_classifier(network: Any, options: TrunkOptions) -> EncoderBackbone:
    """Turn a classifier of torchvision into a backbone that returns the pooled features, and load its weights.

    From networks with ``features`` and ``classifier`` (efficientnet, mobilenet, densenet) the whole classifier is
    removed, hidden layers too. From networks with ``layer1`` to ``layer4`` and ``fc`` (resnet) ``fc`` is removed.

    Raises:
        UsageError: the network is built in another way, or the weights do not fit.
    """
    top = "fc" if hasattr(network, "layer4") else "classifier"
    blocks = [getattr(network, f"layer{number}") for number in (1, 2, 3, 4)] if top == "fc" else network.features
    linear = next((part for part in getattr(network, top).modules() if isinstance(part, nn.Linear)), None)
    if linear is None:
        raise UsageError(
            f"backbone {options.name!r}: it is built in a way that is not known here. Known are networks of 'features' "
            "and 'classifier' or of 'layer1' to 'layer4' and 'fc', such as efficientnet_b0, mobilenet_v3_small and "
            "resnet50; or take timm:NAME."
        )
    setattr(network, top, nn.Identity())
    loaded = load_weights(network, options.weights, licence=options.licence) if options.weights else None
    trunk = PictureTrunk(
        network, linear.in_features, mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION, recomputable=tuple(blocks),
        weights=loaded,
    )  # fmt: skip
    return EncoderBackbone(trunk)


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
        """Return the backbone's parts whose activations gradient checkpointing computes again."""
        return self.backbone.recomputable_blocks()

    def forward(self, images: Tensor) -> Outputs:
        """Return ``class_logits`` float (B, C) and ``values`` float (B, T) for images uint8 (B, 3, H, W).

        ``values`` are predictions of the scaled targets. The tensor of a head that does not exist has no columns.
        """
        features = self.backbone(images)
        none = features.new_zeros(len(features), 0)
        return {
            "class_logits": none if self.class_head is None else self.class_head(features),
            "values": none if self.target_head is None else self.target_head(features),
        }

    def train_stages(self, num_trained: int) -> None:
        """Freeze all stages of the backbone but the last ``num_trained``; only the latter and the heads are trained."""
        stages = self.backbone.stages()
        for number, stage in enumerate(stages):
            for parameter in stage:
                parameter.requires_grad_(number >= len(stages) - num_trained)


def _head(num_features: int, num_outputs: int) -> nn.Linear | None:
    return nn.Linear(num_features, num_outputs) if num_outputs else None
