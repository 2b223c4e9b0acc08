"""Video transformers of the transformers package: TimeSformer, VideoMAE, ViViT and V-JEPA 2.

Weights are read from a folder that ``save_pretrained`` wrote; its ``config.json`` states the size of the network.
Features are the input of the class layer, which is removed.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fvc_lib.detectors.network import IMAGENET_DEVIATION, IMAGENET_MEAN, Trunk
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.transformers_folders import blocks_of, colours_of, from_folder, note_of_another_network, quiet
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions


@dataclass(frozen=True)
class _Kind:
    """A family of networks: the names of its classes and settings in the transformers package, and its colours.

    ``colours`` are mean and standard deviation of red, green and blue in the publisher's training data, as fractions of
    white.
    """

    model: str
    config: str
    side: str  # name of the setting for the side in pixels
    frames: str  # name of the setting for the number of frames
    pixels: str = "pixel_values"  # name of the argument of ``forward``
    colours: tuple[tuple[float, float, float], tuple[float, float, float]] = (IMAGENET_MEAN, IMAGENET_DEVIATION)


_GREY = ((0.45, 0.45, 0.45), (0.225, 0.225, 0.225))
# ViViT's processor scales pixels to [-1, 1], then subtracts 0.5 and divides by 0.5.
_OF_VIVIT = ((0.75, 0.75, 0.75), (0.25, 0.25, 0.25))
_KINDS = {
    "timesformer": _Kind(
        "TimesformerForVideoClassification", "TimesformerConfig", "image_size", "num_frames", colours=_GREY
    ),
    "videomae": _Kind("VideoMAEForVideoClassification", "VideoMAEConfig", "image_size", "num_frames"),
    "vivit": _Kind("VivitForVideoClassification", "VivitConfig", "image_size", "num_frames", colours=_OF_VIVIT),
    "vjepa2": _Kind(
        "VJEPA2ForVideoClassification", "VJEPA2Config", "crop_size", "frames_per_clip", pixels="pixel_values_videos"
    ),
}

_BIBTEX = {
    "timesformer": r"""@inproceedings{bertasius2021spacetime,
  author = {Bertasius, Gedas and Wang, Heng and Torresani, Lorenzo},
  title = {Is Space-Time Attention All You Need for Video Understanding?},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning (ICML)},
  pages = {813--824},
  year = {2021}
}""",
    "videomae": r"""@inproceedings{tong2022videomae,
  author = {Tong, Zhan and Song, Yibing and Wang, Jue and Wang, Limin},
  title = {{VideoMAE}: Masked Autoencoders are Data-Efficient Learners for Self-Supervised Video Pre-Training},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  volume = {35},
  year = {2022}
}""",
    "vivit": r"""@inproceedings{arnab2021vivit,
  author = {Arnab, Anurag and Dehghani, Mostafa and Heigold, Georg and Sun, Chen and Lu{\v{c}}i{\'c}, Mario and
    Schmid, Cordelia},
  title = {{ViViT}: A Video Vision Transformer},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  pages = {6836--6846},
  year = {2021}
}""",
    "vjepa2": r"""@misc{assran2025vjepa2,
  author = {Assran, Mahmoud and Bardes, Adrien and Fan, David and Garrido, Quentin and Howes, Russell and others},
  title = {{V-JEPA} 2: Self-Supervised Video Models Enable Understanding, Prediction and Planning},
  eprint = {2506.09985},
  archiveprefix = {arXiv},
  year = {2025}
}""",
}


class TransformersTrunk(Trunk):
    """A network for video classification whose class layer is replaced by the identity, so that it returns features.

    Args:
        network: the network of the transformers package.
        num_features: F, number of features of a clip.
        pixels: name of the argument by which ``network`` takes the clip.
        options: further arguments of ``Trunk``.
    """

    def __init__(self, network: nn.Module, num_features: int, *, pixels: str, **options: Any) -> None:
        super().__init__(network, num_features, **options)
        self._pixels = pixels

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, F) of normalised clips, float (B, T, 3, H, W)."""
        return self.network(**{self._pixels: clips}).logits


def _build(options: TrunkOptions) -> TransformersTrunk:
    kind = _KINDS[options.name]
    transformers = imported("transformers", options.name)
    sized = {kind.side: options.side, kind.frames: options.num_frames}
    loaded, (mean, deviation) = None, kind.colours
    with quiet(transformers):
        if options.weights is None:
            network = getattr(transformers, kind.model)(getattr(transformers, kind.config)(**sized))
        else:
            network, loaded = from_folder(
                transformers, kind.model, options.weights, sized, licence=options.licence, class_layer="classifier."
            )
            mean, deviation = colours_of(options.weights, kind.colours)
    num_features = network.classifier.in_features
    network.classifier = nn.Identity()
    blocks = blocks_of(network)
    trunk = TransformersTrunk(
        network, num_features, pixels=kind.pixels, mean=mean, deviation=deviation, recomputable=blocks, weights=loaded
    )
    trunk.notes += note_of_another_network(network.config, getattr(transformers, kind.config)(), options.name)
    return trunk


# By name: paper, frames, side, weights on the hub, their licence, sampling and fit of the frames.
_PUBLISHED = {
    "timesformer": (
        "Bertasius et al., Is space-time attention all you need for video understanding?, ICML 2021", 8, 224,
        "facebook/timesformer-base-finetuned-k400", "CC BY-NC 4.0", "window:32", "crop",
    ),
    "videomae": (
        "Tong et al., VideoMAE: masked autoencoders are data-efficient learners, NeurIPS 2022", 16, 224,
        "MCG-NJU/videomae-base-finetuned-kinetics", "CC BY-NC 4.0", "window:4", "crop",
    ),
    "vivit": (
        "Arnab et al., ViViT: a video vision transformer, ICCV 2021", 32, 224,
        "google/vivit-b-16x2-kinetics400", "MIT", "window:2", "crop:0.875",
    ),
    "vjepa2": (
        "Assran et al., V-JEPA 2: self-supervised video models enable understanding, prediction and planning, 2025",
        16, 256, "facebook/vjepa2-vitl-fpc16-256-ssv2", "MIT", "window:4", "crop:0.875",
    ),
}  # fmt: skip
for _name, (_paper, _num_frames, _side, _hub_id, _licence, _sampling, _fit) in _PUBLISHED.items():
    _mean, _deviation = _KINDS[_name].colours
    DETECTORS.register(
        DetectorSpec(
            name=_name,
            family="transformers",
            paper=_paper,
            bibtex=_BIBTEX[_name],
            licence="Apache-2.0",
            num_frames=_num_frames,
            side=_side,
            normalisation=f"the folder's preprocessor_config.json; without it mean {_mean}, deviation {_deviation}",
            micro_batch=1,
            frame_sampling=_sampling,
            frame_fit=_fit,
            build_trunk=_build,
            weights=f"hub: {_hub_id}",
            weights_licence=_licence,
            packages=("transformers",),
        )
    )
