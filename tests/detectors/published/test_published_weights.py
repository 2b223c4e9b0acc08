"""Published networks have their published size, load published files, and give the publishers' outputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fvc_lib.detectors.network import build_detector
from fvc_lib.detectors.packages import imported
from fvc_lib.detectors.restrav import path_numbers
from fvc_lib.detectors.weights import read_weights
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS, TrunkOptions
from tests.detectors.published.networks import (
    FRAMES,
    PICTURES,
    SIDE,
    SMALL_FOLDERS,
    given_to,
    noise,
    real_frames,
    seeded,
    small_network,
    transformers,
    trunk_of,
    write_folder,
)  # fmt: skip

pytestmark = [pytest.mark.detectors, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]

# By name: the features of the class layer, its classes (400 of Kinetics, 174 of Something-Something, 1000 of ImageNet;
# none for encoders of pictures), how many parameters the network has with that layer, and the millions that are
# published, to as many places as they are there. torchvision's are exact, in the package's own metadata of the weights.
# pytorchvideo's: its model zoo, "Params (M)". TimeSformer (divided attention), VideoMAE and ViViT (16x2): their papers.
# V-JEPA 2 gives its encoder's 300 alone. CLIP and SigLIP: open_clip's docs/model_profile.csv, "image_mparams"; CLIP's
# less the projection to what texts share (0.39, 0.39, 0.79), which is no part of the encoder. DINOv2: timm's cards.
# DINOv3: its README. timm's, and Lite0 as tf_efficientnet_lite0: its results/results-imagenet.csv, "param_count".
PUBLISHED = {
    "r3d_18": (512, 400, 33_371_472, ""),
    "mc3_18": (512, 400, 11_695_440, ""),
    "r2plus1d_18": (512, 400, 31_505_325, ""),
    "s3d": (1024, 400, 8_320_048, ""),
    "mvit_v2_s": (768, 400, 34_537_744, ""),
    "swin3d_t": (768, 400, 28_158_070, ""),
    "x3d_xs": (2048, 400, 3_794_274, "3.79"),
    "x3d_s": (2048, 400, 3_794_274, "3.79"),
    "x3d_m": (2048, 400, 3_794_274, "3.79"),
    "slow_r50": (2048, 400, 32_454_096, "32.45"),
    "slowfast_r50": (2304, 400, 34_566_488, "34.57"),
    "i3d_r50": (2048, 400, 28_043_472, "28.04"),
    "timesformer": (768, 174, 121_392_558, "121.4"),
    "videomae": (768, 400, 86_534_800, "87"),
    "vivit": (768, 400, 88_954_000, "88.9"),
    "vjepa2": (1024, 174, 375_485_998, ""),
    "efficientnet_lite0": (1280, 1000, 4_652_008, "4.65"),
    "clip_vit_b16": (768, 0, 85_799_424, "85.80"),
    "clip_vit_b32": (768, 0, 87_456_000, "87.46"),
    "clip_vit_l14": (1024, 0, 303_179_776, "303.18"),
    "xclip_b16": (768, 0, 121_253_376, ""),
    "dinov2_small": (384, 0, 22_056_576, "22.1"),
    "dinov2_base": (768, 0, 86_580_480, "86.6"),
    "dinov2_large": (1024, 0, 304_368_640, "304.4"),
    "dinov3_small": (384, 0, 21_596_544, "21"),
    "dinov3_base": (768, 0, 85_660_416, "86"),
    "dinov3_large": (1024, 0, 303_129_600, ""),
    "siglip_base": (768, 0, 92_884_224, "92.88"),
    "gend": (1024, 0, 303_179_776, "303.18"),
    "effort": (1024, 0, 303_179_776, "303.18"),
    "gend_dino": (768, 0, 85_660_416, "86"),
    "xception": (2048, 1000, 22_855_952, "22.86"),
    "efficientnet_b4": (1792, 1000, 19_341_616, "19.34"),
    "siglip2_base": (768, 0, 92_884_224, "92.88"),
    "pe_core_base": (768, 0, 92_886_528, ""),
    "metaclip2_huge": (1280, 0, 630_766_080, "630.77"),
    "timm:inception_v3": (2048, 1000, 23_834_568, "23.83"),
    "timm:vit_small_patch14_dinov2": (384, 0, 22_056_192, "22.1"),
}
POSITIONS = {
    "dinov2_small": 518,
    "dinov2_base": 518,
    "dinov2_large": 518,
}  # sides with positions


def test_the_table_has_every_published_network():
    own = {"frame_cnn", "r2plus1d_small", "timm:NAME", *(name for name, spec in DETECTORS.items() if spec.of_features)}
    assert set(DETECTORS.names()) - own == {name for name in PUBLISHED if not name.startswith("timm:")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_network_has_as_many_parameters_as_its_publisher_says(name):
    spec = DETECTORS.get(name)
    features, classes, published, millions = PUBLISHED[name]
    spec = replace(spec, side=POSITIONS.get(name, spec.side))
    with torch.device("meta"):
        trunk = spec.build_trunk(TrunkOptions(name, spec.num_frames, spec.side, pretrained=False))
    assert sum(p.numel() for p in trunk.parameters()) + (features + 1) * classes == published
    if millions:  # some publishers round, others truncate
        assert abs(published / 1e6 - float(millions)) < 10 ** -len(millions.partition(".")[2])
    if spec.family == "torchvision":
        weights = imported("torchvision.models", name).get_model_weights(name)
        assert weights.KINETICS400_V1.meta["num_params"] == published
    if spec.family == "pytorchvideo":
        with torch.device("meta"):
            network = getattr(imported("pytorchvideo.models.hub", name), name)()
        assert sum(parameter.numel() for parameter in network.parameters()) == published


# (frames, side). Networks with a fixed input or pooling size are compared at that size.
SIZES = {
    "r3d_18": (4, 32), "mc3_18": (4, 32), "r2plus1d_18": (4, 32), "s3d": (16, 224), "mvit_v2_s": (16, 224),
    "swin3d_t": (4, 64), "x3d_xs": (4, 160), "x3d_s": (13, 160), "x3d_m": (16, 224), "slow_r50": (8, 224),
    "slowfast_r50": (32, 224), "i3d_r50": (8, 224),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_weights_of_a_video_network_give_the_features_of_the_publishers_own(name, tmp_path):
    """A published file has weights by name, with the class layer; pytorchvideo's are under ``model_state``."""
    spec = DETECTORS.get(name)
    if spec.family == "torchvision":
        network = seeded(getattr(imported("torchvision.models.video", name), name))
        torch.save(network.state_dict(), tmp_path / "weights.pth")
        heads = [getattr(network, part) for part in ("fc", "classifier", "head") if hasattr(network, part)]
        layer = heads[0]
    else:
        network = seeded(getattr(imported("pytorchvideo.models.hub", name), name))
        torch.save({"model_state": network.state_dict(), "cfg": "x"}, tmp_path / "weights.pth")
        layer = network.blocks[-1].proj
    trunk = trunk_of(name, tmp_path / "weights.pth")
    num_frames, side = SIZES[name]
    frames = noise(1, num_frames, side)
    with torch.inference_mode():
        found = trunk(frames)[:, 0]
    clip = trunk.normalised(frames).transpose(1, 2)
    wanted = given_to(layer, lambda: network([clip[:, :, ::4], clip] if name == "slowfast_r50" else clip))
    if wanted.dim() == 5:
        wanted = wanted.flatten(2).mean(2) if wanted.shape[1] == found.shape[1] else wanted.flatten(1, 3).mean(1)
    assert found.shape == (1, PUBLISHED[name][0])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("name", SMALL_FOLDERS)
def test_a_folder_of_transformers_gives_the_features_of_transformers_own_pipeline(name, tmp_path):
    """Compare on real frames with the publisher's processor, without resizing, and network."""
    write_folder(name, tmp_path)
    kind, _, processor = SMALL_FOLDERS[name]
    network = getattr(transformers(), kind).from_pretrained(tmp_path).eval()
    trunk = trunk_of(name, tmp_path, num_frames=FRAMES, side=SIDE)
    assert any(f"not that of {name}: hidden_size {network.config.hidden_size}" in note for note in trunk.notes)
    frames = real_frames(20, SIDE)
    process = getattr(transformers(), processor).from_pretrained(tmp_path)
    options = {"return_tensors": "pt", "do_resize": False, "do_center_crop": False}
    if name in PICTURES:
        pixels = process(list(frames), **options)["pixel_values"].flatten(0, -4)  # those of X-CLIP are of one video
        with torch.inference_mode():
            wanted, found = network(pixel_values=pixels).pooler_output, trunk(frames[:, None])[:, 0]
    else:
        clips = frames.view(-1, FRAMES, 3, SIDE, SIDE)
        given = [list(clip) for clip in clips] if name != "vjepa2" else list(clips)
        pixels = dict(process(given, **options))
        wanted, found = given_to(network.classifier, lambda: network(**pixels)), trunk(clips).detach()[:, 0]
    assert len(found) * (1 if name in PICTURES else FRAMES) == 20
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    again = trunk_of(name, tmp_path, num_frames=FRAMES, side=SIDE)
    assert all(a.equal(b) for a, b in zip(trunk.parameters(), again.parameters(), strict=True))


def test_restrav_sees_all_tokens_of_its_published_trunk_and_pixels_as_fractions_of_white(tmp_path):
    network = write_folder("dinov2_small", tmp_path).eval()
    config = RunConfig(model="restrav", model_weights=str(tmp_path), fixed_size=SIDE, num_frames=8)
    frames = noise(2, 8, SIDE)
    with torch.inference_mode():
        tokens = network(pixel_values=frames.flatten(0, 1) / 255).last_hidden_state
        found = build_detector(config).trunk(frames)
    torch.testing.assert_close(found[:, 0], path_numbers(tokens.view(2, 8, -1)), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("test_vit", 160), ("test_convnext", 160), ("test_resnet", 160), ("test_efficientnet", 160),
        ("inception_v3", 96), ("legacy_xception", 96), ("efficientnet_b4", 96), ("vit_small_patch14_dinov2", 98),
        ("vit_pe_core_tiny_patch16_384", 96),
    ],
)  # fmt: skip
def test_weights_of_timm_give_the_features_of_timms_own_pipeline(name, side, tmp_path):
    """Compare on real frames with timm's transform, without resizing, and network."""
    timm = imported("timm", name)
    data = imported("timm.data", name)
    sized = {"img_size": side} if name.startswith("vit") else {}
    network = seeded(lambda: timm.create_model(name, **sized))
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    trunk = trunk_of(f"timm:{name}", tmp_path / "model.safetensors", side=side)
    transform = data.create_transform(**data.resolve_data_config(model=network), is_training=False)
    steps = [step for step in transform.transforms if type(step).__name__ not in ("Resize", "CenterCrop")]
    assert len(steps) == 2
    frames = real_frames(20, side)
    from PIL import Image

    pixels = torch.stack([steps[1](steps[0](Image.fromarray(frame.permute(1, 2, 0).numpy()))) for frame in frames])
    with torch.inference_mode():
        wanted = network.forward_head(network.forward_features(pixels), pre_logits=True)
        found = trunk(frames[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * max(1.0, wanted.abs().max().item()))


def test_a_vision_transformers_weights_of_another_side_are_resampled_as_timm_does_and_noted(tmp_path):
    timm = imported("timm", "test_vit")
    filtered = imported("timm.models.vision_transformer", "test_vit").checkpoint_filter_fn
    published = seeded(lambda: timm.create_model("test_vit"))
    save_file(published.state_dict(), tmp_path / "model.safetensors")
    trunk = trunk_of("timm:test_vit", tmp_path / "model.safetensors", side=96)
    wanted = filtered(published.state_dict(), timm.create_model("test_vit", img_size=96))["pos_embed"]
    torch.testing.assert_close(trunk.network.pos_embed.detach(), wanted.detach(), rtol=0, atol=0)


def test_efficientnet_lite0_with_its_packaged_weights_is_timms_network():
    timm = imported("timm", "efficientnet_lite0")
    trunk = trunk_of("efficientnet_lite0")
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    published = read_weights(Path(trunk.weights.source))
    names = [name for name in network.state_dict() if not name.startswith("classifier.")]
    given = [tensor for name, tensor in published.items() if not name.startswith("_fc.")]
    network.load_state_dict(dict(zip(names, given, strict=True)), strict=False)
    frames = real_frames(20, 128)
    with torch.inference_mode():
        wanted = network.forward_head(network.forward_features(trunk.normalised(frames)), pre_logits=True)
        found = trunk(frames[:, None])[:, 0]
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("name", ["timesformer", "clip_vit_b16"])
def test_a_folder_that_does_not_fit_is_refused_with_what_does_not(name, tmp_path):
    network = small_network(name)
    weights = network.state_dict()
    layer = "1.mlp.fc1.weight" if name.startswith("clip") else "1.output.dense.weight"
    missing = next(key for key in weights if key.endswith(layer))
    network.save_pretrained(tmp_path / "less", state_dict={k: v for k, v in weights.items() if k != missing})
    with pytest.raises(UsageError, match=rf"does not fit.*not in it: .*{missing.split('.', 2)[-1]}"):
        trunk_of(name, tmp_path / "less", num_frames=FRAMES, side=SIDE)
    network.save_pretrained(tmp_path / "whole")
    with pytest.raises(UsageError, match=r"got a network of type '.*', wanted 'vjepa2'"):
        trunk_of("vjepa2", tmp_path / "whole", num_frames=FRAMES, side=SIDE)
    with pytest.raises(UsageError, match=r"in the folder of a transformers model, with config.json"):
        trunk_of(name, tmp_path, num_frames=FRAMES, side=SIDE)
    with pytest.raises(UsageError, match=r"fixed_size as it was made for|does not take clips"):
        trunk_of(name, tmp_path / "whole", num_frames=FRAMES, side=2 * SIDE)(noise(1, FRAMES, 2 * SIDE))
