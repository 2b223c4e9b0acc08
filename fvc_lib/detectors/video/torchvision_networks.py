"""Video networks of torchvision: R3D, MC3, R(2+1)D, S3D, MViT v2 and Video Swin, made for Kinetics-400."""

from typing import Any

from torch import Tensor, nn

from fvc_lib.detectors.network import IMAGENET_DEVIATION, IMAGENET_MEAN, KINETICS_DEVIATION, KINETICS_MEAN, Trunk
from fvc_lib.detectors.own.stems import R2PLUS1D_BIBTEX
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_S3D = "Xie et al., Rethinking spatiotemporal feature learning, ECCV 2018"
_MVIT = "Li et al., MViTv2: improved multiscale vision transformers, CVPR 2022"
_SWIN = "Liu et al., Video Swin transformer, CVPR 2022"
_R3D = "Tran et al., A closer look at spatiotemporal convolutions for action recognition, CVPR 2018"
_BIBTEX = {
    _R3D: R2PLUS1D_BIBTEX,
    _S3D: r"""@inproceedings{xie2018rethinking,
  author = {Xie, Saining and Sun, Chen and Huang, Jonathan and Tu, Zhuowen and Murphy, Kevin},
  title = {Rethinking Spatiotemporal Feature Learning: Speed-Accuracy Trade-offs in Video Classification},
  booktitle = {Proceedings of the European Conference on Computer Vision (ECCV)},
  pages = {305--321},
  year = {2018}
}""",
    _MVIT: r"""@inproceedings{li2022mvitv2,
  author = {Li, Yanghao and Wu, Chao-Yuan and Fan, Haoqi and Mangalam, Karttikeya and Xiong, Bo and
    Malik, Jitendra and Feichtenhofer, Christoph},
  title = {{MViTv2}: Improved Multiscale Vision Transformers for Classification and Detection},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {4804--4814},
  year = {2022}
}""",
    _SWIN: r"""@inproceedings{liu2022videoswin,
  author = {Liu, Ze and Ning, Jia and Cao, Yue and Wei, Yixuan and Zhang, Zheng and Lin, Stephen and Hu, Han},
  title = {Video Swin Transformer},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {3202--3211},
  year = {2022}
}""",
}
_OF_KINETICS, _OF_IMAGENET = (KINETICS_MEAN, KINETICS_DEVIATION), (IMAGENET_MEAN, IMAGENET_DEVIATION)
_HALF = ((0.45, 0.45, 0.45), (0.225, 0.225, 0.225))
Colours = tuple[float, float, float]
# By name: paper, frames, side, mean and deviation of the published weights, clips in memory at once.
_NETWORKS: dict[str, tuple[str, int, int, Colours, Colours, int]] = {
    "r3d_18": (_R3D, 16, 112, *_OF_KINETICS, 2),
    "mc3_18": (_R3D, 16, 112, *_OF_KINETICS, 2),
    "r2plus1d_18": (_R3D, 16, 112, *_OF_KINETICS, 2),
    "s3d": (_S3D, 16, 224, *_OF_KINETICS, 1),
    "mvit_v2_s": (_MVIT, 16, 224, *_HALF, 1),
    "swin3d_t": (_SWIN, 16, 224, *_OF_IMAGENET, 1),
}


class TorchvisionTrunk(Trunk):
    """A network of torchvision whose class layer is removed; features are the input of that layer."""

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, F) of normalised clips, float (B, T, 3, H, W)."""
        return self.network(clips.transpose(1, 2))


def _build(options: TrunkOptions) -> TorchvisionTrunk:
    models = imported("torchvision.models.video", options.name)
    network, num_features, blocks = without_class_layer(getattr(models, options.name)(weights=None))
    loaded = load_weights(network, options.weights, licence=options.licence) if options.weights else None
    mean, deviation = _NETWORKS[options.name][3:5]
    return TorchvisionTrunk(network, num_features, mean=mean, deviation=deviation, recomputable=blocks, weights=loaded)


def without_class_layer(network: Any) -> tuple[nn.Module, int, tuple[nn.Module, ...]]:
    """Remove the class layer of ``network`` in place.

    Returns:
        A tuple: the network, its number of features, and the blocks that gradient checkpointing can recompute.
    """
    if hasattr(network, "fc"):
        size = network.fc.in_features
        network.fc = nn.Identity()
        return network, size, tuple(getattr(network, f"layer{number}") for number in (1, 2, 3, 4))
    if hasattr(network, "classifier"):  # s3d: pooling over space, a convolution for the classes, pooling over time
        size = network.classifier[-1].in_channels
        network.classifier = nn.Identity()
        network.avgpool = nn.AdaptiveAvgPool3d(1)
        return network, size, tuple(network.features)
    if isinstance(network.head, nn.Linear):
        size = network.head.in_features
        network.head = nn.Identity()
        return network, size, tuple(network.features)
    size = network.head[-1].in_features
    network.head = nn.Identity()
    return network, size, tuple(network.blocks)


for _name, (_paper, _num_frames, _side, _mean, _deviation, _micro_batch) in _NETWORKS.items():
    DETECTORS.register(
        DetectorSpec(
            name=_name,
            family="torchvision",
            paper=_paper,
            bibtex=_BIBTEX[_paper],
            licence="BSD-3-Clause",
            num_frames=_num_frames,
            side=_side,
            normalisation=f"mean {_mean}, deviation {_deviation}, of fractions of white",
            micro_batch=_micro_batch,
            # The publisher's stride; torchvision's 15 frames per second are every second frame of Kinetics' 25 to 30.
            frame_sampling="window:4" if _name == "mvit_v2_s" else "window:2",
            frame_fit="crop:0.875",  # for all: resized to 128 or 256, then cropped
            build_trunk=_build,
            weights=f"torchvision.models.video.{_name}, weights KINETICS400_V1, a .pth file",
            weights_licence="BSD-3-Clause; trained on Kinetics-400 (CC BY 4.0 annotations)",
            packages=("torchvision",),
        )
    )
