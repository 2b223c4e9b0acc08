"""Effort trains the residual of split weights, with a penalty; the network begins unchanged."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.detectors import effort
from fvc_lib.detectors.effort import Residual
from fvc_lib.detectors.network import HEADS, Detector, PictureTrunk, tune
from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.step import BatchTransaction, Stepper
from fvc_lib.engine.task import Batch
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.video.training import VideoTask

CPU = resolve_device("cpu")
WIDTH = 12


class TinyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens):
        return F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.value(tokens))


class TinyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.attention = TinyAttention()
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return F.relu(self.mix(tokens + self.attention(tokens))).mean(1)


def detector():
    torch.manual_seed(0)
    return Detector(PictureTrunk(TinyTransformer(), 2 * WIDTH), HEADS["mean"](2 * WIDTH))


def adapted(what="effort"):
    network = detector()
    tune(network, what)
    return network


def batch(number=5):
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(0, 256, (number, 2, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(number).remainder(2).float()
    return Batch(tuple(map(str, range(number))), {"frames": frames, "label": labels})


def task():
    return VideoTask(None, None, config=resolve_config({}, environ={}), weights=(0.7, 1.6))


def gradients(micro_batch):
    network = moved(adapted("effort:2")).train()
    result = BatchTransaction(task(), network, Precision(CPU), CPU.device).gradients(batch(), micro_batch)
    return result, {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def moved(network):
    """Return ``network`` with changed residuals, as after some training."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for part in network.modules():
            for parameter in part.parameters() if isinstance(part, Residual) else ():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return network


@pytest.mark.parametrize("what", ["effort", "effort:3", "effort:11"])
def test_before_training_the_network_says_what_it_said(what):
    frames = batch().tensors["frames"]
    torch.testing.assert_close(adapted(what)(frames), detector()(frames), atol=1e-5, rtol=0)


def test_only_the_residuals_of_attention_and_the_head_are_trained():
    network = adapted()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    settings = {"learning_rate": 0.01, "weight_decay": 0.01, "max_gradient_norm": 1.0}
    stepper = Stepper(network, Precision(CPU), **settings)
    transaction = BatchTransaction(task(), network.train(), Precision(CPU), CPU.device)
    stepper.take(transaction.gradients(batch(), 5), 0.01)
    changed = {name for name, tensor in network.state_dict().items() if not tensor.equal(before[name])}
    layers = [f"trunk.network.attention.{name}.parametrizations.weight.0" for name in ("query", "key", "value")]
    wanted = {f"{layer}.{part}" for layer in layers for part in ("left", "sizes", "right")}
    assert changed == wanted | {name for name in before if name.startswith("head.")}
    again = adapted()
    again.load_state_dict(network.state_dict())
    frames = batch().tensors["frames"]
    assert torch.equal(again.eval()(frames), network.eval()(frames))


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_the_penalty_counts_once_however_a_batch_is_split(micro_batch):
    whole, wanted = gradients(5)
    split, found = gradients(micro_batch)
    assert split.loss.mean() == pytest.approx(whole.loss.mean(), rel=1e-5)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_the_penalty_is_the_paper_s_for_square_weights():
    weight = detector().trunk.network.attention.query.weight.detach()
    u, _, v = torch.linalg.svd(weight)
    network = moved(adapted("effort:2"))
    parts = network.trunk.network.attention.query.parametrizations.weight
    residual = parts[0]
    u_hat, v_hat = torch.cat([u[:, :-2], residual.left], 1), torch.cat([v[:-2], residual.right], 0)
    one = torch.eye(WIDTH)
    orthogonal = (u_hat.T @ u_hat - one).square().sum() + (v_hat @ v_hat.T - one).square().sum()
    length = (network.trunk.network.attention.query.weight.square().sum() - weight.square().sum()).abs()
    torch.testing.assert_close(residual.penalty(parts.original), orthogonal + length, rtol=1e-4, atol=1e-4)
    assert effort.penalty(adapted()).item() == pytest.approx(0, abs=1e-4)
    assert effort.penalty(detector()) is None
