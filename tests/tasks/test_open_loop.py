"""The loop in the open, as notebook 04 has it: the bits of the one call, and losses and networks of a cell."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from torch import nn

from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.shared_training import OUTCOME
from fvc_lib.tasks.video.predicting import networks_of_run
from fvc_lib.tasks.video.training import VideoTask, open_training, train_fold
from tests.kits.training import ListLog

CELLS = nbformat.read(Path(__file__).parents[2] / "notebooks" / "04_fold_training.ipynb", as_version=4).cells
(LOOP,) = [cell.source for cell in CELLS if cell.cell_type == "code" and "training.batches()" in cell.source]
(OWN,) = [cell.source.split("```")[1].removeprefix("python\n") for cell in CELLS if "```python" in cell.source]
# Bit for bit the same loss, also where memory runs out; its mean may be read after the step.
SAME = LOOP.replace("training.loss(network, batch)", "0.5 * (0.0 + 2 * training.loss(network, batch))")
SAME += "\n    mean = float(loss)"
OF_TIME = {"seconds", "finished_utc", "peak_rss_bytes", "predicted_peak_bytes"}


class Brightness(nn.Module):
    """A network of a notebook's cell."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, frames):
        return self.line(frames.float().mean((1, 3, 4)) / 255).squeeze(1)


def run_cell(source, tiny, log):
    """Run a cell with a loop and the call that ends it, and return the outcome."""
    stage = SimpleNamespace(paths=tiny.paths, config=tiny.config, fold=0, training_options=lambda: {"metric_log": log})
    variables = {"stage": stage, "open_training": open_training, "In": [source], "MyNet": Brightness}
    exec(source, variables)
    return variables["training"].finish()


def facts(paths):
    """The record without times and memory."""
    return json.loads(
        paths.fold_outcome(0).read_text(), object_hook=lambda found: {k: found[k] for k in found.keys() - OF_TIME}
    )


def files(paths):
    names = [paths.fold_checkpoints(0) / BEST, paths.fold_checkpoints(0) / "control" / BEST, paths.predictions(0)]
    return [path.read_bytes() for path in names]


def test_the_loop_in_the_open_equals_the_one_call_also_interrupted_and_out_of_memory(tiny_training, monkeypatch):
    tiny, log, own_log, calls = tiny_training.with_config(epochs=1), ListLog(), ListLog(), []
    whole = RunPaths(shutil.copytree(tiny.paths.root, tiny.paths.root.with_name("whole")))
    forward = VideoTask.forward

    def out_of_memory_once(task, model, batch):
        calls.append(len(batch))
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no room")
        return forward(task, model, batch)

    monkeypatch.setattr(VideoTask, "forward", out_of_memory_once)
    train_fold(whole, tiny.config, 0, metric_log=log)
    calls.clear()
    with pytest.raises(UsageError, match="not come to its end"):
        run_cell(SAME + "\n    if batch.sample_ids:\n        break", tiny, ListLog())
    calls.clear()
    run_cell(SAME, tiny, own_log)
    assert facts(whole)["training"]["micro_batch_schedule"]
    assert facts(tiny.paths) == facts(whole)
    assert files(tiny.paths) == files(whole)
    assert own_log.lines == log.lines


def test_an_edited_cell_trains_again_with_its_loss_or_network_and_a_comment_does_not(
    tiny_training, list_log, monkeypatch
):
    tiny = tiny_training.with_config(epochs=1)
    monkeypatch.setattr(Brightness, "__module__", "__main__")
    run_cell(LOOP, tiny, list_log())
    assert run_cell(LOOP + "  # as before", tiny, list_log()).train_anew
    other = run_cell(OWN, tiny, list_log())
    assert (other.model, other.num_parameters) == ("Brightness", 4)
    for name in ("", "control"):
        assert load_weights(tiny.paths.fold_checkpoints(0) / name / BEST).keys() == {"line.weight", "line.bias"}
    assert len(list(tiny.paths.superseded.glob(f"*/checkpoints/fold_0/{OUTCOME}"))) == 1
    tiny.paths.params_yaml.write_text(tiny.config.to_yaml())
    with pytest.raises(UsageError, match=r"Brightness stands in a notebook's cell.*-p model FILE.py:CLASS"):
        networks_of_run(tiny.paths, [0])


def test_an_edited_loop_that_is_interrupted_shows_none_of_the_steps_of_the_training_before(tiny_training):
    tiny = tiny_training.with_config(epochs=2)
    file = tiny.paths.metrics("04_fold_training", 0)

    def losses():
        return learning_curves([tiny.paths], metrics=["loss"], phases=["train"]).frame["value"].to_list()

    with MetricLog(file, run_id=tiny.paths.run_id, fold=0) as log:
        run_cell(LOOP, tiny, log)
    before = losses()
    whole = file.read_bytes()
    edited = LOOP.replace(
        "network, batch in training.batches()", "i, (network, batch) in enumerate(training.batches())"
    )
    edited = edited.replace("training.loss", "3 * training.loss") + "\n    if i == 2:\n        break"
    with MetricLog(file, run_id=tiny.paths.run_id, fold=0, attempt=2) as log, pytest.raises(UsageError, match="end"):
        run_cell(edited, tiny, log)
    assert 1 <= len(losses()) < len(before)
    assert losses()[0] == pytest.approx(3 * before[0])
    (old,) = tiny.paths.superseded.glob(f"*/{file.relative_to(tiny.paths.root)}")
    assert old.read_bytes() == whole


def test_a_loop_without_a_step_is_refused(tiny_training, list_log):
    with pytest.raises(UsageError, match="step"):
        run_cell(LOOP.replace("training.step(loss)", "pass"), tiny_training, list_log())
