"""Where a clip is called fake: maps point at what a network reads, and one that says nothing is not shown."""

from pathlib import Path

import numpy as np
import pytest
import torch
from markupsafe import escape
from torch import Tensor, nn

from fvc_lib.analysis.figures.evidence.where import heated
from fvc_lib.analysis.pages.video_page import where_section
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.video.verdicts.maps import (
    GRAD_CAM,
    INTEGRATED_GRADIENTS,
    LIMIT,
    OCCLUSION,
    Curve,
    EvidenceMap,
    as_feature_map,
    maps_of,
    maps_within,
    num_passes,
    with_redrawn_weights,
    without_detail,
)
from fvc_lib.tasks.video.verdicts.scoring import FoldNetwork, Networks

FRAMES, SIDE, TILE = 4, 32, slice(8, 16)


class Handmade(Networks):
    """Folds' networks that no training made."""

    def __init__(self, *made: nn.Module, batch_size: int = 16) -> None:
        config = resolve_config({"model": "frame_cnn", "batch_size": batch_size, "device": "cpu"}, environ={})
        folds = {fold: FoldNetwork(Path(), "", 0.0, 1.0, 0.5) for fold in range(len(made))}
        super().__init__("handmade", config, folds, built_with="", damaged=str, held=None)
        self.made, self.largest = made, 0

    def _loaded(self, fold: int) -> nn.Module:
        return self.made[fold].eval()

    def raw_logits(self, network, clips):
        self.largest = max(self.largest, len(clips))
        return super().raw_logits(network, clips)


def roughness(frames: Tensor) -> Tensor:
    """(B, T, H, W): squared differences to the right neighbour."""
    grey = frames.float().mean(2) / 255
    return (grey - torch.roll(grey, 1, 3)) ** 2


class ReadsOneTile(nn.Module):
    """Fake where one tile is rough."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Parameter(torch.zeros(SIDE, SIDE))
        with torch.no_grad():
            self.where[TILE, TILE] = 1

    def recomputable_blocks(self) -> tuple[nn.Module, ...]:
        return ()

    def forward(self, frames: Tensor) -> Tensor:
        return 30 * (roughness(frames) * self.where).sum((2, 3)).mean(1)


class ReadsEdges(ReadsOneTile):
    """Fake where anything is rough, whatever its weights are."""

    def forward(self, frames: Tensor) -> Tensor:
        return roughness(frames).sum((2, 3)).mean(1) + 0 * self.where.sum()


class ReadsNothing(ReadsOneTile):
    """The same logit for all clips."""

    def forward(self, frames: Tensor) -> Tensor:
        return self.where.sum().expand(len(frames)) + 0 * frames.float().mean((1, 2, 3, 4))


class ReadsNoise(ReadsOneTile):
    """Another logit for each clip, for no reason in any place of it."""

    def forward(self, frames: Tensor) -> Tensor:
        whole = frames.detach().long().sum((1, 2, 3, 4)) * 7919 % 1009
        return whole.float() / 1009 * self.where.max()


@pytest.fixture(scope="module")
def clip() -> np.ndarray:
    """Rough everywhere, and more so to the right."""
    noise = np.random.default_rng(0).normal(0, 1, (FRAMES, 3, SIDE, SIDE))
    return np.clip(128 + noise * np.linspace(20, 45, SIDE), 0, 255).astype(np.uint8)


def by_method(networks: Networks, clip: np.ndarray, **cut: int) -> dict[str, EvidenceMap]:
    found = maps_of(networks, tuple(networks.folds), clip, **cut)
    assert [each.method for each in found] == [OCCLUSION, GRAD_CAM, INTEGRATED_GRADIENTS]
    return {each.method: each for each in found}


@pytest.mark.parametrize("method", [OCCLUSION, INTEGRATED_GRADIENTS])
def test_a_map_points_at_the_one_tile_that_the_networks_read(clip, method):
    found = by_method(Handmade(ReadsOneTile(), ReadsOneTile()), clip, tiles=4)[method]
    assert found.shown, found.why_not
    assert found.values.shape == (FRAMES, SIDE, SIDE)
    assert found.values.dtype == np.float32
    assert (found.values.min(), found.values.max()) == pytest.approx((0, 1), abs=1e-6)
    inside = np.zeros((SIDE, SIDE), bool)
    inside[TILE, TILE] = True
    assert found.values[:, inside].sum() > 0.95 * found.values.sum()
    assert found.deletion.p_lower() == found.insertion.p_higher() == 0.05
    assert found.deletion.area < found.deletion.other_areas.min()
    assert found.alike < 0.5


@pytest.mark.parametrize(("network", "reason"), [(ReadsNothing, "no part of the clip"), (ReadsNoise, "deleting what")])
def test_a_map_of_a_network_that_reads_nothing_is_not_shown(clip, network, reason):
    found = by_method(Handmade(network()), clip, tiles=4)
    assert not any(each.shown for each in found.values())
    assert reason in found[OCCLUSION].why_not


def test_a_map_that_any_weights_would_give_is_not_shown(clip):
    found = by_method(Handmade(ReadsEdges()), clip, tiles=4)
    for method in (OCCLUSION, INTEGRATED_GRADIENTS):
        assert found[method].deletion.p_lower() == 0.05  # it is a true map, and of the picture alone
        assert found[method].alike == pytest.approx(1)
        assert "re-drawn weights" in found[method].why_not


def test_a_network_without_gradients_or_blocks_gets_occlusion_alone_and_says_why(clip):
    class Stern(ReadsOneTile):
        @torch.no_grad()
        def forward(self, frames: Tensor) -> Tensor:
            assert frames.dtype == torch.uint8
            return super().forward(frames)

    class WantsBytes(ReadsOneTile):
        def forward(self, frames: Tensor) -> Tensor:
            return super().forward(frames if frames.dtype == torch.uint8 else frames / 255)

    found = by_method(Handmade(Stern()), clip, tiles=4)
    assert [each.shown for each in found.values()] == [True, False, False]
    assert "names no block" in found[GRAD_CAM].why_not
    assert found[GRAD_CAM].deletion is None
    bytes_alone = by_method(Handmade(WantsBytes()), clip, tiles=4)[INTEGRATED_GRADIENTS]
    assert "no pixels in between" in bytes_alone.why_not


def test_tiles_are_those_of_the_picture_and_not_of_black_bars(clip):
    barred = clip.copy()
    barred[:, :, :8], barred[:, :, 24:] = 0, 0
    found = by_method(Handmade(ReadsOneTile()), barred, tiles=4)[OCCLUSION]
    assert found.shown, found.why_not
    assert found.values[0, :8].max() == found.values[0, 8:12].max()
    assert sum(len(np.unique(rows)) for rows in found.values[0, 8:24:4, ::8]) >= 4


def test_grad_cam_points_at_what_makes_features_of_the_last_block(clip):
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tile = ReadsOneTile()
            self.block = nn.AvgPool3d((1, 4, 4))
            self.late = nn.Linear(1, 1)

        def recomputable_blocks(self) -> tuple[nn.Module, ...]:
            return self.block, self.late

        def forward(self, frames: Tensor) -> Tensor:
            read = 480 * self.block((roughness(frames) * self.tile.where)[:, None])  # (B, 1, T, h, w)
            return self.late(read.mean((2, 3, 4))).squeeze(1)

    network = Blocks()
    nn.init.ones_(network.late.weight)
    found = by_method(Handmade(network), clip)[GRAD_CAM]
    assert found.shown, found.why_not
    assert found.values[:, TILE, TILE].min() > 0.3
    assert found.values[:, 24:].max() == 0


def test_maps_are_the_same_on_every_call_and_never_hold_more_than_a_micro_batch(clip):
    first = Handmade(ReadsOneTile(), batch_size=5)
    one, two = (by_method(each, clip, tiles=4) for each in (first, Handmade(ReadsOneTile(), batch_size=16)))
    assert first.largest == 5
    for method, found in one.items():
        np.testing.assert_array_equal(found.values, two[method].values)
        assert found.num_passes == two[method].num_passes
    # Of 2 blocks of 16 tiles: the clip and each tile, once and for 5 draws; 2 curves of 20 orders and 5 shares.
    assert one[OCCLUSION].num_passes == (1 + 32) * (1 + 5) + 2 * (2 + 20 * 5)


def test_curves_compare_by_their_rank_and_ties_count_against_the_map():
    flat = np.zeros((19, 3))
    assert Curve(np.array([0, 0.5, 1]), np.array([0.0, -1, 0]), flat).p_lower() == 0.05
    assert Curve(np.array([0, 0.5, 1]), np.array([0.0, 0, 0]), flat).p_lower() == 1.0
    assert Curve(np.array([0, 0.5, 1]), np.array([0.0, 1, 0]), flat).p_higher() == 0.05
    assert Curve(np.array([0, 0.5, 1]), np.array([2.0, 1, 0]), flat).area == 1.0


def test_what_is_deleted_keeps_its_mean_and_loses_its_detail(clip):
    empty = without_detail(clip)
    assert (empty.dtype, empty.shape) == (clip.dtype, clip.shape)
    assert abs(empty.mean() - clip.mean()) < 1
    assert empty.std() < clip.std() / 2
    barred = clip.copy()
    barred[:, :, :10] = 0
    np.testing.assert_array_equal(without_detail(barred)[:, :, :10], 0)  # black bars stay
    flat = np.full((2, 3, 8, 8), 77, np.uint8)
    np.testing.assert_array_equal(without_detail(flat), flat)


def test_redrawn_weights_are_the_same_numbers_elsewhere_and_leave_the_network_alone():
    network = nn.Linear(40, 30)
    before = network.weight.clone()
    one, other, again = (with_redrawn_weights(network, seed).weight for seed in (0, 1, 0))
    assert torch.equal(network.weight, before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(one.flatten().sort().values, before.flatten().sort().values)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 7, 6, 5, 5), (7, 6, 5, 5)),
        ((1, 3, 5, 5, 7), (7, 3, 5, 5)),  # channels last
        ((6, 7, 5, 5), (7, 6, 5, 5)),
        ((6, 5, 5, 7), (7, 6, 5, 5)),
        ((6, 17, 7), (7, 6, 4, 4)),  # tokens of each frame after one for the class
        ((1, 48, 7), (7, 3, 4, 4)),  # of pairs of frames
        ((1, 7, 6, 1, 1), None),
        ((6, 7), None),
        ((6, 14, 7), None),
    ],
)
def test_outputs_of_blocks_are_brought_to_channels_time_and_space(shape, expected):
    found = as_feature_map(torch.arange(float(np.prod(shape))).reshape(shape), 6)
    assert (None if found is None else tuple(found.shape)) == expected


def test_a_page_shows_a_map_with_its_numbers_and_says_why_another_is_not_there(clip):
    maps = maps_of(Handmade(ReadsOneTile()), (0,), clip, tiles=4)
    html = where_section(clip, maps, note="", limit=LIMIT).html
    assert html.count("<figure><img") == 2 * 2  # two blocks of frames, two methods
    assert html.count('<polyline class="own"') == 2 * 2
    assert html.count('<polyline class="other"') == 2 * 2 * 19
    assert f"the logit drops by {maps[0].top:.2f}" in html
    assert "(p = 0.05)" in html
    assert "<b>Grad-CAM</b> is not shown: this network names no block" in html
    assert escape(LIMIT) in html


def test_heat_covers_what_a_map_marks_and_leaves_the_rest_grey(clip):
    values = np.zeros((SIDE, SIDE))
    values[TILE, TILE] = 1
    drawn = heated(clip[0], values).astype(int)
    assert np.ptp(drawn[:, 20:, 20:], axis=0).max() == 0
    assert (drawn[0, TILE, TILE] - drawn[2, TILE, TILE]).min() > 100  # orange


def test_maps_that_would_take_too_long_are_not_made_and_the_page_says_so(clip):
    networks = Handmade(ReadsOneTile())
    refused = maps_within(networks, (0,), clip[None], 1e-9)
    assert refused.maps == ()
    assert "--map-minutes" in where_section(clip, refused.maps, note=refused.note, limit="").html
    made = maps_within(networks, (0,), np.stack([clip // 2, clip]), 10)
    np.testing.assert_array_equal(made.clip, clip)  # the more suspicious one
    assert sum(each.num_passes for each in made.maps) <= num_passes(1)


@pytest.mark.verdicts
def test_integrated_gradients_are_captums(clip):
    from captum.attr import IntegratedGradients

    found = by_method(Handmade(ReadsOneTile()), clip, tiles=4)[INTEGRATED_GRADIENTS]
    begin, end = (torch.from_numpy(each)[None].float() for each in (without_detail(clip), clip))
    theirs = IntegratedGradients(ReadsOneTile()).attribute(end, begin, n_steps=16, method="riemann_middle")
    tiles = theirs[0].sum(1).detach().numpy().reshape(2, 2, 4, 8, 4, 8).sum((1, 3, 5))
    np.testing.assert_allclose(found.values[::2, ::8, ::8], np.clip(tiles / tiles.max(), 0, None), atol=1e-5)
