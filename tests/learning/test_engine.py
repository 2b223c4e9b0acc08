import math

import pytest
import torch

from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.device import resolve_device
from fvc_lib.learning.engine import Engine, TrainingDivergedError
from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.task import LossSum
from fvc_lib.services.checkpoints import (
    LATEST,
    CheckpointBinding,
    CheckpointFolder,
    CheckpointMismatchError,
    CheckpointWriteError,
)
from fvc_lib.services.errors import DataError, StoppedError

SETTINGS = {
    "epochs": 3, "effective_batch_size": 8, "micro_batch": 4, "learning_rate": 0.01, "weight_decay": 0.01,
    "warmup_share": 0.1, "max_gradient_norm": 1.0, "early_stopping_epochs": 0, "seed": 0,
}  # fmt: skip


class Draining:
    """The video task, with a training that draws random numbers and, where asked, interferes."""

    def __init__(self, task, before=lambda model, batch: None):
        self._task = task
        self.before = before
        self.training_data = task.training_data
        self.validation_data = task.validation_data

    def build_model(self):
        return self._task.build_model()

    def forward(self, model, batch):
        self.before(model, batch)
        outputs = self._task.forward(model, batch)
        if model.training:
            outputs = {"logits": outputs["logits"] + 0.1 * torch.randn(())}
        return outputs

    def loss(self, outputs, batch):
        return self._task.loss(outputs, batch)

    def new_accumulator(self):
        return self._task.new_accumulator()


@pytest.fixture
def make_engine(tiny_training, list_log, tmp_path):
    """An engine on the tiny videos, with its log as ``engine.log``."""

    def make(folder="fold", *, before=lambda model, batch: None, task=None, stop=None, progress=None, memory=None,
             shortages=None, **changes):  # fmt: skip
        log = list_log()
        checkpoints = CheckpointFolder(tmp_path / folder, CheckpointBinding({"lr": changes.get("learning_rate")}, ""))
        engine = Engine(
            task or Draining(tiny_training.task(), before),
            EngineSettings(**{**SETTINGS, **changes}),
            resolve_device("cpu"),
            checkpoints,
            log,
            stop=stop,
            progress=progress,
            memory=memory,
            shortages=shortages,
        )
        engine.log = log
        return engine

    return make


class Observer:
    """A memory observer that keeps what it is told."""

    def __init__(self):
        self.places, self.events = [], []

    def at(self, phase, *, epoch=None, batch_idx=None, global_step=None):
        self.places.append((phase, epoch, batch_idx, global_step))

    def event(self, kind, message, **details):
        self.events.append((kind, details))

    def watch_device(self, device, probe):
        raise AssertionError("there is no accelerator here")

    def of(self, kind):
        return [details for what, details in self.events if what == kind]


@pytest.fixture
def observer():
    return Observer()


def stop_after(steps):
    """A stop flag that is set at the given step boundary."""
    asked = iter(range(1_000_000))
    return lambda: next(asked) >= steps


def same_end(state, other) -> bool:
    return (
        state.history == other.history
        and state.best_epoch == other.best_epoch
        and all(state.best_model[name].equal(tensor) for name, tensor in other.best_model.items())
    )


def latest_weights(tmp_path, folder):
    return torch.load(tmp_path / folder / LATEST, weights_only=True)["state"]["model"]


def test_a_learnable_problem_is_learned(make_engine, tiny_training):
    engine = make_engine(task=tiny_training.task(), epochs=10)
    state = engine.fit()
    scores = BinaryScores()
    loss = engine.predict(engine.task.validation_data, state.best_model, scores)
    assert scores.compute()["roc_auc"] == 1.0
    assert loss.mean() == pytest.approx(state.best_loss)
    assert loss.mean() < 0.4


def test_every_step_and_epoch_is_logged(make_engine):
    seen = []
    engine = make_engine(progress=lambda done, planned: seen.append((done, planned)))
    state = engine.fit()
    assert state.step == 9  # 22 samples in windows of 8, 8 and 6, three times
    assert seen == [*((step, 9) for step in range(1, 10)), (9, 9)]
    for name in ("loss", "learning_rate", "gradient_norm"):
        assert len(engine.log.values("train", name)) == 9
    assert engine.log.values("train", "epoch_loss") == [record.train_loss for record in state.history]
    assert engine.log.values("validation", "loss") == [record.validation["loss"] for record in state.history]
    assert [line[:2] for line in engine.log.lines if line[2:4] == ("validation", "roc_auc")] == [(3, 1), (6, 2), (9, 3)]
    assert state.best_loss == min(record.validation["loss"] for record in state.history)


def test_the_run_repeats_and_leaves_the_caller_s_random_state_alone(make_engine):
    before = torch.get_rng_state()
    first, second = make_engine("a"), make_engine("b")
    assert same_end(first.fit(), second.fit())
    assert first.log.lines == second.log.lines
    assert torch.get_rng_state().equal(before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert make_engine("c", seed=1).fit().history != first.state.history


@pytest.mark.parametrize("stops", [[0], [1], [3], [4], [8], [2, 0, 3], [1, 1, 1]], ids=str)
def test_stopping_at_any_step_and_going_on_changes_nothing(make_engine, tmp_path, stops):
    """Also in mid-epoch, at an epoch's end, and several times within one epoch."""
    whole = make_engine("whole")
    whole.fit()
    lines = []
    for after in stops:
        engine = make_engine("parts", stop=stop_after(after))
        with pytest.raises(StoppedError, match="saved") as caught:
            engine.fit()
        assert caught.value.exit_code == 75
        lines += engine.log.lines
    engine = make_engine("parts")
    assert same_end(engine.fit(), whole.state)
    assert lines + engine.log.lines == whole.log.lines
    wanted = latest_weights(tmp_path, "whole")
    assert all(tensor.equal(wanted[name]) for name, tensor in latest_weights(tmp_path, "parts").items())


def test_a_finished_training_returns_at_once(make_engine):
    state = make_engine().fit()
    again = make_engine(before=lambda model, batch: pytest.fail("it computes"))
    assert same_end(again.fit(), state)
    assert again.log.lines == []


def test_loader_processes_change_nothing(make_engine):
    assert same_end(make_engine("none").fit(), make_engine("two", num_workers=2).fit())


def test_an_out_of_memory_lowers_the_micro_batch_and_keeps_the_result(make_engine, tiny_training):
    calls = []

    def tight(model, batch):
        calls.append(len(batch))
        if model.training and len(calls) > 5 and len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    whole = make_engine("whole", task=tiny_training.task()).fit()
    task = Draining(tiny_training.task(), tight)
    task.forward = lambda model, batch: (tight(model, batch), tiny_training.task().forward(model, batch))[1]
    engine = make_engine("tight", task=task)
    state = engine.fit()
    assert state.micro_batch == 2
    assert engine.log.values("train", "micro_batch") == [2.0]
    for record, wanted in zip(state.history, whole.history, strict=True):
        assert record.train_loss == pytest.approx(wanted.train_loss, rel=1e-4)
    for name, tensor in whole.best_model.items():
        torch.testing.assert_close(state.best_model[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_resumed_training_may_use_smaller_micro_batches_but_not_larger(make_engine, tiny_training):
    sizes = []
    watched = Draining(tiny_training.task(), lambda model, batch: sizes.append(len(batch)))
    with pytest.raises(StoppedError):
        make_engine(stop=stop_after(1)).fit()
    with pytest.raises(StoppedError):
        make_engine(task=watched, micro_batch=8, stop=stop_after(1)).fit()
    assert sizes == [4, 4]
    with pytest.raises(StoppedError):
        make_engine(task=watched, micro_batch=2, stop=stop_after(1)).fit()
    assert sizes[2:] == [2, 2, 2]


class Poisoned(Draining):
    """The loss of the given training calls is NaN."""

    def __init__(self, task, calls):
        super().__init__(task)
        self.calls, self.count = set(calls), 0

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        if not torch.is_grad_enabled():
            return loss
        self.count += 1
        return LossSum(loss.total * math.nan, loss.weight) if self.count - 1 in self.calls else loss


def test_a_loss_that_is_not_finite_takes_no_step_and_names_the_samples(make_engine, tiny_training, tmp_path, caplog):
    engine = make_engine(task=Poisoned(tiny_training.task(), [0, 1]), epochs=1, stop=stop_after(1))
    with pytest.raises(StoppedError):
        engine.fit()
    weights = latest_weights(tmp_path, "fold")
    untouched = make_engine("other", stop=stop_after(0))
    with pytest.raises(StoppedError):
        untouched.fit()
    assert all(tensor.equal(weights[name]) for name, tensor in latest_weights(tmp_path, "other").items())
    assert "loss is not finite; no step taken; samples: 'video" in caplog.text
    assert engine.state.nonfinite_steps == 1


def test_too_many_such_losses_end_the_training_with_the_last_good_checkpoint(make_engine, tiny_training):
    engine = make_engine(task=Poisoned(tiny_training.task(), range(6, 100)), max_nonfinite_steps=2)
    with pytest.raises(TrainingDivergedError, match=r"step 6: the loss was not finite for the 3th time.*learning_rate"):
        engine.fit()
    resumed = make_engine(stop=stop_after(0))
    with pytest.raises(StoppedError):
        resumed.fit()
    assert (resumed.state.epochs_done, resumed.state.nonfinite_steps) == (1, 0)


def test_a_gradient_that_is_not_finite_takes_no_step(make_engine, tiny_training, caplog):
    def poison(model, batch):
        if model.training:
            model.head.bias.register_hook(lambda gradient: gradient * math.inf)

    with pytest.raises(TrainingDivergedError, match="gradient was not finite"):
        make_engine(before=poison, max_nonfinite_steps=0).fit()
    assert "gradient is not finite" in caplog.text


def test_early_stopping_waits_its_turn_and_the_best_epoch_stands(make_engine):
    state = make_engine(epochs=30, early_stopping_epochs=2, learning_rate=0.2).fit()
    assert state.epochs_done == state.best_epoch + 2 < 30


def test_balanced_sampling_draws_classes_evenly(make_engine, tiny_training):
    task = tiny_training.task()
    task.training_data.rows = (
        tuple(row for row in task.training_data.rows if row.label == 0)[:6]
        + tuple(row for row in task.training_data.rows if row.label == 1)[:2]
    )
    drawn = []
    keep = Draining(task, lambda model, batch: drawn.extend(batch.tensors["label"].tolist() if model.training else []))
    make_engine(task=keep, balance_classes=True, epochs=2).fit()
    assert sum(drawn) == len(drawn) / 2 == 8


def test_no_training_data_is_refused(make_engine, tiny_training):
    task = tiny_training.task()
    task.training_data.rows = ()
    with pytest.raises(DataError, match="got no sample"):
        make_engine(task=task)


def test_another_configuration_is_refused(make_engine):
    make_engine(epochs=1).fit()
    with pytest.raises(CheckpointMismatchError, match=r"lr: None -> 0\.5"):
        make_engine(learning_rate=0.5).fit()


def test_a_folder_that_cannot_be_written_fails_before_the_first_step(make_engine, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError):
        make_engine("file/fold", before=lambda model, batch: pytest.fail("it computes")).fit()


def test_a_checkpoint_in_mid_epoch_is_written_when_due(make_engine, tmp_path):
    steps = []

    def watch(model, batch):
        engine._checkpoints.finish()
        path = tmp_path / "fold" / LATEST
        steps.append(torch.load(path, weights_only=True)["step"])

    engine = make_engine(before=watch, micro_batch=8, checkpoint_seconds=0, epochs=1)
    engine.fit()
    assert steps == [0, 1, 2, 2]  # three windows, then validation


def test_memory_is_told_where_training_is(make_engine, observer):
    make_engine(epochs=1, memory=observer).fit()
    assert observer.places == [("train", 1, 0, 0), ("train", 1, 1, 1), ("train", 1, 2, 2), ("validation", 1, 3, 3)]
