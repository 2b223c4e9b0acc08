"""Any network of timm as an encoder of frames: ``timm:NAME``, and some by names of their own, such as ``xception``."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fvc_lib.detectors.network import IMAGENET_DEVIATION, IMAGENET_MEAN, PictureTrunk
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import LoadedWeights, fitted, read_weights
from fvc_lib.services.atomic_files import content_digest
from fvc_lib.services.errors import UsageError, did_you_mean
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_BIBTEX = r"""@misc{wightman2019timm,
  author = {Wightman, Ross},
  title = {{PyTorch} Image Models},
  howpublished = {\url{https://github.com/huggingface/pytorch-image-models}},
  year = {2019}
}"""


# By the name that detectors use for a network: timm's name, and the paper.
_OWN_NAMES = {
    "xception": (
        "legacy_xception", "Chollet, Xception: deep learning with depthwise separable convolutions, CVPR 2017"
    ),
    "efficientnet_b4": (
        "efficientnet_b4",
        "Tan and Le, EfficientNet: rethinking model scaling for convolutional neural networks, ICML 2019",
    ),
    "siglip2_base": ("vit_base_patch16_siglip_224.v2_webli", "Tschannen et al., SigLIP 2, arXiv 2502.14786, 2025"),
    "pe_core_base": ("vit_pe_core_base_patch16_224.fb", "Bolya et al., Perception Encoder, arXiv 2504.13181, 2025"),
    # Its weights were trained with the fast GELU, so the features of the other variant in timm are not the published.
    "metaclip2_huge": (
        "vit_huge_patch14_clip_quickgelu_224.metaclip2_worldwide",
        "Chuang et al., MetaCLIP 2: A worldwide scaling recipe, arXiv 2507.22062, 2025",
    ),
}  # fmt: skip


def _name_in_timm(name: str) -> str:
    return name.partition(":")[2] or _OWN_NAMES[name][0]


def _build(options: TrunkOptions) -> PictureTrunk:
    timm = imported("timm", options.name)
    name = _name_in_timm(options.name)
    declared = timm.get_pretrained_cfg(name)
    # A network that takes one picture size alone is built for the size that is asked for.
    is_resized = declared and declared.fixed_input_size and declared.input_size[-1] != options.side
    sized = {"img_size": options.side} if is_resized else {}
    network = timm.create_model(name, pretrained=False, num_classes=0, **sized)
    loaded: LoadedWeights | None = None
    notes: tuple[str, ...] = ()
    if options.weights is not None:
        loaded, notes = _load(network, options.weights, options.licence, imported("timm.layers", options.name))
    published = network.pretrained_cfg or {}
    trunk = PictureTrunk(
        network,
        num_features_of(network, options.side),
        mean=published.get("mean", IMAGENET_MEAN),
        deviation=published.get("std", IMAGENET_DEVIATION),
        recomputable=blocks_of(network),
        weights=loaded,
    )
    trunk.notes += notes
    return trunk


def _load(network: Any, path: Path, licence: str, layers: Any) -> tuple[LoadedWeights, tuple[str, ...]]:
    """Load the weights of ``path`` into ``network``, and return a tuple: their origin, and notes.

    The notes are one sentence if position embeddings were resampled, else they are empty.

    The position embeddings of a vision transformer belong to one picture size. For another size they are resampled as
    by timm's ``checkpoint_filter_fn``: bicubic, with antialiasing. Embeddings of the class token and the registers are
    not changed.
    """
    found = dict(read_weights(path))
    notes: tuple[str, ...] = ()
    saved, own = found.get("pos_embed"), getattr(network, "pos_embed", None)
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    prefix = 0 if getattr(network, "no_embed_class", False) else getattr(network, "num_prefix_tokens", 1)
    if saved is not None and own is not None and grid and saved.dim() == 3 and saved.shape[1] != own.shape[1]:
        side = math.isqrt(max(0, saved.shape[1] - prefix))
        if side and side**2 == saved.shape[1] - prefix:
            found["pos_embed"] = layers.resample_abs_pos_embed(saved, new_size=list(grid), num_prefix_tokens=prefix)
            notes = (f"positions resampled from {side} x {side} to {grid[0]} x {grid[1]}, as timm does",)
    network.load_state_dict(fitted(network, found, path))
    left_out = tuple(name for name in found if name not in network.state_dict())
    return LoadedWeights(str(path), content_digest(path), licence, left_out), notes


def num_features_of(network: Any, side: int) -> int:
    """Return the number of features of a network made with ``num_classes=0``.

    It is measured on one picture of ``side`` x ``side`` pixels. The attribute ``num_features`` would be wrong for
    networks with a hidden layer before the class layer (mobilenetv3). On the meta device nothing can be computed, and
    the network's attributes are used.
    """
    if next(network.parameters()).is_meta:
        return int(getattr(network, "head_hidden_size", None) or network.num_features)
    mode = network.training
    network.eval()
    with torch.inference_mode():
        features = network(torch.zeros(1, 3, side, side))
    network.train(mode)
    return int(features.flatten(1).shape[1])


def blocks_of(network: Any) -> tuple[nn.Module, ...]:
    """Return the modules in ``blocks``, ``stages`` or ``layers`` of the network, or its ``layer1`` to ``layer4``.

    The result is empty if the network is built in another way.
    """
    for name in ("blocks", "stages", "layers"):
        parts = getattr(network, name, None)
        if isinstance(parts, nn.Sequential | nn.ModuleList):
            return tuple(parts)
    layers = [getattr(network, f"layer{number}", None) for number in (1, 2, 3, 4)]
    return tuple(layer for layer in layers if isinstance(layer, nn.Module))


@cache
def _declared(name: str) -> DetectorSpec:
    """Return the ``DetectorSpec`` (input size, licence and so on) of ``name``, such as ``timm:resnet50``.

    Its values are taken from timm's configuration of the network.

    Raises:
        UsageError: timm is missing or has no such network.
    """
    timm = imported("timm", name)
    model = _name_in_timm(name)
    if not timm.is_model(model):
        raise UsageError(f"model {name!r}: timm has no such network.{did_you_mean(model, timm.list_models())}")
    published = timm.get_pretrained_cfg(model)
    mean = published.mean if published else IMAGENET_MEAN
    deviation = published.std if published else IMAGENET_DEVIATION
    share = published.crop_pct if published else 1.0
    return DetectorSpec(
        name=name,
        family="timm",
        paper=_OWN_NAMES.get(name, ("", ""))[1]
        or (published and published.paper_name)
        or "as timm's documentation says",
        bibtex=_BIBTEX,
        licence="Apache-2.0",
        num_frames=8,
        side=published.input_size[-1] if published else 224,
        normalisation=f"mean {tuple(mean)}, deviation {tuple(deviation)}, of fractions of white",
        micro_batch=2,
        frame_fit=f"crop:{share}" if share < 1 else "crop",
        build_trunk=_build,
        weights=(published and (f"hub: {published.hf_hub_id}" if published.hf_hub_id else published.url)) or "",
        weights_licence=(published and published.license) or "",
        packages=("timm", "torchvision"),
    )


def _by_timm(name: str, paper: str) -> DetectorSpec:
    return DetectorSpec(
        name=name,
        family="timm",
        paper=paper,
        bibtex=_BIBTEX,
        licence="Apache-2.0",
        num_frames=8,
        side=224,
        normalisation="timm's, for each network",
        micro_batch=2,
        frame_fit="crop",
        packages=("timm", "torchvision"),
        of_name=_declared,
    )


DETECTORS.register(
    _by_timm(name="timm:NAME", paper="Wightman, PyTorch image models, 2019, and the paper of each network")
)
for _name, (_, _paper) in _OWN_NAMES.items():
    DETECTORS.register(_by_timm(_name, _paper))
