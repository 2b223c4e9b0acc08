import pytest
import torch
from torch import nn

from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.loop import evaluate_batch
from fvc_lib.engine.optimizer import finish_gradients
from fvc_lib.engine.step import BatchNormSplitError, BatchTransaction, MemoryExhaustedError
from fvc_lib.engine.task import Batch, LossSum
from tests.kits.engine_kit import LONE_SAMPLE_TOLERANCE, split_tolerance

CPU = resolve_device("cpu")


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)]
    return nn.Sequential(*layers).to(dtype)


def make_batch(num_samples: int = 7, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(num_samples, 2, 8, 8, generator=generator).to(dtype)
    target = torch.randn(num_samples, 2, generator=generator).to(dtype)
    weight = torch.rand(num_samples, generator=generator).to(dtype) * 5
    weight[2] = 0  # a sample without a target
    ids = tuple(f"s{i}" for i in range(num_samples))
    return Batch(ids, {"pixels": pixels, "target": target, "weight": weight})


class WeightedRegression:
    """A task with weighted samples; ``before`` and ``after`` are called around the forward pass."""

    def __init__(self, before=lambda batch: None, after=lambda outputs: None):
        self.before = before
        self.after = after
        self.sizes = []

    def forward(self, model, batch):
        self.sizes.append(len(batch))
        self.before(batch)
        outputs = {"values": model(batch.tensors["pixels"])}
        self.after(outputs)
        return outputs

    def loss(self, outputs, batch):
        weight = batch.tensors["weight"]
        errors = (outputs["values"] - batch.tensors["target"]).square().sum(1)
        return LossSum((errors * weight).sum(), weight.sum())


class EndsAt:
    """A function that raises ``error`` at the given calls, counted from 0."""

    def __init__(self, calls, error=None):
        self.calls = set(calls)
        self.count = 0
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    def __call__(self, *_):
        self.count += 1
        if self.count - 1 in self.calls:
            raise self.error


def gradients(batch, micro_batch, task=None, model=None):
    """Return the gradients divided by the total weight, and the transaction's result."""
    model = model or make_model(batch.tensors["pixels"].dtype)
    result = BatchTransaction(task or WeightedRegression(), model, Precision(CPU), CPU.device).gradients(
        batch, micro_batch
    )
    finish_gradients(model.parameters(), result.num_samples / result.loss.weight, float("inf"))
    return torch.cat([p.grad.flatten() for p in model.parameters()]), result


def full_batch_gradients(batch):
    """Return the expected gradients, from one backward pass through the weighted mean."""
    model = make_model(batch.tensors["pixels"].dtype)
    loss = WeightedRegression().loss({"values": model(batch.tensors["pixels"])}, batch)
    (loss.total / loss.weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_split_gives_the_gradients_of_the_whole(micro_batch, dtype):
    batch = make_batch(dtype=dtype)
    bound = 1e-12 if dtype is torch.float64 else split_tolerance(len(batch), micro_batch)
    got, result = gradients(batch, micro_batch)
    assert relative_error(got, full_batch_gradients(batch)) < bound
    assert result.micro_batch == micro_batch


@pytest.mark.fault(16)
@pytest.mark.parametrize("call", range(4))
def test_an_out_of_memory_in_any_forward_keeps_the_gradients(call, caplog):
    batch = make_batch()
    task = WeightedRegression(before=EndsAt([call]))
    got, result = gradients(batch, 2, task)
    assert relative_error(got, full_batch_gradients(batch)) < LONE_SAMPLE_TOLERANCE
    assert result.micro_batch == 1
    assert task.sizes == [2, 2, 2, 1][: call + 1] + [1] * 7
    assert "micro-batch 2 -> 1" in caplog.text


@pytest.mark.fault(17)
def test_buffers_and_random_state_are_those_of_an_undisturbed_run():
    class Counting(WeightedRegression):
        def forward(self, model, batch):
            model.seen += len(batch) * torch.rand(())
            return super().forward(model, batch)

    def run(micro_batch, ends):
        model = make_model()
        model.register_buffer("seen", torch.zeros(()))
        torch.manual_seed(3)
        gradients(make_batch(), micro_batch, Counting(after=ends), model)
        return model.seen.item(), torch.rand(()).item()

    assert run(4, EndsAt([1])) == run(2, EndsAt([]))


@pytest.mark.fault(20)
def test_memory_that_never_suffices_ends_at_one_sample_with_sizes_and_remedies():
    task = WeightedRegression(before=EndsAt(range(100)))
    with pytest.raises(
        MemoryExhaustedError,
        match=r"single sample \(pixels \(2, 8, 8\) float32.*: .*gradient_checkpointing",
    ):
        gradients(make_batch(), 4, task)
    assert task.sizes == [4, 2, 1, 1]


def test_a_training_batch_norm_is_refused_only_where_it_would_matter():
    model = nn.Sequential(nn.BatchNorm2d(2), make_model())
    gradients(make_batch(), 7, model=model)
    with pytest.raises(BatchNormSplitError, match=r"layer '0' is a batch norm.*of 7 must be split .* of 4"):
        gradients(make_batch(), 4, model=model)
    model[0].eval()
    gradients(make_batch(), 4, model=model)


@pytest.mark.fault(18)
@pytest.mark.parametrize("calls", [[], [0], [1], [0, 1], [1, 2], [0, 2, 4]])
def test_validation_counts_nothing_twice(calls):
    batch, model = make_batch(), make_model()
    task = WeightedRegression(before=EndsAt(calls))
    outputs, loss, micro_batch = evaluate_batch(task, model, batch, Precision(CPU), CPU.device, 4)
    with torch.no_grad():
        whole = {"values": model(batch.tensors["pixels"])}
        wanted = WeightedRegression().loss(whole, batch)
    torch.testing.assert_close(outputs["values"], whole["values"])
    torch.testing.assert_close(loss.total, wanted.total)
    torch.testing.assert_close(loss.weight, wanted.weight)
    assert not outputs["values"].requires_grad
    assert micro_batch == {0: 4, 1: 4, 2: 2, 3: 1}[len(calls)]
