"""``r2plus1d_small``: a small R(2+1)D network whose input is forensic maps in place of pixels.

The maps show noise residuals, frame differences and colours; ``stems.py`` computes them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.detectors.own.stems import FORENSIC, GROUPS, PIXELS, R2PLUS1D_BIBTEX, ConvNorm, Stem
from fvc_lib.services.registry import DETECTORS, DetectorSpec


class R2Plus1dTrunk(nn.Module):
    """A small R(2+1)D without head: every 3-D convolution is split into a spatial and a temporal convolution.

    After Tran et al., "A closer look at spatiotemporal convolutions for action recognition" (CVPR 2018), with group
    norm and far fewer channels. A frame's features also depend on its neighbours.

    Args:
        stem: computes the input maps from a clip.
    """

    def __init__(self, stem: Stem = FORENSIC) -> None:
        super().__init__()
        self._stem = stem
        self.layers = nn.Sequential(
            ConvNorm(stem.num_channels, 16, (1, 3, 3)),
            ConvNorm(16, 16, (3, 1, 1)),
            _Residual2Plus1d(16, 16, 1),
            _Residual2Plus1d(16, 32, 2),
            _Residual2Plus1d(32, 64, 2),
        )
        self.frame_feature_size = 2 * 64

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the parts whose activations gradient checkpointing computes again instead of storing them."""
        return tuple(self.layers)

    def frame_features(self, frames: Tensor) -> Tensor:
        """Return the features of every frame, float (B, T, 128), of frames uint8 (B, T, 3, H, W).

        They are the mean and the maximum over space of the last feature maps, which have 64 channels.
        """
        features = self._features(frames)
        return torch.cat([features.mean((3, 4)), features.amax((3, 4))], dim=1).transpose(1, 2)

    def _features(self, frames: Tensor) -> Tensor:
        """Return the last feature maps, float (B, C, T, h, w), of frames uint8 (B, T, 3, H, W)."""
        return self.layers(self._stem.clip_by_clip(frames))


class R2Plus1d(R2Plus1dTrunk):
    """R(2+1)D on forensic maps in place of pixels, pooled over space and time at once.

    Trained on the pixels of fifty clips, the network learned their scenes and did not generalise: on the sample corpus
    the AUC was below 0.4, instead of 0.95 with forensic maps.
    """

    def __init__(self, stem: Stem = FORENSIC) -> None:
        super().__init__(stem)
        self.head = nn.Linear(self.frame_feature_size, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Return logits float (B,), positive for fake, of frames uint8 (B, T, 3, H, W)."""
        features = self._features(frames)
        pooled = torch.cat([features.mean((2, 3, 4)), features.amax((2, 3, 4))], dim=1)
        return self.head(pooled).squeeze(1)


class _Residual2Plus1d(nn.Module):
    """A residual block: a spatial convolution, then a temporal one, and a shortcut.

    The shortcut is a convolution of kernel size 1 if the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.spatial = ConvNorm(inputs, outputs, (1, 3, 3), (1, stride, stride))
        self.temporal = nn.Conv3d(outputs, outputs, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm = nn.GroupNorm(GROUPS, outputs)
        self.shortcut = (
            nn.Conv3d(inputs, outputs, 1, (1, stride, stride), bias=False)
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.norm(self.temporal(self.spatial(features))) + self.shortcut(features))


DETECTORS.register(
    DetectorSpec(
        name="r2plus1d_small",
        family="own",
        paper="Tran et al., A closer look at spatiotemporal convolutions for action recognition, CVPR 2018",
        bibtex=R2PLUS1D_BIBTEX,
        licence="this project's",
        num_frames=6,
        side=112,
        normalisation="none: forensic maps of uint8 pixels",
        micro_batch=4,
        build=R2Plus1d,
        build_trunk=lambda _: R2Plus1dTrunk(PIXELS),
    )
)
