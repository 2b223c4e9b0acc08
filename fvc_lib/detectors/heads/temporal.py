"""Heads over a clip's features: mean, attention, GRU, and statistics of the path of the features over time.

An encoder of frames gives features (B, T, F). For example, one clip of three frames with two features may have
``[[1, 0], [2, 1], [2, 3]]``. The mean is ``[5/3, 4/3]``. The first differences are ``[1, 1]`` and ``[0, 2]``, of length
1.41 and 2; between them the path turns by 45 degrees. A network on whole clips gives features (B, F),
which are used as (B, 1, F).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fvc_lib.services.errors import UsageError

_GRU_WIDTH = 256
_SMALL = 1e-8


class Mean(nn.Module):
    """A linear layer on the mean over the frames, optionally after layer norm over the features (``normalise``)."""

    def __init__(self, num_features: int, *, normalise: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features) if normalise else nn.Identity()
        self.linear = nn.Linear(num_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F)."""
        return self.linear(self.norm(features.mean(1))).squeeze(1)


class Attention(nn.Module):
    """A linear layer on the frames' mean, weighted by learned attention (M. Ilse et al., ICML 2018, without gate)."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features)
        self.weigh = nn.Linear(num_features, 1)
        self.linear = nn.Linear(num_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F)."""
        features = self.norm(features)
        weights = self.weigh(features).softmax(1)
        return self.linear((weights * features).sum(1)).squeeze(1)


class Gru(nn.Module):
    """A linear layer on the last state of a gated recurrent unit that reads the frames (K. Cho et al., EMNLP 2014)."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features)
        self.gru = nn.GRU(num_features, _GRU_WIDTH, batch_first=True)
        self.linear = nn.Linear(_GRU_WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F)."""
        _, last = self.gru(self.norm(features))
        return self.linear(last[-1]).squeeze(1)


class Path(nn.Module):
    """A linear layer on statistics of how the features move from frame to frame.

    The statistics are mean and standard deviation of every feature over the frames, its mean absolute first and second
    differences, and the eight numbers of ``path_statistics``.

    The angles follow ReStraV (C. Interno et al., "AI-generated video detection via perceptual straightening", 2025),
    the second differences D3 (C. Zheng et al., ICCV 2025).
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(num_features) for _ in range(4))
        self.linear = nn.Linear(4 * num_features + 8, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,) of features (B, T, F), T at least 3.

        Raises:
            UsageError: T is less than 3.
        """
        if features.shape[1] < 3:
            raise UsageError(
                f"head path: got features of {features.shape[1]} points in time, wanted 3 or more. Give num_frames 3 "
                "or more and a network on frames (efficientnet_lite0, clip_vit_b16, timm:NAME ...), or another head."
            )
        moved = features.diff(dim=1)
        turned = moved.diff(dim=1)
        statistics = (features.mean(1), _spread(features), moved.abs().mean(1), turned.abs().mean(1))
        normed = [norm(each) for norm, each in zip(self.norms, statistics, strict=True)]
        return self.linear(torch.cat([*normed, path_statistics(features)], dim=1)).squeeze(1)


def path_statistics(features: Tensor) -> Tensor:
    """Return statistics of the steps from frame to frame.

    Args:
        features: float (B, T, F), T at least 3.

    Returns:
        (B, 8): mean, standard deviation, minimum and maximum of the steps' lengths, then of the angles between
        successive steps. Lengths are relative to the mean length of a clip's feature vectors; angles are in radians.
    """
    moved = features.diff(dim=1)
    scale = features.norm(dim=2).mean(1, keepdim=True).clamp_min(_SMALL)
    lengths = (moved.square().sum(2) + _SMALL).sqrt() / scale
    cosines = F.cosine_similarity(moved[:, 1:], moved[:, :-1], dim=2, eps=_SMALL)
    angles = torch.acos(cosines.clamp(-1 + 1e-6, 1 - 1e-6))
    both = [torch.stack([each.mean(1), _spread(each), each.amin(1), each.amax(1)], dim=1) for each in (lengths, angles)]
    return torch.cat(both, dim=1)


def _spread(values: Tensor) -> Tensor:
    """Return the standard deviation along dimension 1; its gradient is finite at zero."""
    return (values.var(1, correction=0) + _SMALL).sqrt()


HEADS: dict[str, Callable[[int], nn.Module]] = {"mean": Mean, "attention": Attention, "gru": Gru, "path": Path}
