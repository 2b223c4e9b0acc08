"""Several ranks train what one process trains, and stop or recover together."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from fvc_lib.engine.optimizer import EagerAdamW
from tests.faults.checkpoint_lives import same
from tests.kits.engine_kit import EndsOnce, tight
from tests.kits.rank_kit import Training, distance, run_ranks, same_result, same_weights, train
from tests.kits.task_kit import KINDS, TinyTasks, each_task

# Small rates, so that a rounding difference of one step does not grow.
QUIET = {"epochs": 2, "learning_rate": 1e-4}


@dataclass(frozen=True)
class Short:
    """A task that runs out of memory on one rank: at its n-th call of a kind, or at every call."""

    tasks: Any
    rank: int
    kind: str
    number: int = 1
    for_ever: bool = False

    def __call__(self, rank: int) -> Any:
        task = self.tasks(rank)
        return tight(task, self._ends(), draws=False) if rank == self.rank else task

    def _ends(self) -> Any:
        """Return the function that ends memory; it draws no random numbers, which would differ between ranks."""
        if not self.for_ever:
            return EndsOnce(self.kind, self.number)

        def end(kind: str) -> None:
            if kind == self.kind:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

        return end


@pytest.fixture(scope="session")
def known():
    """Return a cache of undisturbed trainings, which do not depend on the folder."""
    return {}


@pytest.fixture
def trained(tmp_path, known):
    """Return a function that trains on ``size`` ranks, checks that all results are equal, and returns rank 0's."""

    def run(size, name, make_task, *, prepare=None, stop=None, **settings):
        if name != "whole" or not isinstance(make_task, TinyTasks):
            return run_anew(size, name, make_task, prepare, stop, settings)
        key = repr((size, make_task.kind, make_task.rows, make_task.validation, sorted(settings.items())))
        if key not in known:
            known[key] = run_anew(size, f"whole on {size}", make_task, prepare, stop, settings)
        return known[key]

    def run_anew(size, name, make_task, prepare, stop, settings):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        training = Training(make_task, folder, {**QUIET, **settings}, stop=stop, prepare=prepare)
        for code, said in run_ranks(size, train, training):
            assert code == 0, said
        found = training.found()
        for rank in range(1, size):
            other = training.found(rank)
            assert same_weights(found, other)
            for name in ("history", "schedule", "steps", "loss", "inexact_because", "best_epoch"):
                assert repr(found[name]) == repr(other[name]), name
        return found

    return run


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@each_task(long=("image", "video_text"))
def test_ranks_find_what_one_process_finds(tasks, trained, size):
    """The batches have 8, 8 and 6 samples, which three ranks cannot share evenly."""
    whole, found = trained(1, "whole", tasks), trained(size, "whole", tasks)
    assert distance(found, whole) < 1e-6
    assert found["steps"] == whole["steps"]
    assert found["inexact_because"] == []
    for record, wanted in zip(found["history"], whole["history"], strict=True):
        assert record.train_loss == pytest.approx(wanted.train_loss, rel=1e-6)
        assert record.validation["loss"] == pytest.approx(wanted.validation["loss"], rel=1e-6)


@pytest.mark.parametrize("validation", [pytest.param(1, marks=pytest.mark.long), 6])
@each_task(long=("image", "video_text"))
def test_metrics_of_given_weights_are_equal_to_the_bit_on_any_number_of_ranks(tasks, trained, validation):
    """Without a learning rate all trainings have the same weights; batches of 2 are shared."""
    tasks = tasks.sized(rows=8, validation=validation)
    quiet = {"learning_rate": 0.0, "weight_decay": 0.0, "effective_batch_size": 2, "micro_batch": 2, "epochs": 1}
    whole = trained(1, "one", tasks, **quiet)
    assert len(whole["scores"]["ids"]) == validation
    found = trained(3, "ranks", tasks, **quiet)
    assert same_weights(found, whole)
    assert repr(found["history"][0].validation) == repr(whole["history"][0].validation)  # NaN equals NaN
    assert found["loss"] == whole["loss"]
    assert same(found["scores"], whole["scores"])


@pytest.mark.fault(16, 17)
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        pytest.param("video_text", "joint_loss", marks=pytest.mark.slow), ("video", "backward"),
        *(pytest.param(kind, "backward", marks=pytest.mark.long) for kind in ("image", "video_text")),
        *(pytest.param(kind, "forward", marks=pytest.mark.long) for kind in KINDS),
    ],
    indirect=["kind"],
)  # fmt: skip
def test_memory_that_ends_on_one_rank_lowers_the_micro_batch_of_all(tasks, trained, where):
    settings = {"micro_batch": 4}
    whole = trained(1, "whole", tasks, **settings)
    number = 3 if (tasks.kind, where) == ("video_text", "forward") else 2  # a joint loss takes two forward passes
    found = trained(2, "short", Short(tasks, 1, where, number), **settings)
    assert [(change.step, change.micro_batch) for change in found["schedule"]] == [(0, 4), (1, 2)]
    assert distance(found, whole) < 1e-6


@pytest.mark.fault(20)
@pytest.mark.parametrize("where", ["forward", pytest.param("validation", marks=pytest.mark.long)])
@each_task(long=("image", "video_text"))
def test_memory_that_ends_for_ever_on_one_rank_stops_all_with_its_reason(tasks, tmp_path, where):
    settings = {**QUIET, "effective_batch_size": 2}
    training = Training(Short(tasks, 1, where, for_ever=True), tmp_path, settings)
    codes, said = zip(*run_ranks(2, train, training), strict=True)
    assert codes == (1, 1)
    for rank, words in enumerate(said):
        assert "MemoryExhaustedError" in words
        assert "out of memory with a single sample" in words
        assert ("rank 1 of 2: " in words) == (rank != 1)


def _steps_end(rank, of, calls):
    """Make AdamW's ``step`` change a weight and run out of memory on one rank, at the given calls."""
    if rank != of:
        return
    inner, count = EagerAdamW.step, iter(range(1, 1_000))

    def step(optimizer, *arguments, **options):
        if next(count) in calls:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(7)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return inner(optimizer, *arguments, **options)

    EagerAdamW.step = step


@pytest.mark.fault(19)
@pytest.mark.parametrize("of", [pytest.param(0, marks=pytest.mark.long), 1])
@each_task(long=("image", "video_text"))
def test_memory_that_ends_in_one_rank_s_step_takes_all_back_to_the_checkpoint(tasks, trained, of):
    whole = trained(2, "whole", tasks)
    found = trained(2, "short", tasks, prepare=partial(_steps_end, of=of, calls=(3,)))
    assert same_result(found, whole)
    (restored,) = [details for kind, details in found["events"] if kind == "step_restored"]
    assert restored == {"to_step": 0, "lost_steps": 2}


def _stop_on(rank, of, after):
    asked = iter(range(1_000_000))
    return lambda: next(asked) >= after and rank == of


@pytest.mark.parametrize(
    ("first", "then"), [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 1), (2, 3), (1, 2)))]
)
@each_task(long=("image", "video_text"))
def test_a_stop_on_any_rank_saves_all_and_any_number_of_ranks_goes_on(tasks, tmp_path, trained, first, then):
    whole = trained(then, "whole", tasks)
    folder = tmp_path / "stopped"
    folder.mkdir()
    stop = partial(_stop_on, of=first - 1, after=4)
    for code, said in run_ranks(first, train, Training(tasks, folder, QUIET, stop=stop)):
        assert code == 75, said
    found = trained(then, "stopped", tasks)
    assert distance(found, whole) < 1e-6
    if first == then:
        assert same_result(found, whole)
        assert found["inexact_because"] == []
    else:
        assert found["inexact_because"] == [f"ranks {first} -> {then}, since step 3"]
