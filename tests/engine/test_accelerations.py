"""What makes a training faster is asked for, refused where it cannot be, and changes nothing but rounding."""

import copy
import itertools
import logging
import pickle

import pytest
import torch
from torch import nn

from fvc_lib.engine.device import accelerated, is_compiled, resolve_device
from fvc_lib.engine.task import Batch, sent_ahead
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.parameters import resolve_config
from tests.gpu.trainings import ClipTask, Greedy, Lab, SmallNet, weight_distance

CPU = torch.device("cpu")


@pytest.fixture
def lab(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Lab(resolve_device("cpu"), tmp_path)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def compiled():
    try:
        return resolve_device("cpu", "off", ("compile",))
    except UsageError as no_compiler:
        pytest.skip(str(no_compiler))


def test_they_are_asked_for_by_name_and_change_no_hash():
    plain, fast = resolve_config({}, environ={}), resolve_config({"accelerations": "fused_adamw,compile"}, environ={})
    assert (plain.accelerations, fast.accelerations) == ((), ("fused_adamw", "compile"))
    assert plain.config_hash == fast.config_hash
    assert plain.training_values() == fast.training_values()
    with pytest.raises(UsageError, match="accelerations"):
        resolve_config({"accelerations": "warp"}, environ={})


def test_one_that_the_device_cannot_do_is_refused():
    with pytest.raises(UsageError, match=r"cudnn_benchmark is not possible on cpu: cuDNN is CUDA's. Leave it out"):
        resolve_device("cpu", accelerations=("cudnn_benchmark",))


def test_compiling_without_a_compiler_is_refused():
    inductor = pytest.importorskip("torch._inductor.config")
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(UsageError, match=r"compile is not possible on cpu: .*finds none"),
    ):
        resolve_device("cpu", accelerations=("compile",))


@pytest.mark.parametrize(
    ("name", "model", "why"),
    [("channels_last", nn.Linear(2, 1), "no convolution"), ("stem_pieces", SmallNet(), "no stem")],
)
def test_one_that_does_nothing_for_a_network_is_refused(name, model, why):
    with pytest.raises(UsageError, match=f"accelerations: {name} does nothing for .*{why}.*Leave it out"):
        accelerated(model, resolve_device("cpu", accelerations=(name,)))


@pytest.mark.slow
def test_a_compiled_training_differs_by_rounding_and_keeps_its_names(lab, compiled):
    plain, found = lab.train("plain"), lab.train("compiled", compute=compiled)
    assert 0 < weight_distance(found, plain) < 1e-5
    assert found.best_model.keys() == plain.best_model.keys() == SmallNet().state_dict().keys()
    assert not found.inexact_because


@pytest.mark.slow
def test_a_compiled_training_goes_on_to_the_same_bits(lab, compiled):
    # 20 clips: the last of every epoch is a smaller batch, for which kernels of their own are made.
    whole, asked = lab.train("whole", ClipTask(20), compute=compiled), itertools.count()
    with pytest.raises(StoppedError):
        lab.engine("stopped", ClipTask(20), compiled, stop=lambda: next(asked) >= 2).fit()
    torch._dynamo.reset()  # as in another process: the smaller batch is now the first that it compiles for
    assert weight_distance(lab.train("stopped", ClipTask(20), compute=compiled), whole) == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "validation", "optimizer"])
def test_a_compiled_training_survives_out_of_memory(lab, compiled, place):
    whole, found = lab.train("whole", compute=compiled), lab.train(place, Greedy(place), compute=compiled)
    assert weight_distance(found, whole) < 1e-5
    halved = place in ("forward", "backward")
    assert [each.micro_batch for each in found.micro_batches.changes] == ([8, 4] if halved else [8])


@pytest.mark.slow
def test_a_compiled_network_is_copied_and_pickled(compiled):
    model, frames = accelerated(SmallNet(), compiled).eval(), torch.zeros(2, 4, 3, 16, 16, dtype=torch.uint8)
    expected = model(frames)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_compiled(copied)
        assert copied(frames).equal(expected)


@pytest.mark.slow
def test_compiling_what_is_never_called_is_told(lab, compiled, caplog):
    class HeadAlone(ClipTask):
        def forward(self, model, batch):
            colours = batch.tensors["frames"].float().mean((1, 3, 4))  # (B, 3)
            return {"logits": model.head(colours.repeat(1, 22)[:, :64]).squeeze(1)}

    with caplog.at_level(logging.WARNING):
        lab.train("head", HeadAlone(), compute=compiled, epochs=1)
    assert "compile did nothing" in caplog.text


def test_parts_that_are_sent_ahead_come_in_order_with_their_numbers():
    # The CPU's streams do nothing; that a GPU's parts are whole is among the promises that are tried there.
    batch = Batch(tuple("abcde"), {"pixels": torch.arange(5)})
    parts = [(start, batch.part(start, start + 2)) for start in (0, 2, 4)]
    taken = []

    def one_by_one():
        for number, part in parts:
            taken.append(number)
            yield number, part

    seen = [(number, part.sample_ids, list(taken)) for number, part in sent_ahead(one_by_one(), CPU)]
    assert seen == [(0, ("a", "b"), [0, 2]), (2, ("c", "d"), [0, 2, 4]), (4, ("e",), [0, 2, 4])]
    assert list(sent_ahead(iter(()), CPU)) == []
