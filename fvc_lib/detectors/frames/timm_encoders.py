"""Detectors that compute features of every frame with a network of timm.

The detector ``timm:NAME`` uses timm's network NAME. Some networks also have a name of their own, such as ``xception``.
"""

import sys
from dataclasses import replace
from functools import cache

from fvc_lib.detectors.network import PictureTrunk, blocks_of
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
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
    is_resized = declared.fixed_input_size and declared.input_size[-1] != options.side
    sized = {"img_size": options.side} if is_resized else {}
    network = timm.create_model(name, pretrained=False, num_classes=0, **sized)
    # timm's own function for files of the network's publisher; it also resamples positions for another picture size.
    adapt = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", lambda found, _network: found)
    loaded = load_weights(network, options.weights, licence=options.licence, adapt=lambda found: adapt(found, network))
    return PictureTrunk(
        network,
        network.head_hidden_size,
        colours=(declared.mean, declared.std),
        recomputable=blocks_of(network, "blocks", "stages", "layers"),
        weights=loaded,
    )


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
    return replace(
        _SPEC,
        name=name,
        paper=_OWN_NAMES.get(name, ("", ""))[1] or published.paper_name or "as timm's documentation says",
        side=published.input_size[-1],
        normalisation=f"mean {tuple(published.mean)}, deviation {tuple(published.std)}, of fractions of white",
        frame_fit=f"crop:{published.crop_pct}" if published.crop_pct < 1 else "crop",
        build_trunk=_build,
        weights=f"hub: {published.hf_hub_id}" if published.hf_hub_id else published.url or "",
        weights_licence=published.license or "",
        of_name=None,
    )


_SPEC = DetectorSpec(
    name="timm:NAME",
    family="timm",
    paper="Wightman, PyTorch image models, 2019, and the paper of each network",
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
DETECTORS.register(_SPEC)
for _name, (_, _paper) in _OWN_NAMES.items():
    DETECTORS.register(replace(_SPEC, name=_name, paper=_paper))
