import pytest
import torch
from torch import nn

from fvc_lib.engine.device import recompute_activations
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS
from tests.detectors.test_models import clips

NAMES = ["frame_cnn", "r2plus1d_small"]
CPU = torch.device("cpu")


class Dropping(nn.Module):
    """A model whose blocks draw from the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def recomputable_blocks(self):
        return self.first, self.second

    def forward(self, frames):
        return self.head(self.second(self.first(frames.float()[..., 0, 0, 0, :16]))).squeeze(1)


def seeded(name):
    with forked_random_state(3, CPU):
        return Dropping() if name == "dropping" else DETECTORS.get(name).build()


def gradients(model):
    """Return the gradients of one step under a fixed random state, and a draw after it."""
    with forked_random_state(7, CPU):
        model(clips()).square().sum().backward()
        drawn = torch.rand(3)
    return [p.grad for p in model.parameters()], drawn


def kept_bytes(model, frames):
    """Return the bytes that the forward pass stores for the backward pass, without parameters."""
    kept = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(frames).sum()
    return sum(kept.values())


@pytest.mark.parametrize("name", [*NAMES, "dropping"])
def test_gradients_are_equal_to_the_bit_dropout_included(name):
    plain, recomputing = seeded(name), seeded(name)
    recompute_activations(recomputing)
    (expected, drawn), (got, drawn_too) = gradients(plain), gradients(recomputing)
    assert all(a.equal(b) and a.abs().sum() > 0 for a, b in zip(expected, got, strict=True))
    assert drawn.equal(drawn_too)


@pytest.mark.parametrize(("name", "share"), [("frame_cnn", 0.7), ("r2plus1d_small", 0.45)])
def test_less_is_kept_for_the_backward_pass(name, share):
    plain, recomputing = seeded(name), seeded(name)
    recompute_activations(recomputing)
    assert kept_bytes(recomputing, clips()) < share * kept_bytes(plain, clips())


def test_a_block_with_running_statistics_is_refused():
    model = Dropping()
    model.second = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    with pytest.raises(UsageError, match="batch norm, whose running statistics"):
        recompute_activations(model)
    assert "forward" not in model.first.__dict__  # the refusal changed nothing
