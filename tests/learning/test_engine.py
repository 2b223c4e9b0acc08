import gc
import json
import math
import os
import signal

import pytest
import torch

from fvc_lib.learning.accumulators import BinaryScores
from fvc_lib.learning.device import ComputeDevice, resolve_device
from fvc_lib.learning.engine import Engine, TrainingDivergedError
from fvc_lib.learning.engine_settings import EngineSettings
from fvc_lib.learning.shortages import ShortageFolder
from fvc_lib.learning.task import LossSum
from fvc_lib.learning.transaction import MemoryExhaustedError
from fvc_lib.services.checkpoints import (
    FORK_NOTE,
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
             shortages=None, compute=None, **changes):  # fmt: skip
        log = list_log()
        checkpoints = CheckpointFolder(tmp_path / folder, CheckpointBinding({"lr": changes.get("learning_rate")}, ""))
        engine = Engine(
            task or Draining(tiny_training.task(), before),
            EngineSettings(**{**SETTINGS, **changes}),
            compute or resolve_device("cpu"),
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

    prefix = ""

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


@pytest.mark.fault(13)
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
    assert steps == [0, 1, 2, 3]  # three windows, then validation


def test_memory_is_told_where_training_is(make_engine, observer):
    make_engine(epochs=1, memory=observer).fit()
    assert observer.places == [("train", 1, 0, 0), ("train", 1, 1, 1), ("train", 1, 2, 2), ("validation", 1, 3, 3)]


class EndsOnce:
    """Memory ends at the n-th call (from 1) of one kind, ``forward``, ``backward`` or ``validation``, and then not."""

    def __init__(self, kind, number):
        self.kind, self.number, self.calls = kind, number, 0

    def __call__(self, kind):
        if kind == self.kind:
            self.calls += 1
            if self.calls == self.number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


class Tight(Draining):
    """The tiny task, in which memory ends as ``ends`` says. Random numbers are drawn sample by sample."""

    def __init__(self, task, ends):
        super().__init__(task)
        self.ends = ends

    def forward(self, model, batch):
        self.ends("forward" if model.training else "validation")
        logits = self._task.forward(model, batch)["logits"]
        if model.training:
            logits = logits + 0.1 * torch.randn(len(batch))
            logits.register_hook(lambda gradient: self.ends("backward"))
        return {"logits": logits}


def distance(state, other):
    """The largest relative difference between two trainings' weights."""
    return max(
        ((tensor - other.best_model[name]).norm() / other.best_model[name].norm()).item()
        for name, tensor in state.best_model.items()
    )


TWO_EPOCHS = {"epochs": 2, "micro_batch": 8, "learning_rate": 1e-4}


@pytest.mark.fault(16, 17, 18)
@pytest.mark.parametrize("kind", ["forward", "backward", "validation"])
def test_memory_that_ends_at_any_call_leaves_the_result(make_engine, tiny_training, observer, kind, tally):
    """k = 1, 2, ... until a training has no k-th call any more."""
    task = tiny_training.task(num_training_rows=14)
    whole = make_engine("whole", task=Tight(task, EndsOnce(kind, 0)), **TWO_EPOCHS).fit()
    for number in range(1, 100):
        ends = EndsOnce(kind, number)
        state = make_engine(f"at {number}", task=Tight(task, ends), memory=observer, **TWO_EPOCHS).fit()
        if ends.calls < number:
            break
        assert distance(state, whole) < 1e-5
        assert state.step == whole.step
        for record, wanted in zip(state.history, whole.history, strict=True):
            assert record.validation["roc_auc"] == wanted.validation["roc_auc"]
            assert record.validation["loss"] == pytest.approx(wanted.validation["loss"], rel=1e-5)
        if kind == "validation":  # done again as it was: nothing differs, not in a bit
            assert same_end(state, whole)
        else:
            assert state.micro_batch < 8
        tally.add(survived=1)
    assert number > 2
    assert len(observer.of("out_of_memory")) == number - 1
    assert {details["where"] for details in observer.of("out_of_memory")} == {kind}


@pytest.mark.fault(16, 17)
def test_a_replay_of_the_recorded_schedule_repeats_the_bits(make_engine, tiny_training):
    task = tiny_training.task()
    disturbed = make_engine("disturbed", task=Tight(task, EndsOnce("backward", 4)), micro_batch=8).fit()
    assert [(change.step, change.micro_batch) for change in disturbed.micro_batches.changes] == [(0, 8), (3, 4)]
    replay = tuple(disturbed.micro_batches.changes)
    replayed = make_engine("replayed", task=Tight(task, EndsOnce("", 0)), micro_batch=8, replay=replay).fit()
    assert same_end(replayed, disturbed)
    assert not same_end(make_engine("whole", task=Tight(task, EndsOnce("", 0)), micro_batch=8).fit(), disturbed)


def test_after_quiet_steps_the_micro_batch_climbs_back(make_engine, tiny_training, observer):
    task = Tight(tiny_training.task(), EndsOnce("forward", 1))
    engine = make_engine(task=task, micro_batch=8, micro_batch_recovery_steps=2, memory=observer)
    engine.fit()
    assert engine.log.values("train", "micro_batch") == [4.0, 8.0]
    assert [details["reason"] for details in observer.of("micro_batch")] == ["memory ended", "climbs back"]


@pytest.mark.fault(16)
def test_a_kill_after_a_back_off_resumes_with_the_smaller_micro_batch(make_engine, tiny_training):
    task = tiny_training.task()
    whole = make_engine("whole", task=Tight(task, EndsOnce("forward", 2)), micro_batch=8).fit()

    class Killed(BaseException):
        pass

    def kill(done, planned):
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        make_engine("parts", task=Tight(task, EndsOnce("forward", 2)), micro_batch=8, progress=kill).fit()
    state = make_engine("parts", task=Tight(task, EndsOnce("", 0)), micro_batch=8).fit()
    assert same_end(state, whole)
    assert state.micro_batches.changes == whole.micro_batches.changes


@pytest.mark.fault(16)
def test_a_shortage_leaves_a_file_that_says_what_memory_held(make_engine, tiny_training, observer, tmp_path):
    task = Tight(tiny_training.task(), EndsOnce("backward", 2))
    make_engine(task=task, micro_batch=8, memory=observer, shortages=ShortageFolder(tmp_path / "oom")).fit()
    (event,) = observer.of("out_of_memory")
    (path,) = (tmp_path / "oom").iterdir()
    assert path.name == event["context_file"] == "step_000001_train_backward_1.json"
    told = json.loads(path.read_text())
    assert (told["global_step"], told["epoch"], told["micro_batch"], told["micro_batch_next"]) == (1, 1, 8, 4)
    assert told["state"]["asked_bytes"] == 2 * 2**20
    assert told["batch"]["frames"] == "(4, 3, 24, 24) uint8"
    assert [32, 8, 1, 3, 3] in [kind["shape"] for kind in told["state"]["largest_tensors"]]  # a layer's weights


class StepsEnd:
    """AdamW's ``step`` runs out of memory after changing a weight, at the given calls."""

    def __init__(self, monkeypatch, calls):
        self.count, self.foreach = 0, []
        inner = torch.optim.AdamW.step

        def step(optimizer, *arguments, **options):
            self.count += 1
            self.foreach.append(optimizer.param_groups[0].get("foreach"))
            if self.count in calls:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].mul_(7)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
            return inner(optimizer, *arguments, **options)

        monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.fault(19)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_memory_that_ends_in_the_optimizers_step_goes_back_to_a_checkpoint(
    make_engine, observer, monkeypatch, call, tmp_path
):
    whole = make_engine("whole").fit()
    with monkeypatch.context() as patch:
        steps = StepsEnd(patch, {call})
        state = make_engine("lost", memory=observer, shortages=ShortageFolder(tmp_path / "oom")).fit()
    assert same_end(state, whole)
    assert state.step == whole.step == 9
    (event,) = observer.of("step_restored")
    assert event == {"to_step": 0 if call < 4 else 3, "lost_steps": (call - 1) % 3}
    assert steps.count == 9 + 1 + event["lost_steps"]
    assert observer.of("out_of_memory")[0]["where"] == "optimizer_step"
    assert list((tmp_path / "oom").iterdir())


@pytest.mark.fault(19, 20)
def test_a_step_that_never_fits_ends_with_the_checkpoint_and_what_to_try(make_engine, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        steps = StepsEnd(patch, set(range(2, 100)))
        with pytest.raises(MemoryExhaustedError, match=r"optimizer's step 0, 3 times.*checkpoint stands.*smaller"):
            make_engine().fit()
    assert steps.foreach[0] is None
    assert steps.foreach[-1] is False  # the second time, with less memory
    assert same_end(make_engine().fit(), make_engine("whole").fit())


@pytest.mark.fault(20)
def test_memory_that_never_suffices_ends_with_sizes_and_the_checkpoint(make_engine, tiny_training, observer):
    def never(kind):
        if kind == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryExhaustedError, match=r"single sample \(frames \(4, 3, 24, 24\) uint8.*gradient_check"):
        make_engine(task=Tight(tiny_training.task(), never), memory=observer).fit()
    tried = [(event["micro_batch"], event["micro_batch_next"]) for event in observer.of("out_of_memory")]
    assert tried == [(4, 2), (2, 1), (1, None)]
    make_engine(task=tiny_training.task(), epochs=1).fit()


@pytest.mark.fault(29)
@pytest.mark.parametrize("changed", ["threads", "torch"])
def test_other_threads_or_another_torch_withdraw_the_claim_of_equal_bits(make_engine, monkeypatch, caplog, changed):
    with pytest.raises(StoppedError):
        make_engine(stop=stop_after(4)).fit()
    assert make_engine("whole").fit().inexact_because == []
    with monkeypatch.context() as patch:
        if changed == "torch":
            patch.setattr(torch, "__version__", "9.9.9")
        else:
            threads = torch.get_num_threads()
            torch.set_num_threads(threads + 1)
        try:
            state = make_engine().fit()
        finally:
            if changed == "threads":
                torch.set_num_threads(threads)
    assert len(state.inexact_because) >= 1
    assert any(reason.startswith(f"{changed} ") and reason.endswith("since step 3") for reason in state.inexact_because)
    assert "equality to the bit is no longer claimed" in caplog.text
    assert make_engine().fit().inexact_because[: len(state.inexact_because)] == state.inexact_because


@pytest.mark.fault(22)
def test_a_training_whose_loader_process_is_killed_ends_as_if_it_had_not_been(make_engine, observer, tiny_training):
    class Deadly:
        """The tiny training data, of which one sample kills the process that loads it, once."""

        def __init__(self, data, flag):
            self.data, self.flag, self.classes = data, flag, data.classes

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            if index == 7 and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return self.data[index]

    task = Draining(tiny_training.task())
    whole = make_engine("whole").fit()
    task.training_data = Deadly(task.training_data, tiny_training.paths.root / "killed")
    state = make_engine("killed", task=task, num_workers=2, memory=observer).fit()
    assert same_end(state, whole)
    assert len(observer.of("loader_restarted")) == 1


def test_checkpoints_may_be_rarer_than_epochs(make_engine, tmp_path):
    make_engine(epochs=5, checkpoint_epochs=2).fit()
    kept = sorted(path.name for path in (tmp_path / "fold").glob("checkpoint_epoch_*.pt"))
    assert kept == ["checkpoint_epoch_004.pt", "checkpoint_epoch_005.pt"]


def test_recomputed_activations_give_the_same_bits(make_engine):
    assert same_end(make_engine("kept").fit(), make_engine("recomputed", gradient_checkpointing=True).fit())


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


HALF = ComputeDevice(torch.device("cpu"), torch.float16, "half precision, as on an old GPU")


@pytest.mark.fault(19)
def test_a_lost_step_is_also_restored_under_a_loss_scaler(make_engine, observer, monkeypatch):
    whole = make_engine("whole", compute=HALF).fit()
    with monkeypatch.context() as patch:
        StepsEnd(patch, {2})
        state = make_engine("lost", compute=HALF, memory=observer).fit()
    assert len(observer.of("step_restored")) == 1
    assert same_end(state, whole)


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


@pytest.mark.fault(19, 28)
def test_a_fork_that_loses_a_step_still_trains_to_its_own_end(make_engine, monkeypatch, tmp_path):
    make_engine().fit()
    note = {"run_id": "run_1", "config": {"lr": None}}
    (tmp_path / "fold" / FORK_NOTE).write_text(json.dumps(note))
    with monkeypatch.context() as patch:
        StepsEnd(patch, {1})
        state = make_engine(learning_rate=0.02, epochs=5).fit()
    assert state.epochs_done == 5
    assert state.inexact_because[0].startswith("forked from run_1")


def test_a_finished_training_keeps_no_gradients_and_moments(make_engine):
    def with_gradients():
        gc.collect()
        tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.nn.Parameter))
        return {id(parameter): parameter for parameter in tensors if parameter.grad is not None}

    others = with_gradients()  # of other tests in this process
    engine = make_engine(epochs=1)
    engine.fit()
    assert with_gradients().keys() <= others.keys()
    assert engine.state.best_model


@pytest.mark.fault(20)
def test_memory_that_ends_while_loading_ends_with_the_checkpoint_and_what_to_try(make_engine, tiny_training, observer):
    class Hungry:
        def __init__(self, data):
            self.data, self.classes, self.count = data, data.classes, 0

        def __len__(self):
            return len(self.data)

        def __getitems__(self, indices):
            self.count += 1
            return torch.empty(1 << 55, dtype=torch.uint8) if self.count == 3 else self.data.__getitems__(indices)

    task = Draining(tiny_training.task())
    task.training_data = Hungry(task.training_data)
    with pytest.raises(MemoryExhaustedError, match=r"after step 2, outside of a forward.*checkpoint stands: give"):
        make_engine(task=task, memory=observer).fit()
    assert observer.of("out_of_memory")[0]["where"] == "elsewhere"
    assert same_end(make_engine().fit(), make_engine("whole").fit())


@pytest.mark.fault(20)
def test_a_checkpoint_in_mid_epoch_that_does_not_fit_into_memory_is_left_out(make_engine, monkeypatch, observer):
    whole = make_engine("whole").fit()
    inner, count = CheckpointFolder.save, iter(range(100))

    def tight(folder, state, **where):
        if next(count) in (1, 2):  # both within the first epoch
            torch.empty(1 << 55, dtype=torch.uint8)
        inner(folder, state, **where)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", tight)
        assert same_end(make_engine(checkpoint_seconds=0, memory=observer).fit(), whole)
    assert [kind for kind, _ in observer.events] == ["checkpoint_skipped"] * 2


def test_memory_that_ends_in_scoring_withdraws_the_claim(make_engine, tiny_training):
    ends = EndsOnce("", 0)
    engine = make_engine(task=Tight(tiny_training.task(), ends), epochs=1)
    state = engine.fit()
    assert state.inexact_because == []
    failures = iter([1, 1])

    def twice(kind):
        if next(failures, 0):
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine.task.ends = twice
    engine.predict(engine.task.validation_data, state.best_model, BinaryScores())
    assert state.inexact_because == ["memory ended while a finished model was scored"]


def test_a_checkpoint_of_another_model_is_refused_by_its_tensors(make_engine, tiny_training):
    make_engine(epochs=1).fit()
    with pytest.raises(CheckpointMismatchError, match=r"another model: [0-9]+ tensors differ, blocks"):
        make_engine(task=tiny_training.task(model="r2plus1d"), epochs=1).fit()
