from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from fvc_lib.engine.device import (
    ComputeDevice,
    Precision,
    build_optimizer,
    finish_gradients,
    learning_rate_at,
    resolve_device,
)


@given(st.integers(1, 500), st.floats(0, 0.9), st.floats(1e-6, 1))
def test_the_rate_rises_to_its_peak_and_falls(total, share, peak):
    rates = [learning_rate_at(step, total, peak, share) for step in range(total)]
    warm = round(total * share)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert all(a < b for a, b in pairwise(rates[:warm]))
    assert all(a > b for a, b in pairwise(rates[warm:]))
    assert max(rates) == pytest.approx(peak)


def test_the_cosine_is_at_half_height_half_way():
    assert learning_rate_at(60, 100, 2.0, 0.2) == pytest.approx(1.0)
    assert learning_rate_at(100, 100, 2.0, 0.2) == pytest.approx(0.0)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Linear(4, 1))
    model[2].weight.requires_grad_(False)
    decayed, plain = build_optimizer(model, 0.1, 0.5).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3, 1, 1)]
    assert len(plain["params"]) == 4
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)


def test_gradients_are_scaled_then_clipped():
    a, b, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert finish_gradients([a, b, unused], 2.0, max_norm=100.0).item() == pytest.approx(10)
    assert a.grad.tolist() == [6, 0]
    finish_gradients([a, b, unused], 1.0, max_norm=1.0)
    assert torch.cat([a.grad, b.grad]).norm().item() == pytest.approx(1, rel=1e-5)


def test_float32_neither_casts_nor_scales():
    precision = Precision(resolve_device("cpu"))
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert not precision.scales_losses
    assert precision.scaler.scale(torch.tensor(3.0)).item() == 3


def test_mixed_precision_casts():
    precision = Precision(ComputeDevice(torch.device("cpu"), torch.bfloat16, "test"))
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
