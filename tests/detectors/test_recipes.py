"""D3, STALL and ReStraV: their numbers against their formulas, written here from the papers."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fvc_lib.detectors.classical import refuse_settings
from fvc_lib.detectors.d3 import D3
from fvc_lib.detectors.network import build_detector
from fvc_lib.detectors.restrav import RESTRAV, path_numbers
from fvc_lib.detectors.stall import STALL
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS, View
from fvc_lib.tasks.video.classical import EmbeddedClips, arrays_of, probe

T = 16


def _features(number: int, width: int, seed: int, pace: float = 0.3) -> np.ndarray:
    generator = np.random.default_rng(seed)
    still, moved = generator.normal(size=(number, 1, width)), generator.normal(size=(number, T, width)).cumsum(1)
    return (still + pace * moved) @ generator.normal(size=(width, width))


@pytest.mark.parametrize(
    ("name", "num_frames", "view"),
    [
        ("d3", 16, View("rate:8", "squash:0.8")),
        ("stall", 16, View("rate:8", "squash")),
        ("restrav", 24, View("rate:11.5", "squash")),
    ],
)
def test_a_recipe_sees_what_its_publisher_shows_on_its_own_trunk_and_on_any_other(name, num_frames, view):
    published, other = DETECTORS.get(name), DETECTORS.get(f"{name}:efficientnet_lite0")
    for spec in (published, other):
        assert (spec.num_frames, View(spec.frame_sampling, spec.frame_fit), spec.side) == (num_frames, view, 224)
        assert DETECTORS.of_features(spec.name) == "embedding"
    assert (published.brings_weights, other.brings_weights) == (False, True)
    modules = {f"fvc_lib.detectors.{name}", "fvc_lib.detectors.frames.efficientnet_lite0"}
    assert set(DETECTORS.declared_in(other.name)) == modules
    with pytest.raises(UsageError, match="has no trunk"):
        build_detector(RunConfig(model=f"{name}:forensic_svm"))


def test_d3_is_the_deviation_of_changes_of_distances_and_calls_even_motion_fake():
    features = _features(6, 5, 0)
    distances = [[math.dist(video[place], video[place + 1]) for place in range(T - 1)] for video in features]
    wanted = np.array([np.std(np.subtract(each[1:], each[:-1]), ddof=1) for each in distances])
    fitted = [D3.fit(features, np.array(labels), np.ones(6), {}) for labels in ([0, 1] * 3, [1, 0] * 3)]
    assert fitted[0] == fitted[1]
    logits = D3.logits(fitted[0], features)
    np.testing.assert_allclose(logits, (np.median(wanted) - wanted) / np.std(wanted), rtol=1e-9)


@pytest.mark.parametrize(("number", "width"), [(40, 6), (9, 30)])
def test_stall_is_the_mean_share_of_reals_no_more_likely_than_frames_and_their_changes(number, width):
    real, fake, new = _features(number, width, 1), _features(7, width, 2), _features(20, width, 3, 0.5)
    new[0], new[1, 4] = new[0, :1], new[1, 3]  # a still; and a frame that is shown twice

    def density(vectors):
        variances, directions = np.linalg.eigh(np.cov(vectors.T))
        mean, rank = vectors.mean(0), min(width, len(vectors) - 1)
        scaled = directions[:, -rank:] / np.sqrt(variances[-rank:] + 1e-5)
        return lambda vector: -0.5 * (rank * math.log(2 * math.pi) + sum(((vector - mean) @ scaled) ** 2))

    def steps(video):
        return [step / math.hypot(*step) for step in np.diff(video, axis=0) if np.any(step)]

    of_frame, of_step = density(real[:, T // 2]), density(np.concatenate([steps(video) for video in real]))
    known, asked = (
        np.array([(max(map(of_frame, video)), min(map(of_step, steps(video)), default=math.inf)) for video in videos])
        for videos in (real, new)
    )
    wanted = [(known <= likelihoods).mean() for likelihoods in asked]
    arrays = STALL.fit(np.concatenate([real, fake]), np.repeat([0, 1], [number, 7]), np.ones(number + 7), {})
    np.testing.assert_allclose(STALL.logits(arrays, new), 0.5 - np.array(wanted), rtol=1e-12)
    without = STALL.fit(real, np.zeros(number, int), np.ones(number), {})
    assert all(np.array_equal(arrays[name], without[name]) for name in arrays)  # fakes have no influence


def test_restrav_describes_a_path_by_distances_and_angles():
    path = np.random.default_rng(4).normal(size=(24, 9)).cumsum(0)
    steps = np.diff(path, axis=0)
    distances = np.array([math.hypot(*step) for step in steps])
    angles = np.degrees(np.arccos((steps[1:] * steps[:-1]).sum(1) / (distances[1:] * distances[:-1])))
    moments = [number(each) for each in (distances, angles) for number in (np.mean, np.min, np.max, np.var)]
    found = path_numbers(torch.from_numpy(path)[None])[0].numpy()
    np.testing.assert_allclose(found, [*distances[:7], *angles[:6], *moments], rtol=1e-9)


def test_restrav_s_classifier_has_two_hidden_layers_learns_and_is_the_same_on_every_fit():
    labels = np.arange(400) % 2
    values = np.random.default_rng(5).normal(size=(400, 21)) * 5 + 40 + 8 * labels[:, None]
    before = torch.get_rng_state()
    arrays, again = (RESTRAV.fit(values, labels, np.ones(400), RESTRAV.candidates[0]) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)
    hidden = (values - values.mean(0)) / (values.std(0) + 1e-8)
    for layer in (0, 2):
        hidden = np.maximum(hidden @ arrays[f"{layer}.weight"].T + arrays[f"{layer}.bias"], 0)
    assert [arrays[f"{layer}.weight"].shape for layer in (0, 2, 4)] == [(64, 21), (32, 64), (1, 32)]
    logits = RESTRAV.logits(arrays, values)
    np.testing.assert_allclose(logits, (hidden @ arrays["4.weight"].T + arrays["4.bias"])[:, 0], atol=1e-5)
    assert ((logits > 0) == labels).mean() > 0.95


@pytest.mark.parametrize(("name", "shape"), [("d3", (8, 1280)), ("restrav", (1, 21))])
def test_a_new_clip_is_judged_as_in_training(name, shape):
    """The score of a clip's frames is that of its stored features, with all frames where the estimator wants them."""
    config = RunConfig(model=f"{name}:efficientnet_lite0", fixed_size=32, num_frames=8)
    frames = torch.randint(0, 256, (4, 8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features = build_detector(config).trunk(frames)
    assert features.shape[1:] == shape
    source = EmbeddedClips(SimpleNamespace(features=lambda _: features, feature_shape=shape), config)
    values = source.of([SimpleNamespace(video_id="a", augmentation_index=0)] * 4)
    estimator = DETECTORS.get(config.model).estimator
    arrays = estimator.fit(values, np.array([0, 1, 0, 1]), np.ones(4), estimator.candidates[0])
    with torch.inference_mode():
        weights = {key: torch.from_numpy(np.asarray(array)) for key, array in arrays.items()}
        found = probe(build_detector(config).trunk, config, Path("fold_0"), weights)(frames).numpy()
    np.testing.assert_allclose(found, estimator.logits(arrays, values), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("d3:efficientnet_lite0", (8, 5)), ("stall:efficientnet_lite0", (8, 5)), ("restrav:efficientnet_lite0", (21,)),
        ("forensic_svm", (5,)), ("forensic_boosting", (5,)),
    ],
)  # fmt: skip
def test_a_stored_model_without_an_array_or_of_other_features_is_refused_with_file_and_array(name, shape):
    config, labels = RunConfig(model=name), np.arange(60) % 2
    values = np.random.default_rng(1).normal(size=(60, *shape)) + labels.reshape(-1, *[1] * len(shape))
    estimator = DETECTORS.get(name).estimator
    weights = {
        key: torch.from_numpy(np.asarray(array))
        for key, array in estimator.fit(values, labels, np.ones(60), estimator.candidates[0]).items()
    }
    path, size = Path("bundle/fold_0.safetensors"), shape[-1]
    assert arrays_of(path, weights, config, {"": size}).keys() == weights.keys()
    for absent in weights:
        rest = {key: array for key, array in weights.items() if key != absent}
        with pytest.raises(UsageError, match=f"fold_0.safetensors': .* '{absent}'. Get the file"):
            arrays_of(path, rest, config, {"": size})
    if not name.startswith("d3"):  # which measures any number of features
        with pytest.raises(UsageError, match=f"fold_0.safetensors': its arrays do not fit {size - 1} features: "):
            arrays_of(path, weights, config, {"": size - 1})


def test_what_a_model_on_features_over_time_cannot_use_is_refused():
    for wrong in ({"clips_per_video": 2}, {"wavelet_bands": 0.1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            refuse_settings(RunConfig(model="stall:efficientnet_lite0", **wrong))
    refuse_settings(RunConfig(model="probe:efficientnet_lite0", clips_per_video=2))


@pytest.mark.parametrize(("name", "fewest"), [("d3", 4), ("stall", 2), ("restrav", 8)])
def test_fewer_frames_than_a_recipe_needs_are_refused_before_a_video_is_read(name, fewest):
    refuse_settings(RunConfig(model=f"{name}:efficientnet_lite0", num_frames=fewest))
    with pytest.raises(UsageError, match=f"num_frames: got {fewest - 1}, .*{fewest} or more"):
        refuse_settings(RunConfig(model=f"{name}:efficientnet_lite0", num_frames=fewest - 1))
