import copy

import pytest
import torch

from fvc_lib.engine.device import recompute_activations
from fvc_lib.services.errors import UsageError
from tests.kits.video_text_kit import network, pairs, planned


def batch(plan):
    samples = pairs(plan=plan).whole()
    hidden = torch.zeros(len(samples), plan.num_frames, dtype=torch.bool)
    hidden[:, 1] = True
    return samples.tensors | {"hidden": hidden}


def total_loss(model, tensors):
    outputs = model(tensors)
    losses = [outputs[name].sum() for name in ("caption_loss", "masked_loss") if name in outputs]
    if "video_embedding" in outputs:
        embeddings = outputs["video_embedding"], outputs["text_embedding"]
        losses.append(model.joint.scale.contrastive(*embeddings, tensors["video_index"], tensors["text_index"]))
    return sum(losses)


@pytest.mark.parametrize("trunk", ["frame_cnn", "r2plus1d"])
@pytest.mark.parametrize(
    ("contrastive", "captions", "masked"),
    [(None, True, False), (None, False, True), ("softmax", False, False), ("sigmoid", True, True)],
)
def test_only_the_parts_of_the_losses_are_built_and_each_parameter_receives_a_gradient(
    trunk, contrastive, captions, masked
):
    plan = planned(trunk=trunk, contrastive=contrastive, captions=captions, masked=masked, layers=2)
    model = network(plan)
    total_loss(model, batch(plan)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    without = {name for name, gradient in gradients.items() if gradient is None or gradient.abs().max() <= 1e-7}
    assert all(name.endswith("key.bias") for name in without), "the softmax cancels a key's bias"
    parts = {"joint": contrastive, "captions": captions, "masked": masked}
    assert {name.partition(".")[0] for name in gradients} == {"video"} | {
        name for name, there in parts.items() if there
    }
    assert ("joint.scale.bias" in gradients) == (contrastive == "sigmoid")


def test_a_masked_frame_s_target_carries_no_gradient():
    """Equal to a loss whose target is a constant, and other than one that the target could be drawn into."""
    plan = planned(contrastive=None, captions=False, masked=True)
    model, tensors = network(plan), batch(plan)

    def gradient(constant_target):
        features, narrowed = model.video.frame_features(tensors["frames"])
        target = features.detach().clone() if constant_target else features
        loss = model.masked(model.video, target, narrowed, tensors["hidden"]).sum()
        return torch.autograd.grad(loss, model.video.trunk.first.convolution.weight)[0]

    assert gradient(constant_target=False).equal(gradient(constant_target=True))
    assert gradient(constant_target=True).abs().sum() > 0


def test_what_is_foretold_does_not_depend_on_the_hidden_frame():
    plan = planned(contrastive=None, captions=False, masked=True)
    model, tensors = network(plan), batch(plan)
    features, narrowed = model.video.frame_features(tensors["frames"])
    other = narrowed.clone()
    other[:, 1] = 7.0
    losses = [model.masked(model.video, features, each, tensors["hidden"]) for each in (narrowed, other)]
    assert losses[0].equal(losses[1])
    hiding_none = torch.zeros_like(tensors["hidden"])
    assert model.masked(model.video, features, narrowed, hiding_none).tolist() == [0.0] * len(narrowed)


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
    plan = planned(trunk=f"{path}:{kind}", masked=False)
    model, tensors = network(plan), batch(plan)
    features, _ = model.video.frame_features(tensors["frames"])
    assert features.shape == (6, 1 if "1" in over else plan.num_frames, 5)
    total_loss(model, tensors).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == set()
    assert model.video.trunk.get_parameter("network.line.weight" if kind == "Clips" else "line.weight").grad.any()
    if kind == "Clips":
        with pytest.raises(UsageError, match=r"masked_weight: model .* sees a clip as a whole.*on frames"):
            network(planned(trunk=plan.trunk, masked=True))
    else:
        with pytest.raises(UsageError, match="gradient_checkpointing: Own names no blocks"):
            model.recomputable_blocks()


@pytest.mark.parametrize("trunk", ["frame_cnn", "r2plus1d"])
def test_a_sample_s_outputs_do_not_depend_on_its_batch(trunk):
    plan = planned(trunk=trunk, masked=True)
    model, tensors = network(plan).eval(), batch(plan)
    with torch.no_grad():
        together = model(tensors, 2)
        alone = [model({name: t[i : i + 1] for name, t in tensors.items()}, 2) for i in range(6)]
    assert set(together) == {
        "video_embedding", "text_embedding", "caption_loss", "token_accuracy", "caption_tokens", "masked_loss"
    }  # fmt: skip
    for name, values in together.items():
        torch.testing.assert_close(values, torch.cat([each[name] for each in alone]))


def test_gradient_checkpointing_changes_nothing():
    plan = planned(masked=True)
    model, tensors = network(plan), batch(plan)
    again = copy.deepcopy(model)
    recompute_activations(again)
    for each in (model, again):
        total_loss(each, tensors).backward()
    inside = {id(p) for block in model.recomputable_blocks() for p in block.parameters()}
    assert len(inside) > len(list(model.parameters())) / 2
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.grad.equal(b.grad)
