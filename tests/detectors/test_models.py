from dataclasses import replace

import pytest
import torch

from fvc_lib.detectors.own.stems import FORENSIC, PIXELS, forensic_maps, pixel_maps
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.services.registry import DETECTORS, TrunkOptions

NAMES = ["frame_cnn", "r2plus1d_small"]
CPU = torch.device("cpu")


def clips(batch: int = 3, num_frames: int = 4, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, num_frames, 3, size, size), dtype=torch.uint8, generator=generator)


def seeded(name: str, seed: int = 0) -> torch.nn.Module:
    with forked_random_state(seed, CPU):
        return DETECTORS.get(name).build()


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


@pytest.mark.parametrize(("stem", "maps"), [(FORENSIC, forensic_maps), (PIXELS, pixel_maps)])
def test_maps_made_clip_by_clip_are_those_of_the_batch(stem, maps):
    frames = clips(5, 6, 50)
    for clips_at_once in (1, 2, 100):
        assert replace(stem, clips_at_once=clips_at_once).clip_by_clip(frames).equal(maps(frames, stem.cell))
    assert stem.clip_by_clip(frames).shape[1] == stem.num_channels


def test_every_detector_declares_where_it_is_from_and_takes_the_clips_it_declares():
    assert set(NAMES) <= set(DETECTORS.names())
    for name, spec in DETECTORS.items():
        assert all((spec.family, spec.paper, spec.licence, spec.normalisation)), name
        assert 1 <= spec.micro_batch <= 8, name
        if spec.build is None or spec.of_features:  # tests/detectors/published tests these with their packages
            assert spec.build_trunk or spec.of_name or spec.of_features, name
            continue
        assert spec.build()(clips(1, spec.num_frames, spec.side)).shape == (1,), name
    assert [DETECTORS.get(name).micro_batch for name in NAMES] == [8, 4]


@pytest.mark.parametrize("name", NAMES)
def test_a_content_trunk_sees_which_way_something_goes(name):
    """Reversed frames have the same content but other changes."""
    with forked_random_state(0, CPU):
        trunk = DETECTORS.get(name).build_trunk(TrunkOptions(name, 6, 32))
    frames = torch.zeros(1, 3, 3, 32, 32, dtype=torch.uint8)
    for frame, column in zip(frames[0], (4, 12, 20), strict=True):
        frame[:, 12:20, column : column + 8] = 255
    with torch.no_grad():
        forwards, backwards = trunk.frame_features(frames)[0, 1], trunk.frame_features(frames.flip(1))[0, 1]
    assert (forwards - backwards).abs().max() > 0.1 * forwards.abs().max()
