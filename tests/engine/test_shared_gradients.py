import pytest
import torch
from torch import nn

from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.step import BatchTransaction
from fvc_lib.engine.task import Batch, LossSum
from tests.kits.rank_kit import run_ranks

BATCHES = (8, 7, 2, 1)  # shared evenly, shared unevenly, one sample per rank, and a rank without samples


class Branching(nn.Module):
    """Two layers, a parameter used by some samples, an unused one, and one that requires no gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 1)
        self.sometimes = nn.Parameter(torch.ones(4))
        self.never = nn.Parameter(torch.ones(3, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, values, special):
        hidden = torch.tanh(self.first(values))
        if special.any():
            hidden = hidden + special[:, None] * torch.sin(hidden * self.sometimes)
        return self.second(hidden)[:, 0]


class BranchingTask:
    """A task whose loss is the weighted sum of squared outputs."""

    def forward(self, model, batch):
        return {"out": model(batch.tensors["values"], batch.tensors["special"])}

    def loss(self, outputs, batch):
        weights = batch.tensors["weight"]
        return LossSum((weights * outputs["out"] ** 2).sum(), weights.sum())


def batch_of(num_samples, dtype):
    """Return a batch whose last sample alone uses the parameter ``sometimes``."""
    generator = torch.Generator().manual_seed(num_samples)
    return Batch(
        tuple(str(number) for number in range(num_samples)),
        {
            "values": torch.randn(num_samples, 5, generator=generator, dtype=dtype),
            "special": (torch.arange(num_samples) == num_samples - 1).to(dtype),
            "weight": torch.rand(num_samples, generator=generator, dtype=dtype) + 0.5,
        },
    )


def compute(ranks, folder, dtype):
    """Save the gradients of every effective batch."""
    torch.manual_seed(0)
    model = Branching().to(dtype)
    compute_device = resolve_device("cpu")
    transaction = BatchTransaction(
        BranchingTask(), model, Precision(compute_device), compute_device.device, ranks=ranks
    )
    found = []
    for num_samples in BATCHES:
        batch = batch_of(num_samples, dtype)
        first, last = num_samples * ranks.rank // ranks.size, num_samples * (ranks.rank + 1) // ranks.size
        result = transaction.gradients(batch.part(first, last), 2, num_samples)
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        found.append({"loss": result.loss.total, "weight": result.loss.weight, "gradients": gradients})
    torch.save(found, folder / f"of_{ranks.size}_rank_{ranks.rank}.pt")


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_gradients_are_those_of_one_process(tmp_path, dtype, allowed):
    for size in (1, 2, 3):
        for code, said in run_ranks(size, compute, tmp_path, dtype):
            assert code == 0, said
    wanted = torch.load(tmp_path / "of_1_rank_0.pt")
    for size, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        found = torch.load(tmp_path / f"of_{size}_rank_{rank}.pt")
        for batch, other in zip(found, wanted, strict=True):
            assert batch["loss"] == pytest.approx(other["loss"], rel=allowed)
            assert batch["weight"] == pytest.approx(other["weight"], rel=allowed)
            reached = {name for name, gradient in batch["gradients"].items() if gradient is not None}
            assert reached == {"first.weight", "first.bias", "second.weight", "second.bias", "sometimes"}
            assert reached == {name for name, gradient in other["gradients"].items() if gradient is not None}
            for name in reached:
                gradient, right = batch["gradients"][name], other["gradients"][name]
                assert (gradient - right).norm() <= allowed * right.norm(), name
