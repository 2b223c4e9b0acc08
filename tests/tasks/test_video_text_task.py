import pytest
import torch

from fvc_lib.detectors.own.video_text import positive_pairs, sigmoid_contrastive, softmax_contrastive
from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.step import BatchTransaction
from fvc_lib.tasks.video_text.training import VideoTextTask
from tests.kits.video_text_kit import CONFIG, CPU, pairs, planned, tiny_task


def built(task):
    with forked_random_state(0, CPU):
        return task.build_model()


def weighted(plan, contrastive, caption):
    weights = {"contrastive_weight": contrastive, "caption_weight": caption}
    return VideoTextTask(pairs(plan=plan), pairs(plan=plan), plan, CONFIG.model_copy(update=weights))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_gradients_are_those_of_the_whole_batch_at_once(loss, micro_batch):
    """The oracle writes the sum of the losses down for six pairs, two of which have one text."""
    plan = planned(contrastive=loss)
    task, batch = weighted(plan, 0.7, 0.5), pairs(plan=plan).whole()
    model, oracle = built(task), built(task)
    outputs = oracle(batch.tensors)
    positives = positive_pairs(batch.tensors["video_index"], batch.tensors["text_index"])
    similarities = oracle.joint.scale(outputs["video_embedding"], outputs["text_embedding"])
    dense = 0.7 * (softmax_contrastive if loss == "softmax" else sigmoid_contrastive)(similarities, positives)
    dense = (dense + 0.5 * outputs["caption_loss"].sum()) / 6
    dense.backward()
    compute = resolve_device("cpu", "off")
    transaction = BatchTransaction(task, model, Precision(compute), CPU)
    found = transaction.gradients(batch, micro_batch)
    assert found.loss.mean() == pytest.approx(float(dense.detach()), rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 1e-5 * float(theirs.grad.norm()), name


def test_every_sample_weighs_one_whatever_losses_there_are():
    for changes in ({}, {"captions": False}, {"contrastive": None}):
        plan = planned(**changes)
        task = tiny_task(plan)
        batch = pairs(plan=plan).whole()
        loss = task.loss(task.forward(built(task), batch), batch)
        assert float(loss.weight) == 6
        assert (float(loss.total.detach()) == 0) is (not plan.captions)


def test_captions_are_written_only_when_asked_for():
    task, batch = tiny_task(), pairs().whole()
    model = built(task).eval()
    with torch.no_grad():
        assert "caption_tokens" not in task.forward(model, batch)
        task.writes_captions = True
        assert task.forward(model, batch)["caption_tokens"].shape == (6, 6)
