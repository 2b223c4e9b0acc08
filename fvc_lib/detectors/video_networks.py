"""Video networks of torchvision and pytorchvideo that were made for Kinetics-400.

From torchvision: R3D, MC3, R(2+1)D, S3D, MViT v2 and Video Swin. From pytorchvideo: X3D, SlowFast, Slow and I3D. The
last release of pytorchvideo is from 2022. Its transforms fail with newer versions of torchvision; the functions that
build networks work.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import (
    GREY,
    IMAGENET,
    KINETICS,
    Colours,
    Trunk,
    blocks_of,
    without_class_layer,
)
from fvc_lib.detectors.own.stems import R2PLUS1D_BIBTEX
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

# Papers and their BibTeX entries, by the entry's key.
_PAPERS = {
    "tran2018closer": (
        "Tran et al., A closer look at spatiotemporal convolutions for action recognition, CVPR 2018",
        R2PLUS1D_BIBTEX,
    ),
    "xie2018rethinking": (
        "Xie et al., Rethinking spatiotemporal feature learning, ECCV 2018",
        r"""@inproceedings{xie2018rethinking,
  author = {Xie, Saining and Sun, Chen and Huang, Jonathan and Tu, Zhuowen and Murphy, Kevin},
  title = {Rethinking Spatiotemporal Feature Learning: Speed-Accuracy Trade-offs in Video Classification},
  booktitle = {Proceedings of the European Conference on Computer Vision (ECCV)},
  pages = {305--321},
  year = {2018}
}""",
    ),
    "li2022mvitv2": (
        "Li et al., MViTv2: improved multiscale vision transformers, CVPR 2022",
        r"""@inproceedings{li2022mvitv2,
  author = {Li, Yanghao and Wu, Chao-Yuan and Fan, Haoqi and Mangalam, Karttikeya and Xiong, Bo and
    Malik, Jitendra and Feichtenhofer, Christoph},
  title = {{MViTv2}: Improved Multiscale Vision Transformers for Classification and Detection},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {4804--4814},
  year = {2022}
}""",
    ),
    "liu2022videoswin": (
        "Liu et al., Video Swin transformer, CVPR 2022",
        r"""@inproceedings{liu2022videoswin,
  author = {Liu, Ze and Ning, Jia and Cao, Yue and Wei, Yixuan and Zhang, Zheng and Lin, Stephen and Hu, Han},
  title = {Video Swin Transformer},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {3202--3211},
  year = {2022}
}""",
    ),
    "feichtenhofer2020x3d": (
        "Feichtenhofer, X3D: expanding architectures for efficient video recognition, CVPR 2020",
        r"""@inproceedings{feichtenhofer2020x3d,
  author = {Feichtenhofer, Christoph},
  title = {{X3D}: Expanding Architectures for Efficient Video Recognition},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {203--213},
  year = {2020}
}""",
    ),
    "feichtenhofer2019slowfast": (
        "Feichtenhofer et al., SlowFast networks for video recognition, ICCV 2019",
        r"""@inproceedings{feichtenhofer2019slowfast,
  author = {Feichtenhofer, Christoph and Fan, Haoqi and Malik, Jitendra and He, Kaiming},
  title = {{SlowFast} Networks for Video Recognition},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  pages = {6202--6211},
  year = {2019}
}""",
    ),
    "carreira2017quo": (
        "Carreira and Zisserman, Quo vadis, action recognition?, CVPR 2017",
        r"""@inproceedings{carreira2017quo,
  author = {Carreira, Jo{\~a}o and Zisserman, Andrew},
  title = {Quo Vadis, Action Recognition? {A} New Model and the {Kinetics} Dataset},
  booktitle = {Proceedings of the IEEE Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {6299--6308},
  year = {2017}
}""",
    ),
}
# By name: package, key of the paper, frames, side, mean and deviation of colours, clips in memory at once, stride
# between frames, and the crop of the resized picture. torchvision's 15 frames per second are every second frame of
# Kinetics' 25 to 30; its pictures are resized to 128 or 256, then cropped. pytorchvideo's frames x stride are from its
# model zoo's table: 4x12, 13x6, 16x5, 8x8, 8x8 (32x2 in the fast path), 8x8; the hub resizes pictures to 182 or 256.
_NETWORKS: dict[str, tuple[str, str, int, int, Colours, int, int, str]] = {
    "r3d_18": ("torchvision", "tran2018closer", 16, 112, KINETICS, 2, 2, "crop:0.875"),
    "mc3_18": ("torchvision", "tran2018closer", 16, 112, KINETICS, 2, 2, "crop:0.875"),
    "r2plus1d_18": ("torchvision", "tran2018closer", 16, 112, KINETICS, 2, 2, "crop:0.875"),
    "s3d": ("torchvision", "xie2018rethinking", 16, 224, KINETICS, 1, 2, "crop:0.875"),
    "mvit_v2_s": ("torchvision", "li2022mvitv2", 16, 224, GREY, 1, 4, "crop:0.875"),
    "swin3d_t": ("torchvision", "liu2022videoswin", 16, 224, IMAGENET, 1, 2, "crop:0.875"),
    "x3d_xs": ("pytorchvideo", "feichtenhofer2020x3d", 4, 160, GREY, 4, 12, "crop:0.879"),
    "x3d_s": ("pytorchvideo", "feichtenhofer2020x3d", 13, 160, GREY, 2, 6, "crop:0.879"),
    "x3d_m": ("pytorchvideo", "feichtenhofer2020x3d", 16, 224, GREY, 1, 5, "crop:0.875"),
    "slow_r50": ("pytorchvideo", "feichtenhofer2019slowfast", 8, 224, GREY, 1, 8, "crop:0.875"),
    "slowfast_r50": ("pytorchvideo", "feichtenhofer2019slowfast", 32, 224, GREY, 1, 2, "crop:0.875"),
    "i3d_r50": ("pytorchvideo", "carreira2017quo", 8, 224, GREY, 1, 8, "crop:0.875"),
}


class VideoTrunk(Trunk):
    """A video network without class layer; features are the input of that layer."""

    slow_every = 0  # N: a slow path of the network takes every N-th frame (SlowFast); 0: there is no such path

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, F) of normalised clips, float (B, T, 3, H, W)."""
        fast = clips.transpose(1, 2)
        return self.network([fast[:, :, :: self.slow_every].contiguous(), fast] if self.slow_every else fast)


class _Pooled(nn.Module):
    """A layer that averages the features of every path over time and space, and concatenates the means to (B, F)."""

    def forward(self, features: Any) -> Tensor:
        paths = [features] if isinstance(features, Tensor) else features
        return torch.cat([path.mean((2, 3, 4)) for path in paths], dim=1)


def _build(options: TrunkOptions) -> VideoTrunk:
    name = options.name
    package, _, _, _, colours, *_ = _NETWORKS[name]
    if package == "torchvision":
        network = getattr(imported("torchvision.models.video", name), name)()
        num_features, blocks = torchvision_parts(network)
    else:
        network = getattr(imported("pytorchvideo.models.hub", name), name)()
        num_features, blocks = pytorchvideo_parts(network)
    loaded = load_weights(network, options.weights, licence=options.licence)
    trunk = VideoTrunk(network, num_features, colours=colours, recomputable=blocks, weights=loaded)
    trunk.slow_every = 4 if name.startswith("slowfast") else 0
    return trunk


def torchvision_parts(network: Any) -> tuple[int, tuple[nn.Module, ...]]:
    """Remove the class layer of ``network`` in place.

    Return the number of features, and the blocks whose activations may be recomputed in the backward pass.
    """
    if hasattr(network, "avgpool") and hasattr(network, "classifier"):  # s3d: its pooling expects one size of frames
        network.avgpool = nn.AdaptiveAvgPool3d(1)
    return without_class_layer(network), blocks_of(network, "blocks", "features")


def pytorchvideo_parts(network: Any) -> tuple[int, tuple[nn.Module, ...]]:
    """Replace the class layer of ``network`` by pooling, in place.

    Return the number of features, and the blocks whose activations may be recomputed in the backward pass.
    """
    for part in network.modules():
        if type(part).__name__ == "MultiPathWayWithFuse":
            part.inplace = False  # else a recomputed block would read its own output
        for name, child in part.named_children():
            if type(child).__name__ == "Swish":
                setattr(part, name, nn.SiLU())  # the same function; the package's relies on what torch has deprecated
    head = network.blocks[-1]
    num_features = int(head.proj.in_features)
    blocks = tuple(network.blocks)[1:5]
    if hasattr(getattr(head, "pool", None), "pre_conv"):  # X3D: two convolutions, with the pooling between them
        head.pool.pool = nn.AdaptiveAvgPool3d(1)
        head.dropout = head.proj = head.activation = head.output_pool = None
    else:
        del network.blocks[-1]
    if type(network.blocks[-1]).__name__ == "PoolConcatPathway":  # SlowFast
        del network.blocks[-1]
    network.blocks.append(_Pooled())
    return num_features, blocks


# By package: its licence, the origin of its weights, and the packages that it needs.
_PACKAGES = {
    "torchvision": (
        "BSD-3-Clause",
        "torchvision.models.video.{}, weights KINETICS400_V1, a .pth file",
        ("torchvision",),
    ),
    "pytorchvideo": (
        "Apache-2.0",
        "facebookresearch/pytorchvideo's model zoo, {} for Kinetics-400, a .pyth file",
        ("pytorchvideo", "torchvision"),
    ),
}
for _name, (_package, _key, _num_frames, _side, _colours, _micro_batch, _stride, _fit) in _NETWORKS.items():
    _paper, _bibtex = _PAPERS[_key]
    _licence, _weights, _packages = _PACKAGES[_package]
    DETECTORS.register(
        DetectorSpec(
            name=_name,
            family=_package,
            paper=_paper,
            bibtex=_bibtex,
            licence=_licence,
            num_frames=_num_frames,
            side=_side,
            normalisation=f"mean {_colours[0]}, deviation {_colours[1]}, of fractions of white",
            micro_batch=_micro_batch,
            frame_sampling=f"window:{_stride}",
            frame_fit=_fit,
            build_trunk=_build,
            weights=_weights.format(_name),
            weights_licence=f"{_licence}; trained on Kinetics-400 (CC BY 4.0 annotations)",
            packages=_packages,
        )
    )
