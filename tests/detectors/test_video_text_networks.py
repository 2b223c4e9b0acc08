import copy
from itertools import product

import pytest
import torch

from fvc_lib.engine.device import recompute_activations
from fvc_lib.services.errors import UsageError
from tests.kits.video_text_kit import network, pairs, planned

ATTENTION = ("query.weight", "query.bias", "key.weight", "value.weight", "value.bias", "output.weight", "output.bias")


def norm(name: str) -> set[str]:
    return {f"{name}.weight", f"{name}.bias"}


def transformer(name: str, layers: int = 1, with_memory: bool = False) -> set[str]:
    found = {f"{name}.places"} | norm(f"{name}.norm")
    for layer in (f"{name}.layers.{number}" for number in range(layers)):
        found |= norm(f"{layer}.own_norm") | {f"{layer}.own_attention.{part}" for part in ATTENTION}
        found |= norm(f"{layer}.norm") | norm(f"{layer}.expand") | norm(f"{layer}.contract")
        if with_memory:
            found |= norm(f"{layer}.memory_norm") | {f"{layer}.memory_attention.{part}" for part in ATTENTION}
    return found


def conv(name: str) -> set[str]:
    return {f"{name}.convolution.weight"} | norm(f"{name}.norm")


VIDEO = norm("video.norm") | norm("video.narrow") | transformer("video.transformer")
TRUNKS = {
    "frame_cnn": set().union(*(conv(f"video.trunk.{name}") for name in ("first", "second", "further.0", "further.1"))),
    "r2plus1d": set().union(
        *(conv(f"video.trunk.{name}") for name in ("spatial_stem", "temporal_stem")),
        *(
            conv(f"video.trunk.blocks.{n}.spatial")
            | {f"video.trunk.blocks.{n}.temporal.weight"}
            | norm(f"video.trunk.blocks.{n}.norm")
            for n in range(3)
        ),
        {f"video.trunk.blocks.{n}.shortcut.weight" for n in (1, 2)},
    ),
}
SPACE = {"joint.video_projection.weight", "joint.text_projection.weight", "joint.scale.log_scale"}
SPACE |= {"joint.text.embedding.weight"} | transformer("joint.text.transformer", layers=2)
CAPTIONS = {"captions.embedding.weight"} | transformer("captions.transformer", layers=2, with_memory=True)
MASKED = {"masked.hidden_frame"} | norm("masked.foretell")


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
    [each for each in product((None, "softmax", "sigmoid"), (False, True), (False, True)) if any(each)],
)
def test_just_these_parameters_receive_a_gradient(trunk, contrastive, captions, masked):
    expected = VIDEO | TRUNKS[trunk]
    expected |= (SPACE if contrastive else set()) | ({"joint.scale.bias"} if contrastive == "sigmoid" else set())
    expected |= (CAPTIONS if captions else set()) | (MASKED if masked else set())
    plan = planned(trunk=trunk, contrastive=contrastive, captions=captions, masked=masked, layers=2)
    model = network(plan)
    total_loss(model, batch(plan)).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-7}
    assert moved == expected
    assert {name for name, _ in model.named_parameters()} == expected, "parameters that nothing trains"


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
