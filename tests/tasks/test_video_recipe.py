"""What may be added to the training of task video: what it does, and that it keeps the engine's promises."""

import pytest
import torch
from torch.nn import functional as F

from fvc_lib.engine.task import Batch
from fvc_lib.services.config import resolve_config
from fvc_lib.services.errors import StoppedError
from fvc_lib.tasks.video.task import VideoTask
from tests.kits.engine_kit import latest_weights, same_end, stop_after
from tests.kits.rank_kit import Training, distance, run_ranks, same_weights, train

RECIPE = pytest.mark.parametrize("kind", ["recipe"], indirect=True)
LOGITS = torch.tensor([-3.0, 0.4, 0.0, 6.0])
LABELS = torch.tensor([0.0, 0.0, 1.0, 1.0])


def loss_of(**settings):
    config = resolve_config(settings, environ={})
    task = VideoTask(None, None, config=config, weights=(0.7, 1.6))
    return task.loss({"logits": LOGITS}, Batch(tuple("abcd"), {"label": LABELS}))


@RECIPE
@pytest.mark.parametrize("stops", [[2, 0, 3]], ids=str)
def test_a_training_with_all_of_it_that_is_stopped_goes_on_to_the_same_bits(make_engine, tmp_path, stops):
    whole = make_engine("whole")
    whole.fit()
    for after in stops:
        with pytest.raises(StoppedError):
            make_engine("parts", stop=stop_after(after)).fit()
    assert same_end(make_engine("parts").fit(), whole.state)
    wanted = latest_weights(tmp_path, "whole")
    assert all(tensor.equal(wanted[name]) for name, tensor in latest_weights(tmp_path, "parts").items())


@RECIPE
def test_two_ranks_find_with_all_of_it_what_one_process_finds(tasks, tmp_path):
    found = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        training = Training(tasks, folder, {"epochs": 3, "learning_rate": 1e-4})
        for code, said in run_ranks(size, train, training):
            assert code == 0, said
        found[size] = training.found()
    assert distance(found[2], found[1]) < 1e-6
    assert same_weights(found[2], training.found(1))


def test_at_their_defaults_the_loss_is_torch_s_to_the_bit():
    weights = torch.tensor([0.7, 0.7, 1.6, 1.6])
    wanted = F.binary_cross_entropy_with_logits(LOGITS, LABELS, weights, reduction="sum")
    found = loss_of()
    assert found.total.equal(wanted)
    assert found.weight.equal(weights.sum())


def test_label_smoothing_moves_half_of_its_share_to_the_other_class():
    weights = torch.tensor([0.7, 0.7, 1.6, 1.6])
    moved = 0.8 * LABELS + 0.1
    wanted = F.binary_cross_entropy_with_logits(LOGITS, moved, weights, reduction="sum")
    torch.testing.assert_close(loss_of(label_smoothing=0.2).total, wanted)


def test_focal_gamma_weighs_each_clip_by_how_wrong_it_is():
    weights = torch.tensor([0.7, 0.7, 1.6, 1.6])
    plain = F.binary_cross_entropy_with_logits(LOGITS, LABELS, weights, reduction="none")
    wrong = torch.where(LABELS > 0.5, 1 - LOGITS.sigmoid(), LOGITS.sigmoid())
    found = loss_of(focal_gamma=2.0)
    torch.testing.assert_close(found.total, (wrong**2 * plain).sum())
    assert found.weight.equal(weights.sum())
