"""``timm:NAME``: any of timm's networks, as a backbone. The package is imported on use."""

from __future__ import annotations

from typing import Any

import torch

from fvc_lib.detectors.frames.backbone import IMAGENET_DEVIATION, IMAGENET_MEAN, AdaptedBackbone, outside_package
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import BACKBONES


@BACKBONES.register("timm:NAME")
def _build(name: str) -> AdaptedBackbone:
    timm = outside_package("timm", "timm")
    if not timm.is_model(name):
        raise UsageError(f"backbone 'timm:{name}': timm has no such model.{did_you_mean(name, timm.list_models())}")
    return adapt_timm(timm.create_model(name, pretrained=False, num_classes=0))


def adapt_timm(network: Any) -> AdaptedBackbone:
    """One of timm's networks, made with ``num_classes=0``, so that its output are pooled features.

    How many is measured: ``num_features`` leaves out the hidden layer that some (mobilenetv3) still have behind it.
    """
    norms = getattr(network, "pretrained_cfg", None) or {}
    network.eval()
    with torch.inference_mode():
        features = network(torch.zeros(1, *norms.get("input_size", (3, 224, 224))))
    mean, deviation = norms.get("mean", IMAGENET_MEAN), norms.get("std", IMAGENET_DEVIATION)
    return AdaptedBackbone(network, features.flatten(1).shape[1], mean=mean, deviation=deviation)
