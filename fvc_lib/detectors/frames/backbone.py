"""Backbones: networks that turn a picture into features, and a model that predicts classes and numbers from them.

Every detector with a network on single frames is also a backbone: ``timm:NAME``, ``efficientnet_lite0``,
``clip_vit_b16`` and others. Networks that are backbones only are registered in ``BACKBONES``:
``small_resnet``, and ``torchvision:NAME``, whose package is imported on use.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fvc_lib.detectors.network import (
    IMAGENET,
    PictureTrunk,
    blocks_of,
    built_trunk,
    load_once,
    recomputable_blocks_of,
    without_class_layer,
)
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
from fvc_lib.engine.task import Outputs
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import BACKBONES, DETECTORS, TrunkOptions


def build_backbone(name: str, weights: Path | None = None, size: int = 224, *, pretrained: bool = True) -> Any:
    """Build the backbone ``name`` with given, installed or random weights (drawn from torch's random state).

    A backbone turns pictures into features. It is a ``PictureTrunk``, or another module with the same methods
    ``forward``, ``stages`` and ``recomputable_blocks``.

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
    options = TrunkOptions(name, 1, size, weights, pretrained=pretrained)
    try:
        backbone = BACKBONES.get(name)(options) if spec is None else built_trunk(spec, options)
        load_once(backbone, weights, "unknown")
    except UsageError as error:  # its message names the parameter of the video tasks
        raise UsageError(str(error).replace("model_weights", "backbone_weights")) from error
    if not hasattr(backbone, "stages"):
        raise UsageError(
            f"backbone {name!r}: it is no published network on single frames. Take {', '.join(BACKBONES.names())}, "
            "efficientnet_lite0, clip_vit_b16, dinov2_small or timm:NAME."
        )
    return backbone


def _of_torchvision(options: TrunkOptions) -> PictureTrunk:
    models, name = imported("torchvision.models", options.name), options.name.partition(":")[2]
    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"backbone {options.name!r}: torchvision has no such model.{did_you_mean(name, known)}")
    return of_classifier(models.get_model(name, weights=None), options)


BACKBONES.register(_of_torchvision, "torchvision:NAME")


def of_classifier(network: nn.Module, options: TrunkOptions) -> PictureTrunk:
    """Turn a classifier of torchvision into a backbone that returns the pooled features, and load its weights.

    Raises:
        UsageError: no class layer is found in the network, or the weights do not fit.
    """
    size = without_class_layer(network)
    loaded = load_weights(network, options.weights, licence=options.licence)
    blocks = blocks_of(network, "features")
    return PictureTrunk(network, size, colours=IMAGENET, recomputable=blocks, weights=loaded)


class ImageModel(nn.Module):
    """A backbone with a class head, a regression head, or both.

    The regression head is linear. With a final ReLU, a picture whose output became negative would stay at zero, because
    its gradient is zero.

    Args:
        backbone: turns pictures into features; the result of ``build_backbone``.
        num_classes: C; 0: no class head.
        num_targets: T; 0: no regression head.
    """

    def __init__(self, backbone: Any, num_classes: int, num_targets: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.class_head = nn.Linear(backbone.frame_feature_size, num_classes) if num_classes else None
        self.target_head = nn.Linear(backbone.frame_feature_size, num_targets) if num_targets else None

    def recomputable_blocks(self) -> Sequence[nn.Module]:
        """Return the backbone's parts whose activations gradient checkpointing computes again."""
        return recomputable_blocks_of(self.backbone)

    def forward(self, images: Tensor) -> Outputs:
        """Return ``class_logits`` float (B, C) and ``values`` float (B, T) for images uint8 (B, 3, H, W).

        ``values`` are predictions of the scaled targets. The tensor of a head that does not exist has no columns.
        """
        features = self.backbone(images.unsqueeze(1)).flatten(1)
        none = features.new_zeros(len(features), 0)
        return {
            "class_logits": none if self.class_head is None else self.class_head(features),
            "values": none if self.target_head is None else self.target_head(features),
        }
