"""Occlusion maps point at the tile that a network reads; a map without meaning is hidden."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fvc_lib.command_line.verdicts.pages import page_parts
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.predicting import Trained
from fvc_lib.tasks.shared_training import TrainedClass
from fvc_lib.tasks.video.verdicts.evidence import FileEvidence, occlusion_map
from fvc_lib.tasks.video.verdicts.scoring import FoldNetwork, Networks

FRAMES, SIDE, TILE = 4, 32, slice(8, 12)


class Handmade(Networks):
    """Networks that no training made."""

    def __init__(self, *made: nn.Module, batch_size: int = 16) -> None:
        config = resolve_config({"model": "frame_cnn", "batch_size": batch_size, "device": "cpu"}, environ={})
        none = Trained("", config, Path(), "", TrainedClass("", "", "", 0), "")
        folds = {fold: FoldNetwork(none, 0.0, 1.0) for fold in range(len(made))}
        super().__init__("handmade", config, folds)
        self.made, self.largest, self.passes = made, 0, 0

    def network(self, fold: int) -> nn.Module:
        return self.made[fold].eval()

    def raw_logits(self, network, clips, inputs=None):
        self.largest, self.passes = max(self.largest, len(clips)), self.passes + len(clips)
        return super().raw_logits(network, clips, inputs)


class ReadsOneTile(nn.Module):
    """Says fake where one tile is rough."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Parameter(torch.zeros(SIDE, SIDE))
        with torch.no_grad():
            self.where[TILE, TILE] = 1

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        grey = frames.float().mean(2) / 255
        return 30 * ((grey - torch.roll(grey, 1, 3)) ** 2 * self.where).sum((2, 3)).mean(1)


class ReadsNothing(ReadsOneTile):
    """Gives all clips the same logit."""

    def forward(self, frames: Tensor) -> Tensor:
        return self.where.sum().expand(len(frames))


class ReadsNoise(ReadsOneTile):
    """Gives each clip another logit, for no reason in any place of it."""

    def forward(self, frames: Tensor) -> Tensor:
        whole = frames.long().sum((1, 2, 3, 4)) * 7919 % 1009
        return whole.float() / 1009 * self.where.max()


@pytest.fixture(scope="module")
def clip() -> np.ndarray:
    """Rough everywhere, and more so to the right."""
    noise = np.random.default_rng(0).normal(0, 1, (FRAMES, 3, SIDE, SIDE))
    return np.clip(128 + noise * np.linspace(20, 45, SIDE), 0, 255).astype(np.uint8)


def test_a_map_points_at_the_one_tile_that_the_networks_read(clip):
    found = occlusion_map(Handmade(ReadsOneTile(), ReadsOneTile()), (0, 1), np.stack([clip // 2, clip]))
    np.testing.assert_array_equal(found.picture, clip)  # the more suspicious one
    assert not found.why_hidden
    assert (found.values.shape, found.values.dtype) == ((FRAMES, SIDE, SIDE), np.float32)
    assert (found.values.min(), found.values.max()) == pytest.approx((0, 1), abs=1e-6)
    inside = np.zeros((SIDE, SIDE), bool)
    inside[TILE, TILE] = True
    # The network reads one column of the tile to the left, too.
    assert found.values[:, inside].sum() > 0.8 * found.values.sum()
    assert found.p_value == 0.05
    parts = page_parts(FileEvidence(occlusion=found))
    assert len(parts["heat_map"]["frames"]) == 2  # one for each block of frames


@pytest.mark.parametrize("network", [ReadsNothing, ReadsNoise])
def test_a_map_of_a_network_that_reads_nothing_is_hidden(clip, network):
    found = occlusion_map(Handmade(network()), (0,), clip[None])
    assert found.why_hidden
    assert page_parts(FileEvidence(occlusion=found))["heat_map"] is None


def test_tiles_are_those_of_the_picture_and_not_of_black_bars(clip):
    barred = clip.copy()
    barred[:, :, :8], barred[:, :, 24:] = 0, 0
    found = occlusion_map(Handmade(ReadsOneTile()), (0,), barred[None], np.s_[..., 8:24, 0:32])
    assert not found.why_hidden
    assert found.values.shape == (FRAMES, 16, 32)
    assert len(np.unique(np.diff(found.values[0], axis=0).any(1).nonzero()[0])) <= 7  # tiles of two rows
    assert found.values[0, :4, TILE].min() > 0.1


def test_maps_are_the_same_on_every_call_and_never_hold_more_than_a_micro_batch(clip):
    small, large = (Handmade(ReadsOneTile(), batch_size=size) for size in (5, 16))
    told = []
    one = occlusion_map(small, (0,), clip[None], tell=lambda _part, done, total: told.append((done, total)))
    np.testing.assert_array_equal(one.values, occlusion_map(large, (0,), clip[None]).values)
    assert small.largest == 5
    # 2 blocks of 64 tiles: the clip and each tile; then the whole, nothing, and 20 orders of 5 shares.
    assert told[-1] == (1 + 128 + 2 + 20 * 5,) * 2


def test_a_map_that_would_take_too_long_is_not_made(clip):
    networks = Handmade(ReadsOneTile())
    found = occlusion_map(networks, (0,), clip[None], max_minutes=1e-9)
    assert "--map-minutes" in found.why_hidden
    assert networks.passes <= 1 + 16
