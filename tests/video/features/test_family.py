import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import FEATURES
from fvc_lib.video.features.family import (
    GRID,
    POOLS,
    TILE,
    Feature,
    FeatureFamily,
    Run,
    Stream,
    families_named,
    pool,
    tile_corners,
)

sides = st.integers(1, 1200)
values = st.one_of(st.just(float("nan")), st.floats(-1e3, 1e3, width=32))


@settings(max_examples=50)
@given(sides, sides)
def test_tiles_lie_on_the_grid_within_the_frame_and_never_overlap(height, width):
    corners = tile_corners(height, width)
    assert (corners % GRID == 0).all()
    assert (corners + TILE <= [height, width]).all()
    assert len(corners) == min(3, height // TILE) * min(3, width // TILE) <= 9
    apart = np.abs(corners[:, None] - corners).max(2)
    assert (apart[~np.eye(len(corners), dtype=bool)] >= TILE).all()


def test_tiles_reach_from_one_border_of_the_frame_to_the_other():
    corners = tile_corners(480, 850)
    assert corners.min(0).tolist() == [0, 0]
    assert corners.max(0).tolist() == [480 - TILE, (850 - TILE) // GRID * GRID]
    assert tile_corners(100, 70).tolist() == [[16, 0]]  # the middle, as near as the grid allows
    assert not len(tile_corners(63, 80))


@settings(max_examples=30)
@given(st.lists(st.lists(values, max_size=30), min_size=1, max_size=4))
def test_pools_are_numpys_statistics_of_the_finite_values(rows):
    pooled = pool([np.array(row, np.float64) for row in rows])
    for row, got in zip(rows, pooled, strict=True):
        finite = np.array(row)[np.isfinite(row)]
        if not finite.size:
            assert np.isnan(got).all()
            continue
        wanted = [finite.mean(), finite.std(), *np.quantile(finite, [0.1, 0.9]), finite.min(), finite.max()]
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)
    assert list(POOLS) == ["mean", "spread", "low", "high", "least", "most"]


def test_columns_of_a_stream_have_no_pool_and_infinity_counts_as_missing():
    features = (Feature("a", "bytes", "A."), Feature("b", "share", "B."))
    stream = FeatureFamily("packets", "none", features, lambda _: {}, "stream")
    missing = float("nan")
    pooled = stream.pooled([{"a": 3, "b": float("inf")}])
    assert pooled == pytest.approx({"packets_a": 3, "packets_b": missing}, nan_ok=True)
    assert stream.pooled([]) == pytest.approx({"packets_a": missing, "packets_b": missing}, nan_ok=True)
    tiles = FeatureFamily("light", "none", features[:1], lambda *_: {}, "tiles")
    assert tiles.pooled([{"a": [1.0, np.nan]}, {"a": [4.0]}])["light_a_mean"] == 2.5
    with pytest.raises(ValueError, match="light"):
        tiles.pooled([{"b": [1.0]}])


def test_families_are_chosen_by_name_and_a_wrong_name_is_told():
    assert [family.name for family in families_named("spectrum, sharpness,spectrum")] == ["sharpness", "spectrum"]
    assert [family.name for family in families_named("all")] == sorted(FEATURES.names())
    with pytest.raises(UsageError, match="'sharpness'"):
        families_named("sharpnes")
    with pytest.raises(UsageError, match="feature_families"):
        families_named(" , ")


@pytest.mark.parametrize("name", FEATURES.names())
def test_every_family_declares_its_columns_and_measures_what_it_declares(name):
    family = FEATURES.get(name)
    assert family.paper
    for feature in family.features:
        assert feature.unit
        assert feature.meaning.endswith(".")
        assert feature.name.isidentifier()
    of_others = [column for other in FEATURES.names() if other != name for column in FEATURES.get(other).columns()]
    assert not set(family.columns()) & set(of_others)
    draw = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = [measured_on(family, draw, *shape) for shape in ((4, 3), (1, 2), (2, 0), (1, 0))]
    family.pooled(measured)
    if family.of != "stream":  # what packets do not tell is missing
        assert np.isfinite(list(family.pooled(measured[:1]).values())).all()


def measured_on(family, draw, num_frames, num_tiles):
    luma = draw.integers(0, 256, (num_frames, num_tiles, TILE, TILE)).astype(np.float32)
    run = Run(luma, draw.uniform(0, 255, (num_frames, 9, 16)).astype(np.float32))
    numbers = np.arange(num_frames)
    stream = Stream("h264", draw.integers(1, 9999, num_frames), numbers == 0, numbers / 25.0)
    return family.measure({"tiles": run.luma[0], "pairs": run, "stream": stream}[family.of])
