"""The loss of task image: a sum over pictures, which what is not known does not touch."""

import pytest
import torch
from torch.nn import functional as F

from fvc_lib.detectors.frames.backbone import ImageModel
from fvc_lib.detectors.own.small_resnet import SmallResnet
from fvc_lib.tasks.image.training import value_losses
from fvc_lib.tasks.mixing import class_losses
from tests.kits.image_kit import image_tables, image_task


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    return root, *image_tables(root)


@pytest.fixture(scope="module")
def task(corpus):
    return image_task(*corpus)


def small_model(task, num_classes=3, num_targets=2):
    torch.manual_seed(0)
    return ImageModel(SmallResnet((8, 8)), num_classes, num_targets)


def test_unknown_labels_give_no_gradient_at_all(task):
    model, batch = small_model(task), task.training_data.__getitems__(range(8))
    batch.tensors["known"][:, 0] = 0
    batch.tensors["values"][:, 0] = 1e30
    task.loss(task.forward(model, batch), batch).total.backward()
    assert (model.target_head.weight.grad[0] == 0).all()
    assert (model.target_head.weight.grad[1] != 0).any()

    batch.tensors["known"].zero_()
    batch.tensors["class_target"].zero_()
    model.zero_grad()
    task.loss(task.forward(model, batch), batch).total.backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_what_is_not_known_cannot_spoil_a_loss_with_infinities():
    logits = torch.tensor([[float("inf"), 0.0], [1.0, 2.0]], requires_grad=True)
    targets = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    predicted = torch.tensor([[float("nan")], [1.0]], requires_grad=True)
    loss = (
        class_losses(logits, targets).sum()
        + value_losses(predicted, torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).sum()
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad[0].tolist() == [0.0, 0.0]
    assert predicted.grad[0].item() == 0


def test_a_mixed_target_costs_its_parts_shares():
    logits = torch.randn(1, 3, generator=torch.Generator().manual_seed(1))
    alone = [class_losses(logits, F.one_hot(torch.tensor([k]), 3).float(), label_smoothing=0.1) for k in (0, 2)]
    mixed = class_losses(logits, torch.tensor([[0.3, 0.0, 0.7]]), label_smoothing=0.1)
    torch.testing.assert_close(mixed, 0.3 * alone[0] + 0.7 * alone[1])
    torch.testing.assert_close(
        class_losses(logits, torch.tensor([[0.3, 0.0, 0.0]]), label_smoothing=0.1), 0.3 * alone[0]
    )


def test_numbers_are_averaged_over_those_that_are_known():
    predicted, values = torch.tensor([[0.5, 3.0], [0.5, 9.0]]), torch.zeros(2, 2)
    known = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert value_losses(predicted, values, known).tolist() == pytest.approx([(0.125 + 2.5) / 2, 0.125])


def test_a_task_of_numbers_only_and_one_of_classes_only_can_learn(corpus):
    root, images, targets = corpus
    for which in ("numbers", "classes"):
        task = image_task(
            root,
            images.with_columns(class_label=None) if which == "numbers" else images,
            targets if which == "numbers" else targets.clear(),
        )
        batch = task.training_data.__getitems__(range(4))
        labels = task.training_data.labels
        model = small_model(task, len(labels.classes), len(labels.targets))
        loss = task.loss(task.forward(model, batch), batch)
        loss.total.backward()
        head = model.target_head if which == "numbers" else model.class_head
        assert head.weight.grad.abs().max() > 0


def test_the_task_says_which_epochs_train_what(corpus):
    task = image_task(*corpus, freeze_backbone_epochs=1, unfreeze_stage_epochs=2)
    model = task.build_model()
    num_stages, counts = len(model.backbone.stages()), []
    for epoch in (0, 1, 3, 50, 0):
        task.begin_epoch(model, epoch)
        counts.append(sum(all(p.requires_grad for p in stage) for stage in model.backbone.stages()))
    assert counts == [0, 1, 2, num_stages, 0]
    assert all(p.requires_grad for p in model.class_head.parameters())
