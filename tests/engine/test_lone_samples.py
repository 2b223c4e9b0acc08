import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fvc_lib.detectors.own.image import ImageModel, SmallResnet
from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.joint_loss import rounded_as_several
from fvc_lib.engine.loop import evaluate_batch
from fvc_lib.engine.step import recompute_activations
from fvc_lib.engine.task import LossSum, Sample, stack_samples

CPU = torch.device("cpu")
LAYERS = {
    "conv1d": (nn.Conv1d(3, 5, 3), (3, 9)),
    "conv2d": (nn.Conv2d(8, 16, 3, padding=1, bias=False), (8, 12, 12)),
    "conv3d": (nn.Conv3d(3, 4, (2, 3, 3)), (3, 4, 8, 8)),
    "linear": (nn.Linear(48, 20), (48,)),
    "linear of tokens": (nn.Linear(16, 64), (5, 16)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_one_sample_what_it_gives_it_as_one_of_two(name):
    """To the bit, and the same gradients as where the other sample is not looked at."""
    layer, shape = LAYERS[name]
    values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    wanted = layer(values)[:1]
    wanted_gradients = torch.autograd.grad(wanted.square().sum(), [*layer.parameters()])
    with rounded_as_several(1, 8, CPU):
        found = layer(values[:1])
        gradients = torch.autograd.grad(found.square().sum(), [*layer.parameters()])
    assert found.equal(wanted)
    for ours, theirs in zip(gradients, wanted_gradients, strict=True):
        assert (ours - theirs).norm() <= 3e-7 * theirs.norm()


@pytest.mark.parametrize(("samples", "together"), [(2, 8), (1, 1)])
def test_several_samples_and_an_effective_batch_of_one_are_computed_as_they_are(samples, together, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "cat", lambda *arguments: seen.append(arguments))
    with rounded_as_several(samples, together, CPU):
        F.linear(torch.ones(samples, 3), torch.ones(2, 3))
    assert seen == []


def test_a_large_sample_takes_no_more_memory_than_it_did(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "cat", lambda *arguments: seen.append(arguments))
    with rounded_as_several(1, 8, CPU):
        nn.Conv2d(3, 2, 3)(torch.ones(1, 3, 84, 84))
    assert seen == []


def gradients_of(model, pictures, parts, *, lone):
    model.zero_grad()
    for part in pictures.split(parts):
        with rounded_as_several(len(part), len(pictures) if lone else 1, CPU):
            model(part)["class_logits"].square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pictures_one_by_one_have_the_gradients_of_the_batch(checkpointing):
    """Also where activations are computed again in the backward pass."""
    torch.manual_seed(3)
    model = ImageModel(SmallResnet((8, 16)), 3, 0).train()
    if checkpointing:
        recompute_activations(model)
    pictures = 255 * torch.rand(4, 3, 16, 16)
    whole = gradients_of(model, pictures, 4, lone=False)
    errors = {
        (parts, lone): float((gradients_of(model, pictures, parts, lone=lone) - whole).norm() / whole.norm())
        for parts, lone in ((2, False), (1, True), (1, False))
    }
    assert errors[1, True] <= 1.2 * errors[2, False] <= 1e-6
    assert errors[1, False] > 2 * errors[2, False], "torch rounds one sample alone no other way here: nothing is tested"


class OwnCheckpoint(nn.Module):
    """As a user's model may have it: what it computes again is its own affair."""

    def __init__(self, reentrant):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True))
        self.reentrant = reentrant

    def forward(self, images):
        return checkpoint(self.body, self.stem(images), use_reentrant=self.reentrant).mean((2, 3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_computes_activations_again_by_itself_finds_the_shapes_that_it_had(reentrant):
    torch.manual_seed(3)
    model, image = OwnCheckpoint(reentrant), torch.rand(1, 3, 9, 9)
    found = []
    for together in (1, 8):
        model.zero_grad()
        with rounded_as_several(1, together, CPU):
            outputs = model(image)
        outputs.square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (found[1] - found[0]).norm() <= 1e-6 * found[0].norm()


def test_activations_that_are_needed_twice_are_computed_again_twice():
    torch.manual_seed(3)
    model = ImageModel(SmallResnet((8, 16)), 3, 0).train()
    recompute_activations(model)
    with rounded_as_several(1, 4, CPU):
        loss = model(255 * torch.rand(1, 3, 16, 16))["class_logits"].square().sum()
    first, second = (torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_looking_leaves_torch_s_fast_paths_to_a_model():
    """Under a mode an encoder in evaluation leaves its fast one, which puts noughts where samples are padded."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    padded = torch.tensor([[False, False, True]] * 3)

    class Encodes:
        joint_outputs = ()

        def forward(self, model, batch):
            values = batch.tensors["x"]
            return {"y": model(values, src_key_padding_mask=padded[: len(values)])}

        def loss(self, outputs, batch):
            return LossSum(outputs["y"].sum(), torch.tensor(float(len(batch))))

    window = stack_samples([Sample(str(n), {"x": torch.randn(3, 8)}) for n in range(3)])
    compute = resolve_device("cpu")
    whole, apart = (evaluate_batch(Encodes(), model, window, Precision(compute), CPU, size)[0]["y"] for size in (3, 1))
    torch.testing.assert_close(apart, whole, rtol=1e-5, atol=1e-6)
