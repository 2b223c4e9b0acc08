"""Mixup and cutmix of pixels and classes."""

import numpy as np
import pytest
import torch

from fvc_lib.tasks.mixing import Mix, MixSettings, draw_mix, mixed_pixels, mixed_target, rows_of_classes


def drawn(settings, count=300, size=32):
    return [draw_mix(settings, 50, size, np.random.default_rng(seed)) for seed in range(count)]


def test_the_share_and_both_kinds_are_as_asked():
    mixes = drawn(MixSettings(0.3, 0.2, 1.0), 2000)
    mixed = [mix for mix in mixes if mix is not None]
    assert 0.25 < len(mixed) / len(mixes) < 0.35
    assert 0.4 < sum(mix.box is None for mix in mixed) / len(mixed) < 0.6
    assert {mix.partner for mix in mixed} == set(range(50))
    assert all(mix.box is not None for mix in drawn(MixSettings(1.0, 0.0, 1.0)))
    assert all(mix.box is None for mix in drawn(MixSettings(1.0, 1.0, 0.0)))


def test_a_cut_shows_exactly_its_share_of_the_first_picture():
    for mix in drawn(MixSettings(1.0, 0.0, 1.0)):
        mixed = mixed_pixels(torch.zeros(3, 32, 32, dtype=torch.uint8), torch.ones(3, 32, 32, dtype=torch.uint8), mix)
        assert 1 - mixed.float().mean().item() == pytest.approx(mix.share, abs=1e-6)
        assert 0 <= mix.share <= 1


def test_mixup_blends_pictures_and_classes_by_share():
    dark, light = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.full((3, 2, 2), 200, dtype=torch.uint8)
    assert [mixed_pixels(dark, light, Mix(0, None, share)).unique().tolist() for share in (0.25, 1.0)] == [[150], [0]]
    cat, dog, none = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.zeros(2)
    mixed = [mixed_target(cat, other, Mix(0, None, 0.75)).tolist() for other in (dog, none)]
    assert mixed == [[0.75, 0.5], [0.75, 0.0]]


def test_where_batches_are_balanced_so_are_the_partners_classes():
    labels = np.array([0] * 90 + [1] * 10)
    generators = (np.random.default_rng(seed) for seed in range(2000))
    partners = [draw_mix(MixSettings(1.0, 0.2), 100, 16, each, rows_of_classes(labels)).partner for each in generators]
    assert 0.45 < labels[partners].mean() < 0.55
    assert set(partners) == set(range(100))
