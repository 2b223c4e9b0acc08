import math

import pytest
import torch

from fvc_lib.learning.engine import TrainingDivergedError
from fvc_lib.learning.task import LossSum
from fvc_lib.services.errors import StoppedError
from tests.learning.engine_kit import HALF, Draining, latest_weights, stop_after


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


@pytest.mark.fault(15)
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


@pytest.mark.fault(15)
def test_too_many_such_losses_end_the_training_with_the_last_good_checkpoint(make_engine, tiny_training):
    engine = make_engine(task=Poisoned(tiny_training.task(), range(6, 100)), max_nonfinite_steps=2)
    with pytest.raises(TrainingDivergedError, match=r"step 6: the loss was not finite 3 times.*learning_rate"):
        engine.fit()
    resumed = make_engine(stop=stop_after(0))
    with pytest.raises(StoppedError):
        resumed.fit()
    assert (resumed.state.epochs_done, resumed.state.nonfinite_steps) == (1, 0)


@pytest.mark.fault(15)
def test_a_gradient_that_is_not_finite_takes_no_step(make_engine, tiny_training, caplog):
    def poison(model, batch):
        if model.training:
            model.head.bias.register_hook(lambda gradient: gradient * math.inf)

    with pytest.raises(TrainingDivergedError, match="gradient was not finite"):
        make_engine(before=poison, max_nonfinite_steps=0).fit()
    assert "gradient is not finite" in caplog.text


class NanInValidation(Draining):
    """One validation score is NaN whenever ``epochs_seen`` is in ``epochs`` (0-based), or always."""

    def __init__(self, task, epochs):
        super().__init__(task)
        self.epochs, self.seen = epochs, 0

    def new_accumulator(self):
        self.seen += 1
        return super().new_accumulator()

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        if not model.training and self.seen - 1 in self.epochs:
            outputs["logits"][0] = math.nan
        return outputs


@pytest.mark.fault(15)
def test_a_validation_score_that_is_nan_costs_its_epoch_and_names_its_samples(make_engine, tiny_training, observer):
    engine = make_engine(task=NanInValidation(tiny_training.task(), {1}), memory=observer)
    state = engine.fit()
    assert state.epochs_done == 3
    assert state.best_epoch in (1, 3)
    assert math.isnan(state.history[1].validation["roc_auc"])
    assert all("video" in event["samples"] for event in observer.of("nonfinite"))


@pytest.mark.fault(15)
def test_validation_that_is_always_nan_ends_with_what_to_look_at(make_engine, tiny_training):
    engine = make_engine(task=NanInValidation(tiny_training.task(), range(100)))
    with pytest.raises(TrainingDivergedError, match=r"not finite in any of 3 epochs.*validation videos"):
        engine.fit()


@pytest.mark.fault(15)
def test_under_a_loss_scaler_a_gradient_that_is_always_nan_ends_too(make_engine):
    def poison(model, batch):
        if model.training:
            model.head.bias.register_hook(lambda gradient: gradient * math.nan)

    with pytest.raises(TrainingDivergedError, match="gradient was not finite 3 times"):
        make_engine(before=poison, compute=HALF, epochs=20, max_nonfinite_steps=2).fit()


def test_an_overflow_under_a_loss_scaler_is_not_counted(make_engine):
    state = make_engine(compute=HALF, epochs=1).fit()  # the first scale, 65536, may be too high for a step or two
    assert state.nonfinite_steps == 0
    assert state.best_model
