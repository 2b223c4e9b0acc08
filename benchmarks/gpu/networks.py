"""Networks with the layers of published ones and random weights: speed does not depend on what these are."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def pixels_of(frames: Tensor) -> Tensor:
    """Float (B, 3, T, H, W) around zero, of uint8 (B, T, 3, H, W)."""
    return frames.float().div(127.5).sub(1).transpose(1, 2)


class Block(nn.Module):
    """A transformer's, pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        parts = self.qkv(self.norm1(tokens)).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, count, width)
        tokens = tokens + self.project(seen)
        return tokens + self.narrow(F.gelu(self.wide(self.norm2(tokens))))


class VideoMaeBase(nn.Module):
    """ViT-B on tubes of 2 x 16 x 16 pixels (Tong et al., "VideoMAE", NeurIPS 2022), mean of tokens, one logit."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.embed = nn.Conv3d(3, width, (2, 16, 16), (2, 16, 16))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, frames: Tensor) -> Tensor:
        tokens = self.embed(pixels_of(frames)).flatten(2).transpose(1, 2)
        places = torch.linspace(-1, 1, tokens.shape[1], device=tokens.device)[None, :, None]
        return self.head(self.norm(self.blocks(tokens + places).mean(1))).squeeze(1)


def _pair(inputs: int, outputs: int, middle: int, stride: int) -> nn.Sequential:
    """A 3-D convolution as one in space and one in time."""
    return nn.Sequential(
        nn.Conv3d(inputs, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
        nn.BatchNorm3d(middle),
        nn.ReLU(inplace=True),
        nn.Conv3d(middle, outputs, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False),
        nn.BatchNorm3d(outputs),
    )


class Residual(nn.Module):
    """Two such pairs beside a way around."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        middle = inputs * outputs * 27 // (inputs * 9 + 3 * outputs)
        self.first, self.second = _pair(inputs, outputs, middle, stride), _pair(outputs, outputs, middle, 1)
        around = nn.Conv3d(inputs, outputs, 1, stride, bias=False)
        self.around = nn.Identity() if inputs == outputs else nn.Sequential(around, nn.BatchNorm3d(outputs))

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(features))) + self.around(features))


class R2Plus1d18(nn.Module):
    """R(2+1)D-18 (Tran et al., CVPR 2018), with batch norms frozen as the project trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(45), nn.ReLU(inplace=True),
            nn.Conv3d(45, 64, (3, 1, 1), 1, (1, 0, 0), bias=False), nn.BatchNorm3d(64), nn.ReLU(inplace=True),
        )  # fmt: skip
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.Sequential(*(Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths)))
        self.head = nn.Linear(512, 1)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixels_of(frames))).mean((2, 3, 4))).squeeze(1)

    def train(self, mode: bool = True) -> R2Plus1d18:
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm3d):
                part.eval()
        return self


NETWORKS: dict[str, type[nn.Module]] = {"videomae-base": VideoMaeBase, "r2plus1d_18": R2Plus1d18}
