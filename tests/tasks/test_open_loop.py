"""The loop in the open: the same bits as the one call, with a loss or a network of a cell, interrupted and edited."""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.shared_training import OUTCOME
from fvc_lib.tasks.video.training import VideoTask, open_training, train_fold
from tests.kits.training import ListLog

OF_TIME = {"seconds", "finished_utc", "peak_rss_bytes", "predicted_peak_bytes"}


class Brightness(nn.Module):
    """A network of a notebook's cell."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, frames):
        return self.line(frames.float().mean((1, 3, 4)) / 255).squeeze(1)


def loop(tiny, log, *, network=None, cell="loss = training.loss(network, batch)", own_loss=False, stop_at=None):
    training = open_training(tiny.paths, tiny.config, 0, network, cell=cell, metric_log=log)
    for number, (trained, batch) in enumerate(training.batches()):
        if number == stop_at:
            break
        loss = training.loss(trained, batch)
        if own_loss:
            loss = F.mse_loss(trained(batch.tensors["frames"]).sigmoid(), batch.tensors["label"])
        training.step(loss)
    return training.finish()


def facts(paths):
    """The record without times and memory."""
    return json.loads(
        paths.fold_outcome(0).read_text(), object_hook=lambda found: {k: found[k] for k in found.keys() - OF_TIME}
    )


def files(paths):
    names = [paths.fold_checkpoints(0) / BEST, paths.fold_checkpoints(0) / "control" / BEST, paths.predictions(0)]
    return [path.read_bytes() for path in names]


def test_the_loop_in_the_open_equals_the_one_call_also_interrupted_and_out_of_memory(tiny_training, monkeypatch):
    tiny, log, own_log = tiny_training, ListLog(), ListLog()
    whole = RunPaths(shutil.copytree(tiny.paths.root, tiny.paths.root.with_name("whole")))
    with monkeypatch.context() as patched:
        forward, calls = VideoTask.forward, []

        def out_of_memory_once(task, model, batch):
            calls.append(len(batch))
            if len(calls) == 5:
                raise torch.OutOfMemoryError("no room")
            return forward(task, model, batch)

        patched.setattr(VideoTask, "forward", out_of_memory_once)
        train_fold(whole, tiny.config, 0, metric_log=log)
        calls.clear()
        with pytest.raises(UsageError, match="not come to its end"):
            loop(tiny, ListLog(), stop_at=3)
        calls.clear()
        loop(tiny, own_log)
    assert facts(whole)["training"]["micro_batch_schedule"]
    assert facts(tiny.paths) == facts(whole)
    assert files(tiny.paths) == files(whole)
    assert own_log.lines == log.lines


def test_an_edited_cell_trains_again_with_its_loss_or_network_and_a_comment_does_not(tiny_training, list_log):
    tiny = tiny_training.with_config(epochs=1)
    first = loop(tiny, list_log())
    assert loop(tiny, list_log(), cell="loss = training.loss(network, batch)  # as before").train_anew
    own = loop(tiny, list_log(), cell="own", own_loss=True)
    assert own.training.initial_weights == first.training.initial_weights
    assert own.training.best_weights != first.training.best_weights
    other = loop(tiny, list_log(), cell="own", network=Brightness)
    assert (other.model, other.num_parameters) == ("Brightness", 4)
    for name in ("", "control"):
        assert load_weights(tiny.paths.fold_checkpoints(0) / name / BEST).keys() == {"line.weight", "line.bias"}
    assert len(list(tiny.paths.superseded.glob(f"*/checkpoints/fold_0/{OUTCOME}"))) == 2


def test_a_loop_without_a_step_is_refused(tiny_training, list_log):
    with pytest.raises(UsageError, match="step"):
        list(open_training(tiny_training.paths, tiny_training.config, 0, metric_log=list_log()).batches())
