import copy

import pytest
import torch

from fvc_lib.engine.device import recompute_activations
from fvc_lib.services.errors import UsageError
from tests.kits.video_text_kit import network, pairs, planned


def batch(plan):
    return pairs(plan=plan).whole().tensors


def total_loss(model, tensors):
    outputs = model(tensors)
    losses = [outputs["caption_loss"].sum()] if "caption_loss" in outputs else []
    if "video_embedding" in outputs:
        embeddings = outputs["video_embedding"], outputs["text_embedding"]
        losses.append(model.joint.scale.contrastive(*embeddings, tensors["video_index"], tensors["text_index"]))
    return sum(losses)


@pytest.mark.parametrize("trunk", ["frame_cnn", "r2plus1d_small"])
@pytest.mark.parametrize(("contrastive", "captions"), [(None, True), ("softmax", False), ("sigmoid", True)])
def test_only_the_parts_of_the_losses_are_built_and_each_parameter_receives_a_gradient(trunk, contrastive, captions):
    plan = planned(trunk=trunk, contrastive=contrastive, captions=captions, layers=2)
    model = network(plan)
    total_loss(model, batch(plan)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    without = {name for name, gradient in gradients.items() if gradient is None or gradient.abs().max() <= 1e-7}
    assert all(name.endswith("key.bias") for name in without), "the softmax cancels a key's bias"
    parts = {"joint": contrastive, "captions": captions}
    assert {name.partition(".")[0] for name in gradients} == {"video"} | {
        name for name, there in parts.items() if there
    }
    assert ("joint.scale.bias" in gradients) == (contrastive == "sigmoid")


CLIP_TRUNK = """
from torch import nn

from fvc_lib.detectors.network import Trunk


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 5)

    def forward(self, clips):
        return self.line(clips.float().mean({over}))


class Clips(Trunk):
    num_features = 5

    def __init__(self):
        super().__init__(Pooled(), 5, recomputable=(nn.Identity(),))

    def encode(self, clips):
        return self.network(clips)


class Own(Pooled):
    num_features = 5
"""


@pytest.mark.parametrize(("kind", "over"), [("Clips", "(1, 3, 4)"), ("Own", "(1, 3, 4)"), ("Own", "(3, 4)")])
def test_networks_on_whole_clips_and_of_one_s_own_are_video_encoders(kind, over, tmp_path):
    path = tmp_path / f"net_{kind}_{over.count('1')}.py"
    path.write_text(CLIP_TRUNK.format(over=over))
    plan = planned(trunk=f"{path}:{kind}")
    model, tensors = network(plan), batch(plan)
    memory = model.video(tensors["frames"])
    assert memory.shape == (6, 1 if "1" in over else plan.num_frames, plan.width)
    total_loss(model, tensors).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == set()
    assert model.video.trunk.get_parameter("network.line.weight" if kind == "Clips" else "line.weight").grad.any()
    if kind == "Own":
        with pytest.raises(UsageError, match="gradient_checkpointing: Own names no blocks"):
            model.recomputable_blocks()


@pytest.mark.parametrize("trunk", ["frame_cnn", "r2plus1d_small"])
def test_a_sample_s_outputs_do_not_depend_on_its_batch(trunk):
    plan = planned(trunk=trunk)
    model, tensors = network(plan).eval(), batch(plan)
    with torch.no_grad():
        together = model(tensors, 2)
        alone = [model({name: t[i : i + 1] for name, t in tensors.items()}, 2) for i in range(6)]
    assert set(together) == {
        "video_embedding", "text_embedding", "caption_loss", "token_accuracy", "caption_tokens"
    }  # fmt: skip
    for name, values in together.items():
        torch.testing.assert_close(values, torch.cat([each[name] for each in alone]))


def test_gradient_checkpointing_changes_nothing():
    plan = planned()
    model, tensors = network(plan), batch(plan)
    again = copy.deepcopy(model)
    recompute_activations(again)
    for each in (model, again):
        total_loss(each, tensors).backward()
    inside = {id(p) for block in model.recomputable_blocks() for p in block.parameters()}
    assert len(inside) > len(list(model.parameters())) / 2
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.grad.equal(b.grad)
