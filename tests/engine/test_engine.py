import pytest
import torch

from fvc_lib.services.checkpoint_files import LATEST
from fvc_lib.services.errors import StoppedError
from fvc_lib.tasks.video.training import BinaryScores
from tests.kits.engine_kit import latest_weights, same_end, stop_after
from tests.kits.task_kit import each_task


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
    assert state.step == 9  # 22 samples in effective batches of 8, 8 and 6, three times
    assert seen == [*((step, 9) for step in range(10)), (9, 9)]
    for name in ("loss", "learning_rate", "gradient_norm"):
        assert len(engine.log.values("train", name)) == 9
    assert engine.log.values("train", "epoch_loss") == [record.train_loss for record in state.history]
    assert engine.log.values("validation", "loss") == [record.validation["loss"] for record in state.history]
    assert [line[:2] for line in engine.log.lines if line[2:4] == ("validation", "roc_auc")] == [(3, 1), (6, 2), (9, 3)]
    assert state.best_loss == min(record.validation["loss"] for record in state.history)


@each_task(long=("image", "video_text"))
def test_the_run_repeats_and_leaves_the_caller_s_random_state_alone(make_engine):
    before = torch.get_rng_state()
    first, second = make_engine("a"), make_engine("b")
    assert same_end(first.fit(), second.fit())
    assert first.log.lines == second.log.lines
    assert torch.get_rng_state().equal(before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert make_engine("c", seed=1).fit().history != first.state.history


_OFTEN = [2, 0, 3]  # within the first epoch, at once, and within the second


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    "stops", [_OFTEN, *(pytest.param(s, marks=pytest.mark.long) for s in ([0], [1], [3], [4], [8], [1, 1, 1]))], ids=str
)
@each_task(long=("image", "video_text"))
def test_stopping_at_any_step_and_going_on_changes_nothing(make_engine, tmp_path, stops):
    """This holds in mid-epoch, at the end of an epoch, and for several stops within one epoch."""
    whole = make_engine("whole")
    whole.fit()
    lines = []
    for after in stops:
        engine = make_engine("parts", stop=stop_after(after))
        with pytest.raises(StoppedError, match="saved") as caught:
            engine.fit()
        assert caught.value.exit_code == 75
        lines += engine.log.lines
    engine = make_engine("parts", num_workers=1)
    assert same_end(engine.fit(), whole.state)
    assert lines + engine.log.lines == whole.log.lines
    wanted = latest_weights(tmp_path, "whole")
    assert all(tensor.equal(wanted[name]) for name, tensor in latest_weights(tmp_path, "parts").items())


def test_early_stopping_waits_its_turn_and_the_best_epoch_stands(make_engine):
    state = make_engine(epochs=30, early_stopping_epochs=2, learning_rate=0.2).fit()
    assert state.epochs_done == state.best_epoch + 2 < 30


def test_a_checkpoint_in_mid_epoch_is_written_when_due(make_engine, tmp_path):
    steps = []

    def watch(model, batch):
        path = tmp_path / "fold" / LATEST
        steps.append(torch.load(path, weights_only=True)["step"])

    engine = make_engine(before=watch, micro_batch=8, checkpoint_seconds=0, epochs=1)
    engine.fit()
    assert steps == [0, 1, 2, 3]  # three effective batches, then validation


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("changed", "name", "value"), [("threads", "get_num_threads", lambda: 99), ("torch", "__version__", "9.9.9")]
)
def test_other_threads_or_another_torch_withdraw_the_claim_of_equal_bits(
    make_engine, monkeypatch, caplog, changed, name, value
):
    with pytest.raises(StoppedError):
        make_engine(stop=stop_after(4)).fit()
    assert make_engine("whole").fit().inexact_because == []
    with monkeypatch.context() as patch:
        patch.setattr(torch, name, value)
        state = make_engine().fit()
    assert len(state.inexact_because) >= 1
    assert any(reason.startswith(f"{changed} ") and reason.endswith("since step 3") for reason in state.inexact_because)
    assert "equality to the bit is no longer claimed" in caplog.text
    assert make_engine().fit().inexact_because[: len(state.inexact_because)] == state.inexact_because


def test_a_checkpoint_of_another_model_is_refused_by_its_tensors(make_engine, tiny_training):
    make_engine(epochs=1).fit()
    with pytest.raises(RuntimeError, match="Missing key"):
        make_engine(task=tiny_training.task(model="r2plus1d_small"), epochs=1).fit()
