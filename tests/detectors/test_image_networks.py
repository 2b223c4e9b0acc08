"""The networks of task image: shapes, stages and freezing."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fvc_lib.detectors.frames.backbone import ImageModel
from fvc_lib.detectors.network import num_trained_stages, train_last
from fvc_lib.detectors.own.small_resnet import SmallResnet

WIDTHS = (8, 16)


def pictures(count=3, size=16, seed=0):
    return torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ImageModel(SmallResnet(WIDTHS), num_classes=4, num_targets=2)


@pytest.mark.parametrize(("classes", "targets"), [(4, 0), (0, 2)])
def test_a_head_that_is_not_wanted_has_no_weights_and_no_outputs(classes, targets):
    model = ImageModel(SmallResnet(WIDTHS), classes, targets)
    outputs = model(pictures())
    assert outputs["class_logits"].shape == (3, classes)
    assert outputs["values"].shape == (3, targets)
    heads = {name.split(".")[0] for name, _ in model.named_parameters()} - {"backbone"}
    assert heads == ({"class_head"} if classes else {"target_head"})


def test_a_picture_is_answered_alike_whatever_stands_beside_it(model):
    together = model(pictures())
    for number in range(3):
        alone = model(pictures()[number : number + 1])
        torch.testing.assert_close(alone["class_logits"][0], together["class_logits"][number])


@pytest.mark.parametrize("num_trained", [0, 1, 2, 3])
def test_the_last_stages_and_the_heads_are_trained_whatever_was_trained_before(model, num_trained):
    train_last(model.backbone.stages(), 3 - num_trained)
    train_last(model.backbone.stages(), num_trained)
    sum(values.sum() for values in model(pictures()).values()).backward()
    stages = model.backbone.stages()
    trained = [all(parameter.grad is not None for parameter in stage) for stage in stages]
    touched = [any(parameter.grad is not None for parameter in stage) for stage in stages]
    assert trained == touched == [False] * (3 - num_trained) + [True] * num_trained
    assert all(
        parameter.grad is not None for head in (model.class_head, model.target_head) for parameter in head.parameters()
    )


@settings(max_examples=40, deadline=None)
@given(epoch=st.integers(0, 60), stages=st.integers(1, 8), freeze=st.integers(0, 9), each=st.integers(0, 5))
def test_stages_are_freed_one_after_the_other_and_never_frozen_again(epoch, stages, freeze, each):
    now, following = (
        num_trained_stages(e, stages, freeze_epochs=freeze, stage_epochs=each) for e in (epoch, epoch + 1)
    )
    assert 0 <= now <= following <= stages
    assert (now == 0) == (epoch < freeze)
    assert following - now <= (1 if each else stages)
    last = freeze + each * (stages - 1)
    assert (now == stages) == (epoch >= last)
