"""``repeats``: neighbouring frames compared one by one, and missing values."""

import numpy as np
import pytest

from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import TILE, Run
from fvc_lib.video.features.repeats import measure


def run_of(luma):
    """A ``Run`` of luma (L, N, 64, 64); small is every eighth pixel of the first tile."""
    luma = np.asarray(luma, np.float32)
    return Run(luma, luma[:, 0, ::8, ::8] if luma.shape[1] else np.zeros((len(luma), 8, 8), np.float32))


def test_pairs_are_compared_one_by_one():
    frames = np.random.default_rng(9).normal(120, 20, (5, 2, TILE, TILE)).astype(np.float32)
    frames[2] = frames[1]
    frames[4, 0] = frames[3, 0]
    got = measure(run_of(frames))
    assert got["equal"].tolist() == [0, 1, 0, 0]
    assert got["equal_tiles"].tolist() == [0, 1, 0, 0.5]
    differences = [np.abs(frames[n + 1].astype(float) - frames[n]).mean() for n in range(4)]
    np.testing.assert_allclose(got["difference"], differences, rtol=1e-5)
    logarithm = np.sort(np.log2(np.add(differences, 0.05)))
    assert got["dip"] == pytest.approx([np.median(logarithm[1:]) - logarithm[0]], rel=1e-5)
    assert got["jump"] == pytest.approx([logarithm[-1] - np.median(logarithm[:-1])], rel=1e-4)
    for changed in (frames + 30, frames[..., ::-1]):  # brighter, and mirrored
        for name, values in measure(run_of(changed)).items():
            np.testing.assert_allclose(values, got[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(("num_frames", "num_tiles", "missing"), [
    (2, 2, {"dip", "jump"}), (3, 2, set()), (3, 0, {"equal_tiles", "difference", "dip", "jump"}),
])  # fmt: skip
def test_values_without_frames_or_tiles_to_compare_are_missing(num_frames, num_tiles, missing):
    family = FEATURES.get("repeats")
    pooled = family.pooled([measure(run_of(np.random.default_rng(2).normal(120, 20, (num_frames, num_tiles, 64, 64))))])
    assert {each.name for each in family.features if np.isnan(pooled[f"repeats_{each.name}_mean"])} == missing
