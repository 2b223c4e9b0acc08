import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.random_state import DropoutSplitError, forked_random_state
from fvc_lib.engine.step import BatchTransaction
from fvc_lib.engine.task import Batch, LossSum

CPU = resolve_device("cpu")
NUM_SAMPLES, NUM_FRAMES = 7, 4


@pytest.fixture(autouse=True)
def own_random_state():
    with forked_random_state(0, CPU.device):
        yield


class Clips(nn.Module):
    """A network on clips (B, T, 6). ``arrange`` reshapes (B, T, 8) for the layer ``between``; ``back`` undoes this."""

    def __init__(self, between, arrange=lambda x: x, back=lambda x, number: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(6, 8).double(), between, nn.Linear(8, 1).double()
        self.arrange, self.back = arrange, back

    def recomputable_blocks(self):
        return (self.between,)

    def forward(self, clips):
        inner = torch.tanh(self.first(clips))
        inner = self.back(self.between(self.arrange(inner)), len(clips))
        return self.last(inner).flatten(1).square().sum(1)


FOLDED = {"arrange": lambda x: x.flatten(0, 1), "back": lambda x, number: x.unflatten(0, (number, -1))}


class Task:
    """A task whose loss is the sum of the network's outputs."""

    def forward(self, model, batch):
        return {"out": model(batch.tensors["clips"])}

    def loss(self, outputs, batch):
        return LossSum(outputs["out"].sum(), torch.tensor(float(len(batch))))


def batch_of(number=NUM_SAMPLES):
    clips = torch.randn(number, NUM_FRAMES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Batch(tuple(map(str, range(number))), {"clips": clips})


def network(name):
    torch.manual_seed(0)
    return NETWORKS[name]()


def gradients(model, micro_batch, draws=0, batch=None):
    transaction = BatchTransaction(Task(), model.train(), Precision(CPU), CPU.device)
    transaction.gradients(batch or batch_of(), micro_batch, draws=draws)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


def images(x):
    return x.flatten(0, 1).reshape(-1, 2, 2, 2)  # frames as pictures of two channels


def of_images(x, number):
    return x.reshape(number, NUM_FRAMES, 8)


NETWORKS = {
    "numbers": lambda: Clips(nn.Dropout(0.5)),
    "frames in the batch": lambda: Clips(nn.Dropout(0.5), **FOLDED),
    "several layers": lambda: Clips(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8).double(), nn.Dropout(0.5))),
    "one layer twice": lambda: Clips(nn.Sequential(*[nn.Dropout(0.3, inplace=True)] * 2)),
    "channels of a sequence": lambda: Clips(nn.Dropout1d(0.5)),
    "channels of a picture": lambda: Clips(nn.Dropout2d(0.5), images, of_images),
    "channels of a volume": lambda: Clips(nn.Dropout3d(0.5), lambda x: x.reshape(-1, 4, 2, 2, 2), of_images),
    "everything": lambda: Clips(nn.Dropout(1.0)),
}


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_any_split_drops_what_the_whole_batch_does(name, micro_batch):
    whole = gradients(network(name), NUM_SAMPLES)
    assert relative(gradients(network(name), micro_batch), whole) < 1e-12
    if name != "everything":
        assert relative(gradients(network(name), NUM_SAMPLES, draws=1), whole) > 0.01  # another step has other masks


class Function(nn.Module):
    """A module that calls ``function``."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, values):
        return self.function(values)


OTHER_DRAWS = {
    "encoder layer": lambda share: nn.TransformerEncoderLayer(8, 2, 8, share, batch_first=True).double(),
    "function": lambda share: Function(partial(F.dropout, p=share)),
    "alpha": lambda share: nn.AlphaDropout(share),
    "drop-path": lambda share: Function(lambda x: x * (torch.rand(len(x), 1, 1) >= share) if share else x),
    "whole layer": lambda share: Function(lambda x: x * (random.random() >= share) if share else x),
}


@pytest.mark.parametrize("name", OTHER_DRAWS)
def test_other_draws_are_refused_where_they_would_depend_on_the_split(name):
    make = OTHER_DRAWS[name]
    model = Clips(nn.Sequential())
    model.between = nn.Sequential(nn.Dropout(0.5), make(0.4))
    gradients(model, NUM_SAMPLES)
    with pytest.raises(DropoutSplitError, match=r"draws random numbers.*evaluation mode"):
        gradients(model, 3)
    model.between = nn.Sequential(nn.Dropout(0.5), make(0.0))
    whole = gradients(model, NUM_SAMPLES)
    assert relative(gradients(model, 3), whole) < 1e-12


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_as_many_tokens_as_samples_drop_what_the_whole_batch_does(micro_batch):
    halves = {
        "arrange": lambda x: x.unflatten(2, (2, 4)).transpose(1, 2).flatten(0, 1),  # (2 B, T, 4)
        "back": lambda x, number: x.unflatten(0, (number, 2)).transpose(1, 2).flatten(2),
    }
    batch = batch_of(NUM_FRAMES)
    whole = gradients(Clips(nn.Dropout(0.5), **halves), NUM_FRAMES, batch=batch)
    assert relative(gradients(Clips(nn.Dropout(0.5), **halves), micro_batch, batch=batch), whole) < 1e-12


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_rows_that_are_not_samples_are_refused(micro_batch):
    time_first = {"arrange": lambda x: x.transpose(0, 1), "back": lambda x, number: x.transpose(0, 1)}
    gradients(Clips(nn.Dropout(0.5), **time_first), NUM_SAMPLES)
    with pytest.raises(DropoutSplitError, match="layer 'between'"):
        gradients(Clips(nn.Dropout(0.5), **time_first), micro_batch)
