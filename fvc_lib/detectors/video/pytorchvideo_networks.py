"""Video networks of pytorchvideo: X3D, SlowFast, Slow and I3D, made for Kinetics-400.

The last release of the package is from 2022. Its transforms fail with newer versions of torchvision; the functions that
build networks work.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fvc_lib.detectors.network import Trunk
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.weights import load_weights
from fvc_lib.services.registry import DETECTORS, DetectorSpec, TrunkOptions

_MEAN, _DEVIATION = (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)
_X3D = "Feichtenhofer, X3D: expanding architectures for efficient video recognition, CVPR 2020"
_SLOWFAST = "Feichtenhofer et al., SlowFast networks for video recognition, ICCV 2019"
_I3D = "Carreira and Zisserman, Quo vadis, action recognition?, CVPR 2017"
_BIBTEX = {
    _X3D: r"""@inproceedings{feichtenhofer2020x3d,
  author = {Feichtenhofer, Christoph},
  title = {{X3D}: Expanding Architectures for Efficient Video Recognition},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {203--213},
  year = {2020}
}""",
    _SLOWFAST: r"""@inproceedings{feichtenhofer2019slowfast,
  author = {Feichtenhofer, Christoph and Fan, Haoqi and Malik, Jitendra and He, Kaiming},
  title = {{SlowFast} Networks for Video Recognition},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision (ICCV)},
  pages = {6202--6211},
  year = {2019}
}""",
    _I3D: r"""@inproceedings{carreira2017quo,
  author = {Carreira, Jo{\~a}o and Zisserman, Andrew},
  title = {Quo Vadis, Action Recognition? {A} New Model and the {Kinetics} Dataset},
  booktitle = {Proceedings of the IEEE Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages = {6299--6308},
  year = {2017}
}""",
}
# By name: paper, frames, side, clips in memory at once, stride between frames, and the crop of the resized picture.
# Frames x stride are from the model zoo's table: 4x12, 13x6, 16x5, 8x8, 8x8 (32x2 in the fast path), 8x8. The crop is
# the side divided by the hub's size of the resized picture, 182 or 256.
_NETWORKS = {
    "x3d_xs": (_X3D, 4, 160, 4, 12, "crop:0.879"),
    "x3d_s": (_X3D, 13, 160, 2, 6, "crop:0.879"),
    "x3d_m": (_X3D, 16, 224, 1, 5, "crop:0.875"),
    "slow_r50": (_SLOWFAST, 8, 224, 1, 8, "crop:0.875"),
    "slowfast_r50": (_SLOWFAST, 32, 224, 1, 2, "crop:0.875"),
    "i3d_r50": (_I3D, 8, 224, 1, 8, "crop:0.875"),
}
_SLOW_EVERY = 4  # the slow path sees every fourth frame of the fast one


class PytorchvideoTrunk(Trunk):
    """A network of pytorchvideo without class layer; features are the last block's means over time and space."""

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, F) of normalised clips, float (B, T, 3, H, W)."""
        features = clips.transpose(1, 2)
        for block in self.network.blocks:  # type: ignore[union-attr]
            features = block(features)
        return features.mean((2, 3, 4))


class SlowFastTrunk(PytorchvideoTrunk):
    """A SlowFast network, which takes all frames in its fast path and every fourth frame in its slow path."""

    def encode(self, clips: Tensor) -> Tensor:
        """Return features (B, F) of normalised clips, float (B, T, 3, H, W), T a multiple of 4."""
        fast = clips.transpose(1, 2)
        paths: Any = [fast[:, :, ::_SLOW_EVERY].contiguous(), fast]
        for block in self.network.blocks:  # type: ignore[union-attr]
            paths = block(paths)
        return paths.mean((2, 3, 4))


class _PooledPaths(nn.Module):
    """A layer that averages both paths over time and space, and concatenates the means to (B, F, 1, 1, 1)."""

    def forward(self, paths: list[Tensor]) -> Tensor:
        return torch.cat([path.mean((2, 3, 4), keepdim=True) for path in paths], dim=1)


def _build(options: TrunkOptions) -> PytorchvideoTrunk:
    network = getattr(imported("pytorchvideo.models.hub", options.name), options.name)(pretrained=False)
    num_features, blocks, slow_fast = without_class_layer(network)
    loaded = load_weights(network, options.weights, licence=options.licence) if options.weights else None
    kind = SlowFastTrunk if slow_fast else PytorchvideoTrunk
    return kind(network, num_features, mean=_MEAN, deviation=_DEVIATION, recomputable=blocks, weights=loaded)


def without_class_layer(network: Any) -> tuple[int, tuple[nn.Module, ...], bool]:
    """Remove the class layer of ``network`` in place.

    Returns:
        A tuple: the number of features, the blocks that gradient checkpointing can recompute, and whether the network
        has two paths (SlowFast).
    """
    for part in network.modules():
        if type(part).__name__ == "MultiPathWayWithFuse":
            part.inplace = False  # else a recomputed block would read its own output
        for name, child in part.named_children():
            if type(child).__name__ == "Swish":
                setattr(part, name, nn.SiLU())  # the same function; the package's relies on what torch has deprecated
    head = network.blocks[-1]
    num_features = int(head.proj.in_features)
    pooled: Any = getattr(head, "pool", None)
    if hasattr(pooled, "pre_conv"):  # X3D: two convolutions, with the pooling between them
        pooled.pool = nn.AdaptiveAvgPool3d(1)
        head.dropout = head.proj = head.activation = head.output_pool = None
        head.pool = pooled
    else:
        del network.blocks[-1]
    slow_fast = type(network.blocks[-1]).__name__ == "PoolConcatPathway"
    if slow_fast:
        network.blocks[-1] = _PooledPaths()
    return num_features, tuple(network.blocks)[1:5], slow_fast


for _name, (_paper, _num_frames, _side, _micro_batch, _stride, _fit) in _NETWORKS.items():
    DETECTORS.register(
        DetectorSpec(
            name=_name,
            family="pytorchvideo",
            paper=_paper,
            bibtex=_BIBTEX[_paper],
            licence="Apache-2.0",
            num_frames=_num_frames,
            side=_side,
            normalisation=f"mean {_MEAN}, deviation {_DEVIATION}, of fractions of white",
            micro_batch=_micro_batch,
            frame_sampling=f"window:{_stride}",
            frame_fit=_fit,
            build_trunk=_build,
            weights=f"facebookresearch/pytorchvideo's model zoo, {_name} for Kinetics-400, a .pyth file",
            weights_licence="Apache-2.0; trained on Kinetics-400 (CC BY 4.0 annotations)",
            packages=("pytorchvideo", "torchvision"),
        )
    )
