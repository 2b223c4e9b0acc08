import pytest
import torch

from tests.kits.video_text_kit import network, pairs, planned


def batch(config):
    return pairs(config=config).whole().tensors


@pytest.mark.parametrize("trunk", ["frame_cnn", "r2plus1d_small"])
@pytest.mark.parametrize(("contrastive", "captions"), [("", 1.0), ("softmax", 0.0), ("sigmoid", 1.0)])
def test_only_the_parts_of_the_losses_are_built_and_each_parameter_receives_a_gradient(trunk, contrastive, captions):
    kind = {"contrastive_loss": contrastive or "softmax", "contrastive_weight": float(bool(contrastive))}
    config = planned(model=trunk, caption_weight=captions, **kind)
    model = network(config)
    outputs, tensors = model(batch(config)), batch(config)
    losses = [outputs["caption_loss"].sum()] if "caption_loss" in outputs else []
    if "video_embedding" in outputs:
        embeddings = outputs["video_embedding"], outputs["text_embedding"]
        losses.append(model.joint.scale.contrastive(*embeddings, tensors["video_index"], tensors["text_index"]))
    sum(losses).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    without = {name for name, gradient in gradients.items() if gradient is None or gradient.abs().max() <= 1e-7}
    assert all(name.endswith("key.bias") for name in without), "the softmax cancels a key's bias"
    parts = {"joint": contrastive, "captions": captions}
    assert {name.partition(".")[0] for name in gradients} == {"video"} | {
        name for name, there in parts.items() if there
    }
    assert ("joint.scale.bias" in gradients) == (contrastive == "sigmoid")


@pytest.mark.parametrize("trunk", ["frame_cnn", "r2plus1d_small"])
def test_a_sample_s_outputs_do_not_depend_on_its_batch(trunk):
    config = planned(model=trunk)
    model, tensors = network(config).eval(), batch(config)
    with torch.no_grad():
        together = model(tensors, 2)
        alone = [model({name: t[i : i + 1] for name, t in tensors.items()}, 2) for i in range(6)]
    assert set(together) == {
        "video_embedding", "text_embedding", "caption_loss", "token_accuracy", "caption_tokens"
    }  # fmt: skip
    for name, values in together.items():
        torch.testing.assert_close(values, torch.cat([each[name] for each in alone]))
