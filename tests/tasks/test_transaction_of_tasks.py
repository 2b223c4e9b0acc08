"""The gradients of one effective batch of each task: those of the whole at once, by a plain backward pass."""

import pytest
import torch
from torch import nn

from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.joint_loss import joint_part
from fvc_lib.engine.loop import evaluate_batch
from fvc_lib.engine.optimizer import finish_gradients
from fvc_lib.engine.step import BatchTransaction, MemoryExhaustedError
from fvc_lib.engine.task import LossSum, Sample, stack_samples
from tests.engine.test_dropout import own_random_state  # noqa: F401  (a fixture for all tests)
from tests.kits.engine_kit import LONE_SAMPLE_TOLERANCE, SPLIT_TOLERANCE, EndsOnce, split_tolerance, tight
from tests.kits.rank_kit import run_ranks
from tests.kits.task_kit import KINDS, each_task

CPU = resolve_device("cpu")
NUM_SAMPLES = 7
RANK_BATCHES = (7, 2, 1)  # shared unevenly, one sample each, and one rank without any


def model_of(task):
    """The same at every call, all of it trained."""
    torch.manual_seed(5)
    return task.build_model().train()


def batch_of(task, number=NUM_SAMPLES):
    data = task.training_data
    return stack_samples([data[index] for index in range(number)])


def named_gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(task, micro_batch, number=NUM_SAMPLES, report=lambda event: None):
    """Through the transaction, divided by the weight; what it says; and a random number drawn after it."""
    model, batch = model_of(task), batch_of(task, number)
    torch.manual_seed(6)
    transaction = BatchTransaction(task, model, Precision(CPU), CPU.device, report=report)
    result = transaction.gradients(batch, micro_batch)
    finish_gradients(model.parameters(), result.num_samples / result.loss.weight, float("inf"))
    return named_gradients(model), result, torch.rand(()).item()


def oracle(task, number=NUM_SAMPLES):
    """Gradients and loss of all samples at once, as anybody would write it."""
    model, batch = model_of(task), batch_of(task, number)
    torch.manual_seed(6)
    outputs = task.forward(model, batch)
    loss = task.loss(outputs, batch)
    total = loss.total
    if joint_part(task) is not None:
        compared = {name: outputs[name].float() for name in task.joint_outputs}  # as the engine hands them over
        tensors = {name: batch.tensors[name] for name in task.joint_tensors}
        total = total + task.joint_loss(model, compared, tensors)
    (total / loss.weight).backward()
    return named_gradients(model), (total / loss.weight).item(), torch.rand(()).item()


def assert_same_gradients(found, wanted, bound=SPLIT_TOLERANCE):
    """As a whole, and parameter by parameter as far as it is not the rounding of a sum that is nought."""
    assert found.keys() == wanted.keys()
    norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    error = torch.cat([(found[name] - gradient).flatten() for name, gradient in wanted.items()]).norm()
    assert error <= bound * norm
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 10 * bound * max(gradient.norm(), 1e-3 * norm), name


@pytest.mark.parametrize("micro_batch", [3])
@pytest.mark.parametrize("kind", [*KINDS, "recipe"], indirect=True)
def test_any_split_gives_the_gradients_the_loss_and_the_random_state_of_the_whole(tasks, micro_batch):
    """With a random number drawn for each sample in the forward pass."""
    task = tight(tasks())
    wanted, loss, drawn = oracle(task)
    found, result, drawn_after = gradients(task, micro_batch)
    assert_same_gradients(found, wanted, split_tolerance(NUM_SAMPLES, micro_batch))
    assert result.loss.mean() == pytest.approx(loss, rel=1e-6)
    assert drawn_after == drawn
    assert result.micro_batch == micro_batch


class InDouble:
    """Two linear maps in float64 whose outputs are compared; what is compared and what is summed share a layer."""

    joint_outputs, joint_tensors = ("left", "right"), ("group",)

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        samples = [Sample(str(n), {"x": values[n], "group": torch.tensor(n // 2)}) for n in range(NUM_SAMPLES)]
        self.training_data = samples

    def build_model(self):
        layers = {"first": nn.Linear(5, 4), "left": nn.Linear(4, 3), "right": nn.Linear(4, 3), "scale": nn.Linear(1, 1)}
        return nn.ModuleDict(layers).double()

    def forward(self, model, batch):
        hidden = torch.tanh(model["first"](batch.tensors["x"])) * torch.rand(len(batch), 1, dtype=torch.float64)
        return {"left": model["left"](hidden), "right": model["right"](hidden), "hidden": hidden}

    def loss(self, outputs, batch):
        return LossSum(outputs["hidden"].square().sum(), torch.tensor(float(len(batch))))

    def joint_loss(self, model, outputs, tensors):
        left, right = outputs["left"].double(), outputs["right"].double()
        similar = model["scale"]((left @ right.T)[..., None])[..., 0]
        same = tensors["group"][:, None] == tensors["group"]
        return (torch.logsumexp(similar, 1) - torch.logsumexp(similar.masked_fill(~same, -torch.inf), 1)).sum()


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_in_double_precision_the_gradients_are_the_same_to_twelve_digits(micro_batch):
    task = InDouble()
    wanted, loss, drawn = oracle(task)
    found, result, drawn_after = gradients(task, micro_batch)
    assert all((found[name] - gradient).norm() <= 1e-12 * gradient.norm() for name, gradient in wanted.items())
    assert result.loss.mean() == pytest.approx(loss, rel=1e-12)
    assert drawn_after == drawn


@pytest.mark.fault(16, 17)
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("video", "forward"),
        ("video", "backward"),
        ("image", "backward"),
        *(("video_text", where) for where in ("forward", "backward", "joint_loss")),
    ],
    indirect=["kind"],
)
def test_an_out_of_memory_at_any_call_keeps_the_gradients_and_the_random_state(tasks, where, tally):
    """From micro-batches of 4: where samples are compared the forward passes are those of both rounds."""
    wanted, loss, drawn = oracle(tight(tasks()))
    for number in range(1, 20):
        ends, reported = EndsOnce(where, number), []
        found, result, drawn_after = gradients(tight(tasks(), ends), 4, report=reported.append)
        if ends.calls < number:
            break
        assert_same_gradients(found, wanted, split_tolerance(NUM_SAMPLES, 2))
        assert result.loss.mean() == pytest.approx(loss, rel=1e-6)
        assert drawn_after == drawn
        assert result.micro_batch == 2
        (event,) = reported
        assert (event.where, event.micro_batch) == (where, 4)
        tally.add(survived=1)
    rounds = 2 if where == "forward" and tasks.kind == "video_text" else 1
    assert number - 1 == (1 if where == "joint_loss" else 2 * rounds)


@pytest.mark.fault(18)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_out_of_memory_while_looking_changes_no_bit_of_a_compared_batch(tasks, call):
    """Two forward passes and the joint loss."""
    task = type(tasks)("video_text", tasks.folder)()
    model, batch = model_of(task).eval(), batch_of(task)

    def looked(task):
        return evaluate_batch(task, model, batch, Precision(CPU), CPU.device, 4)

    outputs, loss, micro_batch = looked(tight(task, EndsOnce("validation", call)))
    wanted, wanted_loss, _ = looked(task)
    assert all(values.equal(wanted[name]) for name, values in outputs.items())
    assert loss.total.equal(wanted_loss.total)
    assert micro_batch == 4


@pytest.mark.parametrize(
    ("micro_batch", "tried"), [(4, [(4, 2), (2, None)]), (8, [(7, 3), (3, None)]), (1, [(1, 1), (1, None)])]
)
def test_a_joint_loss_that_never_fits_is_tried_once_more_and_says_what_would_help(tasks, micro_batch, tried):
    """Also with a share that was one micro-batch, whose activations are given up for the second attempt."""

    def never(kind):
        if kind == "joint_loss":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    task, reported = type(tasks)("video_text", tasks.folder)(), []
    with pytest.raises(MemoryExhaustedError, match="smaller effective_batch_size"):
        gradients(tight(task, never), micro_batch, report=reported.append)
    assert [(event.micro_batch, event.micro_batch_next) for event in reported] == tried
    assert {event.where for event in reported} == {"joint_loss"}


def rank_gradients(ranks, tasks, folder):
    """Of every effective batch, of which each rank has its share."""
    task = tasks()
    model = model_of(task)
    transaction = BatchTransaction(task, model, Precision(CPU), CPU.device, ranks=ranks)
    found = []
    for number in RANK_BATCHES:
        batch = batch_of(task, number)
        first, last = number * ranks.rank // ranks.size, number * (ranks.rank + 1) // ranks.size
        result = transaction.gradients(batch.part(first, last), 2, number)
        finish_gradients(model.parameters(), result.num_samples / result.loss.weight, float("inf"))
        found.append((named_gradients(model), result.loss.mean()))
    torch.save(found, folder / f"of_{ranks.size}_rank_{ranks.rank}.pt")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@each_task(long=("video", "image"))
def test_several_ranks_give_the_gradients_of_the_whole(tasks, size, tmp_path):
    """Also of what only the joint loss reads, a temperature and a bias: once, and not once per rank."""
    for code, said in run_ranks(size, rank_gradients, tasks, tmp_path):
        assert code == 0, said
    for rank in range(size):
        found = torch.load(tmp_path / f"of_{size}_rank_{rank}.pt")
        for number, (its_gradients, its_loss) in zip(RANK_BATCHES, found, strict=True):
            wanted, loss, _ = oracle(tasks(), number)
            assert_same_gradients(its_gradients, wanted, LONE_SAMPLE_TOLERANCE)  # a rank may have one sample
            assert its_loss == pytest.approx(loss, rel=1e-6)
