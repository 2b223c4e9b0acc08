"""Unfamiliar videos: flagged at the stated rate by their features, and stills only where nothing moves."""

import numpy as np
import pytest

from fvc_lib.tasks.video.verdicts.unfamiliar import UNFAMILIAR_AT, FeatureDistance, Neighbours, is_frozen

NUM_FEATURES = 12


def drawn(random: np.random.Generator, num_groups: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Features of three videos of each group, which are much alike, and their groups."""
    centres = random.normal(shift, 1.0, (num_groups, 1, NUM_FEATURES))
    features = centres + random.normal(0, 0.1, (num_groups, 3, NUM_FEATURES))
    return features.reshape(-1, NUM_FEATURES).astype(np.float32), np.repeat(np.arange(num_groups), 3)


def reference(random: np.random.Generator, num_groups: int) -> FeatureDistance:
    features, groups = {}, {}
    for fold in range(2):
        rows, of_rows = drawn(random, num_groups)
        features[fold], groups[fold] = rows * (1 + 10 * fold), of_rows + fold * num_groups  # each of its own scale
    return FeatureDistance(features, groups)


def of_new(features: np.ndarray) -> dict[int, np.ndarray]:
    return {fold: features * (1 + 10 * fold) for fold in range(2)}


def test_familiar_videos_are_flagged_at_most_at_the_stated_rate_and_far_ones_always():
    random = np.random.default_rng(0)
    flagged = []
    for _ in range(60):
        known = reference(random, 60)
        new = drawn(random, 20)[0][::3]  # one of each group
        flagged += (known.quantiles(of_new(new)) <= UNFAMILIAR_AT).tolist()
    assert 0 < np.mean(flagged) <= UNFAMILIAR_AT + 0.01  # 1,200 draws: a deviation of 0.004
    far = known.quantiles(of_new(drawn(random, 20, shift=6)[0]))
    assert far.tolist() == pytest.approx([1 / 121] * 60)


@pytest.mark.parametrize(("groups_per_fold", "can"), [(24, False), (25, True)])
def test_few_groups_never_show_that_a_video_is_unlike_them(groups_per_fold, can):
    known = reference(np.random.default_rng(1), groups_per_fold)
    (far,) = known.quantiles(of_new(np.full((1, NUM_FEATURES), 50, np.float32)))
    assert bool(known.reasons(far)) == can
    assert ("48 groups are too few, at least 49" in known.limit()) != can


def test_the_distance_is_that_of_a_plain_loop():
    features, groups = drawn(np.random.default_rng(2), 4)
    own = Neighbours(features).distances(features, groups[:, None] == groups)
    scaled = (features - features.mean(0)) / features.std(0)
    for place, one in enumerate(scaled):
        others = [np.linalg.norm(one - each) for each, of in zip(scaled, groups, strict=True) if of != groups[place]]
        assert own[place] == pytest.approx(np.mean(sorted(others)[:5]), rel=1e-4)
    assert np.isinf(Neighbours(features[:3]).distances(features[:3], np.ones((3, 3), bool))).all()


@pytest.mark.parametrize("size", [4, 20])
def test_what_moves_in_one_place_is_no_still(size):
    """As in a talking head: a mouth of some pixels in a picture with bars, the rest of which stays as it is."""
    frames = np.full((1, 8, 3, 112, 112), 90, np.uint8)
    frames[..., :30, :] = frames[..., 82:, :] = 0  # bars of a letterboxed picture
    assert is_frozen(frames)
    frames[:, ::2, :, 60 : 60 + size, 50 : 50 + size] = 180
    assert not is_frozen(frames)
