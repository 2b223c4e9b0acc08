from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from fvc_lib.engine.optimizer import EagerAdamW, build_optimizer, finish_gradients, learning_rate_at


@given(st.integers(1, 500), st.floats(0, 0.9), st.floats(1e-6, 1))
def test_the_rate_rises_to_its_peak_and_falls(total, share, peak):
    rates = [learning_rate_at(step, total, peak, share) for step in range(total)]
    warm = round(total * share)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert all(a < b for a, b in pairwise(rates[:warm]))
    assert all(a > b for a, b in pairwise(rates[warm:]))
    assert max(rates) == pytest.approx(peak)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Linear(4, 1))
    model[2].weight.requires_grad_(False)
    decayed, plain = build_optimizer(model, 0.1, 0.5).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3, 1, 1)]
    assert len(plain["params"]) == 4
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)


def test_the_eager_optimizer_changes_weights_and_state_as_torchs_own_to_the_bit():
    torch.manual_seed(0)
    ends = []
    first = nn.Linear(5, 3).state_dict()
    inputs = torch.randn(4, 5)
    for optimizer_class in (EagerAdamW, torch.optim.AdamW):
        model = nn.Linear(5, 3)
        model.load_state_dict(first)
        optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        state = optimizer.state_dict()["state"]
        ends.append([*model.parameters(), *(value for each in state.values() for value in each.values())])
    assert len(ends[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_gradients_are_scaled_then_clipped():
    a, b, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert finish_gradients([a, b, unused], 2.0, max_norm=100.0).item() == pytest.approx(10)
    assert a.grad.tolist() == [6, 0]
    finish_gradients([a, b, unused], 1.0, max_norm=1.0)
    assert torch.cat([a.grad, b.grad]).norm().item() == pytest.approx(1, rel=1e-5)
