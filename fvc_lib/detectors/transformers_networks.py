"""Networks of the transformers package: encoders of pictures, and video transformers.

CLIP, DINOv2, DINOv3 and SigLIP process every frame alone. In X-CLIP eight neighbouring frames exchange information.
TimeSformer, VideoMAE, ViViT and V-JEPA 2 process whole clips. Their class layer is removed; its inputs are the
features.

Weights are read from a folder that ``save_pretrained`` wrote; its ``config.json`` states the size of the network.
Without such a folder the network has the published size and random weights. Nothing is downloaded, and no code in a
folder is run.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import GREY, IMAGENET, Colours, PictureTrunk, Trunk
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import LoadedWeights, problems_of, refuse_nan
from fvc_lib.engine.oom_detection import first_line
from fvc_lib.services.atomic_files import content_digest, read_json_object
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# ViViT's processor scales pixels to [-1, 1], then subtracts 0.5 and divides by 0.5.
_OF_VIVIT = ((0.75, 0.75, 0.75), (0.25, 0.25, 0.25))

# Papers and their BibTeX entries, by the entry's key.
_PAPERS = {
    "radford2021clip": (
        "Radford et al., Learning transferable visual models from natural language supervision, ICML 2021",
        r"""@inproceedings{radford2021clip,
  author = {Radford, Alec and Kim, Jong Wook and Hallacy, Chris and Ramesh, Aditya and Goh, Gabriel and
    Agarwal, Sandhini and Sastry, Girish and Askell, Amanda and Mishkin, Pamela and Clark, Jack and
    Krueger, Gretchen and Sutskever, Ilya},
  title = {Learning Transferable Visual Models From Natural Language Supervision},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning (ICML)},
  pages = {8748--8763},
  year = {2021}
}""",
    ),
    "ni2022xclip": (
        "Ni et al., Expanding language-image pretrained models for general video recognition, ECCV 2022",
        r"""@inproceedings{ni2022xclip,
  author = {Ni, Bolin and Peng, Houwen and Chen, Minghao and Zhang, Songyang and others},
  title = {Expanding Language-Image Pretrained Models for General Video Recognition},
  booktitle = {Proceedings of the European Conference on Computer Vision (ECCV)},
  year = {2022}
}""",
    ),
    "oquab2024dinov2": (
        "Oquab et al., DINOv2: learning robust visual features without supervision, TMLR 2024",
        r"""@article{oquab2024dinov2,
  author = {Oquab, Maxime and Darcet, Timoth{\'e}e and Moutakanni, Th{\'e}o and Vo, Huy V. and others},
  title = {{DINOv2}: Learning Robust Visual Features without Supervision},
  journal = {Transactions on Machine Learning Research},
  year = {2024}
}""",
    ),
    "simeoni2025dinov3": (
        "Simeoni et al., DINOv3, 2025",
        r"""@misc{simeoni2025dinov3,
  author = {Sim{\'e}oni, Oriane and Vo, Huy V. and Seitzer, Maximilian and Baldassarre, Federico and others},
  title = {{DINOv3}},
  eprint = {2508.10104},
  archiveprefix = {arXiv},
  year = {2025}
}""",
    ),
    "zhai2023siglip": (
        "Zhai et al., Sigmoid loss for language image pre-training, ICCV 2023",
        r"""@inproceedings{zhai2023siglip,
  author = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  title = {Sigmoid Loss for Language Image Pre-Training},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  pages = {11975--11986},
  year = {2023}
}""",
    ),
    "bertasius2021spacetime": (
        "Bertasius et al., Is space-time attention all you need for video understanding?, ICML 2021",
        r"""@inproceedings{bertasius2021spacetime,
  author = {Bertasius, Gedas and Wang, Heng and Torresani, Lorenzo},
  title = {Is Space-Time Attention All You Need for Video Understanding?},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning (ICML)},
  pages = {813--824},
  year = {2021}
}""",
    ),
    "tong2022videomae": (
        "Tong et al., VideoMAE: masked autoencoders are data-efficient learners, NeurIPS 2022",
        r"""@inproceedings{tong2022videomae,
  author = {Tong, Zhan and Song, Yibing and Wang, Jue and Wang, Limin},
  title = {{VideoMAE}: Masked Autoencoders are Data-Efficient Learners for Self-Supervised Video Pre-Training},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  volume = {35},
  year = {2022}
}""",
    ),
    "arnab2021vivit": (
        "Arnab et al., ViViT: a video vision transformer, ICCV 2021",
        r"""@inproceedings{arnab2021vivit,
  author = {Arnab, Anurag and Dehghani, Mostafa and Heigold, Georg and Sun, Chen and Lu{\v{c}}i{\'c}, Mario and
    Schmid, Cordelia},
  title = {{ViViT}: A Video Vision Transformer},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  pages = {6836--6846},
  year = {2021}
}""",
    ),
    "assran2025vjepa2": (
        "Assran et al., V-JEPA 2: self-supervised video models enable understanding, prediction and planning, 2025",
        r"""@misc{assran2025vjepa2,
  author = {Assran, Mahmoud and Bardes, Adrien and Fan, David and Garrido, Quentin and Howes, Russell and others},
  title = {{V-JEPA} 2: Self-Supervised Video Models Enable Understanding, Prediction and Planning},
  eprint = {2506.09985},
  archiveprefix = {arXiv},
  year = {2025}
}""",
    ),
    "yermakov2026gend": (
        "Yermakov et al., GenD: Deepfake detection that generalizes across benchmarks, WACV 2026",
        r"""@inproceedings{yermakov2026gend,
  author = {Yermakov, Andrii and Cech, Jan and Matas, Jiri and Fritz, Mario},
  title = {Deepfake Detection that Generalizes Across Benchmarks},
  booktitle = {Proceedings of the IEEE/CVF Winter Conference on Applications of Computer Vision (WACV)},
  note = {arXiv:2508.06248},
  year = {2026}
}""",
    ),
}


_OF_PICTURES, _OF_CLIPS = ("image_size",), ("image_size", "num_frames")
# By family: the network's class in transformers; mean and standard deviation of colours in the publisher's training
# data; key of the paper; licence of the weights; how frames are made square and chosen (``View``); frames and side of a
# clip; the configuration's settings for the side and the number of frames. Frames are fitted as published for CLIP and
# DINOv2; DINOv3 and SigLIP were published with squashed frames.
_FAMILIES: dict[str, tuple[Any, ...]] = {
    "clip": ("CLIPVisionModel", _CLIP_COLOURS, "radford2021clip", "MIT", "crop", "uniform", 8, 224, _OF_PICTURES),
    "xclip": ("XCLIPVisionModel", IMAGENET, "ni2022xclip", "MIT", "crop", "uniform", 8, 224, _OF_PICTURES),
    "dinov2": ("Dinov2Model", IMAGENET, "oquab2024dinov2", "Apache-2.0", "crop:0.875", "uniform", 8, 224, _OF_PICTURES),
    "dinov3": (
        "DINOv3ViTModel", IMAGENET, "simeoni2025dinov3", "DINOv3 License, gated: ask on the hub", "letterbox",
        "uniform", 8, 224, _OF_PICTURES,
    ),
    "siglip": (
        "SiglipVisionModel", _HALF, "zhai2023siglip", "Apache-2.0", "letterbox", "uniform", 8, 224, _OF_PICTURES
    ),
    "timesformer": (
        "TimesformerForVideoClassification", GREY, "bertasius2021spacetime", "CC BY-NC 4.0", "crop", "window:32", 8,
        224, _OF_CLIPS,
    ),
    "videomae": (
        "VideoMAEForVideoClassification", IMAGENET, "tong2022videomae", "CC BY-NC 4.0", "crop", "window:4", 16, 224,
        _OF_CLIPS,
    ),
    "vivit": (
        "VivitForVideoClassification", _OF_VIVIT, "arnab2021vivit", "MIT", "crop:0.875", "window:2", 32, 224, _OF_CLIPS
    ),
    "vjepa2": (
        "VJEPA2ForVideoClassification", IMAGENET, "assran2025vjepa2", "MIT", "crop:0.875", "window:4", 16, 256,
        ("crop_size", "frames_per_clip"),
    ),
}  # fmt: skip
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
# By name: the family, the hub's name of its weights, and its settings as published.
_NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip_vit_b16": ("clip", "openai/clip-vit-base-patch16", {"patch_size": 16}),
    "clip_vit_b32": ("clip", "openai/clip-vit-base-patch32", {"patch_size": 32}),
    "clip_vit_l14": (
        "clip", "openai/clip-vit-large-patch14", {**_LARGE, "patch_size": 14, "intermediate_size": 4096}
    ),
    "xclip_b16": ("xclip", "microsoft/xclip-base-patch16", {"patch_size": 16}),
    "dinov2_small": (
        "dinov2", "facebook/dinov2-small", {"hidden_size": 384, "num_attention_heads": 6, "patch_size": 14}
    ),
    "dinov2_base": ("dinov2", "facebook/dinov2-base", {"patch_size": 14}),
    "dinov2_large": ("dinov2", "facebook/dinov2-large", {**_LARGE, "patch_size": 14}),
    "dinov3_small": (
        "dinov3", "facebook/dinov3-vits16-pretrain-lvd1689m", {"num_register_tokens": 4, "key_bias": False}
    ),
    "dinov3_base": (
        "dinov3", "facebook/dinov3-vitb16-pretrain-lvd1689m",
        {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_register_tokens": 4},
    ),
    "dinov3_large": (
        "dinov3", "facebook/dinov3-vitl16-pretrain-lvd1689m",
        {**_LARGE, "intermediate_size": 4096, "num_register_tokens": 4},
    ),
    "siglip_base": ("siglip", "google/siglip-base-patch16-224", {"patch_size": 16}),
    "timesformer": ("timesformer", "facebook/timesformer-base-finetuned-k400", {}),
    "videomae": ("videomae", "MCG-NJU/videomae-base-finetuned-kinetics", {}),
    "vivit": ("vivit", "google/vivit-b-16x2-kinetics400", {}),
    "vjepa2": ("vjepa2", "facebook/vjepa2-vitl-fpc16-256-ssv2", {}),
}  # fmt: skip


class TransformersFrames(PictureTrunk):
    """A trunk (network without head) whose features of a frame are the pooled output of an encoder in transformers."""

    def encode_pictures(self, pictures: Tensor) -> Tensor:
        """Return features (N, F) of normalised pictures, float (N, 3, H, W)."""
        return self.network(pixel_values=pictures).pooler_output


class TransformersClips(Trunk):
    """A network for video classification whose class layer is replaced by the identity, so that it returns features."""

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, F) of normalised clips, float (B, T, 3, H, W)."""
        return self.network(clips).logits


def build_network(options: TrunkOptions, name: str) -> Trunk:
    """Build a network with the weights in ``options``, or with random ones if none are given.

    Args:
        options: sizes of a clip, weights and their licence.
        name: a key of ``_NETWORKS``.

    Raises:
        UsageError: the package is missing, or the weights do not fit.
    """
    family, _, settings = _NETWORKS[name]
    class_name, colours, *_, size_names = _FAMILIES[family]
    model = getattr(imported("transformers", options.name), class_name)
    sizes = dict(zip(size_names, (options.side, options.num_frames), strict=False))
    sees_clips = size_names != _OF_PICTURES
    loaded: LoadedWeights | None = None
    if options.weights is None:
        network = model(model.config_class(**settings, **sizes))
    else:
        network, loaded = from_folder(model, options.weights, sizes if sees_clips else {}, options.licence)
        colours = colours_of(options.weights, colours)
    lists = [part for part in network.modules() if isinstance(part, nn.ModuleList)]
    largest = max(lists, key=lambda part: sum(parameter.numel() for parameter in part.parameters()))
    num_features = network.classifier.in_features if sees_clips else network.config.hidden_size
    if sees_clips:
        network.classifier = nn.Identity()
    kind_of_trunk = TransformersClips if sees_clips else TransformersFrames
    built: Trunk = kind_of_trunk(network, num_features, colours=colours, recomputable=tuple(largest), weights=loaded)
    built.notes += note_of_another_network(network.config, model.config_class(**settings), name)
    return built


def from_folder(model: Any, folder: Path, settings: dict[str, Any], licence: str) -> tuple[Any, LoadedWeights]:
    """Load a network of the transformers package from ``folder``; return (network, origin of its weights).

    The weights of the publisher's class layer, ``classifier``, may be missing or of another shape.

    Args:
        model: the network's class in the package.
        folder: folder with ``config.json`` and weights, as ``save_pretrained`` writes them.
        settings: fields of the configuration that replace those of the folder, such as the number of frames.
        licence: licence of the weights, for the record.

    Raises:
        UsageError: the folder does not exist or holds another kind of network, or weights are missing, of another shape
            or NaN.
    """
    document = read_json_object(folder / "config.json")
    wanted = model.config_class.model_type
    kinds = (document, document.get("vision_config", {}))
    if wanted not in [kind.get("model_type") for kind in kinds]:
        raise UsageError(
            f"model_weights {str(folder)!r}: got a network of type {document.get('model_type')!r}, wanted {wanted!r} "
            "in the folder of a transformers model, with config.json and weights. Give that folder, or another model."
        )
    try:
        config = model.config_class.from_pretrained(folder, **settings)
        network, loading = model.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False, output_loading_info=True,
            dtype=torch.float32, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = first_line(error)
        raise UsageError(f"model_weights {str(folder)!r}: no weights that can be read: {reason}.") from error
    found = {"not in it": loading["missing_keys"], "of another shape": [one[0] for one in loading["mismatched_keys"]]}
    found = {
        kind: sorted(name for name in names if not name.startswith("classifier.")) for kind, names in found.items()
    }
    if problems := problems_of(found):
        raise UsageError(
            f"model_weights {str(folder)!r} does not fit a {model.__name__}: {problems}. They would be random: give "
            "the folder of a whole network of this kind, and num_frames and fixed_size as it was made for."
        )
    refuse_nan(network.state_dict(), "model_weights", folder)
    return network, LoadedWeights(str(folder), content_digest(folder), licence)


def colours_of(folder: Path, otherwise: Colours) -> Colours:
    """Return the colour statistics by which the network in ``folder`` normalises pixels.

    They are read from ``preprocessor_config.json`` or ``video_preprocessor_config.json``; without either, ``otherwise``
    is returned. Some processors (ViViT's) scale pixels to [-1, 1] before they normalise; both steps are combined.

    Returns:
        A tuple (mean, standard deviation), each of red, green and blue as fractions of white.
    """
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        document = read_json_object(folder / name)
        if document.get("image_mean") and document.get("image_std"):
            scale = 255 * float(document.get("rescale_factor", 1 / 255))
            shift = 1.0 if document.get("offset") else 0.0
            red, green, blue = ((mean + shift) / scale for mean in document["image_mean"])
            wide = [deviation / scale for deviation in document["image_std"]]
            return (red, green, blue), (wide[0], wide[1], wide[2])
    return otherwise


# Settings in which the networks of a family differ.
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "mlp_ratio", "patch_size",
    "tubelet_size", "attention_type", "num_register_tokens", "key_bias",
)  # fmt: skip


def note_of_another_network(found: Any, published: Any, name: str) -> tuple[str, ...]:
    """Return a note (a tuple of one sentence) if the size of a folder's network differs from the published network.

    The tuple is empty if all compared settings are equal.

    Args:
        found: configuration (of the transformers package) in the folder.
        published: configuration of the published network.
        name: name of the detector.
    """
    pairs = [(key, getattr(found, key, None), getattr(published, key, None)) for key in _SIZES]
    other = [f"{key} {got!r}" for key, got, want in pairs if json.dumps(got) != json.dumps(want)]
    return (f"the folder's network is not that of {name}: {', '.join(other)}",) if other else ()


def declaration(name: str, of: str, **changed: Any) -> DetectorSpec:
    """Return the ``DetectorSpec`` (input size, licence and so on) of a detector that uses a published network.

    Args:
        name: name of the detector.
        of: name of the network, a key of ``_NETWORKS``.
        changed: fields of ``DetectorSpec`` that replace those of the network.
    """
    family, hub_id, _ = _NETWORKS[of]
    _, (mean, deviation), key, licence, fit, sampling, num_frames, side, size_names = _FAMILIES[family]
    paper, bibtex = _PAPERS[key]
    spec = DetectorSpec(
        name=name,
        family="transformers",
        paper=paper,
        bibtex=bibtex,
        licence="Apache-2.0",
        num_frames=num_frames,
        side=side,
        normalisation=f"the folder's preprocessor_config.json; without it mean {mean}, deviation {deviation}",
        micro_batch=2 if size_names == _OF_PICTURES else 1,
        frame_sampling=sampling,
        frame_fit=fit,
        build_trunk=lambda options: build_network(options, of),
        weights=f"hub: {hub_id}",
        weights_licence=licence,
        packages=("transformers",),
        tune="head" if size_names == _OF_PICTURES else "all",
    )
    return replace(spec, **changed)


for _name in _NETWORKS:
    DETECTORS.register(declaration(_name, _name))

# Published detectors that consist of these encoders and a way to train them.
_gend, _bibtex = _PAPERS["yermakov2026gend"]
DETECTORS.register(
    declaration(
        "gend",
        "clip_vit_l14",
        paper=_gend,
        bibtex=_bibtex + "\n" + _PAPERS["radford2021clip"][1],
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
        paper=_gend,
        bibtex=_bibtex + "\n" + _PAPERS["simeoni2025dinov3"][1],
        tune="norms",
        l2_normalise=True,
    )
)
