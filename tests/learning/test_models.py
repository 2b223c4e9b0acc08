import pytest
import torch

from fvc_lib.learning.forensic_stem import forensic_maps
from fvc_lib.learning.models import _maps_clip_by_clip, build_model, default_micro_batch
from fvc_lib.learning.random_state import forked_random_state
from fvc_lib.services.errors import UsageError

NAMES = ["frame_cnn", "r2plus1d"]
CPU = torch.device("cpu")


def clips(batch: int = 3, num_frames: int = 4, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, num_frames, 3, size, size), dtype=torch.uint8, generator=generator)


def seeded(name: str, seed: int = 0) -> torch.nn.Module:
    with forked_random_state(seed, CPU):
        return build_model(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_receives_a_gradient(name):
    model = seeded(name)
    model(clips()).square().sum().backward()
    without = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_s_logit_does_not_depend_on_its_batch(name):
    model = seeded(name).eval()
    with torch.no_grad():
        together = model(clips(5))
        alone = torch.cat([model(clip[None]) for clip in clips(5)])
    assert together.shape == (5,)
    assert together.dtype == torch.float32
    assert together.std() > 0
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("name", NAMES)
def test_initialisation_follows_the_random_state(name):
    first, second, other = seeded(name), seeded(name), seeded(name, 1)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not first.head.weight.equal(other.head.weight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_frames", "size"), [(1, 16), (1, 32), (2, 17), (9, 50)])
def test_any_configured_size_works(name, num_frames, size):
    logits = seeded(name)(clips(2, num_frames, size))
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_blank_clips_give_finite_gradients(name):
    model = seeded(name)
    model(torch.zeros(2, 3, 3, 32, 32, dtype=torch.uint8)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_recomputable_blocks_hold_everything_but_the_head(name):
    model = seeded(name)
    inside = {id(p) for block in model.recomputable_blocks() for p in block.parameters()}
    assert {key for key, p in model.named_parameters() if id(p) not in inside} == {"head.weight", "head.bias"}


def test_maps_made_clip_by_clip_are_those_of_the_batch():
    frames = clips(5, 6, 50)
    assert _maps_clip_by_clip(frames, 4).equal(forensic_maps(frames, 4))


def test_default_micro_batches_are_safe():
    assert [default_micro_batch(name) for name in NAMES] == [8, 4]


def test_an_unknown_model_is_refused_with_a_suggestion():
    with pytest.raises(UsageError, match="Did you mean 'frame_cnn'"):
        build_model("frame_cn")
