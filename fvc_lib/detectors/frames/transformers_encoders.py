"""Encoders of pictures from the transformers package: CLIP, X-CLIP, DINOv2, DINOv3 and SigLIP.

They see frame by frame, except X-CLIP, in which eight neighbouring frames exchange messages.

Weights are read from a folder that ``save_pretrained`` wrote; its ``config.json`` states the size of the network.
Without such a folder the network has the published size and random weights.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fvc_lib.detectors.network import IMAGENET_DEVIATION, IMAGENET_MEAN, PictureTrunk
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.transformers_folders import blocks_of, colours_of, from_folder, note_of_another_network, quiet
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_OF_IMAGENET = (IMAGENET_MEAN, IMAGENET_DEVIATION)
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CLIP = "Radford et al., Learning transferable visual models from natural language supervision, ICML 2021"
_XCLIP = "Ni et al., Expanding language-image pretrained models for general video recognition, ECCV 2022"
_DINO2 = "Oquab et al., DINOv2: learning robust visual features without supervision, TMLR 2024"
_DINO3 = "Simeoni et al., DINOv3, 2025"
_SIGLIP = "Zhai et al., Sigmoid loss for language image pre-training, ICCV 2023"

_BIBTEX = {
    _CLIP: r"""@inproceedings{radford2021clip,
  author = {Radford, Alec and Kim, Jong Wook and Hallacy, Chris and Ramesh, Aditya and Goh, Gabriel and
    Agarwal, Sandhini and Sastry, Girish and Askell, Amanda and Mishkin, Pamela and Clark, Jack and
    Krueger, Gretchen and Sutskever, Ilya},
  title = {Learning Transferable Visual Models From Natural Language Supervision},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning (ICML)},
  pages = {8748--8763},
  year = {2021}
}""",
    _XCLIP: r"""@inproceedings{ni2022xclip,
  author = {Ni, Bolin and Peng, Houwen and Chen, Minghao and Zhang, Songyang and others},
  title = {Expanding Language-Image Pretrained Models for General Video Recognition},
  booktitle = {Proceedings of the European Conference on Computer Vision (ECCV)},
  year = {2022}
}""",
    _DINO2: r"""@article{oquab2024dinov2,
  author = {Oquab, Maxime and Darcet, Timoth{\'e}e and Moutakanni, Th{\'e}o and Vo, Huy V. and others},
  title = {{DINOv2}: Learning Robust Visual Features without Supervision},
  journal = {Transactions on Machine Learning Research},
  year = {2024}
}""",
    _DINO3: r"""@misc{simeoni2025dinov3,
  author = {Sim{\'e}oni, Oriane and Vo, Huy V. and Seitzer, Maximilian and Baldassarre, Federico and others},
  title = {{DINOv3}},
  eprint = {2508.10104},
  archiveprefix = {arXiv},
  year = {2025}
}""",
    _SIGLIP: r"""@inproceedings{zhai2023siglip,
  author = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  title = {Sigmoid Loss for Language Image Pre-Training},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  pages = {11975--11986},
  year = {2023}
}""",
}
_GEND = "Yermakov et al., GenD: Deepfake detection that generalizes across benchmarks, WACV 2026"
_BIBTEX_OF_GEND = r"""@inproceedings{yermakov2026gend,
  author = {Yermakov, Andrii and Cech, Jan and Matas, Jiri and Fritz, Mario},
  title = {Deepfake Detection that Generalizes Across Benchmarks},
  booktitle = {Proceedings of the IEEE/CVF Winter Conference on Applications of Computer Vision (WACV)},
  note = {arXiv:2508.06248},
  year = {2026}
}"""


@dataclass(frozen=True)
class _Kind:
    """What all encoders of a family share.

    Attributes:
        model: name of the network's class in the transformers package.
        config: name of the configuration's class.
        colours: mean and standard deviation of red, green and blue, as fractions of white.
        paper: citation.
        weights_licence: licence of the published weights.
        fit: how frames are made square (``View.fit``).
    """

    model: str
    config: str
    colours: tuple[tuple[float, float, float], tuple[float, float, float]]
    paper: str
    weights_licence: str
    # How frames are made square: as published for CLIP and DINOv2. DINOv3 and SigLIP were published with squashed ones.
    fit: str = "letterbox"


_CLIP_KIND = _Kind("CLIPVisionModel", "CLIPVisionConfig", _CLIP_COLOURS, _CLIP, "MIT", "crop")
_XCLIP_KIND = _Kind("XCLIPVisionModel", "XCLIPVisionConfig", _OF_IMAGENET, _XCLIP, "MIT", "crop")
_DINO2_KIND = _Kind("Dinov2Model", "Dinov2Config", _OF_IMAGENET, _DINO2, "Apache-2.0", "crop:0.875")
_DINO3_KIND = _Kind("DINOv3ViTModel", "DINOv3ViTConfig", _OF_IMAGENET, _DINO3, "DINOv3 License, gated: ask on the hub")
_SIGLIP_KIND = _Kind("SiglipVisionModel", "SiglipVisionConfig", _HALF, _SIGLIP, "Apache-2.0")
_SMALL = {"hidden_size": 384, "num_attention_heads": 6}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
# By name: the family, the hub's name of its weights, and its settings as published.
_NETWORKS: dict[str, tuple[_Kind, str, dict[str, Any]]] = {
    "clip_vit_b16": (_CLIP_KIND, "openai/clip-vit-base-patch16", {"patch_size": 16}),
    "clip_vit_b32": (_CLIP_KIND, "openai/clip-vit-base-patch32", {"patch_size": 32}),
    "clip_vit_l14": (
        _CLIP_KIND, "openai/clip-vit-large-patch14", {**_LARGE, "patch_size": 14, "intermediate_size": 4096}
    ),
    "xclip_b16": (_XCLIP_KIND, "microsoft/xclip-base-patch16", {"patch_size": 16}),
    "dinov2_small": (_DINO2_KIND, "facebook/dinov2-small", {**_SMALL, "patch_size": 14}),
    "dinov2_base": (_DINO2_KIND, "facebook/dinov2-base", {"patch_size": 14}),
    "dinov2_large": (_DINO2_KIND, "facebook/dinov2-large", {**_LARGE, "patch_size": 14}),
    "dinov3_small": (
        _DINO3_KIND, "facebook/dinov3-vits16-pretrain-lvd1689m", {"num_register_tokens": 4, "key_bias": False}
    ),
    "dinov3_base": (
        _DINO3_KIND, "facebook/dinov3-vitb16-pretrain-lvd1689m",
        {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_register_tokens": 4},
    ),
    "dinov3_large": (
        _DINO3_KIND, "facebook/dinov3-vitl16-pretrain-lvd1689m",
        {**_LARGE, "intermediate_size": 4096, "num_register_tokens": 4},
    ),
    "siglip_base": (_SIGLIP_KIND, "google/siglip-base-patch16-224", {"patch_size": 16}),
}  # fmt: skip


class TransformersFrames(PictureTrunk):
    """A trunk (network without head) whose features of a frame are the pooled output of an encoder in transformers."""

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Return features (N, F) of normalised pictures, float (N, 3, H, W)."""
        return self.network(pixel_values=pictures).pooler_output


def build_encoder(options: TrunkOptions, name: str = "") -> TransformersFrames:
    """Build an encoder with the weights in ``options``, or with random ones if none are given.

    Args:
        options: side of the pictures, weights and their licence.
        name: a key of ``_NETWORKS``; empty: ``options.name``.

    Raises:
        UsageError: the package is missing, or the weights do not fit.
    """
    kind, _, settings = _NETWORKS[name or options.name]
    transformers = imported("transformers", options.name)
    loaded, colours = None, kind.colours
    with quiet(transformers):
        if options.weights is None:
            config = getattr(transformers, kind.config)(**settings, image_size=options.side)
            network = getattr(transformers, kind.model)(config)
        else:
            network, loaded = from_folder(transformers, kind.model, options.weights, {}, licence=options.licence)
            colours = colours_of(options.weights, kind.colours)
    size = int(network.config.hidden_size)
    trunk = TransformersFrames(
        network, size, mean=colours[0], deviation=colours[1], recomputable=blocks_of(network), weights=loaded
    )
    published = getattr(transformers, kind.config)(**settings)
    trunk.notes += note_of_another_network(network.config, published, name or options.name)
    return trunk


def declaration(name: str, of: str, **changed: Any) -> DetectorSpec:
    """Return the ``DetectorSpec`` (input size, licence and so on) of a detector that uses a published encoder.

    Args:
        name: name of the detector.
        of: name of the encoder, a key of ``_NETWORKS``.
        changed: fields of ``DetectorSpec`` that replace those of the encoder.
    """
    kind, hub_id, _ = _NETWORKS[of]
    mean, deviation = kind.colours
    declared: dict[str, Any] = {
        "name": name,
        "family": "transformers",
        "paper": kind.paper,
        "bibtex": _BIBTEX[kind.paper],
        "licence": "Apache-2.0",
        "num_frames": 8,
        "side": 224,
        "normalisation": f"the folder's preprocessor_config.json; without it mean {mean}, deviation {deviation}",
        "micro_batch": 2,
        "frame_fit": kind.fit,
        "build_trunk": lambda options: build_encoder(options, of),
        "weights": f"hub: {hub_id}",
        "weights_licence": kind.weights_licence,
        "packages": ("transformers",),
        "tune": "head",
    }
    return DetectorSpec(**{**declared, **changed})


for _name in _NETWORKS:
    DETECTORS.register(declaration(_name, _name))

# Published detectors that consist of these encoders and a way to train them.
DETECTORS.register(
    declaration(
        "gend",
        "clip_vit_l14",
        paper=_GEND,
        bibtex=_BIBTEX_OF_GEND + "\n" + _BIBTEX[_CLIP],
        tune="norms",
        l2_normalise=True,
    )
)
DETECTORS.register(
    declaration(
        "effort",
        "clip_vit_l14",
        paper="Yan et al., Orthogonal subspace decomposition for generalizable AI-generated image detection, ICML 2025",
        tune="effort",
    )
)
DETECTORS.register(
    declaration(
        "gend_dino",
        "dinov3_base",
        paper=_GEND,
        bibtex=_BIBTEX_OF_GEND + "\n" + _BIBTEX[_DINO3],
        tune="norms",
        l2_normalise=True,
    )
)
