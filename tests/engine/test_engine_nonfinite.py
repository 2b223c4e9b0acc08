import math

import pytest
import torch

from fvc_lib.engine.loop import TrainingDivergedError
from fvc_lib.engine.task import LossSum
from fvc_lib.services.errors import StoppedError
from tests.kits.engine_kit import draining, latest_weights, stop_after
from tests.kits.task_kit import changed, each_task


class _Poisoned:
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        if not torch.is_grad_enabled():
            return loss
        self.counted.append(len(self.counted))
        return LossSum(loss.total * math.nan, loss.weight) if self.counted[-1] in self.calls else loss


def poisoned(task, calls):
    """Return ``task`` with a NaN loss in the given training calls."""
    return changed(draining(task), _Poisoned, calls=set(calls), counted=[])


@pytest.mark.fault(15)
@each_task(long=("image",))
def test_a_loss_that_is_not_finite_takes_no_step_and_names_the_samples(make_engine, tasks, tmp_path, caplog):
    task = tasks()
    name = task.training_data[0].sample_id.rstrip("0123456789")
    engine = make_engine(task=poisoned(task, [0, 1]), epochs=1, stop=stop_after(1))
    with pytest.raises(StoppedError):
        engine.fit()
    weights = latest_weights(tmp_path, "fold")
    untouched = make_engine("other", stop=stop_after(0))
    with pytest.raises(StoppedError):
        untouched.fit()
    assert all(tensor.equal(weights[name]) for name, tensor in latest_weights(tmp_path, "other").items())
    assert f"loss is not finite; no step taken; samples: '{name}" in caplog.text
    assert engine.state.nonfinite_steps == 1


@pytest.mark.fault(15)
@each_task(long=("image", "video_text"))
def test_too_many_such_losses_end_the_training_with_the_last_good_checkpoint(make_engine, tasks):
    engine = make_engine(task=poisoned(tasks(), range(6, 100)), max_nonfinite_steps=2)
    with pytest.raises(TrainingDivergedError, match=r"step 6: loss is not finite.* 3 times.*learning_rate"):
        engine.fit()
    resumed = make_engine(stop=stop_after(0))
    with pytest.raises(StoppedError):
        resumed.fit()
    assert (resumed.state.epochs_done, resumed.state.nonfinite_steps) == (1, 0)


class _NanInValidation:
    def new_accumulator(self):
        self.seen.append(len(self.seen))
        return super().new_accumulator()

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        if not model.training and self.seen[-1] in self.epochs:
            for values in outputs.values():
                values[0] = math.nan
        return outputs


@pytest.mark.fault(15)
@each_task(long=("image", "video_text"))
def test_a_validation_score_that_is_nan_costs_its_epoch_and_names_its_samples(make_engine, tasks, observer):
    task = tasks()
    name = task.validation_data[0].sample_id
    nan_in_the_second = changed(draining(task), _NanInValidation, epochs={1}, seen=[])
    engine = make_engine(task=nan_in_the_second, memory=observer)
    state = engine.fit()
    assert state.epochs_done == 3
    assert state.best_epoch in (1, 3)
    assert math.isnan(state.history[1].validation["loss"])
    assert all(math.isfinite(state.history[epoch].validation["loss"]) for epoch in (0, 2))
    metrics = state.history[1].validation.values()
    assert sum(map(math.isnan, metrics)) > 2
    assert [name in event["samples"] for event in observer.of("nonfinite")] == [True]
