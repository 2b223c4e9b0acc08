"""The loss, the mixtures and the scores of task image: what is not known touches nothing."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fvc_lib.detectors.frames.backbone import ImageModel
from fvc_lib.detectors.own.small_resnet import SmallResnet
from fvc_lib.engine.task import Batch
from fvc_lib.metrics.recognition import ranks_of_class
from fvc_lib.tasks.image.task import ImageLabels, ImageScores, value_losses
from fvc_lib.tasks.mixing import Mix, MixSettings, class_losses, draw_mix, mixed_pixels, mixed_target, rows_of_classes
from tests.kits.image_kit import image_tables, image_task

LABELS = ImageLabels(tuple("abcdefg"), ("calories", "mass"), ("kcal", "g"), (500.0, 80.0), (100.0, 7.0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    return root, *image_tables(root)


def learned(task, rows, change=lambda tensors: None):
    """A small model with the gradients of some training pictures, whose tensors ``change`` may alter."""
    torch.manual_seed(0)
    labels, batch = task.training_data.labels, task.training_data.__getitems__(range(rows))
    model = ImageModel(SmallResnet((8, 8)), len(labels.classes), len(labels.targets))
    change(batch.tensors)
    task.loss(task.forward(model, batch), batch).total.backward()
    return model


def test_unknown_labels_give_no_gradient_at_all(corpus):
    def first_unknown(tensors):
        tensors["known"][:, 0] = 0
        tensors["values"][:, 0] = 1e30

    gradient = learned(image_task(*corpus), 8, first_unknown).target_head.weight.grad
    assert (gradient[0] == 0).all()
    assert (gradient[1] != 0).any()
    nothing = learned(image_task(*corpus), 8, lambda tensors: [tensors[n].zero_() for n in ("known", "class_target")])
    assert all((parameter.grad == 0).all() for parameter in nothing.parameters())


def test_what_is_not_known_cannot_spoil_a_loss_with_infinities():
    logits = torch.tensor([[float("inf"), 0.0], [1.0, 2.0]], requires_grad=True)
    predicted = torch.tensor([[float("nan")], [1.0]], requires_grad=True)
    classes = class_losses(logits, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    loss = classes.sum() + value_losses(predicted, torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad[0].tolist() == [0.0, 0.0]
    assert predicted.grad[0].item() == 0


def test_a_mixed_target_costs_its_parts_shares_and_numbers_are_averaged_over_those_known():
    logits = torch.randn(1, 3, generator=torch.Generator().manual_seed(1))
    alone = [class_losses(logits, F.one_hot(torch.tensor([k]), 3).float(), label_smoothing=0.1) for k in (0, 2)]
    for share, wanted in ((0.7, 0.3 * alone[0] + 0.7 * alone[1]), (0.0, 0.3 * alone[0])):
        torch.testing.assert_close(class_losses(logits, torch.tensor([[0.3, 0.0, share]]), label_smoothing=0.1), wanted)
    predicted, values = torch.tensor([[0.5, 3.0], [0.5, 9.0]]), torch.zeros(2, 2)
    known = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert value_losses(predicted, values, known).tolist() == pytest.approx([(0.125 + 2.5) / 2, 0.125])


def test_a_task_of_numbers_only_and_one_of_classes_only_can_learn(corpus):
    root, images, targets = corpus
    numbers = learned(image_task(root, images.with_columns(class_label=None), targets), 4)
    classes = learned(image_task(root, images, targets.clear()), 4)
    assert numbers.target_head.weight.grad.abs().max() > 0
    assert classes.class_head.weight.grad.abs().max() > 0


def test_the_task_says_which_epochs_train_what(corpus):
    task = image_task(*corpus, freeze_backbone_epochs=1, unfreeze_stage_epochs=2)
    model = task.build_model()
    num_stages, counts = len(model.backbone.stages()), []
    for epoch in (0, 1, 3, 50, 0):
        task.begin_epoch(model, epoch)
        counts.append(sum(all(p.requires_grad for p in stage) for stage in model.backbone.stages()))
    assert counts == [0, 1, 2, num_stages, 0]
    assert all(p.requires_grad for p in model.class_head.parameters())


# Mixtures


def drawn(settings, count=300):
    return [draw_mix(settings, 50, 32, np.random.default_rng(seed)) for seed in range(count)]


def test_the_share_and_both_kinds_are_as_asked():
    mixes = drawn(MixSettings(0.3, 0.2, 1.0), 2000)
    mixed = [mix for mix in mixes if mix is not None]
    assert 0.25 < len(mixed) / len(mixes) < 0.35
    assert 0.4 < sum(mix.box is None for mix in mixed) / len(mixed) < 0.6
    assert {mix.partner for mix in mixed} == set(range(50))
    assert all(mix.box is None for mix in drawn(MixSettings(1.0, 1.0, 0.0)))
    black, white = torch.zeros(3, 32, 32, dtype=torch.uint8), torch.ones(3, 32, 32, dtype=torch.uint8)
    for mix in drawn(MixSettings(1.0, 0.0, 1.0)):  # a cut shows exactly its share of the first picture
        assert mix.box is not None
        assert 1 - mixed_pixels(black, white, mix).float().mean().item() == pytest.approx(mix.share, abs=1e-6)
        assert 0 <= mix.share <= 1


def test_mixup_blends_pictures_and_classes_by_share():
    dark, light = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.full((3, 2, 2), 200, dtype=torch.uint8)
    assert [mixed_pixels(dark, light, Mix(0, None, share)).unique().tolist() for share in (0.25, 1.0)] == [[150], [0]]
    cat, dog, none = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.zeros(2)
    mixed = [mixed_target(cat, other, Mix(0, None, 0.75)).tolist() for other in (dog, none)]
    assert mixed == [[0.75, 0.5], [0.75, 0.0]]


def test_where_batches_are_balanced_so_are_the_partners_classes():
    labels = np.array([0] * 90 + [1] * 10)
    generators = (np.random.default_rng(seed) for seed in range(2000))
    partners = [draw_mix(MixSettings(1.0, 0.2), 100, 16, each, rows_of_classes(labels)).partner for each in generators]
    assert 0.45 < labels[partners].mean() < 0.55
    assert set(partners) == set(range(100))


# Scores


def outputs_and_batch(count=20):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "class_index": torch.randint(-1, 7, (count,), generator=generator),
        "values": torch.randn(count, 2, generator=generator),
        "known": (torch.rand(count, 2, generator=generator) < 0.7).float(),
    }
    logits = torch.randint(0, 4, (count, 7), generator=generator).float()  # few distinct scores, so that there are ties
    outputs = {"class_logits": logits, "values": torch.randn(count, 2, generator=generator)}
    return outputs, Batch(tuple(f"i{n}" for n in range(count)), tensors)


def scores_of(outputs, batch):
    scores = ImageScores(LABELS)
    scores.update(outputs, batch)
    return scores


def test_the_metrics_are_those_of_the_definitions():
    outputs, batch = outputs_and_batch()
    scores = scores_of(outputs, batch)
    classes, metrics = scores.classes(), scores.compute()
    rows = torch.nonzero(batch.tensors["class_index"] >= 0).squeeze(1)
    assert classes.rows.tolist() == rows.tolist()
    logits, labels = outputs["class_logits"][rows].numpy(), batch.tensors["class_index"][rows].numpy()
    assert classes.ranks.tolist() == ranks_of_class(logits, labels).tolist()
    assert classes.predicted.tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(classes.probabilities, torch.from_numpy(logits).double().softmax(1).amax(1))
    assert metrics["top1"] == (classes.ranks == 1).mean()
    assert metrics["top5"] == (classes.ranks <= 5).mean()
    known = batch.tensors["known"][:, 0] > 0
    errors = 100 * (outputs["values"] - batch.tensors["values"])[known, 0].abs().double()
    assert metrics["mae_calories"] == pytest.approx(errors.mean().item(), rel=1e-6)
    outputs["class_logits"].zero_()  # equal scores count against the model
    assert scores_of(outputs, batch).compute()["top1"] == 0
    assert set(metrics) == {"top1", "top5", "macro_f1", "mae_calories", "r2_calories", "mae_mass", "r2_mass"}


def test_what_several_gathered_is_what_one_gathers_to_the_bit():
    outputs, batch = outputs_and_batch()
    one, joined = scores_of(outputs, batch), ImageScores(LABELS)
    for start, stop in itertools.pairwise((0, 1, 7, 7, 20)):
        some = {name: tensor[start:stop] for name, tensor in outputs.items()}
        joined.add_document(scores_of(some, batch.part(start, stop)).to_document())
    assert joined.sample_ids == one.sample_ids
    assert joined.compute() == one.compute()
    before, after = one.to_document()["columns"], joined.to_document()["columns"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_makes_its_metrics_undefined_and_no_others(bad):
    outputs, batch = outputs_and_batch()
    row = int(torch.nonzero((batch.tensors["class_index"] >= 0) & (batch.tensors["known"][:, 1] > 0))[0])
    outputs["class_logits"][row, 2] = bad
    outputs["values"][row, 1] = bad
    undefined = {name for name, value in scores_of(outputs, batch).compute().items() if math.isnan(value)}
    assert undefined == {"top1", "top5", "macro_f1", "mae_mass", "r2_mass"}
