"""``torchvision:NAME``: torchvision's classifiers without their class layer. The package is imported on use."""

from __future__ import annotations

from typing import Any

from torch import nn

from fvc_lib.detectors.frames.backbone import AdaptedBackbone, outside_package
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import BACKBONES

_KNOWN_TO_WORK = ("efficientnet_b0", "efficientnet_b3", "resnet50", "mobilenet_v3_large", "mobilenet_v3_small")


@BACKBONES.register("torchvision:NAME")
def _build(name: str) -> AdaptedBackbone:
    models = outside_package("torchvision", "torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"backbone 'torchvision:{name}': torchvision has no such model.{did_you_mean(name, known)}")
    return adapt_torchvision(models.get_model(name, weights=None), name)


def adapt_torchvision(network: Any, name: str) -> AdaptedBackbone:
    """One of torchvision's classifiers as a backbone: the pooled features that its class layer is given.

    Networks of ``features`` and ``classifier`` (efficientnet, mobilenet, densenet) lose the whole classifier, hidden
    layers too; networks of ``layer1`` to ``layer4`` and ``fc`` (resnet) lose ``fc``.

    Raises:
        UsageError: it is built in neither of these ways.
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
        f"and 'classifier' or of 'layer1' to 'layer4' and 'fc', such as {', '.join(_KNOWN_TO_WORK)}; or take "
        "timm:NAME."
    )
