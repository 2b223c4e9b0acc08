"""The losses of task video_text, and what is gathered of its outputs."""

import math

import pytest
import torch
from torch.nn import functional as F

from fvc_lib.detectors.own.video_text import positive_pairs, sigmoid_contrastive, softmax_contrastive
from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.step import BatchTransaction
from fvc_lib.engine.task import Batch
from fvc_lib.tasks.video_text.task import VideoTextOutputs, VideoTextTask
from tests.kits.video_text_kit import CONFIG, CPU, pairs, planned, tiny_task

VIDEOS, TEXTS = (5, 5, 2, 9, 7), (1, 3, 1, 4, 3)  # video 5 has two texts; texts 1 and 3 have two videos each


def built(task):
    with forked_random_state(0, CPU):
        return task.build_model()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_gradients_are_those_of_the_whole_batch_at_once(loss, micro_batch):
    """The oracle writes the sum of the losses down for six pairs, two of which have one text."""
    plan = planned(contrastive=loss)
    data, config = pairs(plan=plan), CONFIG.model_copy(update={"contrastive_weight": 0.7, "caption_weight": 0.5})
    task, batch = VideoTextTask(data, data, plan, config), data.whole()
    model, oracle = built(task), built(task)
    outputs = oracle(batch.tensors)
    positives = positive_pairs(batch.tensors["video_index"], batch.tensors["text_index"])
    similarities = oracle.joint.scale(outputs["video_embedding"], outputs["text_embedding"])
    dense = 0.7 * (softmax_contrastive if loss == "softmax" else sigmoid_contrastive)(similarities, positives)
    dense = (dense + 0.5 * outputs["caption_loss"].sum()) / 6
    dense.backward()
    transaction = BatchTransaction(task, model, Precision(resolve_device("cpu", "off")), CPU)
    found = transaction.gradients(batch, micro_batch)
    assert found.loss.mean() == pytest.approx(float(dense.detach()), rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 1e-5 * float(theirs.grad.norm()), name


def test_every_sample_weighs_one_and_captions_are_written_only_when_asked_for():
    for changes in ({}, {"captions": False}, {"contrastive": None}):
        plan = planned(**changes)
        task, batch = tiny_task(plan), pairs(plan=plan).whole()
        loss = task.loss(task.forward(built(task), batch), batch)
        assert float(loss.weight) == 6
        assert (float(loss.total.detach()) == 0) is (not plan.captions)
    task, batch = tiny_task(), pairs().whole()
    model = built(task).eval()
    with torch.no_grad():
        assert "caption_tokens" not in task.forward(model, batch)
        task.writes_captions = True
        assert task.forward(model, batch)["caption_tokens"].shape == (6, 6)


def test_equal_texts_and_equal_videos_are_one_and_what_is_no_number_measures_nothing():
    bank = F.normalize(torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(0)), dim=2)
    given = {
        "video_embedding": bank[0][list(VIDEOS)],
        "text_embedding": bank[1][list(TEXTS)],
        "caption_loss": torch.arange(5) / 4,
        "caption_tokens": torch.arange(15).reshape(5, 3).float(),
    }
    batch = Batch(tuple("abcde"), {"video_index": torch.tensor(VIDEOS), "text_index": torch.tensor(TEXTS)})
    whole, broken = VideoTextOutputs(), VideoTextOutputs()
    whole.update(given, batch)
    found = whole.retrieval_set()
    for name, numbers in (("video_embedding", VIDEOS), ("text_embedding", TEXTS)):
        first = [numbers.index(number) for number in sorted(set(numbers))]
        assert found[f"{name}s"].equal(given[name][first])
    ids = [(sorted(set(VIDEOS))[v], sorted(set(TEXTS))[t]) for v, t in found["pairs"].tolist()]
    assert sorted(ids) == sorted(zip(VIDEOS, TEXTS, strict=True))
    given["video_embedding"][2, 0] = math.nan
    broken.update(given, batch)
    metrics = broken.compute()
    assert set(metrics) == set(whole.compute())
    assert all(math.isnan(value) for name, value in metrics.items() if name != "caption_loss")
