"""``frame_cnn``: a small CNN on forensic maps of every frame, pooled over space and then over time.

The maps show noise residuals, frame differences and colours; ``stems.py`` computes them.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from fvc_lib.detectors.own.stems import FORENSIC, PIXELS, ConvNorm, Stem
from fvc_lib.services.registry import DETECTORS, DetectorSpec


class FrameTrunk(nn.Module):
    """A CNN whose convolutions are over space only, without head.

    Its group norms use statistics over all frames of a clip, so that a frame that differs from the others stays
    different.

    Args:
        widths: number of output channels of each convolution; at least two. The first and the third convolution halve
            the sides of the maps.
        stem: computes the input maps from a clip.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 32), stem: Stem = FORENSIC) -> None:
        super().__init__()
        self._stem = stem
        self.first = ConvNorm(stem.num_channels, widths[0], (1, 3, 3), (1, 2, 2))
        self.second = ConvNorm(widths[0], widths[1], (1, 3, 3))
        pairs = pairwise(widths[1:])
        strides = (2, *[1] * len(widths))
        blocks = [ConvNorm(a, b, (1, 3, 3), (1, s, s)) for (a, b), s in zip(pairs, strides, strict=False)]
        self.further = nn.Sequential(*blocks)
        self.frame_feature_size = 3 * widths[-1]

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        """Return the parts whose activations gradient checkpointing computes again instead of storing them."""
        return self.first, self.second, *self.further

    def frame_features(self, frames: Tensor) -> Tensor:
        """Return the features of every frame, float (B, T, 3 * widths[-1]), of frames uint8 (B, T, 3, H, W)."""
        return self._pooled_frames(frames).transpose(1, 2)

    def _pooled_frames(self, frames: Tensor) -> Tensor:
        """Return the features of every frame, float (B, F, T): mean, maximum and standard deviation over space.

        The maximum and the deviation are used because manipulations are local.
        """
        features = self.further(self.second(self.first(self._stem.clip_by_clip(frames))))
        deviation = (features.var((3, 4), correction=0) + 1e-4).sqrt()
        return torch.cat([features.mean((3, 4)), features.amax((3, 4)), deviation], dim=1)


_BIBTEX = r"""@article{fridrich2012rich,
  author = {Fridrich, Jessica and Kodovsk{\'y}, Jan},
  title = {Rich Models for Steganalysis of Digital Images},
  journal = {IEEE Transactions on Information Forensics and Security},
  volume = {7},
  number = {3},
  pages = {868--882},
  year = {2012}
}"""


class FrameCnn(FrameTrunk):
    """A CNN on maps of noise residuals, frame differences and colours, pooled over space and then over time.

    Features are the mean, maximum and minimum over time. The maximum shows the jump at a splice, the minimum shows the
    missing motion of a frozen frame.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 32), stem: Stem = FORENSIC) -> None:
        super().__init__(widths, stem)
        self.head = nn.Linear(3 * self.frame_feature_size, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Return logits float (B,), positive for fake, of frames uint8 (B, T, 3, H, W)."""
        features = self._pooled_frames(frames)
        over_time = torch.cat([features.mean(2), features.amax(2), features.amin(2)], dim=1)
        return self.head(over_time).squeeze(1)


DETECTORS.register(
    DetectorSpec(
        name="frame_cnn",
        family="own",
        paper="none; its maps are after Fridrich and Kodovsky, Rich models for steganalysis, IEEE TIFS 2012",
        bibtex=_BIBTEX,
        licence="this project's",
        num_frames=6,
        side=112,
        normalisation="none: forensic maps of uint8 pixels",
        micro_batch=8,
        build=FrameCnn,
        # Deeper than the detector: an object covers up to a quarter of the picture, a trace of manipulation a few
        # cells.
        build_trunk=lambda _: FrameTrunk((32, 48, 64, 96), PIXELS),
    )
)
